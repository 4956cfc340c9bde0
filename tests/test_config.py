"""The engine's settings: every rule with a value that breaks it, and where settings may come from."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from transformers import CompileConfig, ContinuousBatchingConfig

from rollout.config import EngineConfig


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("page_size", 3, "page_size=3 is out of range; allowed: >= 4"),
        ("num_blocks", 0, "num_blocks=0 is out of range; allowed: >= 1"),
        ("max_memory", 0, "max_memory=0 is out of range; allowed: >= 1"),
        ("max_memory_percent", 0.0, "max_memory_percent=0.0 is out of range; allowed: > 0.0 and <= 1.0"),
        ("max_memory_percent", 1.1, "max_memory_percent=1.1 is out of range"),
        ("max_memory_percent", math.nan, "max_memory_percent=nan is out of range"),
        ("max_batch_tokens", 0, "max_batch_tokens=0 is out of range; allowed: >= 1"),
        ("max_requests_per_batch", 0, "max_requests_per_batch=0 is out of range; allowed: >= 1"),
        ("safety_margin", -0.1, "safety_margin=-0.1 is out of range; allowed: >= 0.0 and <= 1.0"),
        ("safety_margin", 1.1, "safety_margin=1.1 is out of range"),
        ("seed", -1, "seed=-1 is out of range; allowed: >= 0 and <= 9223372036854775807"),
        ("seed", 2**63, "seed=9223372036854775808 is out of range"),
        ("scheduler_type", "lifo", "scheduler_type='lifo'; allowed: 'fifo', 'prefill_first'"),
        ("scheduler_type", None, "scheduler_type=None; allowed: 'fifo', 'prefill_first'"),
        ("on_weight_change", "ignore", "on_weight_change='ignore'; allowed: 'recompute', 'keep', 'cancel'"),
        ("pack_weights", "yes", "pack_weights='yes'; allowed: 'auto', True, False"),
        ("pack_weights", 1, "pack_weights=1; allowed: 'auto', True, False"),
        ("pack_weights", None, "pack_weights=None; allowed: 'auto', True, False"),
        ("cpu_offload_space", -1.0, "cpu_offload_space=-1.0 is out of range; allowed: >= 0.0 and finite"),
        ("cpu_offload_space_safety_threshold", 1.5, "is out of range; allowed: >= 0.0 and <= 1.0"),
        ("default_compile_level", 4, "default_compile_level=4 is out of range; allowed: >= 0 and <= 3"),
        ("q_padding_interval_size", -1, "q_padding_interval_size=-1 is out of range; allowed: >= 0"),
        ("max_blocks_per_request", -1, "max_blocks_per_request=-1 is out of range; allowed: >= 0"),
        ("max_queue_size", -1, "max_queue_size=-1 is out of range; allowed: >= 0"),
        ("cpu_group_timeout", 0, "cpu_group_timeout=0 is out of range; allowed: > 0.0 and finite"),
        ("use_cuda_graph", "yes", "use_cuda_graph='yes'; allowed: None, True, False, (True, True)"),
        ("use_async_batching", 1, "use_async_batching=1; allowed: None, True, False"),
        ("auto_switch_to_flash", None, "auto_switch_to_flash=None; allowed: True, False"),
        ("allow_block_sharing", 1, "allow_block_sharing=1; allowed: True, False"),
        ("allow_block_sharing", "no", "allow_block_sharing='no'; allowed: True, False"),
        ("allow_block_sharing", None, "allow_block_sharing=None; allowed: True, False"),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        EngineConfig(**{field: value})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("page_size", 32.0, "page_size=32.0 has type float; give a whole number"),
        ("page_size", True, "page_size=True has type bool"),
        ("num_blocks", "9", "num_blocks='9' has type str"),
        ("max_memory", 2e9, "max_memory=2000000000.0 has type float"),
        ("max_memory_percent", "0.5", "max_memory_percent='0.5' has type str; give a number"),
        ("max_batch_tokens", 256.5, "max_batch_tokens=256.5 has type float"),
        ("max_requests_per_batch", [4], "max_requests_per_batch=[4] has type list"),
        ("safety_margin", False, "safety_margin=False has type bool"),
        ("cpu_offload_space", "1", "cpu_offload_space='1' has type str; give a number"),
        ("default_compile_level", 1.0, "default_compile_level=1.0 has type float; give a whole number"),
        ("varlen_compile_config", 1, "varlen_compile_config has type int; give a CompileConfig or a dict"),
    ],
)
def test_values_of_a_wrong_type_are_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        EngineConfig(**{field: value})
    assert message in str(caught.value)


def test_two_sizes_of_the_cache_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="num_blocks=8 and max_memory=1000 both size the cache"):
        EngineConfig(num_blocks=8, max_memory=1000)
    with pytest.raises(ValueError, match=r"max_memory=1000 and max_memory_percent=0\.5 both bound the cache"):
        EngineConfig(max_memory=1000, max_memory_percent=0.5)


@pytest.mark.parametrize(
    "values",
    [
        {"page_size": 4},
        {"page_size": np.int64(16)},
        {"max_memory_percent": 1},
        {"max_batch_tokens": 1},
        {"safety_margin": 0},
        {"safety_margin": 1.0},
        {"pack_weights": True},
        {"seed": 2**63 - 1},
        {"num_blocks": 1, "scheduler_type": "prefill_first"},
    ],
)
def test_the_edges_of_what_is_allowed_are_allowed(values: dict[str, Any]) -> None:
    EngineConfig(**values)


def test_none_is_filled_in_when_it_is_needed() -> None:
    default = EngineConfig()
    assert default.resolved_max_batch_tokens == 8192
    assert default.resolved_max_requests == 1024
    assert default.resolved_safety_margin == 0.15
    assert EngineConfig(scheduler_type="prefill_first").resolved_safety_margin == 0.0
    chosen = EngineConfig(max_batch_tokens=7, max_requests_per_batch=3, safety_margin=0.0)
    assert chosen.resolved_max_batch_tokens == 7
    assert chosen.resolved_max_requests == 3
    assert chosen.resolved_safety_margin == 0.0, "0 is an answer, not an absent one"


def test_a_config_is_frozen_and_keyword_only() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 8  # type: ignore[misc]
    with pytest.raises(TypeError):
        EngineConfig(8)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="page_size=1"):
        dataclasses.replace(config, page_size=1)


# ---- where a config comes from ----------------------------------------------------------------


def test_none_a_config_and_a_dict_are_taken() -> None:
    config = EngineConfig(page_size=8)
    assert EngineConfig.from_any(None) == EngineConfig()
    assert EngineConfig.from_any(config) is config
    assert EngineConfig.from_any({}) == EngineConfig()
    assert EngineConfig.from_any({"page_size": 8}) == config


def test_unknown_keys_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError) as caught:
        EngineConfig.from_any({"page_size": 8, "pagesize": 8, "blocks": 1})
    message = str(caught.value)
    assert message.startswith(
        "unknown settings ['blocks', 'pagesize']; known settings: page_size, num_blocks"
    )


def test_the_rules_hold_for_dicts_too_and_the_dict_stays_the_callers() -> None:
    with pytest.raises(ValueError, match="page_size=2 is out of range"):
        EngineConfig.from_any({"page_size": 2})
    given = {"page_size": 8}
    config = EngineConfig.from_any(given)
    given["page_size"] = 16
    assert config.page_size == 8


@pytest.mark.parametrize("config", ["fast", 7, [("page_size", 8)], EngineConfig, ContinuousBatchingConfig])
def test_other_things_are_refused(config: Any) -> None:
    with pytest.raises(TypeError, match=r"config has type \w+; give an EngineConfig, a dict of its fields"):
        EngineConfig.from_any(config)


def test_a_dataclass_of_another_kind_is_refused() -> None:
    @dataclasses.dataclass
    class TheirConfig:
        page_size: int = 8

    with pytest.raises(TypeError, match="config has type TheirConfig"):
        EngineConfig.from_any(TheirConfig())


def test_transformers_default_config_keeps_its_page_size_and_its_random_seed() -> None:
    # 256 is transformers' default; whoever passes their object gets what it says
    assert EngineConfig.from_any(ContinuousBatchingConfig()) == EngineConfig(page_size=256, seed=None)


SHARED: dict[str, Any] = {
    "page_size": 16,
    "num_blocks": 99,
    "max_batch_tokens": 300,
    "max_memory_percent": 0.3,
    "max_requests_per_batch": 12,
    "allow_block_sharing": False,
    "scheduler_type": "prefill_first",
    "safety_margin": 0.2,
    "seed": 5,
    "max_blocks_per_request": 8,
    "use_async_batching": True,
    "use_cuda_graph": (False, True),
    "q_padding_interval_size": 16,
    "kv_padding_interval_size": 16,
    "varlen_compile_config": CompileConfig(),
    "decode_compile_config": CompileConfig(dynamic=True),
    "default_compile_level": 1,
    "auto_switch_to_flash": False,
    "cpu_offload_space": None,
    "cpu_offload_space_safety_threshold": 0.5,
    "max_queue_size": 4,
    "cpu_group_timeout": None,
}
ALWAYS: dict[str, Any] = {
    "return_logprobs": True,
    "per_request_processors": True,
    "drop_unsupported_processors": False,
    "disable_nccl_graph_mixing": False,
}
OLD: dict[str, Any] = {"block_size": 8, "use_default_compile_configs": True, "max_cached_graphs": 3}


def test_every_setting_of_transformers_is_understood() -> None:
    """A setting that transformers adds must be looked at."""
    names = {f.name for f in dataclasses.fields(ContinuousBatchingConfig)}
    assert names == set(SHARED) | set(ALWAYS) | set(OLD)
    expected = EngineConfig(**SHARED)
    assert EngineConfig.from_any(ContinuousBatchingConfig(**SHARED, **ALWAYS)) == expected
    assert EngineConfig.from_any({**SHARED, **ALWAYS}) == expected


def test_deprecated_names_are_understood_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="block_size is deprecated: use page_size"):
        assert EngineConfig.from_any({"block_size": 8}) == EngineConfig(page_size=8)
    with pytest.warns(FutureWarning, match="use default_compile_level"):
        assert EngineConfig.from_any({"use_default_compile_configs": True}).default_compile_level == 3
    with pytest.warns(FutureWarning, match="it has no effect any more"):
        assert EngineConfig.from_any({"max_cached_graphs": 3}) == EngineConfig()
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="page_size is given twice"):
        EngineConfig.from_any({"block_size": 8, "page_size": 16})
    theirs = ContinuousBatchingConfig(**OLD)
    assert EngineConfig.from_any(theirs) == EngineConfig(page_size=8, default_compile_level=3, seed=None)


def test_a_setting_that_transformers_adds_is_refused_by_name() -> None:
    @dataclasses.dataclass
    class Newer(ContinuousBatchingConfig):
        warp: int = 0

    Newer.__name__ = "ContinuousBatchingConfig"
    EngineConfig.from_any(Newer())
    with pytest.raises(ValueError, match=r"not offered by RolloutEngine: warp=9; leave them"):
        EngineConfig.from_any(Newer(warp=9))


def test_async_batching_needs_graphs() -> None:
    with pytest.raises(ValueError, match="use_async_batching=True needs CUDA graphs"):
        EngineConfig(use_async_batching=True, use_cuda_graph=False)


def test_a_bad_value_in_transformers_config_is_refused_by_our_rule() -> None:
    with pytest.raises(ValueError, match="scheduler_type='lifo'; allowed: 'fifo', 'prefill_first'"):
        EngineConfig.from_any(ContinuousBatchingConfig(scheduler_type="lifo"))
