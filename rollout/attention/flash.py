"""flash-attn's kernels: the packages ``flash_attn_interface`` (3) and ``flash_attn`` (2), or ``kernels``.

Which arguments a build knows is read off its functions once, when it is found. Flash attention 3
serves every run by ``flash_attn_with_kvcache``; flash attention 2 serves decode runs by it and the others
by ``flash_attn_varlen_func``, both with tables of pages that have 256 tokens or a multiple.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rollout.attention.backend import AttentionCall
from rollout.attention.paged import KernelLimits, KernelUnavailable
from rollout.runs import PagedRun

FA2_PAGE_MULTIPLE = 256
TABLE_NAMES = ("block_table", "page_table")
SINK_NAMES = ("s_aux", "learnable_sink", "sinks")
MIN_CAPABILITY = (8, 0)
HOPPER = 9
HUB_KERNELS = {True: ("kernels-community/vllm-flash-attn3", 1), False: ("kernels-community/flash-attn2", 4)}
"""Repository and version that the ``kernels`` package fetches, on Hopper GPUs and on others; those that
transformers 5.24 takes."""


class FlashKernel:
    """Functions of one flash-attn build as a paged kernel; see ``PagedKernel``.

    Args:
        name: package and version, for messages.
        with_kvcache: its ``flash_attn_with_kvcache``.
        varlen: its ``flash_attn_varlen_func``; not used where ``with_kvcache`` takes ``cu_seqlens_q``.
        limits: what it serves; read off the functions where not given.

    Raises:
        KernelUnavailable: the build takes no tables of pages.
    """

    def __init__(
        self,
        name: str,
        with_kvcache: Callable[..., Any],
        varlen: Callable[..., Any] | None,
        limits: KernelLimits | None = None,
    ) -> None:
        self.name = name
        self._with_kvcache = with_kvcache
        self._varlen = varlen
        known = set(inspect.signature(with_kvcache).parameters)
        self._is_ragged = "cu_seqlens_q" in known  # flash attention 3: rows of any length in one entry
        table_name = _first(TABLE_NAMES, known)
        if table_name is None:
            raise KernelUnavailable(f"flash_attn_with_kvcache of {name} takes no table of pages")
        self._table_name = table_name
        if not self._is_ragged:
            of_varlen = set() if varlen is None else set(inspect.signature(varlen).parameters)
            if "block_table" not in of_varlen:
                raise KernelUnavailable(f"flash_attn_varlen_func of {name} takes no block_table; update it")
            # some builds of 2.8 split a paged row's keys and combine the parts wrongly
            self._varlen_only = {"num_splits": 1} if "num_splits" in of_varlen else {}
            known &= of_varlen
        self._sink_name = _first(SINK_NAMES, known)
        self.limits = limits or KernelLimits(
            page_multiple=1 if self._is_ragged else FA2_PAGE_MULTIPLE,
            softcap="softcap" in known,
            sinks=self._sink_name is not None,
        )

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, run: PagedRun, call: AttentionCall
    ) -> Tensor:
        """See ``PagedKernel``."""
        options = self._options(run, call)
        out: Tensor
        if run.is_decode:
            table = {self._table_name: run.table}
            out = self._with_kvcache(
                query.unsqueeze(1), keys, values, cache_seqlens=run.lengths, **table, **options
            )
            return out.squeeze(1)
        if self._is_ragged:
            table = {self._table_name: run.table}
            rows = {"cu_seqlens_q": run.cu_q, "max_seqlen_q": run.max_q}
            out = self._with_kvcache(
                query, keys, values, cache_seqlens=run.lengths, **rows, **table, **options
            )
            return out
        assert self._varlen is not None
        out = self._varlen(
            query,
            keys,
            values,
            cu_seqlens_q=run.cu_q,
            cu_seqlens_k=run.cu_k,
            max_seqlen_q=run.max_q,
            max_seqlen_k=run.max_k,
            block_table=run.table,
            **self._varlen_only,
            **options,
        )
        return out

    def _options(self, run: PagedRun, call: AttentionCall) -> dict[str, Any]:
        options: dict[str, Any] = {"softmax_scale": call.scaling, "causal": True}
        if run.window is not None:
            options["window_size"] = (run.window - 1, 0)
        if call.softcap is not None:
            options["softcap"] = call.softcap
        if call.sinks is not None:
            assert self._sink_name is not None
            options[self._sink_name] = call.sinks.to(call.query.dtype)
        return options


def find_flash(device: torch.device) -> FlashKernel:
    """The best flash-attn build for a device: 3 on Hopper GPUs, else 2, else what ``kernels`` fetches.

    Raises:
        KernelUnavailable: none is to be had; the message says why, build by build.
    """
    if device.type != "cuda":
        raise KernelUnavailable(f"the model is on {device} and flash-attn needs a CUDA device")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise KernelUnavailable(
            f"{device} has compute capability {capability[0]}.{capability[1]} and flash-attn needs 8.0"
        )
    is_hopper = capability[0] == HOPPER
    places: dict[str, Callable[[], FlashKernel]] = {"flash_attn": lambda: _from_package("flash_attn")}
    if is_hopper:
        places = {"flash_attn_interface": lambda: _from_package("flash_attn_interface"), **places}
    places["kernels"] = lambda: _from_hub(*HUB_KERNELS[is_hopper])
    reasons = []
    for place, find in places.items():
        if importlib.util.find_spec(place) is None:
            reasons.append(f"{place} is not installed")
            continue
        try:
            return find()
        except KernelUnavailable as reason:
            reasons.append(str(reason))
        except Exception as error:  # a build for another torch or GPU, a hub out of reach
            reasons.append(f"{place} cannot be loaded ({type(error).__name__}: {error})")
    raise KernelUnavailable(f"{'; '.join(reasons)}; pip install flash-attn, or kernels")


def _from_package(package: str) -> FlashKernel:
    module = importlib.import_module(package)
    version = vars(module).get("__version__", "of unknown version")
    return _from_functions(f"{package} {version}", vars(module))


def _from_hub(repository: str, version: int) -> FlashKernel:
    kernel = importlib.import_module("kernels").get_kernel(repository, version=version)
    return _from_functions(f"{repository} version {version}", vars(kernel))


def _from_functions(name: str, functions: Mapping[str, Any]) -> FlashKernel:
    if "flash_attn_with_kvcache" not in functions:  # flash attention 4, which is installed as flash_attn, too
        raise KernelUnavailable(f"{name} has no flash_attn_with_kvcache")
    varlen = functions.get("flash_attn_varlen_func")
    return FlashKernel(name, functions["flash_attn_with_kvcache"], varlen)


def _first(names: tuple[str, ...], known: set[str]) -> str | None:
    return next((name for name in names if name in known), None)
