"""What a manager gives back, and the box it lies in until somebody takes it.

``GenerationOutput`` has the fields of transformers' class of that name, and transformers' own
``RequestStatus``, so that code written for it can compare both.
"""

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from transformers.generation.continuous_batching.requests import RequestStatus

from rollout.types import Completion, FinishReason


@dataclass(slots=True, kw_only=True)
class GenerationOutput:
    """One sample of a request, finished or on its way."""

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the distribution that was sampled, as ``Completion.logprobs``; for greedy requests the policy's, as
    in transformers, since what was sampled from has one token only."""
    error: str | None = None
    status: RequestStatus = RequestStatus.PENDING
    created_time: float = field(default_factory=time.perf_counter)
    """``time.perf_counter()`` when the request was added."""
    lifespan: tuple[float, float] = (-1, -1)
    """When its first step began and when it ended; -1 for not yet."""
    timestamps: list[float] | None = None
    """When each token was there, for requests with ``record_timestamps``."""
    completion: Completion | None = None
    """The whole completion of a finished sample: finish reason, policy logprobs, versions."""

    def is_finished(self) -> bool:
        """Whether it ended, well or not."""
        return bool(self.status >= RequestStatus.FINISHED)


def status_of(completion: Completion) -> RequestStatus:
    """FAILED for an error; FINISHED for every other end, a cancelled one included."""
    failed = completion.finish_reason is FinishReason.ERROR
    return RequestStatus.FAILED if failed else RequestStatus.FINISHED


Handler = tuple[Callable[[GenerationOutput], object], asyncio.AbstractEventLoop]


class Mailbox:
    """Outputs by request id and by age, for any number of threads.

    Example::

        mail = Mailbox()
        mail.deliver([output])              # from the loop's thread
        mail.take("req_0", timeout=1)       # from any other
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._by_age: OrderedDict[int, GenerationOutput] = OrderedDict()
        self._by_id: dict[str, deque[int]] = {}
        self._handlers: dict[str, Handler] = {}
        self._count = 0

    def deliver(
        self, outputs: Iterable[GenerationOutput], settle: Callable[[], object] = lambda: None
    ) -> None:
        """Hand outputs over: to the request's handler, or into the box.

        ``settle`` strikes off what is not expected any more; no waiter looks between the two.
        """
        with self._changed:
            settle()
            for output in outputs:
                if output.request_id not in self._handlers or not self._call(output):
                    self._by_age[self._count] = output
                    self._by_id.setdefault(output.request_id, deque()).append(self._count)
                    self._count += 1
            self._changed.notify_all()

    def take(
        self,
        request_id: str | None,
        timeout: float | None,
        is_expected: Callable[[], bool],
    ) -> GenerationOutput | None:
        """The oldest output (of a request); ``None`` after ``timeout`` seconds, or as soon as none is
        expected any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._has(request_id) or not is_expected(), timeout)
            return self._pop(request_id)

    def wake(self) -> None:
        """Have every waiter look again whether anything is expected."""
        with self._changed:
            self._changed.notify_all()

    def register(self, request_id: str, handler: Handler) -> None:
        """Call ``handler`` with the request's outputs, those that wait already included.

        It may be there before the request is; it stays until the request's last output.
        """
        with self._changed:
            self._handlers[request_id] = handler
            while request_id in self._handlers and (output := self._pop(request_id)) is not None:
                self._call(output)

    def _has(self, request_id: str | None) -> bool:
        return bool(self._by_age) if request_id is None else request_id in self._by_id

    def _pop(self, request_id: str | None) -> GenerationOutput | None:
        if not self._has(request_id):
            return None
        number = next(iter(self._by_age)) if request_id is None else self._by_id[request_id][0]
        output = self._by_age.pop(number)
        waiting = self._by_id[output.request_id]
        waiting.popleft()
        if not waiting:
            del self._by_id[output.request_id]
        return output

    def _call(self, output: GenerationOutput) -> bool:
        """Whether the output's handler could be told."""
        callback, loop = self._handlers[output.request_id]
        try:
            loop.call_soon_threadsafe(callback, output)
        except RuntimeError:  # the event loop is closed; whoever asks for the result gets it
            del self._handlers[output.request_id]
            return False
        if output.is_finished():
            del self._handlers[output.request_id]
        return True
