"""Fused decoder layers: which layers are taken, that they compute the same, that the rest stay."""

import logging

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import GraniteConfig, GraniteForCausalLM, Ministral3Config, Ministral3ForCausalLM

from oracle import assert_greedy, assert_logprobs
from rollout import RolloutEngine, SamplingParams
from rollout.attention import make_backend
from rollout.fused import FusedLayer, Trial, fuse_layers, unfuse_layers
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
    packed.install(view, load_kernels().products)
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
        count = fuse_layers(view, load_kernels(), CPU, 256)
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
            count = fuse_layers(view, load_kernels(), CPU, 256)
        # heads' norms multiply in fp32 under autocast: those layers stay plain
        assert count == (0 if (name, mode) == ("qwen3_wide", "autocast") else 2)
        found = logits_of(view, ids)
        unfuse_layers(view)
        assert torch.equal(logits_of(view, ids), expected)
    tolerance = 2e-5 if mode == "fp32" else 2**-5  # two layers of roundings
    size = expected.float().abs().max()
    assert (found.float() - expected.float()).abs().max() <= tolerance * size


def count_fused(model: nn.Module) -> int:
    view = make_prepared(model)
    with engine_mode():
        return fuse_layers(view, load_kernels(), CPU, 256)


def spiked(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """With one hidden channel a thousand times the others, as trained models have them."""
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 300.0
    return model.to(dtype)


SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
    "pad_token_id": None,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_computes_something_else_is_left_alone(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Granite's modules have the same names, but its residuals are scaled."""
    with caplog.at_level(logging.INFO, logger="rollout"):
        scaled = GraniteForCausalLM(GraniteConfig(**SMALL, residual_multiplier=0.22)).eval()
        assert count_fused(spiked(scaled, dtype)) == 0
    assert "GraniteDecoderLayer is not fused: ValueError: its results differ" in caplog.text
    assert "0 of 2 decoder layers are fused" in caplog.text
    neutral = GraniteForCausalLM(GraniteConfig(**SMALL)).eval()
    assert count_fused(spiked(neutral, dtype)) == 2  # a multiplier of 1 is no difference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_activation_is_seen(dtype: torch.dtype) -> None:
    model = TINY_MODELS["llama_wide"](hidden_act="gelu")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()  # as some models start: nothing of the MLP shows
    assert count_fused(spiked(model, dtype)) == 0


def test_queries_that_change_at_far_positions_are_seen() -> None:
    """Ministral 3 scales queries from a position on; before it, its layers are Llama's."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.1,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = Ministral3Config(**SMALL, head_dim=32, max_position_embeddings=256, rope_parameters=rope)
    assert count_fused(Ministral3ForCausalLM(config).eval()) == 0


def test_a_tensor_of_the_layers_own_is_not_overlooked() -> None:
    """A gate that is 1 today is something else after a step."""
    model = TINY_MODELS["llama_wide"]()
    model.model.layers[0].gate = nn.Parameter(torch.ones(1))
    assert count_fused(model) == 1


def test_a_model_that_cannot_be_tried_keeps_its_layers(caplog: pytest.LogCaptureFixture) -> None:
    class Peeking(nn.Module):
        """Looks into its first layer, which is a stranger during the trial."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **kwargs: object) -> object:
            assert self.model.model.layers[0].hidden_size == 64
            return self.model(**kwargs)

    view = Peeking(make_prepared(TINY_MODELS["llama_wide"]()))
    with caplog.at_level(logging.INFO, logger="rollout"), engine_mode():
        assert fuse_layers(view, load_kernels(), CPU, 256) == 0
    assert "no layer is fused: AttributeError" in caplog.text
    assert not any(isinstance(module, (FusedLayer, Trial)) for module in view.modules())


def test_the_trial_changes_nothing_of_the_model() -> None:
    model = TINY_MODELS["qwen3_wide"]()
    before = {name: (p.clone(), p._version) for name, p in model.named_parameters()}
    state = torch.random.get_rng_state()
    assert count_fused(model) == 2
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0]) and parameter._version == before[name][1]


@pytest.mark.parametrize(("inner", "fills_panels"), [(80, False), (96, True), (48, False)])
def test_gates_that_do_not_fill_panels(inner: int, fills_panels: bool) -> None:
    """A layer's halves are one call each only where its gates end with a panel of 32."""
    kernels = load_kernels()
    if kernels.products is None:
        pytest.skip("this CPU has no bf16 dot products: oneDNN multiplies")
    view = make_prepared(TINY_MODELS["llama_wide"](intermediate_size=inner))
    ids = torch.arange(12)[None] * 7 % VOCAB_SIZE
    expected = logits_of(view, ids)
    with engine_mode():
        assert fuse_layers(view, kernels, CPU, 256) == 2
    layers = [each for each in view.modules() if isinstance(each, FusedLayer)]
    assert [each.weights(torch.float32) is not None for each in layers] == [fills_panels] * 2
    assert (logits_of(view, ids) - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("target", ["q_proj", "down_proj"])
def test_adapters_around_linears_of_fused_layers(target: str) -> None:
    """Added, trained, switched off and on: always what the trainer's own forward gives."""
    model = TINY_MODELS["llama_wide"]()
    engine = RolloutEngine(model)
    params = SamplingParams(max_new_tokens=8, temperature=0)
    engine.generate([[5, 6, 7]], params)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[target]))
    engine = RolloutEngine(tuned)
    assert sum(isinstance(module, FusedLayer) for module in engine._weights.view.modules()) == 2
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    for completion in engine.generate([[5, 6, 7]], params):
        assert_logprobs(tuned, completion)
        assert_greedy(tuned, completion)
    with tuned.disable_adapter():
        for completion in engine.generate([[5, 6, 7]], params):
            assert_logprobs(tuned, completion)


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
