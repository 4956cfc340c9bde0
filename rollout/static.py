"""The tensors that a recorded decode step reads, and how a step is padded to fill them.

Rows that only fill up have their table, slot and key in the scrap page, which nobody reads; entries
behind the end of a row's own table point at the null page, as everywhere.

Letters: R rows, W page-table width of a layer group, S slots in a page, C keys seen through a table (W * S).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout.batch import Bucket, BucketKind, GroupBatch, StepBatch
from rollout.runs import PagedRun, RunRules
from rollout.transfer import refill


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The size of a recording."""

    rows: int
    widths: tuple[int, ...]
    """Pages per row, of each layer group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Which sizes are recorded."""

    row_interval: int
    """Rows are padded to a multiple of this."""
    key_interval: int
    """Keys per row are padded to a multiple of this."""
    page_size: int
    position_limit: int
    """Tokens of a sequence at the most, beyond which no keys are padded to."""
    max_decode_pages: int | None = None
    """Pages up to which a paged kernel has a fast path: tables within it are not padded beyond it."""

    def key_of(self, batch: StepBatch) -> GraphKey:
        """The size of a decode-only batch that was built without masks."""
        return self.key(len(batch.packed_rows), [_only_bucket(g).table_width for g in batch.groups])

    def key(self, rows: int, widths: Sequence[int]) -> GraphKey:
        """The size that holds ``rows`` with tables of ``widths`` pages.

        Example::

            sizes = GraphSizes(row_interval=64, key_interval=16384, page_size=32, position_limit=8192)
            sizes.key(70, [3])          # GraphKey(rows=128, widths=(256,)): 8192 keys
        """
        return GraphKey(
            rows=self._round_up(rows, self.row_interval), widths=tuple(map(self._padded_width, widths))
        )

    def _padded_width(self, width: int) -> int:
        most = -(-self.position_limit // self.page_size)
        if self.max_decode_pages is not None and width <= self.max_decode_pages:
            most = min(most, self.max_decode_pages)
        keys = self._round_up(width * self.page_size, self.key_interval)
        return max(width, min(most, -(-keys // self.page_size)))

    @staticmethod
    def _round_up(count: int, interval: int) -> int:
        return -(-count // interval) * interval


class StaticStep:
    """The tensors that a recording reads, all parts of one, so that a step fills them by one copy."""

    def __init__(
        self,
        key: GraphKey,
        windows: Sequence[int | None],
        scrap_pages: Sequence[int],
        page_size: int,
        device: torch.device,
    ) -> None:
        self._key = key
        rows, widths = key.rows, key.widths
        self._sizes = [rows, rows, rows, *(size for w in widths for size in (rows, rows * w, 2 * rows))]
        self._blank = np.zeros(sum(self._sizes), dtype=np.int64)
        _, _, _, *parts = self._split(self._blank)
        for scrap, slots, pages, seen in zip(scrap_pages, parts[::3], parts[1::3], parts[2::3], strict=True):
            slots[:] = scrap * page_size + np.arange(rows) % page_size
            pages.reshape(rows, -1)[:, 0] = scrap
            seen.reshape(rows, 2)[:, 1] = 1
        self._all = torch.from_numpy(self._blank).to(device, copy=True)
        ids, positions, index, *tensors = self._all.split(self._sizes)
        self.batch = StepBatch(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            logit_index=index,
            logit_rows=(),
            packed_rows=(),
            row_starts=(),
            groups=tuple(
                _static_group(rows, window, slots, pages, seen)
                for window, slots, pages, seen in zip(
                    windows, tensors[::3], tensors[1::3], tensors[2::3], strict=True
                )
            ),
            saves=(),
            loads=(),
        )
        """The tensors as a step of R rows, all of which draw."""

    def load(self, batch: StepBatch) -> None:
        """Take over a batch on the host; what it does not fill is padding, whatever was there before."""
        rows = len(batch.packed_rows)
        new = self._blank.copy()
        ids, positions, index, *parts = self._split(new)
        ids[:rows] = batch.input_ids.numpy()[0]
        positions[:rows] = batch.position_ids.numpy()[0]
        index[: len(batch.logit_index)] = batch.logit_index.numpy()
        for g, group in enumerate(batch.groups):
            slots, pages, seen = parts[3 * g : 3 * g + 3]
            bucket = _only_bucket(group)
            assert bucket.pages is not None and bucket.seen is not None
            slots[:rows] = group.slots.numpy()
            table = pages.reshape(self._key.rows, -1)[:rows]
            table[:, : bucket.table_width] = bucket.pages.numpy().reshape(rows, -1)
            seen.reshape(self._key.rows, 2)[:rows] = bucket.seen.numpy()
        refill(self._all, torch.from_numpy(new))

    def _split(self, flat: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        return np.split(flat, np.cumsum(self._sizes)[:-1])


def _only_bucket(group: GroupBatch) -> Bucket:
    (bucket,) = group.buckets
    assert bucket.kind is BucketKind.DECODE
    return bucket


def _static_group(rows: int, window: int | None, slots: Tensor, pages: Tensor, seen: Tensor) -> GroupBatch:
    bucket = Bucket(
        kind=BucketKind.DECODE,
        start=0,
        end=rows,
        num_rows=rows,
        query_len=1,
        pages=pages,
        seen=seen.view(rows, 2),
    )
    return GroupBatch(
        window=window,
        slots=slots,
        rows=(),
        buckets=(bucket,),
        runs=(),
        copy_sources=None,
        copy_targets=None,
        fresh_pages=None,
    )


def with_masks(batch: StepBatch, page_size: int, dtype: torch.dtype) -> StepBatch:
    """The same step with a bias made from ``seen`` on the device, for attention that needs one."""
    groups = []
    for group in batch.groups:
        bucket = _only_bucket(group)
        assert bucket.seen is not None
        keys = torch.arange(bucket.table_width * page_size, device=bucket.seen.device)
        is_seen = (keys >= bucket.seen[:, :1]) & (keys < bucket.seen[:, 1:])
        bias = torch.zeros(is_seen.shape, dtype=dtype, device=keys.device)
        bias = bias.masked_fill_(~is_seen, float("-inf")).unsqueeze(1)  # [R, 1, C]
        groups.append(dataclasses.replace(group, buckets=(dataclasses.replace(bucket, bias=bias),)))
    return dataclasses.replace(batch, groups=tuple(groups))


def with_runs(batch: StepBatch, page_size: int, rules: RunRules) -> StepBatch:
    """The same step as runs for a paged kernel, made of the tables on the device."""
    groups = []
    for group in batch.groups:
        bucket = _only_bucket(group)
        assert bucket.pages is not None and bucket.seen is not None
        width, limit = bucket.table_width, rules.max_decode_pages
        lengths = bucket.seen[:, 1].to(torch.int32)  # counted from the first slot of the row's table
        ones = torch.ones_like(lengths)
        run = PagedRun(
            start=bucket.start,
            end=bucket.end,
            is_decode=group.window is None and (limit is None or width <= limit),
            window=group.window,
            cu_q=_starts(ones),
            cu_k=_starts(lengths),
            lengths=lengths,
            table=bucket.pages.view(bucket.num_rows, width).to(torch.int32),
            max_q=1,
            max_k=width * page_size,  # of the recording, whatever its rows hold
        )
        groups.append(dataclasses.replace(group, buckets=(), runs=(run,)))
    return dataclasses.replace(batch, groups=tuple(groups))


def _starts(counts: Tensor) -> Tensor:
    """[R + 1] int32: where each of R parts begins, and where the last one ends."""
    return pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
