"""Uniform numbers that belong to a token: a pure function of whose draw it is.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011)
turns a counter and a key into four random words. There is no state to seed, share or restore, so a
draw repeats after preemption, on resume and in any batch. No global generator is read or written.

Legend: N numbers wanted at once.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
LOW_WORD = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten rounds of Philox: counter [N, 4] and key [N, 2] to random words [N, 4].

    Every entry is a 32-bit word held in uint64, so that a product keeps its high half. Words 0 and 2 are
    computed as one array, as 1 and 3: for a step's few draws the number of operations is what takes time.
    """
    even, odd = counter.T[0::2], counter.T[1::2]
    rounds = np.arange(ROUNDS, dtype=np.uint64)[:, None, None]
    for round_key in (key.T + rounds * KEY_STEPS) & LOW_WORD:
        products = (even * MULTIPLIERS)[::-1]
        even, odd = (products >> WORD_BITS) ^ odd ^ round_key, products & LOW_WORD
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=1)


def uniforms(
    keys: Sequence[tuple[int, int, int]], indices: Sequence[int], positions: Sequence[int]
) -> NDArray[np.float64]:
    """One number in [0, 1) per draw, [N] float64.

    ``keys`` are (seed < 2**63, stream_lo < 2**32, stream_hi < 2**32) of the requests, ``indices``
    which of a request's samples draws, ``positions`` how many tokens that sample has already.
    """
    assert len(keys) == len(indices) == len(positions)
    if not keys:
        return np.empty(0, dtype=np.float64)
    seeds, streams_lo, streams_hi = np.array(keys, dtype=np.uint64).T
    places = np.array([positions, indices], dtype=np.uint64)
    counter = np.stack([*places, streams_lo, streams_hi], axis=1)
    assert (counter <= LOW_WORD).all(), "positions, indices and streams are 32-bit words"
    key = np.stack([seeds & LOW_WORD, seeds >> WORD_BITS], axis=1)
    words = philox4x32(counter, key)
    # 27 + 26 bits fill the 53 bits of a float64 exactly: no rounding, so never 1.0.
    bits = (words[:, 0] >> np.uint64(5) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    values: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return values
