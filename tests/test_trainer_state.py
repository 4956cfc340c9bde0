"""A rollout leaves no trace on the trainer: tensors, flags, hooks, config, random state, autograd."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rollout import RolloutEngine, RolloutError, SamplingParams
from tiny_models import TINY_MODELS

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
PARAMS = SamplingParams(max_new_tokens=5, n=2)


def trained_model() -> nn.Module:
    """A model in the middle of training: dropout on, one layer frozen in eval, a hook, grads."""
    model = TINY_MODELS["gpt2"](attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    model.train()
    model.transformer.h[0].eval()
    model.transformer.h[1].requires_grad_(False)
    model.register_forward_hook(lambda *_: None)
    model.activation_checkpointing_enable()
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    return model


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a trainer could notice."""
    modules = {
        name: {key: repr(value) for key, value in vars(module).items()} | {"id": id(module)}
        for name, module in model.named_modules()
    }
    tensors = {
        name: (id(t), t.data_ptr(), t.dtype, t.requires_grad, t._version, t.is_inference(), t.clone())
        for name, t in [*model.named_parameters(), *model.named_buffers()]
    }
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {"modules": modules, "tensors": tensors, "grads": grads, "config": model.config.to_dict()}


def assert_equal(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before["modules"] == after["modules"]
    assert before["config"] == after["config"]
    assert before["tensors"].keys() == after["tensors"].keys()
    for name, (*facts, value) in before["tensors"].items():
        *facts_after, value_after = after["tensors"][name]
        assert facts == facts_after, name
        assert torch.equal(value, value_after), name
    for name, grad in before["grads"].items():
        grad_after = after["grads"][name]
        assert (grad is None) == (grad_after is None), name
        assert grad is None or torch.equal(grad, grad_after), name


def rollout_well(engine: RolloutEngine) -> None:
    engine.generate(PROMPTS, PARAMS)


def rollout_with_refused_prompt(engine: RolloutEngine) -> None:
    with pytest.raises(RolloutError):
        engine.generate([*PROMPTS, []], PARAMS)


def rollout_that_crashes(engine: RolloutEngine) -> None:
    def explode(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, SamplingParams(logits_processors=(explode,)))


ROLLOUTS = [rollout_well, rollout_with_refused_prompt, rollout_that_crashes]


@pytest.mark.parametrize("rollout", ROLLOUTS, ids=lambda rollout: rollout.__name__)
def test_everything_about_the_model_is_as_before(rollout: Callable[[RolloutEngine], None]) -> None:
    model = trained_model()
    before = snapshot(model)
    engine = RolloutEngine(model)
    assert_equal(before, snapshot(model))
    rollout(engine)
    assert_equal(before, snapshot(model))
    assert model._forward_hooks and not engine._weights.view._forward_hooks


@pytest.mark.parametrize("rollout", ROLLOUTS, ids=lambda rollout: rollout.__name__)
def test_no_random_state_moves_and_the_next_dropout_mask_is_the_same(
    rollout: Callable[[RolloutEngine], None],
) -> None:
    model = trained_model()
    engine = RolloutEngine(model)
    mask = nn.Dropout(0.5)
    torch.manual_seed(11)
    expected = mask(torch.ones(64))
    torch.manual_seed(11)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    rollout(engine)
    assert torch.equal(states[0], torch.get_rng_state())
    assert all(np.array_equal(a, b) for a, b in zip(states[1], np.random.get_state(), strict=True))
    assert states[2] == random.getstate()
    assert torch.equal(mask(torch.ones(64)), expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_training_goes_on_after_a_rollout_under_any_mode(mode: Callable[[], Any]) -> None:
    """Tensors made in inference mode break a later backward: none may stay behind."""
    model = trained_model()
    with mode():
        engine = RolloutEngine(model)
        engine.generate(PROMPTS, PARAMS)
    engine.generate(PROMPTS, PARAMS)  # the pages made above are written again in another mode
    model.zero_grad()
    loss = model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
    loss.backward()
    assert model.transformer.h[0].attn.c_attn.weight.grad is not None
    assert torch.is_grad_enabled()


def test_dropout_is_off_while_generating_and_stays_on_for_training() -> None:
    model = trained_model()
    engine = RolloutEngine(model)
    greedy = SamplingParams(max_new_tokens=5, temperature=0)
    assert (
        engine.generate(PROMPTS, greedy)[0].policy_logprobs
        == engine.generate(PROMPTS, greedy)[0].policy_logprobs
    )
    ids = torch.tensor([PROMPTS[0]])
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_the_checkpoints_generation_config_changes_nothing_but_eos() -> None:
    model = TINY_MODELS["llama"]()
    plain = RolloutEngine(model).generate(PROMPTS, SamplingParams(max_new_tokens=5, seed=1))
    model.generation_config.top_p = 0.1
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.temperature = 0.1
    model.generation_config.max_new_tokens = 2
    again = RolloutEngine(model).generate(PROMPTS, SamplingParams(max_new_tokens=5, seed=1))
    assert [c.token_ids for c in plain] == [c.token_ids for c in again]
