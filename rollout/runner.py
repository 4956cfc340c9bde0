"""One step on the device: page moves, then a forward through the view with paged attention.

Letters: T packed tokens, D rows with logits, N query heads, K kv heads, H head dim, V vocabulary.
"""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import SupportsFloat, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rollout.attention import IMPLEMENTATION, AttentionBackend, AttentionCall
from rollout.batch import BucketKind, GroupBatch, StepBatch
from rollout.kv_cache import KVCache
from rollout.native import DecodeRows, LayerPlace
from rollout.probe import ModelPlan
from rollout.transfer import upload


def engine_mode() -> AbstractContextManager[object]:
    """No gradients, and no inference tensors even when the caller is in inference mode: what the
    engine keeps (pages, rotary caches of the view) must stay usable in any later mode."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step's attention: write keys and values to pages, then attend through the backend."""

    batch: StepBatch
    cache: KVCache
    backend: AttentionBackend
    layer_of: Mapping[int, int]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        options: Mapping[str, object],
    ) -> Tensor:
        """Attends for one layer; see ``AttentionStep``."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return self.attend_tokens(module, query, key, value, options).unsqueeze(0)

    def attend_tokens(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, object]
    ) -> Tensor:
        """Attends for one layer; see ``TokenStep``."""
        padding = query.shape[0] - self.batch.num_tokens
        if padding:  # of a compiled forward: attended as zeros, stored nowhere
            query, key, value = (x[: self.batch.num_tokens] for x in (query, key, value))
        layer = self.layer_of[id(module)]
        dtype = self.cache.layout.dtype
        group = self.batch.groups[self.cache.group_of(layer)]
        pages = self.cache.layer(layer)
        scaling, softcap, sinks = _score_rules(options, query.shape[-1])
        call = AttentionCall(
            query=query.to(dtype),
            key=key.to(dtype),
            value=value.to(dtype),
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
        )
        out = self.backend.attend(call, pages, group)
        return pad(out, (0, 0, 0, 0, 0, padding)) if padding else out

    def decode_rows(self) -> list[DecodeRows] | None:
        """Where the rows find their keys in each group of layers; see ``StackStep``."""
        if not self.backend.has_decode_layers or not all(_is_one_decode(g) for g in self.batch.groups):
            return None
        rows = []
        for group in self.batch.groups:
            (bucket,) = group.buckets
            assert bucket.pages is not None and bucket.seen is not None
            pages = bucket.pages.view(bucket.num_rows, -1)
            rows.append(DecodeRows(pages=pages, seen=bucket.seen, slots=group.slots))
        return rows

    def layer_places(self, asked: Sequence[tuple[nn.Module, Mapping[str, object]]]) -> list[LayerPlace]:
        """Where the layers' pages are; see ``StackStep``."""
        places = []
        for module, options in asked:
            layer = self.layer_of[id(module)]
            pages = self.cache.layer(layer)
            scaling, softcap, sinks = _score_rules(options, pages.keys.shape[-1])
            places.append(
                LayerPlace(
                    keys=pages.keys,
                    values=pages.values,
                    group=self.cache.group_of(layer),
                    scaling=scaling,
                    softcap=softcap,
                    sinks=None if sinks is None else sinks.float().contiguous(),
                )
            )
        return places

    @property
    def pages_stamp(self) -> tuple[object, int]:
        """Of the cache; see ``StackStep``."""
        return weakref.ref(self.cache), self.cache.epoch  # weakly: a cache may be a short-lived one


def _is_one_decode(group: GroupBatch) -> bool:
    return len(group.buckets) == 1 and group.buckets[0].kind is BucketKind.DECODE


def _score_rules(options: Mapping[str, object], head_dim: int) -> tuple[float, float | None, Tensor | None]:
    """What a layer asks of its scores: scaling, soft cap, sinks. The probe refuses other types."""
    scaling, softcap, sinks = options.get("scaling"), options.get("softcap"), options.get("s_aux")
    return (
        head_dim**-0.5 if scaling is None else float(cast(SupportsFloat, scaling)),
        None if softcap is None else float(cast(SupportsFloat, softcap)),
        sinks if isinstance(sinks, Tensor) else None,
    )


def forward(
    view: nn.Module, plan: ModelPlan, batch: StepBatch, cache: KVCache, backend: AttentionBackend
) -> Tensor:
    """Run the view over a step: logits ``[D, V]`` of the rows that draw."""
    move_pages(batch, cache)
    return run_model(view, plan, batch, cache, backend)


def run_model(
    view: nn.Module,
    plan: ModelPlan,
    batch: StepBatch,
    cache: KVCache,
    backend: AttentionBackend,
    padding: tuple[int, int] = (0, 0),
) -> Tensor:
    """Logits ``[D, V]`` of a step whose pages are ready.

    ``padding`` tokens and logits are added for the view and cut off again (see
    :mod:`rollout.compiled`).
    """
    index = _padded(batch.logit_index, padding[1])
    keep = {"logits_to_keep": index} if plan.keeps_logits else {}
    logits: Tensor = view(
        input_ids=_padded(batch.input_ids, padding[0]),
        position_ids=_padded(batch.position_ids, padding[0]),
        use_cache=False,
        rollout_step=PagedStep(batch, cache, backend, plan.layer_of),
        **keep,
    ).logits[0]
    logits = logits if plan.keeps_logits else logits.index_select(0, index)
    return logits[: len(batch.logit_index)] if padding[1] else logits


def _padded(x: Tensor, count: int) -> Tensor:
    """``count`` zeros more in the last dimension."""
    return pad(x, (0, count)) if count else x


def move_pages(batch: StepBatch, cache: KVCache) -> None:
    """Bring the pages into the state in which the step's rows expect them; comes before its forward."""
    device = cache.layout.device
    for move in batch.saves:  # first of all: their pages have new owners already
        move.saved.stored[move.group] = cache.read_pages(move.group, upload(move.pages, device))
    for g, group in enumerate(batch.groups):
        # copies first: a page that somebody else clears may be a copy's source
        if group.copy_sources is not None and group.copy_targets is not None:
            cache.copy_pages(g, upload(group.copy_sources, device), upload(group.copy_targets, device))
        if group.fresh_pages is not None:
            cache.clear_pages(g, upload(group.fresh_pages, device))
    for move in batch.loads:
        cache.write_pages(move.group, upload(move.pages, device), move.saved.stored[move.group])


def set_attention(view: nn.Module) -> None:
    """Make the view's layers call our attention function: only the view's own configs change."""
    for module in view.modules():
        config = vars(module).get("config")
        if config is not None and "_attn_implementation_internal" in vars(config):
            config._attn_implementation = IMPLEMENTATION
