"""How a token of each row is found once its scores are final: with torch's operators, or in compiled code.

Both ways draw the same tokens, up to the order of float32 sums.

Legend: D rows of a draw, C of them that are one chunk, L rows of scores, V vocabulary.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.native import DrawKernels
from rollout.noise import uniforms
from rollout.sampling_row import SamplingRow, Settings
from rollout.spread import BLOCK, Knobs, Spread, Spreader, invert, spread_of_blocks
from rollout.transfer import upload
from rollout.truncation import pick_truncated

COMPILED_DTYPES = (torch.float32, torch.bfloat16)
"""Of the logits that compiled code reads as they are."""


class Mode(IntEnum):
    """Which rows are drawn together."""

    ANY = 0
    GREEDY = 1
    PLAIN = 2
    TRUNCATED = 3


class Picker(Protocol):
    """Draws the tokens of rows that it was made for, chunk by chunk."""

    def pick(self, scores: Tensor, sources: Sequence[int], part: slice, mode: Mode) -> Tensor:
        """Draw for the rows ``part``, all of one mode, from rows ``sources`` of ``scores`` [L, V].

        Returns [C, 4] float64: the token, its logprob before any limit, the log of the mass that the limits
        keep (of the token's own where it is greedy), and the highest score, which is not finite where there
        is nothing to draw.
        """

    def judge(self, raw: Tensor, token: Tensor, part: slice) -> Tensor:
        """What the logits before any processing, ``raw`` [C, V] float32, say of tokens [C] float64 of the
        rows ``part``: [C, 2] float64, the logprob of each and the highest logit."""


class CompiledPicker:
    """Draws on the CPU in compiled code; rows of all modes go together."""

    def __init__(self, kernels: DrawKernels, rows: Sequence[SamplingRow]) -> None:
        self._kernels = kernels
        noise = kernels.uniforms([(*row.noise_key, row.index, row.position) for row in rows])
        self._table = _table(noise, rows)

    def pick(self, scores: Tensor, sources: Sequence[int], part: slice, mode: Mode) -> Tensor:
        """See :class:`Picker`."""
        if scores.dtype not in COMPILED_DTYPES or scores.stride(1) != 1:
            scores, sources = rows_of(scores, sources).float().contiguous(), range(len(sources))
        return self._kernels.pick(scores, sources, torch.from_numpy(self._table[part]), BLOCK)

    def judge(self, raw: Tensor, token: Tensor, part: slice) -> Tensor:
        """See :class:`Picker`."""
        knobs = Knobs.of(torch.from_numpy(_neutral(self._table[part], raw.shape[1])))
        peak, mass = self._kernels.spread(raw, knobs.temperature[:, 0], BLOCK)
        return _judged(raw, token, spread_of_blocks(peak[:, None], mass), knobs)


class TorchPicker:
    """Draws on any device with torch's operators."""

    def __init__(self, logits: Tensor, rows: Sequence[SamplingRow], max_rows: int) -> None:
        noise = uniforms([r.noise_key for r in rows], [r.index for r in rows], [r.position for r in rows])
        table = torch.from_numpy(_neutral(_table(noise, rows), logits.shape[1]))
        self._knobs = Knobs.of(upload(table, logits.device))  # in one piece
        self._spread_of = Spreader(logits, min(max_rows, len(rows)))
        self._are_heated = [row.params.temperature not in (0, 1) for row in rows]

    def pick(self, scores: Tensor, sources: Sequence[int], part: slice, mode: Mode) -> Tensor:
        """See :class:`Picker`."""
        scores, knobs = rows_of(scores, sources), self._knobs.at(part)
        scores = scores.float() if scores.dtype == torch.float64 else scores  # which are drawn in float32
        spread = self._spread_of(scores, knobs, any(self._are_heated[part]))
        log_kept = torch.zeros_like(knobs.uniform)
        if mode is Mode.GREEDY:
            token = scores.max(dim=-1).indices  # the first of equals
        elif mode is Mode.PLAIN:
            token = _pick_plain(scores, spread, knobs)
        else:
            token, log_kept = pick_truncated(scores, spread, knobs)
        logprob = _logprob(scores, token, spread, knobs)
        log_kept = logprob if mode is Mode.GREEDY else log_kept
        return torch.stack([token.double(), logprob, log_kept, spread.peak[:, 0].double()], dim=1)

    def judge(self, raw: Tensor, token: Tensor, part: slice) -> Tensor:
        """See :class:`Picker`."""
        knobs = self._knobs.at(part)
        return _judged(raw, token, self._spread_of(raw, knobs, any(self._are_heated[part])), knobs)


def make_picker(
    kernels: DrawKernels | None, logits: Tensor, rows: Sequence[SamplingRow], max_rows: int
) -> Picker:
    """For ``rows``, which come in chunks of at most ``max_rows``."""
    return TorchPicker(logits, rows, max_rows) if kernels is None else CompiledPicker(kernels, rows)


def mode_of(kernels: DrawKernels | None, row: SamplingRow, vocab: int) -> Mode:
    """Which rows can be drawn together with this one."""
    if kernels is not None:
        return Mode.ANY
    temperature, top_k, top_p, min_p = row.settings
    if temperature == 0:
        return Mode.GREEDY
    return Mode.TRUNCATED if 0 < top_k < vocab or top_p < 1 or min_p > 0 else Mode.PLAIN


def rows_of(logits: Tensor, sources: Sequence[int]) -> Tensor:
    """Rows ``sources`` of the logits as [C, V]; a view where that is possible."""
    first = sources[0]
    if list(sources) == list(range(first, first + len(sources))):
        return logits[first : first + len(sources)]
    return logits[upload(torch.tensor(sources), logits.device)]


def _table(noise: NDArray[np.float64], rows: Sequence[SamplingRow]) -> NDArray[np.float64]:
    """[D, 5]: the noise of each row, and its :class:`~rollout.sampling_row.Settings`."""
    table = np.empty((len(rows), 1 + len(Settings._fields)))
    table[:, 0] = noise
    table[:, 1:] = [row.settings for row in rows]
    return table


def _neutral(table: NDArray[np.float64], vocab: int) -> NDArray[np.float64]:
    """The table with numbers to compute with in place of zeros: temperature 1 and ``top_k`` of V."""
    uniform, temperature, top_k, top_p, min_p = table.T
    temperature = np.where(temperature == 0, 1.0, temperature)
    top_k = np.where((top_k == 0) | (top_k > vocab), vocab, top_k)
    return np.column_stack([uniform, temperature, top_k, top_p, min_p])


def _judged(raw: Tensor, token: Tensor, spread: Spread, knobs: Knobs) -> Tensor:
    logprob = _logprob(raw, token.long(), spread, knobs)
    return torch.stack([logprob, spread.peak[:, 0].double()], dim=1)


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
