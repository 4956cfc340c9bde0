"""From logits to drawn tokens, each with the three numbers that a trainer needs.

Owns the chunks of a draw and the error of a row. What comes before the temperature is
:mod:`rollout.processing`, what after it :mod:`rollout.drawing`. Rows never meet: a token depends
on its own logits, params and noise only. Does not own the logits (never written to) or any random state
(see :mod:`rollout.noise`).

Legend: L rows of logits, D rows that are drawn, C rows of one chunk, V vocabulary.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor

from rollout.drawing import make_picker, mode_of, rows_of
from rollout.native import DrawKernels
from rollout.processing import process
from rollout.sampling_row import FLOAT32_MAX, FLOAT32_TINY, SamplingRow
from rollout.transfer import Readback
from rollout.types import DrawnToken, NonFiniteLogits

HOST_CHUNK = 2**21
"""Logits worked on at once on the CPU: 8 MB of float32 stay in the cache and in the allocator's pool."""
DEVICE_CHUNK = 2**25
"""The same on an accelerator, where launches cost more than memory traffic."""


class Draws:
    """Tokens that are being drawn: on the device at once, on the host when they are asked for."""

    def __init__(self, order: Sequence[int], table: Tensor, failures: Mapping[int, Exception]) -> None:
        """``table`` [D, 6] float64 has a line for each row of ``order``: what ``Picker.pick`` and then
        ``Picker.judge`` gave."""
        self._order = order
        self._table = table
        self._failures = failures
        self._readback = Readback(table)

    @property
    def failed(self) -> Set[int]:
        """Rows that are known to have an error before anything is read."""
        return self._failures.keys()

    @property
    def tokens(self) -> Tensor:
        """[D] int64 on the device, in the order of :attr:`places`."""
        return self._table[:, 0].long()

    @property
    def places(self) -> dict[int, int]:
        """Where in :attr:`tokens` the token of a row is; rows that draw none have no entry."""
        return {row: place for place, row in enumerate(self._order)}

    def wait(self) -> None:
        """Until the device has drawn."""
        self._readback.wait()

    def results(self) -> tuple[DrawnToken | Exception, ...]:
        """One token per row, or the error that this row alone has; waits for the device."""
        results: dict[int, DrawnToken | Exception] = {**self._failures}
        for i, numbers in zip(self._order, self._readback.wait().tolist(), strict=True):
            results[i] = _result(numbers, self._failures.get(i))
        return tuple(results[i] for i in range(len(results)))


def draw(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    logit_rows: Sequence[int] | None = None,
    kernels: DrawKernels | None = None,
) -> tuple[DrawnToken | Exception, ...]:
    """One token per row, or the error that this row alone has: :func:`launch_draw` and its results."""
    return launch_draw(logits, rows, logit_rows, kernels).results()


@torch.no_grad()
def launch_draw(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    logit_rows: Sequence[int] | None = None,
    kernels: DrawKernels | None = None,
) -> Draws:
    """Draw one token per row.

    ``logits`` is [L, V] of any float dtype and is not modified; ``rows[i]`` draws from
    ``logits[logit_rows[i]]`` (``None``: from ``logits[i]``), so several rows may share one.
    An entry of the results is an exception when its logits hold NaN or +inf or nothing finite, when a logits
    processor raised or returned a wrong shape, or when an id is outside the vocabulary. With
    ``kernels`` the passes over the vocabulary are made in compiled code.

    Rows are sorted by what they need, so that each chunk takes one path through the code; the
    results leave the device once, at the end. Rows without truncation and processing are drawn
    without waiting for the device.
    """
    sources = range(len(rows)) if logit_rows is None else logit_rows
    assert logits.ndim == 2 and logits.is_floating_point() and len(sources) == len(rows)
    vocab, num_logits = logits.shape[1], len(logits)
    assert all(0 <= source < num_logits for source in sources)
    failures = _id_errors(rows, vocab)
    kinds = {
        i: (row.is_processed, mode_of(kernels, row, vocab)) for i, row in enumerate(rows) if i not in failures
    }
    order = sorted(kinds, key=kinds.__getitem__)
    if not order:
        return Draws((), torch.empty((0, 6), dtype=torch.float64), failures)
    ordered, max_len = [rows[i] for i in order], _chunk_len(logits)
    picker = make_picker(kernels, logits, ordered, max_len)
    tables: list[Tensor] = []
    for start, stop in _chunks([kinds[i] for i in order], max_len):
        part, members = slice(start, stop), order[start:stop]
        is_processed, of_mode = kinds[members[0]]
        lines = [sources[i] for i in members]
        if is_processed:
            raw = rows_of(logits, lines).float().contiguous()
            scores, failed = process(raw, ordered[part])
            failures.update({members[c]: error for c, error in failed.items()})
            picks = picker.pick(scores, range(len(lines)), part, of_mode)
            judged = picker.judge(raw, picks[:, 0], part)
        else:
            picks = picker.pick(logits, lines, part, of_mode)
            judged = picks[:, 1::2]  # logprob and peak: the scores are the logits
        tables.append(torch.cat([picks, judged], dim=1))
    return Draws(order, tables[0] if len(tables) == 1 else torch.cat(tables), failures)


@torch.no_grad()
def score(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """Policy logprob of given tokens: float32 log_softmax(logits / temperature) at the target.

    ``logits`` [T, V] of any float dtype, ``targets`` [T] int64, ``temperature`` [T] float32 (0 counts
    as 1) -> [T] float32. Works through a few rows at a time, so memory does not grow with T.
    """
    assert logits.ndim == 2 and targets.shape == temperature.shape == logits.shape[:1]
    heat = torch.where(temperature == 0, 1.0, temperature.float()).clamp(FLOAT32_TINY, FLOAT32_MAX)
    out = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    step = _chunk_len(logits)
    for start in range(0, len(targets), step):
        part = slice(start, start + step)
        logprobs = torch.log_softmax(logits[part].float() / heat[part, None], dim=-1)
        out[part] = logprobs.gather(1, targets[part, None])[:, 0]
    return out


# ---- chunks: same kind of rows, bounded memory


def _chunk_len(logits: Tensor) -> int:
    budget = HOST_CHUNK if logits.device.type == "cpu" else DEVICE_CHUNK
    return max(1, budget // logits.shape[1])


def _chunks(kinds: Sequence[object], max_len: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of runs of equal kind, none longer than ``max_len``."""
    start = 0
    for stop in range(1, len(kinds) + 1):
        if stop == len(kinds) or kinds[stop] != kinds[start] or stop - start == max_len:
            yield start, stop
            start = stop


# ---- results and errors


def _id_errors(rows: Sequence[SamplingRow], vocab: int) -> dict[int, Exception]:
    """A ValueError for each row that names an id which the logits do not have."""
    errors: dict[int, Exception] = {}
    for i, row in enumerate(rows):
        for name, highest in row.highest_ids:
            if highest >= vocab:
                errors[i] = ValueError(
                    f"{name} id {highest} is outside the vocabulary of {vocab} logits; "
                    f"allowed: 0 to {vocab - 1}; check that model and tokenizer belong together"
                )
                break
    return errors


def _result(numbers: Sequence[float], failure: Exception | None) -> DrawnToken | Exception:
    """One line of the table of :class:`Draws` as the entry of its row."""
    token, logprob, log_kept, peak, policy_logprob, raw_peak = numbers
    if not math.isfinite(raw_peak):
        return NonFiniteLogits(
            f"the model's logits hold {_describe(raw_peak)}; check the weights (a diverged optimizer step?), "
            "the dtype (overflow in float16?) and this request's prompt ids"
        )
    if failure is not None:
        return failure
    if not math.isfinite(peak):
        return NonFiniteLogits(
            f"after bias, penalties, masks and processors the logits hold {_describe(peak)}; check "
            "logit_bias, repetition_penalty, min_new_tokens and logits_processors of this request"
        )
    return DrawnToken(int(token), min(logprob - log_kept, 0.0), policy_logprob, log_kept)


def _describe(peak: float) -> str:
    if math.isnan(peak):
        return "NaN"
    return "+inf" if peak > 0 else "no finite value"
