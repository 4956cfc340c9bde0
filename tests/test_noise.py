"""The noise is Philox4x32-10, and every part of a draw's address matters."""

import random

import numpy as np
import pytest
import torch

from rollout.noise import philox4x32, uniforms

ONES = 0xFFFFFFFF
# Known answers published with Random123 (kat_vectors, philox4x32 10 rounds): counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_philox_gives_the_published_words() -> None:
    counters, keys, words = (np.array(column, dtype=np.uint64) for column in zip(*KNOWN_ANSWERS, strict=True))
    assert philox4x32(counters, keys).tolist() == words.tolist()


def test_uniform_takes_53_bits_of_the_known_words() -> None:
    # counter (position, index, stream_lo, stream_hi), key (low half, high half) of the seed: the third vector
    # has a high half of 0x299f31d0, a seed below 2**63.
    seed = 0x299F31D0 << 32 | 0xA4093822
    (value,) = uniforms([(seed, 0x13198A2E, 0x03707344)], [0x85A308D3], [0x243F6A88])
    assert value == ((0xD16CFE09 >> 5) << 26 | 0x94FDCCEB >> 6) * 2.0**-53


@pytest.mark.parametrize("part", ["seed", "seed_high", "stream_lo", "stream_hi", "index", "position"])
def test_every_part_of_the_address_changes_the_number(part: str) -> None:
    def number(**change: int) -> float:
        at = {"seed": 5, "seed_high": 0, "stream_lo": 6, "stream_hi": 7, "index": 8, "position": 9} | change
        key = (at["seed_high"] << 32 | at["seed"], at["stream_lo"], at["stream_hi"])
        return float(uniforms([key], [at["index"]], [at["position"]])[0])

    values = {number(**{part: 100 + i}) for i in range(50)} | {number()}
    assert len(values) == 51


def test_numbers_fill_the_unit_interval_evenly() -> None:
    n = 100_000
    values = uniforms([(3, 1, 0)] * n, [0] * n, range(n))
    assert values.min() >= 0.0 and values.max() < 1.0
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    chi_square = float(((counts - n / 100) ** 2 / (n / 100)).sum())
    assert chi_square < 180  # 99 degrees of freedom: p about 1e-6
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


def test_no_rows_give_no_numbers_and_words_beyond_32_bits_are_refused() -> None:
    assert uniforms([], [], []).shape == (0,)
    with pytest.raises(AssertionError, match="32-bit"):
        uniforms([(0, 0, 0)], [2**32], [0])


def test_no_global_generator_is_touched() -> None:
    def states() -> str:
        return repr((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))

    before = states()
    uniforms([(1, 2, 3)] * 10, range(10), range(10))
    assert states() == before
