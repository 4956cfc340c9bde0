"""Whose token is drawn, and how: what the draws of one sample have in common, and where it stands."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rollout.types import SamplingParams

FLOAT32_TINY, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Bounds of the temperatures that are divided by: scores are float32."""
NO_TOP_K = 2**31
"""No vocabulary is larger, so that limits above this need not fit in a float."""


class Settings(NamedTuple):
    """The parameters of a draw as numbers."""

    temperature: float
    """0: the token of the highest score."""
    top_k: float
    """0: no limit."""
    top_p: float
    """Infinite: no limit."""
    min_p: float
    """0: no limit."""


@dataclass(frozen=True)  # without slots: what is made once is kept in the instance's dict
class SamplingRow:
    """One sample as the draw sees it, made once: ``ids`` grows as its tokens come.

    Example::

        row = SamplingRow(params, ids, len(ids), ending_ids=frozenset({2}), noise_key=(7, 0, 1), index=0)
        row.position    # 0, and 1 after ids.append(token)
    """

    params: SamplingParams
    ids: Sequence[int]
    """Prompt and generated tokens so far."""
    prompt_len: int
    ending_ids: frozenset[int]
    """Every id that ends the request; masked until ``min_new_tokens`` are generated."""
    noise_key: tuple[int, int, int]
    """(seed < 2**63, stream_lo < 2**32, stream_hi < 2**32)."""
    index: int
    """Which of the request's ``n`` samples this is."""

    @property
    def position(self) -> int:
        """Number of generated tokens."""
        return len(self.ids) - self.prompt_len

    @property
    def has_counts(self) -> bool:
        """Whether presence or frequency penalties change a logit of this draw."""
        return self._has_count_penalties and self.position > 0

    @property
    def has_mask(self) -> bool:
        """Whether the ending ids are still forbidden."""
        return self._is_held_back and self.position < self.params.min_new_tokens

    @property
    def is_processed(self) -> bool:
        """Whether anything changes the logits before the temperature does."""
        return self._is_always_processed or self.has_counts or self.has_mask

    @cached_property
    def settings(self) -> Settings:
        """What the draw does once the scores are final."""
        params = self.params
        return Settings(
            0.0 if params.is_greedy else min(max(params.temperature, FLOAT32_TINY), FLOAT32_MAX),
            float(min(params.top_k or 0, NO_TOP_K)),
            params.top_p if params.top_p < 1.0 else math.inf,
            params.min_p,
        )

    @cached_property
    def highest_ids(self) -> tuple[tuple[str, int], ...]:
        """The highest of the token ids under each name that has any."""
        stop_ids = self.ending_ids.union(self.params.stop_token_ids)
        named = ("logit_bias", self.params.logit_bias), ("stop", stop_ids)
        return tuple((name, max(ids)) for name, ids in named if ids)

    @cached_property
    def _is_always_processed(self) -> bool:
        params = self.params
        return bool(params.logit_bias or params.repetition_penalty != 1.0 or params.logits_processors)

    @cached_property
    def _has_count_penalties(self) -> bool:
        return bool(self.params.presence_penalty or self.params.frequency_penalty)

    @cached_property
    def _is_held_back(self) -> bool:
        return bool(self.params.min_new_tokens and self.ending_ids)
