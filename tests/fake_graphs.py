"""A stand-in for CUDA graphs on the CPU.

A real recording bakes in the addresses it used and every number that Python read. This one keeps what
was run and runs it again: what it closed over when it was recorded is what it finds when it is replayed.
"""

from collections.abc import Callable

import pytest
import torch

import rollout.execution
from rollout.graphs import GraphBackend

Run = Callable[[], None]


class FakeGraphs:
    """A ``GraphBackend`` that counts; ``refuses`` makes it fail as a device that is waited for does."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0
        self.refuses = False

    def forget(self) -> None:
        pass

    def capture(self, run: Run) -> Run:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.num_captures += 1
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


def serve_graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    """From here on, engines on the CPU record their decode steps if they are told to."""
    graphs = FakeGraphs()

    def backend(device: torch.device) -> GraphBackend:
        assert device.type == "cpu"
        return graphs

    monkeypatch.setattr(rollout.execution, "graph_backend", backend)
    return graphs
