"""Parity with the oracle: every architecture, every way a step can be cut, fast path and slow twin."""

import random
import zlib
from array import array
from functools import cache

import pytest

from oracle import assert_greedy, assert_logprobs, assert_same_draws
from rollout import EngineConfig, RolloutBatch, RolloutEngine, SamplingParams
from rollout.batch import MAX_LONE_KEYS
from tiny_models import TINY_MODELS

WAYS = {
    "plain": {},
    "eager": {"attn_implementation": "eager"},
    "torch alone": {"native_kernels": False},
    "fused around sdpa": {"attn_implementation": "sdpa"},
    "small pages, chunked": {"page_size": 4, "max_batch_tokens": 16},
    "preempting": {"page_size": 4, "num_blocks": 20},
    "preempting, prefill first": {"page_size": 4, "num_blocks": 20, "scheduler_type": "prefill_first"},
    "nothing shared": {"page_size": 4, "allow_block_sharing": False},
    "few at a time": {"page_size": 4, "max_requests_per_batch": 2},
}
TEMPERATURES = (0.0, 1.0, 0.7, 0.0, 0.7, 1.0)


def mixed_prompts() -> list[list[int]]:
    """Lengths 1 to 30 with a shared beginning among some: longer than every window and page."""
    rng = random.Random(3)
    shared = [rng.randrange(97) for _ in range(13)]
    tails = [[rng.randrange(97) for _ in range(length)] for length in (1, 5, 17, 30, 8, 2)]
    return [tails[0], shared + tails[1], shared + tails[2], tails[3], tails[4], shared[:9] + tails[5]]


@cache
def generate(name: str, way: str) -> RolloutBatch:
    engine = RolloutEngine(TINY_MODELS[name](), config=WAYS[way])
    params = [
        SamplingParams(max_new_tokens=20, temperature=t, n=2, seed=i) for i, t in enumerate(TEMPERATURES)
    ]
    batch = engine.generate(mixed_prompts(), params)
    engine.check()
    return batch


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_tokens_and_logprobs_are_the_oracles(name: str, way: str) -> None:
    batch = generate(name, way)
    model = TINY_MODELS[name]()
    temperatures = [t for t in TEMPERATURES for _ in range(2)]
    for completion, temperature in zip(batch, temperatures, strict=True):
        assert len(completion.token_ids) == 20
        assert_logprobs(model, completion, temperature=temperature)
        if temperature == 0:
            assert_greedy(model, completion)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_long_prompts_beside_short_ones_are_the_oracles(name: str) -> None:
    """Past ``MAX_LONE_KEYS`` a prompt's tokens attend together, at once or after a computed part."""
    rng, model = random.Random(5), TINY_MODELS[name]()
    lengths = (MAX_LONE_KEYS + 1, 20, MAX_LONE_KEYS + 38)
    prompts = [[rng.randrange(97) for _ in range(length)] for length in lengths]
    prompts.append(prompts[2][:-60] + prompts[1])
    for max_batch_tokens in (None, 100):  # in chunks of 100 the second chunk ends beyond, too
        engine = RolloutEngine(model, config={"max_batch_tokens": max_batch_tokens})
        for completion in engine.generate(prompts, SamplingParams(max_new_tokens=4, temperature=0)):
            assert_greedy(model, completion)
            assert_logprobs(model, completion, temperature=0)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_way_of_computing_never_changes_a_token(name: str) -> None:
    """Sampled tokens too: the noise belongs to (seed, sample, position), not to the schedule."""
    model = TINY_MODELS[name]()
    for way in WAYS:
        for i, (one, other) in enumerate(zip(generate(name, "plain"), generate(name, way), strict=True)):
            key = (i // 2, zlib.crc32(array("q", one.prompt_ids).tobytes()), 0)
            assert_same_draws(model, one, other, TEMPERATURES[i // 2], key)


def test_the_ways_do_what_they_are_named_for() -> None:
    """Without this the tests above could pass on ways that never chunk, share or preempt."""
    batches = {way: generate("llama", way) for way in WAYS}
    assert batches["preempting"].metrics.num_preemptions > 0
    assert batches["preempting, prefill first"].metrics.num_preemptions > 0
    assert batches["plain"].metrics.num_preemptions == 0
    assert batches["small pages, chunked"].metrics.num_steps > batches["plain"].metrics.num_steps
    assert batches["nothing shared"].metrics.cached_tokens == 0
    assert batches["plain"].metrics.cached_tokens > 0
    assert batches["few at a time"].metrics.num_steps > 2 * batches["plain"].metrics.num_steps


def test_windowed_layers_keep_only_their_window() -> None:
    """Mistral, window 8, pages of 4: 40 tokens of prompt and completion never hold 40 tokens of pages."""
    engine = RolloutEngine(TINY_MODELS["mistral"](), config=EngineConfig(page_size=4))
    batch = engine.generate([[5] * 20], SamplingParams(max_new_tokens=60, temperature=0))
    assert len(batch[0].token_ids) == 60
    # the prompt's own step holds 20 tokens; afterwards 8 of window and two partial pages
    assert batch.metrics.peak_pages <= 20 // 4 + 1
    one_page_each = RolloutEngine(TINY_MODELS["llama"](), config=EngineConfig(page_size=4))
    full = one_page_each.generate([[5] * 20], SamplingParams(max_new_tokens=60, temperature=0))
    assert full.metrics.peak_pages >= 79 // 4


@pytest.mark.parametrize("name", TINY_MODELS)
def test_score_is_the_oracles(name: str) -> None:
    model = TINY_MODELS[name]()
    engine = RolloutEngine(model)
    batch = engine.generate(mixed_prompts(), SamplingParams(max_new_tokens=9, temperature=0.7))
    scored = engine.score([c.prompt_ids for c in batch], [c.token_ids for c in batch], temperature=0.7)
    for completion, numbers in zip(batch, scored, strict=True):
        assert max(abs(a - b) for a, b in zip(numbers, completion.policy_logprobs, strict=True)) < 2e-4
        assert_logprobs(model, completion, temperature=0.7)
