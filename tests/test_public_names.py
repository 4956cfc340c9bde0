"""The public names and knobs, frozen: adding or renaming one is a decision that shows up here."""

import dataclasses

import pytest

import rollout
from rollout import Completion, EngineConfig, RolloutMetrics, SamplingParams


def test_the_package_offers_these_names() -> None:
    assert rollout.__all__ == [
        "Completion",
        "DuplicateRequestError",
        "EngineConfig",
        "FinishReason",
        "NonFiniteLogits",
        "RankError",
        "RolloutBatch",
        "RolloutEngine",
        "RolloutError",
        "RolloutMetrics",
        "RolloutTensors",
        "SamplingParams",
        "UnsupportedModelError",
        "attach",
        "detach",
    ]
    for name in rollout.__all__:
        assert getattr(rollout, name).__name__ == name


FIELDS = {
    EngineConfig: [
        "page_size",
        "num_blocks",
        "max_memory",
        "max_memory_percent",
        "max_batch_tokens",
        "max_requests_per_batch",
        "scheduler_type",
        "safety_margin",
        "allow_block_sharing",
        "attn_implementation",
        "native_kernels",
        "on_weight_change",
        "pack_weights",
        "seed",
        "cpu_offload_space",
        "cpu_offload_space_safety_threshold",
        "default_compile_level",
        "varlen_compile_config",
        "decode_compile_config",
        "use_cuda_graph",
        "q_padding_interval_size",
        "kv_padding_interval_size",
        "use_async_batching",
        "max_blocks_per_request",
        "auto_switch_to_flash",
        "cpu_group_timeout",
        "max_queue_size",
    ],
    SamplingParams: [
        "max_new_tokens",
        "min_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "stop_token_ids",
        "stop_strings",
        "ignore_eos",
        "n",
        "seed",
        "logits_processors",
    ],
    Completion: [
        "request_id",
        "index",
        "prompt_ids",
        "token_ids",
        "logprobs",
        "policy_logprobs",
        "log_kept_mass",
        "versions",
        "finish_reason",
        "stop_match",
        "stop_offset",
        "error",
        "cached_tokens",
        "num_preemptions",
    ],
    RolloutMetrics: [
        "num_requests",
        "num_completions",
        "prompt_tokens",
        "generated_tokens",
        "computed_tokens",
        "cached_tokens",
        "discarded_tokens",
        "num_steps",
        "replayed_steps",
        "recorded_graphs",
        "num_preemptions",
        "pages_saved",
        "pages_loaded",
        "peak_pages",
        "num_pages",
        "cache_bytes",
        "derived_bytes",
        "truncated_fraction",
        "weight_version",
        "seconds",
        "seconds_by_stage",
    ],
}


@pytest.mark.parametrize("record", FIELDS, ids=lambda record: record.__name__)
def test_the_records_have_these_fields(record: type) -> None:
    assert [field.name for field in dataclasses.fields(record)] == FIELDS[record]


@pytest.mark.parametrize("record", FIELDS, ids=lambda record: record.__name__)
def test_the_records_are_frozen_and_keyword_only(record: type) -> None:
    assert all(field.kw_only for field in dataclasses.fields(record))
    assert record.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__slots__" in vars(record)
