"""Peers in turn, several rounds, one process: medians and spread, and where the engine's time goes."""

import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm.auto import tqdm

from rollout.bench.peers import WARM_UP_REQUESTS, WARM_UP_TOKENS, Peer
from rollout.bench.workloads import Workload
from rollout.native import chosen_kernels

MICROSECONDS = 1e6
PROFILED_TOKENS = 16
LINEARS = ("mkldnn::_linear_pointwise", "aten::addmm", "aten::mm", "aten::linear", "multiply")
ATTENTION = (
    "scaled_dot_product",
    "aten::index_select",
    "aten::index_copy_",
    "aten::bmm",
    "aten::_softmax",
    "attend",
    "store",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One peer's rounds on one workload."""

    peer: str
    tokens_per_second: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median tokens per second over the rounds."""
        return statistics.median(self.tokens_per_second)

    @property
    def spread(self) -> float:
        """(fastest - slowest) / median."""
        return (max(self.tokens_per_second) - min(self.tokens_per_second)) / self.median


def measure(
    peers: Mapping[str, Callable[[], Peer]], workload: Workload, rounds: int
) -> tuple[list[Measurement], dict[str, Peer]]:
    """Run the peers in turn, ``rounds`` times after a short warm-up each.

    Returns the measurements and the peers, which the caller closes.
    """
    made: dict[str, Peer] = {}
    speeds: dict[str, list[float]] = {name: [] for name in peers}
    with tqdm(total=(rounds + 1) * len(peers), unit="run", desc=workload.name) as bar:
        try:
            for name, make in peers.items():
                bar.set_postfix_str(f"{name}: choosing and warming up")
                made[name] = make()
                _run(made[name], workload.shortened(WARM_UP_TOKENS, WARM_UP_REQUESTS))
                bar.update()
            for _ in range(rounds):
                for name, peer in made.items():
                    bar.set_postfix_str(name)
                    speeds[name].append(workload.num_tokens / _run(peer, workload))
                    bar.update()
        except BaseException:
            for peer in made.values():
                peer.close()  # a manager's thread would keep the process alive
            raise
    results = [Measurement(peer=name, tokens_per_second=tuple(each)) for name, each in speeds.items()]
    return results, made


def _run(peer: Peer, workload: Workload) -> float:
    peer.wake()
    try:
        return peer.run(workload)
    finally:
        peer.rest()


def operator_shares(peer: Peer, workload: Workload) -> dict[str, float]:
    """Shares of the time inside operators, torch's and compiled ones: linears, attention, other.

    One run of at most ``PROFILED_TOKENS`` each, so that prompts weigh more and keys less than in the whole
    workload. What Python itself takes between the operators is not in them.
    """
    short = workload.shortened(PROFILED_TOKENS)
    kernels = chosen_kernels("auto", torch.device("cpu"))
    with ExitStack() as stack:
        native = {} if kernels is None else stack.enter_context(kernels.timing())
        profiler = stack.enter_context(profile(activities=[ProfilerActivity.CPU]))
        _run(peer, short)
    seconds: defaultdict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        seconds[_part(event.key)] += event.self_cpu_time_total / MICROSECONDS
    for name, value in native.items():
        seconds[_part(name)] += value
    total = sum(seconds.values())
    return {part: seconds[part] / total for part in ("linears", "attention", "other")}


def _part(operator: str) -> str:
    if operator in LINEARS:
        return "linears"
    return "attention" if any(name in operator for name in ATTENTION) else "other"


def host_facts() -> dict[str, Any]:
    """What a reader of the figures must know about the machine and this process."""
    capabilities = torch.cpu.get_capabilities()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "compiled_kernels": chosen_kernels("auto", torch.device("cpu")) is not None,
        "cpu": capabilities.get("cpu_name"),
        "avx512_bf16": capabilities.get("avx512_bf16", False),
        "amx_bf16": capabilities.get("amx_bf16", False),
    }


def peak_memory_bytes() -> int:
    """Of the whole process so far: meaningful for a peer that runs alone, on its first workload."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
