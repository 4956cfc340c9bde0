"""One sample on its way through the engine, and the message that plans a step.

``Sequence`` is the one mutable record; a ``StepPlan`` says what a step computes. This room owns no
decision: the scheduler plans, the engine commits.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from rollout.sampling_row import SamplingRow
from rollout.types import Completion, DrawnToken, FinishReason, SamplingParams


class SequenceState(Enum):
    """Where a sequence is: queued, holding pages, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class StopText(Protocol):
    """Finds a request's stop strings while its tokens arrive (see :mod:`rollout.text`)."""

    def push(self, token_id: int, *, armed: bool) -> tuple[str, int] | None:
        """Take one more token; the stop string it completed and where that begins, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked, once for all of its ``n`` samples."""

    request_id: str
    ordinal: int
    """Number of the request in the engine's life: the order of service."""
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    eos_ids: frozenset[int]
    """EOS ids that end this request; empty under ``ignore_eos``."""
    noise_key: tuple[int, int, int]
    """(seed, stream low word, stream high word) of the counter-based noise."""
    first_index: int = 0
    """Noise index of sample 0: above 0 where a call repeats a prompt under the same seed, so that
    the repeats are the further samples of the first one."""

    @property
    def ending_ids(self) -> frozenset[int]:
        """Every id that ends the request, which ``min_new_tokens`` holds back."""
        return self.eos_ids | frozenset(self.params.stop_token_ids)


@dataclass(slots=True, eq=False)
class SavedPages:
    """A preempted sequence's pages in host memory: enough to go on without computing them again."""

    num_pages: tuple[int, ...]
    """Per layer group."""
    first_page: tuple[int, ...]
    num_computed: int
    is_shareable: bool
    stored: dict[int, Any] = field(default_factory=dict)
    """Layer group -> what the kv cache read from the pages (tensors, which this room does not know);
    filled when the step runs."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's samples: its tokens so far and the pages that hold their keys/values.

    ``ids`` is prompt plus generated tokens, one list for good. The first ``num_computed`` of them have their
    keys and values in pages. ``tables[g]`` lists the pages of layer group ``g`` from page number
    ``first_page[g]`` on; lower ones slid out of the group's window and were given back.
    """

    request: Request
    index: int
    ids: list[int]
    num_groups: int
    draw_row: SamplingRow = field(init=False)
    """The sample as the draw sees it, on the very list ``ids``."""
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    tables: list[list[int]] = field(init=False)
    first_page: list[int] = field(init=False)
    page_keys: list[bytes] = field(default_factory=list)
    is_shareable: bool = True
    """False once its pages mix weight versions: others must never find them."""
    logprobs: list[float] = field(default_factory=list)
    policy_logprobs: list[float] = field(default_factory=list)
    log_kept_mass: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_text: StopText | None = None
    finish_reason: FinishReason | None = None
    stop_match: int | str | None = None
    stop_offset: int | None = None
    error: Exception | None = None
    cached_tokens: int = 0
    num_preemptions: int = 0
    saved: SavedPages | None = None
    """Its pages in host memory, while it waits for room after a preemption."""

    def __post_init__(self) -> None:
        self.reset_tables(self.num_groups)
        request = self.request
        self.draw_row = SamplingRow(
            params=request.params,
            ids=self.ids,
            prompt_len=len(request.prompt_ids),
            ending_ids=request.ending_ids,
            noise_key=request.noise_key,
            index=request.first_index + self.index,
        )

    def reset_tables(self, num_groups: int) -> None:
        """Start with empty tables for that many layer groups."""
        self.num_groups = num_groups
        self.tables = [[] for _ in range(num_groups)]
        self.first_page = [0] * num_groups

    @property
    def num_generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def generated_ids(self) -> tuple[int, ...]:
        """Tokens drawn so far."""
        return tuple(self.ids[len(self.request.prompt_ids) :])

    @property
    def is_running(self) -> bool:
        """Whether it holds pages."""
        return self.state is SequenceState.RUNNING

    @property
    def num_uncomputed(self) -> int:
        """Tokens that still have to go through the model; 1 for a sequence that decodes."""
        return len(self.ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the token drawn last has not gone through the model."""
        return self.num_uncomputed == 1 and self.num_computed > 0

    @property
    def seniority(self) -> tuple[int, int]:
        """Sort key: earlier requests first, then samples by index."""
        return (self.request.ordinal, self.index)

    def append(self, drawn: DrawnToken, version: int) -> None:
        """Add a drawn token with its numbers."""
        self.ids.append(drawn.token_id)
        self.logprobs.append(drawn.logprob)
        self.policy_logprobs.append(drawn.policy_logprob)
        self.log_kept_mass.append(drawn.log_kept_mass)
        self.versions.append(version)

    def completion(self) -> Completion:
        """The finished sequence as the caller sees it."""
        assert self.finish_reason is not None, f"{self.request.request_id} is not finished"
        return Completion(
            request_id=self.request.request_id,
            index=self.index,
            prompt_ids=self.request.prompt_ids,
            token_ids=self.generated_ids,
            logprobs=tuple(self.logprobs),
            policy_logprobs=tuple(self.policy_logprobs),
            log_kept_mass=tuple(self.log_kept_mass),
            versions=tuple(self.versions),
            finish_reason=self.finish_reason,
            stop_match=self.stop_match,
            stop_offset=self.stop_offset,
            error=self.error,
            cached_tokens=self.cached_tokens,
            num_preemptions=self.num_preemptions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """Tokens ``start .. start + length`` of one sequence go through the model in this step.

    ``forks`` are samples of the same prompt that start here: they share the row's pages and draw
    their own first token from the row's last logits.
    """

    sequence: Sequence
    start: int
    length: int
    forks: tuple[Sequence, ...] = ()

    @property
    def draws(self) -> bool:
        """Whether the row reaches the sequence's last token, so that a token is drawn."""
        return self.start + self.length == len(self.sequence.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """Copy page ``source`` to ``target`` in layer group ``group`` before the step runs."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTransfer:
    """Pages of every layer group that go to host memory, or come back from it."""

    saved: SavedPages
    pages: tuple[tuple[int, ...], ...]

    @property
    def num_pages(self) -> int:
        """Pages over all groups."""
        return sum(map(len, self.pages))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """All that one step does, in this order: pages are saved to host memory, copied, cleared, loaded
    from host memory; then the rows are computed, in batch order."""

    rows: tuple[PlannedRow, ...]
    saves: tuple[PageTransfer, ...] = ()
    loads: tuple[PageTransfer, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    fresh_pages: tuple[tuple[int, ...], ...] = ()
    """Per layer group, pages taken in this plan: cleared before use, so that nothing of a former
    owner (a NaN, above all) can be read through a masked slot."""

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(row.length for row in self.rows)

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token."""
        return all(row.length == 1 for row in self.rows)

    def drawing(self) -> list[Sequence]:
        """The sequences that draw a token, in the order of the logits' rows."""
        return [s for row in self.rows if row.draws for s in (row.sequence, *row.forks)]
