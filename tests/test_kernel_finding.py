"""Finding the kernels of torch and of flash-attn, and calling them as they want to be called.

Packages are stand-ins; torch's own function is the installed one, on tensors without data.
"""

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_kernels import FakeFlash2, FakeFlash3
from rollout.attention import AttentionCall
from rollout.attention.flash import FlashKernel, find_flash
from rollout.attention.paged import KernelUnavailable
from rollout.attention.varlen import find_varlen
from rollout.runs import PagedRun

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


# ---- finding torch's kernels ------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return monkeypatch


def a_run(*, is_decode: bool = False, window: int | None = None) -> PagedRun:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=CUDA)

    queries = (1, 1) if is_decode else (2, 1)
    return PagedRun(
        start=0,
        end=sum(queries),
        is_decode=is_decode,
        window=window,
        cu_q=ints(0, queries[0], sum(queries)),
        cu_k=ints(0, 9, 13),
        lengths=ints(9, 4),
        table=ints(1, 2).view(2, 1),
        max_q=max(queries),
        max_k=9,
    )


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("is_decode", [True, False])
def test_the_real_varlen_attn_takes_our_arguments(
    hopper: pytest.MonkeyPatch, is_decode: bool, window: int | None
) -> None:
    """The installed torch's own function and its checks, on tensors without data."""
    kernel = find_varlen(CUDA)
    assert kernel.limits.page_multiple == 256
    with FakeTensorMode():
        run = a_run(is_decode=is_decode, window=None if is_decode else window)
        query = torch.empty(run.end, 4, 64, dtype=torch.bfloat16, device=CUDA)
        pages = torch.empty(3, 256, 2, 64, dtype=torch.bfloat16, device=CUDA)
        new = torch.empty(run.end, 2, 64, dtype=torch.bfloat16, device=CUDA)
        call = AttentionCall(query=query, key=new, value=new, scaling=0.125, softcap=None, sinks=None)
        out = kernel.attend(query, pages, pages, run, call)
        assert out.shape == query.shape and out.dtype == torch.bfloat16


def test_varlen_minds_which_kernels_torch_was_switched_to(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert find_varlen(CUDA).limits.page_multiple == 1
    hopper.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    with pytest.raises(KernelUnavailable, match="switched to FA4, which is not served"):
        find_varlen(CUDA)


def test_varlen_says_why_there_is_none(hopper: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelUnavailable, match="the model is on mps"):
        find_varlen(torch.device("mps"))
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(KernelUnavailable, match=r"compute capability 7\.5"):
        find_varlen(CUDA)
    hopper.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, key, value, *, scale: None)
    with pytest.raises(KernelUnavailable, match="lacks block_table, enable_gqa, num_splits, seqused_k"):
        find_varlen(CUDA)
    hopper.setattr(torch.version, "hip", "7.0")
    with pytest.raises(KernelUnavailable, match="ROCm"):
        find_varlen(CUDA)
    hopper.setattr(torch.version, "hip", None)
    hopper.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(KernelUnavailable, match=r"has no torch\.nn\.attention\.varlen; update torch"):
        find_varlen(CUDA)


# ---- finding flash-attn -----------------------------------------------------------------------


def make_module(name: str, **functions: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(functions)
    return module


def package_2(name: str = "flash_attn") -> types.ModuleType:
    fake = FakeFlash2()
    functions = {
        "flash_attn_with_kvcache": fake.flash_attn_with_kvcache,
        "flash_attn_varlen_func": fake.flash_attn_varlen_func,
    }
    return make_module(name, __version__="2.8.3", **functions)


def package_3() -> types.ModuleType:
    kvcache = FakeFlash3().flash_attn_with_kvcache
    return make_module("flash_attn_interface", flash_attn_with_kvcache=kvcache)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(*modules: types.ModuleType, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        for name in ("flash_attn_interface", "flash_attn", "kernels"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        for module in modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


def test_flash_3_is_for_hopper_and_flash_2_for_all(packages: Callable[..., None]) -> None:
    packages(package_2(), package_3())
    kernel = find_flash(CUDA)
    assert kernel.name.startswith("flash_attn_interface") and kernel.limits.page_multiple == 1
    assert kernel.limits.softcap and kernel.limits.sinks
    packages(package_2(), package_3(), capability=(8, 6))
    kernel = find_flash(CUDA)
    assert kernel.name == "flash_attn 2.8.3" and kernel.limits.page_multiple == 256
    assert kernel.limits.softcap and not kernel.limits.sinks
    packages(package_2(), capability=(7, 5))
    with pytest.raises(KernelUnavailable, match=r"compute capability 7\.5"):
        find_flash(CUDA)


def test_without_a_package_kernels_fetches_one(packages: Callable[..., None]) -> None:
    asked = []

    def get_kernel(repository: str, *, version: int) -> types.ModuleType:
        asked.append((repository, version))
        return package_2("fetched")

    packages(make_module("kernels", get_kernel=get_kernel), capability=(8, 0))
    assert find_flash(CUDA).name == "kernels-community/flash-attn2 version 4"
    packages(make_module("kernels", get_kernel=get_kernel))
    find_flash(CUDA)
    assert asked == [("kernels-community/flash-attn2", 4), ("kernels-community/vllm-flash-attn3", 1)]


def test_flash_says_build_by_build_why_there_is_none(packages: Callable[..., None]) -> None:
    packages()
    with pytest.raises(KernelUnavailable) as caught:
        find_flash(CUDA)
    assert str(caught.value) == (
        "flash_attn_interface is not installed; flash_attn is not installed; kernels is not installed; "
        "pip install flash-attn, or kernels"
    )

    def unreachable(repository: str, *, version: int) -> None:
        raise ConnectionError("no network")

    fourth = make_module("flash_attn", __version__="4.0")  # flash attention 4 comes under this name, too
    packages(fourth, make_module("kernels", get_kernel=unreachable), capability=(8, 0))
    with pytest.raises(
        KernelUnavailable, match=r"flash_attn 4\.0 has no flash_attn_with_kvcache; "
    ) as caught:
        find_flash(CUDA)
    assert "kernels cannot be loaded (ConnectionError: no network)" in str(caught.value)
    with pytest.raises(KernelUnavailable, match="the model is on cpu"):
        find_flash(CPU)


def test_builds_without_tables_are_refused() -> None:
    fake = FakeFlash2()

    def old_kvcache(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any) -> None: ...
    def old_varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any) -> None: ...

    with pytest.raises(KernelUnavailable, match="flash_attn_with_kvcache of old takes no table of pages"):
        FlashKernel("old", old_kvcache, fake.flash_attn_varlen_func)
    for varlen in (old_varlen, None):
        with pytest.raises(KernelUnavailable, match="flash_attn_varlen_func of old takes no block_table"):
            FlashKernel("old", fake.flash_attn_with_kvcache, varlen)


def test_keys_of_ragged_rows_are_never_split_where_that_can_be_said() -> None:
    """Builds that let one choose combine the parts of a paged row wrongly."""
    asked: dict[str, Any] = {}

    def varlen(q: torch.Tensor, k: Any, v: Any, *, block_table: Any, num_splits: int = 0, **more: Any) -> Any:
        asked.update(num_splits=num_splits, **more)
        return q

    kernel = FlashKernel("new", FakeFlash2().flash_attn_with_kvcache, varlen)
    with FakeTensorMode():
        run = a_run(window=8)
        query = torch.empty(run.end, 4, 64)
        call = AttentionCall(query=query, key=query, value=query, scaling=0.5, softcap=None, sinks=None)
        kernel.attend(query, query, query, run, call)
    assert asked["num_splits"] == 1 and asked["causal"] is True and asked["window_size"] == (7, 0)
