"""A model that is changed into one that cannot be served, and back: nothing of it is left behind.

``is_causal = False`` on an attention layer stands for all that is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rollout import RolloutEngine, RolloutError, SamplingParams
from rollout.manager import ContinuousBatchingManager
from rollout.types import FinishReason, UnsupportedModelError
from tiny_models import TINY_MODELS

PROMPTS = [[i + 1, i + 2, i + 3] for i in range(8)]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)


@contextmanager
def refusable(model: Any) -> Iterator[None]:
    attention = model.model.layers[0].self_attn
    attention.is_causal = False
    yield
    attention.is_causal = True


def overwrite(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.3)


@pytest.mark.parametrize("pack", [True, False])
def test_after_a_refusal_no_derived_copy_is_of_other_weights(pack: bool) -> None:
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model, config={"pack_weights": pack})
    engine.generate(PROMPTS, GREEDY)
    with refusable(model), pytest.raises(UnsupportedModelError, match="not causal"):
        engine.generate(PROMPTS, GREEDY)
    copies = engine.generate(PROMPTS, GREEDY).metrics.derived_bytes
    assert (copies > 0) is pack
    overwrite(model)
    after, fresh = engine.generate(PROMPTS, GREEDY), RolloutEngine(model).generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in after] == [c.token_ids for c in fresh]
    assert after.metrics.derived_bytes == copies
    engine.release_memory()
    assert engine._packed.num_bytes == 0


def test_a_refusal_is_no_look_at_the_weights() -> None:
    """Requests in flight must not go on under weights that nobody has noticed."""
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model, config={"page_size": 4})
    engine.add_request([1, 2, 3], GREEDY)
    engine.step()
    with refusable(model):
        overwrite(model)
        for call in (lambda: engine.score([[1]], [[2]]), lambda: engine.generate([[1]], GREEDY)):
            with pytest.raises(UnsupportedModelError):
                call()
        (failed,) = engine.step()
    assert failed.finish_reason is FinishReason.ERROR and "not causal" in str(failed.error)
    assert engine.generate([[1]], GREEDY)[0].versions == (1,) * 6


def test_a_refused_autocast_is_looked_at_again() -> None:
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model)
    with refusable(model), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            with pytest.raises(UnsupportedModelError):
                engine.generate(PROMPTS, GREEDY)
    plain = RolloutEngine(TINY_MODELS["llama"]()).generate(PROMPTS, GREEDY)
    again = engine.generate(PROMPTS, GREEDY)
    assert [c.policy_logprobs for c in again] == [c.policy_logprobs for c in plain]


def test_a_refusal_after_a_pause_fails_the_requests_and_leaves_the_manager() -> None:
    engine = RolloutEngine(TINY_MODELS["llama"](), config={"page_size": 4})
    manager = ContinuousBatchingManager(engine, GREEDY)
    manager.start()
    request_id = manager.add_request([5, 6], max_new_tokens=200, streaming=True)
    manager.get_result(request_id, timeout=30)
    with refusable(engine.model):
        with manager.pause():
            pass
        *_, last = manager.request_id_iter(request_id)
        assert "not causal" in last.error
    assert manager.get_result(manager.add_request([5, 6]), timeout=30).error is None
    manager.stop(timeout=30)


def test_a_view_with_another_position_limit_gets_a_cache_for_it() -> None:
    model = TINY_MODELS["llama"](max_position_embeddings=16)
    engine = RolloutEngine(model, config={"page_size": 4})
    params = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
    assert engine.generate([[1, 2]], params)[0].finish_reason is FinishReason.MAX_POSITION
    model.config.max_position_embeddings = 64
    model.marker = 1  # a setting: the view is made again
    (longer,) = engine.generate([[1, 2]], params)
    assert longer.finish_reason is FinishReason.LENGTH and len(longer.token_ids) == 40


def test_an_engine_that_was_refused_at_its_request_can_be_asked_again() -> None:
    engine = RolloutEngine(TINY_MODELS["llama"]())
    with pytest.raises(RolloutError):
        engine.generate([[5000]], GREEDY)
    assert engine.generate([[5]], GREEDY)[0].error is None
