"""Paged attention in compiled code for decode rows on the CPU; several queries per row go through SDPA.

The keys and values of a row are read where they lie, so decode rows need neither buckets of similar
length nor masks: one call serves them all.
"""

import torch
from torch import Tensor

from rollout.attention.backend import AttentionCall
from rollout.attention.sdpa import SdpaAttention
from rollout.batch import Bucket, BucketKind, GroupBatch
from rollout.kv_cache import CacheLayout, LayerPages
from rollout.native import HEAD_DIMS, KINDS, Kernels


class NativeAttention:
    """Attention by compiled kernels; see ``AttentionBackend``."""

    needs_masks = False

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._prefill = SdpaAttention()

    def store(self, call: AttentionCall, pages: LayerPages, slots: Tensor) -> None:
        """See ``AttentionBackend``."""
        self._kernels.store(pages.keys, pages.values, call.key, call.value, slots)

    def attend(self, call: AttentionCall, pages: LayerPages, batch: GroupBatch) -> Tensor:
        """Returns ``[T, N, H]``."""
        if len(batch.buckets) == 1:
            return self._attend(call, pages, batch.buckets[0])
        out = torch.empty(call.query.shape, dtype=call.query.dtype)
        for bucket in batch.buckets:
            out[bucket.start : bucket.end] = self._attend(call, pages, bucket)
        return out

    def _attend(self, call: AttentionCall, pages: LayerPages, bucket: Bucket) -> Tensor:
        if bucket.kind is not BucketKind.DECODE:
            return self._prefill.attend_bucket(call, pages, bucket)
        assert bucket.pages is not None and bucket.seen is not None
        return self._kernels.attend(
            call.query[bucket.start : bucket.end],
            pages.keys,
            pages.values,
            bucket.pages.view(bucket.num_rows, -1),
            bucket.seen,
            call.scaling,
            call.softcap,
            None if call.sinks is None else call.sinks.float().contiguous(),
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
