"""Which sequences go into the next step: admission, chunked prefill, preemption, cancelling.

Owns the queues and the page tables. Decides on page numbers and token counts only; it never sees a
tensor. A sequence's life::

    add -> waiting -> running (prefill in chunks, then one token a step) -> finished
              ^----------- preempted: pages taken away, recomputed later ----'

or not recomputed: as long as the swap space has room, a preempted sequence's pages are saved to host memory
and loaded again.

Samples of one prompt, be they the ``n`` of a request or of several requests: the first one computes
the prompt while the others are held back; with the prompt's last chunk they start as forks that
share its pages and draw from its logits.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from rollout.config import EngineConfig
from rollout.sequence import PageCopy, PageTransfer, PlannedRow, Sequence, SequenceState, StepPlan
from rollout.swap import SwapSpace
from rollout.tables import PageTables, pages_to_hold
from rollout.types import FinishReason


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    budget: int
    rows: list[PlannedRow] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    loads: list[PageTransfer] = field(default_factory=list)
    fresh: list[list[int]] = field(default_factory=list)
    planned: set[int] = field(default_factory=set)  # id() of sequences that have a row
    lacks_room: bool = False  # a fork found no room: pages are promised, none are left to admit with

    def take_pages(self, copies: list[PageCopy], fresh: list[list[int]]) -> None:
        """Note what :meth:`PageTables.extend` returned."""
        self.copies += copies
        for pages, taken in zip(self.fresh, fresh, strict=True):
            pages += taken

    def freeze(self, saves: list[PageTransfer]) -> StepPlan:
        return StepPlan(
            rows=tuple(self.rows),
            saves=tuple(saves),
            loads=tuple(self.loads),
            copies=tuple(self.copies),
            fresh_pages=tuple(tuple(pages) for pages in self.fresh),
        )


class Scheduler:
    """Plans steps over a fixed set of pages.

    Example::

        scheduler = Scheduler(EngineConfig(), tables, SwapSpace(0, page_bytes))
        scheduler.add([sequence])
        while (plan := scheduler.plan()) is not None:
            ...                          # run it, append the drawn tokens
            scheduler.commit(plan)
    """

    def __init__(self, config: EngineConfig, tables: PageTables, swap: SwapSpace) -> None:
        self.tables = tables
        self._swap = swap
        self._saves: list[PageTransfer] = []  # of sequences preempted since the last plan
        self.num_preemptions = 0
        self._prefill_first = config.scheduler_type == "prefill_first"
        self._margin = config.resolved_safety_margin
        self._max_tokens = config.resolved_max_batch_tokens
        self._max_running = config.resolved_max_requests
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # by seniority
        # per prompt: who computes it, first, and the samples that wait to fork from that one
        self._families: dict[tuple[int, ...], list[Sequence]] = {}
        self._finished: list[Sequence] = []
        self._num_live: Counter[str] = Counter()  # unfinished samples per request id

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that hold pages, oldest first."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences that hold no pages, in the order of service."""
        return (*self._waiting, *(s for family in self._families.values() for s in family[1:]))

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._running or self._waiting)

    @property
    def has_finished(self) -> bool:
        """Whether :meth:`take_finished` has something to give."""
        return bool(self._finished)

    def add(self, samples: list[Sequence]) -> None:
        """Queue the samples of one request."""
        prompt = samples[0].request.prompt_ids
        self._num_live[samples[0].request.request_id] += len(samples)
        if not self.tables.share:
            self._waiting.extend(samples)
        elif prompt in self._families:
            self._families[prompt] += samples
        else:
            self._families[prompt] = list(samples)
            self._waiting.append(samples[0])

    def plan(self) -> StepPlan | None:
        """Choose the rows of the next step and take the pages they need.

        Returns ``None`` when nothing is left to run. A sequence that is alone and still has no
        room ends with ``cache_full`` (see :meth:`take_finished`).
        """
        draft = _Draft(self._max_tokens, fresh=[[] for _ in self.tables.pools])
        preempted_before = self.num_preemptions
        if self._prefill_first:
            self._plan_running(draft, [s for s in self._running if not s.is_decoding])
        else:
            self._plan_running(draft, list(self._running))
        if self.num_preemptions == preempted_before:  # else the pages are wanted by those running
            self._admit(draft)
        self._plan_running(draft, list(self._running))
        if not draft.rows and self.has_work:
            assert not self._running, "running sequences and no row"
            self._admit(draft)  # all running ones were ended or preempted: start over
            assert draft.rows or not self.has_work, "work is waiting and no row could be planned"
        if not draft.rows:
            return None
        saves, self._saves = self._saves, []
        return draft.freeze(saves)

    def plan_ahead(self, ending: Set[int]) -> StepPlan | None:
        """The next step before the tokens of the last one are known: one token more of each sequence.

        The running sequences must have their next token's place in ``ids``, except those of ``ending``
        (their ``id()``), which get no row. Nothing is preempted, admitted or registered here: where
        the next step might do so, the answer is ``None`` and :meth:`plan` must be asked when the tokens
        are there. A plan may be forgotten before it is committed: the pages taken stay the sequences'.
        """
        rows = [s for s in self._running if id(s) not in ending]
        if not rows or len(rows) > self._max_tokens or self._saves:
            return None
        if not all(s.is_decoding and s.num_generated for s in rows):
            return None  # a prompt's end may start forks
        if self._waiting and (len(rows) < len(self._running) or self._could_admit()):
            return None
        missing = zip(*(self.tables.missing(s, len(s.ids)) for s in rows), strict=True)
        if not self.tables.is_available(map(sum, missing)):
            return None
        draft = _Draft(self._max_tokens, fresh=[[] for _ in self.tables.pools])
        for sequence in rows:
            draft.take_pages(*self.tables.extend(sequence, len(sequence.ids)))
            draft.rows.append(PlannedRow(sequence=sequence, start=sequence.num_computed, length=1))
        return draft.freeze([])

    def confirm(self, plan: StepPlan) -> bool:
        """The tokens that a plan made ahead was made without are there now: its full pages can be found.

        Returns whether any of its sequences still runs.
        """
        running = [row for row in plan.rows if row.sequence.is_running]
        for row in running:
            self.tables.register(row.sequence, row.start + row.length)
        return bool(running)

    def commit(self, plan: StepPlan) -> None:
        """Note that the plan's tokens are computed; pages outside windows are given back."""
        for row in plan.rows:
            for sequence in (row.sequence, *row.forks):
                if sequence.is_running:  # else it ended after this step was planned
                    sequence.num_computed = row.start + row.length
                    self.tables.recycle(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, error: Exception | None = None) -> None:
        """End a sequence, whatever its state, and give back its pages."""
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        else:
            self._drop_waiting(sequence)
        self.tables.release(sequence)
        self._saves = [transfer for transfer in self._saves if transfer.saved is not sequence.saved]
        self._swap.drop(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        sequence.error = error
        self._finished.append(sequence)
        self._hand_over(sequence)
        self._num_live[sequence.request.request_id] -= 1
        if not self._num_live[sequence.request.request_id]:
            del self._num_live[sequence.request.request_id]

    def take_finished(self) -> list[Sequence]:
        """The sequences that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def is_live(self, request_id: str) -> bool:
        """Whether the request has an unfinished sample."""
        return request_id in self._num_live

    def live(self, request_id: str | None = None) -> list[Sequence]:
        """Unfinished sequences of one request, or of all."""
        return [
            s
            for s in (*self.running, *self.waiting)
            if request_id is None or s.request.request_id == request_id
        ]

    def finish_all(
        self, sequences: Iterable[Sequence], reason: FinishReason, error: Exception | None = None
    ) -> None:
        """End several sequences for the same reason."""
        for sequence in list(sequences):
            self.finish(sequence, reason, error)

    def change_weights(self, version: int, policy: str) -> None:
        """Enter a new weight version; see ``EngineConfig.on_weight_change`` for the policies."""
        self.tables.start_version(version)
        if policy == "keep":
            for sequence in self._running:
                sequence.is_shareable = False
            for sequence in self._waiting:
                if sequence.saved is not None:
                    sequence.saved.is_shareable = False
        elif policy == "cancel":
            self.finish_all([s for s in self.live() if s.num_generated], FinishReason.CANCELLED)
        if policy != "keep":
            for sequence in reversed(self._running):
                self._send_back(sequence)
            self._running.clear()
            self._drop_saved()

    def replace_tables(self, tables: PageTables, swap: SwapSpace) -> None:
        """Go on with other page tables: sequences that have begun are computed again on them."""
        for sequence in reversed(self._running):
            self._send_back(sequence)
        self._running.clear()
        self._drop_saved()
        self.tables, self._swap = tables, swap
        for sequence in self.waiting:
            sequence.reset_tables(tables.num_groups)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages away; it goes on when there is room again."""
        transfer = self._swap.save(sequence)
        if transfer is not None:
            self._saves.append(transfer)
        self._running.remove(sequence)
        self._send_back(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def check(self) -> None:
        """Audit queues and page books; raises AssertionError."""
        self.tables.check(self._running)
        self._swap.check(self.waiting)
        assert not any(s.saved for s in self._running), "running and saved"
        assert self._running == sorted(self._running, key=lambda s: s.seniority), "running out of order"
        assert all(s.state is SequenceState.RUNNING for s in self._running)
        for sequence in self.waiting:
            assert sequence.state is SequenceState.WAITING
            assert not any(sequence.tables) and sequence.num_computed == 0
        for first, *held in self._families.values():
            assert first in self._running or first in self._waiting, "held back for one that is gone"
            assert not any(s in self._waiting for s in held), "held back and queued"
            assert not any(s.num_generated for s in (first, *held)), "the prompt is computed already"
        assert self._num_live == Counter(s.request.request_id for s in self.live()), "live ids are wrong"

    def _plan_running(self, draft: _Draft, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if draft.budget == 0:
                return
            if sequence.state is not SequenceState.RUNNING or id(sequence) in draft.planned:
                continue  # preempted by an older one in this very plan
            wanted = min(sequence.num_uncomputed, draft.budget)
            assert wanted > 0, "a running sequence has nothing to compute"
            if self.tables.holds(sequence, sequence.num_computed + wanted):
                self._append_row(draft, sequence, wanted)
                continue
            length = self._make_room(draft, sequence, wanted)
            if length > 0:
                self._add_row(draft, sequence, length)

    def _make_room(self, draft: _Draft, sequence: Sequence, wanted: int) -> int:
        """Tokens of ``sequence`` that fit, after preempting younger ones that have no row yet."""
        while True:
            room = self.tables.room(sequence) - sequence.num_computed
            if room > 0 and (room >= wanted or not sequence.is_decoding):
                return min(wanted, room)
            victim = self._youngest_unplanned(draft, than=sequence)
            if victim is not None:
                self.preempt(victim)
            elif len(self._running) > 1:
                self.preempt(sequence)
                return 0
            else:
                self.finish(sequence, FinishReason.CACHE_FULL)
                return 0

    def _youngest_unplanned(self, draft: _Draft, than: Sequence) -> Sequence | None:
        for candidate in reversed(self._running):
            if candidate is than:
                return None
            if id(candidate) not in draft.planned:
                return candidate
        return None

    def _admit(self, draft: _Draft) -> None:
        """Start waiting sequences while tokens, places and pages (less the margin) allow."""
        while self._waiting and draft.budget > 0 and len(self._running) < self._max_running:
            sequence = self._waiting[0]
            saved = sequence.saved
            computed = self._match(sequence)
            # an idle engine may always start one, in chunks if it must
            if self._running and not self._fits(sequence):
                self.tables.release(sequence)
                return
            length = min(len(sequence.ids) - computed, draft.budget, self.tables.room(sequence) - computed)
            if length <= 0:  # preempted when it was as long as the cache, and alone now
                assert not self._running, "a sequence was found to fit and has no room"
                self.finish(sequence, FinishReason.CACHE_FULL)
                continue
            self._waiting.popleft()
            self._start(sequence)
            if saved is not None:
                draft.loads.append(self.tables.restore(sequence, saved))
                self._swap.drop(sequence)
            elif sequence.num_generated == 0:
                sequence.cached_tokens = computed
            self._add_row(draft, sequence, length)
            if draft.lacks_room:
                return

    def _could_admit(self) -> bool:
        """Whether the next waiting sequence could start now."""
        if len(self._running) >= self._max_running:
            return False
        sequence = self._waiting[0]
        self._match(sequence)
        fits = self._fits(sequence)
        self.tables.release(sequence)
        return fits

    def _match(self, sequence: Sequence) -> int:
        """Give a waiting sequence the pages of its prefix, or note where its saved ones begin; how many of
        its tokens are computed with them."""
        if sequence.saved is None:
            self.tables.match_prefix(sequence)
            return sequence.num_computed
        sequence.first_page = list(sequence.saved.first_page)
        return sequence.saved.num_computed

    def _fits(self, sequence: Sequence) -> bool:
        """Whether a sequence that was matched has room, with the margin left."""
        needed = self.tables.missing(sequence, len(sequence.ids) + 1)
        if self.tables.is_available(needed, self._margin):
            return True
        return sequence.saved is None and self._fits_in_chunks(sequence, needed)

    def _fits_in_chunks(self, sequence: Sequence, needed: list[int]) -> bool:
        """Whether only windowed groups lack room, which chunked prefill recycles as it goes."""
        page_size = self.tables.page_size
        steady = [
            min(count, pages_to_hold(len(sequence.ids) + 1, window, page_size, chunk=page_size))
            for count, window in zip(needed, self.tables.windows, strict=True)
        ]
        return steady != needed and self.tables.is_available(steady, self._margin)

    def _add_row(self, draft: _Draft, sequence: Sequence, length: int) -> None:
        """A row, with the pages that it needs."""
        draft.take_pages(*self.tables.extend(sequence, sequence.num_computed + length))
        self._append_row(draft, sequence, length)

    def _append_row(self, draft: _Draft, sequence: Sequence, length: int) -> None:
        """A row of a sequence that holds the pages for it."""
        end = sequence.num_computed + length
        self.tables.register(sequence, end)
        is_prompt_done = end == len(sequence.ids) and not sequence.num_generated
        forks = self._start_forks(draft, sequence) if is_prompt_done else ()
        draft.rows.append(
            PlannedRow(sequence=sequence, start=sequence.num_computed, length=length, forks=forks)
        )
        draft.planned.add(id(sequence))
        draft.planned.update(map(id, forks))
        draft.budget -= length

    def _start_forks(self, draft: _Draft, parent: Sequence) -> tuple[Sequence, ...]:
        """Start held-back samples on the pages of ``parent``; those without room are queued."""
        prompt = parent.request.prompt_ids
        if prompt not in self._families or self._families[prompt][0] is not parent:
            return ()
        _, *held = self._families.pop(prompt)
        forks: list[Sequence] = []
        for child in held:
            # each will soon need a page of its own in every group
            soon = [len(forks) + 1] * self.tables.num_groups
            if len(self._running) >= self._max_running or not self.tables.is_available(soon, self._margin):
                draft.lacks_room = True
                break
            self.tables.fork(parent, child)
            child.cached_tokens = len(child.request.prompt_ids)
            self._start(child)
            forks.append(child)
        self._waiting.extendleft(reversed(held[len(forks) :]))
        return tuple(forks)

    def _start(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        insort(self._running, sequence, key=lambda s: s.seniority)

    def _send_back(self, sequence: Sequence) -> None:
        self.tables.release(sequence)
        sequence.state = SequenceState.WAITING
        self._waiting.appendleft(sequence)

    def _drop_saved(self) -> None:
        """What lies in host memory, or was to be copied there, is of no use any more."""
        self._saves.clear()
        for sequence in self._waiting:
            self._swap.drop(sequence)

    def _drop_waiting(self, sequence: Sequence) -> None:
        family = self._families.get(sequence.request.prompt_ids, [])
        if sequence in family[1:]:
            family.remove(sequence)
        else:
            self._waiting.remove(sequence)

    def _hand_over(self, gone: Sequence) -> None:
        """When one ends before it computed the prompt for others, the next of them takes over."""
        prompt = gone.request.prompt_ids
        family = self._families.get(prompt, [])
        if gone in family[:1]:
            family.remove(gone)
            if family:
                self._waiting.appendleft(family[0])
            else:
                del self._families[prompt]
