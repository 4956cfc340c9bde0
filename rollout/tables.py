"""Page tables of sequences over all layer groups: extend, share, fork, recycle, give back.

Layers that see the same window of keys form a group and have one table per sequence. A group with
``window=None`` keeps every page; one with a sliding window keeps only the pages that a later query
can still see. This room keeps tables and :class:`~rollout.pages.PagePool` books in step.
"""

from collections import Counter
from collections.abc import Iterable

from rollout.pages import PagePool, chain_key, root_key
from rollout.sequence import PageCopy, PageTransfer, SavedPages, Sequence


def pages_to_hold(num_tokens: int, window: int | None, page_size: int, *, chunk: int) -> int:
    """Pages that a sequence of ``num_tokens`` holds at the most when it is computed in steps of
    ``chunk`` tokens."""
    if window is not None:
        # within a step all of its tokens have pages, and the window before them; two partial
        # pages more, since neither end need lie on a page boundary
        num_tokens = min(num_tokens, window + chunk + 2 * page_size)
    return -(-num_tokens // page_size)


class PageTables:
    """Pages of every layer group, handed to sequences.

    Example: a model with full and sliding layers, pages of 4 tokens::

        tables = PageTables(page_size=4, windows=(None, 8), num_pages=(64, 16), share=True)
        tables.match_prefix(sequence)               # find computed pages of the same prefix
        copies, fresh = tables.extend(sequence, 10) # room for tokens up to position 10
    """

    def __init__(
        self, *, page_size: int, windows: tuple[int | None, ...], num_pages: tuple[int, ...], share: bool
    ) -> None:
        assert len(windows) == len(num_pages) > 0
        self.page_size = page_size
        self.windows = windows
        self.share = share
        self.pools = tuple(PagePool(count) for count in num_pages)
        self._root = root_key(0)

    @property
    def num_groups(self) -> int:
        """Layer groups, each with its own pages."""
        return len(self.pools)

    @property
    def num_held(self) -> int:
        """Pages in use over all groups."""
        return sum(pool.num_held for pool in self.pools)

    def start_version(self, version: int) -> None:
        """Forget every findable prefix; pages registered from now on belong to ``version``."""
        self._root = root_key(version)
        for pool in self.pools:
            pool.forget_prefixes()

    def grow(self, num_pages: tuple[int, ...]) -> None:
        """Add pages to every pool; none is taken away."""
        for pool, count in zip(self.pools, num_pages, strict=True):
            pool.grow(count)

    def missing(self, sequence: Sequence, end: int) -> list[int]:
        """Per group, pages still to be taken before tokens up to position ``end`` can be written."""
        last = -(-end // self.page_size)
        return [
            max(0, last - sequence.first_page[g] - len(table)) + self._needs_copy(g, sequence)
            for g, table in enumerate(sequence.tables)
        ]

    def holds(self, sequence: Sequence, end: int) -> bool:
        """Whether tokens up to position ``end`` can be written without taking a page."""
        # most rows of most steps need nothing more, so this asks as little as it can
        for g, table in enumerate(sequence.tables):
            if end > (sequence.first_page[g] + len(table)) * self.page_size or self._needs_copy(g, sequence):
                return False
        return True

    def room(self, sequence: Sequence) -> int:
        """The position up to which :meth:`extend` would succeed now."""
        return self.page_size * min(
            sequence.first_page[g] + len(table) + pool.num_available - self._needs_copy(g, sequence)
            for g, (table, pool) in enumerate(zip(sequence.tables, self.pools, strict=True))
        )

    def is_available(self, pages: Iterable[int], margin: float = 0.0) -> bool:
        """Whether so many pages per group can be taken while a share ``margin`` stays available."""
        return all(
            pool.num_available - count >= margin * pool.num_pages
            for pool, count in zip(self.pools, pages, strict=True)
        )

    def extend(self, sequence: Sequence, end: int) -> tuple[list[PageCopy], list[list[int]]]:
        """Take pages so that tokens up to position ``end`` can be written.

        The page under the first token to be written is copied first when others hold it as well
        (copy-on-write). Returns the copies to make and, per group, the pages taken.
        """
        copies, fresh = [], []
        last = -(-end // self.page_size)
        for g, (table, pool) in enumerate(zip(sequence.tables, self.pools, strict=True)):
            if self._needs_copy(g, sequence):
                position = sequence.num_computed // self.page_size - sequence.first_page[g]
                (target,) = pool.allocate(1)
                copies.append(PageCopy(group=g, source=table[position], target=target))
                pool.release([table[position]])
                table[position] = target
            taken = pool.allocate(max(0, last - sequence.first_page[g] - len(table)))
            table += taken
            fresh.append(taken)
        return copies, fresh

    def match_prefix(self, sequence: Sequence) -> None:
        """Give a sequence without pages those of its longest computed prefix.

        At least the last token is left to be computed, since its logits are needed.
        """
        assert sequence.num_computed == 0 and not any(sequence.tables)
        if not self.share:
            return
        keys = self._full_page_keys(sequence, (len(sequence.ids) - 1) // self.page_size)
        count = self._longest_match(keys)
        for g, pool in enumerate(self.pools):
            first = self._first_visible_page(g, count * self.page_size)
            pages = [page for key in keys[first:count] if (page := pool.lookup(key)) is not None]
            assert len(pages) == count - first
            pool.share(pages)
            sequence.tables[g] = pages
            sequence.first_page[g] = first
        sequence.page_keys = keys[:count]
        sequence.num_computed = count * self.page_size

    def register(self, sequence: Sequence, end: int) -> None:
        """Make the sequence's full pages below position ``end`` findable.

        Called when the step that fills them is planned: a later row of the same step may read
        them, since each layer writes all keys and values before it reads any.
        """
        if not self.share or not sequence.is_shareable:
            return
        while (number := len(sequence.page_keys)) < end // self.page_size:
            key = self._next_key(sequence.page_keys, sequence.ids)
            sequence.page_keys.append(key)
            for g, pool in enumerate(self.pools):
                if number >= sequence.first_page[g]:
                    pool.register(sequence.tables[g][number - sequence.first_page[g]], key)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child``, a sample of the same prompt, hold all pages of ``parent``."""
        assert not any(child.tables)
        for g, pool in enumerate(self.pools):
            pool.share(parent.tables[g])
            child.tables[g] = list(parent.tables[g])
        child.first_page = list(parent.first_page)
        child.page_keys = list(parent.page_keys)
        child.is_shareable = parent.is_shareable

    def restore(self, sequence: Sequence, saved: SavedPages) -> PageTransfer:
        """Take pages for what a preempted sequence left in host memory; they are to be loaded.

        Its full pages become findable again with the next :meth:`register`.
        """
        assert sequence.num_computed == 0 and not any(sequence.tables)
        sequence.first_page = list(saved.first_page)
        sequence.tables = [
            pool.allocate(count) for pool, count in zip(self.pools, saved.num_pages, strict=True)
        ]
        sequence.num_computed = saved.num_computed
        sequence.is_shareable = saved.is_shareable
        return PageTransfer(saved=saved, pages=tuple(map(tuple, sequence.tables)))

    def recycle(self, sequence: Sequence) -> None:
        """Give back pages that slid out of their group's window."""
        for g, pool in enumerate(self.pools):
            if self.windows[g] is None:
                continue
            gone = self._first_visible_page(g, sequence.num_computed) - sequence.first_page[g]
            if gone > 0:
                pool.release(sequence.tables[g][:gone])
                del sequence.tables[g][:gone]
                sequence.first_page[g] += gone

    def release(self, sequence: Sequence) -> None:
        """Give back all pages; the sequence would have to be computed again."""
        for g, pool in enumerate(self.pools):
            pool.release(sequence.tables[g])
            sequence.tables[g] = []
            sequence.first_page[g] = 0
        sequence.page_keys = []
        sequence.num_computed = 0
        sequence.is_shareable = True

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Audit all books against the tables of the given sequences; raises AssertionError."""
        holders = list(sequences)
        for g, pool in enumerate(self.pools):
            pool.check(Counter(page for sequence in holders for page in sequence.tables[g]))
        for sequence in holders:
            for g, table in enumerate(sequence.tables):
                covered = (sequence.first_page[g] + len(table)) * self.page_size
                assert covered >= sequence.num_computed, f"{sequence.request.request_id}: page missing"

    def _needs_copy(self, group: int, sequence: Sequence) -> bool:
        """Whether the next token goes into a page that is partly filled and held by others too."""
        if sequence.num_computed % self.page_size == 0:
            return False
        position = sequence.num_computed // self.page_size - sequence.first_page[group]
        return self.pools[group].references(sequence.tables[group][position]) > 1

    def _first_visible_page(self, group: int, position: int) -> int:
        """Number of the first page that a query at ``position`` or later can see."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    def _next_key(self, keys: list[bytes], ids: list[int]) -> bytes:
        start = len(keys) * self.page_size
        return chain_key(keys[-1] if keys else self._root, ids[start : start + self.page_size])

    def _full_page_keys(self, sequence: Sequence, count: int) -> list[bytes]:
        keys: list[bytes] = []
        for _ in range(count):
            keys.append(self._next_key(keys, sequence.ids))
        return keys

    def _longest_match(self, keys: list[bytes]) -> int:
        """Most leading pages whose visible part every group still has."""
        longest = len(keys)
        for g, pool in enumerate(self.pools):
            if self.windows[g] is None:
                found = next((i for i, key in enumerate(keys) if pool.lookup(key) is None), len(keys))
                longest = min(longest, found)
        for count in range(longest, 0, -1):
            if all(self._has_visible(g, keys[:count]) for g in range(self.num_groups)):
                return count
        return 0

    def _has_visible(self, group: int, keys: list[bytes]) -> bool:
        if self.windows[group] is None:
            return True
        first = self._first_visible_page(group, len(keys) * self.page_size)
        return all(self.pools[group].lookup(key) is not None for key in keys[first:])
