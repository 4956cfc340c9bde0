"""Whole runs through the paged backends, over kernels that check what they are given.

Tokens and logprobs are compared with those of the sdpa backend (which test_parity compares with the
oracle's) on every kind of step: chunked prompts, prefix hits, forks, sliding windows, decode rows beside
prompts, preemption.
"""

import dataclasses
import logging
import zlib
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import rollout.attention
from fake_kernels import FakeFlash2, FakeFlash3, FakeVarlen
from oracle import assert_logprobs, assert_same_draws
from rollout import EngineConfig, RolloutBatch, RolloutEngine, RolloutError, SamplingParams
from test_parity import TEMPERATURES, mixed_prompts
from tiny_models import TINY_MODELS, WINDOW

Fake = FakeVarlen | FakeFlash2 | FakeFlash3
FAKES: dict[str, tuple[str, Callable[[], Fake]]] = {
    "varlen": ("varlen", FakeVarlen),
    "varlen on 3": ("varlen", lambda: FakeVarlen(is_fa3=True)),
    "flash 2": ("flash", FakeFlash2),
    "flash 3": ("flash", FakeFlash3),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"page_size": 8},
    "chunked": {"page_size": 4, "max_batch_tokens": 16},
    "preempting": {"page_size": 4, "num_blocks": 20},
    "long rows go with prompts": {"page_size": 4, "max_blocks_per_request": 5},
    "no fast path": {"page_size": 4, "max_blocks_per_request": 0},
}
CASES = [
    *((fake, name, way) for fake in FAKES for name in ("llama", "gemma3") for way in WAYS),
    *((fake, name, "chunked") for fake in FAKES for name in ("llama_mha_tied", "mistral")),
    *(("flash 2", "gemma2", way) for way in ("chunked", "preempting")),  # soft caps
    *(("flash 3", "gpt_oss", way) for way in ("chunked", "preempting")),  # sinks
]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fake], Fake]:
    """Let engines find this kernel, whatever they look for."""

    def replace(fake: Fake) -> Fake:
        monkeypatch.setattr(rollout.attention, "find_kernel", lambda name, device: fake.kernel())
        return fake

    return replace


def run(name: str, config: dict[str, Any], fake: Fake | None = None) -> RolloutBatch:
    engine = RolloutEngine(TINY_MODELS[name](), config=config)
    if fake is not None:
        fake.calls.all.clear()  # the kernel was tried when the engine was made
    params = [
        SamplingParams(max_new_tokens=16, temperature=t, n=2, seed=i) for i, t in enumerate(TEMPERATURES)
    ]
    batch = engine.generate(mixed_prompts(), params)
    engine.check()
    return batch


@cache
def sdpa_twin(name: str) -> RolloutBatch:
    return run(name, {"page_size": 8, "attn_implementation": "sdpa", "native_kernels": False})


@pytest.mark.parametrize(("fake_name", "name", "way"), CASES)
def test_tokens_and_logprobs_are_those_of_sdpa(
    fake_name: str, name: str, way: str, use: Callable[[Fake], Fake]
) -> None:
    backend, make = FAKES[fake_name]
    fake = use(make())
    batch = run(name, {**WAYS[way], "attn_implementation": backend, "native_kernels": False}, fake)
    assert fake.calls.all
    model = TINY_MODELS[name]()
    for i, (one, other) in enumerate(zip(sdpa_twin(name), batch, strict=True)):
        key = (i // 2, zlib.crc32(array("q", one.prompt_ids).tobytes()), 0)
        assert_same_draws(model, one, other, TEMPERATURES[i // 2], key)
        if one.token_ids == other.token_ids:  # else a tie, and what follows it may differ
            gaps = zip(one.policy_logprobs, other.policy_logprobs, strict=True)
            assert max(abs(a - b) for a, b in gaps) < 2e-4


@pytest.mark.parametrize("way", ["preempting", "chunked", "plain"])
def test_the_ways_do_what_they_are_named_for(way: str, use: Callable[[Fake], Fake]) -> None:
    fake = use(FakeFlash2())
    metrics = run("llama", {**WAYS[way], "attn_implementation": "flash"}, fake).metrics
    assert (metrics.num_preemptions > 0) == (way == "preempting")
    assert metrics.cached_tokens > 0
    kinds = [(call.entry, call.max_q > 1) for call in fake.calls.all]
    assert {("varlen", True), ("kvcache", False)} <= set(kinds)
    # decode rows beside prompts: in some steps a layer makes both calls
    assert len(kinds) > 2 * metrics.num_steps


# ---- the decode fast path ---------------------------------------------------------------------


def entries_of(way: str, name: str, fake: Fake) -> set[str]:
    run(name, {**WAYS[way], "attn_implementation": "flash"}, fake)
    return fake.calls.entries()


def test_decode_rows_take_the_fast_path_and_none_does_where_it_is_off(use: Callable[[Fake], Fake]) -> None:
    assert entries_of("plain", "llama", use(FakeFlash2())) == {"varlen", "kvcache"}
    assert entries_of("no fast path", "llama", use(FakeFlash2())) == {"varlen"}


def test_rows_with_more_pages_than_the_limit_go_the_other_way(use: Callable[[Fake], Fake]) -> None:
    fake = use(FakeFlash2())
    assert entries_of("long rows go with prompts", "llama", fake) == {"varlen", "kvcache"}
    # a table of the fast path is as wide as the limit; rows of one token that are longer are ragged
    assert {call.table_width for call in fake.calls.all if call.entry == "kvcache"} == {5}
    long_rows = [call for call in fake.calls.all if call.entry == "varlen" and call.max_q == 1]
    assert long_rows and all(call.table_width > 5 for call in long_rows)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_layers_that_slide_switch_the_fast_path_off(
    name: str, use: Callable[[Fake], Fake], caplog: pytest.LogCaptureFixture
) -> None:
    fake = use(FakeFlash3())
    with caplog.at_level(logging.INFO, "rollout"):
        run(name, {"page_size": 4, "max_blocks_per_request": 8, "attn_implementation": "flash"}, fake)
    assert fake.calls.entries() == {"varlen"}
    said = [r for r in caplog.records if "max_blocks_per_request is 0" in r.message]
    assert said and all(r.levelno == logging.WARNING for r in said)
    windows = {call.window_size for call in fake.calls.all}
    assert windows == ({(WINDOW - 1, 0)} if name == "mistral" else {(WINDOW - 1, 0), (-1, -1)})


def test_varlen_decodes_without_a_mask(use: Callable[[Fake], Fake]) -> None:
    """A causal mask, though it hides nothing from one query, keeps the kernels from folding heads."""
    fake = use(FakeVarlen())
    run("llama", {"page_size": 8, "attn_implementation": "varlen"}, fake)
    assert {call.window_size for call in fake.calls.all if call.max_q == 1} == {(-1, -1)}
    assert {call.window_size for call in fake.calls.all if call.max_q > 1} == {(-1, 0)}


# ---- scores, memory, changes ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_score_goes_through_the_kernel(name: str, use: Callable[[Fake], Fake]) -> None:
    fake = use(FakeVarlen(page_multiple=16))
    engine = RolloutEngine(TINY_MODELS[name](), config={"page_size": 16, "attn_implementation": "varlen"})
    batch = engine.generate(mixed_prompts(), SamplingParams(max_new_tokens=9, temperature=0.7))
    fake.calls.all.clear()
    scored = engine.score([c.prompt_ids for c in batch], [c.token_ids for c in batch], temperature=0.7)
    assert fake.calls.all
    for completion, numbers in zip(batch, scored, strict=True):
        assert max(abs(a - b) for a, b in zip(numbers, completion.policy_logprobs, strict=True)) < 2e-4


def test_pages_survive_growth_and_release(use: Callable[[Fake], Fake]) -> None:
    use(FakeFlash2())
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model, config={"page_size": 4, "attn_implementation": "flash"})
    engine.add_request([5, 6, 7], SamplingParams(max_new_tokens=12, temperature=0))
    done = engine.step()
    small = engine.cache_bytes
    engine.add_request(list(range(1, 40)), SamplingParams(max_new_tokens=30, temperature=0))
    while engine.has_work:
        done += engine.step()
        if engine.cache_bytes > small and len(done) == 0:
            small, _ = engine.cache_bytes, engine.release_memory()
    assert len(done) == 2
    for completion in done:
        assert_logprobs(model, completion, temperature=0.0)


def test_a_model_in_a_type_that_the_kernel_lost_is_refused_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine made under autocast has a bf16 cache. Outside of it the kernel does not serve the
    model: every call says so, the second one too, and under autocast it goes on."""
    fake = FakeVarlen()
    kernel = fake.kernel()
    kernel.limits = dataclasses.replace(kernel.limits, dtypes=(torch.bfloat16,))
    monkeypatch.setattr(rollout.attention, "find_kernel", lambda name, device: kernel)
    config = EngineConfig(page_size=4, attn_implementation="varlen", native_kernels=False)
    with torch.autocast("cpu", torch.bfloat16):
        engine = RolloutEngine(TINY_MODELS["llama"](), config=config)
    params = SamplingParams(max_new_tokens=3, temperature=0)
    for _ in range(2):
        with pytest.raises((ValueError, RolloutError), match=r"keys and values are torch\.float32"):
            engine.generate([[1, 2, 3]], params)
    with torch.autocast("cpu", torch.bfloat16):
        assert len(engine.generate([[1, 2, 3]], params)[0].token_ids) == 3


def test_another_kernel_for_the_same_model_gets_another_cache(use: Callable[[Fake], Fake]) -> None:
    """A view made anew looks for kernels anew: the one found then may need other pages."""
    use(FakeVarlen())
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model, config={"attn_implementation": "varlen", "native_kernels": False})
    params = SamplingParams(max_new_tokens=5, temperature=0)
    engine.generate([[1, 2, 3]], params)
    assert engine._stepper.cache.page_size == 32
    fake = FakeVarlen(page_multiple=24)
    kernel = fake.kernel()
    kernel.limits = dataclasses.replace(kernel.limits, page_multiple=24)
    fake.kernel = lambda: kernel  # type: ignore[method-assign]
    use(fake)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # type: ignore[union-attr]
    (completion,) = engine.generate([[1, 2, 3]], params)
    assert engine._stepper.cache.page_size == 48
    assert_logprobs(model, completion, temperature=0.0)
