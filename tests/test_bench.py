"""The bench measures what it says: same tokens for every peer, limits by the stated arithmetic."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout import SamplingParams
from rollout.bench.limits import MachineRates, MeasuredRates, ModelCost, least_seconds, measure_rates
from rollout.bench.measure import measure
from rollout.bench.peers import (
    EnginePeer,
    GeneratePeer,
    TransformersPeer,
    WeightChanges,
    release_idle_threads,
    timed_rollouts,
)
from rollout.bench.report import run_bench
from rollout.bench.workloads import WORKLOADS, Workload, make_workload
from tiny_models import TINY_MODELS
from tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer

# transformers' batching warns of its own defaults, and its thread of the pages it is given
pytestmark = pytest.mark.filterwarnings("default")

PLAIN = SamplingParams(ignore_eos=True)


def tiny_model() -> torch.nn.Module:
    return TINY_MODELS["llama"](vocab_size=VOCAB_SIZE, max_position_embeddings=2048)


def workload(prompts: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]], **more: int) -> Workload:
    samples = tuple(tuple(replace(PLAIN, max_new_tokens=length) for length in row) for row in lengths)
    return Workload(name="test", prompts=tuple(map(tuple, prompts)), samples=samples, **more)


@pytest.mark.parametrize(
    "name, completions, prompts",
    [
        ("grpo", 128, 32),
        ("grpo-16x16", 256, 16),
        ("grpo-top-p", 128, 32),
        ("grpo-mixed", 128, 32),
        ("long-prompt", 64, 8),
        ("tail", 64, 64),
        ("scale-16", 16, 16),
        ("scale-512", 512, 512),
        ("steps", 64, 16),
        ("single", 1, 1),
    ],
)
def test_workloads_have_the_stated_sizes(name: str, completions: int, prompts: int) -> None:
    load = make_workload(name, tiny_tokenizer())
    assert len(load.requests) == completions and len(load.prompts) == len(set(load.prompts)) == prompts
    assert all(params.ignore_eos for _, _, params in load.requests)
    assert load.num_tokens == load.num_rollouts * sum(p.max_new_tokens for _, _, p in load.requests)


def test_workloads_differ_in_what_their_names_say() -> None:
    loads = {name: make_workload(name, tiny_tokenizer()) for name in WORKLOADS}
    assert {p.top_p for _, _, p in loads["grpo-top-p"].requests} == {0.95}
    assert len({(p.temperature, p.top_p, p.top_k) for _, _, p in loads["grpo-mixed"].requests}) == 4
    assert {len(prompt) for prompt in loads["long-prompt"].prompts} == {1024}
    lengths = sorted(p.max_new_tokens for _, _, p in loads["tail"].requests)
    assert lengths[:62] == [24] * 62 and lengths[62:] == [384, 384]
    assert loads["steps"].num_rollouts == 5
    few = loads["steps"].shortened(3, most_requests=6)  # four of the first prompt, two of the second
    assert few.prompts == loads["steps"].prompts[:2] and [len(row) for row in few.samples] == [4, 2]
    grpo = loads["grpo"]
    fourth = grpo.scaled_down(4, most_prompt_tokens=len(grpo.prompts[0]) * 4 + len(grpo.prompts[1]))
    assert [len(row) for row in fourth.samples] == [4, 1]
    lengths = [-(-p.max_new_tokens // 4) for p in grpo.samples[0]]
    assert [p.max_new_tokens for p in fourth.samples[0]] == lengths
    assert len(loads["long-prompt"].scaled_down(4, most_prompt_tokens=1).requests) == 1
    short = loads["steps"].shortened(3)
    assert short.num_rollouts == 1 and max(p.max_new_tokens for _, _, p in short.requests) == 3
    with pytest.raises(ValueError, match="known: grpo"):
        make_workload("no such", tiny_tokenizer())


def test_the_least_time_is_the_stated_arithmetic() -> None:
    """Two samples of one prompt of 3 tokens, 1 and 3 new ones; each rate binds once."""
    cost = ModelCost(body_flops=10, head_flops=2, weight_bytes=100, kv_bytes=1, attention_flops=1)
    load = workload([[1, 2, 3]], [[1, 3]])
    prefill, second, third = 10 * 3 + 2 + 6, 12 + 4, 12 + 5  # flops; 4 and 5 keys
    slow_arithmetic = MachineRates(flops=1.0, bytes_per_second=1e9)
    assert least_seconds(load, cost, slow_arithmetic) == pytest.approx(prefill + second + third)
    slow_memory = MachineRates(flops=1e9, bytes_per_second=1.0)
    assert least_seconds(load, cost, slow_memory) == pytest.approx(103 + 104 + 105)
    twice = replace(load, num_rollouts=2)
    assert least_seconds(twice, cost, slow_memory) == pytest.approx(2 * (103 + 104 + 105))
    # a second prompt that begins with the same two tokens needs one more token, and a draw of its own
    branching = workload([[1, 2, 3], [1, 2, 4]], [[1], [1]])
    assert least_seconds(branching, cost, slow_arithmetic) == pytest.approx(10 * 4 + 2 * 2 + (1 + 2 + 3 + 3))
    assert least_seconds(branching, cost, slow_memory) == pytest.approx(100 + 4)
    # what several rows see of their prompts' beginnings is read once: 3 or 4 keys, and each row's own
    two = workload([[1, 2, 3]], [[2, 2]])
    assert least_seconds(two, cost, slow_memory) == pytest.approx(103 + 100 + 3 + 2)
    both = workload([[1, 2, 3], [1, 2, 4]], [[2], [3]])
    keys = (4, 4 + 2, 3 + 2)
    assert least_seconds(both, cost, slow_memory) == pytest.approx(sum(100 + each for each in keys))
    assert least_seconds(both, cost, slow_arithmetic) == pytest.approx((10 * 4 + 4 + 9) + (24 + 8) + (12 + 5))


def test_the_cost_counts_the_models_linears() -> None:
    model = TINY_MODELS["llama"](vocab_size=VOCAB_SIZE)
    config = model.config
    cost = ModelCost.of(model)
    assert cost.head_flops == 2 * VOCAB_SIZE * config.hidden_size
    body = sum(p.numel() for n, p in model.named_parameters() if "proj" in n)
    assert cost.body_flops == 2 * body and cost.weight_bytes == 4 * (body + VOCAB_SIZE * config.hidden_size)
    assert cost.kv_bytes == 2 * 2 * 2 * config.head_dim * 4  # layers, kv heads, fp32


def test_idle_threads_are_given_up() -> None:
    if torch.get_num_threads() == 1:
        pytest.skip("one thread has no workers")
    x = torch.ones(2**22)
    x.exp()
    before = len(os.listdir("/proc/self/task"))
    release_idle_threads()
    left = len(os.listdir("/proc/self/task"))
    assert left < before
    x.exp()
    assert len(os.listdir("/proc/self/task")) > left  # there are workers again where they are needed


def test_rates_are_of_this_machine() -> None:
    rates = measure_rates(torch.float32)
    assert rates.best.flops >= rates.usual.flops > 1e9
    assert rates.best.bytes_per_second >= rates.usual.bytes_per_second > 1e8


def test_of_several_measurements_the_best_and_the_mean_of_the_usual_count() -> None:
    def rates(number: float) -> MachineRates:
        return MachineRates(flops=number, bytes_per_second=number * 10)

    both = [MeasuredRates(best=rates(8), usual=rates(2)), MeasuredRates(best=rates(6), usual=rates(4))]
    assert MeasuredRates.over(both) == MeasuredRates(best=rates(8), usual=rates(3))


class FakePeer:
    """Takes a second more with every call and notes who was called with what."""

    setting = "fake"

    def __init__(self, name: str, calls: list[tuple[str, int]]) -> None:
        self.name, self.calls = name, calls
        self.is_awake = False

    def wake(self) -> None:
        self.is_awake = True

    def rest(self) -> None:
        self.is_awake = False

    def run(self, workload: Workload) -> float:
        assert self.is_awake
        self.calls.append((self.name, workload.num_tokens))
        return float(len(self.calls))

    def close(self) -> None:
        pass


def test_rounds_are_interleaved_after_a_short_warm_up() -> None:
    calls: list[tuple[str, int]] = []
    load = workload([[1, 2]], [[60]])
    makers = {name: lambda name=name: FakePeer(name, calls) for name in ("a", "b")}
    results, made = measure(makers, load, rounds=2)
    assert not any(peer.is_awake for peer in made.values())
    assert calls == [("a", 4), ("b", 4), ("a", 60), ("b", 60), ("a", 60), ("b", 60)]
    first, second = results
    assert first.tokens_per_second == (60 / 3, 60 / 5) and second.tokens_per_second == (60 / 4, 60 / 6)
    assert first.median == 16.0 and first.spread == pytest.approx(8 / 16)


def test_a_peer_that_fails_closes_the_others() -> None:
    """transformers' manager runs a thread, which would keep the process from ending."""
    closed = []

    class Closing(FakePeer):
        def close(self) -> None:
            closed.append(self.name)

    def fail() -> FakePeer:
        raise RuntimeError("no such peer")

    makers = {"a": lambda: Closing("a", []), "b": fail}
    with pytest.raises(RuntimeError, match="no such peer"):
        measure(makers, workload([[1]], [[2]]), rounds=1)
    assert closed == ["a"]


def test_a_peer_that_generates_less_is_found_out() -> None:
    load = workload([[1, 2]], [[5]], num_rollouts=2)
    model = tiny_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    versions = []

    def rollout() -> int:
        versions.append([p.sum().item() for p in model.parameters()])
        return 4

    with pytest.raises(RuntimeError, match="8 tokens were generated, 10 were asked"):
        timed_rollouts(load, WeightChanges(model), rollout)
    assert versions[0] != versions[1]  # the weights changed between the rollouts
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("make", [EnginePeer, TransformersPeer, GeneratePeer])
def test_every_peer_generates_a_mixed_workload(make: type) -> None:
    load = workload([[1, 2, 3], [7, 8]], [[3, 1], [2, 2]], num_rollouts=2)
    mixed = replace(load, samples=(load.samples[0], (replace(load.samples[1][0], top_k=5),) * 2))
    model = tiny_model()
    peer = make(model) if make is EnginePeer else make(model, mixed)
    try:
        peer.wake()
        assert peer.run(mixed) > 0
        peer.rest()
    finally:
        peer.close()
    assert model.config._attn_implementation == tiny_model().config._attn_implementation


def test_each_run_of_the_engine_computes_its_prompts() -> None:
    """What a run finds of the one before it would be lost in a training, whose weights change."""
    load = workload([list(range(40))], [[2, 2]])
    peer, seen = EnginePeer(tiny_model()), []
    for _ in range(2):
        peer.wake()
        peer.run(load)
        seen.append(peer.metrics[-1])
    assert seen[1].weight_version == seen[0].weight_version + 1
    assert seen[1].cached_tokens == seen[0].cached_tokens == 40  # of the second sample alone
    assert seen[1].computed_tokens == seen[0].computed_tokens


def test_a_whole_bench_gives_records_that_json_takes() -> None:
    def load() -> Any:
        return tiny_model(), tiny_tokenizer()

    records = run_bench(load, workloads=["single"], peers=["rollout", "generate"], rounds=2)
    (record,) = json.loads(json.dumps(records))
    assert record["ratio"]["generate"] == record["median"]["rollout"] / record["median"]["generate"]
    assert 0 < record["share_of_limit"] <= record["share_of_usual_limit"]
    assert record["share_of_limit"] < 1
    assert sum(record["shares_of_operators"].values()) == pytest.approx(1)
    assert record["seconds_by_stage"]["forward"] > 0 and record["num_steps"] == 64
    with pytest.raises(ValueError, match="known: rollout"):
        run_bench(load, workloads=["single"], peers=["vllm"], rounds=1)
    with pytest.raises(ValueError, match="known: grpo"):  # before anything is loaded
        run_bench(lambda: 1 / 0, workloads=["singel"], peers=["rollout"], rounds=1)
