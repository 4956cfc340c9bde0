"""The oracle of the parity tests: one sequence, no cache, plain forwards of the trainer's module."""

from collections.abc import Sequence

import torch
from torch import nn

from rollout import Completion
from rollout.noise import uniforms

TIE = 1e-4
"""Two logits of the oracle closer than this may swap places between two right computations."""


def oracle_logits(model: nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """Logits ``[len(ids), V]`` fp32 of one full forward, no cache, dropout off."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    finally:
        model.train(was_training)
    return logits if logits.dtype == torch.float64 else logits.float()


def oracle_logprobs(
    model: nn.Module, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """``log_softmax(logits / temperature)`` of each completion token, ``[len(completion)]`` fp32."""
    logits = oracle_logits(model, [*prompt, *completion])[len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return logprobs.gather(1, torch.tensor(list(completion))[:, None])[:, 0]


def oracle_greedy(model: nn.Module, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Greedy tokens, one full forward per token."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(int(oracle_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def assert_greedy(model: nn.Module, completion: Completion) -> None:
    """Every token of a greedy completion is the oracle's choice, or tied with it."""
    ids = [*completion.prompt_ids, *completion.token_ids]
    logits = oracle_logits(model, ids)[len(completion.prompt_ids) - 1 : -1]
    for position, (row, token) in enumerate(zip(logits, completion.token_ids, strict=True)):
        behind = float(row.max() - row[token])
        assert behind < TIE, f"token {position} is {token}, {behind:.2e} behind the oracle's choice"


def assert_same_draws(
    model: nn.Module, one: Completion, other: Completion, temperature: float, noise_key: tuple[int, int, int]
) -> None:
    """Two computations of one request drew the same tokens.

    At the first difference the oracle must call it a tie: for greedy rows between the two logits,
    for sampled rows where the row's uniform number lies on the border between the two tokens.
    """
    pairs = zip(one.token_ids, other.token_ids, strict=True)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if position is None:
        return
    low, high = sorted((one.token_ids[position], other.token_ids[position]))
    logits = oracle_logits(model, [*one.prompt_ids, *one.token_ids[:position]])[-1]
    if temperature == 0:
        assert abs(float(logits[low] - logits[high])) < TIE
        return
    cumulative = torch.softmax(logits.double() / temperature, dim=-1).cumsum(0)
    (uniform,) = uniforms([noise_key], [one.index], [position])
    assert abs(float(cumulative[low]) - uniform) < TIE and abs(float(cumulative[high - 1]) - uniform) < TIE


def assert_logprobs(
    model: nn.Module, completion: Completion, *, temperature: float = 1.0, tolerance: float = 2e-4
) -> None:
    """The completion's policy_logprobs are those of the oracle's own forward."""
    expected = oracle_logprobs(model, completion.prompt_ids, completion.token_ids, temperature)
    gap = (torch.tensor(completion.policy_logprobs) - expected).abs()
    assert gap.numel() == 0 or float(gap.max()) < tolerance, f"logprob gap {float(gap.max()):.2e}"
