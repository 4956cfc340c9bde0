"""Paged kernels inside recorded steps, beside offloading, overlap and tight pages: the plain engine's tokens.

The kernels are the fakes that check every argument, the recorder is the one that runs again what it
recorded.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rollout.attention
from fake_graphs import serve_graphs
from fake_kernels import FakeFlash2, FakeFlash3, FakeVarlen
from rollout import RolloutBatch, RolloutEngine, SamplingParams
from rollout.batch import build_batch
from rollout.runs import RunRules
from rollout.sequence import PlannedRow, Request, Sequence, StepPlan
from rollout.static import GraphSizes, StaticStep, with_runs
from tiny_models import TINY_MODELS

PROMPTS = [[5], [3, 1, 4, 1, 5], list(range(17)), list(range(40, 70)), [9, 9], [7, 8, 9, 10]]
PARAMS = [
    SamplingParams(max_new_tokens=10 + i, n=2, seed=i, temperature=t)
    for i, t in enumerate([0, 1.0, 0.7, 0, 1.0, 0.9])
]
KERNELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "flash 2": ("flash", FakeFlash2),
    "flash 3": ("flash", FakeFlash3),
    "varlen": ("varlen", FakeVarlen),
    "varlen on flash 3": ("varlen", lambda: FakeVarlen(is_fa3=True)),
}
NUM_BLOCKS = {"llama": 20, "gemma3": 20, "mistral": 8}
"""Few enough that sequences have to make room."""


def run(name: str, **settings: Any) -> RolloutBatch:
    config = {"page_size": 4, "num_blocks": NUM_BLOCKS[name], **settings}
    engine = RolloutEngine(TINY_MODELS[name](eos_token_id=[5, 17, 40, 71]), config=config)
    batch = engine.generate(PROMPTS, PARAMS, on_error="return")
    engine.check()
    return batch


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_recorded_runs_of_paged_kernels(monkeypatch: pytest.MonkeyPatch, name: str, kernel: str) -> None:
    implementation, make = KERNELS[kernel]
    expected = run(name, use_cuda_graph=False, attn_implementation="sdpa")
    graphs, fake = serve_graphs(monkeypatch), make()
    monkeypatch.setattr(rollout.attention, "find_kernel", lambda name, device: fake.kernel())
    batch = run(
        name,
        use_cuda_graph=True,
        use_async_batching=True,
        q_padding_interval_size=4,
        kv_padding_interval_size=16,
        attn_implementation=implementation,
        cpu_offload_space=1.0,
    )
    assert [(c.token_ids, c.finish_reason) for c in batch] == [
        (c.token_ids, c.finish_reason) for c in expected
    ]
    assert graphs.num_replays > 0 and batch.metrics.replayed_steps > 0 and batch.metrics.pages_saved > 0


def decode_step(lengths: list[int], page_size: int = 4) -> StepPlan:
    request = Request(
        request_id="r",
        ordinal=0,
        prompt_ids=(1,),
        params=SamplingParams(),
        eos_ids=frozenset(),
        noise_key=(0, 0, 0),
    )
    rows, page = [], 1
    for index, length in enumerate(lengths):
        sequence = Sequence(request=request, index=index, ids=[7] * length, num_groups=1)
        count = -(-length // page_size)
        sequence.tables = [list(range(page, page + count))]
        page += count
        rows.append(PlannedRow(sequence=sequence, start=length - 1, length=1))
    return StepPlan(rows=tuple(rows))


def test_runs_made_of_static_tensors_are_those_of_the_step() -> None:
    cpu, rules = torch.device("cpu"), RunRules(None)
    plan = decode_step([9, 6, 1])
    common: dict[str, Any] = {"page_size": 4, "windows": (None,), "dtype": torch.float32, "device": cpu}
    batch = build_batch(plan, masks=False, **common)
    (plain,) = build_batch(plan, masks=False, run_rules=rules, **common).groups[0].runs
    sizes = GraphSizes(row_interval=4, key_interval=16, page_size=4, position_limit=64)
    static = StaticStep(sizes.key_of(batch), (None,), (30,), 4, cpu)
    static.load(batch)
    (padded,) = with_runs(static.batch, 4, rules).groups[0].runs
    padded.check(4)
    assert padded.is_decode and padded.table.shape == (4, 4)
    assert padded.lengths.tolist() == [*plain.lengths.tolist(), 1]
    assert torch.equal(padded.table[:3, : plain.table.shape[1]], plain.table)
    assert padded.table[3].tolist() == [30, 0, 0, 0], "a row that fills up has the scrap page"


def test_tables_within_the_fast_paths_limit_are_padded_to_no_more() -> None:
    sizes = GraphSizes(
        row_interval=4, key_interval=16384, page_size=256, position_limit=32768, max_decode_pages=16
    )
    assert sizes.key(3, [3]).widths == (16,)
    assert sizes.key(3, [17]).widths == (64,)
    (group,) = with_runs(
        StaticStep(sizes.key(3, [3]), (None,), (1,), 256, torch.device("cpu")).batch, 256, RunRules(16)
    ).groups
    assert group.runs[0].is_decode
