"""How a row's probability lies over the vocabulary: the numbers that every way of drawing starts from.

Legend: C rows of one chunk, V vocabulary, B blocks of BLOCK tokens.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
"""Tokens per block of the two-level draw: few enough blocks to accumulate in float64 for free."""


class Knobs(NamedTuple):
    """The numbers of each row that enter its draw; neutral values where a knob is off."""

    uniform: Tensor  # [C] float64 in [0, 1)
    temperature: Tensor  # [C, 1] float32, 1 for greedy rows
    top_k: Tensor  # [C, 1] int64 in [1, V]; V keeps all
    top_p: Tensor  # [C, 1] float64; inf keeps all
    min_p: Tensor  # [C, 1] float64; 0 keeps all

    @classmethod
    def of(cls, table: Tensor) -> "Knobs":
        """Of [C, 5] float64, a column for each."""
        uniform, temperature, top_k, top_p, min_p = table.split(1, dim=1)
        return cls(uniform[:, 0], temperature.float(), top_k.long(), top_p, min_p)

    def at(self, where: Tensor | slice) -> "Knobs":
        return Knobs(*(knob[where] for knob in self))


class Spread(NamedTuple):
    """How the mass exp((score - peak) / temperature) of each row lies over the blocks."""

    peak: Tensor  # [C, 1] float32, the highest score
    cumulative: Tensor  # [C, B] float64, up to and including each block

    def at(self, where: Tensor) -> "Spread":
        return Spread(*(each[where] for each in self))

    @property
    def total(self) -> Tensor:
        """[C, 1] float64; at least 1, because the peak itself counts 1."""
        return self.cumulative[:, -1:]


class Spreader:
    """Finds the :class:`Spread` of chunks; its scratch is kept for all of them to spare page faults."""

    def __init__(self, logits: Tensor, max_rows: int) -> None:
        width = math.ceil(logits.shape[1] / BLOCK) * BLOCK
        self._scratch = torch.empty((max_rows, width), dtype=torch.float32, device=logits.device)

    def __call__(self, scores: Tensor, knobs: Knobs, heated: bool) -> Spread:
        """The spread of ``scores`` [C, V].

        ``heated`` False says that every temperature is 1 and saves a pass; dividing by 1 changes no
        bit, so a row's numbers do not depend on it.
        """
        scores = scores.float()
        vocab, weights = scores.shape[1], self._scratch[: len(scores)]
        peak = scores.amax(dim=-1, keepdim=True)
        torch.sub(scores, peak, out=weights[:, :vocab])
        weights[:, vocab:] = -math.inf
        if heated:
            weights.div_(knobs.temperature)
        weights.exp_()
        return spread_of_blocks(peak, weights.view(len(weights), -1, BLOCK).sum(dim=-1))


def spread_of_blocks(peak: Tensor, mass: Tensor) -> Spread:
    """From the highest score [C, 1] and each block's mass [C, B] float32."""
    return Spread(peak, mass.double().cumsum(dim=-1))


def invert(cumulative: Tensor, target: Tensor) -> Tensor:
    """First entry of each row of [C, K] float64 above target [C, 1] -> [C, 1] int64.

    Where rounding lifted the target to the total it is the last entry that added mass. Either way
    the entry has mass: a token of probability 0 is never picked.
    """
    first = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(first, last).clamp(max=cumulative.shape[1] - 1)  # NaN rows stay in range
