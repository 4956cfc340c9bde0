"""What a turn of the manager's loop does, agreed among the ranks of a divided model.

Requests come from the driver alone; cancellations, stops and pauses from any rank. One exchange a turn
carries them to all ranks, which apply them in the same order::

    rank 0   add a, b      cancel a ----+--> [a, b | cancel a, c | pause?] -> apply -> step
    rank 1   pause()       cancel c ----+--> [a, b | cancel a, c | pause?] -> apply -> step

The same script may run on every rank: what rank 1 adds is then a *claim* on the driver's request of that
id, and its outputs are delivered on both. A claim that the driver does not honour within
``cpu_group_timeout`` fails. An idle driver still comes by ten times a second, so that nobody who waits
for it hits the limit; the others wait inside the exchange, without spinning.
"""

import pickle
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rollout.parallel import Ranks
from rollout.requests import Prompt, plain_prompt
from rollout.types import SamplingParams

HEARTBEAT = 0.1
"""Seconds between turns of an idle driver, and so the delay of another rank's wish at the most."""
MAX_UNCLAIMED = 10_000
"""Requests of the driver that another rank's script may be late with. Where rank 0 alone adds, all are
unclaimed, and they must not pile up for ever."""
STOPS = (None, "flush", "hard")
"""Kinds of stop, weakest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldRequest:
    """A request as the driver tells it: without logits processors, which run on the driver alone."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    streaming: bool
    is_timed: bool

    @classmethod
    def of(
        cls, request_id: str, prompt: Prompt, params: SamplingParams, *, streaming: bool, is_timed: bool
    ) -> "ToldRequest":
        """The prompt is copied into plain lists, so that two of them can be compared."""
        told = replace(params, logits_processors=())
        return cls(
            request_id=request_id,
            prompt=plain_prompt(prompt),
            params=told,
            streaming=streaming,
            is_timed=is_timed,
        )

    def asks_the_same(self, other: "ToldRequest") -> bool:
        """Whether both ask for the same tokens; how they are delivered is each rank's own affair."""
        return (self.prompt, self.params) == (other.prompt, other.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What one rank brings to a turn."""

    requests: Sequence[bytes] = ()
    """Pickled :class:`ToldRequest`; empty but on the driver."""
    cancelled: Sequence[str] = ()
    stop: str | None = None
    release: bool = False
    """Give the engine's memory back when the loop has stopped."""
    pause: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What all ranks do in this turn."""

    requests: tuple[ToldRequest, ...] = ()
    cancelled: tuple[str, ...] = ()
    stop: str | None = None
    release: bool = False
    is_paused: bool = False


class Turns:
    """The turns of one rank's loop: the exchange, and the claims of a rank that does not drive.

    Example::

        turns = Turns(engine.ranks.fork(), timeout=300.0)
        orders = turns.exchange(Wishes(cancelled=["req_0"]))
        orders.cancelled        # ("req_0",) on every rank
    """

    def __init__(self, ranks: Ranks, timeout: float | None) -> None:
        self.is_driver = ranks.is_driver
        self.heartbeat = HEARTBEAT if timeout is None else min(HEARTBEAT, timeout / 4)
        self.last = Orders()
        """What the ranks agreed on last."""
        self.wished_pause = False
        """What this rank said last."""
        self._ranks = ranks
        self._timeout = timeout
        self._held: list[Orders] = []  # told during a pause
        self._claims: dict[str, float] = {}  # id -> when the driver must have told it
        self._unclaimed: dict[str, ToldRequest] = {}

    def begin(self) -> None:
        """The loop starts, perhaps once more: what was agreed before it counts no longer."""
        self.last, self.wished_pause, self._held = Orders(), False, []
        self._claims.clear()  # their requests failed with the loop that knew them

    def exchange(self, wishes: Wishes) -> Orders:
        """Tell the other ranks this rank's wishes and hear theirs. Waits for them.

        Orders given during a pause are kept and come with the first ones after it.

        Raises:
            RankError: a rank is missing or out of step.
        """
        self.wished_pause = wishes.pause
        is_told = bool(wishes.requests or wishes.cancelled)
        numbers = (STOPS.index(wishes.stop), wishes.release, wishes.pause, is_told)
        stop, release, pause, any_told = self._ranks.agree("a turn of the manager", [*map(int, numbers)])
        requests: tuple[ToldRequest, ...] = ()
        cancelled: tuple[str, ...] = ()
        if any_told:
            told = self._ranks.gather((tuple(wishes.requests), tuple(wishes.cancelled)))
            requests = tuple(pickle.loads(each) for packed, _ in told for each in packed)
            cancelled = tuple(request_id for _, ids in told for request_id in ids)
        orders = Orders(
            requests=requests,
            cancelled=cancelled,
            stop=STOPS[stop],
            release=bool(release),
            is_paused=bool(pause),
        )
        self.last = orders
        if orders.is_paused:
            self._held.append(orders)
            return orders
        held, self._held = [*self._held, orders], []
        return replace(
            orders,
            requests=tuple(request for each in held for request in each.requests),
            cancelled=tuple(request_id for each in held for request_id in each.cancelled),
        )

    def leave(self) -> None:
        """No more turns on this rank; the others hear of it at once if they still wait."""
        self._ranks.leave("its manager has ended")

    # ---- claims

    def claim(self, request_ids: Iterable[str]) -> None:
        """This rank's own script added these; the driver is to tell them."""
        limit = float("inf") if self._timeout is None else time.monotonic() + self._timeout
        self._claims.update(dict.fromkeys(request_ids, limit))

    def honour(self, request_id: str) -> None:
        """The driver told this one: if it was claimed, the claim is settled."""
        self._claims.pop(request_id, None)

    def expect_claim(self, told: ToldRequest) -> None:
        """The driver told this one first; this rank's script may still add it."""
        self._unclaimed[told.request_id] = told
        if len(self._unclaimed) > MAX_UNCLAIMED:
            del self._unclaimed[next(iter(self._unclaimed))]  # the oldest

    def claim_told(self, request_id: str) -> ToldRequest | None:
        """The request of this id that the driver told before this rank's script added it."""
        return self._unclaimed.pop(request_id, None)

    def take_expired(self) -> list[str]:
        """Claims whose time is over, struck off."""
        now = time.monotonic()
        expired = [request_id for request_id, limit in self._claims.items() if limit < now]
        for request_id in expired:
            del self._claims[request_id]
        return expired
