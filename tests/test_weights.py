"""The view and the weight versions: every kind of change is seen, nothing of the trainer's is used."""

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig, get_peft_model
from torch import nn

from oracle import assert_logprobs
from rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModelError
from rollout.weights import Checksum, WeightTracker, make_view, named_tensors
from tiny_models import TINY_MODELS

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
PARAMS = SamplingParams(max_new_tokens=6, temperature=1.0, seed=7)


def write_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)


def write_through_data(model: nn.Module) -> None:
    model.lm_head.weight.data += 0.01  # does not count as a write: Tensor._version stays


def flip_one_bit(model: nn.Module) -> None:
    bits = model.lm_head.weight.data.view(torch.int32)
    bits[3, 5] ^= 1


def negate(model: nn.Module) -> None:
    model.model.layers[0].mlp.up_proj.weight.data.neg_()  # the xor of all words stays the same


def swap_rows(model: nn.Module) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight.data
    weight[[0, 1]] = weight[[1, 0]]  # sum and xor stay the same


def load_other_weights(model: nn.Module) -> None:
    model.load_state_dict(TINY_MODELS["llama"](seed=5).state_dict())


def step_fused_adamw(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def step_foreach_sgd(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, foreach=True)
    model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def to_double(model: nn.Module) -> None:
    model.to(torch.float64)


def replace_parameter(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 0.5)


def change_a_buffer(model: nn.Module) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


CHANGES: list[Callable[[nn.Module], None]] = [
    write_in_place,
    write_through_data,
    flip_one_bit,
    negate,
    swap_rows,
    load_other_weights,
    step_fused_adamw,
    step_foreach_sgd,
    to_double,
    replace_parameter,
    change_a_buffer,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_seen_by_the_next_generate(change: Callable[[nn.Module], None]) -> None:
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model, config=EngineConfig(page_size=4))
    warm = engine.generate([PROMPT, PROMPT], PARAMS)
    assert warm.metrics.cached_tokens > 0  # there was something that could go stale
    change(model)
    after = engine.generate([PROMPT], PARAMS)
    fresh = RolloutEngine(model, config=EngineConfig(page_size=4)).generate([PROMPT], PARAMS)
    assert engine.weight_version == 1
    assert after[0].versions == (1,) * 6
    assert after.metrics.cached_tokens == 0
    assert after[0].token_ids == fresh[0].token_ids
    assert after[0].policy_logprobs == fresh[0].policy_logprobs


def test_no_change_keeps_the_version_and_the_prefixes() -> None:
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model, config=EngineConfig(page_size=4))
    engine.generate([PROMPT], PARAMS)
    model.train()
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    batch = engine.generate([PROMPT], PARAMS)
    assert engine.weight_version == 0
    assert batch.metrics.cached_tokens == 12


def test_refresh_weights_starts_a_version_and_calls_hooks() -> None:
    engine = RolloutEngine(TINY_MODELS["llama"](), config=EngineConfig(page_size=4))
    seen: list[int] = []
    remove = engine.add_refresh_hook(seen.append)
    engine.generate([PROMPT], PARAMS)
    assert engine.refresh_weights() == 1
    assert engine.generate([PROMPT], PARAMS).metrics.cached_tokens == 0
    remove()
    remove()  # a second time is no error
    engine.refresh_weights()
    assert seen == [1]


def lora(model: nn.Module, **settings: Any) -> nn.Module:
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], lora_dropout=0.5, **settings
    )
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    return adapted


def test_lora_rolls_out_with_its_adapter_and_without_on_demand() -> None:
    model = lora(TINY_MODELS["llama"]())
    engine = RolloutEngine(model, config=EngineConfig(page_size=4))
    adapted = engine.generate([PROMPT], PARAMS)[0]
    assert_logprobs(model, adapted)
    with model.disable_adapter():
        with model.disable_adapter():  # nested, as trainers do
            base = engine.generate([PROMPT], PARAMS)[0]
            assert base.cached_tokens == 0
            assert_logprobs(model, base)
    again = engine.generate([PROMPT], PARAMS)[0]
    assert again.cached_tokens == 0  # pages of the base model are never found by the adapter
    assert again.policy_logprobs == adapted.policy_logprobs != base.policy_logprobs
    assert not any(vars(m).get("_disable_adapters", False) for m in model.modules())


def test_lora_added_later_to_the_engines_model_is_seen() -> None:
    """get_peft_model swaps modules inside the base model that the engine was built on."""
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model, config=EngineConfig(page_size=4))
    before = engine.generate([PROMPT], PARAMS)[0]
    lora(model)
    after = engine.generate([PROMPT], PARAMS)[0]
    assert_logprobs(model, after)
    assert after.policy_logprobs != before.policy_logprobs and engine.weight_version == 1


def test_second_adapter_and_merging_are_seen() -> None:
    model = lora(TINY_MODELS["llama"]())
    engine = RolloutEngine(model)
    first = engine.generate([PROMPT], PARAMS)[0]
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("other")
    second = engine.generate([PROMPT], PARAMS)[0]
    assert_logprobs(model, second)
    model.set_adapter("default")
    model.merge_adapter()
    merged = engine.generate([PROMPT], PARAMS)[0]
    assert_logprobs(model, merged)
    assert first.policy_logprobs != second.policy_logprobs


def test_the_view_shares_every_tensor_and_nothing_else() -> None:
    model = TINY_MODELS["llama"]()
    model.activation_checkpointing_enable()
    model.train()
    view = make_view(model)
    assert [id(t) for _, t in named_tensors(view)] == [id(t) for _, t in named_tensors(model)]
    assert not {id(m) for m in view.modules()} & {id(m) for m in model.modules()}
    assert view.config is not model.config
    assert not any(m.training for m in view.modules())
    assert all(m.training for m in model.modules())
    assert model.is_activation_checkpointing and not view.is_activation_checkpointing


def assert_enters_no_module_of(model: nn.Module, run: Callable[[], object]) -> None:
    entered: list[str] = []
    handles = [
        module.register_forward_pre_hook(partial(lambda name, *_: entered.append(name), name))
        for name, module in model.named_modules()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    assert not entered


def test_a_rollout_enters_no_module_of_the_trainers() -> None:
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model)
    assert_enters_no_module_of(model, lambda: engine.generate([PROMPT], PARAMS))


def test_a_model_compiled_in_place_is_not_entered_either() -> None:
    """nn.Module.compile puts a compiled call of the trainer's own module on the instance."""
    model = TINY_MODELS["llama"]()
    expected = RolloutEngine(model).generate([PROMPT], PARAMS)[0]
    model.compile(backend="eager")
    engine = RolloutEngine(model)
    found = []
    assert_enters_no_module_of(model, lambda: found.append(engine.generate([PROMPT], PARAMS)[0]))
    assert found[0].policy_logprobs == expected.policy_logprobs


def test_forward_patched_by_closure_is_undone_and_its_autocast_kept() -> None:
    """A plain function on the instance closes over the trainer's module; deepcopy would keep it."""
    model = TINY_MODELS["llama"]()
    original = model.forward
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(lambda *a, **k: original(*a, **k))
    engine = RolloutEngine(model)
    batch = []
    assert_enters_no_module_of(model, lambda: batch.append(engine.generate([PROMPT], PARAMS)[0]))
    del model.forward
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = engine.generate([PROMPT], PARAMS)[0]
    assert batch[0].policy_logprobs == pytest.approx(expected.policy_logprobs, abs=0.05)
    plain = RolloutEngine(model).generate([PROMPT], PARAMS)[0]
    assert batch[0].policy_logprobs != plain.policy_logprobs


def test_model_prepared_by_accelerate_keeps_its_mixed_precision() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    try:
        model = accelerator.prepare(TINY_MODELS["llama"]())
        engine = RolloutEngine(model)
        found = []
        assert_enters_no_module_of(model, lambda: found.append(engine.generate([PROMPT], PARAMS)[0]))
        assert_logprobs(model, found[0], tolerance=0.1)
        assert next(model.parameters()).dtype == torch.float32
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def test_autocast_of_the_caller_is_honoured_and_noticed() -> None:
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model, config=EngineConfig(page_size=4))
    plain = engine.generate([PROMPT], PARAMS)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = engine.generate([PROMPT], PARAMS)[0]
        assert cast.cached_tokens == 0  # fp32 pages are not reused under bf16
        assert_logprobs(model, cast, tolerance=0.1)
    again = engine.generate([PROMPT], PARAMS)[0]
    assert cast.policy_logprobs != plain.policy_logprobs
    assert again.policy_logprobs == plain.policy_logprobs


def test_weights_changed_inside_one_autocast_context_are_not_served_from_its_cache() -> None:
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=torch.tensor([PROMPT]))  # autocast now keeps bf16 casts of the weights
        engine.generate([PROMPT], PARAMS)
        write_in_place(model)
        after = engine.generate([PROMPT], PARAMS)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fresh = RolloutEngine(model).generate([PROMPT], PARAMS)[0]
    assert after.policy_logprobs == fresh.policy_logprobs


@pytest.mark.parametrize("policy", ["recompute", "keep", "cancel"])
def test_change_with_requests_in_flight(policy: str) -> None:
    """One decoding, one waiting: versions are per token, and no page crosses the change."""
    model = TINY_MODELS["llama"]()
    config = EngineConfig(page_size=4, max_requests_per_batch=1, on_weight_change=policy)
    engine = RolloutEngine(model, config=config)
    running = engine.add_request(PROMPT, SamplingParams(max_new_tokens=8, seed=1))
    waiting = engine.add_request(PROMPT, SamplingParams(max_new_tokens=8, seed=2))
    for _ in range(3):
        assert engine.step() == []
    write_in_place(model)  # seen by the next step on its own
    done = {}
    while engine.has_work or len(done) < 2:
        done.update({c.request_id: c for c in engine.step()})
        engine.check()
    assert done[waiting].versions == (1,) * 8
    # pages that the running request computed again under the new weights may be shared, no others
    assert done[waiting].cached_tokens == (12 if policy == "recompute" else 0)
    assert_logprobs(model, done[waiting])
    if policy == "cancel":
        assert done[running].finish_reason == "cancelled"
        assert done[running].versions == (0,) * 3
        return
    assert done[running].versions == (0,) * 3 + (1,) * 5
    if policy == "recompute":  # the later tokens are those of the new weights, all context recomputed
        c = done[running]
        tail = copy.copy(c.policy_logprobs)[3:]
        (expected,) = RolloutEngine(model).score([(*c.prompt_ids, *c.token_ids[:3])], [c.token_ids[3:]])
        assert tail == pytest.approx(expected, abs=2e-4)


def test_checksum_sees_what_simple_sums_miss() -> None:
    checksum = Checksum()
    matrix = torch.arange(12.0).reshape(3, 4)
    assert checksum(matrix) == checksum(matrix.clone())
    assert checksum(matrix) != checksum(-matrix)
    assert checksum(matrix) != checksum(matrix[[1, 0, 2]])
    assert checksum(matrix) != checksum(matrix[:, [1, 0, 3, 2]])
    assert checksum(matrix.bfloat16()) != checksum((matrix + 1).bfloat16())
    assert checksum(matrix[:, :3]) != checksum(matrix[:, 1:])
    assert checksum(torch.zeros(0)) == 0


def test_tracker_adopts_nothing_when_the_new_structure_is_refused() -> None:
    model = nn.Linear(2, 2)
    refuse = False

    def prepare(view: nn.Module) -> None:
        if refuse:
            raise UnsupportedModelError("no")

    tracker = WeightTracker(model, prepare)
    assert tracker.update()
    view = tracker.view
    refuse = True
    model.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(UnsupportedModelError):
        tracker.update()
    assert tracker.view is view and tracker.version == 0
    refuse = False
    assert tracker.update() and tracker.version == 1


def test_a_raising_hook_leaves_no_stale_weights_behind() -> None:
    """The version was counted before pages and packed copies were let go: the hook's error kept them."""
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model, config=EngineConfig(page_size=4))
    engine.generate([PROMPT] * 5, PARAMS)

    def explode(version: int) -> None:
        raise OSError("disk full")

    engine.add_refresh_hook(explode)
    write_in_place(model)
    with pytest.raises(OSError, match="disk full"):
        engine.generate([PROMPT] * 5, PARAMS)
    after = engine.generate([PROMPT] * 5, PARAMS)
    fresh = RolloutEngine(model, config=EngineConfig(page_size=4)).generate([PROMPT] * 5, PARAMS)
    assert after[0].cached_tokens == 0
    assert [c.policy_logprobs for c in after] == [c.policy_logprobs for c in fresh]


@pytest.mark.parametrize("change", [write_through_data, step_fused_adamw, lora], ids=lambda f: f.__name__)
def test_requests_added_by_hand_see_changes_that_count_no_write(
    change: Callable[[nn.Module], object],
) -> None:
    """A glance at write counters misses these; the first step after idling must look properly."""
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model, config=EngineConfig(page_size=4))
    for version in (0, 1):
        engine.add_request(PROMPT, PARAMS)
        done = []
        while engine.has_work:
            done += engine.step()
        assert done[0].versions == (version,) * 6 and done[0].cached_tokens == 0
        assert_logprobs(model, done[0])
        if version == 0:
            change(model)


def test_forward_patched_after_the_engine_was_built_is_seen() -> None:
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model)
    before = engine.generate([PROMPT], PARAMS)[0]
    forward = type(model).forward
    model.forward = MethodType(torch.autocast("cpu", dtype=torch.bfloat16)(forward), model)
    after = engine.generate([PROMPT], PARAMS)[0]
    assert engine.weight_version == 1
    assert after.policy_logprobs != before.policy_logprobs
    assert_logprobs(model, after, tolerance=0.1)


def test_entering_autocast_keeps_count_of_packed_copies() -> None:
    engine = RolloutEngine(TINY_MODELS["llama"](), config=EngineConfig(pack_weights=True))
    plain = engine.generate([PROMPT] * 5, PARAMS).metrics.derived_bytes
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = engine.generate([PROMPT] * 5, PARAMS).metrics.derived_bytes
    assert plain > 0 and cast > 0
    engine.release_memory()
    assert engine._packed.num_bytes == 0


def test_a_training_step_in_the_same_autocast_context_gets_its_gradients() -> None:
    """Casts made without gradients and kept by autocast would cut the weights off the next loss."""
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model, config=EngineConfig(pack_weights=False))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine.generate([PROMPT], PARAMS)
        engine.score([PROMPT], [[1, 2]])
        ids = torch.tensor([PROMPT])
        model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())


def test_float16_autocast_does_not_reach_the_packed_kernels() -> None:
    model = TINY_MODELS["llama"]()
    with torch.autocast("cpu", dtype=torch.float16):
        (completion,) = RolloutEngine(model).generate([PROMPT], PARAMS)
        assert_logprobs(model, completion, tolerance=0.1)


def test_a_resized_vocabulary_is_the_new_limit() -> None:
    model = TINY_MODELS["llama"]()
    engine = RolloutEngine(model)
    with pytest.raises(ValueError, match="97"):
        engine.add_request([97], PARAMS)
    model.resize_token_embeddings(120)
    assert engine.generate([[97, 119]], PARAMS)[0].finish_reason == "length"
    model.resize_token_embeddings(50)
    batch = engine.generate([[97], [49]], PARAMS, on_error="return")
    assert [c.finish_reason for c in batch] == ["error", "length"]
