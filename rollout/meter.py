"""Counts and times of one call, from which its metrics are made."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rollout.types import Completion, RolloutMetrics

STAGES = ("weights", "schedule", "build", "forward", "sample", "commit")


class Meter:
    """Measures from its construction on.

    Example::

        meter = Meter()
        with meter.stage("forward"):
            ...
        meter.count_step(num_tokens=128, pages_held=40)
        metrics = meter.metrics(completions, num_requests=4, weight_version=0, ...)
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float, dict.fromkeys(STAGES, 0.0))
        self._counts: Counter[str] = Counter()
        self._peak_pages = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a stage."""
        assert name in STAGES
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count seconds that one stage took as another's."""
        assert source in STAGES and target in STAGES
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def count_step(
        self, *, num_tokens: int, pages_held: int, pages_saved: int = 0, pages_loaded: int = 0
    ) -> None:
        """Count one step of ``num_tokens`` with ``pages_held`` pages in use, some moved to host memory or
        from it."""
        self._counts["steps"] += 1
        self._counts["computed"] += num_tokens
        self._counts["saved"] += pages_saved
        self._counts["loaded"] += pages_loaded
        self._peak_pages = max(self._peak_pages, pages_held)

    def count_graphs(self, *, recorded: int, replayed: int) -> None:
        """Count recordings that were made and steps that were replayed from one."""
        self._counts["recorded"] += recorded
        self._counts["replayed"] += replayed

    def count_discarded(self, num_tokens: int) -> None:
        """Count tokens that were drawn for nothing."""
        self._counts["discarded"] += num_tokens

    def metrics(
        self,
        completions: Sequence[Completion],
        *,
        num_requests: int,
        weight_version: int,
        num_pages: int,
        cache_bytes: int,
        derived_bytes: int,
    ) -> RolloutMetrics:
        """Everything since construction, with what the completions tell."""
        return RolloutMetrics(
            num_requests=num_requests,
            num_completions=len(completions),
            prompt_tokens=sum(len(c.prompt_ids) for c in completions),
            generated_tokens=sum(len(c.token_ids) for c in completions),
            computed_tokens=self._counts["computed"],
            cached_tokens=sum(c.cached_tokens for c in completions),
            discarded_tokens=self._counts["discarded"],
            num_steps=self._counts["steps"],
            replayed_steps=self._counts["replayed"],
            recorded_graphs=self._counts["recorded"],
            num_preemptions=sum(c.num_preemptions for c in completions),
            pages_saved=self._counts["saved"],
            pages_loaded=self._counts["loaded"],
            peak_pages=self._peak_pages,
            num_pages=num_pages,
            cache_bytes=cache_bytes,
            derived_bytes=derived_bytes,
            truncated_fraction=sum(c.is_truncated for c in completions) / max(1, len(completions)),
            weight_version=weight_version,
            seconds=time.perf_counter() - self._started,
            seconds_by_stage=dict(self._seconds),
        )
