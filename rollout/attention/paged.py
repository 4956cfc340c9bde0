"""Attention by kernels that read keys and values through a table of pages, on a device.

The kernels are other people's: :mod:`rollout.attention.flash` and :mod:`rollout.attention.varlen` find
them and know how each wants to be called. What they have in common is here: keys and values are
written to their slots, then every run of the step is one call.

Letters: T tokens of a run, N query heads, K kv heads, H head dim, P pages, S slots in a page.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollout.attention.backend import AttentionCall, AttentionTraits
from rollout.batch import GroupBatch
from rollout.kv_cache import CacheLayout, LayerPages, PageOrder
from rollout.runs import PagedRun, RunRules


class KernelUnavailable(Exception):
    """A kernel is not to be had here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLimits:
    """What a kernel serves."""

    page_multiple: int
    """Page sizes that its tables can have are multiples of it."""
    softcap: bool
    sinks: bool
    device_type: str = "cuda"
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    head_dim_multiple: int = 8
    max_head_dim: int = 256


class PagedKernel(Protocol):
    """One way of calling one package's kernels."""

    @property
    def name(self) -> str:
        """Package and version, for messages."""

    @property
    def limits(self) -> KernelLimits:
        """What it serves; calls beyond are not made."""

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, run: PagedRun, call: AttentionCall
    ) -> Tensor:
        """``query [T, N, H]`` of the run over ``keys`` and ``values [P, S, K, H]`` -> ``[T, N, H]``.

        Of ``call`` the scaling, soft cap and sinks count.
        """


class PagedAttention:
    """A paged kernel as a backend; see ``AttentionBackend``."""

    needs_masks = False
    is_recordable = True
    has_decode_layers = False
    page_order = PageOrder.TOKENS_FIRST

    def __init__(self, name: str, kernel: PagedKernel, run_rules: RunRules) -> None:
        self.name = name
        self.kernel = kernel
        self.run_rules = run_rules
        self.page_multiple = kernel.limits.page_multiple

    def attend(self, call: AttentionCall, pages: LayerPages, batch: GroupBatch) -> Tensor:
        """See ``AttentionBackend``."""
        pages.write(batch.slots, call.key, call.value)
        keys, values = pages.tokens_first()
        if len(batch.runs) == 1:
            return self.kernel.attend(call.query, keys, values, batch.runs[0], call)
        out = torch.empty_like(call.query, memory_format=torch.contiguous_format)
        for run in batch.runs:
            part = slice(run.start, run.end)
            out[part] = self.kernel.attend(call.query[part], keys, values, run, call)
        return out


def why_not_paged(
    kernel: PagedKernel, layout: CacheLayout, traits: AttentionTraits, page_size: int | None
) -> str | None:
    """What of a model or its cache the kernel cannot serve; ``None`` where it serves all."""
    limits = kernel.limits
    if layout.device.type != limits.device_type:
        return f"the model is on {layout.device} and {kernel.name} needs {limits.device_type}"
    if layout.dtype not in limits.dtypes:
        served = " and ".join(map(str, limits.dtypes))
        return f"keys and values are {layout.dtype} and {kernel.name} serves {served}"
    for group in layout.groups:
        dims = {group.shape.key_dim, group.shape.value_dim}
        if len(dims) > 1 or max(dims) > limits.max_head_dim or max(dims) % limits.head_dim_multiple:
            return (
                f"head dims are {sorted(dims)} and {kernel.name} serves equal ones that are multiples of "
                f"{limits.head_dim_multiple} up to {limits.max_head_dim}"
            )
    if traits.has_softcap and not limits.softcap:
        return f"layers cap their scores (softcap) and {kernel.name} does not"
    if traits.has_sinks and not limits.sinks:
        return f"layers have attention sinks and {kernel.name} has none"
    if page_size is not None and page_size % limits.page_multiple:
        return (
            f"page_size={page_size} and {kernel.name} needs a multiple of {limits.page_multiple}; "
            "leave page_size unset or give such a multiple"
        )
    return None
