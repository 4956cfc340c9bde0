"""One step on the device: page moves, then a forward through the view with paged attention.

Letters: T packed tokens, D rows with logits, N query heads, K kv heads, H head dim, V vocabulary.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import SupportsFloat, cast

import torch
from torch import Tensor, nn

from rollout.attention import IMPLEMENTATION, AttentionBackend, AttentionCall
from rollout.batch import StepBatch
from rollout.kv_cache import KVCache
from rollout.probe import ModelPlan


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
        layer = self.layer_of[id(module)]
        dtype = self.cache.layout.dtype
        group = self.batch.groups[self.cache.group_of(layer)]
        pages = self.cache.layer(layer)
        scaling, softcap, sinks = options.get("scaling"), options.get("softcap"), options.get("s_aux")
        # the probe refuses other types
        call = AttentionCall(
            query=query.to(dtype),
            key=key.to(dtype),
            value=value.to(dtype),
            scaling=query.shape[-1] ** -0.5 if scaling is None else float(cast(SupportsFloat, scaling)),
            softcap=None if softcap is None else float(cast(SupportsFloat, softcap)),
            sinks=sinks if isinstance(sinks, Tensor) else None,
        )
        return self.backend.attend(call, pages, group)


def forward(
    view: nn.Module, plan: ModelPlan, batch: StepBatch, cache: KVCache, backend: AttentionBackend
) -> Tensor:
    """Run the view over a step: logits ``[D, V]`` of the rows that draw."""
    move_pages(batch, cache)
    keep = {"logits_to_keep": batch.logit_index} if plan.keeps_logits else {}
    logits: Tensor = view(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        rollout_step=PagedStep(batch, cache, backend, plan.layer_of),
        **keep,
    ).logits[0]
    return logits if plan.keeps_logits else logits.index_select(0, batch.logit_index)


def move_pages(batch: StepBatch, cache: KVCache) -> None:
    """Bring the pages into the state in which the step's rows expect them."""
    for move in batch.saves:  # first of all: their pages have new owners already
        move.saved.stored[move.group] = cache.read_pages(move.group, move.pages)
    for g, group in enumerate(batch.groups):
        # copies first: a page that somebody else clears may be a copy's source
        if group.copy_sources is not None and group.copy_targets is not None:
            cache.copy_pages(g, group.copy_sources, group.copy_targets)
        if group.fresh_pages is not None:
            cache.clear_pages(g, group.fresh_pages)
    for move in batch.loads:
        cache.write_pages(move.group, move.pages, move.saved.stored[move.group])


def set_attention(view: nn.Module) -> None:
    """Make the view's layers call our attention function: only the view's own configs change."""
    for module in view.modules():
        config = vars(module).get("config")
        if config is not None and "_attn_implementation_internal" in vars(config):
            config._attn_implementation = IMPLEMENTATION
