"""Recorded decode steps: which sizes, what padding touches, when recordings are dropped, what is said.

No test here needs a GPU: recording itself is behind a protocol of one method, played by a fake that
keeps what was run and runs it again (see ``fake_graphs.py``).
"""

import logging
from typing import Any

import pytest
import torch
from transformers import CompileConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

import rollout.execution
import rollout.stepper
from fake_graphs import FakeGraphs, serve_graphs
from oracle import assert_greedy, assert_logprobs
from rollout import EngineConfig, RolloutEngine, SamplingParams, attach, detach
from rollout.batch import StepBatch, build_batch
from rollout.graphs import graph_backend
from rollout.sequence import PlannedRow, Request, Sequence, StepPlan
from rollout.static import GraphKey, GraphSizes, StaticStep
from tiny_models import TINY_MODELS

SMALL = {"q_padding_interval_size": 4, "kv_padding_interval_size": 16, "page_size": 4}
RECORDING = {"use_cuda_graph": True} | SMALL
PLAIN: dict[str, Any] = {"use_cuda_graph": False, "page_size": 4}
PROMPTS = [[5], [3, 1, 4, 1, 5], list(range(17)), list(range(40, 70)), [9, 9], [7, 8, 9, 10]]
GREEDY = SamplingParams(max_new_tokens=9, temperature=0)
MIXED = [
    SamplingParams(max_new_tokens=6 + 2 * i, temperature=t, n=2, seed=i)
    for i, t in enumerate((0, 1.0, 0.7, 0, 0.7, 1.0))
]
SCRAP = (30, 20)

# inductor's modules, imported when something is first compiled with it, define one of these
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    return serve_graphs(monkeypatch)


def make(name: str = "llama", **settings: Any) -> RolloutEngine:
    return RolloutEngine(TINY_MODELS[name](), config=RECORDING | settings)


def pages_of(engine: RolloutEngine, page: int) -> list[torch.Tensor]:
    """That page of every tensor of the cache."""
    return [tensor[:, :, page] for pair in engine._stepper.cache._tensors for tensor in pair]


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "widths", "expected"),
    [
        (1, (1,), GraphKey(64, (256,))),  # bounded by the longest sequence, not 16384 / 32 pages
        (64, (256,), GraphKey(64, (256,))),
        (65, (3, 2), GraphKey(128, (256, 256))),
        (1, (257,), GraphKey(64, (257,))),  # a table is never cut
    ],
)
def test_sizes_by_default(rows: int, widths: tuple[int, ...], expected: GraphKey) -> None:
    sizes = GraphSizes(row_interval=64, key_interval=16384, page_size=32, position_limit=8192)
    assert sizes.key(rows, widths) == expected


def test_sizes_follow_the_intervals() -> None:
    sizes = GraphSizes(row_interval=4, key_interval=16, page_size=4, position_limit=100)
    keys = {sizes.key(rows, (width,)) for rows in range(1, 9) for width in range(1, 9)}
    assert keys == {GraphKey(rows, (width,)) for rows in (4, 8) for width in (4, 8)}
    uneven = GraphSizes(row_interval=3, key_interval=10, page_size=4, position_limit=10_000)
    assert uneven.key(4, (3,)) == GraphKey(6, (5,))  # 12 keys -> 20 keys -> 5 pages


# --- padding ------------------------------------------------------------------------------------


def decode_batch(shapes: list[tuple[int, list[int]]], windows: tuple[int | None, ...]) -> StepBatch:
    """Rows of (position, pages), the same pages in every group."""
    request = Request(
        request_id="r",
        ordinal=0,
        prompt_ids=(1,),
        params=SamplingParams(),
        eos_ids=frozenset(),
        noise_key=(0, 0, 0),
    )
    rows = []
    for index, (position, pages) in enumerate(shapes):
        sequence = Sequence(
            request=request, index=index, ids=[70 + index] * (position + 1), num_groups=len(windows)
        )
        sequence.tables = [list(pages) for _ in windows]
        rows.append(PlannedRow(sequence=sequence, start=position, length=1))
    return build_batch(
        StepPlan(rows=tuple(rows)),
        page_size=4,
        windows=windows,
        dtype=torch.float32,
        device=torch.device("cpu"),
        masks=False,
    )


def static_step(windows: tuple[int | None, ...] = (None, 6)) -> StaticStep:
    key = GraphKey(4, tuple(3 for _ in windows))
    return StaticStep(key, windows, SCRAP[: len(windows)], 4, torch.device("cpu"))


def test_padded_rows_live_in_the_scrap_page_alone() -> None:
    static = static_step()
    static.load(decode_batch([(9, [2, 7, 5]), (5, [3, 4])], (None, 6)))
    batch = static.batch
    assert batch.input_ids.tolist() == [[70, 71, 0, 0]]
    assert batch.position_ids.tolist() == [[9, 5, 0, 0]]
    assert batch.logit_index.tolist() == [0, 1, 0, 0]
    for group, scrap in zip(batch.groups, SCRAP, strict=True):
        (bucket,) = group.buckets
        assert (bucket.num_rows, bucket.start, bucket.end, bucket.table_width) == (4, 0, 4, 3)
        assert group.slots.tolist() == [5 * 4 + 1, 4 * 4 + 1, scrap * 4 + 2, scrap * 4 + 3]
        assert bucket.pages is not None
        tables = bucket.pages.view(4, 3).tolist()
        assert tables == [[2, 7, 5], [3, 4, 0], [scrap, 0, 0], [scrap, 0, 0]]
    seen = [group.buckets[0].seen for group in batch.groups]
    assert seen[0] is not None and seen[0].tolist() == [[0, 10], [0, 6], [0, 1], [0, 1]]
    assert seen[1] is not None and seen[1].tolist() == [[4, 10], [0, 6], [0, 1], [0, 1]]


def test_nothing_of_a_step_is_left_in_the_next_one() -> None:
    """A row that stayed would write into a page that has another owner by now."""
    small = decode_batch([(1, [6])], (None, 6))
    used, fresh = static_step(), static_step()
    used.load(decode_batch([(9, [2, 7, 5]), (8, [1, 8, 9]), (5, [3, 4])], (None, 6)))
    used.load(small)
    fresh.load(small)
    assert used._all.tolist() == fresh._all.tolist()


def test_addresses_stay_when_numbers_change() -> None:
    static = static_step()
    tensors = [static.batch.input_ids, static.batch.groups[1].slots, static.batch.logit_index]
    before = [t.data_ptr() for t in tensors]
    static.load(decode_batch([(1, [6])], (None, 6)))
    after = [static.batch.input_ids, static.batch.groups[1].slots, static.batch.logit_index]
    assert [t.data_ptr() for t in after] == before and after[0].tolist() == [[70, 0, 0, 0]]


# --- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["native", "sdpa"])
@pytest.mark.parametrize("name", ["llama_wide", "qwen2", "mistral", "gemma2", "gpt2", "qwen3_moe", "gpt_oss"])
def test_replayed_steps_give_what_plain_steps_give(name: str, attention: str, graphs: FakeGraphs) -> None:
    native = attention == "native"
    engine = make(name, native_kernels=native or "auto", attn_implementation="auto" if native else "sdpa")
    batch = engine.generate(PROMPTS, MIXED)
    engine.check()
    assert graphs.num_captures == batch.metrics.recorded_graphs >= 3
    assert graphs.num_replays == batch.metrics.replayed_steps >= 8
    plain = RolloutEngine(TINY_MODELS[name](), config=PLAIN).generate(PROMPTS, MIXED)
    assert [c.token_ids for c in batch] == [c.token_ids for c in plain]
    temperatures = [each.temperature for each in MIXED for _ in range(each.n)]
    for completion, temperature in zip(batch, temperatures, strict=True):
        assert_logprobs(TINY_MODELS[name](), completion, temperature=temperature)
    assert all(not page.any() for page in pages_of(engine, 0)), "the null page was written"


def test_pages_hold_what_a_plain_engine_writes_and_nothing_else(graphs: FakeGraphs) -> None:
    recorded = make(num_blocks=40)
    plain = RolloutEngine(TINY_MODELS["llama"](), config=PLAIN | {"num_blocks": 40})
    for engine in (recorded, plain):
        engine.generate([[1]], SamplingParams(max_new_tokens=1))
        for page in range(1, 41):
            for tensor in pages_of(engine, page):
                tensor.fill_(7.0)  # what nobody writes stays so
        engine.generate(PROMPTS, GREEDY)
    assert graphs.num_replays > 0
    for page in range(41):
        for ours, theirs in zip(pages_of(recorded, page), pages_of(plain, page), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert recorded._stepper.cache._tensors[0][0].shape[2] == plain._stepper.cache._tensors[0][0].shape[2] + 1


def test_preempted_and_shared_sequences_are_replayed_right(graphs: FakeGraphs) -> None:
    engine = make(num_blocks=20)
    batch = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, temperature=0, n=2))
    engine.check()
    assert batch.metrics.num_preemptions > 0 and graphs.num_replays > 0
    for completion in batch:
        assert_greedy(TINY_MODELS["llama"](), completion)


def test_logits_of_padded_rows_are_cut_off(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    launch_draw = rollout.stepper.launch_draw

    def note(logits: torch.Tensor, *args: Any) -> Any:
        rows.append(len(logits))
        return launch_draw(logits, *args)

    monkeypatch.setattr(rollout.stepper, "launch_draw", note)
    lengths = [SamplingParams(max_new_tokens=n, temperature=0) for n in (2, 4, 6)]
    make(kv_padding_interval_size=256).generate(PROMPTS[:3], lengths)
    assert rows == [3, 3, 2, 2, 1, 1] and (graphs.num_captures, graphs.num_replays) == (1, 4)


def test_decode_steps_are_recorded_as_they_are_compiled(graphs: FakeGraphs) -> None:
    torch._dynamo.reset()
    compiled = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiled.append(module)
        return module.forward

    engine = make(decode_compile_config=CompileConfig(backend=backend, dynamic=True))
    for completion in engine.generate(PROMPTS[:3], GREEDY):
        assert_greedy(TINY_MODELS["llama"](), completion)
    assert compiled and graphs.num_replays > 0
    torch._dynamo.reset()


# --- when recordings are dropped ----------------------------------------------------------------


def test_recordings_outlive_a_change_of_weights_in_place(graphs: FakeGraphs) -> None:
    engine = make(num_blocks=60)
    engine.generate(PROMPTS, GREEDY)
    made = graphs.num_captures
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(0.9)
    batch = engine.generate(PROMPTS, GREEDY)
    assert batch.metrics.weight_version == 1 and graphs.num_captures == made
    assert batch.metrics.recorded_graphs == 0 and batch.metrics.replayed_steps > 0
    for completion in batch:
        assert_greedy(engine.model, completion)


@pytest.mark.parametrize("change", ["nothing", "another tensor", "released", "grown", "autocast"])
def test_recordings_are_dropped_with_what_they_point_at(change: str, graphs: FakeGraphs) -> None:
    """All steps are of one size, so that it is recorded once as long as nothing is dropped."""
    engine = make(kv_padding_interval_size=256, **({} if change == "grown" else {"num_blocks": 60}))
    engine.generate(PROMPTS[:2], GREEDY)
    assert (graphs.num_captures, graphs.num_replays) == (1, 7)
    longer = SamplingParams(max_new_tokens=80 if change == "grown" else 9, temperature=0)
    if change == "another tensor":
        linear = engine.model.get_submodule("model.layers.0.mlp.up_proj")
        linear.weight = torch.nn.Parameter(linear.weight.detach() * 0.5)
    elif change == "released":
        engine.release_memory()
        assert engine._stepper.executor._graphs is not None and not engine._stepper.executor._graphs.keys
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=change == "autocast"):
        batch = engine.generate(PROMPTS[:2], longer)
    assert graphs.num_captures == (1 if change == "nothing" else 2)
    assert graphs.num_replays == 7 + batch.metrics.replayed_steps > 7
    if change == "autocast":  # and back: nothing of the cast weights may be left
        batch = engine.generate(PROMPTS[:2], longer)
        assert graphs.num_captures == 3
    for completion in batch:
        assert_greedy(engine.model, completion)


def test_recordings_never_use_autocasts_cache_of_cast_weights(graphs: FakeGraphs) -> None:
    """A recording would keep the address of a cast weight that is freed, and old, after the call."""
    engine = make(num_blocks=60, attn_implementation="sdpa")
    cached: list[tuple[int, bool]] = []

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        cached.append((kwargs["input_ids"].shape[1], torch.is_autocast_cache_enabled()))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine.generate(PROMPTS, GREEDY)
        remove = engine._weights.view.register_forward_pre_hook(note, with_kwargs=True)
        batch = engine.generate(PROMPTS, GREEDY)
        remove.remove()
        plain = RolloutEngine(engine.model, config=PLAIN).generate(PROMPTS, GREEDY)
    assert batch.metrics.replayed_steps == 8
    assert [size for size, _ in cached[1:]] == [8] * 8
    assert [is_cached for _, is_cached in cached] == [True] + [False] * 8
    for one, other in zip(batch, plain, strict=True):
        assert one.policy_logprobs[0] == pytest.approx(other.policy_logprobs[0], abs=0.1)


# --- warmup -------------------------------------------------------------------------------------


def test_warmup_records_every_size_so_that_requests_only_replay(graphs: FakeGraphs) -> None:
    engine = make(kv_padding_interval_size=256)
    engine.warmup(num_requests=6, num_tokens=40)
    made = graphs.num_captures
    assert made == 2  # 4 and 8 rows
    size = engine.cache_bytes
    batch = engine.generate(PROMPTS, GREEDY)
    assert graphs.num_captures == made and engine.cache_bytes == size
    assert batch.metrics.recorded_graphs == 0 and batch.metrics.replayed_steps == 8
    engine.check()
    for completion in batch:
        assert_greedy(engine.model, completion)


def test_warmup_says_when_there_is_nothing_to_do(caplog: pytest.LogCaptureFixture) -> None:
    engine = RolloutEngine(TINY_MODELS["llama"]())
    with caplog.at_level(logging.INFO, logger="rollout"):
        engine.warmup()
    assert "warmup has nothing to do: no step is compiled or recorded on cpu" in caplog.text
    assert engine.cache_bytes == 0
    with pytest.raises(ValueError, match="num_requests=0 is out of range"):
        engine.warmup(num_requests=0)


def test_managers_warm_up_with_what_is_expected(graphs: FakeGraphs) -> None:
    model = attach(TINY_MODELS["llama"]())
    hints = WorkloadHints(max_prompt_length=10, max_generated_length=20, num_requests=7)
    kept = model.continuous_batching_context_manager(
        continuous_batching_config=RECORDING | {"kv_padding_interval_size": 256},
        workload_hints=hints,
        persistent_manager=True,
    )
    with kept as manager:
        assert graphs.num_captures == 2  # 4 and 8 rows
        request_id = manager.add_request([3, 1, 4], max_new_tokens=5)
        assert manager.get_result(request_id, timeout=60).generated_tokens
        assert graphs.num_replays == 4
        manager.warmup(num_requests=7, num_tokens=30)  # while it runs: it pauses; all are there
        assert graphs.num_captures == 2
    model.destroy_cached_continuous_batching_manager()
    with model.continuous_batching_context_manager(
        continuous_batching_config=RECORDING, warmup=False
    ) as manager:
        assert graphs.num_captures == 2
    detach(model)


# --- what the settings decide -------------------------------------------------------------------


def decided(caplog: pytest.LogCaptureFixture, **settings: Any) -> tuple[bool, bool, str]:
    """Whether decode steps are recorded, whether steps overlap, and what was said."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="rollout.nothing"):
        engine = RolloutEngine(TINY_MODELS["llama_wide"](), config=settings)
    said = "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    return engine._stepper.executor.is_recording, engine._stepper.executor.is_ahead, said


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, ""),
        ({"use_cuda_graph": False}, ""),
        ({"use_cuda_graph": True}, "use_cuda_graph=True has no effect: nothing can be recorded on cpu"),
        ({"use_cuda_graph": (True, False)}, "use_cuda_graph=(True, False) has no effect"),
        ({"q_padding_interval_size": 16}, "q_padding_interval_size=16 has no effect"),
        ({"kv_padding_interval_size": 16}, "kv_padding_interval_size=16 has no effect"),
        ({"use_async_batching": True}, "use_async_batching=True has no effect"),
        ({"use_async_batching": False}, ""),
    ],
)
def test_a_cpu_goes_on_without_and_names_the_setting(
    settings: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    records, overlaps, said = decided(caplog, **settings)
    assert not records and not overlaps
    assert said == "" if says == "" else says in said


@pytest.mark.parametrize(
    ("settings", "records", "overlaps", "says"),
    [
        ({}, True, False, ""),  # native attention needs no masks
        ({"attn_implementation": "sdpa"}, False, False, ""),  # padding costs too much with masks
        ({"attn_implementation": "sdpa", "use_cuda_graph": True}, True, False, ""),
        ({"attn_implementation": "sdpa", "kv_padding_interval_size": 64}, True, False, ""),
        ({"attn_implementation": "sdpa", "use_async_batching": True}, True, True, ""),
        ({"attn_implementation": "eager"}, False, False, ""),
        (
            {"attn_implementation": "eager", "use_cuda_graph": True},
            False,
            False,
            "'eager' cannot be recorded",
        ),
        ({"use_cuda_graph": False}, False, False, ""),
        ({"use_cuda_graph": (False, True)}, True, False, ""),
        ({"use_cuda_graph": (True, False)}, False, False, "only steps with prompts were asked for"),
        ({"use_cuda_graph": (False, False), "q_padding_interval_size": 8}, False, False, ""),
        ({"use_async_batching": True}, True, True, ""),
        (
            {"use_async_batching": True, "attn_implementation": "eager"},
            False,
            False,
            "use_async_batching=True",
        ),
        ({"decode_compile_config": {"mode": "reduce-overhead"}}, False, False, ""),
        (
            {"decode_compile_config": {"mode": "max-autotune"}, "use_cuda_graph": True},
            False,
            False,
            "torch.compile records graphs of its own in mode 'max-autotune'",
        ),
        ({"default_compile_level": 2}, True, False, ""),
    ],
)
def test_what_a_device_with_graphs_records(
    settings: dict[str, Any],
    records: bool,
    overlaps: bool,
    says: str,
    graphs: FakeGraphs,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = decided(caplog, **settings)
    assert found[:2] == (records, overlaps)
    assert found[2] == "" if says == "" else says in found[2]


def test_steps_with_prompts_are_never_recorded_and_it_is_said_once(
    graphs: FakeGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="rollout"):
        engine = make()
        engine.generate(PROMPTS[1:], SamplingParams(max_new_tokens=1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.generate(PROMPTS[1:], SamplingParams(max_new_tokens=1))
    assert caplog.text.count("steps with prompts are not recorded: their sizes hardly repeat") == 1
    assert graphs.num_captures == 0


def test_async_batching_without_graphs_of_decode_steps_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"needs CUDA graphs of decode-only steps and use_cuda_graph=\(True, False\)"
    ):
        EngineConfig(use_async_batching=True, use_cuda_graph=(True, False))


def test_a_model_that_cannot_be_recorded_goes_on_without(
    graphs: FakeGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    graphs.refuses = True
    engine = make(use_async_batching=True)
    batch = engine.generate(PROMPTS, GREEDY)
    assert caplog.text.count("a decode step could not be recorded, steps run without from here on") == 1
    assert "operation not permitted when stream is capturing" in caplog.text
    assert batch.metrics.recorded_graphs == batch.metrics.replayed_steps == 0
    for completion in batch:
        assert_greedy(engine.model, completion)


def test_only_cuda_has_graphs() -> None:
    assert graph_backend(torch.device("cpu")) is None and graph_backend(torch.device("mps")) is None
    assert graph_backend(torch.device("cuda", 0)) is not None
    assert rollout.execution.graph_backend is graph_backend
