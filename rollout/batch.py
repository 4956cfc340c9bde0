"""From a step's plan to the index tensors that the model and the attention read.

The only place where lists become tensors. Rows are packed so that each bucket of similar rows is
one contiguous run of tokens::

    packed tokens  | decode rows, longest first | new prompts, longest first | continued prompts |
    buckets        |    d0     |    d1    |  d2 |      p0      |      p1     |        c0         |

Without masks, the tokens of short prompts follow the decode rows as rows of the same, the only bucket.

Letters: T packed tokens, R rows of a bucket, Q query tokens of its longest row, W page-table width,
S slots in a page, C keys seen through a table (W * S), D drawing rows.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rollout.layout import Ints, PackedRows, page_table
from rollout.runs import PagedRun, RowSpan, RunRules, build_runs
from rollout.sequence import PageTransfer, PlannedRow, SavedPages, StepPlan

BUCKET_OVERHEAD_KEYS = 512
"""Padding of this many key slots costs about as much as one more bucket (measured on 2 CPU cores:
10 us per 32 slots, 100 us of calls per bucket and layer)."""
MAX_LONE_KEYS = 192
"""Without masks a prompt's tokens attend one by one, like decode rows, where they see so many keys at the
most: no gather, no padding, no mask, and all layers in one call (135M model, 2 CPU cores with AMX: 1.3 times
as fast as SDPA for prompts of 40 tokens, as fast around 200, slower beyond)."""
MAX_LONE_TABLE = 2**20
"""Numbers in a page table with a row for each token at the most (8 MiB): one sequence of many pages makes it
that wide for all. Where there would be more, prompts stay together."""
MAX_BUCKET_SIZES = 16
"""Distinct sizes between which bucket borders are searched; more are rounded together."""


class BucketKind(Enum):
    """How the rows of a bucket find their keys."""

    DECODE = "decode"  # one query token each (a decode row, or a token of a short prompt), keys from pages
    FRESH = "fresh"  # whole prompts from position 0, keys are the packed ones
    CONTINUED = "continued"  # several query tokens after a computed prefix, keys from pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Rows that attend together, as one run of packed tokens ``start .. end``."""

    kind: BucketKind
    start: int
    end: int
    num_rows: int
    query_len: int
    tokens: Tensor | None = None
    """[R * Q] int64, packed index of each (row, query); short rows repeat their last token.
    ``None`` for DECODE, where it would be ``start .. end``."""
    kept: Tensor | None = None
    """[end - start] int64, where in ``R * Q`` each packed token of the run lies."""
    pages: Tensor | None = None
    """[R * W] int64, page tables padded with the null page; ``None`` where the packed keys are all
    that is seen."""
    bias: Tensor | None = None
    """[R, Q, C] in the cache's dtype: 0 where a query sees a key, -inf elsewhere."""
    seen: Tensor | None = None
    """[R, 2] int64 instead of a bias: the first key that the row sees and the end, counted from the
    first slot of its table."""

    @property
    def table_width(self) -> int:
        """Pages per row; 0 where there is no table."""
        return 0 if self.pages is None else len(self.pages) // self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBatch:
    """What one layer group needs in this step."""

    window: int | None
    slots: Tensor
    """[T] int64, where each token's key and value are stored: page * S + slot."""
    rows: tuple[RowSpan, ...]
    buckets: tuple[Bucket, ...]
    """Empty where there are runs."""
    runs: tuple[PagedRun, ...]
    """What paged kernels take instead of buckets; only for backends that ask for them."""
    copy_sources: Tensor | None
    copy_targets: Tensor | None
    fresh_pages: Tensor | None


@dataclass(frozen=True, slots=True)
class PageMove:
    """Pages ``[C] int64`` of a layer group that go to host memory or come from it."""

    saved: SavedPages
    group: int
    pages: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step as tensors."""

    input_ids: Tensor
    """[1, T] int64."""
    position_ids: Tensor
    """[1, T] int64."""
    logit_index: Tensor
    """[D] int64, packed index of the last token of each row that draws."""
    logit_rows: tuple[int, ...]
    """For each drawing sequence (forks included), its row in the D logits."""
    packed_rows: tuple[PlannedRow, ...]
    """The plan's rows in packed order."""
    row_starts: tuple[int, ...]
    """Packed index of each packed row's first token."""
    groups: tuple[GroupBatch, ...]
    saves: tuple[PageMove, ...]
    loads: tuple[PageMove, ...]

    @property
    def num_tokens(self) -> int:
        """Packed tokens."""
        return self.input_ids.shape[1]

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token."""
        return self.num_tokens == len(self.packed_rows)

    def check(self) -> None:
        """Assert the shapes and types that the fields promise."""
        tokens = self.num_tokens
        assert self.input_ids.dtype == self.position_ids.dtype == self.logit_index.dtype == torch.int64
        assert self.position_ids.shape == (1, tokens)
        for group in self.groups:
            assert group.slots.shape == (tokens,) and group.slots.dtype == torch.int64
            assert len(set(group.slots.tolist())) == tokens, "two tokens share a slot"
            parts = group.runs or group.buckets
            runs = [(part.start, part.end) for part in parts]
            assert [0, *(end for _, end in runs)] == [*(start for start, _ in runs), tokens]


def build_batch(
    plan: StepPlan,
    *,
    page_size: int,
    windows: SequenceABC[int | None],
    dtype: torch.dtype,
    device: torch.device,
    masks: bool = True,
    run_rules: RunRules | None = None,
    max_lone_keys: int = MAX_LONE_KEYS,
) -> StepBatch:
    """Lay out a plan. ``dtype`` is that of the cache, which the attention bias takes too.

    Without ``masks`` all decode rows and the tokens of prompts up to ``max_lone_keys`` make one bucket and
    tell which keys they see by ``seen``. With ``run_rules`` there are runs for a paged kernel and no buckets.
    """
    runs = _split_by_kind(plan.rows, 0 if masks or run_rules is not None else max_lone_keys)
    packed = PackedRows.of([row for _, run in runs for row in run])
    ids = [t for row in packed.rows for t in row.sequence.ids[row.start : row.start + row.length]]
    last_token = {id(row): end - 1 for row, end in zip(packed.rows, packed.ends, strict=True)}
    drawing = [row for row in plan.rows if row.draws]
    return StepBatch(
        input_ids=torch.tensor(ids, device=device).unsqueeze(0),
        position_ids=torch.from_numpy(packed.positions).to(device).unsqueeze(0),
        logit_index=torch.tensor([last_token[id(row)] for row in drawing], dtype=torch.int64, device=device),
        logit_rows=tuple(i for i, row in enumerate(drawing) for _ in range(1 + len(row.forks))),
        packed_rows=packed.rows,
        row_starts=packed.starts,
        groups=tuple(
            _build_group(plan, runs, packed, group, page_size, window, dtype, device, masks, run_rules)
            for group, window in enumerate(windows)
        ),
        saves=_moves(plan.saves, device),
        loads=_moves(plan.loads, device),
    )


def _moves(transfers: SequenceABC[PageTransfer], device: torch.device) -> tuple[PageMove, ...]:
    return tuple(
        PageMove(transfer.saved, group, torch.tensor(pages, device=device))
        for transfer in transfers
        for group, pages in enumerate(transfer.pages)
        if pages
    )


def _lone_table_size(rows: SequenceABC[PlannedRow]) -> int:
    """Numbers in a page table with a row for each token."""
    widest = max(len(pages) for row in rows for pages in row.sequence.tables)
    return widest * sum(row.length for row in rows)


def _split_by_kind(
    rows: SequenceABC[PlannedRow], max_lone_keys: int
) -> list[tuple[BucketKind, list[PlannedRow]]]:
    """Rows by kind, each kind sorted by size with the largest first; prompts among decode rows come last."""
    if all(row.length == 1 for row in rows):  # most steps
        return [(BucketKind.DECODE, sorted(rows, key=lambda r: -r.start))]
    if _lone_table_size(rows) > MAX_LONE_TABLE:
        max_lone_keys = 0

    def attends_alone(row: PlannedRow) -> bool:
        return row.length == 1 or row.start + row.length <= max_lone_keys

    decode = sorted(filter(attends_alone, rows), key=lambda r: (r.length > 1, -r.start))
    together = [row for row in rows if not attends_alone(row)]
    fresh = sorted((r for r in together if r.start == 0), key=lambda r: -r.length)
    continued = sorted((r for r in together if r.start > 0), key=lambda r: -r.length)
    kinds = ((BucketKind.DECODE, decode), (BucketKind.FRESH, fresh), (BucketKind.CONTINUED, continued))
    return [(kind, run) for kind, run in kinds if run]


def _build_group(
    plan: StepPlan,
    runs: list[tuple[BucketKind, list[PlannedRow]]],
    packed: PackedRows,
    group: int,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    masks: bool,
    run_rules: RunRules | None,
) -> GroupBatch:
    spans = packed.spans(group)
    table = page_table(spans)
    buckets: list[Bucket] = []
    paged: tuple[PagedRun, ...] = ()
    if run_rules is not None:
        num_decode = sum(len(run) for kind, run in runs if kind is BucketKind.DECODE)
        paged = build_runs(spans, num_decode, page_size, window, run_rules, device)
    else:
        buckets = _build_buckets(spans, table, runs, packed, page_size, window, dtype, device, masks)
    copies = [copy for copy in plan.copies if copy.group == group]
    fresh = plan.fresh_pages[group] if plan.fresh_pages else ()
    return GroupBatch(
        window=window,
        slots=torch.from_numpy(packed.slots(spans, table, page_size)).to(device),
        rows=spans,
        buckets=tuple(buckets),
        runs=paged,
        copy_sources=torch.tensor([c.source for c in copies], device=device) if copies else None,
        copy_targets=torch.tensor([c.target for c in copies], device=device) if copies else None,
        fresh_pages=torch.tensor(fresh, device=device) if fresh else None,
    )


def _build_buckets(
    spans: SequenceABC[RowSpan],
    table: Ints,
    runs: list[tuple[BucketKind, list[PlannedRow]]],
    packed: PackedRows,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    masks: bool,
) -> list[Bucket]:
    buckets, done = [], 0
    for kind, run in runs:
        of_kind = spans[done : done + len(run)]
        done += len(run)
        if kind is BucketKind.DECODE and not masks:
            buckets.append(_build_unmasked(of_kind, table, packed, page_size, window, device))
            continue
        for first, last in _cut(kind, of_kind, page_size):
            buckets.append(_build_bucket(kind, of_kind[first:last], page_size, window, dtype, device))
    return buckets


def _cut(kind: BucketKind, spans: SequenceABC[RowSpan], page_size: int) -> list[tuple[int, int]]:
    """Borders between buckets of rows that are sorted by size, the largest first."""
    if kind is BucketKind.DECODE:
        sizes = [len(span.pages) * page_size for span in spans]
    else:
        sizes = [span.length * (len(span.pages) * page_size) for span in spans]
    # page counts under a window go up and down: a row counts for no less than any after it
    sizes = list(accumulate(reversed(sizes), max))[::-1]
    # a prefill bucket pays off where it saves about the work of its largest row
    return cut_buckets(sizes, BUCKET_OVERHEAD_KEYS if kind is BucketKind.DECODE else sizes[0])


def _build_bucket(
    kind: BucketKind,
    spans: SequenceABC[RowSpan],
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Bucket:
    query_len = max(span.length for span in spans)
    width = max(len(span.pages) for span in spans)
    start, end = spans[0].start, spans[-1].start + spans[-1].length
    tokens = kept = pages = bias = None
    if kind is not BucketKind.DECODE:
        lengths = np.array([span.length for span in spans])[:, None]
        offsets = np.arange(query_len)[None]
        firsts = np.array([span.start for span in spans])[:, None]
        tokens = torch.from_numpy((firsts + np.minimum(offsets, lengths - 1)).ravel()).to(device)
        kept = torch.from_numpy(np.flatnonzero(offsets < lengths)).to(device)
    if kind is not BucketKind.FRESH or (window is not None and query_len > window):
        pages = torch.from_numpy(page_table(spans).ravel()).to(device)
        bias = _bias(spans, query_len, width * page_size, page_size, window, dtype, device)
    return Bucket(
        kind=kind,
        start=start,
        end=end,
        num_rows=len(spans),
        query_len=query_len,
        tokens=tokens,
        kept=kept,
        pages=pages,
        bias=bias,
    )


def _build_unmasked(
    spans: SequenceABC[RowSpan],
    table: Ints,
    packed: PackedRows,
    page_size: int,
    window: int | None,
    device: torch.device,
) -> Bucket:
    """All tokens that attend one by one, which come first of all, without a bias."""
    num_tokens = spans[-1].start + spans[-1].length
    end = packed.positions[:num_tokens] + 1
    begin = np.zeros_like(end) if window is None else np.maximum(0, end - window)
    table_start = np.array([span.first_page * page_size for span in spans])
    table = table[: len(spans), : max(len(span.pages) for span in spans)]
    if num_tokens > len(spans):
        owners = packed.owners[:num_tokens]
        table, table_start = table[owners], table_start[owners]
    return Bucket(
        kind=BucketKind.DECODE,
        start=0,
        end=num_tokens,
        num_rows=num_tokens,
        query_len=1,
        pages=torch.from_numpy(table.ravel()).to(device),
        seen=torch.from_numpy(np.stack([begin, end], axis=1) - table_start[:, None]).to(device),
    )


def _bias(
    spans: SequenceABC[RowSpan],
    query_len: int,
    num_keys: int,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """[R, Q, C] additive mask: a query sees keys at or before its position, inside the window."""
    base = torch.tensor([span.position for span in spans], device=device)
    first = torch.tensor([span.first_page * page_size for span in spans], device=device)
    query = base[:, None, None] + torch.arange(query_len, device=device)[None, :, None]
    key = first[:, None, None] + torch.arange(num_keys, device=device)[None, None, :]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


def cut_buckets(sizes: SequenceABC[int], overhead: int) -> list[tuple[int, int]]:
    """Cut rows sorted by size (largest first) into runs of least total cost.

    A run costs ``rows * largest size + overhead``. Exact dynamic programme over the distinct
    sizes, which are rounded together when there are more than ``MAX_BUCKET_SIZES``.

    Example::

        cut_buckets([9, 9, 2, 2], overhead=4)   # [(0, 2), (2, 4)]: 18+4 + 4+4 < 36+4
    """
    step = 1 if len(set(sizes)) <= MAX_BUCKET_SIZES else -(-sizes[0] // MAX_BUCKET_SIZES)
    borders = [0]
    for i in range(1, len(sizes)):
        if -(-sizes[i] // step) != -(-sizes[i - 1] // step):
            borders.append(i)
    borders.append(len(sizes))
    best: list[tuple[int, int]] = [(0, 0)]  # per border: (cost of all rows before it, border cut last)
    for j in range(1, len(borders)):
        best.append(
            min((best[i][0] + (borders[j] - borders[i]) * sizes[borders[i]] + overhead, i) for i in range(j))
        )
    cuts, j = [], len(borders) - 1
    while j > 0:
        i = best[j][1]
        cuts.append((borders[i], borders[j]))
        j = i
    return cuts[::-1]
