"""The slow twin: one row after the other, keys and values read page by page, plain matmuls."""

import torch
from torch import Tensor

from rollout.attention.backend import AttentionCall, attend_plainly
from rollout.batch import GroupBatch
from rollout.kv_cache import LayerPages, PageOrder
from rollout.runs import RowSpan


class EagerAttention:
    """Attention without buckets, padding or fused kernels; see ``AttentionBackend``."""

    name = "eager"
    needs_masks = False
    run_rules = None
    page_order = PageOrder.HEADS_FIRST
    page_multiple = 1
    is_recordable = False  # the rows' pages are lists
    has_decode_layers = False

    def attend(self, call: AttentionCall, pages: LayerPages, batch: GroupBatch) -> Tensor:
        """See ``AttentionBackend``."""
        pages.write(batch.slots, call.key, call.value)
        rows = [attend_row(call, pages, row, batch.window) for row in batch.rows]
        return torch.cat(rows, dim=1).transpose(0, 1)


def attend_row(call: AttentionCall, pages: LayerPages, row: RowSpan, window: int | None) -> Tensor:
    """One row's attention over its pages: ``[N, length, H]``."""
    table = torch.tensor(row.pages, device=call.query.device)
    page_size = pages.keys.shape[2]
    begin = row.first_page * page_size
    num_keys = row.num_keys(page_size)
    key = pages.keys[:, table].flatten(1, 2)[:, :num_keys]
    value = pages.values[:, table].flatten(1, 2)[:, :num_keys]
    groups = call.query.shape[1] // key.shape[0]
    query_at = torch.arange(row.position, row.position + row.length, device=key.device)[:, None]
    key_at = torch.arange(begin, begin + num_keys, device=key.device)[None]
    seen = key_at <= query_at
    if window is not None:
        seen &= key_at > query_at - window
    bias = torch.zeros(seen.shape, device=key.device).masked_fill_(~seen, float("-inf"))
    return attend_plainly(
        call.query[row.start : row.start + row.length].transpose(0, 1),
        key.repeat_interleave(groups, dim=0),
        value.repeat_interleave(groups, dim=0),
        bias,
        call,
        None if call.sinks is None else call.sinks[:, None, None],
    )
