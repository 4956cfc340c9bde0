"""How a step's forward runs: plainly, compiled, or replayed from a recording.

The settings ask, and the device, the attention backend and the compile settings decide: what is asked for
and not possible here is said once, by its name, in the log, and steps run without it. Results are the
same either way.
"""

import dataclasses
import logging
from collections.abc import Callable

from torch import Tensor, nn

from rollout.attention import AttentionBackend
from rollout.batch import StepBatch
from rollout.compiled import CompileChoice, CompileSettings, choose_compilation, is_compiling, padded_size
from rollout.config import EngineConfig
from rollout.graphs import DecodeGraphs, GraphBackend, GraphCounts, Surroundings, graph_backend
from rollout.kv_cache import KVCache
from rollout.probe import ModelPlan
from rollout.runner import forward, move_pages, run_model
from rollout.sequence import StepPlan
from rollout.static import GraphSizes

logger = logging.getLogger("rollout")

DEFAULT_ROW_INTERVAL = 64
DEFAULT_KEY_INTERVAL = 16384
"""What ``q_padding_interval_size`` and ``kv_padding_interval_size`` mean by 0, as in transformers."""


class StepExecutor:
    """Runs the steps of one engine.

    Example::

        executor = StepExecutor(config)
        executor.renew(view, plan, backend, page_size, position_limit)     # whenever one of them changes
        logits = executor.forward(batch, cache)

    Raises:
        ValueError: a compile config asks for what is not possible.
    """

    def __init__(self, config: EngineConfig, num_ranks: int = 1) -> None:
        self._config = config
        self._num_ranks = num_ranks
        self.is_compiling = is_compiling(config)
        """Whether a kind of step may be compiled: the view must then keep torch's own modules."""
        self._view: nn.Module
        self._plan: ModelPlan
        self._backend: AttentionBackend
        self._compilation = choose_compilation(config, is_flash=False)  # refuses what is wrong
        self._compiled: dict[bool, nn.Module] = {}
        self._graphs: DecodeGraphs | None = None
        self._is_ahead = False
        self._told: set[str] = set()

    def renew(
        self,
        view: nn.Module,
        plan: ModelPlan,
        backend: AttentionBackend,
        page_size: int,
        position_limit: int,
    ) -> None:
        """Settle how steps run with this view; compilations and recordings for another one are let go."""
        self.drop()
        self._view, self._plan, self._backend = view, plan, backend
        config = self._config
        self._compilation = choose_compilation(config, is_flash=backend.run_rules is not None)
        self._compiled = _compiled(view, self._compilation)
        recorder = graph_backend(plan.layout.device)
        why_not = self._why_not_recorded(recorder)
        if why_not is not None:
            for setting in self._asking():
                self._tell(f"{setting} has no effect: {why_not}")
        self._graphs = None
        if recorder is not None and why_not is None:
            if config.cuda_graphs is not None and config.cuda_graphs[0]:
                self._tell("steps with prompts are not recorded: their sizes hardly repeat", logging.INFO)
            self._graphs = DecodeGraphs(recorder, self._sizes(page_size, position_limit))
        self._is_ahead = bool(config.use_async_batching) and self._graphs is not None

    @property
    def is_ahead(self) -> bool:
        """Whether a step is launched before the results of the one before it are read."""
        return self._is_ahead and self._graphs is not None

    @property
    def is_recording(self) -> bool:
        """Whether decode-only steps are recorded, so that the cache needs a scrap page."""
        return self._graphs is not None

    @property
    def backend(self) -> AttentionBackend:
        """What attends."""
        return self._backend

    def settings(self, is_decode: bool) -> CompileSettings | None:
        """How one kind of step is compiled; ``None`` where it is not."""
        return self._compilation.of(is_decode)

    def records(self, plan: StepPlan) -> bool:
        """Whether the step is run from a recording: it is then built on the host, without masks."""
        return self._graphs is not None and plan.is_decode

    def forward(
        self, batch: StepBatch, cache: KVCache, fill: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Logits ``[D, V]`` of the rows that draw, good until the next forward.

        ``fill`` writes tokens that only the device knows yet into the input ids ``[1, T]``.
        """
        if self._graphs is not None and batch.is_decode:
            logits = self._graphs.run(self._around(cache), batch, fill)
            self._check_recording()
            return logits
        if fill is not None:
            fill(batch.input_ids)
        settings = self.settings(batch.is_decode)
        if settings is None:
            return forward(self._view, self._plan, batch, cache, self._backend)
        move_pages(batch, cache)
        padding = (0, 0)
        if settings.has_fixed_shapes:
            counts = batch.num_tokens, len(batch.logit_index)
            tokens, rows = (padded_size(count, self.row_interval) - count for count in counts)
            padding = tokens, rows
        view = self._compiled[batch.is_decode]
        return run_model(view, self._plan, batch, cache, self._backend, padding)

    def record(self, cache: KVCache, num_rows: int) -> int:
        """Record decode steps of up to so many rows, with short tables; returns how many were not yet."""
        if self._graphs is None:
            return 0
        made, interval = 0, self.row_interval
        widths = [1 for _ in self._plan.layout.groups]
        # the largest first: smaller ones then find memory that it needed for a while
        for count in reversed(range(interval, num_rows + interval, interval)):
            made += self._graphs.record(self._around(cache), self._graphs.sizes.key(count, widths))
            self._check_recording()
            if self._graphs is None:
                return 0
        return made

    def take_counts(self) -> GraphCounts:
        """What was recorded and replayed since this was last asked."""
        return GraphCounts() if self._graphs is None else self._graphs.take_counts()

    def drop(self) -> None:
        """Let recordings go; their memory goes back."""
        if self._graphs is not None:
            self._graphs.drop()

    @property
    def row_interval(self) -> int:
        """Rows, or tokens, to a multiple of which steps are padded where they are padded."""
        return self._config.q_padding_interval_size or DEFAULT_ROW_INTERVAL

    def _sizes(self, page_size: int, position_limit: int) -> GraphSizes:
        rules = self._backend.run_rules
        return GraphSizes(
            row_interval=self.row_interval,
            key_interval=self._config.kv_padding_interval_size or DEFAULT_KEY_INTERVAL,
            page_size=page_size,
            position_limit=position_limit,
            max_decode_pages=None if rules is None else rules.max_decode_pages,
        )

    def _around(self, cache: KVCache) -> Surroundings:
        view = self._compiled.get(True, self._view)
        return Surroundings(view, self._plan, cache, self._backend, cache.epoch)

    def _asking(self) -> list[str]:
        """The settings that ask for recordings, rather than leaving them to us."""
        config, names = self._config, ["use_async_batching"]
        if config.cuda_graphs is None:
            names += ["q_padding_interval_size", "kv_padding_interval_size"]
        elif any(config.cuda_graphs):
            names.append("use_cuda_graph")
        values = dataclasses.asdict(config)
        return [f"{name}={values[name]}" for name in names if values[name]]

    def _why_not_recorded(self, recorder: GraphBackend | None) -> str | None:
        """Why decode-only steps are not recorded; ``None`` when they are."""
        config, backend, decode = self._config, self._backend, self._compilation.decode
        device = self._plan.layout.device
        if recorder is None:
            return f"nothing can be recorded on {device}"
        if self._num_ranks > 1:
            return f"the {self._num_ranks} ranks of a divided model would all have to record alike"
        if config.cuda_graphs is not None and not config.cuda_graphs[1]:
            return "only steps with prompts were asked for, which are never recorded"
        if not backend.is_recordable:
            return f"attention {backend.name!r} cannot be recorded"
        if decode is not None and decode.records_graphs:
            return f"torch.compile records graphs of its own in mode {decode.mode!r}"
        if not self._asking() and backend.needs_masks:
            return f"attention {backend.name!r} needs masks, which suffer from padding"
        return None

    def _check_recording(self) -> None:
        """Go on without recordings if one failed: the step itself was run."""
        graphs = self._graphs
        if graphs is not None and graphs.failure is not None:
            reason = graphs.failure
            self._tell(
                f"use_cuda_graph={self._config.use_cuda_graph}: a decode step could not be recorded, steps "
                f"run without from here on: {type(reason).__name__}: {reason}"
            )
            graphs.drop()
            self._graphs = None

    def _tell(self, message: str, level: int = logging.WARNING) -> None:
        """Log a sentence, the first time."""
        if message not in self._told:
            self._told.add(message)
            logger.log(level, message)


def _compiled(view: nn.Module, choice: CompileChoice) -> dict[bool, nn.Module]:
    """The view compiled for each kind of step, by whether it is decode-only."""
    compiled: dict[bool, nn.Module] = {}
    if choice.varlen is not None:
        compiled[False] = choice.varlen.compile(view)
    if choice.decode is not None:
        same = choice.decode == choice.varlen
        compiled[True] = compiled[False] if same else choice.decode.compile(view)
    for kind, settings in (("with prompts", choice.varlen), ("of decoding rows", choice.decode)):
        if settings is not None:
            logger.info("steps %s are compiled with %s", kind, settings)
    return compiled
