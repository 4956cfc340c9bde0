"""Recorded decode steps: one recording per padded size, replayed on static tensors.

A step in which every row adds one token is padded to a multiple of so many rows and so many keys per
row, so that few sizes occur. The first step of a size runs as usual and is then recorded; later ones
copy their numbers into the recording's tensors and replay it::

    plan -> batch on the host -> one upload into the static tensors -> replay -> logits[:rows]

What moves pages is not recorded: it comes before, at its own size. Recordings read parameters and pages
where they lie, so weights may change in place; when the view, the cache's tensors, the attention or the
autocast become others, all are dropped.

Letters: R rows of a recording, D rows that draw, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rollout.attention import AttentionBackend
from rollout.batch import StepBatch
from rollout.kv_cache import KVCache
from rollout.probe import ModelPlan
from rollout.runner import move_pages, run_model
from rollout.static import GraphKey, GraphSizes, StaticStep, with_masks, with_runs

Run = Callable[[], None]


class GraphBackend(Protocol):
    """Records work on a device."""

    def forget(self) -> None:
        """All recordings were let go: what they shared goes, too."""

    def capture(self, run: Run) -> Run:
        """Record what ``run`` does; calling the result does it again on the same addresses.

        ``run`` has been run before, and may be run again by this. It allocates no tensor that
        outlives it and reads nothing from the host that may change.
        """


class CudaGraphs:
    """Records by CUDA graphs, all in one memory pool: they are replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def forget(self) -> None:
        """See ``GraphBackend``."""
        self._pool = None  # a pool whose graphs are gone takes no new ones

    def capture(self, run: Run) -> Run:
        """See ``GraphBackend``."""
        # the outer stream is entered so that it is the current one again, even if recording fails
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()  # libraries set themselves up on the recording's stream, which can't be recorded
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # other threads (the trainer's, a data loader's) may go on using the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                run()
            self._pool = graph.pool()
        replay: Run = graph.replay
        return replay


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One size's tensors and how to run it on them."""

    static: StaticStep
    logits: Tensor
    """[R, V], where a replay leaves them; shared by all sizes."""
    replay: Run


@dataclass(frozen=True, slots=True, eq=False)
class Surroundings:
    """What a recording was made with and holds addresses of."""

    view: nn.Module
    plan: ModelPlan
    """Another one at each change of autocast, too."""
    cache: KVCache
    attention: AttentionBackend
    cache_epoch: int

    def is_same(self, other: "Surroundings | None") -> bool:
        """Whether recordings made with one are good for the other."""
        return (
            other is not None
            and self.view is other.view
            and self.plan is other.plan
            and self.cache is other.cache
            and self.attention is other.attention
            and self.cache_epoch == other.cache_epoch
        )


@dataclass(frozen=True, slots=True)
class GraphCounts:
    """Recordings made, and steps replayed."""

    recorded: int = 0
    replayed: int = 0

    def plus(self, recorded: int = 0, replayed: int = 0) -> "GraphCounts":
        """With so many more."""
        return GraphCounts(self.recorded + recorded, self.replayed + replayed)


class DecodeGraphs:
    """Runs decode-only steps, recording each size when it first comes.

    Example::

        graphs = DecodeGraphs(CudaGraphs(device), sizes)
        around = Surroundings(view, plan, cache, attention, cache.epoch)
        logits = graphs.run(around, batch)   # batch on the host
        graphs.drop()                    # memory of the recordings goes back
    """

    def __init__(self, backend: GraphBackend, sizes: GraphSizes) -> None:
        self.sizes = sizes
        self._backend = backend
        self._made_with: Surroundings | None = None
        self._recorded: dict[GraphKey, Recorded] = {}
        self._logits: Tensor | None = None
        self._counts = GraphCounts()
        self.failure: Exception | None = None
        """Why a size could not be recorded, if one could not; that step itself was run."""

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """The sizes that are recorded now."""
        return tuple(self._recorded)

    def run(
        self, around: Surroundings, batch: StepBatch, fill: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Logits ``[D, V]`` of the rows that draw; good until the next run.

        Args:
            around: what the step runs with.
            batch: of decode rows alone, built on the host without masks.
            fill: writes tokens that only the device knows yet into the input ids ``[1, R]``.
        """
        if not around.is_same(self._made_with):
            self.drop()
            self._made_with = around
        move_pages(batch, around.cache)
        key = self.sizes.key_of(batch)
        recorded = self._recorded.get(key)
        static = recorded.static if recorded is not None else self._static(key, around)
        static.load(batch)
        if fill is not None:
            fill(static.batch.input_ids)
        if recorded is not None:
            recorded.replay()
            self._counts = self._counts.plus(replayed=1)
            logits = recorded.logits
        else:
            logits = self._record(key, static, around)
        return logits[: len(batch.logit_index)]

    def record(self, around: Surroundings, key: GraphKey) -> bool:
        """Record a size ahead of its first step, on rows that are all padding; whether it was not yet."""
        if not around.is_same(self._made_with):
            self.drop()
            self._made_with = around
        if key in self._recorded:
            return False
        self._record(key, self._static(key, around), around)
        return True

    def take_counts(self) -> GraphCounts:
        """What was recorded and replayed since this was last asked."""
        counts, self._counts = self._counts, GraphCounts()
        return counts

    def drop(self) -> None:
        """Forget every recording; its memory goes back."""
        self._recorded, self._made_with, self._logits = {}, None, None
        self._backend.forget()

    def _static(self, key: GraphKey, around: Surroundings) -> StaticStep:
        cache = around.cache
        layout = cache.layout
        return StaticStep(key, layout.windows, cache.scrap_pages, cache.page_size, layout.device)

    def _record(self, key: GraphKey, static: StaticStep, around: Surroundings) -> Tensor:
        """Run the static step now, and record it for the next time."""

        def run() -> Tensor:
            with _uncached_autocast(around.cache.layout.device.type):
                batch = static.batch
                cache, rules = around.cache, around.attention.run_rules
                if rules is not None:
                    batch = with_runs(batch, cache.page_size, rules)
                elif around.attention.needs_masks:
                    batch = with_masks(batch, cache.page_size, cache.layout.dtype)
                return run_model(around.view, around.plan, batch, around.cache, around.attention)

        first = run()
        if self._logits is None or len(self._logits) < key.rows:
            self._logits = torch.empty_like(first)  # recordings made before keep theirs
        logits = self._logits[: key.rows]

        def run_into_place() -> None:
            logits.copy_(run())

        try:
            replay = self._backend.capture(run_into_place)
        except Exception as error:  # whatever the model's or the attention's code does under recording
            self.failure = error
        else:
            self._recorded[key] = Recorded(static, logits, replay)
            self._counts = self._counts.plus(recorded=1)
        return first


def graph_backend(device: torch.device) -> GraphBackend | None:
    """What records work on a device, if anything does."""
    return CudaGraphs(device) if device.type == "cuda" else None


@contextmanager
def _uncached_autocast(kind: str) -> Iterator[None]:
    """Autocast, where it is on, without its cache of cast weights: a recording must cast them itself,
    since they change and the cached casts go away."""
    if not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False):
        yield
