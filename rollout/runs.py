"""Rows of a step as the arguments of paged attention kernels: flash-attn's, and torch's own.

Such a kernel takes rows of any length one after the other and finds a row's keys through a table of
pages. It lets a row's last query see the row's last key, the one before it the key before that, and
so on: only lengths matter, never positions. ::

    packed tokens  | long decode rows |   decode rows   |  new prompts, continued prompts |
    runs           |      ragged      |     decode      |              ragged             |

Under a sliding window a row's table begins at its first page that is still held, and the row's
length counts from that page's first slot.

Letters: T packed tokens, R rows of a run, W width of its table, S slots in a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class RowSpan(NamedTuple):  # which is made in half the time: a step makes one per row and layer group
    """One row on the host side: its packed tokens, their positions, and its pages."""

    start: int
    length: int
    position: int
    first_page: int
    pages: tuple[int, ...]

    def num_keys(self, page_size: int) -> int:
        """Keys once the row's own are stored, counted from the first slot of its table."""
        return self.position + self.length - self.first_page * page_size


@dataclass(frozen=True, slots=True)
class RunRules:
    """How a paged kernel wants its rows."""

    max_decode_pages: int | None
    """Rows of one token with no more pages than this make a decode run, whose table is so wide
    whatever the rows hold. 0: there are no decode runs. ``None``: all such rows, and the widest of
    them sets the width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRun:
    """Rows that one call of a paged kernel serves: packed tokens ``start .. end``."""

    start: int
    end: int
    is_decode: bool
    """One query per row, which sees every key of the row: no mask, and the kernels' fastest entry."""
    window: int | None
    """Keys that a query sees at the most, its own included."""
    cu_q: Tensor
    """[R + 1] int32, where each row's queries begin, counted from ``start``; then their total."""
    cu_k: Tensor
    """[R + 1] int32, the same of keys, as if they lay one row after the other."""
    lengths: Tensor
    """[R] int32, keys per row, the step's own included."""
    table: Tensor
    """[R, W] int32, pages of each row, padded with the null page."""
    max_q: int
    max_k: int

    def check(self, page_size: int) -> None:
        """Assert the shapes, types and orders that the fields promise."""
        rows = len(self.lengths)
        assert rows > 0 and self.table.shape[0] == rows and self.cu_q.shape == self.cu_k.shape == (rows + 1,)
        for tensor in (self.cu_q, self.cu_k, self.lengths, self.table):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        queries, keys = self.cu_q.diff(), self.cu_k.diff()
        assert self.cu_q[0] == self.cu_k[0] == 0 and self.cu_q[-1] == self.end - self.start
        assert torch.equal(keys, self.lengths)
        assert int(queries.min()) >= 1 and int(queries.max()) == self.max_q and bool((queries <= keys).all())
        assert int(keys.max()) <= self.max_k <= self.table.shape[1] * page_size
        assert not self.is_decode or (self.max_q == 1 and self.window is None)


def build_runs(
    spans: Sequence[RowSpan],
    num_decode: int,
    page_size: int,
    window: int | None,
    rules: RunRules,
    device: torch.device,
) -> tuple[PagedRun, ...]:
    """Cut packed rows into runs. The first ``num_decode`` have one token each, the longest first."""
    limit = rules.max_decode_pages
    assert window is None or limit == 0, "a decode run has no mask, which a window needs"
    num_long = num_decode
    if limit != 0:
        num_long = sum(
            limit is not None and span.num_keys(page_size) > limit * page_size for span in spans[:num_decode]
        )
    # rows lie longest first, so those within the limit follow one another; without any, what
    # would stand on both sides of them is one run
    parts = (
        [(False, spans)]
        if num_long == num_decode
        else [(False, spans[:num_long]), (True, spans[num_long:num_decode]), (False, spans[num_decode:])]
    )
    return tuple(
        _build_run(rows, is_decode, limit, page_size, window, device) for is_decode, rows in parts if rows
    )


def _build_run(
    spans: Sequence[RowSpan],
    is_decode: bool,
    limit: int | None,
    page_size: int,
    window: int | None,
    device: torch.device,
) -> PagedRun:
    keys = [span.num_keys(page_size) for span in spans]
    widest = -(-max(keys) // page_size)
    table = np.zeros((len(spans), widest if limit is None or not is_decode else limit), dtype=np.int32)
    for i, (span, num_keys) in enumerate(zip(spans, keys, strict=True)):
        needed = -(-num_keys // page_size)
        table[i, :needed] = span.pages[:needed]
    lengths = [span.length for span in spans]
    return PagedRun(
        start=spans[0].start,
        end=spans[-1].start + spans[-1].length,
        is_decode=is_decode,
        window=window,
        cu_q=_as_int32(np.cumsum([0, *lengths]), device),
        cu_k=_as_int32(np.cumsum([0, *keys]), device),
        lengths=_as_int32(np.array(keys), device),
        table=torch.from_numpy(table).to(device),
        max_q=max(lengths),
        max_k=max(keys),
    )


def _as_int32(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)
