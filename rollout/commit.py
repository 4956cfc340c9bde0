"""What a step's drawn tokens do to their sequences: append, end, or fail one of them alone."""

from collections.abc import Sequence as SequenceABC

from rollout.scheduler import Scheduler
from rollout.sequence import Sequence, SequenceState
from rollout.types import DrawnToken, FinishReason


def commit(
    scheduler: Scheduler,
    drawing: SequenceABC[Sequence],
    drawn: SequenceABC[DrawnToken | Exception],
    version: int,
    position_limit: int,
) -> int:
    """Take a step's tokens over: ``drawn[i]`` is that of ``drawing[i]``, or why it has none.

    ``version`` is that of the weights that drew; ``position_limit`` the most tokens of a sequence.
    Returns how many tokens came too late: their sequences had ended meanwhile.
    """
    num_late = 0
    for sequence, token in zip(drawing, drawn, strict=True):
        if sequence.state is SequenceState.FINISHED:
            num_late += 1
            continue
        if isinstance(token, Exception):
            scheduler.finish(sequence, FinishReason.ERROR, token)
            continue
        sequence.append(token, version)
        try:
            reason = _end_reason(sequence, token.token_id, position_limit)
        except Exception as error:  # the user's tokenizer: that request's fault alone
            scheduler.finish(sequence, FinishReason.ERROR, error)
            continue
        if reason is not None:
            scheduler.finish(sequence, reason)
    return num_late


def ends_by_length(sequence: Sequence, position_limit: int) -> FinishReason | None:
    """Whether its number of tokens ends the sequence, whatever they are."""
    if sequence.num_generated >= sequence.request.params.max_new_tokens:
        return FinishReason.LENGTH
    if len(sequence.ids) >= position_limit:
        return FinishReason.MAX_POSITION
    return None


def _end_reason(sequence: Sequence, token: int, position_limit: int) -> FinishReason | None:
    """Whether the token just drawn ends the sequence; notes what matched on the sequence."""
    request, params = sequence.request, sequence.request.params
    armed = sequence.num_generated >= params.min_new_tokens
    found = sequence.stop_text.push(token, armed=armed) if sequence.stop_text is not None else None
    if token in request.eos_ids:
        sequence.stop_match = token
        return FinishReason.EOS
    if token in params.stop_token_ids:
        sequence.stop_match = token
        return FinishReason.STOP
    if found is not None:
        sequence.stop_match, sequence.stop_offset = found
        return FinishReason.STOP
    return ends_by_length(sequence, position_limit)
