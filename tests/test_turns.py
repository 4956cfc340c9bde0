"""Turns of a manager among ranks: what is told, held back, claimed; the ranks themselves are faked."""

import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch

from rollout import SamplingParams
from rollout.parallel import Ranks
from rollout.turns import HEARTBEAT, ToldRequest, Turns, Wishes


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
    assert turns.honour("a") and not turns.honour("a") and not turns.honour("never claimed")
    time.sleep(0.02)
    assert turns.take_expired() == ["b"] and turns.take_expired() == []


def test_without_a_timeout_no_claim_expires() -> None:
    turns = Turns(TwoRanks(local_rank=1), timeout=None)
    turns.claim(["a"])
    assert turns.take_expired() == [] and turns.honour("a")


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
