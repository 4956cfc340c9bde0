"""Draws of tokens in compiled code: the noise, the passes over the vocabulary, and the token.

Letters: R rows, L rows of logits, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.native.library import KINDS, LANES, Library

WORD = 2**32


class DrawKernels:
    """Draws of tokens on the CPU.

    Example::

        share = draws.uniforms([(seed, 0, 1, 0, 17)])
        settings = torch.tensor([[*share, 1.0, 0, math.inf, 0.0]], dtype=torch.float64)
        token = int(draws.pick(logits, [0], settings, 256)[0, 0])
    """

    def __init__(self, library: Library) -> None:
        self._library = library

    def uniforms(self, places: Sequence[tuple[int, int, int, int, int]]) -> NDArray[np.float64]:
        """One number in [0, 1) per draw, [R] float64: ``rollout.noise.uniforms`` of the same.

        ``places`` are (seed < 2**63, and below 2**32 each: stream_lo, stream_hi, index, position).
        """
        table = np.array(places, dtype=np.int64).reshape(len(places), 5)
        words = table[:, 1:]
        assert ((words >= 0) & (words < WORD)).all(), "positions, indices and streams are 32-bit words"
        numbers = np.empty(len(places), dtype=np.float64)
        self._library["uniforms"](numbers.ctypes.data, table.ctypes.data, len(places))
        return numbers

    def pick(self, logits: Tensor, sources: Sequence[int], settings: Tensor, block: int) -> Tensor:
        """Draw a token of each row by its probability, among those that its limits keep.

        Args:
            logits: [L, V] float32 or bfloat16, rows may lie apart.
            sources: which of them each of the R rows draws from.
            settings: [R, 5] float64. The share in [0, 1): the first token is drawn at which the mass so far
                is above that share of what is kept, in the order of the vocabulary, or by rank where a limit
                is set. The temperature, 0 for the first token of the highest logit. ``top_k``: that many
                tokens and those equal to the last; 0 for no such limit. ``top_p``: the most likely tokens
                of that share of the mass; above 1 for no such limit. ``min_p``: tokens of at least that
                share of the most likely one's probability.
            block: tokens whose mass is summed up as one, a multiple of 16.

        Returns [R, 4] float64: the token, its ``log_softmax(logits / temperature)``, the log of the kept
        mass (of the token's own where it is greedy), and the highest logit (NaN where the row holds one;
        nothing else counts then).
        """
        rows, vocab = len(sources), logits.shape[1]
        _check(logits, block)
        settings = settings.contiguous()
        assert settings.shape == (rows, 5) and settings.dtype == torch.float64
        order = np.array(sources, dtype=np.int64)
        assert rows == 0 or (0 <= order.min() and order.max() < len(logits))
        picks = torch.empty((rows, 4), dtype=torch.float64)
        self._library["pick"](
            KINDS[logits.dtype, logits.dtype],
            picks.data_ptr(),
            logits.data_ptr(),
            logits.stride(0),
            order.ctypes.data,
            settings.data_ptr(),
            rows,
            vocab,
            block,
        )
        return picks

    def spread(self, logits: Tensor, temperature: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Highest logit of each row, and the mass of each block of tokens.

        Args:
            logits: [R, V] float32 or bfloat16, rows may lie apart.
            temperature: [R] float32, above 0.
            block: tokens per block, a multiple of 16.

        Returns the peak [R] float32 (NaN where the row holds one) and the sums of
        ``exp((logit - peak) / temperature)`` over blocks, [R, ceil(V / block)] float32.
        """
        rows, vocab = logits.shape
        _check(logits, block)
        assert temperature.shape == (rows,) and temperature.dtype == torch.float32
        temperature = temperature.contiguous()
        peak = torch.empty(rows, dtype=torch.float32)
        mass = torch.empty((rows, -(-vocab // block)), dtype=torch.float32)
        self._library["spread"](
            KINDS[logits.dtype, logits.dtype],
            peak.data_ptr(),
            mass.data_ptr(),
            logits.data_ptr(),
            logits.stride(0),
            temperature.data_ptr(),
            rows,
            vocab,
            block,
        )
        return peak, mass


def _check(logits: Tensor, block: int) -> None:
    assert logits.device.type == "cpu" and logits.ndim == 2 and logits.stride(1) == 1 and block % LANES == 0
