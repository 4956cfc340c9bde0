"""What every trainer on accelerate needs of the engine.

The innermost model, each rank's share of the prompts, seeds that keep samples distinct, generation
under the trainer's autocast, and what a rollout did as numbers over all ranks. A rank without
prompts takes part like any other: only :func:`over_ranks` communicates.

Letters: B completions, T longest completion.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from rollout.engine import RolloutEngine
from rollout.results import RolloutBatch
from rollout.types import RolloutError, RolloutMetrics, SamplingParams, UnsupportedModelError

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
Item = TypeVar("Item")
GAP_ROWS = 2
"""Completions per rank and step whose engine logprobs are compared with the trainer's own forward,
where the trainer does not run that forward for all of them anyway."""


def innermost_model(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """The model below DDP and ``torch.compile``, on whose tensors the engine works.

    Raises:
        UnsupportedModelError: the job shards its model over ranks.
    """
    if accelerator.distributed_type in SHARDED:
        raise UnsupportedModelError(
            f"distributed type {accelerator.distributed_type} shards the model over ranks, and the engine "
            "needs whole weights on each; use DDP (accelerate launch --multi_gpu) or a single process"
        )
    inner: nn.Module = accelerator.unwrap_model(model, keep_torch_compile=False)
    return inner


def share_of_rank(items: Sequence[Item], accelerator: Accelerator) -> list[Item]:
    """This rank's contiguous part of ``items``, which all ranks hold alike; it can be empty.

    Sizes differ by one at the most, and the parts in rank order are ``items`` again. (accelerate's own
    ``split_between_processes`` gives a rank without items a copy of another's.)

    Example::

        share_of_rank(["a", "b", "c"], accelerator)  # rank 0 of 2: ["a", "b"], rank 1: ["c"]
    """
    size, extra = divmod(len(items), accelerator.num_processes)
    rank = accelerator.process_index
    start = rank * size + min(rank, extra)
    return list(items[start : start + size + (rank < extra)])


def rollout_seed(seed: int, accelerator: Accelerator, *counters: int) -> int:
    """A seed for this rank's rollout number ``counters`` (step, call, ...), in [0, 2**63).

    It depends on nothing else, so that a resumed run draws what the uninterrupted one would have
    drawn; ranks, steps and calls draw independently, equal prompts included
    (``numpy.random.SeedSequence``).
    """
    mixed = np.random.SeedSequence([seed, accelerator.process_index, *counters])
    return int(mixed.generate_state(1, np.uint64)[0] >> np.uint64(1))


def generate(
    engine: RolloutEngine,
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams],
    accelerator: Accelerator,
) -> RolloutBatch:
    """``engine.generate`` under the trainer's mixed precision; no prompts give an empty batch.

    Raises:
        RolloutError: prompts failed; the message names their places, ``.batch`` holds the others.
    """
    with accelerator.autocast():
        batch = engine.generate(prompts, params, on_error="return")
    if batch.failed:
        groups = batch.by_prompt()
        places = [i for i, group in enumerate(groups) if any(c.error is not None for c in group)]
        error = batch.failed[0].error
        raise RolloutError(
            f"generation failed for the prompts at {places} of {len(groups)} on rank "
            f"{accelerator.process_index}; first: {type(error).__name__}: {error}",
            batch,
        ) from error
    return batch


def over_ranks(
    accelerator: Accelerator, *, sums: Mapping[str, float], maxima: Mapping[str, float]
) -> dict[str, float]:
    """``sums`` added and ``maxima`` maximised over all ranks. A mean is a quotient of two sums.

    Every rank must call this with the same names.
    """
    values = [sums[name] for name in sorted(sums)] + [maxima[name] for name in sorted(maxima)]
    # MPS has no float64; everywhere else token counts beyond 2**24 stay exact
    dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
    local = torch.tensor([values], dtype=dtype, device=accelerator.device)
    rows = accelerator.gather(local)  # [ranks, names]
    total = rows[:, : len(sums)].sum(0).tolist()
    most = rows[:, len(sums) :].amax(0).tolist()
    return dict(zip(sorted(sums), total, strict=True)) | dict(zip(sorted(maxima), most, strict=True))


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """Distance of the engine's ``policy_logprobs`` from the trainer's own forward, in nats."""

    total: float  # sum of absolute differences
    count: int  # of tokens compared
    largest: float

    @classmethod
    def between(cls, engine: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor) -> "LogprobGap":
        """Compared where ``mask`` is true; all [B, T]."""
        gaps = (engine.float() - trainer.float()).abs()[mask.bool()]
        if gaps.numel() == 0:
            return cls(0.0, 0, 0.0)
        return cls(float(gaps.sum()), gaps.numel(), float(gaps.max()))


def rollout_logs(
    metrics: Sequence[RolloutMetrics], gap: LogprobGap, accelerator: Accelerator
) -> dict[str, float]:
    """What the rollouts of one step did on all ranks, as ``rollout/...`` numbers for a logger.

    Args:
        metrics: of every ``generate`` call of this rank in the step; none for a rank without prompts.
        gap: measured by this rank.

    Every rank must call this.
    """
    numbers = over_ranks(
        accelerator,
        sums={
            "tokens": sum(m.generated_tokens for m in metrics),
            "cached": sum(m.cached_tokens for m in metrics),
            "completions": sum(m.num_completions for m in metrics),
            "truncated": sum(m.truncated_fraction * m.num_completions for m in metrics),
            "gap_total": gap.total,
            "gap_count": gap.count,
        },
        maxima={
            "seconds": sum(m.seconds for m in metrics),
            "version": max((m.weight_version for m in metrics), default=0),
            "gap_max": gap.largest,
        },
    )
    return {
        "rollout/tokens_per_second": _ratio(numbers["tokens"], numbers["seconds"]),
        "rollout/cached_tokens": numbers["cached"],
        "rollout/seconds": numbers["seconds"],
        "rollout/truncated": _ratio(numbers["truncated"], numbers["completions"]),
        "rollout/weight_version": numbers["version"],
        "rollout/logprob_gap_mean": _ratio(numbers["gap_total"], numbers["gap_count"]),
        "rollout/logprob_gap_max": numbers["gap_max"],
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
