"""Speed beside the peers: what ``rollout bench`` runs (workloads, peers, limits, report)."""

from rollout.bench.measure import host_facts
from rollout.bench.report import DEFAULT_PEERS, PEERS, run_bench
from rollout.bench.workloads import WORKLOADS

__all__ = ["DEFAULT_PEERS", "PEERS", "WORKLOADS", "host_facts", "run_bench"]
