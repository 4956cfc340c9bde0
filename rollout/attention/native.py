"""Paged attention in compiled code on the CPU for decode rows, and for short prompts as rows of one token
each; longer prompts go through SDPA.

The keys and values of a row are read where they lie, so such rows need neither buckets of similar length nor
masks: one call serves them all.
"""

import torch
from torch import Tensor

from rollout.attention.backend import AttentionCall
from rollout.attention.sdpa import SdpaAttention
from rollout.batch import Bucket, BucketKind, GroupBatch
from rollout.kv_cache import CacheLayout, LayerPages, PageOrder
from rollout.native import HEAD_DIMS, KINDS, Kernels


class NativeAttention:
    """Attention by compiled kernels; see ``AttentionBackend``."""

    name = "native"
    needs_masks = False
    run_rules = None
    page_order = PageOrder.HEADS_FIRST
    page_multiple = 1
    is_recordable = True
    has_decode_layers = True

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._prefill = SdpaAttention()

    def attend(self, call: AttentionCall, pages: LayerPages, batch: GroupBatch) -> Tensor:
        """See ``AttentionBackend``."""
        first = batch.buckets[0]
        if len(batch.buckets) == 1 and first.kind is BucketKind.DECODE:
            return self._decode(call, pages, first, (call.key, call.value, batch.slots))
        self._kernels.store(pages.keys, pages.values, call.key, call.value, batch.slots)
        out = torch.empty(call.query.shape, dtype=call.query.dtype)
        for bucket in batch.buckets:
            serve = self._decode if bucket.kind is BucketKind.DECODE else self._prefill.attend_bucket
            out[bucket.start : bucket.end] = serve(call, pages, bucket)
        return out

    def _decode(
        self,
        call: AttentionCall,
        pages: LayerPages,
        bucket: Bucket,
        new: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        assert bucket.pages is not None and bucket.seen is not None
        return self._kernels.attend(
            call.query if new is not None else call.query[bucket.start : bucket.end],
            pages.keys,
            pages.values,
            bucket.pages.view(bucket.num_rows, -1),
            bucket.seen,
            call.scaling,
            call.softcap,
            None if call.sinks is None else call.sinks.float().contiguous(),
            new,
        )


def why_not_native(layout: CacheLayout) -> str | None:
    """What of a cache the kernels have no code for; ``None`` where they serve it."""
    if layout.device.type != "cpu":
        return f"the model is on {layout.device}"
    if (layout.dtype, layout.dtype) not in KINDS:
        return f"keys and values are {layout.dtype}"
    for group in layout.groups:
        dims = {group.shape.key_dim, group.shape.value_dim}
        if len(dims) != 1 or not dims <= HEAD_DIMS:
            return f"head dims are {sorted(dims)}; served are equal ones of {sorted(HEAD_DIMS)}"
    return None
