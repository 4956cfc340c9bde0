"""PPO's arithmetic against slow twins and numbers worked out by hand.

Letters: B completions, T longest completion.
"""

import math
from typing import Any

import pytest
import torch

from rollout.integrations import ppo_math

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)  # [B, T]


def slow_gae(rewards: Any, values: Any, lengths: list[int], gamma: float, lam: float) -> list[list[float]]:
    """The definition as a double sum: (gamma * lam)^l times the error l tokens later."""
    rows = []
    for row, length in enumerate(lengths):
        value = [float(v) for v in values[row][:length]] + [0.0]
        errors = [float(rewards[row][t]) + gamma * value[t + 1] - value[t] for t in range(length)]
        advantages = [
            sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, length)) for t in range(length)
        ]
        rows.append(advantages + [0.0] * (rewards.shape[1] - length))
    return rows


def test_gae_on_numbers_worked_out_by_hand() -> None:
    rewards = torch.tensor([[0.0, 1.0, 2.0], [4.0, 9.0, 9.0]])
    values = torch.tensor([[1.0, 2.0, 3.0], [1.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    advantages, returns = ppo_math.gae(rewards, values, mask, gamma=0.5, lam=0.5)
    # errors 0 + 1 - 1 = 0, 1 + 1.5 - 2 = 0.5, 2 - 3 = -1; then backwards times 0.25
    assert advantages.tolist() == [[0.0625, 0.25, -1.0], [3.0, 0.0, 0.0]]
    assert returns.tolist() == [[1.0625, 2.25, 2.0], [4.0, 0.0, 0.0]]


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (1.0, 1.0)])
def test_gae_is_the_double_sum(gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 4, generator=generator)
    advantages, returns = ppo_math.gae(rewards, values, MASK, gamma, lam)
    expected = torch.tensor(slow_gae(rewards, values, [4, 2, 0], gamma, lam))
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, (expected + values) * MASK)


def test_whiten_sees_only_the_mask() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 9.0, 1e6, -1e6], [7e5, 0.0, 0.0, 0.0]])
    true = [1.0, 2.0, 3.0, 4.0, 5.0, 9.0]
    mean = sum(true) / 6
    deviation = math.sqrt(sum((v - mean) ** 2 for v in true) / 5)
    whitened = ppo_math.whiten(values, MASK)
    assert whitened[MASK].tolist() == pytest.approx([(v - mean) / deviation for v in true], rel=1e-5)
    assert not whitened[~MASK].any()
    kept_mean = ppo_math.whiten(values, MASK, shift_mean=False)
    assert kept_mean[MASK].tolist() == pytest.approx([(v - mean) / deviation + mean for v in true], rel=1e-5)


def test_whiten_over_ranks_is_whiten_of_all_rows() -> None:
    """Two ranks, one of them without tokens in its first row, add their sums up by ``total``."""
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    parts = [(values[:1], MASK[:1]), (values[1:], MASK[1:])]
    count = sum(m.sum() for _, m in parts)
    mean = sum((v * m).sum() for v, m in parts) / count
    square = sum(((v - mean).square() * m).sum() for v, m in parts)
    for v, m in parts:
        sums = iter([count.float(), mean * count, square])
        local = ppo_math.whiten(v, m, total=lambda _, sums=sums: next(sums))
        whole = ppo_math.whiten(values, MASK)[:1] if v is parts[0][0] else ppo_math.whiten(values, MASK)[1:]
        torch.testing.assert_close(local, whole)


def test_token_rewards_put_the_score_at_the_last_token() -> None:
    kl = torch.tensor([[0.5, 1.0, 1.5, 2.0], [2.0, 4.0, 8.0, 8.0], [1.0, 1.0, 1.0, 1.0]])
    rewards = ppo_math.token_rewards(kl, torch.tensor([10.0, 20.0, 30.0]), MASK, kl_coef=0.5)
    assert rewards.tolist() == [[-0.25, -0.5, -0.75, 9.0], [-1.0, 18.0, 0.0, 0.0], [0.0] * 4]


def test_kl_estimates() -> None:
    ours, reference = torch.tensor([[math.log(0.5), -1.0]]), torch.tensor([[math.log(0.25), -1.0]])
    assert ppo_math.kl_estimate(ours, reference, "k1").tolist() == [[pytest.approx(math.log(2)), 0.0]]
    # r - 1 - log r with r = reference / ours = 1/2
    expected = 0.5 - 1 + math.log(2)
    assert ppo_math.kl_estimate(ours, reference, "k3").tolist() == [[pytest.approx(expected), 0.0]]


def test_kl_estimators_have_the_kl_as_their_mean() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
    exact = float((p * (p / q).log()).sum())
    for estimator in ("k1", "k3"):
        assert float((p * ppo_math.kl_estimate(p.log(), q.log(), estimator)).sum()) == pytest.approx(exact)


def slow_policy_loss(new: float, old: float, advantage: float, clip: float) -> float:
    ratio = math.exp(new - old)
    return -min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)


def slow_value_loss(value: float, old: float, target: float, clip: float) -> float:
    near = min(max(value, old - clip), old + clip)
    return 0.5 * max((value - target) ** 2, (near - target) ** 2)


def test_losses_on_numbers_worked_out_by_hand() -> None:
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0]])
    loss, clipped = ppo_math.clipped_policy_loss(ratio.log(), torch.zeros(1, 5), advantages, 0.25)
    assert loss[0].tolist() == pytest.approx([-1.25, 1.5, -0.5, 0.75, -2.0])
    assert clipped[0].tolist() == [True, False, False, True, False]
    values, old, returns = torch.tensor([[2.0, 2.0, 0.5], [0.0, 0.0, 0.0], [3.0, 1.0, 0.5]])[:, None]
    loss, clipped = ppo_math.clipped_value_loss(values, old, returns, 0.5)
    # kept near: 0.5, 0.5, 0.5; squares 1 | 6.25, 1 | 0.25, 0 | 0
    assert loss[0].tolist() == [3.125, 0.5, 0.0]
    assert clipped[0].tolist() == [True, False, False]


def test_losses_are_the_slow_ones() -> None:
    new, old, third = torch.randn(3, 6, 7, generator=torch.Generator().manual_seed(2))
    policy, _ = ppo_math.clipped_policy_loss(new, old, third, 0.2)
    value, _ = ppo_math.clipped_value_loss(new, old, third, 0.2)
    numbers = list(zip(new.flatten().tolist(), old.flatten().tolist(), third.flatten().tolist(), strict=True))
    assert policy.flatten().tolist() == pytest.approx(
        [slow_policy_loss(*three, 0.2) for three in numbers], rel=1e-4
    )
    assert value.flatten().tolist() == pytest.approx(
        [slow_value_loss(*three, 0.2) for three in numbers], rel=1e-4
    )


def test_the_kl_coefficient_steers_to_the_target() -> None:
    assert ppo_math.next_kl_coef(0.1, 6.0, target=6.0, gain=0.1) == 0.1
    assert ppo_math.next_kl_coef(0.1, 6.6, target=6.0, gain=0.1) == pytest.approx(0.1 * 1.01)
    assert ppo_math.next_kl_coef(0.1, 99.0, target=6.0, gain=0.1) == pytest.approx(0.1 * 1.02)  # clipped
    assert ppo_math.next_kl_coef(0.1, -9.0, target=6.0, gain=0.1) == pytest.approx(0.1 * 0.98)


def test_prompts_come_in_seeded_epochs() -> None:
    drawn = [place for step in range(6) for place in ppo_math.prompt_places(step, 4, 6, seed=3)]
    epochs = [drawn[start : start + 6] for start in range(0, 24, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert ppo_math.prompt_places(0, 24, 6, seed=3) == drawn
    assert ppo_math.prompt_places(0, 24, 6, seed=4) != drawn
