"""The engine: requests in, completions with logprobs out, on the trainer's own weights.

A step is five calls in order: ``plan -> build -> forward -> draw -> commit``; with asynchronous batching
the first four of the next step come before the last of this one. Everything happens in the
caller's thread, under the caller's autocast. This room wires the others together and keeps the
promises that need all of them: a change of weights is noticed before a token is drawn, a request's
fault stays in that request, and nothing of the trainer's model is touched.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from rollout.compiled import is_compiling
from rollout.config import EngineConfig
from rollout.fused import fuse_layers, unfuse_layers
from rollout.meter import Meter
from rollout.native import chosen_kernels
from rollout.packing import PackedLinears
from rollout.parallel import Ranks, ranks_of
from rollout.probe import eos_token_ids, position_limit, probe, single_device
from rollout.requests import Prompt, Repeats, RequestBuilder, params_per_prompt, refused_completions
from rollout.results import Progress, RolloutBatch, raise_failures, warn_when_truncated
from rollout.runner import engine_mode, set_attention
from rollout.scoring import score_sequences
from rollout.sharding import shard_view
from rollout.stacked import stack_layers, unstack_layers
from rollout.stepper import Stepper
from rollout.types import (
    MAX_SEED,
    Completion,
    DuplicateRequestError,
    FinishReason,
    RankError,
    RolloutMetrics,
    SamplingParams,
    require_int,
)
from rollout.warmup import compile_steps
from rollout.weights import Change, WeightTracker, base_model_of

NO_BUDGET = 2**62
"""Bytes to offer where the model is not known yet."""

logger = logging.getLogger("rollout")


class RolloutEngine:
    """Continuous-batching generation on the parameters of a model that is being trained.

    Example::

        engine = RolloutEngine(model, tokenizer=tokenizer)
        batch = engine.generate(prompts, SamplingParams(max_new_tokens=64, n=8, seed=0))
        batch[0].token_ids, batch[0].policy_logprobs, batch.metrics.tokens_per_second
        optimizer.step()                      # noticed by itself at the next generate
        batch = engine.generate(prompts, SamplingParams(max_new_tokens=64, n=8, seed=1))

    The model's tensors are used in place; its modules, flags, hooks, config and dtype are never
    touched. Not thread-safe: one engine belongs to one thread.

    A model that transformers loaded with ``DistributedConfig(tp_size=N)`` has an engine on every rank, and
    every rank makes the same calls with the same arguments; all of them get the same completions.

    Args:
        model: a transformers causal LM or a PEFT model around one, unwrapped.
        tokenizer: needed for text and chat prompts and for stop strings.
        config: an :class:`EngineConfig`, a dict of its fields, or transformers'
            ``ContinuousBatchingConfig``.

    Raises:
        TypeError: the model is wrapped or not a transformers model.
        UnsupportedModelError: a layer cannot be served exactly; it is named.
        ValueError: a setting is wrong.
        RankError: ranks of a divided model were given different configs, or one is missing.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: EngineConfig | object = None,
    ) -> None:
        self.config = EngineConfig.from_any(config)
        self._model = model
        self._base = base_model_of(model)
        self._tokenizer = tokenizer
        self._packed = PackedLinears(False if is_compiling(self.config) else self.config.pack_weights)
        self._ranks = ranks_of(self._base, self.config.cpu_group_timeout)
        if self.config.use_async_batching and self._ranks.size > 1:
            raise ValueError(
                "use_async_batching=True launches a step before the tokens of the last one are known, and "
                f"the {self._ranks.size} ranks of this model share them in between; leave it at None"
            )
        self._stepper = Stepper(self.config, self._ranks, self._packed)
        seed = self._ranks.from_driver(_seed(self.config))
        self._requests = RequestBuilder(tokenizer, seed=seed, rank=self._ranks.noise_rank)
        self._finished: list[Completion] = []
        self._is_noticed = False  # whether a call has compared the weights before its first step
        self._weights = WeightTracker(model, prepare=self._prepare_view, agree=self._agree_on_change)
        self._is_probed = False
        self._device = single_device(model)
        self._autocast: torch.dtype | None = None
        # but for the seed, which may be a random one: the driver's counts
        self._ranks.note("RolloutEngine(config)", replace(self.config, seed=0).changed())
        with engine_mode(), self._ranks.lockstep():
            self._weights.update()
            self._stepper.enter_version(self.weight_version)
            # ranks plan alike only if their pages are: their backends and their shards must be
            self._ranks.note("pages", self._stepper.cache.page_size, self._stepper.plan.layout.page_bytes(1))
            self._meet("building the engine")

    @property
    def model(self) -> nn.Module:
        """The model that was given, whose tensors are used."""
        return self._model

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self._device

    @property
    def ranks(self) -> Ranks:
        """The ranks that compute this model together; one unless it is divided."""
        return self._ranks

    @property
    def position_limit(self) -> int:
        """Tokens of a sequence, prompt included, at the most."""
        return self._requests.position_limit

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; raises as :meth:`add_request` does."""
        return self._requests.encode(prompt)

    @property
    def weight_version(self) -> int:
        """Version of the weights seen last: 0 at construction, one more at each change."""
        return self._weights.version

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has something to do or to return."""
        return bool(
            self._stepper.scheduler.has_work or self._stepper.scheduler.has_finished or self._finished
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes that the key/value cache takes now."""
        return self._stepper.cache.num_bytes

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_error: str = "raise",
    ) -> RolloutBatch:
        """Complete every prompt and return ``sum(n)`` completions in input order.

        Args:
            prompts: token ids, strings or chat messages, one entry per prompt.
            params: one for all prompts, or one per prompt.
            progress: show a progress bar over completions.
            on_error: ``"raise"`` or ``"return"``: what to do when a request failed. Either way
                all others are finished first.

        Raises:
            RolloutError: a request failed and ``on_error="raise"``; ``.batch`` holds everything.
            TypeError, ValueError: the call itself is wrong (not one request of it).
            RankError: ranks of a divided model made different calls, or one is missing.
        """
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error={on_error!r}; allowed: 'raise', 'return'")
        all_params = params_per_prompt(prompts, params)
        self._stepper.meter = Meter()
        with self._stepper.meter.stage("weights"):
            self._notice_weights(thorough=True)
        self._is_noticed = True  # the first step need not look again
        wanted: list[tuple[str, int]] = []
        done: dict[str, list[Completion]] = {}
        try:
            self._submit_all(prompts, all_params, wanted, done)
            self._finish_all(wanted, done, progress)
        except BaseException:
            for request_id, _ in wanted:
                self.cancel_request(request_id)
            ours = {request_id for request_id, _ in wanted}
            self._finished = [c for c in self.take_finished() if c.request_id not in ours]
            raise
        finally:
            self._is_noticed = False
            torch.clear_autocast_cache()
        completions = [c for request_id, _ in wanted for c in sorted(done[request_id], key=lambda c: c.index)]
        batch = RolloutBatch(tuple(completions), self._metrics(completions, len(wanted)))
        raise_failures(batch, on_error)
        warn_when_truncated(batch)
        return batch

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> str:
        """Queue one prompt; :meth:`step` works on it. Returns its id.

        Raises:
            DuplicateRequestError: a live request has this id.
            TypeError, ValueError: the request can never be served; the message says why.
        """
        return self._submit(prompt, params or SamplingParams(), request_id, None)

    def cancel_request(self, request_id: str, index: int | None = None) -> bool:
        """End a request now, or its sample ``index`` alone, keeping what it generated; the next :meth:`step`
        returns it.

        Returns whether a live request had this id. Unknown and finished ids are no error.
        """
        if not self._stepper.scheduler.is_live(request_id):
            return False
        self._ranks.note(f"cancel_request({request_id!r}, {index})")
        chosen = [s for s in self._stepper.scheduler.live(request_id) if index is None or s.index == index]
        self._stepper.scheduler.finish_all(chosen, FinishReason.CANCELLED)
        return True

    def progress(self, request_ids: Container[str]) -> dict[str, list[Progress]]:
        """What the running samples of these requests have so far; those that wait have no entry."""
        found: dict[str, list[Progress]] = {}
        for s in self._stepper.scheduler.running:
            if s.request.request_id in request_ids:
                each = Progress(s.index, s.generated_ids, tuple(s.logprobs), tuple(s.policy_logprobs))
                found.setdefault(s.request.request_id, []).append(each)
        return found

    def step(self, *, thorough: bool = False) -> list[Completion]:
        """Run one step and return the completions that ended since the last call.

        Args:
            thorough: compare the weights' contents first, as is done anyway when nothing runs. Between
                steps with requests in flight only a glance is taken, which misses what ``.data`` and
                fused optimizers write.

        A failure of the step itself ends every live request with ``finish_reason="error"``, the
        cause chained to each; the engine can be used again, unless it is one of several ranks.

        Raises:
            RankError: ranks of a divided model made different calls, or one is missing.
        """
        try:
            self._advance(thorough=thorough)
        finally:
            torch.clear_autocast_cache()
        return self.take_finished()

    def take_finished(self) -> list[Completion]:
        """The completions that ended since the last call or :meth:`step`, without another step."""
        completions = self._finished + [s.completion() for s in self._stepper.scheduler.take_finished()]
        self._finished = []
        return completions

    def refresh_weights(self) -> int:
        """Start a new weight version without looking for a change. Returns it."""
        self._ranks.note("refresh_weights()")
        with engine_mode(), self._ranks.lockstep():
            self._weights.refresh()
            self._enter_version()
        return self.weight_version

    def add_refresh_hook(self, hook: Callable[[int], None]) -> Callable[[], None]:
        """Call ``hook(version)`` whenever a new weight version starts; returns its remover."""
        return self._weights.add_hook(hook)

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> list[tuple[float, ...]]:
        """Teacher-forced ``policy_logprobs`` of given completions, through the generating path.

        Args:
            prompts: one per completion.
            completions: token ids.
            temperature: divides the logits; 0 is taken as 1.

        Raises:
            TypeError, ValueError: a prompt or completion is empty, too long, or not of this model.
        """
        if self._ranks.size > 1:
            self._ranks.note(
                "score()", [*map(self.encode, prompts)], [*map(self.encode, completions)], temperature
            )
        with engine_mode():
            self._notice_weights(thorough=True)
            scores = score_sequences(
                self._weights.view,
                self._stepper.plan,
                self._stepper.backend,
                self._requests,
                prompts,
                completions,
                temperature,
            )
        return self._ranks.from_driver(scores)

    def warmup(self, *, num_requests: int | None = None, num_tokens: int | None = None) -> None:
        """Compile and record what the settings ask for before the first request comes.

        Where decode steps are recorded, the cache is made as large as so many sequences need, within
        its bound: recordings hold its addresses, so growing later would drop them. Where nothing is
        compiled or recorded, as by default on a CPU, this does nothing.

        Args:
            num_requests: sequences that will run together; ``None`` for ``max_requests_per_batch``.
            num_tokens: tokens of a sequence at the most, its prompt included; ``None`` for the model's limit.
        """
        rows, tokens = self.config.resolved_max_requests, self.position_limit
        if num_requests is not None:
            require_int("num_requests", num_requests, low=1)
            rows = min(rows, num_requests)
        if num_tokens is not None:
            require_int("num_tokens", num_tokens, low=1)
            tokens = min(tokens, num_tokens)
        executor = self._stepper.executor
        if not (executor.is_compiling or executor.is_recording):
            logger.info("warmup has nothing to do: no step is compiled or recorded on %s", self._device)
            return
        started = time.perf_counter()
        self._ranks.note("warmup()", rows, tokens)
        with engine_mode(), self._ranks.lockstep():
            self._notice_weights(thorough=False)
            compiled = compile_steps(executor, self._stepper.cache, self.config, self.position_limit, rows)
            params = SamplingParams(max_new_tokens=max(1, tokens - 1), n=rows)
            recorded = self._stepper.record(self._requests.build([0], params))
            executor.take_counts()  # told here, and no call's
        seconds = time.perf_counter() - started
        logger.info("warmup: %d steps compiled, %d recorded in %.1f s", compiled, recorded, seconds)

    def release_memory(self) -> None:
        """Give the cache and derived copies back (before a backward pass, say).

        The next step takes memory again. Requests in flight are kept and computed again.
        """
        if any(self._stepper.cache.num_pages):
            self._ranks.note("release_memory()")
        self._stepper.release()
        self._packed.release()

    def synchronize(self) -> None:
        """Wait for a step that was launched ahead, before weights are written from another stream."""
        self._stepper.synchronize()

    def check(self) -> None:
        """Audit the page books; raises AssertionError. For tests and idle time."""
        self._stepper.scheduler.check()

    def _submit(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, repeats: Repeats | None
    ) -> str:
        request = self._requests.build(prompt, params, request_id, repeats)
        if self._stepper.scheduler.is_live(request.request_id):
            raise DuplicateRequestError(
                f"request_id={request.request_id!r} is live; wait until it has ended or choose another id"
            )
        self._stepper.capacity.refuse_unfit(request)
        self._ranks.note_request(request)
        self._requests.accept(request)
        self._stepper.add(self._requests.samples(request, len(self._stepper.plan.layout.groups)))
        return request.request_id

    def _submit_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        wanted: list[tuple[str, int]],
        done: dict[str, list[Completion]],
    ) -> None:
        """Queue every prompt; a refused one is done at once, with its error."""
        repeats: Repeats = Counter()
        for prompt, each in zip(prompts, params, strict=True):
            try:
                request_id = self._submit(prompt, each, None, repeats)
            except (ValueError, TypeError) as error:
                request_id = f"refused-{len(wanted)}"
                done[request_id] = refused_completions(request_id, prompt, each.n, error)
            wanted.append((request_id, each.n))

    def _finish_all(
        self, wanted: list[tuple[str, int]], done: dict[str, list[Completion]], progress: bool
    ) -> None:
        """Step until all wanted completions are there; those of others wait for the next step()."""
        ours = {request_id: n for request_id, n in wanted if request_id not in done}
        missing = sum(ours.values())
        others: list[Completion] = []
        with tqdm(total=missing, disable=not (progress and self._ranks.is_driver), unit="seq") as bar:
            try:
                while missing:
                    self._advance()
                    for completion in self.take_finished():
                        if completion.request_id in ours:
                            done.setdefault(completion.request_id, []).append(completion)
                            missing -= 1
                            bar.update()
                        else:
                            others.append(completion)
            finally:
                self._finished += others

    def _advance(self, *, thorough: bool = False) -> None:
        """One step; whatever goes wrong in it leaves the books balanced."""
        with engine_mode():
            try:
                with self._ranks.lockstep():
                    self._look_and_step(thorough)
            except RankError as apart:  # nothing more can come of this engine
                self._stepper.fail(apart)
                raise
            except Exception as cause:
                error = RuntimeError(f"the step failed with {type(cause).__name__}: {cause}")
                error.__cause__ = cause
                self._stepper.fail(error)
            except BaseException:  # interrupted
                self._stepper.interrupt()
                raise

    def _look_and_step(self, thorough: bool) -> None:
        with self._stepper.meter.stage("weights"):
            # a look at the contents where nothing runs yet: that may be long after the last
            is_due = not (self._is_noticed or self._stepper.scheduler.running)
            self._notice_weights(thorough=thorough or is_due)
        self._is_noticed = False
        self._stepper.step()

    def _notice_weights(self, *, thorough: bool) -> None:
        """Enter a new version if weights, modules or the caller's autocast changed.

        Thorough compares contents; else only a glance is taken, as between the steps of a call.
        """
        with engine_mode(), self._ranks.lockstep():
            seems_changed = not thorough and self._weights.seems_changed()
            seems_changed = bool(
                self._meet(f"a step under autocast={_current_autocast(self._device)}", seems_changed)
            )
            if not self._is_probed or self._autocast != _current_autocast(self._device):
                with self._packed.trial(self._weights.next_version):
                    self._probe_view(self._weights.view)
                    self._weights.refresh()
                self._enter_version()
            elif (thorough or seems_changed) and self._weights.update():
                self._enter_version()

    def _meet(self, doing: str, level: int = 0) -> int:
        """Wait for the other ranks, if there are any; the highest ``level`` of all. Settles the budget."""
        stepper = self._stepper
        offer = stepper.capacity.offer() if stepper.is_ready else NO_BUDGET
        level, budget = self._ranks.meet(doing, level, offer)
        if stepper.is_ready:
            stepper.capacity.settle(budget)
        return level

    def _agree_on_change(self, change: Change) -> Change:
        return Change(self._meet("a look at the weights", change))

    def _enter_version(self) -> None:
        """Let go of all that belongs to older weights, then tell the hooks."""
        torch.clear_autocast_cache()  # autocast keeps casts of weights as long as it is entered
        self._packed.version = self.weight_version
        self._stepper.enter_version(self.weight_version)
        self._weights.run_hooks()

    def _prepare_view(self, view: nn.Module) -> None:
        """Make a new view ready, or refuse it."""
        with self._packed.trial(self._weights.next_version):
            shard_view(view, self._model, self._ranks)
            set_attention(view)
            kernels = chosen_kernels(self.config.native_kernels, single_device(self._model))
            self._packed.install(view, None if kernels is None else kernels.products)
            self._probe_view(view)

    def _probe_view(self, view: nn.Module) -> None:
        """Find out what the view needs; its layers, vocabulary or device may differ from before."""
        self._is_probed = False  # until it is done: what was refused is looked at again
        device = single_device(self._model)
        config = self._base.config.get_text_config()
        autocast = _current_autocast(device)
        kernels = chosen_kernels(self.config.native_kernels, device)
        unstack_layers(view)
        unfuse_layers(view)  # what agreed under another autocast need not agree under this one
        with self._packed.watching():
            plan = probe(view, config, device)
        limit = position_limit(config)
        if kernels is not None and not self._stepper.executor.is_compiling:
            fuse_layers(view, kernels, device, limit)
            stack_layers(view, kernels, self._packed, device)
        self._stepper.renew(view, plan, kernels, limit, self.weight_version)
        self._requests.renew(
            vocab_size=plan.vocab_size,
            position_limit=limit,
            eos_ids=eos_token_ids(self._base, self._tokenizer),
        )
        self._device, self._autocast, self._is_probed = device, autocast, True

    def _metrics(self, completions: Sequence[Completion], num_requests: int) -> RolloutMetrics:
        return self._stepper.meter.metrics(
            completions,
            num_requests=num_requests,
            weight_version=self.weight_version,
            num_pages=sum(self._stepper.cache.num_pages),
            cache_bytes=self._stepper.cache.num_bytes,
            derived_bytes=self._packed.num_bytes,
        )


def _current_autocast(device: torch.device) -> torch.dtype | None:
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _seed(config: EngineConfig) -> int:
    """The config's seed, else torch's: random, or what ``set_seed`` of the trainer made of it. Looking it
    up draws nothing from the global generator."""
    return torch.initial_seed() % MAX_SEED if config.seed is None else config.seed
