"""The whole of ``rollout bench``: workloads one after the other, a table each, records for JSON."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollout.bench.limits import MeasuredRates, ModelCost, least_seconds, measure_rates
from rollout.bench.measure import Measurement, measure, operator_shares, peak_memory_bytes
from rollout.bench.peers import EnginePeer, GeneratePeer, Peer, TransformersPeer
from rollout.bench.workloads import Workload, check_name, make_workload

OURS = "rollout"
OTHERS = ("transformers", "generate")
ENGINES: dict[str, dict[str, Any]] = {
    OURS: {},
    "rollout-torch": {"native_kernels": False},
    "rollout-unpacked": {"pack_weights": False},
}
"""The engine's own ways, to see what its parts are worth."""
PEERS = (*ENGINES, *OTHERS)
DEFAULT_PEERS = (OURS, *OTHERS)


def run_bench(
    load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]],
    *,
    workloads: Sequence[str],
    peers: Sequence[str],
    rounds: int,
) -> list[dict[str, Any]]:
    """Measure, print a table per workload to stderr, and return a record per workload.

    Args:
        load: gives a model of its own, on the CPU, to each peer (equal weights), and its tokenizer.
        workloads, peers: names, see ``WORKLOADS`` and ``PEERS``.

    Raises:
        ValueError: an unknown name, or ``rounds`` below 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: give at least 1")
    unknown = [name for name in peers if name not in PEERS]
    if unknown or not peers:
        raise ValueError(f"peers {', '.join(unknown) or 'are missing'}; known: {', '.join(PEERS)}")
    for name in workloads:
        check_name(name)
    loaded = {name: load() for name in peers}
    first, tokenizer = loaded[peers[0]]
    cost = ModelCost.of(first)
    records = []
    for name in workloads:
        workload = make_workload(name, tokenizer)
        rates = measure_rates(first.dtype)
        makers = {peer: partial(_make, peer, model, workload) for peer, (model, _) in loaded.items()}
        results, made = measure(makers, workload, rounds)
        try:
            rates = MeasuredRates.over([rates, measure_rates(first.dtype)])
            records.append(_record(workload, results, made, cost, rates))
        finally:
            for peer in made.values():
                peer.close()
        Console(stderr=True).print(*_tables(records[-1]))
    return records


def _make(name: str, model: PreTrainedModel, workload: Workload) -> Peer:
    if name in ENGINES:
        return EnginePeer(model, ENGINES[name])
    return TransformersPeer(model, workload) if name == "transformers" else GeneratePeer(model, workload)


def _record(
    workload: Workload,
    results: Sequence[Measurement],
    made: dict[str, Peer],
    cost: ModelCost,
    rates: MeasuredRates,
) -> dict[str, Any]:
    limit = workload.num_tokens / least_seconds(workload, cost, rates.best)
    usual_limit = workload.num_tokens / least_seconds(workload, cost, rates.usual)
    record: dict[str, Any] = {
        "workload": workload.name,
        "tokens": workload.num_tokens,
        "limit_tokens_per_second": limit,
        "gemm_gflops": rates.best.flops / 1e9,
        "memory_gb_per_second": rates.best.bytes_per_second / 1e9,
        "usual_limit_tokens_per_second": usual_limit,
        "usual_gemm_gflops": rates.usual.flops / 1e9,
        "usual_memory_gb_per_second": rates.usual.bytes_per_second / 1e9,
        "peak_memory_bytes": peak_memory_bytes(),
        "settings": {name: peer.setting for name, peer in made.items()},
        "tokens_per_second": {result.peer: result.tokens_per_second for result in results},
        "median": {result.peer: result.median for result in results},
        "spread": {result.peer: result.spread for result in results},
    }
    ours = made.get(OURS)
    if isinstance(ours, EnginePeer):
        record["ratio"] = {r.peer: record["median"][OURS] / r.median for r in results if r.peer != OURS}
        record["share_of_limit"] = record["median"][OURS] / limit
        record["share_of_usual_limit"] = record["median"][OURS] / usual_limit
        stages = [metrics.seconds_by_stage for metrics in ours.metrics]
        record["seconds_by_stage"] = {stage: sum(s[stage] for s in stages) for stage in stages[0]}
        record["num_steps"] = sum(metrics.num_steps for metrics in ours.metrics)
        record["computed_tokens"] = sum(metrics.computed_tokens for metrics in ours.metrics)
        record["cached_tokens"] = sum(metrics.cached_tokens for metrics in ours.metrics)
        record["shares_of_operators"] = operator_shares(ours, workload)
    return record


def _tables(record: dict[str, Any]) -> list[Table]:
    title = f"{record['workload']}: {record['tokens']} tokens"
    speeds = Table("peer", "median tokens/s", "rounds", "rollout is faster by", title=title)
    for peer, rounds in record["tokens_per_second"].items():
        each = ", ".join(f"{speed:.1f}" for speed in rounds)
        ratio = record.get("ratio", {}).get(peer)
        speeds.add_row(
            f"{peer} ({record['settings'][peer]})",
            f"{record['median'][peer]:.1f}",
            each,
            f"{ratio:.2f}" if ratio else "",
        )
    for kind, words in (("", "at most, by"), ("usual_", "at rates usual in this run,")):
        flops, memory = record[f"{kind}gemm_gflops"], record[f"{kind}memory_gb_per_second"]
        limit = record[f"{kind}limit_tokens_per_second"]
        speeds.add_row(f"{words} {flops:.0f} GFLOP/s and {memory:.1f} GB/s", f"{limit:.1f}", "", "")
    if "share_of_limit" not in record:
        return [speeds]
    seconds = record["seconds_by_stage"]
    spent = Table("stage", "seconds", "share", title=f"rollout's last run, {record['num_steps']} steps")
    for stage, value in seconds.items():
        spent.add_row(stage, f"{value:.2f}", f"{value / sum(seconds.values()):.1%}")
    for part, share in record["shares_of_operators"].items():
        spent.add_row(f"operators: {part}", "", f"{share:.1%}")
    spent.add_row("speed against the limit", "", f"{record['share_of_limit']:.1%}")
    spent.add_row("... at usual rates", "", f"{record['share_of_usual_limit']:.1%}")
    return [speeds, spent]
