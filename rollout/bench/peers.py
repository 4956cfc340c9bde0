"""Who generates: this engine, transformers' continuous batching, transformers' ``generate``.

Each gets its best setting of a few, found on a shortened workload, and no more work than asked: the
peers compute no logprobs, the engine always does.
"""

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from rollout.bench.workloads import Workload
from rollout.engine import RolloutEngine
from rollout.types import RolloutMetrics, SamplingParams

WARM_UP_TOKENS, WARM_UP_REQUESTS = 4, 16
CHOOSING_FACTOR, CHOOSING_PROMPT_TOKENS = 4, 2**14
"""A peer's setting is chosen on the first requests that have so many prompt tokens together, at a fourth of
their lengths."""
PAGE_SIZES = (32, 256)
MOST_REQUESTS = (32, 64)
"""Requests that transformers may batch, besides all: its attention on a CPU takes each row over the keys of
all rows, so that fewer at once may be faster."""
OMP_PAUSE_HARD = 2
"""``omp_pause_hard`` of OpenMP 5.0: threads are given up, too."""
BATCH_SIZES = (16, 64, 128)
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
FACTOR = 1.01  # changes the bits of nearly every weight, in bf16 too


class Peer(Protocol):
    """Something that generates a workload."""

    @property
    def setting(self) -> str:
        """What was chosen for it."""

    def wake(self) -> None:
        """Get ready to run, outside of what is timed."""

    def run(self, workload: Workload) -> float:
        """Generate the workload; returns the seconds that generating took.

        Raises:
            RuntimeError: it generated something else than was asked.
        """

    def rest(self) -> None:
        """Leave the machine to the others. A thread that merely exists is in their way: with more
        threads than cores OpenMP puts idle workers to sleep at once, and waking them costs every
        operator of every peer some 20 us (measured: a step of 2 rows takes twice as long; transformers'
        continuous batching does 178 tokens a second beside the idle workers of the main thread, else 220)."""

    def close(self) -> None:
        """Give back what was taken."""


@dataclass
class WeightChanges:
    """Changes a model's weights in place between rollouts, and back again."""

    model: PreTrainedModel
    is_changed: bool = False

    @torch.no_grad()
    def change(self) -> None:
        """Every weight, by a factor near 1."""
        for parameter in self.model.parameters():
            parameter.mul_(1 / FACTOR if self.is_changed else FACTOR)
        self.is_changed = not self.is_changed


def timed_rollouts(workload: Workload, changes: WeightChanges, rollout: Callable[[], int]) -> float:
    """Seconds in ``rollout`` over the workload's rollouts; it returns the tokens it generated."""
    seconds, tokens = 0.0, 0
    for i in range(workload.num_rollouts):
        if i > 0:
            changes.change()
        started = time.perf_counter()
        tokens += rollout()
        seconds += time.perf_counter() - started
    if tokens != workload.num_tokens:
        raise RuntimeError(f"{tokens} tokens were generated, {workload.num_tokens} were asked")
    return seconds


class EnginePeer:
    """This engine, made once and kept. Each sample is a request of its own: lengths differ.

    The weights change before each run, as they do between rollouts of a training: what is kept of earlier
    prompts is of no use, and noticing the change and deriving copies is in the time.
    """

    def __init__(self, model: PreTrainedModel, settings: Mapping[str, Any] | None = None) -> None:
        self._engine = RolloutEngine(model, config=dict(settings or {}))
        self.setting = ", ".join(f"{k}={v}" for k, v in (settings or {}).items()) or "defaults"
        self._changes = WeightChanges(model)
        self._seed = 0
        self.metrics: list[RolloutMetrics] = []
        """Of the rollouts of the last run."""

    def wake(self) -> None:
        """See :class:`Peer`."""
        self._changes.change()

    def rest(self) -> None:
        """See :class:`Peer`."""

    def run(self, workload: Workload) -> float:
        """See :class:`Peer`."""
        self.metrics = []
        return timed_rollouts(workload, self._changes, lambda: self._rollout(workload))

    def _rollout(self, workload: Workload) -> int:
        self._seed += 1
        prompts = [list(prompt) for prompt, _, _ in workload.requests]
        params = [replace(p, seed=self._seed * 1000 + i) for _, i, p in workload.requests]
        self.metrics.append(self._engine.generate(prompts, params).metrics)
        return self.metrics[-1].generated_tokens

    def close(self) -> None:
        """See :class:`Peer`."""
        self._engine.release_memory()


class TransformersPeer:
    """transformers' continuous batching; its manager is kept over the rollouts of a round."""

    def __init__(self, model: PreTrainedModel, workload: Workload) -> None:
        self._model, self._changes = model, WeightChanges(model)
        self._attention = model.config._attn_implementation
        kinds = [dict(kind) for kind in {_kind(params) for _, _, params in workload.requests}]
        # settings that differ go with each request; it knows only those whose common value does something
        self._own = {name for name in NEUTRAL if len({kind[name] for kind in kinds}) > 1}
        self._common = NEUTRAL | {k: v for kind in kinds for k, v in kind.items() if v != NEUTRAL[k]}
        self._manager: Any = None
        # few requests: it computes a prompt for each of its samples, which takes minutes for long ones
        self._short = workload.shortened(WARM_UP_TOKENS, WARM_UP_REQUESTS)
        self.page_size, self.most_requests = PAGE_SIZES[0], None
        choosing = workload.scaled_down(CHOOSING_FACTOR, CHOOSING_PROMPT_TOKENS)
        limits = [most for most in MOST_REQUESTS if most < len(choosing.requests)]
        try:
            self.page_size = _best(PAGE_SIZES, self._use_page_size, self.run, choosing)
            self.most_requests = _best((None, *limits), self._use_most_requests, self.run, choosing)
        finally:
            self.close()  # its thread would keep the process alive

    @property
    def setting(self) -> str:
        """See :class:`Peer`."""
        most = "" if self.most_requests is None else f", max_requests_per_batch={self.most_requests}"
        return f"page_size={self.page_size}{most}"

    def wake(self) -> None:
        """See :class:`Peer`."""
        release_idle_threads()  # of this thread: the peer's operators run in another one
        self._start()
        self.run(self._short)  # makes its cache

    def rest(self) -> None:
        """See :class:`Peer`."""
        self.close()

    def _use_page_size(self, page_size: int) -> None:
        self.page_size = page_size
        self.wake()

    def _use_most_requests(self, most: int | None) -> None:
        self.most_requests = most
        self.wake()

    def _start(self) -> None:
        self.close()
        self._manager = self._model.init_continuous_batching(  # type: ignore[operator]
            generation_config=GenerationConfig(
                do_sample=True, eos_token_id=-1, pad_token_id=0, **self._common
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=self.page_size,
                max_requests_per_batch=self.most_requests,
                max_memory_percent=0.2,
                per_request_processors=bool(self._own),
                drop_unsupported_processors=False,  # it must draw as it was asked
            ),
        )
        self._manager.start()

    def run(self, workload: Workload) -> float:
        """See :class:`Peer`."""
        return timed_rollouts(workload, self._changes, lambda: self._rollout(workload))

    def _rollout(self, workload: Workload) -> int:
        for prompt, _, params in workload.requests:
            own = {name: value for name, value in _kind(params) if name in self._own}
            self._manager.add_request(
                list(prompt), max_new_tokens=params.max_new_tokens, eos_token_id=-1, **own
            )
        tokens, expected = 0, len(workload.requests)
        while expected:
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped before it was done")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
                tokens += len(result.generated_tokens)
                expected -= 1
        return tokens

    def close(self) -> None:
        """Stop the manager's thread and put the model's attention back."""
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager = None
            self._model.config._attn_implementation = self._attention


class GeneratePeer:
    """``model.generate`` on static batches, padded on the left; a batch lasts as long as its longest.

    Rows of a batch share their parameters, so that mixed requests make smaller batches.
    """

    def __init__(self, model: PreTrainedModel, workload: Workload) -> None:
        self._model, self._changes = model, WeightChanges(model)
        self.batch_size = BATCH_SIZES[0]
        self.run(workload.shortened(WARM_UP_TOKENS, WARM_UP_REQUESTS))
        choosing = workload.scaled_down(CHOOSING_FACTOR, CHOOSING_PROMPT_TOKENS)
        sizes = [size for size in BATCH_SIZES if size < len(workload.requests)]
        self.batch_size = _best((*sizes, len(workload.requests)), self._use, self.run, choosing)

    @property
    def setting(self) -> str:
        """See :class:`Peer`."""
        return f"batch_size={self.batch_size}"

    def wake(self) -> None:
        """See :class:`Peer`."""

    def rest(self) -> None:
        """See :class:`Peer`."""

    def _use(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def run(self, workload: Workload) -> float:
        """See :class:`Peer`."""
        return timed_rollouts(workload, self._changes, lambda: self._rollout(workload))

    def _rollout(self, workload: Workload) -> int:
        by_kind: dict[Any, list[tuple[tuple[int, ...], SamplingParams]]] = {}
        for prompt, _, params in workload.requests:
            by_kind.setdefault(_kind(params), []).append((prompt, params))
        for kind, rows in by_kind.items():
            for start in range(0, len(rows), self.batch_size):
                self._generate(rows[start : start + self.batch_size], dict(kind))
        # what was generated beyond a row's own length is thrown away
        return sum(params.max_new_tokens for _, _, params in workload.requests)

    def _generate(self, rows: Sequence[tuple[tuple[int, ...], SamplingParams]], kind: dict[str, Any]) -> None:
        width = max(len(prompt) for prompt, _ in rows)
        ids = torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt, _ in rows])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in rows])
        longest = max(params.max_new_tokens for _, params in rows)
        out: Any = self._model.generate(  # type: ignore[operator]
            input_ids=ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            generation_config=GenerationConfig(
                do_sample=True, max_new_tokens=longest, eos_token_id=None, pad_token_id=0, **kind
            ),
        )
        if out.shape[1] != width + longest:
            raise RuntimeError(f"generate gave {out.shape[1] - width} tokens, {longest} were asked")

    def close(self) -> None:
        """See :class:`Peer`."""


def _kind(params: SamplingParams) -> tuple[tuple[str, float], ...]:
    """How tokens are drawn, in transformers' words."""
    return (
        ("temperature", float(params.temperature)),
        ("top_k", params.top_k or 0),
        ("top_p", float(params.top_p)),
    )


def release_idle_threads() -> None:
    """Give up the OpenMP workers of this thread; its next parallel operator makes new ones.

    Raises:
        RuntimeError: the process's OpenMP cannot, so that what runs in other threads would be held up.
    """
    try:
        pause = ctypes.CDLL(None).omp_pause_resource_all
    except AttributeError as error:
        raise RuntimeError("this process's OpenMP has no omp_pause_resource_all (OpenMP 5.0)") from error
    if pause(OMP_PAUSE_HARD) != 0:
        raise RuntimeError("OpenMP did not give up the workers of this thread")


Setting = TypeVar("Setting")


def _best(
    settings: Sequence[Setting],
    use: Callable[[Setting], None],
    run: Callable[[Workload], float],
    workload: Workload,
) -> Setting:
    """The setting under which the workload runs fastest."""
    if len(settings) == 1:
        return settings[0]
    seconds = []
    for setting in settings:
        use(setting)
        seconds.append(run(workload))
    return settings[seconds.index(min(seconds))]
