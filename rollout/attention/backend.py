"""What an attention backend is, and what a model's attention layer hands to a step.

Letters: T packed tokens, N query heads, K kv heads, H head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollout.batch import GroupBatch
from rollout.kv_cache import LayerPages, PageOrder
from rollout.native import DecodeRows, LayerPlace
from rollout.runs import RunRules


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One layer's attention over the packed tokens of a step."""

    query: Tensor
    """[T, N, H] in the cache's dtype."""
    key: Tensor
    """[T, K, H], of the packed tokens."""
    value: Tensor
    """[T, K, H], the same."""
    scaling: float
    softcap: float | None
    """Scores become ``softcap * tanh(scores / softcap)`` (Gemma 2)."""
    sinks: Tensor | None
    """[N], a logit per head that takes part in the softmax and adds nothing (GPT-OSS)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTraits:
    """What a model's layers ask of attention beyond softmax over keys."""

    has_softcap: bool = False
    """Some layer has a soft cap."""
    has_sinks: bool = False
    """Some layer has sinks."""


class AttentionBackend(Protocol):
    """Computes one layer's attention from the pages."""

    @property
    def name(self) -> str:
        """Its name in the table of backends."""

    @property
    def needs_masks(self) -> bool:
        """Whether decode rows come in buckets of similar length with a bias each; else all in one
        bucket, with the range of keys that each row sees. Tokens of short prompts are such rows then, and see
        what others of them store: all are stored before any is read."""

    @property
    def is_recordable(self) -> bool:
        """Whether attending decode rows reads nothing but tensors of the batch and never waits for the
        device, so that it can be recorded once and replayed on other numbers."""

    @property
    def has_decode_layers(self) -> bool:
        """Whether compiled decoder layers attend decode rows as it does, so that they may do so by
        themselves."""

    @property
    def run_rules(self) -> RunRules | None:
        """How to cut the runs that it takes instead of buckets; ``None`` for buckets."""

    @property
    def page_order(self) -> PageOrder:
        """How the cache has to lay out its pages."""

    @property
    def page_multiple(self) -> int:
        """Page sizes have to be a multiple of it."""

    def attend(self, call: AttentionCall, pages: LayerPages, batch: GroupBatch) -> Tensor:
        """Write the call's keys and values to the batch's slots, then attend: ``[T, N, H]`` (the value's
        head dim) in the query's dtype."""


class TokenStep(Protocol):
    """What the engine passes down to fused layers for one forward."""

    def attend_tokens(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: Mapping[str, object],
    ) -> Tensor:
        """Attention of one layer: ``query [T, N, H]``, keys and values ``[T, K, H]`` -> ``[T, N, H]``."""


class StackStep(TokenStep, Protocol):
    """What the engine passes down to stacks of fused layers for one forward."""

    def decode_rows(self) -> Sequence[DecodeRows] | None:
        """Where the rows find their keys in each group of layers, if compiled layers can attend them by
        themselves."""

    def layer_places(
        self, asked: Sequence[tuple[torch.nn.Module, Mapping[str, object]]]
    ) -> Sequence[LayerPlace]:
        """Where the layers' pages are; true as long as :attr:`pages_stamp` stays equal.

        Args:
            asked: each layer's attention module and what it passes to its attention.
        """

    @property
    def pages_stamp(self) -> tuple[object, int]:
        """Of the pages' addresses."""


class AttentionStep(Protocol):
    """What the engine passes down to transformers' attention layers for one forward."""

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


MAX_SCORES = 2**26
"""Scores that exist at once: 256 MB of float32."""


def attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, call: AttentionCall, sinks: Tensor | None
) -> Tensor:
    """matmul -> fp32 softmax -> matmul over the last two dimensions, with soft cap and sinks.

    ``bias`` (0 or -inf) and ``sinks`` (last dimension 1) broadcast against the scores. Works
    through the queries in slices, so that a long prompt does not need all its scores at once.
    """
    length = query.shape[-2]
    scores_per_query = query.shape[:-2].numel() * key.shape[-2]
    step = max(1, MAX_SCORES // max(1, scores_per_query))
    if step >= length:
        return _attend_slice(query, key, value, bias, call, sinks)
    slices = []
    for start in range(0, length, step):
        part = slice(start, start + step)
        seen = bias if bias.shape[-2] == 1 else bias[..., part, :]
        per_query = sinks is not None and sinks.shape[-2] == length
        of_part = sinks[..., part, :] if sinks is not None and per_query else sinks
        slices.append(_attend_slice(query[..., part, :], key, value, seen, call, of_part))
    return torch.cat(slices, dim=-2)


def _attend_slice(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, call: AttentionCall, sinks: Tensor | None
) -> Tensor:
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


def attend_to_itself(query: Tensor, value: Tensor) -> Tensor:
    """``[1, N, T, H]`` and ``[1, K, T, H]`` -> ``[1, T, N, H]``: each token gets its own value.

    What probes answer: the forward goes on, and nothing is kept.
    """
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()
