"""Stacks of fused layers: which layers are stacked, and that one call gives what single layers give."""

import gc
import logging
import weakref

import peft
import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from oracle import assert_greedy, assert_logprobs
from rollout import RolloutEngine, SamplingParams, engine, scoring, stacked
from rollout.fused import FusedLayer
from rollout.native import Kernels, load_kernels
from rollout.packing import PackedLinears
from rollout.stacked import LayerStack, stack_layers, unstack_layers
from test_fused import CPU, FUSED, SMALL, make_prepared
from tiny_models import TINY_MODELS


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Kernels:
    made = load_kernels()
    if made.layers is None:
        pytest.skip("this CPU has no bf16 dot products: layers are not stacked")
    return made


PROMPTS = [[5, 6, 7, 8, 9], [11, 3], list(range(20, 50)), [5, 6, 7, 8, 2, 1]]
PARAMS = SamplingParams(max_new_tokens=12, n=3, seed=3, ignore_eos=True)


def fused_view(name: str = "llama_wide") -> nn.Module:
    view = make_prepared(TINY_MODELS[name]())
    with torch.no_grad():
        assert engine.fuse_layers(view, load_kernels(), CPU, 256) == 2
    return view


def stack(view: nn.Module) -> int:
    with torch.no_grad():
        return stack_layers(view, load_kernels(), PackedLinears(True), CPU)


@pytest.mark.parametrize("name", sorted(FUSED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_gives_what_its_layers_give(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TINY_MODELS[name]().to(dtype)
    assert generate_with_and_without(model, monkeypatch) == (True, True)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_stacked_decoding_agrees_with_a_plain_forward(name: str) -> None:
    model = TINY_MODELS[name]()
    rollout_engine = RolloutEngine(model)
    greedy = rollout_engine.generate(PROMPTS, SamplingParams(max_new_tokens=10, temperature=0))
    for completion in greedy:
        assert_greedy(model, completion)
    for completion in rollout_engine.generate(PROMPTS, PARAMS):
        assert_logprobs(model, completion)


def stack_of(rollout_engine: RolloutEngine) -> LayerStack:
    view = rollout_engine._weights.view
    (found,) = (each for each in view.modules() if isinstance(each, LayerStack))
    return found


@pytest.mark.parametrize("is_another_tensor", [False, True])
def test_a_weight_change_reaches_the_stack(is_another_tensor: bool) -> None:
    model = TINY_MODELS["llama_wide"]()
    rollout_engine = RolloutEngine(model)
    rollout_engine.generate(PROMPTS, PARAMS)
    stack = stack_of(rollout_engine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        norm = model.model.layers[1].input_layernorm.weight
        if is_another_tensor:
            norm.data = norm.data * 0.5
    changed = rollout_engine.generate(PROMPTS, PARAMS)
    for ours, theirs in zip(changed, RolloutEngine(model).generate(PROMPTS, PARAMS), strict=True):
        assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)
    assert (stack_of(rollout_engine) is stack) == (not is_another_tensor)


def test_a_call_is_made_ready_once_for_weights_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    plain = Kernels.decode_call
    monkeypatch.setattr(Kernels, "decode_call", lambda *args: made.append(args) or plain(*args))
    rollout_engine = RolloutEngine(TINY_MODELS["llama_wide"]())
    rollout_engine.generate(PROMPTS, PARAMS)
    first = len(made)  # the pages of the first steps may not have been enough
    rollout_engine.generate(PROMPTS, PARAMS)
    assert len(made) == first
    rollout_engine._packed.release()  # the pages stay
    expected = rollout_engine.generate(PROMPTS, PARAMS)
    assert len(made) == first + 1
    rollout_engine.release_memory()
    found = rollout_engine.generate(PROMPTS, PARAMS)
    assert len(made) > first + 1
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]


def test_a_stack_does_not_hold_the_pages_it_was_last_called_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring has pages of its own, and its last chunk may be a single token."""
    model = TINY_MODELS["llama_wide"]()
    rollout_engine = RolloutEngine(model)
    rollout_engine.generate(PROMPTS, PARAMS)
    before = stack_of(rollout_engine)._stamps
    monkeypatch.setattr(scoring, "MAX_LOGITS", 16 * model.config.vocab_size)
    rollout_engine.score([[1] * 4], [[2] * 14])  # steps of 16 tokens and of one
    after = stack_of(rollout_engine)._stamps
    assert after != before
    gc.collect()
    assert after[1][0]() is None


def test_released_memory_is_not_held_by_the_stack() -> None:
    rollout_engine = RolloutEngine(TINY_MODELS["llama_wide"](), config={"pack_weights": True})
    first = rollout_engine.generate(PROMPTS, PARAMS)
    packed = [group._packed for group in rollout_engine._packed._groups() if group._packed is not None]
    panels = [weakref.ref(each.weight) for each in packed]
    assert len(panels) == 9  # four products of two layers, and the head
    del packed
    rollout_engine.release_memory()
    assert [ref() for ref in panels] == [None] * 9
    again = rollout_engine.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in again] == [c.token_ids for c in first]


def generate_with_and_without(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, **config: object
) -> tuple[bool, bool]:
    """Whether one call served decode steps, and whether the completions are those of single layers."""
    with load_kernels().timing() as seconds:
        found = RolloutEngine(model, config=config).generate(PROMPTS, PARAMS)
    monkeypatch.setattr(engine, "stack_layers", lambda *_: 0)
    expected = RolloutEngine(model, config=config).generate(PROMPTS, PARAMS)
    assert not any(completion.error for completion in found)
    are_same = all(
        (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)
        for ours, theirs in zip(found, expected, strict=True)
    )
    return "decode_layers" in seconds, are_same


def test_layers_with_and_without_a_window_in_one_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Qwen2Config(
        **{**SMALL, "num_hidden_layers": 4, "vocab_size": 128},
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        use_sliding_window=True,
    )
    torch.manual_seed(0)
    assert generate_with_and_without(Qwen2ForCausalLM(config).eval(), monkeypatch) == (True, True)


@pytest.mark.parametrize("config", [{"pack_weights": False}, {"attn_implementation": "sdpa"}])
def test_steps_that_one_call_cannot_serve(config: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    assert generate_with_and_without(TINY_MODELS["llama_wide"](), monkeypatch, **config) == (False, True)


def test_autocast_is_not_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert generate_with_and_without(TINY_MODELS["llama_wide"](), monkeypatch) == (False, True)


def test_gates_that_do_not_fill_panels_are_not_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY_MODELS["llama_wide"](intermediate_size=80)
    assert generate_with_and_without(model, monkeypatch) == (False, True)


def test_an_adapter_is_not_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = peft.get_peft_model(
        TINY_MODELS["llama_wide"](), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    asked: list[object] = []
    monkeypatch.setattr(Kernels, "decode_call", lambda *_: asked.append(None))
    assert generate_with_and_without(adapted, monkeypatch) == (False, True) and not asked


def test_layers_of_different_inner_sizes_in_one_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY_MODELS["llama_wide"]()
    mlp, hidden = model.model.layers[1].mlp, model.config.hidden_size
    with torch.no_grad():
        mlp.gate_proj, mlp.up_proj = (nn.Linear(hidden, 4096, bias=False) for _ in range(2))
        mlp.down_proj = nn.Linear(4096, hidden, bias=False)
    assert generate_with_and_without(model, monkeypatch) == (True, True)


@pytest.mark.parametrize("heads", [1, 8])
def test_layers_of_different_widths_are_not_stacked(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of one layer pruned or doubled: transformers reads their number off the projections."""
    model = TINY_MODELS["llama_wide"]()
    attention = model.model.layers[1].self_attn
    dim, keys = attention.head_dim, model.config.num_key_value_heads
    attention.num_key_value_groups = heads
    hidden = model.config.hidden_size
    with torch.no_grad():
        attention.q_proj = nn.Linear(hidden, heads * keys * dim, bias=False)
        attention.o_proj = nn.Linear(heads * keys * dim, hidden, bias=False)
    assert generate_with_and_without(model, monkeypatch) == (False, True)
    monkeypatch.undo()
    for completion in RolloutEngine(model).generate(PROMPTS, SamplingParams(max_new_tokens=8, temperature=0)):
        assert_greedy(model, completion)


class Strided(nn.Module):
    """Embeddings whose rows do not lie in one piece."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.plain(ids).transpose(1, 2).contiguous().transpose(1, 2)


def test_hidden_states_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY_MODELS["llama_wide"]()
    model.model.embed_tokens = Strided(model.model.embed_tokens)
    assert generate_with_and_without(model, monkeypatch) == (True, True)


class WideAngles(nn.Module):
    """fp32 angles whatever the model's dtype."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.plain(x, position_ids=position_ids)
        return cos.float(), sin.float()


def test_angles_of_another_dtype_go_through_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY_MODELS["llama_wide"]().bfloat16()
    model.model.rotary_emb = WideAngles(model.model.rotary_emb)
    view = make_prepared(model)
    with torch.no_grad():
        assert engine.fuse_layers(view, load_kernels(), CPU, 256) == 2
    assert generate_with_and_without(model, monkeypatch) == (False, True)


def test_an_interrupt_leaves_the_view_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    view = fused_view()
    layers = list(view.model.layers)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stacked, "_logits", interrupt)
        stack(view)
    assert list(view.model.layers) == layers and stack(view) == 1


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
