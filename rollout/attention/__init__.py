"""How a step attends: a table of backends, each a file of its own.

The model's attention layers call :func:`paged_attention` through transformers'
``AttentionInterface``; it hands over to the step's own object, which the engine passes down as a
keyword argument. So two engines in two threads share nothing but the name.
"""

import torch
from torch import Tensor
from transformers import AttentionInterface

from rollout.attention.backend import (
    AttentionBackend,
    AttentionCall,
    AttentionStep,
    TokenStep,
    attend_to_itself,
)
from rollout.attention.eager import EagerAttention
from rollout.attention.native import NativeAttention, why_not_native
from rollout.attention.sdpa import SdpaAttention
from rollout.kv_cache import CacheLayout
from rollout.native import Kernels

IMPLEMENTATION = "rollout_paged"
"""Name under which :func:`paged_attention` is registered with transformers."""

BACKENDS = ("auto", "native", "sdpa", "eager")
"""``native`` is compiled for CPUs, ``sdpa`` runs anywhere, ``eager`` is the slow twin of both; ``auto``
takes ``native`` where it serves the model and ``sdpa`` elsewhere."""


def make_backend(name: str, layout: CacheLayout, kernels: Kernels | None) -> AttentionBackend:
    """The backend of that name for a cache; ``kernels`` are the compiled ones, if there are any.

    Raises:
        ValueError: no such backend (the message lists the known ones), or not for this cache.
    """
    if name not in BACKENDS:
        raise ValueError(f"attn_implementation={name!r} is unknown; known: {', '.join(BACKENDS)}")
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
    "EagerAttention",
    "NativeAttention",
    "SdpaAttention",
    "TokenStep",
    "attend_to_itself",
    "make_backend",
    "paged_attention",
]
