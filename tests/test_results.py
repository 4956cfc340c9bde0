"""Batches: order, grouping and padding, on literal completions."""

from collections.abc import Sequence

import pytest
import torch

from rollout.results import RolloutBatch
from rollout.types import Completion, FinishReason, RolloutMetrics

METRICS = RolloutMetrics(
    num_requests=2,
    num_completions=3,
    prompt_tokens=7,
    generated_tokens=4,
    computed_tokens=11,
    cached_tokens=0,
    discarded_tokens=0,
    num_steps=3,
    replayed_steps=0,
    recorded_graphs=0,
    num_preemptions=0,
    pages_saved=0,
    pages_loaded=0,
    peak_pages=2,
    num_pages=8,
    cache_bytes=1024,
    derived_bytes=0,
    truncated_fraction=0.0,
    weight_version=5,
    seconds=2.0,
    seconds_by_stage={},
)


def _completion(
    request_id: str,
    index: int,
    prompt_ids: tuple[int, ...],
    token_ids: tuple[int, ...],
    *,
    reason: FinishReason = FinishReason.LENGTH,
    error: Exception | None = None,
) -> Completion:
    steps = range(1, len(token_ids) + 1)
    return Completion(
        request_id=request_id,
        index=index,
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        logprobs=tuple(-0.5 * i for i in steps),
        policy_logprobs=tuple(-0.75 * i for i in steps),
        log_kept_mass=tuple(-0.25 * i for i in steps),
        versions=tuple(4 + i for i in steps),
        finish_reason=reason,
        error=error,
    )


FIRST = _completion("b", 0, (11, 12, 13), (21, 22))
SECOND = _completion("b", 1, (11, 12, 13), (31,))
OTHER = _completion("a", 0, (14,), (41,), reason=FinishReason.ERROR, error=ValueError("bad"))
BATCH = RolloutBatch((FIRST, SECOND, OTHER), METRICS)


def test_batch_is_a_sequence_in_input_order() -> None:
    assert isinstance(BATCH, Sequence)
    assert len(BATCH) == 3
    assert list(BATCH) == [FIRST, SECOND, OTHER]
    assert BATCH[-1] is OTHER and BATCH[:2] == (FIRST, SECOND)
    assert BATCH.metrics.tokens_per_second == 2.0
    with pytest.raises(AttributeError):
        BATCH.metrics = METRICS  # type: ignore[misc]


def test_failed_and_repr() -> None:
    assert BATCH.failed == [OTHER]
    assert repr(BATCH) == "RolloutBatch(3 completions, 4 tokens, 1 failed)"
    assert repr(RolloutBatch((FIRST,), METRICS)) == "RolloutBatch(1 completions, 2 tokens)"


def test_by_prompt_keeps_input_order() -> None:
    # "b" before "a": input order, not the order of the names
    assert BATCH.by_prompt() == [[FIRST, SECOND], [OTHER]]


def test_to_tensors() -> None:
    t = BATCH.to_tensors(pad_token_id=9)
    assert t.prompt_ids.tolist() == [[11, 12, 13], [11, 12, 13], [9, 9, 14]]
    assert t.prompt_mask.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 1]]
    assert t.completion_ids.tolist() == [[21, 22], [31, 9], [41, 9]]
    assert t.completion_mask.tolist() == [[1, 1], [1, 0], [1, 0]]
    assert t.logprobs.tolist() == [[-0.5, -1.0], [-0.5, 0.0], [-0.5, 0.0]]
    assert t.policy_logprobs.tolist() == [[-0.75, -1.5], [-0.75, 0.0], [-0.75, 0.0]]
    assert t.log_kept_mass.tolist() == [[-0.25, -0.5], [-0.25, 0.0], [-0.25, 0.0]]
    assert t.versions.tolist() == [[5, 6], [5, -1], [5, -1]]
    assert t.logprobs.dtype == torch.float32 and t.completion_mask.dtype == torch.int64


def test_pad_token_in_a_completion_is_not_masked() -> None:
    # a model whose pad id is its EOS id ends every completion with it: that token was drawn
    t = RolloutBatch((_completion("a", 0, (9, 1), (2, 9)),), METRICS).to_tensors(pad_token_id=9)
    assert t.prompt_mask.tolist() == [[1, 1]]
    assert t.completion_mask.tolist() == [[1, 1]]


def test_one_empty_completion_among_others() -> None:
    empty = _completion("c", 0, (15, 16), (), reason=FinishReason.CANCELLED)
    t = RolloutBatch((empty, SECOND), METRICS).to_tensors(pad_token_id=0)
    assert t.completion_ids.tolist() == [[0], [31]]
    assert t.completion_mask.tolist() == [[0], [1]]
    assert t.versions.tolist() == [[-1], [5]]


def test_only_empty_completions() -> None:
    empty = _completion("c", 0, (15, 16), (), reason=FinishReason.CANCELLED)
    t = RolloutBatch((empty, empty), METRICS).to_tensors(pad_token_id=0)
    assert t.prompt_ids.tolist() == [[15, 16], [15, 16]]
    assert t.completion_ids.shape == t.completion_mask.shape == t.versions.shape == (2, 0)
    assert t.logprobs.shape == (2, 0) and t.logprobs.dtype == torch.float32


def test_no_completions() -> None:
    batch = RolloutBatch((), METRICS)
    assert batch.by_prompt() == [] and batch.failed == []
    t = batch.to_tensors(pad_token_id=0)
    assert t.prompt_ids.shape == t.completion_ids.shape == (0, 0)


def test_missing_pad_token_is_refused() -> None:
    with pytest.raises(TypeError, match="pad_token_id=None"):
        BATCH.to_tensors(pad_token_id=None)  # type: ignore[arg-type]


def test_to_tensors_on_a_device() -> None:
    assert BATCH.to_tensors(pad_token_id=0, device="meta").completion_ids.device.type == "meta"
