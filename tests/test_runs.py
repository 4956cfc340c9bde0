"""Rows as arguments of paged kernels: literal layouts, and what queries see by brute force."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fake_kernels import check_paged
from rollout.batch import StepBatch, build_batch
from rollout.runs import PagedRun, RunRules
from rollout.sequence import PlannedRow, StepPlan
from test_batch import Shape, make_sequence, mixed_plan, random_plan, seen_by_brute_force, shapes_of_rows

NO_LIMIT, NEVER = RunRules(None), RunRules(0)


def build(plan: StepPlan, windows: tuple[int | None, ...], rules: RunRules, page_size: int = 4) -> StepBatch:
    batch = build_batch(
        plan,
        page_size=page_size,
        windows=windows,
        dtype=torch.float16,
        device=torch.device("cpu"),
        masks=False,
        run_rules=rules,
    )
    batch.check()
    for group in batch.groups:
        assert group.buckets == ()
        for run in group.runs:
            run.check(page_size)
    return batch


# ---- layout -----------------------------------------------------------------------------------


def test_decode_rows_and_prompts_make_a_run_each() -> None:
    #                           old young | longer              prompt      chunk
    # packed at                 0   1     | 2                   7           10
    (group, _) = build(mixed_plan(), (None, None), NO_LIMIT).groups
    decode, ragged = group.runs
    assert (decode.start, decode.end, decode.is_decode) == (0, 2, True)
    assert decode.cu_q.tolist() == [0, 1, 2]
    assert decode.lengths.tolist() == [10, 6] and decode.cu_k.tolist() == [0, 10, 16]
    assert decode.table.tolist() == [[2, 3, 4], [7, 8, 0]]
    assert (decode.max_q, decode.max_k, decode.window) == (1, 10, None)
    assert (ragged.start, ragged.end, ragged.is_decode) == (2, 12, False)
    assert ragged.cu_q.tolist() == [0, 5, 8, 10]
    assert ragged.lengths.tolist() == [5, 3, 6] and ragged.cu_k.tolist() == [0, 5, 8, 14]
    assert ragged.table.tolist() == [[9, 10], [1, 0], [5, 6]]
    assert (ragged.max_q, ragged.max_k) == (5, 6)


def test_without_the_fast_path_all_rows_are_one_run() -> None:
    (group, sliding) = build(mixed_plan(), (None, 4), NEVER).groups
    (run,) = group.runs
    assert (run.start, run.end, run.is_decode) == (0, 12, False)
    assert run.cu_q.tolist() == [0, 1, 2, 7, 10, 12]
    assert run.lengths.tolist() == [10, 6, 5, 3, 6]
    # under the window, old lost its first page: of positions 0 .. 9 it has keys from 4 on
    (run,) = sliding.runs
    assert run.window == 4
    assert run.lengths.tolist() == [6, 6, 5, 3, 6]
    assert run.table.tolist() == [[2, 3], [7, 8], [9, 10], [1, 0], [5, 6]]


def test_rows_over_the_limit_are_ragged_and_the_table_is_as_wide_as_the_limit() -> None:
    old = make_sequence(list(range(10)), [[2, 3, 4]])
    young = make_sequence(list(range(5)), [[7, 8]])
    first = make_sequence([1], [[9]])
    rows = [PlannedRow(sequence=s, start=len(s.ids) - 1, length=1) for s in (young, first, old)]
    prompt = PlannedRow(sequence=make_sequence([1, 2], [[10]]), start=0, length=2)
    (group,) = build(StepPlan(rows=(*rows, prompt)), (None,), RunRules(2)).groups
    assert [(run.start, run.end, run.is_decode) for run in group.runs] == [
        (0, 1, False),
        (1, 3, True),
        (3, 5, False),
    ]
    assert group.runs[0].table.tolist() == [[2, 3, 4]]
    assert group.runs[1].table.tolist() == [[7, 8], [9, 0]]
    (group,) = build(StepPlan(rows=tuple(rows)), (None,), RunRules(5)).groups
    (run,) = group.runs
    assert run.table.tolist() == [[2, 3, 4, 0, 0], [7, 8, 0, 0, 0], [9, 0, 0, 0, 0]]
    # with every decode row over the limit there is nothing between them and the prompts
    (group,) = build(StepPlan(rows=(rows[2], prompt)), (None,), RunRules(2)).groups
    assert [(run.start, run.end, run.is_decode) for run in group.runs] == [(0, 3, False)]


def test_the_check_sees_what_a_kernel_would_choke_on() -> None:
    (group, _) = build(mixed_plan(), (None, None), NO_LIMIT).groups
    run = group.runs[0]
    for changes in (
        {"table": run.table.long()},
        {"table": run.table[:1]},
        {"table": run.table[:, :2].contiguous()},
        {"lengths": run.lengths + 1},
        {"cu_q": run.cu_q.flip(0)},
        {"max_q": 2},
        {"max_k": 9},
        {"end": 3},
        {"window": 4},
    ):
        with pytest.raises(AssertionError):
            dataclasses.replace(run, **changes).check(4)  # type: ignore[arg-type]


def test_a_window_has_no_decode_run() -> None:
    with pytest.raises(AssertionError, match="no mask"):
        build(mixed_plan(), (None, 4), NO_LIMIT)


# ---- visibility by brute force ----------------------------------------------------------------


def seen_in_run(run: PagedRun, page_size: int) -> list[set[int]]:
    """For each packed token of the run, the flat slots that a kernel shows it, by lengths alone."""
    seen = []
    for row, length in enumerate(run.lengths.tolist()):
        slots = (run.table[row].long()[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
        queries = int(run.cu_q[row + 1] - run.cu_q[row])
        for query in range(queries):
            last = length - queries + query
            first = 0 if run.window is None else max(0, last - (run.window - 1))
            seen.append(set(slots[first : last + 1].tolist()))
    return seen


@given(
    shapes=shapes_of_rows,
    windows=st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=2).map(tuple),
    page_size=st.integers(4, 6),
    limit=st.none() | st.integers(0, 9),
)
def test_every_query_sees_exactly_its_own_keys_up_to_itself_in_its_window(
    shapes: list[Shape], windows: tuple[int | None, ...], page_size: int, limit: int | None
) -> None:
    plan = random_plan(shapes, windows, page_size)
    rules = RunRules(limit if set(windows) == {None} else 0)
    batch = build(plan, windows, rules, page_size)
    for g, (window, group) in enumerate(zip(windows, batch.groups, strict=True)):
        expected = [
            seen for row in batch.packed_rows for seen in seen_by_brute_force(row, g, window, page_size)
        ]
        assert [seen for run in group.runs for seen in seen_in_run(run, page_size)] == expected
        for run in group.runs:
            pages = torch.zeros(int(run.table.max()) + 1, page_size, 1, 1)
            check_paged(pages[0], pages, pages, run.lengths, run.table, 1)
        fast = [run for run in group.runs if run.is_decode]
        if rules.max_decode_pages is None:
            assert sum(len(run.lengths) for run in fast) == sum(r.length == 1 for r in batch.packed_rows)
        else:
            assert all(run.table.shape[1] == rules.max_decode_pages for run in fast)
