"""From logits to drawn tokens, each with the three numbers that a trainer needs.

Owns temperature, the draw and the error of a row. What comes before the temperature is
:mod:`rollout.processing`; truncated draws are :mod:`rollout.truncation`. Rows never meet: a token depends
on its own logits, params and noise only. Does not own the logits (never written to) or any random state
(see :mod:`rollout.noise`).

Legend: L rows of logits, R rows drawn in a call, C rows of one chunk, V vocabulary.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout.native import Kernels
from rollout.noise import uniforms
from rollout.processing import SamplingRow, process
from rollout.spread import BLOCK, Knobs, Spread, Spreader, invert, readable
from rollout.transfer import Readback, upload
from rollout.truncation import pick_truncated
from rollout.types import DrawnToken, NonFiniteLogits

HOST_CHUNK = 2**21
"""Logits worked on at once on the CPU: 8 MB of float32 stay in the cache and in the allocator's pool."""
DEVICE_CHUNK = 2**25
"""The same on an accelerator, where launches cost more than memory traffic."""
FLOAT32 = torch.finfo(torch.float32)


class Mode(Enum):
    """How the token is found once the scores are final."""

    GREEDY = "greedy"
    PLAIN = "plain"
    TRUNCATED = "truncated"


class Draws:
    """Tokens that are being drawn: on the device at once, on the host when they are asked for."""

    def __init__(self, order: Sequence[int], table: Tensor, failures: Mapping[int, Exception]) -> None:
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
    kernels: Kernels | None = None,
) -> tuple[DrawnToken | Exception, ...]:
    """One token per row, or the error that this row alone has: :func:`launch_draw` and its results."""
    return launch_draw(logits, rows, logit_rows, kernels).results()


@torch.no_grad()
def launch_draw(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    logit_rows: Sequence[int] | None = None,
    kernels: Kernels | None = None,
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
    vocab = logits.shape[1]
    assert all(0 <= source < len(logits) for source in sources)
    failures = _id_errors(rows, vocab)
    kinds = {i: (r.is_processed, _mode(r, vocab).value) for i, r in enumerate(rows) if i not in failures}
    order = sorted(kinds, key=kinds.__getitem__)
    if not order:
        return Draws((), torch.empty((0, 6), dtype=torch.float64), failures)
    knobs = _knobs([rows[i] for i in order], vocab, logits.device)
    max_len = _chunk_len(logits)
    spread = Spreader(kernels, logits, min(max_len, len(order)))
    tables: list[Tensor] = []
    for start, stop in _chunks([kinds[i] for i in order], max_len):
        members = order[start:stop]
        raw = _load(logits, [sources[i] for i in members])
        part = knobs.at(slice(start, stop))
        table, failed = _draw_chunk(raw, [rows[i] for i in members], part, spread)
        tables.append(table)
        failures.update({members[c]: error for c, error in failed.items()})
    return Draws(order, tables[0] if len(tables) == 1 else torch.cat(tables), failures)


@torch.no_grad()
def score(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """Policy logprob of given tokens: float32 log_softmax(logits / temperature) at the target.

    ``logits`` [T, V] of any float dtype, ``targets`` [T] int64, ``temperature`` [T] float32 (0 counts
    as 1) -> [T] float32. Works through a few rows at a time, so memory does not grow with T.
    """
    assert logits.ndim == 2 and targets.shape == temperature.shape == logits.shape[:1]
    heat = torch.where(temperature == 0, 1.0, temperature.float()).clamp(FLOAT32.tiny, FLOAT32.max)
    out = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    step = _chunk_len(logits)
    for start in range(0, len(targets), step):
        part = slice(start, start + step)
        logprobs = torch.log_softmax(logits[part].float() / heat[part, None], dim=-1)
        out[part] = logprobs.gather(1, targets[part, None])[:, 0]
    return out


# ---- chunks: same kind of rows, bounded memory


def _mode(row: SamplingRow, vocab: int) -> Mode:
    params = row.params
    if params.is_greedy:
        return Mode.GREEDY
    cut = 0 < (params.top_k or 0) < vocab or params.top_p < 1.0 or params.min_p > 0.0
    return Mode.TRUNCATED if cut else Mode.PLAIN


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


def _load(logits: Tensor, sources: Sequence[int]) -> Tensor:
    """Rows ``sources`` of the logits as [C, V]; a view where that is possible."""
    first = sources[0]
    if list(sources) == list(range(first, first + len(sources))):
        return logits[first : first + len(sources)]
    return logits[upload(torch.tensor(sources), logits.device)]


def _knobs(rows: Sequence[SamplingRow], vocab: int, device: torch.device) -> Knobs:
    """The rows' numbers, moved to the device in one piece."""
    noise = uniforms([r.noise_key for r in rows], [r.index for r in rows], [r.position for r in rows])
    settings = [
        (
            1.0 if p.is_greedy else min(max(p.temperature, FLOAT32.tiny), FLOAT32.max),
            min(p.top_k or vocab, vocab),
            p.top_p if p.top_p < 1.0 else math.inf,
            p.min_p,
        )
        for p in (row.params for row in rows)
    ]
    host = torch.from_numpy(np.column_stack([noise, np.array(settings, dtype=np.float64)]))
    table = upload(host, device)
    return Knobs(table[:, 0], table[:, 1:2].float(), table[:, 2:3].long(), table[:, 3:4], table[:, 4:5])


class Drawn(NamedTuple):
    """Tokens of a chunk and what was found on the way."""

    token: Tensor  # [C] int64
    logprob: Tensor  # [C] float64, of all tokens: before any limit
    log_kept: Tensor  # [C] float64, log of the mass that the limits keep
    peak: Tensor  # [C] float32 or float64, of the scores; not finite where there is nothing to draw


def _draw_chunk(
    raw: Tensor, rows: Sequence[SamplingRow], knobs: Knobs, spread_of: Spreader
) -> tuple[Tensor, dict[int, Exception]]:
    """Draw rows of one kind from ``raw`` [C, V].

    Returns [C, 6] float64 (token, logprob, policy logprob, log of the kept mass, peak of the raw
    logits, peak of the scores) and the errors of processors.
    """
    heated = any(row.params.temperature not in (0, 1) for row in rows)
    mode = _mode(rows[0], raw.shape[1])
    scores = raw
    failures: dict[int, Exception] = {}
    if rows[0].is_processed:
        raw = raw.float()
        scores, failures = process(raw, rows)
    drawn = _pick(scores, mode, knobs, spread_of, heated)
    policy_logprob, raw_peak = drawn.logprob, drawn.peak
    if rows[0].is_processed:
        policy = spread_of(raw, knobs, heated)
        policy_logprob, raw_peak = _logprob(raw, drawn.token, policy, knobs), policy.peak[:, 0]
    sampled = (drawn.logprob - drawn.log_kept).clamp(max=0.0)
    columns = [drawn.token, sampled, policy_logprob, drawn.log_kept, raw_peak, drawn.peak]
    return torch.stack([column.double() for column in columns], dim=1), failures


def _pick(scores: Tensor, mode: Mode, knobs: Knobs, spread_of: Spreader, heated: bool) -> Drawn:
    """A token of each row of ``scores`` [C, V], in compiled code where there is any."""
    if spread_of.kernels is None or mode is Mode.GREEDY:
        return _pick_in_torch(scores, mode, knobs, spread_of(scores, knobs, heated))
    top_k = knobs.top_k[:, 0]
    limits = top_k.where(top_k < scores.shape[1], 0), knobs.top_p[:, 0], knobs.min_p[:, 0]
    temperature = knobs.temperature[:, 0]
    found = spread_of.kernels.pick(readable(scores), knobs.uniform, temperature, *limits, BLOCK)
    token, logprob, log_kept, peak = found.unbind(dim=1)
    return Drawn(token.long(), logprob, log_kept, peak)


def _pick_in_torch(scores: Tensor, mode: Mode, knobs: Knobs, spread: Spread) -> Drawn:
    """The same with torch's operators."""
    log_kept = torch.zeros_like(knobs.uniform)
    if mode is Mode.GREEDY:
        token = scores.max(dim=-1).indices  # the first of equals
    elif mode is Mode.PLAIN:
        token = _pick_plain(scores, spread, knobs)
    else:
        token, log_kept = pick_truncated(scores, spread, knobs)
    logprob = _logprob(scores, token, spread, knobs)
    return Drawn(token, logprob, logprob if mode is Mode.GREEDY else log_kept, spread.peak[:, 0])


def _logprob(scores: Tensor, token: Tensor, spread: Spread, knobs: Knobs) -> Tensor:
    """log_softmax(scores / temperature) at the token, [C] float64; never the log of a softmax."""
    above = (scores.gather(1, token[:, None]).float() - spread.peak).double() / knobs.temperature
    return (above - spread.total.log())[:, 0]


def _pick_plain(scores: Tensor, spread: Spread, knobs: Knobs) -> Tensor:
    """Draw in vocabulary order, [C] int64: find the block, then the token inside it."""
    target = knobs.uniform[:, None] * spread.total
    block = invert(spread.cumulative, target)
    below = spread.cumulative.gather(1, (block - 1).clamp(min=0)).where(block > 0, 0.0)
    ids = torch.arange(BLOCK, device=scores.device) + block * BLOCK
    last = scores.shape[1] - 1
    inside = scores.gather(1, ids.clamp(max=last)).float()
    weights = ((inside - spread.peak) / knobs.temperature).exp().masked_fill(ids > last, 0.0)
    offset = invert(weights.double().cumsum(dim=-1), target - below)
    return (block * BLOCK + offset).clamp(max=last)[:, 0]


# ---- results and errors


def _id_errors(rows: Sequence[SamplingRow], vocab: int) -> dict[int, Exception]:
    """A ValueError for each row that names an id which the logits do not have."""
    errors: dict[int, Exception] = {}
    for i, row in enumerate(rows):
        stop_ids = row.ending_ids.union(row.params.stop_token_ids)
        for name, ids in (("logit_bias", row.params.logit_bias), ("stop", stop_ids)):
            if ids and max(ids) >= vocab:
                errors[i] = ValueError(
                    f"{name} id {max(ids)} is outside the vocabulary of {vocab} logits; "
                    f"allowed: 0 to {vocab - 1}; check that model and tokenizer belong together"
                )
    return errors


def _result(numbers: Sequence[float], failure: Exception | None) -> DrawnToken | Exception:
    """One line of :func:`_draw_chunk`'s table as the entry of its row."""
    token, logprob, policy_logprob, log_kept, raw_peak, peak = numbers
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
    return DrawnToken(int(token), logprob, policy_logprob, log_kept)


def _describe(peak: float) -> str:
    if math.isnan(peak):
        return "NaN"
    return "+inf" if peak > 0 else "no finite value"
