"""The loop behind a manager: takes what was added and cancelled, runs a step, delivers what came of it.

``EngineLoop`` serves a model that is whole. ``DividedLoop`` does the same on every rank of a model that is
divided among ranks, which agree on each turn (see :mod:`rollout.turns`).
"""

import dataclasses
import logging
import pickle
import threading
import time
from collections.abc import Iterable

from rollout.desk import Desk
from rollout.engine import RolloutEngine
from rollout.gate import Gate
from rollout.tickets import Ticket
from rollout.turns import STOPS, Orders, ToldRequest, Turns, Wishes
from rollout.types import Completion, RankError

logger = logging.getLogger("rollout")


class EngineLoop:
    """Turns of a loop over an engine.

    Example::

        loop = EngineLoop(engine, desk, gate, changed)
        while loop.turn():
            pass
        loop.end()
    """

    def __init__(self, engine: RolloutEngine, desk: Desk, gate: Gate, changed: threading.Condition) -> None:
        self._engine, self._desk, self._gate, self._changed = engine, desk, gate, changed

    def begin(self) -> None:
        """Before the first turn, in the thread that starts the loop."""

    def turn(self) -> bool:
        """Wait for work, take commands, run one step. False when the loop is to end."""
        with self._changed:
            was_paused = self._wait_for_work()
            if self._gate.stopping == "hard":
                return False
            if self._gate.stopping and not (self._desk.has_news or self._engine.has_work):
                return False
            tickets, cancelled = self._desk.take()
        self._apply(tickets, cancelled)
        self._step(was_paused)
        return True

    def end(self) -> None:
        """After the last turn: whatever is unanswered is answered now, and memory goes back."""
        gate = self._gate
        reason = gate.fatal_error or RuntimeError("the manager was stopped before this request was done")
        try:
            self._abandon()
        except Exception:  # of an engine that is broken already: the answers go out all the same
            logger.exception("the engine could not give up its requests")
        finally:
            self._desk.answer_all(reason)

    def _wait_for_work(self) -> bool:
        """Returns with the lock held, outside any pause, when there is something to do; whether there was
        a pause."""
        was_paused = False
        while True:
            if self._gate.is_wanted:
                self._engine.synchronize()  # what was launched still reads the weights
            was_paused |= self._gate.let_pauses_pass()
            if self._desk.has_news or self._engine.has_work or self._gate.stopping:
                return was_paused
            self._changed.wait()

    def _apply(self, tickets: Iterable[Ticket], cancelled: Iterable[str]) -> None:
        for ticket in tickets:
            self._submit(ticket)
        for sample_id in cancelled:
            found = self._desk.find_sample(sample_id)
            if found is not None:
                self._engine.cancel_request(found[0].request_id, found[1])

    def _submit(self, ticket: Ticket) -> None:
        try:
            ticket.prompt_ids = self._engine.encode(ticket.prompt)
            self._engine.add_request(ticket.prompt_ids, ticket.params, request_id=ticket.request_id)
        except Exception as error:  # this request's own fault
            self._desk.answer(ticket, ticket.failed(error))

    def _step(self, was_paused: bool) -> bool:
        """Run a step if there is work, and deliver what came of it; whether there was work."""
        if not self._engine.has_work:
            return False
        began = time.perf_counter()
        finished = self._engine.step(thorough=was_paused)  # a glance misses what a fused optimizer wrote
        self._publish(finished, began, time.perf_counter())
        return True

    def _publish(self, finished: Iterable[Completion], began: float, ended: float) -> None:
        watched = {ticket.request_id: ticket for ticket in self._desk.unanswered if ticket.is_watched}
        for request_id, samples in self._engine.progress(watched).items():
            self._desk.mail.deliver(watched[request_id].observed(samples, began, ended))
        for completion in finished:
            found = self._desk.find(completion.request_id)
            if found is not None:  # else added to the engine behind our back
                self._desk.answer(found, [found.ended(completion, began, ended)])

    def _abandon(self) -> None:
        """Cancel what is left in the engine; its outputs will say what was generated."""
        tickets = {ticket.request_id: ticket for ticket in self._desk.unanswered}
        now = time.perf_counter()
        for request_id, samples in self._engine.progress(tickets).items():
            tickets[request_id].observed(samples, now, now)
        for request_id in sorted(tickets):  # the same order on all ranks
            self._engine.cancel_request(request_id)
        self._engine.take_finished()  # or they would answer later requests of these ids
        if not self._gate.keeps_memory:
            self._engine.release_memory()


class DividedLoop(EngineLoop):
    """The loop of one rank of a model that is divided: all ranks do what they agreed on, or wait together.

    ``turns`` are made by :meth:`begin`, and anew after they ended with an error.
    """

    turns: Turns | None = None

    def begin(self) -> None:
        """See the base class. All ranks must call it."""
        if self.turns is None:
            self.turns = Turns(self._engine.ranks.fork(), self._engine.config.cpu_group_timeout)
        self.turns.begin()

    def leave(self) -> None:
        """Take no more turns: the other ranks hear of it at once."""
        if self.turns is not None:
            self.turns.leave()
            self.turns = None

    def turn(self) -> bool:
        """See the base class."""
        turns, gate = self.turns, self._gate
        assert turns is not None
        was_stopping, was_paused = turns.last.stop is not None, turns.last.is_paused
        orders = turns.exchange(self._wishes(turns))
        with self._changed:
            if gate.stopping is None and orders.stop is not None:
                gate.keeps_memory = not orders.release  # another rank's wish, until one comes from here
            gate.stopping = max(gate.stopping, orders.stop, key=STOPS.index)
            gate.is_parked = orders.is_paused  # no rank steps before the next exchange
            self._changed.notify_all()
        if orders.is_paused:
            return True
        if orders.stop != "hard" and self._obey(turns, orders, was_paused):
            return True
        if orders.stop == "hard" or (was_stopping and not orders.requests):
            gate.keeps_memory = not orders.release
            return False
        return True

    def is_heard_later(self) -> bool:
        """Whether requests that nobody here added may still come, from the driver."""
        return self.turns is not None and not self.turns.is_driver and self._gate.is_looping

    def was_told(self, ticket: Ticket) -> bool:
        """Whether the driver's request came before this rank's script added the same one.

        Raises:
            RankError: it is another one.
        """
        told = None if self.turns is None else self.turns.claim_told(ticket.request_id)
        if told is not None and not ticket.told().asks_the_same(told):
            raise RankError(
                f"request {ticket.request_id!r} is another one on rank 0, which drives; add requests on "
                "rank 0, or the same ones on all ranks"
            )
        return told is not None

    def _wishes(self, turns: Turns) -> Wishes:
        """What this rank brings to the next exchange; the driver waits until there is something."""
        gate = self._gate
        with self._changed:
            if turns.is_driver:  # the others wait for it in the exchange
                self._changed.wait_for(lambda: self._is_wanted(turns), turns.heartbeat)
            # whoever pauses from here on is not part of this exchange and has to wait for the next
            gate.is_parked = gate.is_parked and gate.is_wanted
            tickets, cancelled = self._desk.take()
            if not turns.is_driver:
                turns.claim(ticket.request_id for ticket in tickets)
            wishes = Wishes(
                cancelled=cancelled,
                stop=gate.stopping,
                release=gate.stopping is not None and not gate.keeps_memory,
                pause=gate.is_wanted,
            )
        return dataclasses.replace(wishes, requests=self._packed(tickets)) if turns.is_driver else wishes

    def _packed(self, tickets: list[Ticket]) -> list[bytes]:
        packed = []
        for ticket in tickets:
            try:
                packed.append(pickle.dumps(ticket.told()))
            except Exception as error:  # whatever it holds: this request's own fault
                reason = TypeError(f"the request cannot be sent to the other ranks: {error}")
                self._desk.answer(ticket, ticket.failed(reason))
        return packed

    def _is_wanted(self, turns: Turns) -> bool:
        if self._gate.is_wanted != turns.wished_pause:
            return True
        has_news = bool(self._desk.has_news or self._gate.stopping or self._engine.has_work)
        return has_news and not turns.last.is_paused

    def _obey(self, turns: Turns, orders: Orders, was_paused: bool) -> bool:
        """Apply orders and run a step; whether there was one."""
        self._apply([self._ticket_of(turns, told) for told in orders.requests], orders.cancelled)
        for request_id in turns.take_expired():
            self._refuse_claim(request_id, "rank 0, which drives, did not add it within cpu_group_timeout")
        return self._step(was_paused)

    def _ticket_of(self, turns: Turns, told: ToldRequest) -> Ticket:
        """This rank's ticket of a request of the driver: its own, or one that its script added, too."""
        ticket = self._desk.find(told.request_id)
        if turns.is_driver:
            assert ticket is not None
            return ticket
        if ticket is not None:
            turns.honour(told.request_id)
            self._desk.withdraw(ticket)  # added since the exchange began: honoured before it is claimed
            if ticket.told().asks_the_same(told):
                return ticket
            self._refuse_claim(told.request_id, "rank 0, which drives, added another request under this id")
        ticket = Ticket(told.request_id, told.prompt, told.params, told.streaming, told.is_timed)
        with self._changed:
            self._desk.enter(ticket)
            turns.expect_claim(told)
        return ticket

    def _refuse_claim(self, request_id: str, why: str) -> None:
        ticket = self._desk.find(request_id)
        assert ticket is not None, "a claim without its ticket"
        rank = self._engine.ranks.local_rank
        error = RankError(
            f"request {request_id!r} was added on rank {rank} of a divided model and {why}; add requests on "
            "rank 0, or the same ones on all ranks"
        )
        self._desk.answer(ticket, ticket.failed(error))
