"""``attach(model)``: transformers' entry points to continuous batching, served by this engine.

``attach`` puts four functions on the instance, under transformers' names: ``generate_batch``,
``init_continuous_batching``, ``continuous_batching_context_manager`` and
``destroy_cached_continuous_batching_manager``. Nothing else of the model is touched; ``detach`` takes
them away again.
"""

import copy
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rollout.config import EngineConfig
from rollout.engine import RolloutEngine
from rollout.generation_config import params_from, refuse_others
from rollout.manager import ContinuousBatchingManager, Defaults
from rollout.outputs import GenerationOutput
from rollout.requests import Prompt
from rollout.types import MAX_SEED, RolloutError, SamplingParams
from rollout.weights import base_model_of

NAMES = (
    "generate_batch",
    "init_continuous_batching",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
)


def attach(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> nn.Module:
    """Let ``model``'s continuous batching be this engine's. Returns the model.

    A copy of the model (``copy.deepcopy``) is attached, too, with an engine of its own.

    Example::

        rollout.attach(model)
        outputs = model.generate_batch([[1, 2, 3]], max_new_tokens=16)

    Raises:
        ValueError: it is attached already.
    """
    if NAMES[0] in vars(model):
        raise ValueError("the model is attached already; detach(model) first")
    attachment = _Attachment(model, tokenizer)
    for name, function in (
        (NAMES[0], attachment.generate_batch),
        (NAMES[1], attachment.init_continuous_batching),
        (NAMES[2], attachment.continuous_batching_context_manager),
        (NAMES[3], attachment.destroy_cached_continuous_batching_manager),
    ):
        setattr(model, name, function)
    return model


def detach(model: nn.Module) -> nn.Module:
    """Give ``model`` its own methods back; managers that run are stopped. Returns the model.

    Raises:
        ValueError: it is not attached.
    """
    if NAMES[0] not in vars(model):
        raise ValueError("the model is not attached")
    vars(model)[NAMES[0]].__self__.close()
    for name in NAMES:
        delattr(model, name)
    return model


class _Attachment:
    """What the functions on a model share: its engine and the manager that is kept.

    An engine belongs to one thread, so no two managers that are not destroyed have the same one.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._engine: RolloutEngine | None = None
        self._manager: ContinuousBatchingManager | None = None
        self._num_engines = 0
        self._managers: weakref.WeakSet[ContinuousBatchingManager] = weakref.WeakSet()
        self._lock = threading.RLock()  # over who has which engine
        self._batch_lock = threading.Lock()  # batches of several threads go one after the other

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Attachment":
        return _Attachment(copy.deepcopy(self._model, memo), self._tokenizer)

    def __reduce__(self) -> tuple[Any, ...]:  # a pickled model takes no engine along
        return (_Attachment, (self._model, self._tokenizer))

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> ContinuousBatchingManager:
        """A manager on the model's engine; the one that was kept for the next session, if there is one.

        ``workload_hints`` have no effect here: the cache grows to what the requests need.
        """
        with self._lock:
            kept = self._manager
            if kept is not None and kept.is_running():
                kept = None  # in somebody's use; this is to be another session
            elif kept is not None and continuous_batching_config is not None:
                if not _has_config(kept.engine, _wanted(continuous_batching_config)):
                    kept.destroy()
                    kept = self._manager = None
            if kept is None:
                return self._new_manager(generation_config, continuous_batching_config)
            if generation_config is not None:
                kept.use_defaults(self._defaults(kept.engine, generation_config))
            return kept

    def _new_manager(
        self,
        generation_config: GenerationConfig | None,
        config: Any,
        max_queue_size: int | None = None,
    ) -> ContinuousBatchingManager:
        with self._lock:
            engine = self._engine_for(config)
            defaults = self._defaults(engine, generation_config)
            manager = ContinuousBatchingManager(engine, defaults, max_queue_size=max_queue_size)
            self._managers.add(manager)
            return manager

    def _defaults(self, engine: RolloutEngine, generation_config: GenerationConfig | None) -> Defaults:
        chosen = self._generation_config(generation_config)
        refuse_others(chosen)

        def defaults(prompt: Prompt, max_new_tokens: int | None) -> SamplingParams:
            try:
                prompt_len = len(engine.encode(prompt))
            except (TypeError, ValueError):
                prompt_len = 0  # the engine will refuse it, as this request's own failure
            return params_from(
                chosen,
                prompt_len=prompt_len,
                position_limit=engine.position_limit,
                device=engine.device,
                max_new_tokens=max_new_tokens,
            )

        return defaults

    @contextmanager
    def continuous_batching_context_manager(
        self,
        generation_config: GenerationConfig | None = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: Any = None,
        persistent_manager: bool = False,
        warmup: bool = True,
        workload_hints: Any = None,
    ) -> Iterator[ContinuousBatchingManager]:
        """A manager that runs inside the block; ``persistent_manager`` keeps it for the next one.

        ``warmup`` compiles and records what the settings ask for, before the first request, and where
        steps are recorded takes a cache for them; by default on the CPU that is nothing.
        ``workload_hints`` tell it how many requests of what length, else it expects the most.
        """
        with self._lock:
            manager = self.init_continuous_batching(generation_config, continuous_batching_config)
            if warmup:
                manager.warmup(**_expected_work(workload_hints))
            manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=block, timeout=timeout, keep_for_next_session=persistent_manager)
            with self._lock:
                if persistent_manager:
                    self._manager = manager
                else:
                    self._forget(manager)

    def _forget(self, manager: ContinuousBatchingManager) -> None:
        manager.destroy()
        if self._manager is manager:
            self._manager = None

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Destroy the manager that was kept, if there is one; memory that was kept goes back."""
        with self._lock:
            if self._manager is not None:
                self._forget(self._manager)
            if self._engine is not None and not self._is_taken(self._engine):
                self._engine.release_memory()

    def close(self) -> None:
        """End every manager and give the memory back."""
        for manager in list(self._managers):
            self._forget(manager)
        self.destroy_cached_continuous_batching_manager()

    def generate_batch(
        self,
        inputs: Sequence[Prompt],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        on_error: str = "raise",
        max_new_tokens: int | None = None,
    ) -> dict[str, GenerationOutput]:
        """Complete every prompt; outputs by id in input order, children before their parent.

        Works in the calling thread, so under its autocast. With ``persistent_manager`` the cache's
        memory is kept for the next call. ``warmup`` changes nothing: the call waits for its results, so
        steps are compiled and recorded when their sizes first come.

        Raises:
            RolloutError: a request failed and ``on_error="raise"``; ``.batch`` holds all outputs.
            ValueError: a config asks for what is not offered, a prompt has ``max_length`` tokens, or
                ``on_error`` is neither value. Nothing is generated then.
        """
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error={on_error!r}; allowed: 'raise', 'return'")
        if not inputs:
            return {}
        n = self._generation_config(generation_config).num_return_sequences or 1
        outputs: dict[str, GenerationOutput] = {}
        with self._batch_lock:
            # all are queued before the first is taken
            manager = self._new_manager(generation_config, continuous_batching_config, max_queue_size=0)
            try:
                ids = manager.add_requests(
                    inputs, max_new_tokens=max_new_tokens, record_timestamps=record_timestamps
                )
                with tqdm(total=len(ids) * n, disable=not progress_bar, unit="request") as bar:
                    for output in manager.run_here():
                        outputs[output.request_id] = output
                        bar.update()
            finally:
                manager.destroy(keep_memory=persistent_manager)
        order = [key for each in ids for key in (*(f"{each}__child#{i}" for i in range(n - 1)), each)]
        ordered = {key: outputs[key] for key in order}
        failed = [key for key, output in ordered.items() if output.error is not None]
        if failed and on_error == "raise":
            raise RolloutError(
                f"{len(failed)} of {len(ordered)} outputs failed, first {failed[0]}: "
                f"{ordered[failed[0]].error}; .batch holds all, on_error='return' gives them",
                ordered,
            )
        return ordered

    def _engine_for(self, config: Any) -> RolloutEngine:
        """The engine; another one when another config is asked for, or a manager has it."""
        wanted = _wanted(config)
        if self._engine is None or not _has_config(self._engine, wanted) or self._is_taken(self._engine):
            if wanted.seed is None:  # another engine of this model must not draw the same again
                wanted = replace(wanted, seed=(torch.initial_seed() + self._num_engines) % MAX_SEED)
            self._engine = RolloutEngine(self._model, tokenizer=self._tokenizer, config=wanted)
            self._num_engines += 1
        return self._engine

    def _is_taken(self, engine: RolloutEngine) -> bool:
        return any(m.engine is engine and not m.is_destroyed for m in list(self._managers))

    def _generation_config(self, given: GenerationConfig | None) -> GenerationConfig:
        if given is not None:
            return given
        return base_model_of(self._model).generation_config or GenerationConfig()


def _wanted(config: Any) -> EngineConfig:
    """The config that was asked for; without a seed of its own it follows torch's, as there."""
    if config is None or isinstance(config, Mapping):
        config = {"seed": None, **(config or {})}
    return EngineConfig.from_any(config)


def _has_config(engine: RolloutEngine, wanted: EngineConfig) -> bool:
    """Whether the engine was made for this config; one without a seed is content with any."""
    config = engine.config if wanted.seed is not None else replace(engine.config, seed=None)
    return config == wanted


def _expected_work(hints: Any) -> dict[str, int]:
    """What transformers' ``WorkloadHints`` say of requests to come, for ``warmup``; 0 says nothing."""
    if hints is None:
        return {}
    work = {
        "num_requests": hints.num_requests,
        "num_tokens": hints.max_prompt_length + hints.max_generated_length,
    }
    return {name: count for name, count in work.items() if count > 0}
