"""What the rollouts of one training step drew, found again by their tokens.

A trainer hands on bare ids: after a tool-calling loop one row of it holds what several requests drew,
with the tools' answers between, possibly cut at the length limit. The ledger tells for such a row
which tokens were drawn, with which logprobs, and how it really ended.

Letters: B rows of the trainer's batch.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout.integrations.accelerate import LogprobGap
from rollout.types import Completion, RolloutMetrics


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """One row of a trainer's batch, token by token."""

    policy_logprobs: tuple[float, ...]
    """0.0 for a token that was not drawn."""
    is_drawn: tuple[bool, ...]
    is_truncated: bool
    """Whether a limit ended what was drawn last: the engine's, or the trainer's own cut. Says nothing
    of a row that does not end in a drawn token, see :attr:`ends_drawn`."""

    @property
    def ends_drawn(self) -> bool:
        """Whether the engine drew the last token."""
        return bool(self.is_drawn) and self.is_drawn[-1]


class Ledger:
    """The completions of a step by their prompts.

    Example::

        ledger = Ledger()
        ledger.add(batch)                       # once for every generate call of the step
        row = ledger.find(prompt_ids, completion_ids)
        row.policy_logprobs, row.is_truncated
    """

    def __init__(self) -> None:
        self._by_prompt: dict[tuple[int, ...], list[Completion]] = defaultdict(list)
        self._prompt_lens: set[int] = set()

    def add(self, completions: Iterable[Completion]) -> None:
        """Remember what was drawn."""
        for completion in completions:
            self._by_prompt[completion.prompt_ids].append(completion)
            self._prompt_lens.add(len(completion.prompt_ids))

    def find(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> DrawnRow:
        """What is known of the row ``prompt_ids + completion_ids``."""
        tokens = tuple(completion_ids)
        ids = (*prompt_ids, *tokens)
        logprobs: list[float] = []
        is_drawn: list[bool] = []
        is_truncated = False
        while len(logprobs) < len(tokens):
            before = len(ids) - len(tokens) + len(logprobs)
            # lengths first: slices of a long row for each of a tool's tokens would be quadratic
            drawn = self._drawn_at(ids, before) if before in self._prompt_lens else None
            if drawn is None:
                logprobs.append(0.0)
                is_drawn.append(False)
                continue
            taken = min(len(ids) - before, len(drawn.token_ids))
            logprobs += drawn.policy_logprobs[:taken]
            is_drawn += [True] * taken
            is_truncated = drawn.is_truncated or taken < len(drawn.token_ids)
        return DrawnRow(tuple(logprobs), tuple(is_drawn), is_truncated)

    def _drawn_at(self, ids: tuple[int, ...], before: int) -> Completion | None:
        """The completion that was drawn after the first ``before`` ids and begins the rest, or is begun
        by it."""
        rest = ids[before:]
        for completion in self._by_prompt.get(ids[:before], ()):
            drawn = completion.token_ids
            shared = min(len(drawn), len(rest))
            if shared and drawn[:shared] == rest[:shared]:
                return completion
        return None


@dataclass(slots=True)
class StepRecord:
    """What one generate-and-score of a trainer has drawn so far."""

    masks_truncated: bool
    """The trainer's ``mask_truncated_completions``."""
    awaits_old_logprobs: bool = False
    """Whether the next forward of the policy is the trainer's for its old logprobs."""
    ledger: Ledger = field(default_factory=Ledger)
    metrics: list[RolloutMetrics] = field(default_factory=list)
    """One per generate call: a tool-calling loop makes several."""
    rows: list[DrawnRow] = field(default_factory=list)
    """The trainer's rows, once generation is over."""
    is_trained: list[list[bool]] = field(default_factory=list)
    """The same rows, token by token: false for what a tool or an environment wrote."""
    is_truncated: list[bool] = field(default_factory=list)
    """The same rows: whether a limit ended them."""
    gap: LogprobGap | None = None

    @property
    def has_foreign_tokens(self) -> bool:
        """Whether the trainer learns from tokens that the engine has not drawn."""
        return any(
            is_trained and not is_drawn
            for row, trained in zip(self.rows, self.is_trained, strict=True)
            for is_drawn, is_trained in zip(row.is_drawn, trained, strict=True)
        )

    def policy_logprobs(self, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The engine's logprobs of all rows, [B, width] float32, and where tokens were drawn, bool."""
        logprobs = torch.zeros(len(self.rows), width)
        is_drawn = torch.zeros(len(self.rows), width, dtype=torch.bool)
        for i, row in enumerate(self.rows):
            logprobs[i, : len(row.is_drawn)] = torch.tensor(row.policy_logprobs)
            is_drawn[i, : len(row.is_drawn)] = torch.tensor(row.is_drawn, dtype=torch.bool)
        return logprobs.to(device), is_drawn.to(device)
