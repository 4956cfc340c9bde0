"""The ledger: rows of a trainer found again by their tokens, on literal lists."""

from rollout.integrations.ledger import Ledger
from rollout.types import Completion, FinishReason


def completion(prompt: list[int], tokens: list[int], reason: FinishReason = FinishReason.EOS) -> Completion:
    numbers = tuple(-0.5 * (i + 1) for i in range(len(tokens)))
    return Completion(
        request_id="r",
        index=0,
        prompt_ids=tuple(prompt),
        token_ids=tuple(tokens),
        logprobs=numbers,
        policy_logprobs=numbers,
        log_kept_mass=(0.0,) * len(tokens),
        versions=(0,) * len(tokens),
        finish_reason=reason,
    )


def test_the_ledger_finds_a_plain_row() -> None:
    ledger = Ledger()
    ledger.add([completion([1, 2], [3, 4]), completion([1, 2], [5], FinishReason.LENGTH)])
    row = ledger.find([1, 2], [3, 4])
    assert row.policy_logprobs == (-0.5, -1.0) and row.is_drawn == (True, True) and not row.is_truncated
    assert ledger.find([1, 2], [5]).is_truncated


def test_the_ledger_puts_a_tool_calling_row_together() -> None:
    """Two requests with two tool tokens (8, 9) between them; the trainer cut the second at 6 tokens."""
    ledger = Ledger()
    ledger.add([completion([1, 2], [3, 4])])
    ledger.add([completion([1, 2, 3, 4, 8, 9], [5, 6, 7])])
    row = ledger.find([1, 2], [3, 4, 8, 9, 5, 6])
    assert row.policy_logprobs == (-0.5, -1.0, 0.0, 0.0, -0.5, -1.0)
    assert row.is_drawn == (True, True, False, False, True, True)
    assert row.is_truncated
    assert not ledger.find([1, 2], [3, 4, 8, 9, 5, 6, 7]).is_truncated


def test_the_ledger_does_not_know_what_others_drew() -> None:
    ledger = Ledger()
    ledger.add([completion([1, 2], [3, 4])])
    row = ledger.find([1, 2], [4, 3])
    assert row.is_drawn == (False, False) and row.policy_logprobs == (0.0, 0.0)


def test_a_row_that_ends_in_a_tools_answer_is_judged_as_trl_does() -> None:
    """TRL cuts the turn after a tool's answer to nothing when the answer fills the length."""
    ledger = Ledger()
    ledger.add([completion([1, 2], [3, 4])])
    assert not ledger.find([1, 2], [3, 4, 8, 9]).ends_drawn
    assert ledger.find([1, 2], [3, 4]).ends_drawn
