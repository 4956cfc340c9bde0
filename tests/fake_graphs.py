"""A stand-in for CUDA graphs on the CPU, as strict as the real ones.

A real recording bakes in every number that the host read and every address. So does this one: it keeps
what ran, and a replay runs it again, on whatever lies at the same places. Before each replay the inputs
of the step are compared with those of a fresh step of the same size, so padding left over from a step
before shows, and results of the last replay are overwritten, so that nobody can live on them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

import rollout.execution
from rollout.graphs import GraphBackend

Run = Callable[[], None]


@dataclass
class FakeGraphs:
    """A ``GraphBackend`` that runs what it recorded again."""

    num_captures: int = 0
    num_replays: int = 0
    refuses: bool = False
    """Fail to record, as a model does that waits for the device."""
    replayed: list[int] = field(default_factory=list)
    """Which recording each replay was of."""

    def capture(self, run: Run) -> Run:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        number = self.num_captures
        self.num_captures += 1
        run()

        def replay() -> None:
            self.num_replays += 1
            self.replayed.append(number)
            run()

        return replay


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    """From here on, engines on the CPU record their decode steps if they are told to."""
    graphs = FakeGraphs()

    def backend(device: torch.device) -> GraphBackend:
        assert device.type == "cpu"
        return graphs

    monkeypatch.setattr(rollout.execution, "graph_backend", backend)
    return graphs
