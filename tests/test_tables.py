"""Page tables over full and sliding groups: who holds which page, and what may be found again.

Page numbers are written out: a pool hands out 1, 2, 3, ... and a freed page is used again first.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.sequence import PageCopy, Request, Sequence
from rollout.tables import PageTables, pages_to_hold
from rollout.types import SamplingParams


def make_tables(
    windows: tuple[int | None, ...] = (None,), num_pages: int = 20, *, page_size: int = 4, share: bool = True
) -> PageTables:
    return PageTables(
        page_size=page_size, windows=windows, num_pages=(num_pages,) * len(windows), share=share
    )


def make_sequence(ids: list[int], num_groups: int = 1) -> Sequence:
    request = Request(
        request_id="r",
        ordinal=0,
        prompt_ids=tuple(ids),
        params=SamplingParams(),
        eos_ids=frozenset(),
        noise_key=(0, 0, 0),
    )
    return Sequence(request=request, index=0, ids=list(ids), num_groups=num_groups)


def compute(tables: PageTables, sequence: Sequence, end: int) -> tuple[list[PageCopy], list[list[int]]]:
    """What the scheduler does around a step that computes tokens up to ``end``."""
    taken = tables.extend(sequence, end)
    tables.register(sequence, end)
    sequence.num_computed = end
    tables.recycle(sequence)
    return taken


def computed(tables: PageTables, ids: list[int]) -> Sequence:
    sequence = make_sequence(ids, tables.num_groups)
    compute(tables, sequence, len(ids))
    return sequence


# ---- room -------------------------------------------------------------------------------------


def test_extend_takes_pages_in_every_group_only_when_a_page_is_full() -> None:
    tables = make_tables((None, 8))
    sequence = make_sequence(list(range(20)), 2)
    assert tables.extend(sequence, 5) == ([], [[1, 2], [1, 2]])
    sequence.num_computed = 5
    assert tables.extend(sequence, 8) == ([], [[], []])
    sequence.num_computed = 8
    assert tables.extend(sequence, 9) == ([], [[3], [3]])
    assert sequence.tables == [[1, 2, 3], [1, 2, 3]]
    assert tables.num_held == 6
    tables.check([sequence])


def test_missing_counts_pages_to_take_per_group_copies_included() -> None:
    tables = make_tables((None, 4))
    sequence = make_sequence(list(range(20)), 2)
    assert [tables.missing(sequence, end) for end in (1, 4, 5, 20)] == [[1, 1], [1, 1], [2, 2], [5, 5]]
    compute(tables, sequence, 10)  # 3 pages; the window of 4 has let the first one go
    assert sequence.first_page == [0, 1]
    assert [tables.missing(sequence, end) for end in (11, 12, 13)] == [[0, 0], [0, 0], [1, 1]]
    child = make_sequence(list(range(20)), 2)
    tables.fork(sequence, child)
    assert [tables.missing(sequence, end) for end in (11, 13)] == [[1, 1], [2, 2]]


def test_room_is_the_position_up_to_which_extend_succeeds() -> None:
    tables = PageTables(page_size=4, windows=(None, 8), num_pages=(5, 3), share=True)
    sequence = make_sequence(list(range(40)), 2)
    assert tables.room(sequence) == 12
    compute(tables, sequence, 12)
    # full: 3 held, 2 free -> 20; window of 8: pages 1 and 2 held, one was let go -> 16
    assert (sequence.tables, sequence.first_page) == ([[1, 2, 3], [2, 3]], [0, 1])
    assert tables.room(sequence) == 16
    compute(tables, sequence, 14)
    child = make_sequence(list(range(40)), 2)
    tables.fork(sequence, child)
    # the partly filled page is shared now: one page goes into its copy
    assert tables.room(sequence) == 12
    tables.grow((5, 4))
    assert tables.room(sequence) == 16


@given(
    page_size=st.integers(4, 6),
    windows=st.lists(st.none() | st.integers(1, 14), min_size=1, max_size=3),
    pages=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    before=st.integers(0, 12),
    shared=st.booleans(),
)
def test_room_and_missing_agree_with_what_extend_does(
    page_size: int, windows: list[int | None], pages: list[int], before: int, shared: bool
) -> None:
    tables = PageTables(
        page_size=page_size, windows=tuple(windows), num_pages=tuple(pages[: len(windows)]), share=True
    )
    sequence = make_sequence(list(range(60)), len(windows))
    compute(tables, sequence, min(before, tables.room(sequence)))
    if shared:
        tables.fork(sequence, make_sequence(list(range(60)), len(windows)))
    room, start = tables.room(sequence), sequence.num_computed
    for end in range(start + 1, start + 3 * page_size):
        assert tables.holds(sequence, end) == (not any(tables.missing(sequence, end)))
    if room <= start:
        assert not tables.is_available(tables.missing(sequence, start + 1))
        return
    assert tables.is_available(tables.missing(sequence, room))
    assert not tables.is_available(tables.missing(sequence, room + 1))
    missing = tables.missing(sequence, room)
    available = [pool.num_available for pool in tables.pools]
    copies, fresh = tables.extend(sequence, room)
    taken = [len(new) + sum(copy.group == g for copy in copies) for g, new in enumerate(fresh)]
    assert taken == missing
    assert [pool.num_available for pool in tables.pools] == [
        a - m for a, m in zip(available, missing, strict=True)
    ]


def test_pages_are_available_only_beyond_the_margin_of_every_group() -> None:
    tables = PageTables(page_size=4, windows=(None, 8), num_pages=(10, 4), share=True)
    assert tables.is_available([10, 4])
    assert not tables.is_available([10, 5])
    assert not tables.is_available([11, 4])
    assert tables.is_available([5, 2], margin=0.5)
    assert not tables.is_available([6, 2], margin=0.5)
    assert not tables.is_available([5, 3], margin=0.5)


def chunked_peak(tokens: int, window: int | None, page_size: int, chunk: int) -> int:
    """Most pages held while a sequence is computed in chunks, counted by doing it."""
    tables = make_tables((window,), 200, page_size=page_size, share=False)
    sequence = make_sequence([0] * tokens)
    peak = 0
    for end in [*range(chunk, tokens, chunk), tokens]:
        tables.extend(sequence, end)
        peak = max(peak, tables.num_held)
        sequence.num_computed = end
        tables.recycle(sequence)
    return peak


@given(
    tokens=st.integers(1, 80),
    window=st.none() | st.integers(1, 30),
    page_size=st.integers(4, 7),
    chunk=st.integers(1, 20),
)
def test_pages_to_hold_is_an_upper_bound_and_not_a_loose_one(
    tokens: int, window: int | None, page_size: int, chunk: int
) -> None:
    bound = pages_to_hold(tokens, window, page_size, chunk=chunk)
    peak = chunked_peak(tokens, window, page_size, chunk)
    assert peak <= bound <= peak + (0 if window is None else 3)


# ---- copy on write ----------------------------------------------------------------------------


def test_a_partly_filled_page_is_copied_only_while_somebody_else_holds_it() -> None:
    tables = make_tables()
    parent = computed(tables, [1, 2, 3, 4, 5, 6])
    child = make_sequence([1, 2, 3, 4, 5, 6])
    tables.fork(parent, child)
    child.num_computed = 6
    assert compute(tables, parent, 7) == ([PageCopy(group=0, source=2, target=3)], [[]])
    assert compute(tables, child, 7) == ([], [[]])  # the only holder left writes in place
    assert (parent.tables, child.tables) == ([[1, 3]], [[1, 2]])
    assert [tables.pools[0].references(page) for page in (1, 2, 3)] == [2, 1, 1]
    tables.check([parent, child])


def test_a_fork_at_a_page_border_copies_nothing() -> None:
    tables = make_tables()
    parent = computed(tables, [1, 2, 3, 4, 5, 6, 7, 8])
    child = make_sequence([1, 2, 3, 4, 5, 6, 7, 8])
    tables.fork(parent, child)
    child.num_computed = 8
    assert compute(tables, parent, 9) == ([], [[3]])
    assert compute(tables, child, 9) == ([], [[4]])
    assert (parent.tables, child.tables) == ([[1, 2, 3]], [[1, 2, 4]])


def test_a_page_found_by_prefix_is_never_written_so_never_copied() -> None:
    tables = make_tables()
    first = computed(tables, [1, 2, 3, 4, 5])
    second = make_sequence([1, 2, 3, 4, 9])
    tables.match_prefix(second)
    assert compute(tables, second, 5) == ([], [[3]])
    assert (first.tables, second.tables) == ([[1, 2]], [[1, 3]])


def test_every_group_copies_its_own_page() -> None:
    tables = make_tables((None, 5, None))
    parent = computed(tables, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert parent.first_page == [0, 1, 0]
    child = make_sequence(parent.ids, 3)
    tables.fork(parent, child)
    child.num_computed = 10
    copies, fresh = compute(tables, child, 11)
    assert copies == [
        PageCopy(group=0, source=3, target=4),
        PageCopy(group=1, source=3, target=4),
        PageCopy(group=2, source=3, target=4),
    ]
    assert fresh == [[], [], []]
    assert (parent.tables, child.tables) == ([[1, 2, 3], [2, 3], [1, 2, 3]], [[1, 2, 4], [2, 4], [1, 2, 4]])


# ---- finding prefixes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], 12),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 8),  # the last token's logits are needed
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4),
        ([1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 4], 0),
        ([1, 2, 3], 0),
        ([1], 0),
        ([1, 2, 3, 4, 9, 6, 7, 8, 9], 4),
        ([9, 2, 3, 4, 5, 6, 7, 8, 9], 0),
        ([5, 6, 7, 8, 9, 10], 0),  # a page is found only behind the page before it
    ],
)
def test_a_match_takes_whole_pages_and_leaves_at_least_one_token(ids: list[int], found: int) -> None:
    tables = make_tables()
    first = computed(tables, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])
    sequence = make_sequence(ids)
    tables.match_prefix(sequence)
    assert sequence.num_computed == found
    assert sequence.tables == [[1, 2, 3][: found // 4]]
    assert len(sequence.page_keys) == found // 4
    tables.check([first, sequence])


def test_a_prompt_of_one_token_holds_one_page_and_registers_it_when_full() -> None:
    tables = make_tables((None, 2))
    sequence = make_sequence([7], 2)
    tables.match_prefix(sequence)
    assert (sequence.num_computed, sequence.tables) == (0, [[], []])
    compute(tables, sequence, 1)
    assert sequence.page_keys == []
    for end in (2, 3, 4):
        sequence.ids.append(10 + end)
        compute(tables, sequence, end)
    assert len(sequence.page_keys) == 1
    again = make_sequence([7, 12, 13, 14, 15], 2)
    tables.match_prefix(again)
    assert again.num_computed == 4


def test_pages_of_generated_tokens_are_found_too() -> None:
    tables = make_tables()
    first = make_sequence([1, 2, 3])
    compute(tables, first, 3)
    for end, token in enumerate([4, 5, 6, 7, 8], start=4):
        first.ids.append(token)
        compute(tables, first, end)
    tables.release(first)
    again = make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    tables.match_prefix(again)
    assert again.num_computed == 8


def test_a_planned_page_is_found_before_the_step_has_run() -> None:
    tables = make_tables()
    first = make_sequence([1, 2, 3, 4, 5])
    tables.extend(first, 5)
    tables.register(first, 5)
    second = make_sequence([1, 2, 3, 4, 6])
    tables.match_prefix(second)
    assert (second.tables, second.num_computed) == ([[1]], 4)


def test_a_page_is_registered_only_when_its_last_slot_is_planned() -> None:
    tables = make_tables()
    first = make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    compute(tables, first, 7)
    second = make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    tables.match_prefix(second)
    assert second.num_computed == 4


def test_a_match_under_a_window_takes_only_the_pages_that_can_be_seen() -> None:
    # a query at position 16 and a window of 6 sees keys 11 .. 16: pages 2 and 3 of 0 .. 3
    tables = make_tables((None, 6))
    ids = list(range(17))
    first = computed(tables, ids)
    assert (first.tables, first.first_page) == ([[1, 2, 3, 4, 5], [4, 5]], [0, 3])
    second = make_sequence(ids, 2)
    tables.match_prefix(second)
    assert second.num_computed == 16
    assert (second.tables, second.first_page) == ([[1, 2, 3, 4], [3, 4]], [0, 2])
    tables.check([first, second])


def test_a_match_under_a_window_does_without_the_pages_that_slid_out() -> None:
    tables = make_tables((None, 6), num_pages=6)
    ids = list(range(17))
    first = make_sequence(ids, 2)
    compute(tables, first, 16)
    assert (first.tables, first.first_page) == ([[1, 2, 3, 4], [3, 4]], [0, 2])
    assert sorted(tables.pools[1].allocate(4)) == [1, 2, 5, 6]  # those that slid out are used elsewhere
    second = make_sequence(ids, 2)
    tables.match_prefix(second)
    assert (second.num_computed, second.tables[1], second.first_page) == (16, [3, 4], [0, 2])
    # a query at position 8 would see back to key 3 on page 0, which is gone: nothing is found
    third = make_sequence(ids[:9], 2)
    tables.match_prefix(third)
    assert (third.num_computed, third.tables, third.first_page) == (0, [[], []], [0, 0])


def test_a_match_falls_back_to_a_shorter_prefix_whose_window_is_complete() -> None:
    # window of 4: a prefix of c pages needs only its last one
    tables = make_tables((4,), num_pages=5)
    ids = list(range(21))
    first = make_sequence(ids)
    compute(tables, first, 20)
    assert (first.tables, first.first_page) == ([[5]], [4])
    tables.pools[0].allocate(1)  # of those that slid out, page 4 (tokens 12 .. 15) goes first
    found = {}
    for length in (21, 20, 17, 16, 13, 12, 9, 8, 5, 4):
        sequence = make_sequence(ids[:length])
        tables.match_prefix(sequence)
        found[length] = sequence.num_computed
        tables.release(sequence)
    assert found == {21: 20, 20: 12, 17: 12, 16: 12, 13: 12, 12: 8, 9: 8, 8: 4, 5: 4, 4: 0}


def test_without_sharing_nothing_is_found() -> None:
    tables = make_tables(share=False)
    computed(tables, [1, 2, 3, 4, 5])
    second = make_sequence([1, 2, 3, 4, 5])
    tables.match_prefix(second)
    assert (second.num_computed, second.tables) == (0, [[]])


def test_a_sequence_that_mixes_versions_never_registers_a_page() -> None:
    tables = make_tables()
    mixed = make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    compute(tables, mixed, 3)
    tables.start_version(1)
    mixed.is_shareable = False
    compute(tables, mixed, 9)
    child = make_sequence(mixed.ids)
    tables.fork(mixed, child)
    assert not child.is_shareable
    child.num_computed = 9
    child.ids += [10, 11, 12, 13]
    compute(tables, child, 12)
    found = make_sequence(child.ids)
    tables.match_prefix(found)
    assert found.num_computed == 0


def test_a_new_version_hides_every_prefix_and_the_old_ones_never_come_back() -> None:
    tables = make_tables()
    first = computed(tables, [1, 2, 3, 4, 5])
    done = computed(tables, [6, 7, 8, 9, 10])
    tables.release(done)
    for version in (1, 2, 1):
        tables.start_version(version)
        for ids in ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]):
            sequence = make_sequence(ids)
            tables.match_prefix(sequence)
            assert sequence.num_computed == 0
    tables.check([first])
    fresh = computed(tables, [1, 2, 3, 4, 5])
    again = make_sequence([1, 2, 3, 4, 5])
    tables.match_prefix(again)
    assert again.num_computed == 4
    assert again.tables[0] == fresh.tables[0][:1] != first.tables[0][:1]


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(
    histories=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=6),
    ids=st.lists(st.integers(0, 1), min_size=1, max_size=24),
    windows=st.lists(st.none() | st.integers(2, 12), min_size=1, max_size=2),
    chunk=st.integers(1, 9),
)
def test_the_longest_computed_prefix_is_found(
    histories: list[list[int]], ids: list[int], windows: list[int | None], chunk: int
) -> None:
    """With pages in plenty, nothing that was ever computed is lost, windows or not. (A window of 1
    sees no earlier key, so there a prefix is found that nobody ever computed, and rightly.)"""
    tables = make_tables(tuple(windows), num_pages=100)
    holders = []
    for history in histories:
        sequence = make_sequence(history, len(windows))
        tables.match_prefix(sequence)
        for end in [*range(sequence.num_computed + chunk, len(history), chunk), len(history)]:
            compute(tables, sequence, end)
        holders.append(sequence)
    tables.release(holders.pop(len(holders) // 2))
    sequence = make_sequence(ids, len(windows))
    tables.match_prefix(sequence)
    longest = max(common_prefix(ids, history) for history in histories)
    assert sequence.num_computed == min(longest, len(ids) - 1) // 4 * 4
    tables.check([*holders, sequence])


# ---- windows ----------------------------------------------------------------------------------


def pages_seen_later(num_computed: int, window: int | None, page_size: int) -> list[int]:
    """By brute force: pages with a slot that some query from ``num_computed`` on can see."""
    last = -(-num_computed // page_size)
    queries = range(num_computed, num_computed + 3 * page_size)
    return [
        number
        for number in range(last)
        if any(
            key <= query and (window is None or key > query - window)
            for key in range(number * page_size, (number + 1) * page_size)
            for query in queries
        )
    ]


@given(
    page_size=st.integers(4, 6),
    window=st.integers(1, 17),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=9),
)
def test_recycling_gives_back_exactly_the_pages_that_no_later_query_sees(
    page_size: int, window: int, chunks: list[int]
) -> None:
    tables = make_tables((None, window), page_size=page_size, num_pages=100)
    sequence = make_sequence(list(range(sum(chunks))), 2)
    for end in itertools.accumulate(chunks):
        compute(tables, sequence, end)
        for g, w in enumerate((None, window)):
            held = [sequence.first_page[g] + i for i in range(len(sequence.tables[g]))]
            assert held == pages_seen_later(end, w, page_size)
        tables.check([sequence])


def test_recycled_pages_stay_findable_until_they_are_needed() -> None:
    tables = make_tables((4,), num_pages=3)
    first = make_sequence(list(range(12)))
    compute(tables, first, 12)
    assert (first.tables, first.first_page, tables.num_held) == ([[3]], [2], 1)
    second = make_sequence(list(range(12)))
    tables.match_prefix(second)
    assert (second.tables, second.first_page, second.num_computed) == ([[2]], [1], 8)


# ---- fork, release, audit ---------------------------------------------------------------------


def test_a_fork_holds_all_pages_and_outlives_its_parent() -> None:
    tables = make_tables((None, 4))
    parent = computed(tables, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    child = make_sequence(parent.ids, 2)
    tables.fork(parent, child)
    assert (child.tables, child.first_page) == ([[1, 2, 3], [2, 3]], [0, 1])
    assert child.tables[0] is not parent.tables[0]
    assert child.page_keys == parent.page_keys and child.page_keys is not parent.page_keys
    tables.check([parent, child])
    tables.release(parent)
    assert tables.num_held == 5
    child.num_computed = 9
    tables.check([child])
    tables.release(child)
    assert tables.num_held == 0


def test_release_makes_a_sequence_as_new() -> None:
    tables = make_tables((None, 4))
    sequence = computed(tables, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    sequence.is_shareable = False
    tables.release(sequence)
    assert (sequence.tables, sequence.first_page, sequence.num_computed) == ([[], []], [0, 0], 0)
    assert (sequence.page_keys, sequence.is_shareable) == ([], True)
    assert sequence.ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    tables.check([])


def test_the_beginning_of_a_released_prefix_outlives_its_end() -> None:
    tables = make_tables(num_pages=3)
    done = computed(tables, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    tables.release(done)
    tables.pools[0].allocate(2)
    sequence = make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])
    tables.match_prefix(sequence)
    assert sequence.num_computed == 4


def test_the_audit_sees_a_page_that_nobody_owns_up_to() -> None:
    tables = make_tables()
    first, second = computed(tables, [1, 2, 3]), computed(tables, [4, 5, 6])
    tables.check([first, second])
    with pytest.raises(AssertionError, match="page 2: 1 references, 0 expected"):
        tables.check([first])


def test_the_audit_sees_a_sequence_without_pages_for_its_tokens() -> None:
    tables = make_tables()
    sequence = computed(tables, [1, 2, 3, 4])
    sequence.num_computed = 5
    with pytest.raises(AssertionError, match="r: page missing"):
        tables.check([sequence])
