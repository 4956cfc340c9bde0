"""Turns of a manager among ranks: what is told, held back, claimed; the other rank is faked.

With real ranks, which of two comes first is chance: here it is written down.
"""

import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import rollout.turns
from rollout import RolloutEngine, SamplingParams
from rollout.manager import ContinuousBatchingManager
from rollout.parallel import Ranks
from rollout.turns import HEARTBEAT, ToldRequest, Turns, Wishes
from rollout.types import RankError
from tiny_models import TINY_MODELS


class TwoRanks(Ranks):
    """This rank and another one, whose wishes are given."""

    def __init__(self, local_rank: int) -> None:
        super().__init__(noise_rank=0)
        self.size, self.local_rank = 2, local_rank
        self.other = Wishes()
        self.num_gathers = 0

    def agree(self, doing: str, numbers: Sequence[int]) -> list[int]:
        stop, told = (
            (None, "flush", "hard").index(self.other.stop),
            self.other.requests or self.other.cancelled,
        )
        theirs = (stop, int(self.other.release), int(self.other.pause), int(bool(told)))
        return [max(pair) for pair in zip(numbers, theirs, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        self.num_gathers += 1
        theirs = (tuple(self.other.requests), tuple(self.other.cancelled))
        return [value, theirs] if self.is_driver else [theirs, value]


def told(request_id: str, prompt: Any = (1, 2), **params: Any) -> ToldRequest:
    return ToldRequest.of(request_id, prompt, SamplingParams(**params), streaming=False, is_timed=False)


def test_orders_are_the_drivers_requests_and_everybodys_cancellations_in_rank_order() -> None:
    requests = [pickle.dumps(told(name)) for name in ("a", "b")]
    ranks = TwoRanks(local_rank=1)
    ranks.other = Wishes(requests=requests, cancelled=["a", "c"], stop="flush", release=True)
    orders = Turns(ranks, timeout=None).exchange(Wishes(cancelled=["b"]))
    assert [request.request_id for request in orders.requests] == ["a", "b"]
    assert orders.cancelled == ("a", "c", "b")
    assert (orders.stop, orders.release, orders.is_paused) == ("flush", True, False)


def test_the_stronger_stop_counts() -> None:
    ranks = TwoRanks(local_rank=0)
    ranks.other = Wishes(stop="hard")
    assert Turns(ranks, timeout=None).exchange(Wishes(stop="flush")).stop == "hard"
    ranks.other = Wishes()
    assert Turns(ranks, timeout=None).exchange(Wishes(stop="flush")).stop == "flush"


def test_an_idle_turn_sends_nothing_but_numbers() -> None:
    ranks = TwoRanks(local_rank=0)
    orders = Turns(ranks, timeout=None).exchange(Wishes())
    assert ranks.num_gathers == 0 and not orders.requests and orders.stop is None


def test_what_is_told_during_a_pause_comes_after_it_in_order() -> None:
    ranks = TwoRanks(local_rank=0)
    turns = Turns(ranks, timeout=None)
    ranks.other = Wishes(pause=True)
    assert turns.exchange(Wishes(requests=[pickle.dumps(told("a"))], cancelled=["x"])).is_paused
    assert turns.exchange(Wishes(requests=[pickle.dumps(told("b"))])).is_paused
    ranks.other = Wishes()
    orders = turns.exchange(Wishes(requests=[pickle.dumps(told("c"))], cancelled=["y"]))
    assert [request.request_id for request in orders.requests] == ["a", "b", "c"]
    assert orders.cancelled == ("x", "y") and not orders.is_paused
    assert turns.exchange(Wishes()).requests == ()  # once


def test_a_new_session_knows_nothing_of_the_last_ones_stop() -> None:
    """A loop ends when it was stopping before a turn in which nothing came: a second one ended at once."""
    turns = Turns(TwoRanks(local_rank=0), timeout=None)
    turns.exchange(Wishes(stop="flush", pause=True))
    assert turns.last.stop == "flush" and turns.wished_pause
    turns.begin()
    assert turns.last.stop is None and not turns.wished_pause and not turns.last.is_paused


def test_claims_expire_unless_they_are_honoured() -> None:
    turns = Turns(TwoRanks(local_rank=1), timeout=0.01)
    turns.claim(["a", "b"])
    turns.honour("a")
    turns.honour("never claimed")
    time.sleep(0.02)
    assert turns.take_expired() == ["b"] and turns.take_expired() == []


def test_without_a_timeout_no_claim_expires() -> None:
    turns = Turns(TwoRanks(local_rank=1), timeout=None)
    turns.claim(["a"])
    assert turns.take_expired() == []


def test_requests_that_no_script_here_ever_adds_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout.turns, "MAX_UNCLAIMED", 2)
    turns = Turns(TwoRanks(local_rank=1), timeout=None)
    for name in ("a", "b", "c"):
        turns.expect_claim(told(name))
    assert turns.claim_told("a") is None and turns.claim_told("b") == told("b")
    assert turns.claim_told("b") is None  # once


def test_the_heartbeat_is_well_below_the_timeout() -> None:
    assert Turns(TwoRanks(local_rank=0), timeout=None).heartbeat == HEARTBEAT
    assert Turns(TwoRanks(local_rank=0), timeout=300.0).heartbeat == HEARTBEAT
    assert Turns(TwoRanks(local_rank=0), timeout=0.1).heartbeat == 0.025


def test_a_told_request_leaves_processors_behind_and_compares_prompts_of_any_kind() -> None:
    processors = (lambda ids, scores: scores,)
    one = told("a", [1, 2], logits_processors=processors, temperature=0.5)
    assert one.params.logits_processors == ()
    assert pickle.loads(pickle.dumps(one)) == one
    assert one.asks_the_same(told("other id", torch.tensor([1, 2]), temperature=0.5))
    assert not one.asks_the_same(told("a", [1, 2]))
    assert not one.asks_the_same(told("a", [1, 3], temperature=0.5))
    assert told("a", "text").asks_the_same(told("a", "text"))


# ---- a manager on the rank that does not drive


class Driver(TwoRanks):
    """The rank that drives, from the other one's side: what it says in its turns is scripted."""

    def __init__(self) -> None:
        super().__init__(local_rank=1)
        self.script: queue.Queue[Callable[[], Wishes]] = queue.Queue()

    def say(self, *requests: ToldRequest, **wishes: Any) -> None:
        """Have it come with these in one of its next turns."""
        said = Wishes(requests=[pickle.dumps(request) for request in requests], **wishes)
        self.script.put(lambda: said)

    def agree(self, doing: str, numbers: Sequence[int]) -> list[int]:
        try:
            self.other = self.script.get(timeout=0.005)()
        except queue.Empty:
            self.other = Wishes()
        return super().agree(doing, numbers)


TOLD = {"temperature": 0, "max_new_tokens": 6}
GREEDY = SamplingParams(**TOLD)
SECONDS = 30.0


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def follower(driver: Driver) -> Iterator[ContinuousBatchingManager]:
    engine = RolloutEngine(TINY_MODELS["llama"](), config={"page_size": 4, "cpu_group_timeout": 0.6})
    engine._ranks = driver
    manager = ContinuousBatchingManager(engine, GREEDY)
    manager.start()
    yield manager
    manager.stop(hard_stop=True, timeout=SECONDS)
    assert not manager.is_running()


@pytest.fixture(scope="module")
def expected() -> list[int]:
    (completion,) = RolloutEngine(TINY_MODELS["llama"]()).generate([[1, 2]], GREEDY)
    return list(completion.token_ids)


def assert_answered_once(manager: ContinuousBatchingManager, request_id: str, tokens: list[int]) -> None:
    output = manager.get_result(request_id, timeout=SECONDS)
    assert output is not None and output.error is None and output.generated_tokens == tokens
    assert manager.get_result(request_id, timeout=0.9) is None  # not even when its claim would expire
    assert not manager._desk.unanswered
    assert manager.is_running() and manager.fatal_error is None


@pytest.mark.parametrize("stop", ["flush", "hard"])
@pytest.mark.parametrize("release", [False, True])
def test_a_stop_of_the_driver_keeps_memory_if_it_says_so(
    driver: Driver, follower: ContinuousBatchingManager, stop: str, release: bool
) -> None:
    driver.say(told("a", **TOLD))
    assert follower.get_result("a", timeout=SECONDS).error is None
    driver.say(stop=stop, release=release)
    follower.join(SECONDS)
    assert not follower.is_running()
    assert (follower.engine.cache_bytes > 0) is not release


def test_what_the_driver_adds_is_answered_here(
    driver: Driver, follower: ContinuousBatchingManager, expected: list[int]
) -> None:
    driver.say(told("a", **TOLD))
    assert_answered_once(follower, "a", expected)


def test_a_script_that_adds_before_the_driver_gets_the_drivers_output(
    driver: Driver, follower: ContinuousBatchingManager, expected: list[int]
) -> None:
    assert follower.add_request([1, 2], request_id="a") == "a"
    driver.say()
    driver.say(told("a", **TOLD))
    assert_answered_once(follower, "a", expected)


def test_a_script_that_adds_after_the_driver_gets_the_output_that_was_there(
    driver: Driver, follower: ContinuousBatchingManager, expected: list[int]
) -> None:
    driver.say(told("a", **TOLD))
    output = follower.get_result("a", timeout=SECONDS)
    assert output is not None and output.generated_tokens == expected
    assert follower.add_request([1, 2], request_id="a") == "a"
    assert follower.get_result("a", timeout=0.9) is None  # nothing is computed twice
    with pytest.raises(RankError, match="is another one on rank 0"):
        driver.say(told("b", **TOLD))
        assert follower.get_result("b", timeout=SECONDS) is not None
        follower.add_request([1, 3], request_id="b")


def test_a_script_that_adds_while_the_driver_tells_gets_one_output(
    driver: Driver, follower: ContinuousBatchingManager, expected: list[int]
) -> None:
    """Added after this rank's wishes of the turn were taken: its ticket was lost and failed later."""

    def meanwhile() -> Wishes:
        assert follower.add_request([1, 2], request_id="a") == "a"
        return Wishes(requests=[pickle.dumps(told("a", **TOLD))])

    driver.script.put(meanwhile)
    assert_answered_once(follower, "a", expected)


def test_another_request_under_the_drivers_id_fails_here_and_the_drivers_is_computed(
    driver: Driver, follower: ContinuousBatchingManager, expected: list[int]
) -> None:
    follower.add_request([1, 3], request_id="a")
    driver.say()
    driver.say(told("a", **TOLD))
    refused, computed = (follower.get_result("a", timeout=SECONDS) for _ in range(2))
    assert refused is not None and "added another request under this id" in str(refused.error)
    assert computed is not None and computed.generated_tokens == expected


def test_a_request_that_the_driver_never_adds_fails_when_the_time_is_over(
    follower: ContinuousBatchingManager,
) -> None:
    follower.add_request([1, 2], request_id="a", n=2)
    outputs = [follower.get_result(name, timeout=SECONDS) for name in ("a", "a__child#0")]
    for output in outputs:
        assert output is not None and "did not add it within cpu_group_timeout" in str(output.error)
    assert not follower._desk.unanswered


def test_a_pause_of_the_driver_holds_this_rank_until_it_ends(
    driver: Driver, follower: ContinuousBatchingManager, expected: list[int]
) -> None:
    for _ in range(20):
        driver.say(pause=True)
    driver.say(told("a", **TOLD), pause=True)
    while driver.script.qsize() > 10:
        time.sleep(0.001)
    assert follower.get_result("a", timeout=0.0) is None
    assert_answered_once(follower, "a", expected)


def test_a_pause_here_is_not_entered_again_before_the_next_exchange(
    driver: Driver, follower: ContinuousBatchingManager
) -> None:
    """Left and entered at once, the loop was seen parked still, and stepped with the pause held."""
    taken, entered, early = threading.Event(), threading.Event(), []

    def first_without_pause() -> Wishes:
        if follower._divided.turns is not None and follower._divided.turns.wished_pause:
            driver.script.put(first_without_pause)
        else:
            taken.set()  # this rank's wishes are on their way, and there is no pause in them
            early.append(entered.wait(0.3))
        return Wishes()

    with follower.pause():
        driver.script.put(first_without_pause)
    assert taken.wait(SECONDS)
    with follower.pause():
        entered.set()
    assert early == [False]


def test_a_script_that_adds_after_the_driver_stopped_still_gets_the_outputs(
    driver: Driver, follower: ContinuousBatchingManager, expected: list[int]
) -> None:
    """The driver's script was done before this one began: what was answered is there all the same."""
    driver.say(told("req_0", **TOLD), stop="flush")
    driver.say(stop="flush")
    driver.say(stop="flush")
    follower.join(timeout=SECONDS)
    assert not follower.is_running()
    assert follower.add_requests([[1, 2]]) == ["req_0"]
    (output,) = follower
    assert output.generated_tokens == expected
    assert follower.add_request([1, 2]) is None  # the driver added no other


def test_the_drivers_stop_ends_the_loop_here_and_it_can_start_again(
    driver: Driver, follower: ContinuousBatchingManager, expected: list[int]
) -> None:
    for _ in range(2):
        time.sleep(0.05)  # turns in which nothing comes
        driver.say(told("a", **TOLD))
        assert follower.get_result("a", timeout=SECONDS) is not None
        for _ in range(3):
            driver.say(stop="flush", release=True)
        follower.join(timeout=SECONDS)
        assert not follower.is_running() and follower.engine.cache_bytes == 0
        while not driver.script.empty():
            driver.script.get()
        follower.start()
