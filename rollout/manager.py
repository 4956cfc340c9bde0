"""A thread in front of the engine: requests from any thread, results by id, pauses for the trainer.

Names and meanings are those of transformers' ``ContinuousBatchingManager``. The engine belongs to the
loop's thread while that runs; other threads leave commands and take outputs. This room is the face; what
lies behind it is in :mod:`rollout.desk` (requests), :mod:`rollout.gate` (pauses and stops) and
:mod:`rollout.loop`.
"""

import asyncio
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias

import torch

from rollout.desk import Desk
from rollout.engine import RolloutEngine
from rollout.gate import Gate
from rollout.loop import DividedLoop, EngineLoop
from rollout.outputs import GenerationOutput
from rollout.requests import Prompt, is_token_ids
from rollout.tickets import Ticket
from rollout.types import SamplingParams

logger = logging.getLogger("rollout")

Defaults: TypeAlias = Callable[[Prompt, int | None], SamplingParams]
"""Parameters of a prompt, given the ``max_new_tokens`` that its request brings, if it does."""


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

    For a model that is divided among ranks (``DistributedConfig(tp_size=N)``) every rank has a manager, and
    starts it. Rank 0 drives: its requests are computed and answered on all ranks. Another rank may add the
    same ones, if the same script runs there, and gets the outputs; one that rank 0 does not add fails
    after ``cpu_group_timeout``. Any rank may cancel, pause and stop, for all. Outputs wait on every rank
    until somebody there takes them.

    Args:
        engine: used by the loop's thread alone from :meth:`start` to the end of :meth:`stop`. One manager
            per engine.
        defaults: parameters of requests that bring none of their own, or a function that gives them.
        max_queue_size: requests that wait for the loop to take them at the most, 0 for any number;
            ``None`` takes the engine's setting.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        defaults: SamplingParams | Defaults | None = None,
        *,
        max_queue_size: int | None = None,
    ) -> None:
        self._engine = engine
        self._defaults = defaults or SamplingParams()
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._modes: tuple[bool, torch.dtype | None] = (False, None)  # inference, autocast of the loop
        self._control = threading.RLock()  # one start, stop or destroy at a time
        self._changed = threading.Condition()
        self._desk = Desk(
            self._changed, engine.config.max_queue_size if max_queue_size is None else max_queue_size
        )
        self._gate = Gate(self._changed)
        parts = (engine, self._desk, self._gate, self._changed)
        self._divided = DividedLoop(*parts) if engine.ranks.size > 1 else None
        self._loop = EngineLoop(*parts) if self._divided is None else self._divided
        self.is_destroyed = False
        """Whether it can never be started again."""

    @property
    def engine(self) -> RolloutEngine:
        """The engine, which the loop's thread uses while it runs."""
        return self._engine

    @property
    def fatal_error(self) -> BaseException | None:
        """What ended the loop's thread, if that was no stop."""
        return self._gate.fatal_error

    def use_defaults(self, defaults: SamplingParams | Defaults) -> None:
        """Other parameters for the requests that are added from now on."""
        self._defaults = defaults

    # ---- control

    def is_running(self) -> bool:
        """Whether the loop's thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the loop under the caller's autocast and inference mode; after a stop, once it has ended.

        Raises:
            RuntimeError: the manager was destroyed, or this is a forked child.
            RankError: other ranks of the model do not start theirs within ``cpu_group_timeout``.
        """
        self._check_process()
        self._gate.refuse_inside_pause("start()")
        with self._control:
            if self.is_destroyed:
                raise RuntimeError("the manager was destroyed and cannot be started again; make a new one")
            if self.is_running():
                assert self._thread is not None
                if self._gate.is_looping and self._gate.stopping is None:
                    logger.warning("the manager is running already")
                    return
                self._thread.join()  # it ends by itself
            self._loop.begin()
            self._gate.open()
            kind = self._engine.device.type
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            self._modes = torch.is_inference_mode_enabled(), autocast
            self._thread = threading.Thread(target=self._run, name="rollout-manager", daemon=True)
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
            keep_for_next_session: keep the cache; else its memory goes back when the loop has ended.
            hard_stop: end now; requests that are not done fail with a RuntimeError's message.

        Raises:
            RuntimeError: called inside this thread's own :meth:`pause`, which would wait for ever.
        """
        self._check_process()
        if self._thread is None:
            logger.warning("the manager was not started")
            return
        if block:
            self._gate.refuse_inside_pause("stop()")
        self._gate.stop(hard=hard_stop, keep_memory=keep_for_next_session)
        if block:
            self.join(timeout)

    def warmup(self, *, num_requests: int | None = None, num_tokens: int | None = None) -> None:
        """Compile and record before the first request comes; see ``RolloutEngine.warmup``.

        While the loop runs it is paused, and its own autocast is that of the warmup, too.
        """
        self._check_process()
        with ExitStack() as stack:
            if self.is_running():
                stack.enter_context(self.pause())
                self._enter_modes(stack)
            self._engine.warmup(num_requests=num_requests, num_tokens=num_tokens)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the loop's thread to end, at most ``timeout`` seconds.

        Raises:
            RuntimeError: called inside this thread's own :meth:`pause`, which would wait for ever.
        """
        self._check_process()
        if self._thread is None:
            return
        if timeout is None:
            self._gate.refuse_inside_pause("join()")
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("the manager's thread did not end within %s seconds", timeout)

    def destroy(self, *, keep_memory: bool = False) -> None:
        """Stop if running and forbid another start. May be called again.

        Args:
            keep_memory: keep the engine's cache, for whoever uses the engine next.
        """
        self._check_process()
        with self._control:
            if self.is_running():
                self.stop(block=True, keep_for_next_session=keep_memory)
            if not self.is_destroyed:
                self.is_destroyed = True
                self._desk.answer_all(RuntimeError("the manager was destroyed before this request was done"))
                if not keep_memory:
                    self._engine.release_memory()
            if self._divided is not None:
                self._divided.leave()

    def pause(self) -> AbstractContextManager[None]:
        """Hold the loop between two steps, so that the caller may use and change the model.

        Any number of threads may pause at once; the loop goes on when the last one leaves. Requests
        in flight are kept; whatever was written to the weights is noticed.

        Raises:
            RuntimeError: the loop is not running, or ends before it could pause.
        """
        self._check_process()
        return self._gate.pause()

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

        Returns ``None``, with a warning, when the manager is stopping, has ended or was destroyed. What is
        wrong with the prompt itself is this request's result.

        Raises:
            DuplicateRequestError: an unanswered request has this id.
            TypeError, ValueError: a parameter is wrong.
            queue.Full: the queue stayed full for 10 seconds.
        """
        self._check_process()
        chosen = self._params(input_ids, max_new_tokens, eos_token_id, params)
        if request_id is None:
            (request_id,) = self._desk.new_ids(1)
        ticket = Ticket(request_id, input_ids, chosen, streaming, record_timestamps)
        return request_id if self._add(ticket) else None

    def add_requests(
        self,
        inputs: Sequence[Prompt],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        **params: Any,
    ) -> list[str]:
        """Queue several prompts; ids in input order, those included that are not taken (see there).
        Nothing is queued when it raises for a parameter.

        Prompts of token ids are queued sorted, so that those with a common beginning meet. Raises as
        :meth:`add_request` does.
        """
        self._check_process()
        chosen = [self._params(prompt, max_new_tokens, eos_token_id, params) for prompt in inputs]
        ids = self._desk.new_ids(len(inputs))
        tickets = [
            Ticket(request_id, prompt, each, streaming, record_timestamps)
            for request_id, prompt, each in zip(ids, inputs, chosen, strict=True)
        ]
        if all(is_token_ids(ticket.prompt) for ticket in tickets):
            tickets.sort(key=lambda ticket: list(ticket.prompt), reverse=True)
        for ticket in tickets:
            self._add(ticket)
        return ids

    def cancel_request(self, request_id: str) -> None:
        """End a request; its outputs come with what was generated. A child's id ends that sample alone.

        Unknown ids are no error.
        """
        self._check_process()
        self._desk.cancel(request_id)

    # ---- results

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """The next output, of one request or of any.

        Returns ``None`` after ``timeout`` seconds, and at once when nothing is expected: the request
        is unknown or its last output was taken, or nothing is unanswered and the loop has ended. On a
        rank that does not drive an unknown request may still come from the driver, and is waited for.

        Raises:
            RuntimeError: nothing is there yet, and it would be waited for without a limit inside this
                thread's own :meth:`pause`.
        """
        self._check_process()
        output = self._desk.mail.take(request_id, 0, lambda: False)
        if output is not None:
            return output
        if timeout is None and self._is_expected(request_id):
            self._gate.refuse_inside_pause("get_result()")
        return self._desk.mail.take(request_id, timeout, lambda: self._is_expected(request_id))

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, until every request that was added is answered or no loop runs."""
        self._check_process()

        def is_expected() -> bool:
            return self._desk.has_unanswered and self._gate.is_looping

        while (output := self._desk.mail.take(None, None, is_expected)) is not None:
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
        """Call ``callback`` with each output of a request, in the running event loop of the caller.

        May come before the request is added; it holds until the request's last output.
        """
        self._check_process()
        self._desk.mail.register(request_id, (callback, asyncio.get_running_loop()))

    def run_here(self) -> Iterator[GenerationOutput]:
        """Answer all that is queued in the calling thread, and give outputs as they come.

        Raises:
            RuntimeError: the loop's thread is running, or the manager was destroyed.
        """
        self._check_process()
        if self.is_running() or self.is_destroyed:
            state = "was destroyed" if self.is_destroyed else "has a thread that is running"
            raise RuntimeError(f"the manager {state}: nothing can be run here")
        self._gate.stopping, self._gate.fatal_error, self._gate.keeps_memory = None, None, True
        try:
            while self._desk.has_unanswered:
                EngineLoop.turn(self._loop)  # in lockstep with other ranks, if there are any
                while (output := self.get_result(timeout=0)) is not None:
                    yield output
        except BaseException as error:
            self._gate.fatal_error = error
            raise
        finally:
            self._loop.end()
            self._gate.fatal_error = None

    # ---- behind the face

    def _enter_modes(self, stack: ExitStack) -> None:
        """What was in force in the thread that started the loop, and the model's device."""
        is_inference, autocast = self._modes
        device = self._engine.device
        stack.enter_context(torch.inference_mode(is_inference))
        stack.enter_context(torch.autocast(device.type, dtype=autocast, enabled=autocast is not None))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                self._enter_modes(stack)
                while self._loop.turn():
                    pass
        except BaseException as error:
            self._gate.fatal_error = error
            logger.exception("the manager's thread ended with an error")
            if self._divided is not None:  # the others hear of it at once, wherever they wait
                self._divided.leave()
                self._engine.ranks.leave(f"the manager's loop ended with {type(error).__name__}: {error}")
        finally:
            self._end_run()

    def _end_run(self) -> None:
        try:
            self._loop.end()
        finally:  # whatever that raised: nobody may wait for a loop that has ended
            self._gate.close()
            self._desk.mail.wake()

    def _add(self, ticket: Ticket) -> bool:
        """Queue a ticket; False, with a warning, when none is taken."""
        with self._changed:  # the driver may tell the same request between the two
            if self._divided is not None and self._divided.was_told(ticket):
                return True
            denied = self._desk.add(ticket, self._why_denied)
        if denied is not None:
            logger.warning("%s; request %r is not taken", denied, ticket.request_id)
        return denied is None

    def _why_denied(self) -> str | None:
        return "the manager was destroyed" if self.is_destroyed else self._gate.why_denied()

    def _params(
        self,
        prompt: Prompt,
        max_new_tokens: int | None,
        eos: int | Sequence[int] | None,
        given: dict[str, Any],
    ) -> SamplingParams:
        defaults = self._defaults
        if callable(defaults):
            defaults = defaults(prompt, max_new_tokens)
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

    def _is_expected(self, request_id: str | None) -> bool:
        if request_id is None:
            return self._desk.has_unanswered or self._gate.is_looping
        is_heard_later = self._divided is not None and self._divided.is_heard_later()
        return is_heard_later or self._desk.is_expected(request_id)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "this manager belongs to the process that made it, and threads do not survive a fork; "
                "make a new one in the child"
            )
