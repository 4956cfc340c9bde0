"""Steps on a cache: ``plan -> build -> forward -> draw -> commit``, in the caller's thread.

Owns what a step needs besides the weights: the scheduler with its page tables, the cache that it sizes by
the requests at hand, the attention backend, and a step that was launched ahead of the results before it.
Which weights are in force, and what requests are, is the engine's.
"""

from collections.abc import Iterable

import torch
from torch import nn

from rollout.ahead import Flight, carry_over, needs_ids, places_held
from rollout.attention import AttentionBackend, make_backend, page_size_for
from rollout.batch import build_batch
from rollout.capacity import CapacityPlanner
from rollout.commit import commit
from rollout.config import EngineConfig
from rollout.execution import StepExecutor
from rollout.kv_cache import KVCache
from rollout.meter import Meter
from rollout.native import DrawKernels, Kernels
from rollout.packing import PackedLinears
from rollout.parallel import Ranks
from rollout.probe import ModelPlan
from rollout.sampling import launch_draw
from rollout.scheduler import Scheduler
from rollout.sequence import Request, StepPlan
from rollout.sequence import Sequence as Sample
from rollout.swap import SwapSpace
from rollout.tables import PageTables
from rollout.types import FinishReason


class Stepper:
    """Steps of one engine.

    Example::

        stepper = Stepper(config, ranks, packed)
        stepper.renew(view, plan, kernels, position_limit, version=0)   # again for another view
        stepper.add(samples)
        while stepper.scheduler.has_work:
            stepper.step()
        stepper.scheduler.take_finished()

    Args:
        config: the engine's.
        ranks: those that take every step together.
        packed: derived copies of linear weights, whose making is counted apart from the forward.
    """

    meter: Meter
    scheduler: Scheduler
    cache: KVCache
    capacity: CapacityPlanner
    backend: AttentionBackend
    plan: ModelPlan

    def __init__(self, config: EngineConfig, ranks: Ranks, packed: PackedLinears) -> None:
        self.executor = StepExecutor(config, ranks.size)
        self.meter = Meter()
        self.is_ready = False
        """Whether there was a view."""
        self._config, self._ranks, self._packed = config, ranks, packed
        self._draw_kernels: DrawKernels | None = None
        self._position_limit = self._swap_bytes = 0
        self._version = -1
        self._is_sized = False  # whether the cache was sized since the last request came
        self.flight: Flight | None = None
        """A step launched ahead, whose plan is not committed."""

    def renew(
        self, view: nn.Module, plan: ModelPlan, kernels: Kernels | None, position_limit: int, version: int
    ) -> None:
        """Get ready for another view, or the same one after its plan was made anew.

        Raises:
            ValueError: the attention backend that was asked for cannot serve it.
        """
        config, device = self._config, plan.layout.device
        backend = make_backend(
            config.attn_implementation,
            plan.layout,
            kernels,
            traits=plan.traits,
            page_size=config.page_size,
            max_decode_pages=config.max_blocks_per_request,
            may_flash=config.auto_switch_to_flash,
        )
        page_size, order = page_size_for(backend, config.page_size), backend.page_order
        is_same = (
            self.is_ready
            and plan.layout == self.plan.layout
            and (page_size, order) == (self.cache.page_size, self.cache.order)
            and position_limit == self._position_limit
        )
        self.backend, self.plan, self._device = backend, plan, device
        self._draw_kernels = None if kernels is None else kernels.draws
        self._position_limit, self._version = position_limit, version
        self.executor.renew(view, plan, backend, page_size, position_limit)
        if is_same and (self.cache.has_scrap or not self.executor.is_recording):
            return
        self._is_sized = False
        self.cache = KVCache(plan.layout, page_size, order, has_scrap=self.executor.is_recording)
        self.capacity = CapacityPlanner(
            config, plan.layout, page_size=page_size, position_limit=position_limit
        )
        # what every rank can give: all of them plan alike
        sizes = -self.capacity.swap_bytes(), -self.capacity.offer()
        swap, budget = self._ranks.agree("sizing the caches", sizes)
        self._swap_bytes = -swap
        self.capacity.settle(-budget)
        if self.is_ready:
            self._start_over()
        else:
            self.scheduler = Scheduler(config, self._empty_tables(), self._empty_swap())
        self.is_ready = True

    def add(self, samples: list[Sample]) -> None:
        """Queue the samples of one request."""
        self.scheduler.add(samples)
        self._is_sized = False

    def enter_version(self, version: int) -> None:
        """Go on under other weights; see ``EngineConfig.on_weight_change``."""
        self._forget_flight()
        self._version = version
        self.scheduler.change_weights(version, self._config.on_weight_change)

    def fail(self, error: Exception) -> None:
        """A step failed: every live sequence ends with its error."""
        self._forget_flight()
        self.scheduler.finish_all(self.scheduler.live(), FinishReason.ERROR, error)
        self.scheduler.tables.start_version(self._version)

    def interrupt(self) -> None:
        """A step was broken off: what was planned is not computed."""
        self._forget_flight()
        self.scheduler.change_weights(self._version, "recompute")

    def release(self) -> None:
        """Give the cache and recordings back; sequences that have begun are computed again."""
        self._forget_flight()
        self.executor.drop()
        self.cache.release()
        self._is_sized = False
        self.capacity.renew()
        self._start_over()

    def synchronize(self) -> None:
        """Wait for a step that was launched ahead."""
        if self.flight is not None and self.flight.draws is not None:
            self.flight.draws.wait()

    def record(self, request: Request) -> int:
        """Take the cache that a request needs with all its samples, and record the decode steps up to them;
        returns how many were not yet."""
        if not self.executor.is_recording:
            return 0
        self._is_sized = False
        self._ensure_capacity([request])
        return self.executor.record(self.cache, request.params.n)

    def step(self) -> None:
        """One step, if there is anything to do. What goes wrong in it is raised: see :meth:`fail`."""
        flight, self.flight = self.flight, None
        if flight is None:
            with self.meter.stage("schedule"):
                self._ensure_capacity()
                plan = self.scheduler.plan()
            if plan is None:
                return
            flight = self._launch(plan)
        self.scheduler.commit(flight.plan)
        try:
            if self.executor.is_ahead:
                self.flight = self._launch_ahead(flight)
        finally:  # whatever became of the next step, this one has been computed
            self._land(flight)

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        """The step after ``flight``, if it can be planned without its tokens."""
        running = self.scheduler.running
        if not self._is_sized or any(needs_ids(sequence.request.params) for sequence in running):
            return None
        with places_held(flight, self._position_limit) as ending:
            with self.meter.stage("schedule"):
                plan = self.scheduler.plan_ahead(ending)
            return None if plan is None else self._launch(plan, flight)

    def _launch(self, plan: StepPlan, before: Flight | None = None) -> Flight:
        """Build, forward and draw; ``before`` is the flight whose tokens the plan has no numbers of."""
        self.meter.count_step(
            num_tokens=plan.num_tokens,
            pages_held=self.scheduler.tables.num_held,
            pages_saved=sum(transfer.num_pages for transfer in plan.saves),
            pages_loaded=sum(transfer.num_pages for transfer in plan.loads),
        )
        layout, is_recorded = self.plan.layout, self.executor.records(plan)
        with self.meter.stage("build"):
            batch = build_batch(
                plan,
                page_size=self.cache.page_size,
                windows=layout.windows,
                dtype=layout.dtype,
                device=torch.device("cpu") if is_recorded else self._device,
                masks=self.backend.needs_masks and not is_recorded,
                run_rules=None if is_recorded else self.backend.run_rules,
            )
            fill = None if before is None else carry_over(before, batch, self.plan.vocab_size)
        self._packed.take_seconds()  # those before were counted where they were spent
        with self.meter.stage("forward"):
            logits = self.executor.forward(batch, self.cache, fill)
        graphs = self.executor.take_counts()
        self.meter.count_graphs(recorded=graphs.recorded, replayed=graphs.replayed)
        self.meter.move(self._packed.take_seconds(), "forward", "weights")  # made when first used
        drawing = plan.drawing()
        with self.meter.stage("sample"):
            rows = [sequence.draw_row for sequence in drawing]
            # logits of two ranks may differ in the last bit, so only one of them draws
            is_drawing = bool(drawing) and self._ranks.is_driver
            draws = launch_draw(logits, rows, batch.logit_rows, self._draw_kernels) if is_drawing else None
        return Flight(plan=plan, drawing=tuple(drawing), draws=draws, version=self._version)

    def _land(self, flight: Flight) -> None:
        """Read the tokens of a launched step and take them over."""
        with self.meter.stage("sample"):
            drawn = self._ranks.share_draws(flight.results, len(flight.drawing)) if flight.drawing else ()
        with self.meter.stage("commit"):
            limit = self._position_limit
            late = commit(self.scheduler, flight.drawing, drawn, flight.version, limit)
            self.meter.count_discarded(late)
            if self.flight is not None and not self.scheduler.confirm(self.flight.plan):
                self._forget_flight()  # all of its sequences have ended

    def _forget_flight(self) -> None:
        """Throw away what was launched ahead: its tokens are drawn again where they are still wanted."""
        if self.flight is not None:
            self.meter.count_discarded(len(self.flight.drawing))
            self.flight = None

    def _ensure_capacity(self, expected: Iterable[Request] = ()) -> None:
        """Make room for what lives and, ahead of them, for requests that are ``expected``."""
        if self._is_sized:
            return
        requests = {s.request.ordinal: s.request for s in self.scheduler.live()}
        pages = self.capacity.num_pages([*requests.values(), *expected], self.cache.num_pages)
        if any(new < old for new, old in zip(pages, self.cache.num_pages, strict=True)):
            # another division between the layer groups: start over within the same bound
            self._forget_flight()
            self.cache.release()
            self._start_over()
        if pages != self.cache.num_pages:
            self.cache.resize(pages)
            self.capacity.log(pages)
        self.scheduler.tables.grow(self.cache.num_pages)
        self._is_sized = True

    def _start_over(self) -> None:
        """Empty page tables: running sequences are computed again on them."""
        self.scheduler.replace_tables(self._empty_tables(), self._empty_swap())

    def _empty_tables(self) -> PageTables:
        windows = self.plan.layout.windows
        tables = PageTables(
            page_size=self.cache.page_size,
            windows=windows,
            num_pages=tuple(0 for _ in windows),
            share=self._config.allow_block_sharing,
        )
        tables.start_version(self._version)
        return tables

    def _empty_swap(self) -> SwapSpace:
        return SwapSpace(self._swap_bytes, self.plan.layout.page_bytes(self.cache.page_size))
