"""The unanswered requests of a manager: added by any thread, taken by the loop, each answered once."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from rollout.outputs import GenerationOutput, Mailbox
from rollout.tickets import Ticket
from rollout.types import DuplicateRequestError

QUEUE_SECONDS = 10.0
"""How long :meth:`Desk.add` waits for a place in a full queue."""


class Desk:
    """Where requests lie from the moment they are added until all their samples are answered.

    Example::

        desk = Desk(threading.Condition(), max_queue_size=0)
        desk.add(Ticket("a", [1, 2], SamplingParams(), ...), why_denied=lambda: None)
        tickets, cancelled = desk.take()                # the loop
        desk.answer(ticket, ticket.failed(error))
        desk.mail.take("a", timeout=1, is_expected=lambda: desk.is_expected("a"))

    Args:
        changed: notified whenever something changes here; its lock guards everything but the mail.
        max_queue_size: tickets that wait for the loop at the most; 0 for any number.
    """

    def __init__(self, changed: threading.Condition, max_queue_size: int) -> None:
        self.mail = Mailbox()
        self._changed = changed
        self._max_queue_size = max_queue_size
        self._inbox: deque[Ticket] = deque()
        self._cancelled: list[str] = []
        self._tickets: dict[str, Ticket] = {}
        self._samples: dict[str, Ticket] = {}  # by the id of each unanswered sample
        self._count = 0

    @property
    def has_news(self) -> bool:
        """Whether there is something to take."""
        return bool(self._inbox or self._cancelled)

    @property
    def unanswered(self) -> list[Ticket]:
        """Requests with a sample that is not answered, oldest first."""
        with self._changed:
            return list(self._tickets.values())

    # The next two are asked by waiters that hold the mail's lock. They must not take ours: the loop takes
    # the mail's while it holds ours.

    @property
    def has_unanswered(self) -> bool:
        """Whether any last output is still to come."""
        return bool(self._tickets)

    def is_expected(self, request_id: str) -> bool:
        """Whether a last output of this sample is still to come."""
        return request_id in self._samples

    def find(self, request_id: str) -> Ticket | None:
        """The unanswered request of this id."""
        return self._tickets.get(request_id)

    def find_sample(self, sample_id: str) -> tuple[Ticket, int | None] | None:
        """The request that an id means, and the sample if it is a child's; ``None`` if it is answered."""
        ticket = self._tickets.get(sample_id)
        if ticket is not None:
            return ticket, None
        ticket = self._samples.get(sample_id)
        return None if ticket is None else (ticket, ticket.index_of(sample_id))

    def new_ids(self, count: int) -> list[str]:
        """So many ids that no unanswered request has."""
        ids: list[str] = []
        with self._changed:
            while len(ids) < count:
                request_id = f"req_{self._count}"
                self._count += 1
                if request_id not in self._samples:
                    ids.append(request_id)
        return ids

    def add(self, ticket: Ticket, why_denied: Callable[[], str | None]) -> str | None:
        """Queue a request, once there is a place. Returns why it was not taken, ``None`` if it was.

        Raises:
            DuplicateRequestError: an unanswered request has one of its ids.
            queue.Full: there was no place for 10 seconds.
        """
        with self._changed:
            self._refuse_known(ticket)
            if not self._changed.wait_for(lambda: self._has_place() or why_denied(), QUEUE_SECONDS):
                raise queue.Full(
                    f"{self._max_queue_size} requests wait and none was taken for {QUEUE_SECONDS:g} s; "
                    "raise max_queue_size or add more slowly"
                )
            if (denied := why_denied()) is not None:
                return denied
            self._refuse_known(ticket)  # others may have added while this thread waited
            # what was cancelled under these ids before was an older request
            self._cancelled = [each for each in self._cancelled if each not in ticket.ids]
            self._enter(ticket)
            self._inbox.append(ticket)
            self._changed.notify_all()
        return None

    def enter(self, ticket: Ticket) -> None:
        """Expect answers to a request that did not come through the queue."""
        with self._changed:
            self._enter(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """Take a request out of the queue, if it lies there; it stays unanswered."""
        with self._changed:
            if ticket in self._inbox:
                self._inbox.remove(ticket)

    def cancel(self, sample_id: str) -> None:
        """Have the loop cancel a request, or one sample of it by a child's id."""
        with self._changed:
            self._cancelled.append(sample_id)
            self._changed.notify_all()

    def take(self) -> tuple[list[Ticket], list[str]]:
        """Everything that was added and cancelled since the last time."""
        with self._changed:
            tickets, cancelled = list(self._inbox), self._cancelled
            self._inbox.clear()
            self._cancelled = []
            self._changed.notify_all()  # there is place in the queue
        return tickets, cancelled

    def answer(self, ticket: Ticket, outputs: Sequence[GenerationOutput]) -> None:
        """Deliver last outputs of a request's samples and strike them off, at once for every waiter."""

        def settle() -> None:
            for output in outputs:
                del self._samples[output.request_id]
            if not any(each in self._samples for each in ticket.ids):
                del self._tickets[ticket.request_id]

        with self._changed:
            self.mail.deliver(outputs, settle)

    def answer_all(self, reason: BaseException) -> None:
        """Fail whatever is unanswered."""
        with self._changed:
            self._inbox.clear()
            self._cancelled = []
            for ticket in self.unanswered:
                left = [i for i, each in enumerate(ticket.ids) if each in self._samples]
                self.answer(ticket, ticket.failed(reason, left))

    def _enter(self, ticket: Ticket) -> None:
        self._tickets[ticket.request_id] = ticket
        self._samples.update(dict.fromkeys(ticket.ids, ticket))

    def _has_place(self) -> bool:
        return self._max_queue_size == 0 or len(self._inbox) < self._max_queue_size

    def _refuse_known(self, ticket: Ticket) -> None:
        if any(each in self._samples for each in ticket.ids):
            raise DuplicateRequestError(
                f"request_id={ticket.request_id!r} is unanswered; wait for its result or choose another id"
            )
