"""From logits to drawn tokens, each with the three numbers that a trainer needs.

Owns temperature, truncation, the draw and the error of a row; what comes before the temperature is
:mod:`rollout.processing`. Rows never meet: a token depends on its own logits, params and noise only.
Does not own the logits (never written to) or any random state (see :mod:`rollout.noise`).

Legend: L rows of logits, R rows drawn in a call, C rows of one chunk, V vocabulary, B blocks of
BLOCK tokens, K candidates of a truncated row.
"""

import math
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout.native import Kernels
from rollout.noise import uniforms
from rollout.processing import SamplingRow, process
from rollout.types import DrawnToken, NonFiniteLogits

BLOCK = 256
"""Tokens per block of the two-level draw: few enough blocks to accumulate in float64 for free."""
STAGES = (64, 1024, 8192)
"""Candidates tried for a truncated row before all V are sorted: a sort costs some 20 times topk(64)."""
CANDIDATE_WIDTHS = (128, 1024, 8192)
"""Most candidates of the rows that are worked on together, where the compiled kernels find them."""
FOLD = 8
"""Tokens per group when candidates are sought: the best K tokens lie in the K best groups."""
HOST_CHUNK = 2**21
"""Logits worked on at once on the CPU: 8 MB of float32 stay in the cache and in the allocator's pool."""
DEVICE_CHUNK = 2**25
"""The same on an accelerator, where launches cost more than memory traffic."""
SPREAD_DTYPES = (torch.float32, torch.bfloat16)
"""Of the logits that the compiled kernels read."""
FLOAT32 = torch.finfo(torch.float32)


class Mode(Enum):
    """How the token is found once the scores are final."""

    GREEDY = "greedy"
    PLAIN = "plain"
    TRUNCATED = "truncated"


class Knobs(NamedTuple):
    """The numbers of each row that enter its draw; neutral values where a knob is off."""

    uniform: Tensor  # [C] float64 in [0, 1)
    temperature: Tensor  # [C, 1] float32, 1 for greedy rows
    top_k: Tensor  # [C, 1] int64 in [1, V]; V keeps all
    top_p: Tensor  # [C, 1] float64; inf keeps all
    min_p: Tensor  # [C, 1] float64; 0 keeps all

    def at(self, where: Tensor | slice) -> "Knobs":
        return Knobs(*(knob[where] for knob in self))


class Spread(NamedTuple):
    """How the mass exp((score - peak) / temperature) of each row lies over the blocks."""

    peak: Tensor  # [C, 1] float32, the highest score
    mass: Tensor  # [C, B] float32, of each block
    cumulative: Tensor  # [C, B] float64, up to and including each block

    def at(self, where: Tensor) -> "Spread":
        return Spread(*(each[where] for each in self))

    @property
    def total(self) -> Tensor:
        """[C, 1] float64; at least 1, because the peak itself counts 1."""
        return self.cumulative[:, -1:]


@torch.no_grad()
def draw(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    logit_rows: Sequence[int] | None = None,
    kernels: Kernels | None = None,
) -> tuple[DrawnToken | Exception, ...]:
    """One token per row, or the error that this row alone has.

    ``logits`` is [L, V] of any float dtype and is not modified; ``rows[i]`` draws from
    ``logits[logit_rows[i]]`` (``None``: from ``logits[i]``), so several rows may share one.
    An entry is an exception when its logits hold NaN or +inf or nothing finite, when a logits
    processor raised or returned a wrong shape, or when an id is outside the vocabulary. With
    ``kernels`` the passes over the vocabulary are made in compiled code.

    Rows are sorted by what they need, so that each chunk takes one path through the code; the
    results leave the device once, at the end.
    """
    sources = range(len(rows)) if logit_rows is None else logit_rows
    assert logits.ndim == 2 and logits.is_floating_point() and len(sources) == len(rows)
    vocab = logits.shape[1]
    assert all(0 <= source < len(logits) for source in sources)
    failures = _id_errors(rows, vocab)
    kinds = {i: (r.is_processed, _mode(r, vocab).value) for i, r in enumerate(rows) if i not in failures}
    order = sorted(kinds, key=kinds.__getitem__)
    if not order:
        return tuple(failures[i] for i in range(len(rows)))
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
    results: dict[int, DrawnToken | Exception] = {**failures}
    for i, numbers in zip(order, torch.cat(tables).tolist(), strict=True):
        results[i] = _result(numbers, failures.get(i))
    return tuple(results[i] for i in range(len(rows)))


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
    return logits[torch.tensor(sources, device=logits.device)]


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
    table = torch.from_numpy(np.column_stack([noise, np.array(settings, dtype=np.float64)])).to(device)
    return Knobs(table[:, 0], table[:, 1:2].float(), table[:, 2:3].long(), table[:, 3:4], table[:, 4:5])


def _draw_chunk(
    raw: Tensor, rows: Sequence[SamplingRow], knobs: Knobs, spread_of: "Spreader"
) -> tuple[Tensor, dict[int, Exception]]:
    """Draw rows of one kind from ``raw`` [C, V].

    Returns [C, 6] float64 (token, logprob, policy logprob, log of the kept mass, peak of the raw
    logits, peak of the scores) and the errors of processors.
    """
    heated = any(row.params.temperature not in (0, 1) for row in rows)
    mode = _mode(rows[0], raw.shape[1])
    if rows[0].is_processed:
        raw = raw.float()
    scores, policy = raw, spread_of(raw, knobs, heated)
    spread = policy
    failures: dict[int, Exception] = {}
    if rows[0].is_processed:
        scores, failures = process(raw, rows)
        spread = spread_of(scores, knobs, heated)
    log_kept = torch.zeros_like(knobs.uniform)
    if mode is Mode.GREEDY:
        token = scores.max(dim=-1).indices  # the first of equals
    elif mode is Mode.PLAIN:
        token = _pick_plain(scores, spread, knobs)
    else:
        token, log_kept = _pick_truncated(scores, spread, knobs, spread_of.kernels)
    logprob = _logprob(scores, token, spread, knobs)
    if mode is Mode.GREEDY:
        log_kept = logprob
    sampled = (logprob - log_kept).clamp(max=0.0)
    policy_logprob = _logprob(raw, token, policy, knobs)
    columns = [token, sampled, policy_logprob, log_kept, policy.peak[:, 0], spread.peak[:, 0]]
    return torch.stack([column.double() for column in columns], dim=1), failures


class Spreader:
    """Finds the :class:`Spread` of chunks, in compiled code or with torch's operators."""

    def __init__(self, kernels: Kernels | None, logits: Tensor, max_rows: int) -> None:
        self.kernels = kernels
        self._scratch = torch.empty(0)
        if kernels is None:  # kept for all chunks to spare page faults
            width = math.ceil(logits.shape[1] / BLOCK) * BLOCK
            self._scratch = torch.empty((max_rows, width), dtype=torch.float32, device=logits.device)

    def __call__(self, scores: Tensor, knobs: Knobs, heated: bool) -> Spread:
        """The spread of ``scores`` [C, V].

        ``heated`` False says that every temperature is 1 and saves a pass; dividing by 1 changes no
        bit, so a row's numbers do not depend on it.
        """
        if scores.dtype not in SPREAD_DTYPES or self.kernels is None:
            scores = scores.float()
        if self.kernels is not None:
            peak, mass = self.kernels.spread(scores, knobs.temperature[:, 0], BLOCK)
            return Spread(peak[:, None], mass, mass.double().cumsum(dim=-1))
        vocab, weights = scores.shape[1], self._scratch[: len(scores)]
        peak = scores.amax(dim=-1, keepdim=True)
        torch.sub(scores, peak, out=weights[:, :vocab])
        weights[:, vocab:] = -math.inf
        if heated:
            weights.div_(knobs.temperature)
        weights.exp_()
        mass = weights.view(len(weights), -1, BLOCK).sum(dim=-1)
        return Spread(peak, mass, mass.double().cumsum(dim=-1))


def _logprob(scores: Tensor, token: Tensor, spread: Spread, knobs: Knobs) -> Tensor:
    """log_softmax(scores / temperature) at the token, [C] float64; never the log of a softmax."""
    above = (scores.gather(1, token[:, None]).float() - spread.peak).double() / knobs.temperature
    return (above - spread.total.log())[:, 0]


# ---- drawing by inverse CDF


def _invert(cumulative: Tensor, target: Tensor) -> Tensor:
    """First entry of each row of [C, K] float64 above target [C, 1] -> [C, 1] int64.

    Where rounding lifted the target to the total it is the last entry that added mass. Either way
    the entry has mass: a token of probability 0 is never picked.
    """
    first = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(first, last).clamp(max=cumulative.shape[1] - 1)  # NaN rows stay in range


def _pick_plain(scores: Tensor, spread: Spread, knobs: Knobs) -> Tensor:
    """Draw in vocabulary order, [C] int64: find the block, then the token inside it."""
    target = knobs.uniform[:, None] * spread.total
    block = _invert(spread.cumulative, target)
    below = spread.cumulative.gather(1, (block - 1).clamp(min=0)).where(block > 0, 0.0)
    ids = torch.arange(BLOCK, device=scores.device) + block * BLOCK
    last = scores.shape[1] - 1
    inside = scores.gather(1, ids.clamp(max=last)).float()
    weights = ((inside - spread.peak) / knobs.temperature).exp().masked_fill(ids > last, 0.0)
    offset = _invert(weights.double().cumsum(dim=-1), target - below)
    return (block * BLOCK + offset).clamp(max=last)[:, 0]


def _pick_truncated(
    scores: Tensor, spread: Spread, knobs: Knobs, kernels: Kernels | None
) -> tuple[Tensor, Tensor]:
    """Draw after top-k, top-p and min-p: tokens [C] int64 and log of the kept mass [C] float64.

    The compiled kernels, where there are any, find the candidates of rows with top-k or top-p. The
    others go through stages, each with more candidates, and end at the first that proves their kept set.
    """
    num_rows, vocab = scores.shape
    token = torch.zeros(num_rows, dtype=torch.int64, device=scores.device)
    log_kept = torch.zeros_like(knobs.uniform)
    todo = torch.arange(num_rows, device=scores.device)
    if scores.dtype not in SPREAD_DTYPES:
        scores = scores.float()
    if kernels is not None:
        ids, counts = _found_candidates(scores, spread, knobs, kernels)
        low = 0
        for width in CANDIDATE_WIDTHS:  # rows of about equal width together
            rows = todo[(counts > low) & (counts <= width)]
            low = width
            if len(rows) == 0:
                continue
            is_candidate = torch.arange(width) < counts[rows, None]
            some = ids[rows, :width].where(is_candidate, 0)
            values = scores[rows[:, None], some].float().where(is_candidate, -math.inf)
            part = spread.at(rows), knobs.at(rows), counts[rows] == vocab
            token[rows], log_kept[rows], _ = _pick_among(values, some, *part, vocab)
        todo = todo[counts <= 0]
        if len(todo) == 0:
            return token, log_kept
    scores = scores.float()
    for width in (*(stage for stage in STAGES if stage < vocab), vocab):
        if bool(((knobs.top_k[todo] >= width) & (knobs.top_k[todo] < vocab)).all()):
            continue  # none of them can be proven by so few
        rest = scores if len(todo) == num_rows else scores[todo]
        ids = _candidates(rest, width)
        part = spread.at(todo), knobs.at(todo), torch.full_like(todo, width == vocab, dtype=torch.bool)
        drawn, kept, is_settled = _pick_among(rest.gather(1, ids), ids, *part, vocab)
        done = todo[is_settled]
        token[done], log_kept[done] = drawn[is_settled], kept[is_settled]
        todo = todo[~is_settled]
        if len(todo) == 0:
            break
    return token, log_kept


def _found_candidates(
    scores: Tensor, spread: Spread, knobs: Knobs, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """See ``Kernels.candidates``; a row that it cannot serve (min-p alone, say) has the count -1."""
    is_limited = knobs.top_k[:, 0] < scores.shape[1]
    return kernels.candidates(
        scores,
        spread.peak[:, 0],
        spread.mass,
        knobs.temperature[:, 0],
        knobs.top_k[:, 0].where(is_limited, 0),
        knobs.top_p[:, 0],
        BLOCK,
        CANDIDATE_WIDTHS[-1],
    )


def _candidates(scores: Tensor, width: int) -> Tensor:
    """Ids of the ``width`` highest scores of each row, [C, K] int64, descending.

    Among equals the lower id comes first. transformers leaves that to an unstable sort, so which of
    several equal tokens its top-p cuts depends on the build; here it is always the highest ids.
    """
    if width == scores.shape[1]:
        return scores.sort(dim=-1, descending=True, stable=True).indices
    ids = _highest(scores, width)
    # One integer key (falling score above, id below) makes the order total; faster than two sorts.
    bits = (scores.gather(1, ids) + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative floats count downwards
    return ((~rising).long() << 32 | ids).sort(dim=-1).values & 0xFFFFFFFF


def _highest(scores: Tensor, width: int) -> Tensor:
    """Ids of the ``width`` highest scores of each row, [C, K] int64, in no order."""
    num_rows, vocab = scores.shape
    num_groups = vocab // FOLD
    if 4 * width > num_groups:
        return scores.topk(width, sorted=False).indices
    # Groups are strided (j, j + num_groups, ...), so that amax runs along memory; what is left over
    # at the end of the vocabulary always takes part.
    grouped = scores[:, : FOLD * num_groups].view(num_rows, FOLD, num_groups)
    best = grouped.amax(dim=1).topk(width, sorted=False).indices
    strides = torch.arange(0, FOLD * num_groups, num_groups, device=scores.device)
    tail = torch.arange(FOLD * num_groups, vocab, device=scores.device).expand(num_rows, -1)
    ids = torch.cat([(best[:, :, None] + strides).flatten(1), tail], dim=1)
    return ids.gather(1, scores.gather(1, ids).topk(width, sorted=False).indices)


def _pick_among(
    values: Tensor, ids: Tensor, spread: Spread, knobs: Knobs, is_complete: Tensor, vocab: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from candidates ``ids`` [C, K], whose scores ``values`` [C, K] float32 fall.

    ``is_complete`` [C] says whether they are the whole vocabulary. Returns the token, the log of the
    kept mass and whether it is proven, each [C]. It is when the candidates reach strictly below the
    lowest kept score (under top-k below the k-th, whose ties all count towards top-p), so that nothing
    outside can belong to the kept set.
    """
    num_candidates = ids.shape[1]
    scaled = values / knobs.temperature  # ties are those after division, as in transformers
    weights = ((values - spread.peak) / knobs.temperature).exp().double()
    kth = scaled.gather(1, knobs.top_k.clamp(max=num_candidates) - 1)
    limited = knobs.top_k < vocab
    in_top_k = (scaled >= kth) | ~limited
    mass = (weights * in_top_k).sum(dim=-1, keepdim=True)
    mass = torch.where(limited | is_complete[:, None], mass, spread.total)
    before = weights.cumsum(dim=-1) - weights
    possible = values > -math.inf
    keep = possible & in_top_k & (before < knobs.top_p * mass) & (weights >= knobs.min_p)
    lowest = torch.where(limited, kth, scaled.where(keep, math.inf).amin(dim=-1, keepdim=True))
    is_proven = (lowest > scaled[:, -1:])[:, 0] | is_complete
    cumulative = (weights * keep).cumsum(dim=-1)
    token = ids.gather(1, _invert(cumulative, knobs.uniform[:, None] * cumulative[:, -1:]))
    is_cut = (possible & ~keep).any(dim=-1) | ~is_complete
    log_kept = (cumulative[:, -1] / spread.total[:, 0]).log().clamp(max=0.0).where(is_cut, 0.0)
    return token[:, 0], log_kept, is_proven


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
