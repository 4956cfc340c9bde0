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

from rollout.ahead import Flight, carry_over, needs_ids, places_held
from rollout.attention import AttentionBackend, make_backend, page_size_for
from rollout.batch import build_batch
from rollout.capacity import CapacityPlanner
from rollout.commit import commit
from rollout.config import EngineConfig
from rollout.execution import StepExecutor
from rollout.fused import fuse_layers, unfuse_layers
from rollout.kv_cache import KVCache
from rollout.meter import Meter
from rollout.native import Kernels, chosen_kernels
from rollout.packing import PackedLinears
from rollout.parallel import Ranks, ranks_of
from rollout.probe import ModelPlan, eos_token_ids, position_limit, probe, single_device
from rollout.requests import Prompt, Repeats, RequestBuilder, params_per_prompt, refused_completions
from rollout.results import Progress, RolloutBatch, raise_failures, warn_when_truncated
from rollout.runner import engine_mode, set_attention
from rollout.sampling import SamplingRow, launch_draw
from rollout.scheduler import Scheduler
from rollout.scoring import score_sequences
from rollout.sequence import Request, StepPlan
from rollout.sequence import Sequence as Sample
from rollout.sharding import shard_view
from rollout.swap import SwapSpace
from rollout.tables import PageTables
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
        self._executor = StepExecutor(self.config)
        self._packed = PackedLinears(False if self._executor.is_compiling else self.config.pack_weights)
        self._ranks = ranks_of(self._base, self.config.cpu_group_timeout)
        if self.config.use_async_batching and self._ranks.size > 1:
            raise ValueError(
                "use_async_batching=True launches a step before the tokens of the last one are known, and "
                f"the {self._ranks.size} ranks of this model share them in between; leave it at None"
            )
        seed = self._ranks.from_driver(_seed(self.config))
        self._requests = RequestBuilder(tokenizer, seed=seed, rank=self._ranks.noise_rank)
        self._finished: list[Completion] = []
        self._meter = Meter()
        self._is_sized = False  # whether the cache was sized since the last request came
        self._is_noticed = False  # whether a call has compared the weights before its first step
        self._flight: Flight | None = None  # a step launched ahead, whose plan is not committed
        self._weights = WeightTracker(model, prepare=self._prepare_view, agree=self._agree_on_change)
        self._device = single_device(model)
        self._autocast: torch.dtype | None
        self._backend: AttentionBackend
        self._kernels: Kernels | None
        self._plan: ModelPlan
        self._cache: KVCache
        self._scheduler: Scheduler
        self._capacity: CapacityPlanner
        self._swap_bytes: int
        # but for the seed, which may be a random one: the driver's counts
        self._ranks.note("RolloutEngine(config)", replace(self.config, seed=0).changed())
        with engine_mode(), self._ranks.lockstep():
            self._weights.update()
            # ranks plan alike only if their pages are: their backends and their shards must be
            self._ranks.note("pages", self._cache.page_size, self._plan.layout.page_bytes(1))
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
        return bool(self._scheduler.has_work or self._scheduler.has_finished or self._finished)

    @property
    def cache_bytes(self) -> int:
        """Bytes that the key/value cache takes now."""
        return self._cache.num_bytes

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
        self._meter = Meter()
        with self._meter.stage("weights"):
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
        if not self._scheduler.is_live(request_id):
            return False
        self._ranks.note(f"cancel_request({request_id!r}, {index})")
        chosen = [s for s in self._scheduler.live(request_id) if index is None or s.index == index]
        self._scheduler.finish_all(chosen, FinishReason.CANCELLED)
        return True

    def progress(self, request_ids: Container[str]) -> dict[str, list[Progress]]:
        """What the running samples of these requests have so far; those that wait have no entry."""
        found: dict[str, list[Progress]] = {}
        for s in self._scheduler.running:
            if s.request.request_id in request_ids:
                each = Progress(s.index, s.generated_ids, tuple(s.logprobs), tuple(s.policy_logprobs))
                found.setdefault(s.request.request_id, []).append(each)
        return found

    def step(self) -> list[Completion]:
        """Run one step and return the completions that ended since the last call.

        A failure of the step itself ends every live request with ``finish_reason="error"``, the
        cause chained to each; the engine can be used again, unless it is one of several ranks.

        Raises:
            RankError: ranks of a divided model made different calls, or one is missing.
        """
        try:
            self._advance()
        finally:
            torch.clear_autocast_cache()
        return self.take_finished()

    def take_finished(self) -> list[Completion]:
        """The completions that ended since the last call or :meth:`step`, without another step."""
        completions = self._finished + [s.completion() for s in self._scheduler.take_finished()]
        self._finished = []
        return completions

    def refresh_weights(self) -> int:
        """Start a new weight version without looking for a change. Returns it."""
        self._ranks.note("refresh_weights()")
        with engine_mode(), self._ranks.lockstep():
            self._weights.refresh()
            self._enter_version()
        return self.weight_version

    def notice_weights(self) -> int:
        """Compare the weights' contents now, and start a new version if they changed. Returns the version.

        Between steps with requests in flight only a glance is taken, which misses what ``.data`` and fused
        optimizers write: call this after changing weights there.
        """
        self._notice_weights(thorough=True)
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
                self._plan,
                self._backend,
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
        if not (self._executor.is_compiling or self._executor.is_recording):
            logger.info("warmup has nothing to do: no step is compiled or recorded on %s", self._device)
            return
        started = time.perf_counter()
        self._ranks.note("warmup()", rows, tokens)
        with engine_mode(), self._ranks.lockstep():
            self._notice_weights(thorough=False)
            limit = self.position_limit
            compiled = compile_steps(self._executor, self._cache, self.config, limit, rows)
            recorded = self._record_steps(rows, tokens)
            self._executor.take_counts()  # told here, and no call's
        seconds = time.perf_counter() - started
        logger.info("warmup: %d steps compiled, %d recorded in %.1f s", compiled, recorded, seconds)

    def release_memory(self) -> None:
        """Give the cache and derived copies back (before a backward pass, say).

        The next step takes memory again. Requests in flight are kept and computed again.
        """
        if any(self._cache.num_pages):
            self._ranks.note("release_memory()")
        self._forget_flight()
        self._executor.drop()
        self._cache.release()
        self._is_sized = False
        self._capacity.renew()
        self._packed.release()
        self._scheduler.replace_tables(self._empty_tables(), self._empty_swap())

    def synchronize(self) -> None:
        """Wait for a step that was launched ahead, before weights are written from another stream."""
        if self._flight is not None and self._flight.draws is not None:
            self._flight.draws.wait()

    def check(self) -> None:
        """Audit the page books; raises AssertionError. For tests and idle time."""
        self._scheduler.check()

    def _submit(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, repeats: Repeats | None
    ) -> str:
        request = self._requests.build(prompt, params, request_id, repeats)
        if self._scheduler.is_live(request.request_id):
            raise DuplicateRequestError(
                f"request_id={request.request_id!r} is live; wait until it has ended or choose another id"
            )
        self._capacity.refuse_unfit(request)
        self._ranks.note_request(request)
        self._requests.accept(request)
        self._scheduler.add(self._requests.samples(request, len(self._plan.layout.groups)))
        self._is_sized = False
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

    def _advance(self) -> None:
        """One step; whatever goes wrong in it leaves the books balanced."""
        with engine_mode():
            try:
                with self._ranks.lockstep():
                    self._look_and_step()
            except RankError as apart:  # nothing more can come of this engine
                self._scheduler.finish_all(self._scheduler.live(), FinishReason.ERROR, apart)
                raise
            except Exception as cause:
                self._forget_flight()
                error = RuntimeError(f"the step failed with {type(cause).__name__}: {cause}")
                error.__cause__ = cause
                self._scheduler.finish_all(self._scheduler.live(), FinishReason.ERROR, error)
                self._scheduler.tables.start_version(self.weight_version)
            except BaseException:  # interrupted: what was planned is not computed
                self._forget_flight()
                self._scheduler.change_weights(self.weight_version, "recompute")
                raise

    def _look_and_step(self) -> None:
        with self._meter.stage("weights"):
            # a look at the contents where nothing runs yet: that may be long after the last
            self._notice_weights(thorough=not (self._is_noticed or self._scheduler.running))
        self._is_noticed = False
        self._step()

    def _step(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            with self._meter.stage("schedule"):
                self._ensure_capacity()
                plan = self._scheduler.plan()
            if plan is None:
                return
            flight = self._launch(plan)
        self._scheduler.commit(flight.plan)
        try:
            if self._executor.is_ahead:
                self._flight = self._launch_ahead(flight)
        finally:  # whatever became of the next step, this one has been computed
            self._land(flight)

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        """The step after ``flight``, if it can be planned without its tokens."""
        running = self._scheduler.running
        if not self._is_sized or any(needs_ids(sequence.request.params) for sequence in running):
            return None
        with places_held(flight, self._requests.position_limit) as ending:
            with self._meter.stage("schedule"):
                plan = self._scheduler.plan_ahead(ending)
            return None if plan is None else self._launch(plan, flight)

    def _launch(self, plan: StepPlan, before: Flight | None = None) -> Flight:
        """Build, forward and draw; ``before`` is the flight whose tokens the plan has no numbers of."""
        self._meter.count_step(
            num_tokens=plan.num_tokens,
            pages_held=self._scheduler.tables.num_held,
            pages_saved=sum(transfer.num_pages for transfer in plan.saves),
            pages_loaded=sum(transfer.num_pages for transfer in plan.loads),
        )
        layout, is_recorded = self._plan.layout, self._executor.records(plan)
        with self._meter.stage("build"):
            batch = build_batch(
                plan,
                page_size=self._cache.page_size,
                windows=layout.windows,
                dtype=layout.dtype,
                device=torch.device("cpu") if is_recorded else self._device,
                masks=self._backend.needs_masks and not is_recorded,
                run_rules=None if is_recorded else self._backend.run_rules,
            )
            fill = None if before is None else carry_over(before, batch, self._plan.vocab_size)
        self._packed.take_seconds()  # those before were counted where they were spent
        with self._meter.stage("forward"):
            logits = self._executor.forward(batch, self._cache, fill)
        graphs = self._executor.take_counts()
        self._meter.count_graphs(recorded=graphs.recorded, replayed=graphs.replayed)
        self._meter.move(self._packed.take_seconds(), "forward", "weights")  # made when first used
        drawing = plan.drawing()
        with self._meter.stage("sample"):
            rows = [_sampling_row(sequence) for sequence in drawing]
            # logits of two ranks may differ in the last bit, so only one of them draws
            is_drawing = bool(drawing) and self._ranks.is_driver
            draws = launch_draw(logits, rows, batch.logit_rows, self._kernels) if is_drawing else None
        return Flight(plan=plan, drawing=tuple(drawing), draws=draws, version=self.weight_version)

    def _land(self, flight: Flight) -> None:
        """Read the tokens of a launched step and take them over."""
        with self._meter.stage("sample"):
            drawn = self._ranks.share_draws(flight.results, len(flight.drawing)) if flight.drawing else ()
        with self._meter.stage("commit"):
            limit = self._requests.position_limit
            late = commit(self._scheduler, flight.drawing, drawn, flight.version, limit)
            self._meter.count_discarded(late)
            if self._flight is not None and not self._scheduler.confirm(self._flight.plan):
                self._forget_flight()  # all of its sequences have ended

    def _forget_flight(self) -> None:
        """Throw away what was launched ahead: its tokens are drawn again where they are still wanted."""
        if self._flight is not None:
            self._meter.count_discarded(len(self._flight.drawing))
            self._flight = None

    def _record_steps(self, num_rows: int, num_tokens: int) -> int:
        """Take the cache that so many sequences need, and record all sizes of decode steps up to them."""
        if not self._executor.is_recording:
            return 0
        params = SamplingParams(max_new_tokens=max(1, num_tokens - 1), n=num_rows)
        self._is_sized = False
        self._ensure_capacity([self._requests.build([0], params)])
        return self._executor.record(self._cache, num_rows)

    def _ensure_capacity(self, expected: Sequence[Request] = ()) -> None:
        """Make room for what lives and, ahead of them, for requests that are ``expected``."""
        if self._is_sized:
            return
        requests = {s.request.ordinal: s.request for s in self._scheduler.live()}
        pages = self._capacity.num_pages([*requests.values(), *expected], self._cache.num_pages)
        if any(new < old for new, old in zip(pages, self._cache.num_pages, strict=True)):
            # another division between the layer groups: start over within the same bound
            self._forget_flight()
            self._cache.release()
            self._scheduler.replace_tables(self._empty_tables(), self._empty_swap())
        if pages != self._cache.num_pages:
            self._cache.resize(pages)
            self._capacity.log(pages)
        self._scheduler.tables.grow(self._cache.num_pages)
        self._is_sized = True

    def _notice_weights(self, *, thorough: bool) -> None:
        """Enter a new version if weights, modules or the caller's autocast changed.

        Thorough compares contents; else only a glance is taken, as between the steps of a call.
        """
        with engine_mode(), self._ranks.lockstep():
            seems_changed = not thorough and self._weights.seems_changed()
            seems_changed = bool(
                self._meet(f"a step under autocast={self._current_autocast()}", seems_changed)
            )
            if self._autocast != self._current_autocast():
                self._probe_view(self._weights.view)
                self._weights.refresh()
                self._enter_version()
            elif (thorough or seems_changed) and self._weights.update():
                self._enter_version()

    def _meet(self, doing: str, level: int = 0) -> int:
        """Wait for the other ranks, if there are any; the highest ``level`` of all. Settles the budget."""
        is_known = "_plan" in vars(self)
        level, budget = self._ranks.meet(doing, level, self._capacity.offer() if is_known else NO_BUDGET)
        if is_known:
            self._capacity.settle(budget)
        return level

    def _agree_on_change(self, change: Change) -> Change:
        return Change(self._meet("a look at the weights", change))

    def _enter_version(self) -> None:
        """Let go of all that belongs to older weights, then tell the hooks."""
        self._forget_flight()
        torch.clear_autocast_cache()  # autocast keeps casts of weights as long as it is entered
        self._packed.version = self.weight_version
        self._scheduler.change_weights(self.weight_version, self.config.on_weight_change)
        self._weights.run_hooks()

    def _prepare_view(self, view: nn.Module) -> None:
        """Make a new view ready, or refuse it."""
        shard_view(view, self._model, self._ranks)
        set_attention(view)
        self._packed.install(view)
        self._probe_view(view)

    def _probe_view(self, view: nn.Module) -> None:
        """Find out what the view needs; its layers, vocabulary or device may differ from before."""
        is_first = "_plan" not in vars(self)
        self._device = single_device(self._model)
        config = self._base.config.get_text_config()
        autocast = self._current_autocast()
        self._kernels = chosen_kernels(self.config.native_kernels, self._device)
        self._packed.version = self._weights.next_version  # copies made from here on are the new version's
        unfuse_layers(view)  # what agreed under another autocast need not agree under this one
        with self._packed.watching():
            plan = probe(view, config, self._device)
        self._backend = make_backend(
            self.config.attn_implementation,
            plan.layout,
            self._kernels,
            traits=plan.traits,
            page_size=self.config.page_size,
            max_decode_pages=self.config.max_blocks_per_request,
            may_flash=self.config.auto_switch_to_flash,
        )
        page_size, order = page_size_for(self._backend, self.config.page_size), self._backend.page_order
        if self._kernels is not None and not self._executor.is_compiling:
            fuse_layers(view, self._kernels, self._device, position_limit(config))
        is_same = (
            not is_first
            and plan.layout == self._plan.layout
            and (page_size, order) == (self._cache.page_size, self._cache.order)
        )
        self._plan, self._autocast = plan, autocast  # not before: what was refused is looked at again
        self._executor.renew(view, plan, self._backend, page_size, position_limit(config))
        self._requests.renew(
            vocab_size=plan.vocab_size,
            position_limit=position_limit(config),
            eos_ids=eos_token_ids(self._base, self._tokenizer),
        )
        if not is_same:
            self._is_sized = False
            has_scrap = self._executor.is_recording
            self._cache = KVCache(plan.layout, page_size, order, has_scrap=has_scrap)
            self._capacity = CapacityPlanner(
                self.config, plan.layout, page_size=page_size, position_limit=position_limit(config)
            )
            (least,) = self._ranks.agree("sizing the swap space", (-self._capacity.swap_bytes(),))
            self._swap_bytes = -least
        if is_first:
            self._scheduler = Scheduler(self.config, self._empty_tables(), self._empty_swap())
        elif not is_same:
            self._scheduler.replace_tables(self._empty_tables(), self._empty_swap())

    def _empty_tables(self) -> PageTables:
        windows = self._plan.layout.windows
        tables = PageTables(
            page_size=self._cache.page_size,
            windows=windows,
            num_pages=tuple(0 for _ in windows),
            share=self.config.allow_block_sharing,
        )
        tables.start_version(self.weight_version)
        return tables

    def _empty_swap(self) -> SwapSpace:
        return SwapSpace(self._swap_bytes, self._plan.layout.page_bytes(self._cache.page_size))

    def _current_autocast(self) -> torch.dtype | None:
        kind = self._device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _metrics(self, completions: Sequence[Completion], num_requests: int) -> RolloutMetrics:
        return self._meter.metrics(
            completions,
            num_requests=num_requests,
            weight_version=self.weight_version,
            num_pages=sum(self._cache.num_pages),
            cache_bytes=self._cache.num_bytes,
            derived_bytes=self._packed.num_bytes,
        )


def _sampling_row(sequence: Sample) -> SamplingRow:
    request = sequence.request
    return SamplingRow(
        params=request.params,
        ids=sequence.ids,
        prompt_len=len(request.prompt_ids),
        ending_ids=request.ending_ids,
        noise_key=request.noise_key,
        index=request.first_index + sequence.index,
    )


def _seed(config: EngineConfig) -> int:
    """The config's seed, else torch's: random, or what ``set_seed`` of the trainer made of it. Looking it
    up draws nothing from the global generator."""
    return torch.initial_seed() % MAX_SEED if config.seed is None else config.seed
