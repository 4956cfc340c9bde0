"""Fused decoder layers: which layers are taken, that they compute the same, that the rest stay."""

import logging

import pytest
import torch
from torch import Tensor, nn
from transformers import GraniteConfig, GraniteForCausalLM

from rollout import RolloutEngine, SamplingParams
from rollout.attention import make_backend
from rollout.fused import FusedLayer, fuse_layers, unfuse_layers
from rollout.native import load_kernels
from rollout.packing import JointLinear, PackedLinears
from rollout.probe import probe
from rollout.runner import engine_mode, set_attention
from rollout.weights import make_view
from tiny_models import TINY_MODELS, VOCAB_SIZE

FUSED = {"llama_wide", "qwen2", "qwen3_wide", "mistral"}
"""The others have heads of 16 or 24, another order of norms, another MLP or joined projections."""
CPU = torch.device("cpu")


def make_prepared(model: nn.Module, pack: bool = True) -> nn.Module:
    view = make_view(model)
    set_attention(view)
    packed = PackedLinears(pack)
    packed.install(view)
    with engine_mode(), packed.watching():
        probe(view, model.config, CPU)
    return view


def logits_of(view: nn.Module, ids: Tensor) -> Tensor:
    """Each token attends to itself: layers are compared, not attention."""
    step = _OwnValues()
    with engine_mode():
        positions = torch.arange(3, 3 + ids.shape[1])[None]
        logits: Tensor = view(
            input_ids=ids, position_ids=positions, use_cache=False, rollout_step=step
        ).logits
    return logits


class _OwnValues:
    """Mixes queries and keys into the answer, so that a wrong one shows."""

    def attend(self, module, query, key, value, attention_mask, options):  # type: ignore[no-untyped-def]
        by_token = (x[0].transpose(0, 1) for x in (query, key, value))
        return self.attend_tokens(module, *by_token, options)[None]

    def attend_tokens(self, module, query, key, value, options):  # type: ignore[no-untyped-def]
        groups = query.shape[1] // value.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        share = torch.sigmoid((query * key).sum(-1, keepdim=True) * options["scaling"])
        return (value * share).to(value.dtype)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_which_architectures_are_fused(name: str) -> None:
    view = make_prepared(TINY_MODELS[name]())
    with engine_mode():
        count = fuse_layers(view, load_kernels(), CPU)
    assert count == (2 if name in FUSED else 0)
    assert sum(isinstance(module, FusedLayer) for module in view.modules()) == count


@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("name", sorted(FUSED))
def test_fused_layers_compute_the_same(name: str, pack: bool, mode: str) -> None:
    model = TINY_MODELS[name]().to(torch.bfloat16 if mode == "bf16" else torch.float32)
    ids = torch.arange(12)[None] * 7 % VOCAB_SIZE
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
        view = make_prepared(model, pack)
        expected = logits_of(view, ids)
        with engine_mode():
            count = fuse_layers(view, load_kernels(), CPU)
        # heads' norms multiply in fp32 under autocast: those layers stay plain
        assert count == (0 if (name, mode) == ("qwen3_wide", "autocast") else 2)
        found = logits_of(view, ids)
        unfuse_layers(view)
        assert torch.equal(logits_of(view, ids), expected)
    tolerance = 2e-5 if mode == "fp32" else 2**-5  # two layers of roundings
    size = expected.float().abs().max()
    assert (found.float() - expected.float()).abs().max() <= tolerance * size


def test_a_layer_that_computes_something_else_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Granite's modules have the same names, but its residuals are scaled."""
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.3,
        "pad_token_id": None,
    }
    kernels = load_kernels()
    scaled = make_prepared(GraniteForCausalLM(GraniteConfig(**settings, residual_multiplier=0.3)).eval())
    with caplog.at_level(logging.INFO, logger="rollout"), engine_mode():
        assert fuse_layers(scaled, kernels, CPU) == 0
    assert "GraniteDecoderLayer is not fused: ValueError: its results differ" in caplog.text
    neutral = make_prepared(GraniteForCausalLM(GraniteConfig(**settings)).eval())
    with engine_mode():
        assert fuse_layers(neutral, kernels, CPU) == 2  # a multiplier of 1 is no difference


def test_another_activation_is_seen() -> None:
    view = make_prepared(TINY_MODELS["llama_wide"](hidden_act="gelu"))
    with engine_mode():
        assert fuse_layers(view, load_kernels(), CPU) == 0


def test_a_weight_changed_in_place_is_used() -> None:
    """The fused layer holds the trainer's tensors, not copies of them."""
    model = TINY_MODELS["llama_wide"]()
    engine = RolloutEngine(model)
    params = SamplingParams(max_new_tokens=8, seed=1)
    engine.generate([[5, 6, 7]], params)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(-1.3)
    changed = engine.generate([[5, 6, 7]], params)[0]
    fresh = RolloutEngine(model).generate([[5, 6, 7]], params)[0]
    assert (changed.token_ids, changed.logprobs) == (fresh.token_ids, fresh.logprobs)


def test_autocast_entered_later_is_tried_anew() -> None:
    model = TINY_MODELS["qwen3_wide"]()
    engine = RolloutEngine(model)
    params = SamplingParams(max_new_tokens=8, seed=1)
    engine.generate([[5, 6, 7]], params)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        later = engine.generate([[5, 6, 7]], params)[0]
        fresh = RolloutEngine(model).generate([[5, 6, 7]], params)[0]
    assert (later.token_ids, later.logprobs) == (fresh.token_ids, fresh.logprobs)


def test_joint_linears_are_the_linears_side_by_side() -> None:
    view = make_prepared(TINY_MODELS["qwen2"]())
    attention = view.model.layers[0].self_attn
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    x = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))
    with engine_mode():
        side_by_side = torch.cat([module(x) for module in modules], dim=-1)
        assert torch.equal(JointLinear(modules)(x), side_by_side)
        # in an order that is not the packed one, and with a stranger among them
        turned = torch.cat([module(x) for module in modules[::-1]], dim=-1)
        assert torch.equal(JointLinear(modules[::-1])(x), turned)
        stranger = nn.Sequential(modules[0])
        assert torch.equal(JointLinear([stranger, *modules[1:]])(x), side_by_side)


def test_native_attention_is_refused_with_the_reason() -> None:
    layout = probe(make_prepared(TINY_MODELS["qwen3"]()), TINY_MODELS["qwen3"]().config, CPU).layout
    with pytest.raises(ValueError, match=r"not possible here: head dims are \[24\]"):
        make_backend("native", layout, load_kernels())
    with pytest.raises(ValueError, match="there are no compiled kernels; use 'auto'"):
        make_backend("native", layout, None)
    assert type(make_backend("auto", layout, load_kernels())).__name__ == "SdpaAttention"
