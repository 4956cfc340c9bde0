"""Whose token is drawn, and how: what the draws of one sample have in common, and where it stands."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rollout.types import SamplingParams

FLOAT32_TINY, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Bounds of the temperatures that are divided by: scores are float32."""


@dataclass(frozen=True)
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
        return self.position > 0 and bool(self.params.presence_penalty or self.params.frequency_penalty)

    @property
    def has_mask(self) -> bool:
        """Whether the ending ids are still forbidden."""
        return self.position < self.params.min_new_tokens and bool(self.ending_ids)

    @property
    def is_processed(self) -> bool:
        """Whether anything changes the logits before the temperature does."""
        if self._is_plain:
            return False
        params = self.params
        touched = params.logit_bias or params.repetition_penalty != 1.0 or params.logits_processors
        return bool(touched) or self.has_counts or self.has_mask

    @cached_property
    def knobs(self) -> tuple[float, float, float, float]:
        """Temperature (0: greedy), ``top_k`` (0: no limit), ``top_p`` (inf: no limit) and ``min_p``."""
        params = self.params
        heat = 0.0 if params.is_greedy else min(max(params.temperature, FLOAT32_TINY), FLOAT32_MAX)
        return heat, float(params.top_k or 0), params.top_p if params.top_p < 1.0 else math.inf, params.min_p

    @cached_property
    def highest_id(self) -> tuple[int, str]:
        """The highest token id that is named, and where: (-1, ...) without any."""
        stop_ids = self.ending_ids.union(self.params.stop_token_ids)
        named = ("logit_bias", self.params.logit_bias), ("stop", stop_ids)
        return max((max(ids, default=-1), name) for name, ids in named)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether nothing is asked for that could ever change the logits: so it is with nearly all."""
        params = self.params
        return not (
            params.logit_bias
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
            or params.logits_processors
            or params.min_new_tokens
        )
