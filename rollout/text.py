"""The text of one growing completion, and the stop strings in it.

Each token costs one decode of a short window, however long the completion is. The text is that of
``tokenizer.decode(completion.token_ids)`` with special tokens spelled out, so that offsets can be
used on it; the prompt is not part of it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not (yet) a whole character
GROUP_LEN = 6
"""Tokens after which the window moves on: fewer means more second decodes, more means longer ones."""
MAX_WINDOW_LEN = 32
"""Tokens after which the window moves on even without a whole character at its end."""
MAX_TAIL_CHARS = 3
"""Characters that may still change: an unfinished UTF-8 character has at most 3 bytes, and decoders
write one replacement character for all of them or one for each."""


class TextTokenizer(Protocol):
    """What is needed of a tokenizer. Those of transformers have it (they also decode lists of lists,
    hence ``Any``)."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> Any: ...


class StopTextFinder:
    """Takes a completion's tokens one by one and tells when a stop string is complete.

    Decoding tokens alone and joining the texts is wrong: a leading space may vanish, a character may
    be spread over tokens. So a window over the last tokens is decoded, and only what is new in it is
    taken. The window begins with the last group of tokens, whose text is already known::

        tokens   ... | known group | new tokens |
        text     ...   <- emitted ->  new text    + unfinished tail

    Example::

        finder = StopTextFinder(tokenizer, ("\\n\\n", "END"))
        finder.push(token_id, armed=True)  # None, or ("END", 17)
    """

    def __init__(self, tokenizer: TextTokenizer, stop_strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._num_recent = max((len(stop) for stop in self._stop_strings), default=1) - 1
        self._window: list[int] = []
        self._num_known = 0  # tokens of the window in the known group
        self._known_chars = 0  # characters of the window's text that are the known group's
        self._num_emitted = 0  # characters of the window's text that are in _parts
        self._parts: list[str] = []
        self._num_chars = 0  # characters in _parts
        self._recent = ""  # the last characters of _parts: a stop string may begin in them
        self._tail = ""

    @property
    def text(self) -> str:
        """The decoded completion so far, an unfinished character at its end included."""
        return "".join(self._parts) + self._tail

    def push(self, token_id: int, *, armed: bool) -> tuple[str, int] | None:
        """Take one more token; the stop string it completed and where that begins, if any.

        Of several, the one that begins first, then the longest. What is completed while not
        ``armed`` never counts.
        """
        self._window.append(token_id)
        text = self._decode(self._window)
        final = len(text.rstrip(REPLACEMENT))
        new = self._emit(text, final)
        match = self._find(new) if armed and new else None
        self._recent = self._last(self._recent + new)
        self._tail = text[self._num_emitted :]
        self._move_window(text)
        return match

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _emit(self, text: str, final: int) -> str:
        """Move the window's text up to ``final`` to the parts; what is new of it."""
        new = text[self._num_emitted : final]
        if new:
            self._parts.append(new)
            self._num_chars += len(new)
            self._num_emitted = final
        return new

    def _find(self, new: str) -> tuple[str, int] | None:
        """The first, then longest, stop string that ends in ``new``."""
        text = self._recent + new
        old_len = len(self._recent)
        best: tuple[int, int, str] | None = None
        for stop in self._stop_strings:
            begin = text.find(stop, max(0, old_len - len(stop) + 1))
            if begin >= 0 and (best is None or (begin, -len(stop)) < best[:2]):
                best = (begin, -len(stop), stop)
        return None if best is None else (best[2], self._num_chars - len(text) + best[0])

    def _last(self, text: str) -> str:
        return text[max(0, len(text) - self._num_recent) :]

    def _move_window(self, text: str) -> None:
        """Forget the known group once enough whole characters came after it."""
        # a group without any text would be no left context: a leading space could vanish after it
        is_whole = self._known_chars < self._num_emitted == len(text)
        if is_whole and len(self._window) - self._num_known >= GROUP_LEN:
            group = self._window[self._num_known :]
            self._start_window(group, len(self._decode(group)))
        elif len(self._window) > MAX_WINDOW_LEN:
            self._force_window(text)

    def _force_window(self, text: str) -> None:
        """Move on amid bytes that make no text, so that no output can make a token expensive.

        The last tokens stay; both decodes end in the same unfinished character, if in any.
        """
        kept = self._window[-GROUP_LEN:]
        kept_text = self._decode(kept)
        num_tail = min(MAX_TAIL_CHARS, _num_replacements(text), _num_replacements(kept_text))
        new = self._emit(text, len(text) - num_tail)
        self._recent = self._last(self._recent + new)
        self._tail = text[len(text) - num_tail :]
        self._start_window(kept, len(kept_text) - num_tail)

    def _start_window(self, group: list[int], num_emitted: int) -> None:
        self._window = group
        self._num_known = len(group)
        self._known_chars = self._num_emitted = num_emitted


def _num_replacements(text: str) -> int:
    return len(text) - len(text.rstrip(REPLACEMENT))
