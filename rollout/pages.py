"""The books of one layer group's pages: who holds which page, and which pages may be found again.

A page is free, held (reference count above 0), or idle: held by nobody but still findable by its
prefix key until it is needed elsewhere. This room knows page numbers and keys only; the tensors
behind the numbers belong to the kv cache, the tables of a sequence to :mod:`rollout.tables`.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

NULL_PAGE = 0
"""Never handed out: padding in page tables points here, so it must stay all zeros."""


def root_key(version: int) -> bytes:
    """Start of every key chain under one weight version: no page is found under another."""
    return b"rollout-weights-%d" % version


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full page from the key of the page before it and the token ids inside.

    A 128-bit BLAKE2b digest (RFC 7693): equal keys mean equal version and equal whole prefix.
    """
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Pages ``1 .. num_pages`` of one layer group, with reference counts and a prefix table.

    Example::

        pool = PagePool(num_pages=8)
        first, second = pool.allocate(2)
        pool.register(first, chain_key(root_key(0), [5, 6, 7, 8]))
        pool.release([second, first])       # `first` stays findable until its page is needed
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = 0
        self._references: list[int] = [1]  # the null page is held for ever
        self._free: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self.grow(num_pages)

    @property
    def num_pages(self) -> int:
        """Pages that can be handed out, held ones included."""
        return self._num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be handed out now: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages with at least one holder."""
        return self._num_pages - self.num_available

    def grow(self, num_pages: int) -> None:
        """Add pages until there are ``num_pages``; numbers handed out before stay valid."""
        assert num_pages >= self._num_pages, f"cannot shrink from {self._num_pages} to {num_pages}"
        added = range(self._num_pages + 1, num_pages + 1)
        # low numbers on top of the stack: memory that was touched before is used first
        self._free = [*reversed(added), *self._free]
        self._references.extend(0 for _ in added)
        self._num_pages = num_pages

    def references(self, page: int) -> int:
        """How many holders the page has."""
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` pages with one reference each, forgetting idle ones if needed."""
        assert count <= self.num_available, f"{count} pages asked, {self.num_available} available"
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page; an idle page is held again."""
        for page in pages:
            if self._references[page] == 0:
                del self._idle[page]
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one reference from each page.

        Pages are let go in reverse, so that the end of a prefix is forgotten before its beginning.
        """
        for page in reversed(list(pages)):
            assert self._references[page] > 0, f"page {page} has no holder"
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def register(self, page: int, key: bytes) -> None:
        """Make a full, held page findable. The first page under a key wins."""
        assert self._references[page] > 0, f"page {page} has no holder"
        assert page not in self._key_of, f"page {page} has a key already"
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def lookup(self, key: bytes) -> int | None:
        """The page registered under ``key``, if it is still there."""
        return self._page_of.get(key)

    def forget_prefixes(self) -> None:
        """Empty the prefix table: idle pages become free, held ones can no longer be found."""
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self._key_of.clear()
        self._page_of.clear()

    def check(self, expected: Mapping[int, int]) -> None:
        """Audit the books against ``expected`` references per page; raises AssertionError."""
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & idle, f"pages {free & idle} are free and idle"
        assert NULL_PAGE not in free | idle, "the null page was let go"
        for page in range(1, self._num_pages + 1):
            held = self._references[page]
            assert held == expected.get(page, 0), (
                f"page {page}: {held} references, {expected.get(page, 0)} expected"
            )
            assert (held == 0) == (page in free or page in idle), f"page {page} is in two states"
        assert idle <= set(self._key_of), "an idle page has no key"
        assert not free & set(self._key_of), "a free page has a key"
        assert {p: k for k, p in self._page_of.items()} == self._key_of, "prefix table is torn"

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
