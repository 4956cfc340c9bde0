"""Pages of preempted sequences in host memory: the same tokens with and without, and nothing left behind."""

import gc
import logging
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.types import RolloutMetrics
from tiny_models import TINY_MODELS

PROMPTS = [[5 + i, 6, 7, 8 + i, 9] for i in range(8)]
DRAWN = SamplingParams(max_new_tokens=14, ignore_eos=True, seed=3)
GIB = 2**30


def engine(name: str = "llama", model: torch.nn.Module | None = None, **settings: object) -> RolloutEngine:
    """One whose cache holds about two of the eight sequences."""
    config = {"page_size": 4, "num_blocks": 11, "safety_margin": 0.0, **settings}
    return RolloutEngine(TINY_MODELS[name]() if model is None else model, config=config)


def run(made: RolloutEngine) -> tuple[list[tuple[int, ...]], list[float], RolloutMetrics]:
    batch = made.generate(PROMPTS, DRAWN)
    made.check()
    return [c.token_ids for c in batch], [p for c in batch for p in c.logprobs], batch.metrics


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("space", [0.001, None], ids=str)
def test_tokens_and_logprobs_are_those_of_computing_again(name: str, space: float | None) -> None:
    ids, logprobs, again = run(engine(name))
    assert again.num_preemptions > 0 and again.pages_saved == again.pages_loaded == 0
    saved_ids, saved_logprobs, metrics = run(engine(name, cpu_offload_space=space))
    assert metrics.num_preemptions > 0 and metrics.pages_saved == metrics.pages_loaded > 0
    assert metrics.computed_tokens < again.computed_tokens, "nothing is computed twice"
    assert saved_ids == ids
    assert saved_logprobs == pytest.approx(logprobs, abs=2e-5)


def test_little_space_serves_some_and_computes_the_others_again() -> None:
    ids, _, _ = run(engine())
    made = engine()
    page_bytes = sum(made._stepper.plan.layout.page_bytes(4))
    some_ids, _, metrics = run(engine(cpu_offload_space=3 * page_bytes / GIB))
    _, _, all_of_them = run(engine(cpu_offload_space=1.0))
    assert some_ids == ids
    assert 0 < metrics.pages_saved < all_of_them.pages_saved


def step_until_saved(made: RolloutEngine) -> "weakref.ref[torch.Tensor]":
    """Returns a host copy of some sequence's keys."""
    for prompt in PROMPTS:
        made.add_request(prompt, DRAWN)
    for _ in range(100):
        made.step()
        for sequence in made._stepper.scheduler.waiting:
            if sequence.saved is not None and sequence.saved.stored:
                return weakref.ref(sequence.saved.stored[0][0])
    raise AssertionError("nothing was saved")


def finish(made: RolloutEngine) -> list[tuple[int, ...]]:
    done = []
    while made.has_work:
        done += made.step()
    return [c.token_ids for c in sorted(done, key=lambda c: c.prompt_ids)]


def test_copies_are_freed_when_they_are_loaded_or_of_no_use() -> None:
    for let_go in (
        finish,
        RolloutEngine.release_memory,
        RolloutEngine.refresh_weights,
        lambda made: [made.cancel_request(s.request.request_id) for s in made._stepper.scheduler.waiting],
    ):
        made = engine(cpu_offload_space=1.0)
        copy = step_until_saved(made)
        assert copy() is not None
        let_go(made)
        gc.collect()
        assert copy() is None
        finish(made)
        made.check()


def test_copies_of_old_weights_are_not_loaded_under_new_ones() -> None:
    def tokens(**settings: object) -> list[tuple[int, ...]]:
        model = TINY_MODELS["llama"]()
        made = engine(model=model, **settings)
        for prompt in PROMPTS:
            made.add_request(prompt, DRAWN)
        early = [c for _ in range(9) for c in made.step()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        return [c.token_ids for c in early] + finish(made)

    assert tokens(cpu_offload_space=1.0) == tokens()


def test_more_than_the_threshold_is_cut_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 100 * GIB
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    with caplog.at_level(logging.WARNING, "rollout"):
        made = engine(cpu_offload_space=50.0, cpu_offload_space_safety_threshold=0.25)
    assert "cpu_offload_space_safety_threshold=0.25 of the available memory; 25.00 GiB" in caplog.text
    assert made._stepper.capacity.swap_bytes() == int(0.25 * free)
    assert engine(cpu_offload_space=None)._stepper.capacity.swap_bytes() == int(0.8 * free)
    assert engine(cpu_offload_space=2.0)._stepper.capacity.swap_bytes() == 2 * GIB
    assert engine()._stepper.capacity.swap_bytes() == 0
