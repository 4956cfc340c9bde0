"""How a step attends: a table of backends, each a file of its own.

======  ==========================================================================================
flash   flash-attn 3 or 2, installed or fetched by ``kernels``; CUDA, half precision
varlen  torch's own flash kernels over tables of pages; CUDA, half precision
native  compiled for this CPU
sdpa    torch's scaled_dot_product_attention over gathered pages; anywhere, anything
eager   plain matmuls row by row: the slow twin of all of them
======  ==========================================================================================

The model's attention layers call :func:`paged_attention` through transformers'
``AttentionInterface``; it hands over to the step's own object, which the engine passes down as a
keyword argument. So two engines in two threads share nothing but the name.
"""

import logging

import torch
from torch import Tensor
from transformers import AttentionInterface

from rollout.attention.backend import (
    AttentionBackend,
    AttentionCall,
    AttentionStep,
    AttentionTraits,
    StackStep,
    TokenStep,
    attend_to_itself,
)
from rollout.attention.eager import EagerAttention
from rollout.attention.flash import find_flash
from rollout.attention.native import NativeAttention, why_not_native
from rollout.attention.paged import KernelUnavailable, PagedAttention, PagedKernel, why_not_paged
from rollout.attention.sdpa import SdpaAttention
from rollout.attention.trial import why_wrong
from rollout.attention.varlen import find_varlen
from rollout.kv_cache import CacheLayout
from rollout.native import Kernels
from rollout.runs import RunRules

logger = logging.getLogger("rollout")

IMPLEMENTATION = "rollout_paged"
"""Name under which :func:`paged_attention` is registered with transformers."""

BACKENDS = ("auto", "flash", "varlen", "native", "sdpa", "eager")
"""``auto`` takes ``native`` for a model on the CPU, the first of ``flash`` and ``varlen`` on a GPU, and
``sdpa`` where those do not serve it."""
DEFAULT_PAGE_SIZE = 32


def make_backend(
    name: str,
    layout: CacheLayout,
    kernels: Kernels | None,
    *,
    traits: AttentionTraits | None = None,
    page_size: int | None = None,
    max_decode_pages: int | None = None,
    may_flash: bool = True,
) -> AttentionBackend:
    """The backend of that name for a cache.

    Args:
        name: one of ``BACKENDS``.
        layout: what the model stores.
        kernels: the kernels compiled for this CPU, if there are any.
        traits: what the model's layers ask of attention; nothing unusual if not given.
        page_size: the page size that was asked for, which a backend may not be able to serve.
        max_decode_pages: ``EngineConfig.max_blocks_per_request``.
        may_flash: ``EngineConfig.auto_switch_to_flash``.

    Raises:
        ValueError: no such backend (the message lists the known ones), or not for this cache.
    """
    if name not in BACKENDS:
        raise ValueError(f"attn_implementation={name!r} is unknown; known: {', '.join(BACKENDS)}")
    paged = {"flash": ["flash"], "varlen": ["varlen"]}.get(name, [])
    if name == "auto" and layout.device.type == "cuda":
        paged = ["flash", "varlen"] if may_flash else ["varlen"]
    rules = RunRules(0 if any(window is not None for window in layout.windows) else max_decode_pages)
    reasons: dict[str, str] = {}
    for choice in paged:
        try:
            kernel = _paged_kernel(choice, layout, traits or AttentionTraits(), rules, page_size)
        except KernelUnavailable as reason:
            reasons[choice] = str(reason)
            continue
        logger.info("attention backend: %s, by %s%s", choice, kernel.name, _why_not(reasons))
        if rules.max_decode_pages != max_decode_pages:
            level = logging.INFO if max_decode_pages is None else logging.WARNING
            logger.log(level, "max_blocks_per_request is 0: layers that slide have no decode fast path")
        return PagedAttention(choice, kernel, rules)
    if paged and name != "auto":
        raise ValueError(f"attn_implementation={name!r} is not possible here: {reasons[name]}; use 'auto'")
    if paged:
        logger.warning("attention backend: sdpa, which is slow on a GPU%s", _why_not(reasons))
    if max_decode_pages:
        logger.warning(
            "max_blocks_per_request=%d has no effect: it is for the attention backends flash and varlen",
            max_decode_pages,
        )
    return _torch_backend(name, layout, kernels)


def find_kernel(name: str, device: torch.device) -> PagedKernel:
    """The kernel behind ``flash`` or ``varlen``: the one place that looks for it, where tests put their own.

    Raises:
        KernelUnavailable: there is none; the message says why.
    """
    return find_flash(device) if name == "flash" else find_varlen(device)


def page_size_for(backend: AttentionBackend, page_size: int | None) -> int:
    """Tokens per page: what was asked for, else the default, rounded up to what the backend can have."""
    return _page_size(page_size, backend.page_multiple)


def _page_size(page_size: int | None, multiple: int) -> int:
    return -(-DEFAULT_PAGE_SIZE // multiple) * multiple if page_size is None else page_size


def _paged_kernel(
    name: str, layout: CacheLayout, traits: AttentionTraits, rules: RunRules, page_size: int | None
) -> PagedKernel:
    """The kernel behind a backend's name, if it serves the model and is right where it was tried."""
    kernel = find_kernel(name, layout.device)
    reason = why_not_paged(kernel, layout, traits, page_size)
    if reason is None:
        reason = why_wrong(kernel, layout, traits, rules, _page_size(page_size, kernel.limits.page_multiple))
    if reason is not None:
        raise KernelUnavailable(reason)
    return kernel


def _why_not(reasons: dict[str, str]) -> str:
    return "".join(f"; not {name}: {reason}" for name, reason in reasons.items())


def _torch_backend(name: str, layout: CacheLayout, kernels: Kernels | None) -> AttentionBackend:
    if name == "eager":
        return EagerAttention()
    if name != "sdpa":
        reason = "there are no compiled kernels" if kernels is None else why_not_native(layout)
        if kernels is not None and reason is None:
            return NativeAttention(kernels)
        if name == "native":
            raise ValueError(f"attn_implementation='native' is not possible here: {reason}; use 'auto'")
    return SdpaAttention()


@torch.compiler.disable
def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    rollout_step: AttentionStep | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention function of transformers' interface: ``query [1, N, T, H] -> [1, T, N, H]``.

    ``torch.compile`` breaks its graph here: what the step's object holds is never traced or guarded.

    Raises:
        RuntimeError: the model did not pass the engine's keyword on to its attention layers.
    """
    if rollout_step is None:
        raise RuntimeError(
            f"{type(module).__name__} was called without the engine's step: the model does not pass "
            "keyword arguments on to its attention layers"
        )
    return rollout_step.attend(module, query, key, value, attention_mask, kwargs), None


# The one registration at import: transformers looks attention functions up by name in a global
# table. No mask function is registered under the name, so models build no mask at all.
AttentionInterface.register(IMPLEMENTATION, paged_attention)

__all__ = [
    "BACKENDS",
    "IMPLEMENTATION",
    "AttentionBackend",
    "AttentionCall",
    "AttentionStep",
    "AttentionTraits",
    "EagerAttention",
    "NativeAttention",
    "PagedAttention",
    "SdpaAttention",
    "StackStep",
    "TokenStep",
    "attend_to_itself",
    "find_kernel",
    "make_backend",
    "page_size_for",
    "paged_attention",
]
