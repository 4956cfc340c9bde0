"""What an attention backend is, and what a model's attention layer hands to a step.

Letters: T packed tokens, N query heads, K kv heads, H head dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollout.batch import GroupBatch
from rollout.kv_cache import LayerPages


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One layer's attention over the packed tokens of a step."""

    query: Tensor
    """[N, T, H] in the cache's dtype."""
    key: Tensor
    """[K, T, H], already written to the pages."""
    value: Tensor
    """[K, T, H], already written to the pages."""
    scaling: float
    softcap: float | None
    """Scores become ``softcap * tanh(scores / softcap)`` (Gemma 2)."""
    sinks: Tensor | None
    """[N], a logit per head that takes part in the softmax and adds nothing (GPT-OSS)."""


class AttentionBackend(Protocol):
    """Computes one layer's attention from the pages."""

    def attend(self, call: AttentionCall, pages: LayerPages, batch: GroupBatch) -> Tensor:
        """Returns ``[T, N, H]`` (the value's head dim) in the query's dtype."""


class AttentionStep(Protocol):
    """What the engine passes down to the attention layers for one forward."""

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        options: Mapping[str, object],
    ) -> Tensor:
        """Attention of one layer: ``query [1, N, T, H]`` -> ``[1, T, N, H]``."""


def attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, call: AttentionCall, sinks: Tensor | None
) -> Tensor:
    """matmul -> fp32 softmax -> matmul over the last two dimensions, with soft cap and sinks.

    ``bias`` (0 or -inf) and ``sinks`` (last dimension 1) broadcast against the scores.
    """
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores + bias
    if sinks is not None:
        column = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights.to(value.dtype), value)
