"""Dummy steps that make an engine compile before its first request comes.

They run on pages of their own, which go away with them. Recorded decode steps are not among them: those
read the engine's own pages (see ``RolloutEngine.warmup``).
"""

from collections.abc import Iterator

from rollout.batch import build_batch
from rollout.compiled import CompileSettings, padded_size
from rollout.config import EngineConfig
from rollout.execution import StepExecutor
from rollout.kv_cache import KVCache
from rollout.sequence import PlannedRow, Request, Sequence, StepPlan
from rollout.tables import PageTables
from rollout.types import SamplingParams

PROMPT_LENGTHS = (8, 5)
"""Of a step with prompts whose shapes may change: two lengths, so that no size is taken for a constant."""


def compile_steps(
    executor: StepExecutor, like: KVCache, config: EngineConfig, position_limit: int, num_rows: int
) -> int:
    """Run the usual steps of each kind that is compiled; returns how many.

    Args:
        executor: of the engine, ready.
        like: the engine's cache, beside which these steps have small ones of their own.
        config: the engine's.
        position_limit: tokens of a sequence at the most.
        num_rows: rows of a decode step at the most.
    """
    count = 0
    for is_decode in (False, True):
        settings = executor.settings(is_decode)
        if settings is None or (is_decode and executor.is_recording):
            continue
        if is_decode:
            steps = _decode_steps(settings, executor.row_interval, num_rows)
        else:
            steps = _prompt_steps(settings, min(config.resolved_max_batch_tokens, position_limit))
        for lengths, start in steps:
            _run_step(executor, like, lengths, start)
            count += 1
    return count


def _prompt_steps(settings: CompileSettings, most: int) -> Iterator[tuple[list[int], int]]:
    """(lengths of the rows, tokens that each has already) of steps with prompts.

    With fixed shapes only the largest one: smaller ones come when they come.
    """
    yield ([most] if settings.has_fixed_shapes else [min(length, most) for length in PROMPT_LENGTHS]), 0


def _decode_steps(settings: CompileSettings, interval: int, num_rows: int) -> Iterator[tuple[list[int], int]]:
    """The same of decode steps; a single row is compiled apart even where shapes may change."""
    sizes = [min(2, num_rows), 1]
    if settings.has_fixed_shapes:
        sizes, largest = [], padded_size(num_rows, interval)
        while not sizes or sizes[-1] < largest:
            sizes.append(padded_size(2 * sizes[-1] if sizes else 1, interval))
    for size in sizes:
        yield [1] * size, 1


def _run_step(executor: StepExecutor, like: KVCache, lengths: list[int], start: int) -> None:
    """One forward of rows of ``lengths`` tokens after ``start`` others."""
    layout, page_size = like.layout, like.page_size
    pages = sum(-(-(start + length) // page_size) for length in lengths)
    num_pages = (pages,) * len(layout.groups)
    cache = KVCache(layout, page_size, like.order)
    cache.resize(num_pages)
    tables = PageTables(page_size=page_size, windows=layout.windows, num_pages=num_pages, share=False)
    request = Request(
        request_id="warmup",
        ordinal=0,
        prompt_ids=(0,),
        params=SamplingParams(),
        eos_ids=frozenset(),
        noise_key=(0, 0, 0),
    )
    rows: list[PlannedRow] = []
    fresh: list[list[int]] = [[] for _ in layout.groups]
    for index, length in enumerate(lengths):
        sequence = Sequence(
            request=request, index=index, ids=[0] * (start + length), num_groups=len(layout.groups)
        )
        _, taken = tables.extend(sequence, start + length)
        for pages_of_group, more in zip(fresh, taken, strict=True):
            pages_of_group += more
        rows.append(PlannedRow(sequence=sequence, start=start, length=length))
    batch = build_batch(
        StepPlan(rows=tuple(rows), fresh_pages=tuple(map(tuple, fresh))),
        page_size=page_size,
        windows=layout.windows,
        dtype=layout.dtype,
        device=layout.device,
        masks=executor.backend.needs_masks,
        run_rules=executor.backend.run_rules,
    )
    executor.forward(batch, cache)
