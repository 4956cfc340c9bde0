"""Steps that are launched before the results of the step before them are read.

While the device runs step ``t``, the host plans and launches step ``t + 1``: the tokens that ``t`` draws go
from its draws into the input of ``t + 1`` on the device, and only their places are known to the plan::

    host     plan t  launch t  plan t+1  launch t+1  read t, commit t  plan t+2  launch t+2  read t+1 ...
    device           [------------ t ------------]  [------------ t+1 ------------]  [---- t+2 ...

A sequence whose end the host cannot foresee (an EOS) has a row too many in ``t + 1``; its token is thrown
away when it comes. What is drawn is the same as without: noise belongs to a token's place.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.batch import StepBatch
from rollout.commit import ends_by_length
from rollout.sampling import Draws
from rollout.sequence import Sequence, StepPlan
from rollout.transfer import upload
from rollout.types import DrawnToken, SamplingParams

UNKNOWN_ID = -1
"""Holds the place of a token that is not known yet. No embedding has it, so it cannot be served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A step that was launched and whose results were not read."""

    plan: StepPlan
    drawing: tuple[Sequence, ...]
    draws: Draws | None
    """``None`` where no row draws."""
    version: int
    """Of the weights that it runs with."""

    def results(self) -> tuple[DrawnToken | Exception, ...]:
        """What was drawn; waits for the device."""
        return () if self.draws is None else self.draws.results()


def needs_ids(params: SamplingParams) -> bool:
    """Whether a draw depends on which tokens there are so far, not only on how many."""
    penalised = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    return bool(penalised or params.logits_processors)


@contextmanager
def places_held(flight: Flight, position_limit: int) -> Iterator[set[int]]:
    """Inside, the sequences that drew have a place for their token; yields the ``id()`` of those that are
    known to end with it."""
    failed = set() if flight.draws is None else flight.draws.failed
    running = [(i, s) for i, s in enumerate(flight.drawing) if s.is_running]
    lengths = [len(s.ids) for _, s in running]
    try:
        for _, sequence in running:
            sequence.ids.append(UNKNOWN_ID)
        yield {id(s) for i, s in running if i in failed or ends_by_length(s, position_limit) is not None}
    finally:
        for (_, sequence), length in zip(running, lengths, strict=True):
            del sequence.ids[length:]


def carry_over(flight: Flight, batch: StepBatch, vocab_size: int) -> Callable[[Tensor], None] | None:
    """What writes the tokens that ``flight`` draws into the input ids ``[1, T]`` of the batch after it;
    ``None`` where that has none of them."""
    if flight.draws is None:
        return None
    tokens, places = flight.draws.tokens, flight.draws.places
    drawn = {id(sequence): places[i] for i, sequence in enumerate(flight.drawing) if i in places}
    pairs = [
        (at, drawn[id(row.sequence)])
        for row, at in zip(batch.packed_rows, batch.row_starts, strict=True)
        if id(row.sequence) in drawn
    ]
    if not pairs:
        return None
    targets, sources = upload(torch.tensor(pairs, dtype=torch.int64).T.contiguous(), tokens.device)

    def fill(input_ids: Tensor) -> None:
        # a row whose logits are not finite has no token; its sequence ends when the host sees it
        carried = tokens.index_select(0, sources).clamp(0, vocab_size - 1)
        input_ids[0].index_copy_(0, targets, carried)

    return fill
