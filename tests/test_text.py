"""Incremental text and stop strings, against decoding everything again at each token."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.text import MAX_WINDOW_LEN, StopTextFinder


class ByteTokenizer:
    """Token ``i`` stands for ``pieces[i]``; broken UTF-8 becomes U+FFFD, as in byte-level BPE."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.decoded_lens: list[int] = []

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        assert not skip_special_tokens and not clean_up_tokenization_spaces
        self.decoded_lens.append(len(token_ids))
        return b"".join(self.pieces[i] for i in token_ids).decode("utf-8", "replace")


class SpaceStrippingTokenizer(ByteTokenizer):
    """Drops one leading space of whatever it decodes, as SentencePiece tokenizers do."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return super().decode(token_ids, **options).removeprefix(" ")


def _full(tokenizer: Any, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _first_stop(
    tokenizer: Any, token_ids: list[int], stops: list[str], armed_from: int = 0
) -> tuple[int, str, int] | None:
    """The slow twin: (number of tokens, stop string, offset), looking at the whole text each time."""
    seen: set[tuple[int, str]] = set()
    for count in range(1, len(token_ids) + 1):
        text = _full(tokenizer, token_ids[:count])
        found = {(i, stop) for stop in stops for i in range(len(text)) if text.startswith(stop, i)}
        new = sorted(found - seen, key=lambda match: (match[0], -len(match[1])))
        if new and count > armed_from:
            return count, new[0][1], new[0][0]
        seen = found
    return None


def _push_until_stop(
    tokenizer: Any, token_ids: list[int], stops: list[str], armed_from: int = 0
) -> tuple[int, str, int] | None:
    finder = StopTextFinder(tokenizer, stops)
    for count, token_id in enumerate(token_ids, start=1):
        match = finder.push(token_id, armed=count > armed_from)
        if match is not None:
            return (count, *match)
    return None


# few letters, so that stop strings occur; 1, 2, 3 and 4 bytes long in UTF-8
letters = st.text(alphabet="ab \n\u00e9\u20ac\U0001f600", max_size=40)
stop_strings = st.lists(
    st.text(alphabet="ab \n\u00e9\u20ac\U0001f600", min_size=1, max_size=4), min_size=1, max_size=3
)


@st.composite
def split_bytes(draw: st.DrawFn, content: bytes) -> list[bytes]:
    """The bytes in pieces of 1 to 4, cut anywhere, also within a character."""
    pieces = []
    while content:
        length = draw(st.integers(1, 4))
        pieces.append(content[:length])
        content = content[length:]
    return pieces


@given(st.data(), st.text(max_size=60))
def test_text_equals_full_decode(data: st.DataObject, text: str) -> None:
    tokenizer = ByteTokenizer(data.draw(split_bytes(text.encode())))
    finder = StopTextFinder(tokenizer, ["never found"])
    for count in range(1, len(tokenizer.pieces) + 1):
        finder.push(count - 1, armed=True)
        assert finder.text == _full(tokenizer, list(range(count)))
    assert finder.text == text


@given(st.data(), st.binary(max_size=200))
def test_text_of_arbitrary_bytes_equals_full_decode(data: st.DataObject, content: bytes) -> None:
    tokenizer = ByteTokenizer(data.draw(split_bytes(content)))
    finder = StopTextFinder(tokenizer, ["never found"])
    for count in range(1, len(tokenizer.pieces) + 1):
        finder.push(count - 1, armed=True)
        assert finder.text == _full(tokenizer, list(range(count)))


@given(st.data(), letters, stop_strings)
def test_stop_is_found_with_the_token_that_completes_it(
    data: st.DataObject, text: str, stops: list[str]
) -> None:
    tokenizer = ByteTokenizer(data.draw(split_bytes(text.encode())))
    armed_from = data.draw(st.integers(0, 10))
    ids = list(range(len(tokenizer.pieces)))
    assert _push_until_stop(tokenizer, ids, stops, armed_from) == _first_stop(
        tokenizer, ids, stops, armed_from
    )


@given(st.lists(st.sampled_from([" a", " ", "b", " ab"]), max_size=40), stop_strings)
def test_leading_spaces_are_kept(words: list[str], stops: list[str]) -> None:
    tokenizer = SpaceStrippingTokenizer([word.encode() for word in words])
    finder = StopTextFinder(tokenizer, ["never found"])
    ids = list(range(len(words)))
    for token_id in ids:
        finder.push(token_id, armed=True)
    assert finder.text == "".join(words).removeprefix(" ")
    assert _push_until_stop(tokenizer, ids, stops) == _first_stop(tokenizer, ids, stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        ([b"a", b"EN", b"D"], ["END"], (3, "END", 1)),  # across tokens
        ([b"a", b"xENDy"], ["END"], (2, "END", 2)),  # within a token, more text after it
        ([b"xEND", b"END"], ["END"], (1, "END", 1)),  # once
        ([b"a\n", b"\nb"], ["b", "\n\n"], (2, "\n\n", 1)),  # the one that begins first
        ([b"ab", b"cd"], ["bc", "bcd"], (2, "bcd", 1)),  # from one place, the longest
        ([b"abc"], ["b", "abc"], (1, "abc", 0)),
        ([b"a\xe2", b"\x82", b"\xac!"], ["\u20ac"], (3, "\u20ac", 1)),  # text later than its tokens
        ([b"END\xe2", b"\x82\xac"], ["END"], (1, "END", 0)),  # text before an unfinished character
        ([b"EN", b"", b"", b"D"], ["END"], (4, "END", 0)),  # tokens without text
        ([b"EN", b"d"], ["END"], None),
    ],
)
def test_literal_stops(pieces: list[bytes], stops: list[str], expected: tuple[int, str, int] | None) -> None:
    tokenizer = ByteTokenizer(pieces)
    assert _push_until_stop(tokenizer, list(range(len(pieces))), stops) == expected


def test_what_was_completed_unarmed_never_counts() -> None:
    tokenizer = ByteTokenizer([b"END", b" and ", b"EN", b"D"])
    finder = StopTextFinder(tokenizer, ["END"])
    assert finder.push(0, armed=False) is None
    assert finder.push(1, armed=True) is None
    assert finder.push(2, armed=False) is None
    assert finder.push(3, armed=True) == ("END", 8)  # begun unarmed, completed armed


def test_a_token_costs_the_same_however_long_the_text() -> None:
    num_tokens = 3000
    tokenizer = ByteTokenizer([b"ab "] * num_tokens)
    finder = StopTextFinder(tokenizer, ["END"])
    for token_id in range(num_tokens):
        finder.push(token_id, armed=True)
    assert finder.text == "ab " * num_tokens
    assert len(tokenizer.decoded_lens) < 1.25 * num_tokens
    assert max(tokenizer.decoded_lens) <= 12


@pytest.mark.parametrize("piece", [b"\x80", b"\xf0\x9f\x98", b"\x82\xac\xe2", b""])
def test_bytes_that_make_no_text_stay_cheap(piece: bytes) -> None:
    """A character that never ends would be held back forever, with all the tokens after it."""
    tokenizer = ByteTokenizer([piece] * 200 + [b" END"])
    finder = StopTextFinder(tokenizer, ["END"])
    ids = list(range(201))
    matches = [finder.push(token_id, armed=True) for token_id in ids]
    assert max(tokenizer.decoded_lens) <= MAX_WINDOW_LEN + 1
    text = _full(tokenizer, ids)
    assert finder.text == text
    assert matches == [None] * 200 + [("END", text.index("END"))]


TEXTS = [
    "Hello world! It's 3.14 o'clock.\n\n  def f(x):\n\treturn x  # END\n",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\n\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 na\u00efve caf\u00e9 \u0915\u094d\u0937 \U0001f600 END",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nEND<|im_end|>",
]
STOPS = [
    ["END"],
    ["\n\n", "\n"],
    ["\u754c\u3002"],
    ["\U0001f600", "\u00e9 "],
    ["<|im_end|>"],
    ["ha", "|>\n<|"],
]


@pytest.mark.parametrize("text", TEXTS)
def test_real_tokenizer(demo_tokenizer: Any, text: str) -> None:
    ids = demo_tokenizer(text, add_special_tokens=False)["input_ids"]
    finder = StopTextFinder(demo_tokenizer, ["never found"])
    for count, token_id in enumerate(ids, start=1):
        finder.push(token_id, armed=True)
        assert finder.text == _full(demo_tokenizer, ids[:count])
    assert finder.text == text
    for stops in STOPS:
        assert _push_until_stop(demo_tokenizer, ids, stops) == _first_stop(demo_tokenizer, ids, stops)


def test_real_tokenizer_on_random_tokens(demo_tokenizer: Any) -> None:
    # half of them from the 512 lowest ids, where the single bytes are
    ids = [(i * 7919) % (512 if i % 2 else 49152) for i in range(1, 1500)]
    finder = StopTextFinder(demo_tokenizer, ["never found"])
    for token_id in ids:
        finder.push(token_id, armed=True)
    assert finder.text == _full(demo_tokenizer, ids)
