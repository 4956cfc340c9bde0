"""Stacks of fused layers: which layers are stacked, and that one call gives what single layers give."""

import logging

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from oracle import assert_greedy, assert_logprobs
from rollout import RolloutEngine, SamplingParams, engine
from rollout.fused import FusedLayer
from rollout.native import load_kernels
from rollout.stacked import LayerStack, stack_layers, unstack_layers
from test_fused import CPU, FUSED, make_prepared
from tiny_models import TINY_MODELS

pytestmark = pytest.mark.skipif(
    load_kernels().layers is None, reason="this CPU has no bf16 dot products, or it has AMX"
)
PROMPTS = [[5, 6, 7, 8, 9], [11, 3], list(range(20, 50)), [5, 6, 7, 8, 2, 1]]
PARAMS = SamplingParams(max_new_tokens=12, n=3, seed=3, ignore_eos=True)


def fused_view(name: str = "llama_wide") -> nn.Module:
    view = make_prepared(TINY_MODELS[name]())
    with torch.no_grad():
        assert engine.fuse_layers(view, load_kernels(), CPU, 256) == 2
    return view


def stack(view: nn.Module) -> int:
    with torch.no_grad():
        return stack_layers(view, load_kernels(), CPU)


@pytest.mark.parametrize("name", sorted(FUSED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_gives_what_its_layers_give(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TINY_MODELS[name]().to(dtype)
    stacked = RolloutEngine(model)
    with load_kernels().timing() as seconds:
        found = stacked.generate(PROMPTS, PARAMS)
    assert {"decode_layers", "start_layer"} <= set(seconds)  # decode steps and prompts
    monkeypatch.setattr(engine, "stack_layers", lambda *_: 0)
    alone = RolloutEngine(model)
    with load_kernels().timing() as seconds:
        expected = alone.generate(PROMPTS, PARAMS)
    assert "decode_layers" not in seconds
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_stacked_decoding_agrees_with_a_plain_forward(name: str) -> None:
    model = TINY_MODELS[name]()
    rollout_engine = RolloutEngine(model)
    greedy = rollout_engine.generate(PROMPTS, SamplingParams(max_new_tokens=10, temperature=0))
    for completion in greedy:
        assert_greedy(model, completion)
    for completion in rollout_engine.generate(PROMPTS, PARAMS):
        assert_logprobs(model, completion)


def test_a_weight_change_reaches_the_stack() -> None:
    model = TINY_MODELS["llama_wide"]()
    rollout_engine = RolloutEngine(model)
    rollout_engine.generate(PROMPTS, PARAMS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        norm = model.model.layers[1].input_layernorm.weight
        norm.data = norm.data * 0.5  # another tensor altogether
    changed = rollout_engine.generate(PROMPTS, PARAMS)
    for ours, theirs in zip(changed, RolloutEngine(model).generate(PROMPTS, PARAMS), strict=True):
        assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)


def test_released_memory_is_not_held_by_the_stack() -> None:
    rollout_engine = RolloutEngine(TINY_MODELS["llama_wide"](), config={"pack_weights": True})
    first = rollout_engine.generate(PROMPTS, PARAMS)
    assert first.metrics.derived_bytes > 0
    rollout_engine.release_memory()
    assert rollout_engine._packed.num_bytes == 0
    again = rollout_engine.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in again] == [c.token_ids for c in first]


def test_stacking_and_back() -> None:
    view = fused_view()
    layers = list(view.model.layers)
    assert stack(view) == 1
    assert [type(each) for each in view.model.layers] == [LayerStack]
    assert [each for each in view.modules() if isinstance(each, FusedLayer)] == layers
    unstack_layers(view)
    assert list(view.model.layers) == layers


class Between(nn.Module):
    """A model that does something between its layers, or wants to know how many they are."""

    def __init__(self, model: nn.Module, way: str) -> None:
        super().__init__()
        self.inner, self.way = model, way

    def forward(self, input_ids, position_ids, use_cache, rollout_step):  # type: ignore[no-untyped-def]
        core = self.inner.model
        hidden = core.embed_tokens(input_ids)
        angles = core.rotary_emb(hidden, position_ids)
        for i in range(2 if self.way == "counts" else len(core.layers)):
            if self.way == "turns" and i == 1:
                angles = angles[1], angles[0]
            hidden = core.layers[i](hidden, position_embeddings=angles, rollout_step=rollout_step)
            if self.way == "adds":
                hidden = hidden + 1
        return self.inner.lm_head(hidden), hidden


class Output(nn.Module):
    """Gives what transformers' models give."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs):  # type: ignore[no-untyped-def]
        return CausalLMOutput(logits=self.model(**kwargs)[0])


@pytest.mark.parametrize("way", ["plain", "adds", "turns", "counts"])
def test_layers_that_the_model_treats_apart_are_not_stacked(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    inner = fused_view()
    layers = list(inner.model.layers)
    view = Output(Between(inner, way))
    with caplog.at_level(logging.INFO, logger="rollout"):
        count = stack(view)
    assert count == (1 if way == "plain" else 0)
    if way != "plain":
        assert list(inner.model.layers) == layers
    assert ("layers are not stacked: IndexError" in caplog.text) == (way == "counts")
