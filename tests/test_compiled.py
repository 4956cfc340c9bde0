"""torch.compile of the view: what the settings mean, how often it compiles, and that nothing changes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import CompileConfig

from oracle import assert_greedy, assert_logprobs
from rollout import EngineConfig, RolloutBatch, RolloutEngine, SamplingParams
from rollout.compiled import CompileSettings, choose_compilation, is_compiling, padded_size
from rollout.fused import FusedLayer
from rollout.packing import PackedLinear
from tiny_models import TINY_MODELS

AUTOTUNE = "max-autotune-no-cudagraphs"
PROMPTS = [[5], [3, 1, 4, 1, 5], list(range(17)), list(range(40, 70)), [9, 9], [7, 8, 9, 10]]
# inductor's modules, imported when something is first compiled with it, define one of these
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

# the last two end together: a step of one row is compiled apart, which only some tests want to pay for
LENGTHS = [SamplingParams(max_new_tokens=n, temperature=0) for n in (4, 5, 6, 7, 8, 8)]

SHORT = SamplingParams(max_new_tokens=3, temperature=0)


class CountingBackend:
    """A backend of torch.compile that runs what it was given, and counts how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.count += 1
        return module.forward


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """torch keeps compiled code per function of transformers, whoever asked for it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiling(backend: CountingBackend, name: str = "llama", **settings: Any) -> RolloutEngine:
    changes = {"num_hidden_layers": 1} if name == "llama" else {}
    changes |= settings.pop("model", {})
    config = CompileConfig(backend=backend, dynamic=settings.pop("dynamic", True))
    both = {"varlen_compile_config": config, "decode_compile_config": config}
    return RolloutEngine(TINY_MODELS[name](**changes), config=both | settings)


def plain() -> RolloutEngine:
    return RolloutEngine(TINY_MODELS["llama"](num_hidden_layers=1))


def tokens_of(batch: RolloutBatch) -> list[tuple[int, ...]]:
    return [c.token_ids for c in batch]


# --- what the settings mean ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (0, None),
        (1, CompileSettings(mode="default", dynamic=True)),
        (2, CompileSettings(mode=AUTOTUNE, dynamic=True)),
        (3, CompileSettings(mode=AUTOTUNE, dynamic=False)),
    ],
)
def test_levels_are_transformers_levels(level: int, expected: CompileSettings | None) -> None:
    config = EngineConfig(default_compile_level=level)
    choice = choose_compilation(config, is_flash=False)
    assert choice.varlen == expected and choice.decode == expected
    assert is_compiling(config) == (level > 0)
    under_flash = choose_compilation(config, is_flash=True)
    assert under_flash.varlen is None and under_flash.decode == expected


def test_a_config_of_its_own_goes_before_the_level_and_before_flash() -> None:
    config = EngineConfig(
        default_compile_level=3,
        varlen_compile_config={"backend": "eager", "dynamic": True},
        decode_compile_config=CompileConfig(mode="max-autotune", dynamic=None),
    )
    for is_flash in (False, True):
        choice = choose_compilation(config, is_flash=is_flash)
        assert choice.varlen == CompileSettings(backend="eager", dynamic=True)
        assert choice.decode == CompileSettings(mode="max-autotune", dynamic=None)
    only_decode = EngineConfig(decode_compile_config={})
    assert choose_compilation(only_decode, is_flash=False).varlen is None
    assert is_compiling(only_decode)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"fullgraph": True},
            "decode_compile_config has fullgraph=True, and paged attention is a graph break",
        ),
        (CompileConfig(fullgraph=True), "set fullgraph=False"),
        (
            {"dynmaic": True},
            r"unknown fields \['dynmaic'\]; known: fullgraph, dynamic, backend, mode, options",
        ),
        ({"mode": "default", "options": {"max_autotune": True}}, "has mode='default' and options"),
    ],
)
def test_wrong_configs_are_refused_when_the_engine_is_built(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutEngine(TINY_MODELS["llama"](), config={"decode_compile_config": given})


def test_options_and_other_backends_do_not_inherit_the_mode_that_nobody_named() -> None:
    options = {"max_autotune": True}
    assert CompileSettings.of_config("x", {"options": options}).mode is None
    assert CompileSettings.of_config("x", {"backend": "aot_eager"}).mode is None
    assert CompileSettings.of_config("x", {}).mode == "reduce-overhead"  # CompileConfig's own default


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (CompileSettings(dynamic=None, mode="reduce-overhead"), True),
        (CompileSettings(dynamic=None, mode="max-autotune"), True),
        (CompileSettings(dynamic=None, mode=AUTOTUNE), False),
        (CompileSettings(dynamic=None, mode="default"), False),
        (CompileSettings(dynamic=None, options={"triton.cudagraphs": True}), True),
        (CompileSettings(dynamic=None, options={}), False),
        (CompileSettings(dynamic=None, backend="eager", mode="reduce-overhead"), False),
    ],
)
def test_graphs_that_inductor_would_record_itself_are_known(
    settings: CompileSettings, expected: bool
) -> None:
    assert settings.records_graphs is expected


def test_fixed_shapes_are_few() -> None:
    assert [padded_size(count, 4) for count in (0, 1, 4, 5, 8, 9, 33)] == [4, 4, 4, 8, 8, 16, 64]


# --- how often it compiles ----------------------------------------------------------------------


def test_no_step_compiles_what_one_of_its_kind_compiled_before() -> None:
    """Some 20 steps of 1 to 79 tokens: the second run, of other sizes, compiles nothing at all."""
    backend = CountingBackend()
    engine = compiling(backend)
    batch = engine.generate(PROMPTS, LENGTHS)
    assert batch.metrics.num_steps == 8
    first = backend.count
    assert 0 < first <= 20
    for prompts in (PROMPTS[:3], PROMPTS[2:], PROMPTS + PROMPTS):
        engine.generate(prompts, SamplingParams(max_new_tokens=6, temperature=0))
    assert backend.count == first


def test_layers_share_their_code() -> None:
    """Some five pieces of a layer and three around them; compiled layer by layer it would be 40."""
    backend = CountingBackend()
    compiling(backend, model={"num_hidden_layers": 8}).generate(PROMPTS[1:3], SHORT)
    assert 0 < backend.count <= 12


def test_fixed_shapes_are_padded_so_that_sizes_meet() -> None:
    """Unpadded, each number of rows was compiled anew; after 8 of them torch gives up compiling."""
    backend = CountingBackend()
    engine = compiling(backend, dynamic=False, q_padding_interval_size=8)
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=3, temperature=0))
    first = backend.count
    assert first > 0
    rows = [SamplingParams(max_new_tokens=2 + i, temperature=0) for i in range(6)]
    engine.generate(PROMPTS, rows)  # decode steps of 6, 5, .. 1 rows, all padded to 8
    of_longer_prompts = backend.count - first
    engine.generate(PROMPTS, rows)
    assert backend.count == first + of_longer_prompts
    engine.generate(PROMPTS[:4], SamplingParams(max_new_tokens=5, temperature=0))
    model = TINY_MODELS["llama"](num_hidden_layers=1)
    for completion in engine.generate(PROMPTS, rows):
        assert_greedy(model, completion)
        assert_logprobs(model, completion, temperature=0)


def test_only_the_kind_that_is_asked_for_is_compiled() -> None:
    backend = CountingBackend()
    config = {"decode_compile_config": CompileConfig(backend=backend, dynamic=True)}
    engine = RolloutEngine(TINY_MODELS["llama"](), config=config)
    engine.generate(PROMPTS[1:4], SamplingParams(max_new_tokens=1, temperature=0))
    assert backend.count == 0
    engine.generate(PROMPTS[1:4], SamplingParams(max_new_tokens=3, temperature=0))
    assert backend.count > 0


def test_warmup_compiles_what_requests_then_find() -> None:
    backend = CountingBackend()
    engine = compiling(backend)
    engine.warmup()
    warm = backend.count
    assert warm > 0 and engine.cache_bytes == 0
    batch = engine.generate(PROMPTS, LENGTHS)
    assert backend.count == warm
    assert tokens_of(batch) == tokens_of(plain().generate(PROMPTS, LENGTHS))


def test_warmup_with_fixed_shapes_compiles_every_size_of_decode_steps() -> None:
    backend = CountingBackend()
    engine = compiling(backend, dynamic=False, q_padding_interval_size=4, max_batch_tokens=16)
    engine.warmup(num_requests=6)
    warm = backend.count
    engine.generate([[i, i] for i in range(6)], LENGTHS)
    after = backend.count
    engine.generate([[i, i] for i in range(6)], LENGTHS)
    assert warm > 0 and backend.count == after


# --- that nothing changes -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt_oss"])
def test_tokens_are_those_of_the_plain_engine(name: str) -> None:
    backend = CountingBackend()
    params = [SamplingParams(max_new_tokens=6, temperature=t, seed=3) for t in (0, 1.0, 0, 0.7, 0, 0)]
    batch = compiling(backend, name, page_size=4, max_batch_tokens=24).generate(PROMPTS, params)
    plain = RolloutEngine(TINY_MODELS[name]()).generate(PROMPTS, params)
    assert backend.count > 0 and tokens_of(batch) == tokens_of(plain)
    for completion, each in zip(batch, params, strict=True):
        assert_logprobs(TINY_MODELS[name](), completion, temperature=each.temperature)


def test_weights_change_in_place_without_compiling_again() -> None:
    backend = CountingBackend()
    engine = compiling(backend)
    model = engine.model
    engine.generate(PROMPTS[1:3], SHORT)
    count = backend.count
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    batch = engine.generate(PROMPTS[1:3], SHORT)
    assert batch[0].versions == (1,) * 3 and backend.count == count
    for completion in batch:
        assert_greedy(model, completion)


def test_a_view_that_is_compiled_keeps_torchs_own_modules() -> None:
    """Packed linears and fused layers decide in Python at each call: a compiler would bake it in."""
    backend = CountingBackend()
    engine = compiling(backend, "llama_wide")
    kinds = {type(module) for module in engine._weights.view.modules()}
    assert not kinds & {FusedLayer, PackedLinear} and torch.nn.Linear in kinds
    plain = RolloutEngine(TINY_MODELS["llama_wide"](), config={"pack_weights": True})
    assert {FusedLayer, PackedLinear} <= {type(module) for module in plain._weights.view.modules()}
    with pytest.raises(ValueError, match="pack_weights=True and compile settings exclude each other"):
        EngineConfig(pack_weights=True, default_compile_level=1)


def test_score_goes_through_the_plain_view() -> None:
    backend = CountingBackend()
    engine = compiling(backend)
    (found,), (expected,) = (each.score([[1, 2]], [[3, 4]]) for each in (engine, plain()))
    assert found == pytest.approx(expected, abs=1e-5)
    assert backend.count == 0


def test_decode_steps_of_level_1_through_inductor() -> None:
    """The one test that generates code; steps with prompts stay plain to keep it short."""
    model = TINY_MODELS["gpt2"](n_layer=1)
    config = {"decode_compile_config": {"mode": "default", "dynamic": True}}
    engine = RolloutEngine(model, config=config)
    assert engine._stepper.executor.settings(True) == CompileSettings.of_level(1)
    for completion in engine.generate(PROMPTS[1:4], SamplingParams(max_new_tokens=3, temperature=0)):
        assert_greedy(model, completion)
        assert_logprobs(model, completion, temperature=0)
