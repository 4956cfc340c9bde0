"""Files of prompts in, files of completions out: one JSON object per line.

A prompts file is checked line by line before any model is loaded; a completions file gets its name
only when it is whole. This room knows nothing of flags and nothing of the engine.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from rollout.requests import Prompt
from rollout.types import Completion, SamplingParams

STDIO = "-"
"""A file name that means stdin or stdout."""

LINE_PARAMS = tuple(f.name for f in fields(SamplingParams) if f.name != "logits_processors")
"""Sampling parameters that a line of the prompts file can set: those that JSON can write."""
PROMPT_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "prompt": ("a string", lambda value: isinstance(value, str)),
    "prompt_ids": ("a list of whole numbers", lambda value: _is_list_of(int, value)),
    "messages": ("a list of chat messages, which are objects", lambda value: _is_list_of(dict, value)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One line of the prompts file, checked as far as that goes without the model."""

    where: str
    """File name and line number, for messages."""
    id: str | int
    prompt: Prompt
    params: SamplingParams


def read_prompts(source: str, base: Mapping[str, Any]) -> list[PromptLine]:
    """The lines of a prompts file (``-``: stdin); blank ones do not count.

    Args:
        source: a file name, or ``-``.
        base: fields of ``SamplingParams`` for lines that do not set them.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is wrong, named with its number, or there is none.
    """
    name = "<stdin>" if source == STDIO else source
    lines = []
    with nullcontext(sys.stdin.buffer) if source == STDIO else open(source, "rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                try:
                    lines.append(_prompt_line(raw.strip(), name, number, base))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{name}, line {number}: {error}") from error
    if not lines:
        raise ValueError(f"{name} holds no prompts; give one JSON object per line")
    return lines


def _prompt_line(raw: bytes, name: str, number: int, base: Mapping[str, Any]) -> PromptLine:
    try:
        line = json.loads(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON at column {error.colno}: {error.msg}") from error
    if not isinstance(line, dict):
        raise TypeError(f"{line!r:.40} is no object; write {{...}} with one of {', '.join(PROMPT_KINDS)}")
    _refuse_unknown("keys", line, (*PROMPT_KINDS, "id", "params"))
    kinds = [kind for kind in PROMPT_KINDS if kind in line]
    if len(kinds) != 1:
        given = " and ".join(kinds) or "no prompt"
        raise ValueError(f"{given} given; give exactly one of {', '.join(PROMPT_KINDS)}")
    prompt, (wanted, is_right) = line[kinds[0]], PROMPT_KINDS[kinds[0]]
    if not is_right(prompt):
        raise TypeError(f"{kinds[0]}={prompt!r:.40} is wrong; give {wanted}")
    line_id, params = line.get("id", number), line.get("params", {})
    if isinstance(line_id, bool) or not isinstance(line_id, (str, int)):
        raise TypeError(f"id={line_id!r:.40} is wrong; give a string or a whole number")
    if not isinstance(params, dict):
        raise TypeError(f"params={params!r:.40} is wrong; give an object of sampling parameters")
    _refuse_unknown("params", params, LINE_PARAMS)
    if isinstance(params.get("logit_bias"), dict):  # the keys of JSON are strings
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    where = f"{name}, line {number}"
    return PromptLine(where=where, id=line_id, prompt=prompt, params=SamplingParams(**{**base, **params}))


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _refuse_unknown(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"unknown {what} {unknown}; known: {', '.join(known)}")


@contextmanager
def open_output(target: str) -> Iterator[TextIO]:
    """Where to write; a file gets its name only when the block has ended well."""
    if target == STDIO:
        yield sys.stdout
        sys.stdout.flush()
        return
    path = Path(target).resolve()  # a link stays a link
    if not path.parent.is_dir():
        raise ValueError(f"--out {target}: the folder {path.parent} does not exist; make it first")
    if path.exists() and not path.is_file():
        raise ValueError(f"--out {target} is no regular file; give a file name, or - for stdout")
    # beside its final place: a rename is only atomic within one file system
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def completion_record(line_id: str | int, completion: Completion, text: Any) -> dict[str, Any]:
    return {
        "id": line_id,
        "index": completion.index,
        "prompt_ids": completion.prompt_ids,
        "token_ids": completion.token_ids,
        "text": text,
        "logprobs": _finite(completion.logprobs),
        "policy_logprobs": _finite(completion.policy_logprobs),
        "log_kept_mass": _finite(completion.log_kept_mass),
        "versions": completion.versions,
        "finish_reason": completion.finish_reason,
        "stop_match": completion.stop_match,
        "error": None if completion.error is None else named_error(completion.error),
        "cached_tokens": completion.cached_tokens,
    }


def _finite(values: Sequence[float]) -> list[float | None]:
    """JSON has no infinity and no NaN: they become null."""
    return [value if math.isfinite(value) else None for value in values]


def named_error(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}"
