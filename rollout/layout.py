"""Planned rows as packed tokens: one row after the other, where each token stands and where it is stored.

Letters: R rows, T packed tokens, W page-table width, S slots in a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

from rollout.runs import RowSpan
from rollout.sequence import PlannedRow

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows in packed order, and the tokens that they make."""

    rows: tuple[PlannedRow, ...]
    starts: tuple[int, ...]
    """Packed index of each row's first token."""
    ends: tuple[int, ...]
    owners: Ints
    """[T], which row each token is of."""
    positions: Ints
    """[T], where in its sequence each token stands."""

    @classmethod
    def of(cls, rows: Sequence[PlannedRow]) -> "PackedRows":
        """Rows as they come, at least one."""
        ends = tuple(accumulate(row.length for row in rows))
        starts = (0, *ends[:-1])
        owners = np.repeat(np.arange(len(rows)), [row.length for row in rows])
        offsets = np.array([row.start - start for row, start in zip(rows, starts, strict=True)])
        return cls(tuple(rows), starts, ends, owners, np.arange(ends[-1]) + offsets[owners])

    def spans(self, group: int) -> tuple[RowSpan, ...]:
        """The rows with their pages of a layer group."""
        return tuple(
            RowSpan(
                start=start,
                length=row.length,
                position=row.start,
                first_page=row.sequence.first_page[group],
                pages=tuple(row.sequence.tables[group]),
            )
            for row, start in zip(self.rows, self.starts, strict=True)
        )

    def slots(self, spans: Sequence[RowSpan], table: Ints, page_size: int) -> Ints:
        """[T], where each token is stored, page * S + slot: of :meth:`spans` and their :func:`page_table`."""
        page, slot = np.divmod(self.positions, page_size)
        place = page - np.array([span.first_page for span in spans])[self.owners]
        widths = np.array([len(span.pages) for span in spans])
        assert ((place >= 0) & (place < widths[self.owners])).all(), "a token without a page"
        slots: Ints = table[self.owners, place] * page_size + slot
        return slots


def page_table(spans: Sequence[RowSpan]) -> Ints:
    """[R, W]: the spans' pages, padded with the null page."""
    widths = np.array([len(span.pages) for span in spans])
    table = np.zeros((len(spans), widths.max()), dtype=np.int64)
    numbers = chain.from_iterable(span.pages for span in spans)
    # one call for all rows: each by itself takes longer than the rest of a step's layout
    table[np.arange(table.shape[1]) < widths[:, None]] = np.fromiter(numbers, dtype=np.int64)
    return table
