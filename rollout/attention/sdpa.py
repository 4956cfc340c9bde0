"""Bucketed attention over gathered pages with torch's scaled_dot_product_attention; any device.

Decode rows fold the G query heads of a kv head into the query length, so that keys are neither
repeated nor broadcast: ``query [K, R, G, H]`` against ``keys [K, R, C, H]``. Layers with a soft cap
or sinks, which the fused kernels do not know, take the plain matmul path on the same buckets.

Letters: T packed tokens, R rows of a bucket, Q its query length, C keys per row, N query heads,
K kv heads, G = N / K, H head dim.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollout.attention.backend import AttentionCall, attend_plainly
from rollout.batch import Bucket, BucketKind, GroupBatch
from rollout.kv_cache import LayerPages, PageOrder


class SdpaAttention:
    """Attention by buckets of similar rows; see ``AttentionBackend``."""

    name = "sdpa"
    needs_masks = True
    run_rules = None
    page_order = PageOrder.HEADS_FIRST
    page_multiple = 1
    is_recordable = True
    has_decode_layers = False

    def attend(self, call: AttentionCall, pages: LayerPages, batch: GroupBatch) -> Tensor:
        """See ``AttentionBackend``."""
        pages.write(batch.slots, call.key, call.value)
        if len(batch.buckets) == 1:
            return self.attend_bucket(call, pages, batch.buckets[0])
        out = call.query.new_empty(*call.query.shape[:2], call.value.shape[-1])
        for bucket in batch.buckets:
            out[bucket.start : bucket.end] = self.attend_bucket(call, pages, bucket)
        return out

    def attend_bucket(self, call: AttentionCall, pages: LayerPages, bucket: Bucket) -> Tensor:
        """Attention of one bucket, ``[end - start, N, H]``, once keys and values are in the pages."""
        return (self._decode if bucket.kind is BucketKind.DECODE else self._prefill)(call, pages, bucket)

    def _decode(self, call: AttentionCall, pages: LayerPages, bucket: Bucket) -> Tensor:
        """One query per row, keys from pages: ``[R, N, H]``."""
        assert bucket.pages is not None and bucket.bias is not None
        key, value = _gather(pages, bucket)
        num_kv_heads = key.shape[0]
        query = call.query[bucket.start : bucket.end].unflatten(1, (num_kv_heads, -1)).transpose(0, 1)
        bias = bucket.bias.unsqueeze(0)  # [1, R, 1, C]
        if call.sinks is None and call.softcap is None:
            out = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=call.scaling)
        else:
            sinks = None if call.sinks is None else call.sinks.view(num_kv_heads, 1, -1, 1)
            out = attend_plainly(query, key, value, bias, call, sinks)
        return out.transpose(0, 1).flatten(1, 2)

    def _prefill(self, call: AttentionCall, pages: LayerPages, bucket: Bucket) -> Tensor:
        """Several queries per row: ``[end - start, N, H]``."""
        assert bucket.tokens is not None and bucket.kept is not None
        rows, length = bucket.num_rows, bucket.query_len
        query = _by_row(call.query, bucket.tokens, rows, length)
        groups = call.query.shape[1] // call.key.shape[1]
        if bucket.pages is None:
            # padding repeats a row's last token after its end, where causality hides it
            key = _by_row(call.key, bucket.tokens, rows, length)
            value = _by_row(call.value, bucket.tokens, rows, length)
        else:
            key, value = (x.transpose(0, 1) for x in _gather(pages, bucket))
        key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
        bias = None if bucket.bias is None else bucket.bias.unsqueeze(1)  # [R, 1, Q, C]
        if call.sinks is None and call.softcap is None:
            out = scaled_dot_product_attention(
                query, key, value, attn_mask=bias, is_causal=bias is None, scale=call.scaling
            )
        else:
            if bias is None:
                bias = torch.full((length, length), float("-inf"), device=query.device).triu_(1)
            sinks = None if call.sinks is None else call.sinks.view(1, -1, 1, 1)
            out = attend_plainly(query, key, value, bias, call, sinks)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.kept)


def _gather(pages: LayerPages, bucket: Bucket) -> tuple[Tensor, Tensor]:
    """Keys and values ``[K, R, C, H]`` behind the bucket's page tables."""
    assert bucket.pages is not None
    table = bucket.pages

    def gather(stored: Tensor) -> Tensor:
        heads, _, _, dim = stored.shape
        return stored.index_select(1, table).view(heads, bucket.num_rows, -1, dim)

    return gather(pages.keys), gather(pages.values)


def _by_row(packed: Tensor, tokens: Tensor, rows: int, length: int) -> Tensor:
    """``[T, heads, H] -> [R, heads, Q, H]``."""
    return packed.index_select(0, tokens).unflatten(0, (rows, length)).transpose(1, 2)
