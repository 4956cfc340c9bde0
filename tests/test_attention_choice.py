"""Which attention backend is taken, what is refused and in which words; no GPU is needed to ask."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rollout.attention
from fake_kernels import FakeFlash2, FakeFlash3, FakeVarlen, cpu_limits
from rollout import RolloutEngine, SamplingParams
from rollout.attention import (
    AttentionBackend,
    AttentionTraits,
    PagedAttention,
    SdpaAttention,
    make_backend,
    page_size_for,
)
from rollout.attention.flash import FlashKernel
from rollout.attention.paged import KernelUnavailable, PagedKernel
from rollout.attention.trial import why_wrong
from rollout.attention.varlen import VarlenKernel, find_varlen
from rollout.kv_cache import CacheLayout, LayerShape
from rollout.runs import RunRules
from tiny_models import TINY_MODELS

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
PLAIN = AttentionTraits()
SHAPE = LayerShape(2, 64, 64, None)


def layout(
    *shapes: LayerShape, dtype: torch.dtype = torch.bfloat16, device: torch.device = CUDA
) -> CacheLayout:
    return CacheLayout.from_layers(shapes or (SHAPE,), dtype, device)


def flash_2() -> FlashKernel:
    fake = FakeFlash2()
    return FlashKernel("flash_attn 2.8.3", fake.flash_attn_with_kvcache, fake.flash_attn_varlen_func)


def flash_3() -> FlashKernel:
    return FlashKernel("flash_attn_interface", FakeFlash3().flash_attn_with_kvcache, None)


def torch_varlen() -> VarlenKernel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        return find_varlen(CUDA)


Find = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Find:
    """Let these kernels be the ones that are to be had."""

    def install(**kernels: PagedKernel) -> None:
        def find(name: str, device: torch.device) -> PagedKernel:
            if name not in kernels:
                raise KernelUnavailable(f"{name} is not there")
            return kernels[name]

        monkeypatch.setattr(rollout.attention, "find_kernel", find)

    # there is no such device here to try them on
    monkeypatch.setattr(rollout.attention, "why_wrong", lambda *anything: None)
    return install


def kernel_name(backend: AttentionBackend) -> str:
    return backend.kernel.name if isinstance(backend, PagedAttention) else type(backend).__name__


# ---- auto -------------------------------------------------------------------------------------


def test_auto_on_a_gpu_takes_flash_then_varlen_then_sdpa(installed: Find) -> None:
    installed(flash=flash_2(), varlen=torch_varlen())
    assert kernel_name(make_backend("auto", layout(), None)) == "flash_attn 2.8.3"
    assert "varlen_attn" in kernel_name(make_backend("auto", layout(), None, may_flash=False))
    installed(varlen=torch_varlen())
    assert "varlen_attn" in kernel_name(make_backend("auto", layout(), None))
    installed()
    assert kernel_name(make_backend("auto", layout(), None)) == "SdpaAttention"


@pytest.mark.parametrize(
    ("shapes", "dtype", "traits", "page_size", "reason"),
    [
        ((), torch.float32, PLAIN, None, "keys and values are torch.float32"),
        ((LayerShape(2, 264, 264, None),), torch.bfloat16, PLAIN, None, "head dims are [264]"),
        ((LayerShape(2, 12, 12, None),), torch.bfloat16, PLAIN, None, "multiples of 8 up to 256"),
        ((SHAPE, LayerShape(2, 64, 32, None)), torch.bfloat16, PLAIN, None, "head dims are [32, 64]"),
        ((), torch.bfloat16, AttentionTraits(has_sinks=True), None, "layers have attention sinks"),
        ((), torch.bfloat16, PLAIN, 32, "needs a multiple of 256; leave page_size unset"),
    ],
)
def test_what_the_kernels_do_not_serve_falls_to_sdpa_and_is_refused_when_asked_for(
    shapes: tuple[LayerShape, ...],
    dtype: torch.dtype,
    traits: AttentionTraits,
    page_size: int | None,
    reason: str,
    installed: Find,
    caplog: pytest.LogCaptureFixture,
) -> None:
    installed(flash=flash_2(), varlen=torch_varlen())
    where: dict[str, Any] = {"traits": traits, "page_size": page_size}
    backend = make_backend("auto", layout(*shapes, dtype=dtype), None, **where)
    assert isinstance(backend, SdpaAttention)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "sdpa" in record.message
    assert "not flash: " in record.message and "not varlen: " in record.message and reason in record.message
    for name in ("flash", "varlen"):
        with pytest.raises(
            ValueError, match=f"attn_implementation='{name}' is not possible here: "
        ) as caught:
            make_backend(name, layout(*shapes, dtype=dtype), None, **where)
        assert reason in str(caught.value)


def test_soft_caps_are_served_by_flash_alone_and_sinks_by_a_build_that_has_them(installed: Find) -> None:
    caps, sinks = AttentionTraits(has_softcap=True), AttentionTraits(has_sinks=True)
    installed(flash=flash_2(), varlen=torch_varlen())
    assert kernel_name(make_backend("auto", layout(), None, traits=caps)) == "flash_attn 2.8.3"
    installed(flash=flash_3(), varlen=torch_varlen())
    assert kernel_name(make_backend("auto", layout(), None, traits=sinks)) == "flash_attn_interface"
    installed(varlen=torch_varlen())
    assert kernel_name(make_backend("auto", layout(), None, traits=caps)) == "SdpaAttention"
    with pytest.raises(
        ValueError, match=r"'varlen' is not possible here: layers cap their scores \(softcap\)"
    ):
        make_backend("varlen", layout(), None, traits=caps)


def test_the_probe_tells_soft_caps_and_sinks() -> None:
    for name, traits in {
        "llama": PLAIN,
        "gemma2": AttentionTraits(has_softcap=True),
        "gpt_oss": AttentionTraits(has_sinks=True),
    }.items():
        assert RolloutEngine(TINY_MODELS[name]())._stepper.plan.traits == traits


def test_on_a_cpu_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout.attention, "find_kernel", None)
    assert isinstance(make_backend("auto", layout(device=CPU), None), SdpaAttention)


@pytest.mark.parametrize("name", ["flash", "varlen"])
def test_asked_for_on_a_cpu_they_say_what_they_need(name: str) -> None:
    with pytest.raises(ValueError, match=r"the model is on cpu and .* needs a CUDA device; use 'auto'"):
        RolloutEngine(TINY_MODELS["llama"](), config={"attn_implementation": name})


# ---- page sizes and the decode limit ----------------------------------------------------------


def test_the_page_size_is_the_kernels_unless_one_is_given(installed: Find) -> None:
    installed(flash=flash_2(), varlen=flash_3())
    two, three = (make_backend(name, layout(), None) for name in ("flash", "varlen"))
    assert [page_size_for(backend, None) for backend in (two, three, SdpaAttention())] == [256, 32, 32]
    assert page_size_for(make_backend("flash", layout(), None, page_size=512), 512) == 512


def test_the_engine_works_with_the_page_size_that_the_kernel_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFlash2(page_multiple=24)
    kernel = fake.kernel()
    kernel.limits = dataclasses.replace(kernel.limits, page_multiple=24)
    monkeypatch.setattr(rollout.attention, "find_kernel", lambda name, device: kernel)
    engine = RolloutEngine(TINY_MODELS["llama"](), config={"attn_implementation": "flash"})
    fake.calls.all.clear()
    batch = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, temperature=0))
    engine.score([[1, 2, 3]], [batch[0].token_ids])
    assert engine._stepper.cache.page_size == 48  # 32 rounded up
    assert fake.calls.all


def test_the_decode_limit_is_told_where_it_has_no_effect(
    installed: Find, caplog: pytest.LogCaptureFixture
) -> None:
    installed(flash=flash_2())
    backend = make_backend("flash", layout(), None, max_decode_pages=7)
    assert backend.run_rules is not None and backend.run_rules.max_decode_pages == 7
    backend = make_backend("flash", layout(SHAPE, LayerShape(2, 64, 64, 128)), None)
    assert backend.run_rules is not None and backend.run_rules.max_decode_pages == 0
    assert not caplog.records
    make_backend("sdpa", layout(), None, max_decode_pages=7)
    assert "max_blocks_per_request=7 has no effect" in caplog.text
    caplog.clear()
    make_backend("sdpa", layout(), None, max_decode_pages=0)
    assert not caplog.records


# ---- the trial ---------------------------------------------------------------------------------


WINDOWED = LayerShape(2, 16, 16, 7)
FULL = LayerShape(3, 16, 16, None)


def tried(kernel: PagedKernel, *shapes: LayerShape, **traits: bool) -> str | None:
    rules = RunRules(None if all(shape.window is None for shape in shapes) else 0)
    cpu_layout = layout(*shapes, dtype=torch.bfloat16, device=CPU)
    return why_wrong(kernel, cpu_layout, AttentionTraits(**traits), rules, 8)


def test_right_kernels_pass_the_trial() -> None:
    for fake in (FakeVarlen(), FakeVarlen(is_fa3=True), FakeFlash2(), FakeFlash3()):
        for shapes in ((FULL,), (WINDOWED,), (WINDOWED, FULL)):
            fake.calls.all.clear()
            with torch.autocast("cpu", torch.bfloat16):
                assert tried(fake.kernel(), *shapes) is None
            assert fake.calls.all
    assert tried(FakeFlash2().kernel(), FULL, has_softcap=True) is None
    assert tried(FakeFlash3().kernel(), WINDOWED, has_softcap=True, has_sinks=True) is None


class Broken(FakeVarlen):
    """A kernel with a fault that its original could have."""

    def __init__(self, fault: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__()
        self._fault = fault

    def kernel(self) -> VarlenKernel:
        def varlen_attn(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            out = self.varlen_attn(query, *args, **self._fault(options))
            return out

        return VarlenKernel(varlen_attn, cpu_limits(), takes_cu_k=True)


FAULTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "its own scale": lambda options: options | {"scale": 0.25},
    "a window of one key more": lambda options: (
        options
        | {"window_size": (options["window_size"][0] + 1, 0) if options["window_size"][0] > 0 else (-1, 0)}
    ),
    "a window of one key less": lambda options: (
        options
        | {"window_size": (options["window_size"][0] - 1, 0) if options["window_size"][0] > 0 else (-1, 0)}
    ),
    "pages in their order": lambda options: (
        options | {"block_table": _sorted_within_rows(options["block_table"], options["seqused_k"])}
    ),
}


def _sorted_within_rows(table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    rows = []
    for row, length in zip(table.tolist(), lengths.tolist(), strict=True):
        used = -(-length // 8)
        rows.append(sorted(row[:used]) + row[used:])
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_that_is_wrong_is_found_out(fault: str) -> None:
    reason = tried(Broken(FAULTS[fault]).kernel(), WINDOWED, FULL)
    assert reason is not None and "varlen_attn was off by" in reason


def test_rows_that_are_not_written_and_kernels_that_raise_are_found_out() -> None:
    """https://github.com/pytorch/pytorch/issues/194167: only the first row of a call was written."""
    fake = FakeVarlen()

    def first_row_only(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        out = fake.varlen_attn(query, *args, **options)
        return torch.cat([out[:1], torch.full_like(out[1:], float("nan"))])

    def not_on_this_device(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("paged KV is not supported")

    reason = tried(VarlenKernel(first_row_only, cpu_limits(), takes_cu_k=True), FULL)
    assert reason is not None and reason.endswith("was off by nan from plain attention")
    reason = tried(VarlenKernel(not_on_this_device, cpu_limits(), takes_cu_k=True), FULL)
    assert reason is not None and reason.endswith("failed with RuntimeError: paged KV is not supported")


def test_a_kernel_that_failed_its_trial_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Broken(FAULTS["its own scale"]).kernel()
    monkeypatch.setattr(rollout.attention, "find_kernel", lambda name, device: kernel)
    with pytest.raises(ValueError, match=r"'varlen' is not possible here: a trial of .* was off by"):
        RolloutEngine(TINY_MODELS["llama"](), config={"attn_implementation": "varlen"})
