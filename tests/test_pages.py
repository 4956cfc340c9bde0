"""The page pool's books: literal answers, planted faults for the audit, and a model to compare with."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.pages import NULL_PAGE, PagePool, chain_key, root_key


def registered(pool: PagePool, *names: str) -> list[int]:
    """Fresh pages, each findable under a key of its name."""
    pages = pool.allocate(len(names))
    for page, name in zip(pages, names, strict=True):
        pool.register(page, name.encode())
    return pages


# ---- keys -------------------------------------------------------------------------------------


def test_a_key_depends_on_version_parent_and_tokens() -> None:
    first = chain_key(root_key(0), [1, 2, 3, 4])
    keys = [
        first,
        chain_key(root_key(1), [1, 2, 3, 4]),
        chain_key(first, [1, 2, 3, 4]),
        chain_key(root_key(0), [1, 2, 4, 3]),
        chain_key(root_key(0), [1, 2, 3]),
        chain_key(root_key(0), [0, 1, 2, 3, 4]),
        chain_key(chain_key(root_key(1), [1, 2, 3, 4]), [1, 2, 3, 4]),
    ]
    assert len(set(keys)) == len(keys)


def test_a_key_is_the_same_for_equal_content_whatever_holds_it() -> None:
    assert chain_key(root_key(3), [1, 2]) == chain_key(root_key(3), (1, 2))
    assert len(chain_key(root_key(3), [1, 2])) == 16


def test_token_ids_of_any_size_make_different_keys() -> None:
    ids = [0, 1, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32, 2**32 + 1]
    assert len({chain_key(root_key(0), [token]) for token in ids}) == len(ids)


def test_versions_with_many_digits_stay_apart() -> None:
    assert len({root_key(version) for version in range(2000)}) == 2000


# ---- allocate, share, release -----------------------------------------------------------------


def test_pages_are_numbered_from_one_and_low_ones_come_first() -> None:
    pool = PagePool(3)
    assert (pool.num_pages, pool.num_available, pool.num_held) == (3, 3, 0)
    assert pool.allocate(2) == [1, 2]
    assert (pool.num_pages, pool.num_available, pool.num_held) == (3, 1, 2)
    assert pool.allocate(1) == [3]
    assert pool.allocate(0) == []
    pool.check({1: 1, 2: 1, 3: 1})


def test_the_null_page_is_never_handed_out() -> None:
    pool = PagePool(5)
    assert NULL_PAGE == 0
    for _ in range(4):
        pages = pool.allocate(5)
        assert sorted(pages) == [1, 2, 3, 4, 5]
        pool.release(pages)
    assert pool.references(NULL_PAGE) == 1


def test_more_pages_than_there_are_is_our_own_bug() -> None:
    pool = PagePool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="2 pages asked, 1 available"):
        pool.allocate(2)
    pool.check({1: 1})  # nothing was taken


def test_a_shared_page_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.share([page])
    pool.share([page])
    assert pool.references(page) == 3
    pool.release([page])
    pool.release([page])
    assert (pool.references(page), pool.num_available) == (1, 1)
    pool.release([page])
    assert (pool.references(page), pool.num_available) == (0, 2)
    with pytest.raises(AssertionError, match="page 1 has no holder"):
        pool.release([page])


def test_a_page_without_a_key_is_used_again_at_once() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3)
    pool.release(pages)
    assert pool.allocate(4) == [1, 2, 3, 4]


# ---- the prefix table -------------------------------------------------------------------------


def test_a_released_page_with_a_key_stays_findable_until_it_is_needed() -> None:
    pool = PagePool(2)
    (page,) = registered(pool, "a")
    pool.release([page])
    assert (pool.lookup(b"a"), pool.num_available, pool.num_held) == (1, 2, 0)
    assert pool.allocate(1) == [2]  # free ones go first
    assert pool.lookup(b"a") == 1
    assert pool.allocate(1) == [1]
    assert pool.lookup(b"a") is None
    pool.check({1: 1, 2: 1})


def test_an_idle_page_is_held_again_by_sharing_it() -> None:
    pool = PagePool(1)
    (page,) = registered(pool, "a")
    pool.release([page])
    pool.share([page])
    assert (pool.references(page), pool.num_available) == (1, 0)
    pool.release([page])
    assert pool.lookup(b"a") == page


def test_the_end_of_a_prefix_is_forgotten_before_its_beginning() -> None:
    pool = PagePool(3)
    pages = registered(pool, "begin", "middle", "end")
    pool.release(pages)
    gone = []
    for _ in range(3):
        pool.allocate(1)
        gone.append([key for key in (b"begin", b"middle", b"end") if pool.lookup(key) is None])
    assert gone == [[b"end"], [b"middle", b"end"], [b"begin", b"middle", b"end"]]


def test_what_was_let_go_first_is_forgotten_first() -> None:
    pool = PagePool(4)
    a1, a2 = registered(pool, "a1", "a2")
    b1, b2 = registered(pool, "b1", "b2")
    pool.release([a1, a2])
    pool.release([b1, b2])
    pool.share([a1])  # used again, so it becomes the youngest
    pool.release([a1])
    assert pool.allocate(4) == [a2, b2, b1, a1]


def test_the_first_page_under_a_key_wins() -> None:
    pool = PagePool(3)
    first, second = pool.allocate(2)
    pool.register(first, b"same")
    pool.register(second, b"same")
    assert pool.lookup(b"same") == first
    pool.release([second])  # never findable, so free at once
    assert pool.lookup(b"same") == first
    assert pool.allocate(1) == [second]
    pool.check({first: 1, second: 1})


def test_a_key_is_free_again_once_its_page_was_forgotten() -> None:
    pool = PagePool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"same")
    pool.release([first])
    pool.allocate(1)  # takes `first`
    pool.register(second, b"same")
    assert pool.lookup(b"same") == second


def test_only_held_pages_without_a_key_can_be_registered() -> None:
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="no holder"):
        pool.register(1, b"a")
    (page,) = registered(pool, "a")
    with pytest.raises(AssertionError, match="has a key already"):
        pool.register(page, b"b")


def test_forgetting_prefixes_frees_idle_pages_and_hides_held_ones() -> None:
    pool = PagePool(3)
    idle, held = registered(pool, "idle", "held")
    pool.release([idle])
    pool.forget_prefixes()
    assert (pool.lookup(b"idle"), pool.lookup(b"held"), pool.num_available) == (None, None, 2)
    pool.check({held: 1})
    pool.register(held, b"held")  # a page may be registered anew
    pool.forget_prefixes()
    pool.release([held])
    pool.check({})
    assert sorted(pool.allocate(3)) == [1, 2, 3]


# ---- growing ----------------------------------------------------------------------------------


def test_growing_keeps_numbers_references_and_keys() -> None:
    pool = PagePool(2)
    held, idle = registered(pool, "held", "idle")
    pool.share([held])
    pool.release([idle])
    pool.grow(4)
    assert (pool.num_pages, pool.num_available, pool.num_held) == (4, 3, 1)
    assert (pool.references(held), pool.lookup(b"held"), pool.lookup(b"idle")) == (2, held, idle)
    assert pool.allocate(2) == [3, 4]
    pool.check({held: 2, 3: 1, 4: 1})


def test_growing_hands_out_pages_that_were_touched_before_new_ones() -> None:
    pool = PagePool(2)
    pool.release(pool.allocate(2))
    pool.grow(4)
    assert pool.allocate(4) == [1, 2, 3, 4]


def test_a_pool_of_no_pages_can_grow_and_none_can_shrink() -> None:
    pool = PagePool(0)
    assert (pool.num_pages, pool.num_available, pool.num_held) == (0, 0, 0)
    pool.check({})
    pool.grow(2)
    pool.grow(2)
    assert pool.allocate(2) == [1, 2]
    with pytest.raises(AssertionError, match="cannot shrink from 2 to 1"):
        pool.grow(1)


# ---- the audit finds what is wrong ------------------------------------------------------------


def audited() -> PagePool:
    """Page 1 held twice and findable, page 2 held, page 3 idle, page 4 free."""
    pool = PagePool(4)
    one, _, three = pool.allocate(3)
    pool.share([one])
    pool.register(one, b"one")
    pool.register(three, b"three")
    pool.release([three])
    pool.check({1: 2, 2: 1})
    return pool


@pytest.mark.parametrize("expected", [{1: 1, 2: 1}, {1: 2}, {1: 2, 2: 1, 4: 1}, {1: 2, 2: 1, 3: 1}, {}])
def test_the_audit_sees_wrong_reference_counts(expected: dict[int, int]) -> None:
    with pytest.raises(AssertionError, match=r"\d references, \d expected"):
        audited().check(expected)


def free_twice(pool: PagePool) -> None:
    pool._free.append(4)


def free_and_held(pool: PagePool) -> None:
    pool._free.append(2)


def free_and_idle(pool: PagePool) -> None:
    pool._free.append(3)


def null_page_free(pool: PagePool) -> None:
    pool._free.append(NULL_PAGE)


def lost(pool: PagePool) -> None:
    pool._free.clear()


def idle_and_held(pool: PagePool) -> None:
    pool._idle[1] = None


def idle_without_key(pool: PagePool) -> None:
    del pool._page_of[pool._key_of.pop(3)]


def free_with_key(pool: PagePool) -> None:
    pool._page_of[b"four"] = 4
    pool._key_of[4] = b"four"


def key_of_another_page(pool: PagePool) -> None:
    pool._page_of[b"one"] = 2


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        (free_twice, "free twice"),
        (free_and_held, "two states"),
        (free_and_idle, "free and idle"),
        (null_page_free, "null page"),
        (lost, "two states"),
        (idle_and_held, "two states"),
        (idle_without_key, "no key"),
        (free_with_key, "has a key"),
        (key_of_another_page, "torn"),
    ],
)
def test_the_audit_sees_planted_faults(plant: Callable[[PagePool], None], complaint: str) -> None:
    pool = audited()
    plant(pool)
    with pytest.raises(AssertionError, match=complaint):
        pool.check({1: 2, 2: 1})


# ---- a model to compare with ------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Random operations on a pool beside a model of two facts: who holds what, and which idle page
    was let go when. Everything else follows from them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(3)
        self.held: Counter[int] = Counter()
        self.key_of: dict[int, bytes] = {}  # findable pages, held or idle
        self.idle: list[int] = []  # in the order in which they will be forgotten

    def free(self) -> set[int]:
        return {p for p in range(1, self.pool.num_pages + 1) if not self.held[p] and p not in self.idle}

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        free = self.free()
        if count > len(free) + len(self.idle):
            with pytest.raises(AssertionError):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        forgotten = self.idle[: max(0, count - len(free))]
        assert set(pages) <= free | set(forgotten) and len(set(pages)) == count
        assert set(forgotten) <= set(pages)
        assert len(forgotten) == 0 or free <= set(pages), "an idle page was taken before a free one"
        self.idle = self.idle[len(forgotten) :]
        for page in forgotten:
            del self.key_of[page]
        self.held.update(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.pool.release(pages)
        for page in reversed(pages):
            self.held[page] -= 1
            if not self.held[page]:
                del self.held[page]
                if page in self.key_of:
                    self.idle.append(page)

    @precondition(lambda self: self.held or self.idle)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted({*self.held, *self.idle})), unique=True))
        self.pool.share(pages)
        self.held.update(pages)
        self.idle = [page for page in self.idle if page not in pages]

    @precondition(lambda self: bool(set(self.held) - set(self.key_of)))
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(sorted(set(self.held) - set(self.key_of))))
        self.pool.register(page, key)
        if key not in self.key_of.values():
            self.key_of[page] = key

    @rule()
    def forget_prefixes(self) -> None:
        self.pool.forget_prefixes()
        self.key_of, self.idle = {}, []

    @rule(more=st.integers(0, 2))
    def grow(self, more: int) -> None:
        if self.pool.num_pages < 12:
            self.pool.grow(self.pool.num_pages + more)

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check(self.held)
        assert self.pool.num_held == len(self.held)
        assert self.pool.num_available == len(self.free()) + len(self.idle)
        page_of = {key: page for page, key in self.key_of.items()}
        for key in (b"a", b"b", b"c", b"d"):
            assert self.pool.lookup(key) == page_of.get(key)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
