"""Plans made before the last tokens are known, against the shadow of ``test_scheduler.py``.

The shadow runs each plan with the tokens that were really drawn; the scheduler makes it without them.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from rollout.sequence import Sequence, SequenceState, StepPlan
from rollout.types import DrawnToken, FinishReason
from test_scheduler import CLEARED, EVENTS_PER_WORLD, WORLDS, Driver, RandomEvents, World, rows

UNKNOWN = -1


@dataclass
class Flight:
    """A plan that runs, and the tokens that nobody read yet."""

    plan: StepPlan
    drawing: list[Sequence]
    tokens: list[int]


class AheadDriver(Driver):
    """Plans a step while the one before it runs; 0 ends a sequence, which cannot be foreseen."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.flight: Flight | None = None
        self.ending_token: int | None = None

    def step(self) -> StepPlan | None:
        flight, self.flight = self.flight, None
        if flight is None:
            plan = self.plan()
            flight = None if plan is None else self.launch(plan)
        if flight is not None:
            self.scheduler.commit(flight.plan)
            self.look_ahead(flight)
            self.land(flight)
        self.check()
        return None if flight is None else flight.plan

    def launch(self, plan: StepPlan) -> Flight:
        drawing = plan.drawing()
        return Flight(plan, drawing, [self.draw(sequence) for sequence in drawing])

    def look_ahead(self, flight: Flight) -> None:
        drawn = [(s, t) for s, t in zip(flight.drawing, flight.tokens, strict=True) if s.is_running]
        for sequence, _ in drawn:
            sequence.ids.append(UNKNOWN)
        ending = {id(s) for s, _ in drawn if s.num_generated >= s.request.params.max_new_tokens}
        before = self.scheduler.running, self.scheduler.waiting
        plan = self.scheduler.plan_ahead(ending)
        assert (self.scheduler.running, self.scheduler.waiting) == before, "ended or started by a guess"
        for sequence, token in drawn:
            sequence.ids[-1] = token
        if plan is not None:
            self.shadow.run(plan, self.version, self.scheduler.running)
            self.flight = self.launch(plan)
            self.seen["ahead"] += 1
        for sequence, _ in drawn:
            sequence.ids.pop()

    def land(self, flight: Flight) -> None:
        for sequence, token in zip(flight.drawing, flight.tokens, strict=True):
            if sequence.state is SequenceState.FINISHED:
                self.seen["late"] += 1
                continue
            sequence.append(DrawnToken(token, -1.0, -1.0, 0.0), self.version)
            if token == self.ending_token:
                self.scheduler.finish(sequence, FinishReason.EOS)
            elif sequence.num_generated >= sequence.request.params.max_new_tokens:
                self.scheduler.finish(sequence, FinishReason.LENGTH)
        if self.flight is not None and not self.scheduler.confirm(self.flight.plan):
            self.flight = None

    def settle(self) -> None:
        """Take the tokens in flight over, without another step."""
        flight, self.flight = self.flight, None
        if flight is not None:
            self.scheduler.commit(flight.plan)
            self.land(flight)

    def forget_flight(self) -> None:
        """What it wrote is written again; its pages stay with the sequences."""
        if self.flight is not None:
            self.seen["forgotten"] += 1
            for row in self.flight.plan.rows:
                if row.sequence.is_running:
                    for group in range(len(self.windows)):
                        self.shadow.slots[self.shadow.place(row.sequence, group, row.start)] = CLEARED
        self.flight = None

    def change_weights(self, policy: str) -> None:
        self.forget_flight()
        super().change_weights(policy)


class RandomEventsAhead(RandomEvents):
    """The same events, with a step in flight where one can be."""

    driver: AheadDriver
    driver_class = AheadDriver

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.driver.ending_token = 0 if seed % 2 else None

    def preempt(self) -> None:
        self.driver.settle()
        super().preempt()

    def replace_tables(self) -> None:
        self.driver.forget_flight()
        super().replace_tables()

    def fail_in_a_step(self) -> None:
        self.driver.settle()
        super().fail_in_a_step()

    def interrupt_a_step(self) -> None:
        self.driver.settle()
        super().interrupt_a_step()


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_random_events_with_steps_planned_ahead(world: World) -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        events = RandomEventsAhead(world, seed)
        events.run(EVENTS_PER_WORLD // 4)
        events.driver.drain()
        seen += events.driver.seen
    missing = {kind for kind in ("ahead", "late", "forgotten", "eos", "length") if not seen[kind]}
    assert not missing, seen


def ahead(**settings: Any) -> AheadDriver:
    driver = AheadDriver(num_pages=settings.pop("num_pages", 16), **settings)
    driver.submit([1, 2, 3], max_new_tokens=4)
    driver.submit([4, 5, 6], max_new_tokens=3)
    return driver


def in_flight(driver: AheadDriver) -> list[tuple[str, int, int]] | None:
    return None if driver.flight is None else rows(driver.flight.plan)


def test_a_step_is_planned_with_the_places_of_tokens_alone() -> None:
    driver = ahead()
    driver.step()
    assert in_flight(driver) == [("r0.0", 3, 1), ("r1.0", 3, 1)]
    driver.step()
    assert in_flight(driver) == [("r0.0", 4, 1), ("r1.0", 4, 1)]
    driver.step()  # r1's third token is its last: that much is known
    assert in_flight(driver) == [("r0.0", 5, 1)]
    driver.step()
    assert in_flight(driver) is None and not driver.scheduler.has_work


def test_what_waits_and_could_start_is_not_kept_waiting() -> None:
    driver = ahead(max_requests_per_batch=2)
    driver.submit([7, 8, 9], max_new_tokens=1)
    driver.step()
    assert in_flight(driver) is not None  # no place: it waits anyway
    driver.step()
    assert in_flight(driver) is not None
    driver.step()  # r1 ends, foreseen: r2 takes its place in the next step
    assert in_flight(driver) is None
    assert rows(driver.step()) == [("r0.0", 5, 1), ("r2.0", 0, 3)]
    late = ahead()
    late.step()
    late.submit([7, 8, 9], max_new_tokens=1)
    late.step()
    assert in_flight(late) is None
    assert ("r2.0", 0, 3) in rows(late.step())


def test_nobody_is_preempted_or_ended_for_a_token_that_may_not_be_wanted() -> None:
    driver = AheadDriver(num_pages=2)
    driver.submit([1, 2, 3, 4, 5, 6, 7], max_new_tokens=9)
    driver.step()
    assert in_flight(driver) == [("r0.0", 7, 1)]
    driver.step()  # both pages are full
    assert in_flight(driver) is None and driver.scheduler.running
    driver.step()
    assert [s.finish_reason for s in driver.finished] == ["cache_full"]


def test_a_prompt_with_one_token_left_may_start_forks_and_is_not_planned_ahead() -> None:
    """It looks like a decoding sequence; ahead, its other samples were forgotten until it had grown."""
    driver = AheadDriver(num_pages=16, max_batch_tokens=6)
    driver.submit([1, 2, 3, 4, 5, 6, 7], n=3, max_new_tokens=2)
    assert rows(driver.step()) == [("r0.0", 0, 6)]
    assert in_flight(driver) is None
    plan = driver.step()
    assert rows(plan) == [("r0.0", 6, 1)]
    assert plan is not None and len(plan.rows[0].forks) == 2
    driver.drain()


def test_full_pages_are_found_when_their_tokens_are_known() -> None:
    driver = AheadDriver(num_pages=16)
    (first,) = driver.submit([1, 2, 3], max_new_tokens=8)
    driver.drain()
    driver.submit([*first.ids, 5], max_new_tokens=1)
    plan = driver.step()
    assert rows(plan) == [("r1.0", 8, 4)]  # two pages of four
