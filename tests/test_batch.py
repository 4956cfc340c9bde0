"""From plan to index tensors: literal layouts, and masks against visibility counted by brute force."""

import dataclasses
import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.batch import (
    MAX_BUCKET_SIZES,
    MAX_LONE_KEYS,
    MAX_LONE_TABLE,
    Bucket,
    BucketKind,
    GroupBatch,
    StepBatch,
    build_batch,
    cut_buckets,
)
from rollout.sequence import PageCopy, PlannedRow, Request, Sequence, StepPlan
from rollout.types import SamplingParams


def make_sequence(ids: list[int], tables: list[list[int]], first_page: list[int] | None = None) -> Sequence:
    request = Request(
        request_id="r",
        ordinal=0,
        prompt_ids=tuple(ids),
        params=SamplingParams(),
        eos_ids=frozenset(),
        noise_key=(0, 0, 0),
    )
    sequence = Sequence(request=request, index=0, ids=ids, num_groups=len(tables))
    sequence.tables = tables
    if first_page is not None:
        sequence.first_page = first_page
    return sequence


def build(
    plan: StepPlan,
    windows: tuple[int | None, ...] = (None,),
    page_size: int = 4,
    *,
    masks: bool = True,
    max_lone_keys: int = MAX_LONE_KEYS,
) -> StepBatch:
    batch = build_batch(
        plan,
        page_size=page_size,
        windows=windows,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        masks=masks,
        max_lone_keys=max_lone_keys,
    )
    batch.check()
    return batch


def mixed_plan() -> StepPlan:
    """Rows of all kinds over a full group and one with a window of 4, in an order that packing changes."""
    prompt = make_sequence([11, 12, 13], [[1], [1]])
    forks = (make_sequence([11, 12, 13], [[1], [1]]), make_sequence([11, 12, 13], [[1], [1]]))
    old = make_sequence(list(range(20, 30)), [[2, 3, 4], [2, 3]], [0, 1])
    chunk = make_sequence(list(range(30, 37)), [[5, 6], [5, 6]])
    young = make_sequence(list(range(40, 46)), [[7, 8], [7, 8]])
    longer = make_sequence([51, 52, 53, 54, 55], [[9, 10], [9, 10]])
    return StepPlan(
        rows=(
            PlannedRow(sequence=prompt, start=0, length=3, forks=forks),
            PlannedRow(sequence=old, start=9, length=1),
            PlannedRow(sequence=chunk, start=4, length=2),  # one token is left: it draws nothing
            PlannedRow(sequence=young, start=5, length=1),
            PlannedRow(sequence=longer, start=0, length=5),
        ),
        copies=(PageCopy(group=1, source=12, target=3), PageCopy(group=0, source=13, target=4)),
        fresh_pages=((1, 9, 10), ()),
    )


# ---- layout -----------------------------------------------------------------------------------


def test_rows_are_packed_by_kind_and_the_largest_come_first() -> None:
    batch = build(mixed_plan(), (None, 4))
    assert batch.num_tokens == 12
    #                                  old young  longer              prompt      chunk
    assert batch.input_ids.tolist() == [[29, 45, 51, 52, 53, 54, 55, 11, 12, 13, 34, 35]]
    assert batch.position_ids.tolist() == [[9, 5, 0, 1, 2, 3, 4, 0, 1, 2, 4, 5]]
    assert batch.row_starts == (0, 1, 2, 7, 10)
    assert [row.sequence.ids[0] for row in batch.packed_rows] == [20, 40, 51, 11, 30]
    for group in batch.groups:
        assert [(b.kind, b.start, b.end, b.num_rows, b.query_len) for b in group.buckets] == [
            (BucketKind.DECODE, 0, 2, 2, 1),
            (BucketKind.FRESH, 2, 10, 2, 5),
            (BucketKind.CONTINUED, 10, 12, 1, 2),
        ]


def test_without_masks_tokens_of_short_prompts_are_rows_of_their_own() -> None:
    batch = build(mixed_plan(), (None, 4), masks=False, max_lone_keys=4)
    #                                  old young   prompt       longer              chunk
    assert batch.input_ids.tolist() == [[29, 45, 11, 12, 13, 51, 52, 53, 54, 55, 34, 35]]
    full, sliding = batch.groups
    for group in batch.groups:
        assert [(b.kind, b.start, b.end, b.num_rows, b.query_len) for b in group.buckets] == [
            (BucketKind.DECODE, 0, 5, 5, 1),
            (BucketKind.FRESH, 5, 10, 1, 5),
            (BucketKind.CONTINUED, 10, 12, 1, 2),
        ]
    lone, in_window = full.buckets[0], sliding.buckets[0]
    assert lone.pages is not None and lone.seen is not None and lone.bias is None
    assert lone.pages.view(5, 3).tolist() == [[2, 3, 4], [7, 8, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]]
    assert lone.seen.tolist() == [[0, 10], [0, 6], [0, 1], [0, 2], [0, 3]]
    assert in_window.pages is not None and in_window.seen is not None
    assert in_window.pages.view(5, 2).tolist() == [[2, 3], [7, 8], [1, 0], [1, 0], [1, 0]]
    assert in_window.seen.tolist() == [[2, 6], [2, 6], [0, 1], [0, 2], [0, 3]]
    everything = build(mixed_plan(), (None, 4), masks=False).groups[0].buckets
    assert [(b.kind, b.num_rows) for b in everything] == [(BucketKind.DECODE, 12)]


def test_prompts_stay_together_beside_a_sequence_of_very_many_pages() -> None:
    length = 1 + MAX_LONE_TABLE // 4  # pages: three tokens and one make a table of a row too much
    giant = make_sequence(list(range(4 * length)), [list(range(2, 2 + length))])
    prompt = make_sequence([1, 2, 3], [[1]])
    plan = StepPlan(
        rows=(
            PlannedRow(sequence=giant, start=4 * length - 1, length=1),
            PlannedRow(sequence=prompt, start=0, length=3),
        )
    )
    buckets = build(plan, masks=False).groups[0].buckets
    assert [(b.kind, b.num_rows) for b in buckets] == [(BucketKind.DECODE, 1), (BucketKind.FRESH, 1)]
    short = dataclasses.replace(plan, rows=plan.rows[1:])
    assert [b.kind for b in build(short, masks=False).groups[0].buckets] == [BucketKind.DECODE]


def test_each_token_is_stored_in_its_own_page_and_slot() -> None:
    full, sliding = build(mixed_plan(), (None, 4)).groups
    # page * 4 + slot: old is at position 9 of pages 2, 3, 4 and, in the window, of pages 2, 3 from 1 on
    assert full.slots.tolist() == [17, 33, 36, 37, 38, 39, 40, 4, 5, 6, 24, 25]
    assert sliding.slots.tolist() == [13, 33, 36, 37, 38, 39, 40, 4, 5, 6, 24, 25]


def test_copies_and_fresh_pages_go_to_their_group() -> None:
    full, sliding = build(mixed_plan(), (None, 4)).groups
    assert full.copy_sources is not None and full.copy_targets is not None
    assert sliding.copy_sources is not None and sliding.copy_targets is not None
    assert full.fresh_pages is not None
    assert (full.copy_sources.tolist(), full.copy_targets.tolist()) == ([13], [4])
    assert (sliding.copy_sources.tolist(), sliding.copy_targets.tolist()) == ([12], [3])
    assert full.fresh_pages.tolist() == [1, 9, 10]
    assert sliding.fresh_pages is None


def test_logits_are_in_plan_order_and_forks_read_their_samples_row() -> None:
    plan = mixed_plan()
    batch = build(plan, (None, 4))
    # last tokens of prompt, old, young and longer; chunk does not draw
    assert batch.logit_index.tolist() == [9, 0, 1, 6]
    assert batch.logit_rows == (0, 0, 0, 1, 2, 3)
    assert [s.ids[0] for s in plan.drawing()] == [11, 11, 11, 20, 40, 51]


def test_a_step_in_which_nobody_draws_has_no_logits() -> None:
    sequence = make_sequence([1, 2, 3, 4, 5, 6], [[1]])
    batch = build(StepPlan(rows=(PlannedRow(sequence=sequence, start=0, length=4),)))
    assert batch.logit_index.tolist() == []
    assert batch.logit_index.dtype is torch.int64
    assert batch.logit_rows == ()


def test_a_prompt_of_one_token_is_a_decode_row() -> None:
    sequence = make_sequence([7], [[3]])
    batch = build(StepPlan(rows=(PlannedRow(sequence=sequence, start=0, length=1),)))
    (bucket,) = batch.groups[0].buckets
    assert bucket.kind is BucketKind.DECODE
    assert bucket.pages is not None and bucket.bias is not None
    assert bucket.pages.tolist() == [3]
    assert bucket.bias.tolist() == [[[0.0, -INF, -INF, -INF]]]
    assert batch.groups[0].slots.tolist() == [12]


INF = float("inf")


def test_decode_masks_hide_what_lies_behind_the_query_and_before_the_window() -> None:
    full, sliding = build(mixed_plan(), (None, 4)).groups
    assert full.buckets[0].pages is not None and full.buckets[0].bias is not None
    assert sliding.buckets[0].pages is not None and sliding.buckets[0].bias is not None
    assert full.buckets[0].bias.dtype is torch.bfloat16
    assert full.buckets[0].pages.tolist() == [
        2,
        3,
        4,
        7,
        8,
        0,
    ]  # the shorter row is padded with the null page
    assert (full.buckets[0].bias[:, 0] == 0).int().tolist() == [
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
    ]
    assert sliding.buckets[0].pages.tolist() == [2, 3, 7, 8]
    assert (sliding.buckets[0].bias[:, 0] == 0).int().tolist() == [
        [0, 0, 1, 1, 1, 1, 0, 0],  # positions 4 .. 11, sees 6 .. 9
        [0, 0, 1, 1, 1, 1, 0, 0],  # positions 0 .. 7, sees 2 .. 5
    ]


def test_short_prompts_repeat_their_last_token_and_are_cut_out_again() -> None:
    full, sliding = build(mixed_plan(), (None, 4)).groups
    bucket = full.buckets[1]
    assert bucket.tokens is not None and bucket.kept is not None
    assert bucket.tokens.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 9, 9]
    assert bucket.kept.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    # whole prompts see their own packed keys, unless the window is shorter than the prompt
    assert (bucket.pages, bucket.bias) == (None, None)
    assert sliding.buckets[1].pages is not None and sliding.buckets[1].bias is not None
    assert sliding.buckets[1].pages.tolist() == [9, 10, 1, 0]
    assert (sliding.buckets[1].bias[0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 1, 1, 0, 0, 0],
    ]


# ---- the batch checks itself ------------------------------------------------------------------


def with_group(batch: StepBatch, **changes: object) -> StepBatch:
    group = dataclasses.replace(batch.groups[0], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(batch, groups=(group,))


def test_the_check_sees_two_tokens_in_one_slot_and_buckets_that_miss_a_token() -> None:
    sequence = make_sequence([1, 2, 3, 4, 5, 6], [[1, 2]])
    batch = build(StepPlan(rows=(PlannedRow(sequence=sequence, start=0, length=6),)))
    (bucket,) = batch.groups[0].buckets
    with pytest.raises(AssertionError, match="two tokens share a slot"):
        with_group(batch, slots=torch.tensor([4, 5, 6, 7, 8, 8])).check()
    for buckets in (
        (),
        (dataclasses.replace(bucket, end=5),),
        (dataclasses.replace(bucket, start=1),),
        (bucket, bucket),
    ):
        with pytest.raises(AssertionError):
            with_group(batch, buckets=buckets).check()
    with pytest.raises(AssertionError):
        dataclasses.replace(batch, input_ids=batch.input_ids.int()).check()
    with pytest.raises(AssertionError):
        dataclasses.replace(batch, position_ids=batch.position_ids[:, :-1]).check()


# ---- visibility by brute force ----------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A random row: how much of it was computed before, and how much is computed now."""

    start: int
    length: int
    remaining: int


def random_plan(shapes: list[Shape], windows: tuple[int | None, ...], page_size: int) -> StepPlan:
    """Tables as the page tables would keep them: every row its own pages, those outside windows gone."""
    numbers = [itertools.count(1) for _ in windows]
    rows = []
    for shape in shapes:
        end = shape.start + shape.length
        first = [0 if w is None else max(0, shape.start - w + 1) // page_size for w in windows]
        tables = [
            [next(number) for _ in range(-(-end // page_size) - begin)]
            for number, begin in zip(numbers, first, strict=True)
        ]
        sequence = make_sequence(list(range(end + shape.remaining)), tables, first)
        rows.append(PlannedRow(sequence=sequence, start=shape.start, length=shape.length))
    return StepPlan(rows=tuple(rows))


def seen_by_brute_force(row: PlannedRow, group: int, window: int | None, page_size: int) -> list[set[int]]:
    """For each query of the row, the flat slots (page * S + slot) of all keys that it sees."""
    sequence = row.sequence
    return [
        {
            sequence.tables[group][key // page_size - sequence.first_page[group]] * page_size
            + key % page_size
            for key in range(query + 1)
            if window is None or query - key < window
        }
        for query in range(row.start, row.start + row.length)
    ]


def seen_in_bucket(bucket: Bucket, group: GroupBatch, page_size: int) -> list[set[int]]:
    """For each packed token of the bucket, the flat slots that its mask leaves visible."""
    rows, queries = bucket.num_rows, bucket.query_len
    kept = range(rows) if bucket.kept is None else bucket.kept.tolist()
    if bucket.pages is None:
        assert bucket.tokens is not None and bucket.bias is None
        slots = group.slots[bucket.tokens].view(rows, queries)
        return [set(slots[at // queries, : at % queries + 1].tolist()) for at in kept]
    flat = bucket.pages.view(rows, -1, 1) * page_size + torch.arange(page_size)
    flat = flat.view(rows, -1)
    if bucket.seen is not None:
        assert queries == 1 and bucket.bias is None
        return [set(slots[begin:end].tolist()) for slots, (begin, end) in zip(flat, bucket.seen, strict=True)]
    assert bucket.bias is not None
    assert set(bucket.bias.flatten().tolist()) <= {0.0, -INF}
    visible = bucket.bias == 0
    return [set(flat[at // queries][visible[at // queries, at % queries]].tolist()) for at in kept]


shapes_of_rows = st.lists(
    st.builds(
        Shape,
        start=st.sampled_from([0, 0, 0, 1, 4, 7, 8, 13, 30]) | st.integers(0, 40),
        length=st.sampled_from([1, 1, 2, 4]) | st.integers(1, 20),
        remaining=st.sampled_from([0, 0, 3]),
    ),
    min_size=1,
    max_size=7,
)


@given(
    shapes=shapes_of_rows,
    windows=st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=2).map(tuple),
    page_size=st.integers(4, 6),
    masks=st.booleans(),
    max_lone_keys=st.sampled_from([0, 5, 20, 100]),
)
def test_every_query_sees_exactly_its_own_keys_up_to_itself_in_its_window(
    shapes: list[Shape], windows: tuple[int | None, ...], page_size: int, masks: bool, max_lone_keys: int
) -> None:
    plan = random_plan(shapes, windows, page_size)
    batch = build(plan, windows, page_size, masks=masks, max_lone_keys=max_lone_keys)
    assert sorted(map(id, batch.packed_rows)) == sorted(map(id, plan.rows))
    for g, (window, group) in enumerate(zip(windows, batch.groups, strict=True)):
        expected = [
            seen for row in batch.packed_rows for seen in seen_by_brute_force(row, g, window, page_size)
        ]
        found = [seen for bucket in group.buckets for seen in seen_in_bucket(bucket, group, page_size)]
        assert found == expected
        assert [(r.start, r.length) for r in group.rows] == [
            (start, row.length) for start, row in zip(batch.row_starts, batch.packed_rows, strict=True)
        ]
        for bucket in group.buckets:
            if bucket.kept is not None:
                assert bucket.tokens is not None
                run = list(range(bucket.start, bucket.end))
                assert bucket.tokens[bucket.kept].tolist() == run, "padding is cut out wrongly"
    drawn = [row for row in plan.rows if row.draws]
    assert batch.input_ids[0][batch.logit_index].tolist() == [row.sequence.ids[-1] for row in drawn]
    assert batch.position_ids[0][batch.logit_index].tolist() == [len(row.sequence.ids) - 1 for row in drawn]


# ---- bucket borders ---------------------------------------------------------------------------


def cost(sizes: list[int], cuts: list[tuple[int, int]], overhead: int) -> int:
    return sum((end - start) * max(sizes[start:end]) + overhead for start, end in cuts)


def cheapest_by_brute_force(sizes: list[int], overhead: int) -> int:
    inner = range(1, len(sizes))
    borders = (
        (0, *chosen, len(sizes))
        for count in range(len(sizes))
        for chosen in itertools.combinations(inner, count)
    )
    return min(cost(sizes, list(itertools.pairwise(b)), overhead) for b in borders)


def test_borders_lie_where_padding_would_cost_more_than_a_bucket() -> None:
    assert cut_buckets([9, 9, 2, 2], 4) == [(0, 2), (2, 4)]
    assert cut_buckets([9, 9, 2, 2], 20) == [(0, 4)]
    assert cut_buckets([5], 100) == [(0, 1)]
    assert cut_buckets([7, 7, 7], 0) == [(0, 3)]


def test_few_sizes_are_told_apart_however_close_they_are() -> None:
    """They were rounded together to a sixteenth of the largest size even when there were only two:
    one row of 1000 keys made a hundred rows of 950 pay for 50 more."""
    assert cut_buckets([1000] + [950] * 100, 512) == [(0, 1), (1, 101)]


@given(
    sizes=st.lists(st.integers(1, 40) | st.integers(900, 1000), min_size=1, max_size=9),
    overhead=st.integers(0, 60) | st.just(512),
)
def test_the_borders_are_the_cheapest_of_all(sizes: list[int], overhead: int) -> None:
    sizes = sorted(sizes, reverse=True)
    cuts = cut_buckets(sizes, overhead)
    assert list(itertools.chain([0], (end for _, end in cuts))) == [*(start for start, _ in cuts), len(sizes)]
    assert cost(sizes, cuts, overhead) == cheapest_by_brute_force(sizes, overhead)


@given(sizes=st.lists(st.integers(1, 5000), min_size=20, max_size=200), overhead=st.integers(0, 600))
def test_many_sizes_are_cut_into_few_buckets_without_gaps(sizes: list[int], overhead: int) -> None:
    sizes = sorted(sizes, reverse=True)
    cuts = cut_buckets(sizes, overhead)
    assert [0, *(end for _, end in cuts)] == [*(start for start, _ in cuts), len(sizes)]
    assert len(cuts) <= MAX_BUCKET_SIZES
    # rounding pads a row by no more than a sixteenth of the largest size
    exact = sum(sizes)
    assert cost(sizes, cuts, overhead) <= exact + MAX_BUCKET_SIZES * overhead + len(sizes) * (
        sizes[0] // MAX_BUCKET_SIZES + 1
    )


def test_rows_under_a_window_whose_page_counts_go_up_and_down_share_a_bucket() -> None:
    """Rows lie in the order of their positions, and under a window a later row may have a page more
    than an earlier one. The first row of a run was taken for the largest: a run that begins with a
    short row looked cheap, and a bucket was cut off that saved nothing."""
    plan = random_plan([Shape(start, 1, 0) for start in range(300, 100, -1)], (8,), 4)
    counts = [len(row.sequence.tables[0]) for row in plan.rows]
    assert counts[:6] == [3, 2, 3, 3, 3, 2]
    (group,) = build(plan, (8,)).groups
    assert [(b.start, b.end) for b in group.buckets] == [(0, 200)]
