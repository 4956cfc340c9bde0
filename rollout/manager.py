"""A thread in front of the engine: requests from any thread, results by id, pauses for the trainer.

Names and meanings are those of transformers' ``ContinuousBatchingManager``. The engine belongs to the
loop's thread while that runs; other threads leave commands and take outputs.
"""

import asyncio
import dataclasses
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from rollout.engine import RolloutEngine
from rollout.outputs import GenerationOutput, Mailbox, RequestStatus, status_of
from rollout.requests import Prompt
from rollout.results import Progress
from rollout.types import Completion, DuplicateRequestError, SamplingParams

logger = logging.getLogger("rollout")

QUEUE_SECONDS = 10.0
"""How long ``add_request`` waits for a place in a full queue."""


@dataclass(slots=True)
class _Ticket:
    """A request from the moment it was added until all its samples are answered."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    streaming: bool
    timestamps: list[list[float]] | None  # per sample
    created: float = field(default_factory=time.perf_counter)
    started: float = -1
    unanswered: int = field(init=False)
    shown: dict[int, int] = field(default_factory=dict)  # tokens of each sample that were seen

    def __post_init__(self) -> None:
        self.unanswered = self.params.n

    def id_of(self, index: int) -> str:
        """Sample 0 has the request's own id, the others are its children."""
        return self.request_id if index == 0 else f"{self.request_id}__child#{index - 1}"


class ContinuousBatchingManager:
    """Runs a :class:`~rollout.engine.RolloutEngine` on a background thread.

    Example::

        manager = ContinuousBatchingManager(RolloutEngine(model))
        manager.start()
        request_id = manager.add_request([1, 2, 3], max_new_tokens=16)
        output = manager.get_result(request_id)
        with manager.pause():
            optimizer.step()        # requests in flight go on after it, under the new weights
        manager.stop()

    Args:
        engine: used by the loop's thread alone from :meth:`start` to the end of :meth:`stop`.
        defaults: parameters of requests that bring none of their own, or a function of the prompt that
            gives them.
        max_queue_size: requests that wait for the loop to take them at the most; 0 for any number.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        defaults: SamplingParams | Callable[[Prompt], SamplingParams] | None = None,
        *,
        max_queue_size: int = 0,
    ) -> None:
        self._engine = engine
        self._defaults = defaults or SamplingParams()
        self._max_queue_size = max_queue_size
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._mail = Mailbox()
        self._thread: threading.Thread | None = None
        self._inbox: deque[_Ticket] = deque()
        self._cancelled: deque[str] = deque()
        self._tickets: dict[str, _Ticket] = {}  # unanswered requests by their id
        self._ids: dict[str, str] = {}  # unanswered samples' ids -> request id
        self._count = 0
        self._stopping: str | None = None  # "flush" or "hard"
        self._pauses = 0
        self._own_pauses = threading.local()
        self._is_parked = False
        self._is_looping = False  # ends before the thread does, so that whoever is woken then sees it
        self._is_destroyed = False
        self.fatal_error: BaseException | None = None
        """What ended the loop's thread, if that was no stop."""

    def use_defaults(self, defaults: SamplingParams | Callable[[Prompt], SamplingParams]) -> None:
        """Other parameters for the requests that are added from now on."""
        self._defaults = defaults

    # ---- control

    def is_running(self) -> bool:
        """Whether the loop's thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the loop under the caller's autocast and inference mode.

        Raises:
            RuntimeError: the manager was destroyed, or this is a forked child.
        """
        self._check_process()
        if self._is_destroyed:
            raise RuntimeError("the manager was destroyed and cannot be started again; make a new one")
        if self.is_running():
            logger.warning("the manager is running already")
            return
        self._stopping, self.fatal_error = None, None
        kind = self._engine.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._thread = threading.Thread(
            target=self._run,
            args=(torch.is_inference_mode_enabled(), autocast),
            name="rollout-manager",
            daemon=True,
        )
        self._is_looping = True
        self._thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """End the loop: no new requests, those there are finished, or failed under ``hard_stop``.

        Args:
            block: wait for the end, at most ``timeout`` seconds.
            timeout: ``None`` for any time.
            keep_for_next_session: keep the cache; else its memory goes back.
            hard_stop: end now; requests that are not done fail with a RuntimeError's message.

        Raises:
            RuntimeError: called inside this thread's own :meth:`pause`, which would wait for ever.
        """
        self._check_process()
        if self._thread is None:
            logger.warning("the manager was not started")
            return
        if self._paused_here():
            raise RuntimeError("stop() inside pause() would wait for ever: leave the pause first")
        with self._changed:
            self._stopping = "hard" if hard_stop or self._stopping == "hard" else "flush"
            self._changed.notify_all()
        if block:
            self.join(timeout)
        if not self.is_running() and not keep_for_next_session:
            self._engine.release_memory()

    def warmup(self, *, num_requests: int | None = None, num_tokens: int | None = None) -> None:
        """Compile and record before the first request comes; see ``RolloutEngine.warmup``."""
        self._check_process()
        with self.pause() if self.is_running() else nullcontext():
            self._engine.warmup(num_requests=num_requests, num_tokens=num_tokens)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the loop's thread to end, at most ``timeout`` seconds."""
        if self._thread is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("the manager's thread did not end within %s seconds", timeout)

    def destroy(self) -> None:
        """Stop if running and forbid another start. May be called again."""
        if self.is_running():
            self.stop(block=True)
        self._is_destroyed = True

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Hold the loop between two steps, so that the caller may use and change the model.

        Any number of threads may pause at once; the loop goes on when the last one leaves. Requests
        in flight are kept.

        Raises:
            RuntimeError: the loop is not running, or ends before it could pause.
        """
        self._check_process()
        with self._changed:
            if not self._is_looping:
                raise RuntimeError("the manager is not running: there is nothing to pause")
            self._pauses += 1
            self._own_pauses.count = self._paused_here() + 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._is_parked or not self._is_looping)
                if not self._is_parked:
                    raise RuntimeError("the manager ended before it could pause") from self.fatal_error
            except BaseException:
                self._leave_pause()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._leave_pause()

    # ---- requests

    def add_request(
        self,
        input_ids: Prompt,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        **params: Any,
    ) -> str | None:
        """Queue a prompt; its outputs come by :meth:`get_result`. Returns its id.

        Args:
            input_ids: token ids, text or chat messages.
            request_id: made if not given.
            max_new_tokens: tokens at the most.
            streaming: give an output after every step, besides the last one.
            record_timestamps: note when each token was there.
            eos_token_id: ids that end it instead of the model's own; -1 for none.
            params: other fields of :class:`~rollout.types.SamplingParams`.

        Returns ``None``, with a warning, when the manager is stopping or has ended.

        Raises:
            DuplicateRequestError: an unanswered request has this id.
            TypeError, ValueError: a parameter is wrong.
            queue.Full: the queue stayed full for 10 seconds.
        """
        self._check_process()
        chosen = self._params(input_ids, max_new_tokens, eos_token_id, params)
        with self._changed:
            if (denied := self._why_denied()) is not None:
                logger.warning("%s; the request is not taken", denied)
                return None
            if request_id is None:
                request_id = f"req_{self._count}"
                self._count += 1
            times: list[list[float]] | None = [[] for _ in range(chosen.n)] if record_timestamps else None
            ticket = _Ticket(request_id, input_ids, chosen, streaming, times)
            ids = [ticket.id_of(index) for index in range(chosen.n)]
            if any(each in self._ids for each in ids):
                raise DuplicateRequestError(
                    f"request_id={request_id!r} is unanswered; wait for its result or choose another id"
                )
            if not self._changed.wait_for(lambda: self._has_place() or self._why_denied(), QUEUE_SECONDS):
                raise queue.Full(
                    f"{self._max_queue_size} requests wait and none was taken for {QUEUE_SECONDS:.0f} s; "
                    "raise max_queue_size or add more slowly"
                )
            if (denied := self._why_denied()) is not None:  # while we waited
                logger.warning("%s; the request is not taken", denied)
                return None
            self._tickets[request_id] = ticket
            self._ids.update(dict.fromkeys(ids, request_id))
            self._inbox.append(ticket)
            self._changed.notify_all()
        return request_id

    def add_requests(
        self,
        inputs: Sequence[Prompt],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **params: Any,
    ) -> list[str]:
        """Queue several prompts; ids in input order.

        Prompts of token ids are queued sorted, so that those with a common beginning meet.
        """
        self._check_process()
        with self._changed:
            ids = [f"req_{self._count + i}" for i in range(len(inputs))]
            self._count += len(inputs)
        order = list(range(len(inputs)))
        if all(not isinstance(prompt, str) and prompt and isinstance(prompt[0], int) for prompt in inputs):
            order.sort(key=lambda i: list(inputs[i]), reverse=True)
        for i in order:
            self.add_request(
                inputs[i],
                request_id=ids[i],
                max_new_tokens=max_new_tokens,
                streaming=streaming,
                record_timestamps=record_timestamps,
                **params,
            )
        return ids

    def cancel_request(self, request_id: str) -> None:
        """End a request; its outputs come with what was generated. Unknown ids are no error."""
        self._check_process()
        with self._changed:
            self._cancelled.append(request_id)
            self._changed.notify_all()

    # ---- results

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """The next output, of one request or of any.

        Returns ``None`` after ``timeout`` seconds, and at once when nothing is expected: the request
        is unknown or its last output was taken, or nothing is unanswered and the loop has ended.
        """
        self._check_process()
        return self._mail.take(request_id, timeout, lambda: self._is_expected(request_id))

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, until the loop has ended."""
        while self.is_running():
            output = self.get_result(timeout=0.1)
            if output is not None:
                yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Outputs of one request as they come, up to its last."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], object]
    ) -> None:
        """Call ``callback`` with each output of a request, in the running event loop of the caller."""
        self._mail.register(request_id, (callback, asyncio.get_running_loop()))

    def run_here(self) -> Iterator[GenerationOutput]:
        """Answer all that is queued in the calling thread, and give outputs as they come.

        Raises:
            RuntimeError: the loop's thread is running.
        """
        self._check_process()
        if self.is_running():
            raise RuntimeError("the manager's thread is running; take its results by get_result()")
        self._stopping, self.fatal_error = None, None
        try:
            while self._tickets:
                self._turn()
                while (output := self.get_result(timeout=0)) is not None:
                    yield output
        except BaseException as error:
            self.fatal_error = error
            raise
        finally:
            self._fail_all()
            self.fatal_error = None

    # ---- the loop's thread

    def _run(self, is_inference: bool, autocast: torch.dtype | None) -> None:
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode(is_inference))
                if autocast is not None:
                    stack.enter_context(torch.autocast(self._engine.device.type, dtype=autocast))
                while self._turn():
                    pass
        except BaseException as error:
            self.fatal_error = error
            logger.exception("the manager's thread ended with an error")
        finally:
            self._fail_all()
            with self._changed:
                self._is_looping = False
                self._changed.notify_all()
            self._mail.wake()

    def _turn(self) -> bool:
        """Wait for work, take commands, run one step. False when the loop is to end."""
        with self._changed:
            self._wait_for_work()
            if self._stopping == "hard":
                return False
            tickets, cancelled = list(self._inbox), list(self._cancelled)
            self._inbox.clear()
            self._cancelled.clear()
            self._changed.notify_all()  # there is place in the queue
        for ticket in tickets:
            self._submit(ticket)
        for request_id in cancelled:
            self._engine.cancel_request(request_id)
        if not self._engine.has_work:
            return self._stopping is None or bool(tickets)
        finished = self._engine.step()
        self._publish(finished)
        return True

    def _wait_for_work(self) -> None:
        """Returns with the lock held, outside any pause, when there is something to do."""
        while True:
            if self._pauses:
                self._engine.synchronize()
                self._is_parked = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._pauses)
                self._is_parked = False
            if self._inbox or self._cancelled or self._engine.has_work or self._stopping:
                return
            self._changed.wait()

    def _submit(self, ticket: _Ticket) -> None:
        try:
            self._engine.add_request(ticket.prompt, ticket.params, request_id=ticket.request_id)
        except Exception as error:  # this request's own fault
            self._answer(ticket, [self._failed(ticket, index, error) for index in range(ticket.params.n)])

    def _publish(self, finished: list[Completion]) -> None:
        """Outputs of the step just run: streamed ones, and those that ended."""
        now = time.perf_counter()
        watched = {
            ticket.request_id: ticket
            for ticket in list(self._tickets.values())  # other threads add meanwhile
            if ticket.started < 0 or ticket.streaming or ticket.timestamps is not None
        }
        for request_id, samples in self._engine.progress(watched).items():
            self._observe(watched[request_id], samples, now)
        for completion in finished:
            found = self._tickets.get(completion.request_id)
            if found is not None:  # else added to the engine behind our back
                self._answer(found, [self._ended(found, completion, now)])

    def _observe(self, ticket: _Ticket, samples: list[Progress], now: float) -> None:
        """Note the tokens that a running request got in this step."""
        outputs = []
        for progress in samples:
            if ticket.started < 0 and progress.is_running:
                ticket.started = now
            new = len(progress.token_ids) - ticket.shown.get(progress.index, 0)
            if new <= 0:
                continue
            ticket.shown[progress.index] = len(progress.token_ids)
            if ticket.timestamps is not None:
                ticket.timestamps[progress.index] += [now] * new
            if ticket.streaming:
                outputs.append(
                    self._output(
                        ticket,
                        progress.index,
                        generated_tokens=list(progress.token_ids),
                        logprobs=list(progress.logprobs),
                        status=RequestStatus.DECODING,
                    )
                )
        self._mail.deliver(outputs)

    def _ended(self, ticket: _Ticket, completion: Completion, now: float) -> GenerationOutput:
        if ticket.started < 0:
            ticket.started = now
        if ticket.timestamps is not None:
            times = ticket.timestamps[completion.index]
            times += [now] * (len(completion.token_ids) - len(times))
        output = self._output(
            ticket,
            completion.index,
            prompt_ids=list(completion.prompt_ids),
            generated_tokens=list(completion.token_ids),
            logprobs=list(completion.logprobs),
            status=status_of(completion),
            error=None if completion.error is None else str(completion.error),
            completion=completion,
        )
        output.lifespan = (ticket.started, now)
        return output

    def _failed(self, ticket: _Ticket, index: int, error: BaseException) -> GenerationOutput:
        return self._output(ticket, index, status=RequestStatus.FAILED, error=str(error))

    def _output(self, ticket: _Ticket, index: int, **values: Any) -> GenerationOutput:
        times = None if ticket.timestamps is None else list(ticket.timestamps[index])
        prompt = ticket.prompt
        is_ids = not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt)
        known: dict[str, Any] = {"prompt_ids": list(prompt)} if is_ids else {}
        return GenerationOutput(
            request_id=ticket.id_of(index),
            created_time=ticket.created,
            lifespan=(ticket.started, -1),
            timestamps=times,
            **(known | values),
        )

    def _answer(self, ticket: _Ticket, outputs: list[GenerationOutput]) -> None:
        """Deliver last outputs of a request's samples and strike them off."""
        with self._changed:
            for output in outputs:
                del self._ids[output.request_id]
                ticket.unanswered -= 1
            if ticket.unanswered == 0:
                del self._tickets[ticket.request_id]
        self._mail.deliver(outputs)

    def _fail_all(self) -> None:
        """The loop ends: whatever is unanswered is answered now."""
        reason = self.fatal_error or RuntimeError("the manager was stopped before this request was done")
        with self._changed:
            tickets = list(self._tickets.values())
            self._inbox.clear()
            self._cancelled.clear()
        for ticket in tickets:
            self._engine.cancel_request(ticket.request_id)
        self._engine.take_finished()  # or they would answer later requests of these ids
        for ticket in tickets:
            left = [i for i in range(ticket.params.n) if ticket.id_of(i) in self._ids]
            self._answer(ticket, [self._failed(ticket, index, reason) for index in left])

    # ---- small things

    def _params(
        self,
        prompt: Prompt,
        max_new_tokens: int | None,
        eos: int | Sequence[int] | None,
        given: dict[str, Any],
    ) -> SamplingParams:
        defaults = self._defaults(prompt) if callable(self._defaults) else self._defaults
        known = {f.name for f in dataclasses.fields(SamplingParams)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise TypeError(f"unknown parameters {unknown}; known: {', '.join(sorted(known))}")
        values = dict(given)
        if max_new_tokens is not None:
            values["max_new_tokens"] = max_new_tokens
        if eos is not None:
            ids = [eos] if isinstance(eos, int) else list(eos)
            values["ignore_eos"] = True
            kept = given.get("stop_token_ids", ())
            values["stop_token_ids"] = (*kept, *(token for token in ids if token != -1))
        return dataclasses.replace(defaults, **values)

    def _why_denied(self) -> str | None:
        if self.fatal_error is not None:
            return f"the manager's thread ended with {type(self.fatal_error).__name__}: {self.fatal_error}"
        return "the manager is stopping" if self._stopping is not None else None

    def _has_place(self) -> bool:
        return self._max_queue_size == 0 or len(self._inbox) < self._max_queue_size

    def _is_expected(self, request_id: str | None) -> bool:
        if request_id is None:
            return bool(self._tickets) or self._is_looping
        return request_id in self._ids

    def _paused_here(self) -> int:
        return int(vars(self._own_pauses).get("count", 0))

    def _leave_pause(self) -> None:
        self._pauses -= 1
        self._own_pauses.count = self._paused_here() - 1
        self._changed.notify_all()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "this manager belongs to the process that made it, and threads do not survive a fork; "
                "make a new one in the child"
            )
