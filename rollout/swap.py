"""The books of host memory that pages of preempted sequences are copied to.

A sequence that has to make room leaves its pages here, as long as the space allows, and takes them back
instead of being computed again. The copies themselves hang on the sequence's ``SavedPages``: whoever
drops that record frees the memory. This room only counts.
"""

from rollout.sequence import PageTransfer, SavedPages, Sequence


class SwapSpace:
    """So many bytes of host memory for pages.

    Example::

        swap = SwapSpace(num_bytes=2**30, page_bytes=(49152,))
        transfer = swap.save(sequence)      # before its pages are given back; None without room
        swap.drop(sequence)                 # it ended, or its pages belong to older weights
    """

    def __init__(self, num_bytes: int, page_bytes: tuple[int, ...]) -> None:
        self._page_bytes = page_bytes
        self.num_bytes = num_bytes
        """Of all pages that may lie here at once."""
        self.num_free = num_bytes
        """Bytes that are not taken."""

    def save(self, sequence: Sequence) -> PageTransfer | None:
        """Take space for what ``sequence`` has computed; ``None`` if there is too little, or nothing."""
        saved = SavedPages(
            num_pages=tuple(map(len, sequence.tables)),
            first_page=tuple(sequence.first_page),
            num_computed=sequence.num_computed,
            is_shareable=sequence.is_shareable,
        )
        needed = self._bytes(saved)
        if sequence.num_computed == 0 or needed > self.num_free:
            return None
        assert sequence.saved is None, "saved twice"
        self.num_free -= needed
        sequence.saved = saved
        return PageTransfer(saved=saved, pages=tuple(map(tuple, sequence.tables)))

    def drop(self, sequence: Sequence) -> None:
        """Give the sequence's space back, if it has any."""
        if sequence.saved is not None:
            self.num_free += self._bytes(sequence.saved)
            sequence.saved = None

    def check(self, sequences: tuple[Sequence, ...]) -> None:
        """Audit the space against all sequences that may have some; raises AssertionError."""
        taken = sum(self._bytes(s.saved) for s in sequences if s.saved is not None)
        assert self.num_free + taken == self.num_bytes, "bytes of host memory are lost"

    def _bytes(self, saved: SavedPages) -> int:
        return sum(count * size for count, size in zip(saved.num_pages, self._page_bytes, strict=True))
