"""What ``generate`` returns: completions in input order, and the same as padded tensors.

Completions are plain tuples, one per sample; this room only counts, groups and pads them.

Letters: B completions, P longest prompt, T longest completion.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from rollout.types import Completion, RolloutError, RolloutMetrics, require_int

logger = logging.getLogger("rollout")

NO_VERSION = -1  # below every weight version, so that padding cannot be taken for a drawn token


@dataclass(frozen=True, slots=True)
class Progress:
    """What a running sample has so far."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutTensors:
    """A batch as a trainer takes it: prompts padded on the left, completions on the right."""

    prompt_ids: torch.Tensor  # [B, P] int64, left-padded with the pad token
    prompt_mask: torch.Tensor  # [B, P] int64, 1 for a prompt token
    completion_ids: torch.Tensor  # [B, T] int64, right-padded with the pad token
    completion_mask: torch.Tensor  # [B, T] int64, 1 for a generated token, EOS included
    logprobs: torch.Tensor  # [B, T] float32, 0.0 where padded
    policy_logprobs: torch.Tensor  # [B, T] float32, 0.0 where padded
    log_kept_mass: torch.Tensor  # [B, T] float32, 0.0 where padded
    versions: torch.Tensor  # [B, T] int64, -1 where padded

    def __post_init__(self) -> None:
        assert self.prompt_ids.shape == self.prompt_mask.shape
        for ids in (
            self.prompt_ids,
            self.prompt_mask,
            self.completion_ids,
            self.completion_mask,
            self.versions,
        ):
            assert ids.dtype == torch.int64 and ids.ndim == 2
        for values in (self.logprobs, self.policy_logprobs, self.log_kept_mass):
            assert values.dtype == torch.float32 and values.shape == self.completion_ids.shape
        assert self.completion_ids.shape == self.completion_mask.shape == self.versions.shape
        assert len(self.prompt_ids) == len(self.completion_ids)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RolloutBatch(Sequence[Completion]):
    """Every completion of one ``generate`` call, in input order; ``n`` samples lie side by side.

    Example::

        batch = engine.generate(prompts, SamplingParams(n=8))
        batch[0].token_ids, len(batch), batch.metrics.tokens_per_second
        for group in batch.by_prompt():  # the 8 samples of one prompt
            ...
        batch.to_tensors(pad_token_id=tokenizer.pad_token_id)
    """

    completions: tuple[Completion, ...]
    metrics: RolloutMetrics

    def __len__(self) -> int:
        return len(self.completions)

    @overload
    def __getitem__(self, index: int) -> Completion: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Completion, ...]: ...
    def __getitem__(self, index: int | slice) -> Completion | tuple[Completion, ...]:
        return self.completions[index]

    def __iter__(self) -> Iterator[Completion]:
        return iter(self.completions)

    def __repr__(self) -> str:
        num_tokens = sum(len(c.token_ids) for c in self.completions)
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"RolloutBatch({len(self)} completions, {num_tokens} tokens{failed})"

    @property
    def failed(self) -> list[Completion]:
        """The completions that ended with an error."""
        return [c for c in self.completions if c.error is not None]

    def by_prompt(self) -> list[list[Completion]]:
        """The samples of each request together, requests in input order."""
        groups: dict[str, list[Completion]] = {}
        for completion in self.completions:
            groups.setdefault(completion.request_id, []).append(completion)
        return list(groups.values())

    def to_tensors(self, pad_token_id: int, device: torch.device | str | int | None = None) -> RolloutTensors:
        """All completions as padded tensors on ``device`` (``None``: the CPU).

        Raises:
            TypeError: ``pad_token_id`` is not a whole number; give the EOS id if there is no pad id.
            ValueError: ``pad_token_id`` is negative.
        """
        require_int("pad_token_id", pad_token_id, low=0)
        rows = self.completions
        prompts = [c.prompt_ids for c in rows]
        tokens = [c.token_ids for c in rows]
        return RolloutTensors(
            prompt_ids=_pad(prompts, pad_token_id, torch.int64, device, left=True),
            prompt_mask=_pad(_ones(prompts), 0, torch.int64, device, left=True),
            completion_ids=_pad(tokens, pad_token_id, torch.int64, device),
            completion_mask=_pad(_ones(tokens), 0, torch.int64, device),
            logprobs=_pad([c.logprobs for c in rows], 0.0, torch.float32, device),
            policy_logprobs=_pad([c.policy_logprobs for c in rows], 0.0, torch.float32, device),
            log_kept_mass=_pad([c.log_kept_mass for c in rows], 0.0, torch.float32, device),
            versions=_pad([c.versions for c in rows], NO_VERSION, torch.int64, device),
        )


def _ones(rows: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return [(1,) * len(row) for row in rows]


def _pad(
    rows: Sequence[tuple[float, ...]],
    fill: float,
    dtype: torch.dtype,
    device: torch.device | str | int | None,
    *,
    left: bool = False,
) -> torch.Tensor:
    """Rows of unequal length as one tensor [B, longest]."""
    width = max((len(row) for row in rows), default=0)
    padding = [(fill,) * (width - len(row)) for row in rows]
    full = [pad + row if left else row + pad for row, pad in zip(rows, padding, strict=True)]
    # no rows, or only empty ones, leave torch no width to see
    return torch.tensor(full, dtype=dtype, device=device).reshape(len(rows), width)


def raise_failures(batch: RolloutBatch, on_error: str) -> None:
    if not batch.failed or on_error == "return":
        return
    first = batch.failed[0]
    raise RolloutError(
        f"{len(batch.failed)} of {len(batch)} completions failed; first: {first.request_id} with "
        f"{type(first.error).__name__}: {first.error} (error.batch holds all completions; "
        "on_error='return' gives them without raising)",
        batch,
    ) from first.error


def warn_when_truncated(batch: RolloutBatch) -> None:
    if len(batch) >= 8 and batch.metrics.truncated_fraction > 0.9:
        logger.warning(
            "%d%% of %d completions were cut short by a limit; raise max_new_tokens if that is not meant",
            round(100 * batch.metrics.truncated_fraction),
            len(batch),
        )
