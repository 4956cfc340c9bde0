"""Compiled draws against float64, and against torch's operators."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernel_builds import kernels_without
from rollout import sampling
from rollout.native import DrawKernels, load_kernels
from rollout.noise import uniforms
from rollout.types import DrawnToken
from test_native import DTYPES, randn
from test_sampling import make_row


@pytest.fixture(scope="module", params=["best", "without AVX-512"])
def kernels(request: pytest.FixtureRequest) -> DrawKernels:
    """Those of this CPU, and those of one whose vectors the compiler makes of smaller ones."""
    return (load_kernels() if request.param == "best" else kernels_without("avx512_f")).draws


@pytest.mark.parametrize("vocab", [1, 15, 256, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_spread_is_peak_and_mass_by_block(kernels: DrawKernels, dtype: torch.dtype, vocab: int) -> None:
    wide = randn(5, vocab + 3, dtype=dtype) * 9
    logits, heat = wide[:, :vocab], torch.tensor([1.0, 0.3, 2.0, 1e-3, 1.0])
    logits[4, vocab // 2 :] = -torch.inf  # what a mask does
    logits[4, 0] = 0.5
    peak, mass = kernels.spread(logits, heat, 64)
    assert torch.equal(peak, logits.amax(dim=-1).float())
    weights = ((logits.double() - peak[:, None].double()) / heat[:, None].double()).exp()
    blocks = torch.nn.functional.pad(weights, (0, -vocab % 64)).view(5, -1, 64).sum(dim=-1)
    torch.testing.assert_close(mass.double(), blocks, rtol=3e-6, atol=1e-37)
    assert (mass[4, -(-vocab // 128) :] == 0).all() or vocab < 128  # masked is exactly nothing


@pytest.mark.parametrize("dtype", DTYPES)
def test_spread_shows_what_is_not_finite(kernels: DrawKernels, dtype: torch.dtype) -> None:
    logits = randn(4, 100, dtype=dtype)
    logits[0, 97], logits[1, 3], logits[2] = float("nan"), float("inf"), -float("inf")
    peak, _ = kernels.spread(logits, torch.ones(4), 64)
    assert peak[0].isnan() and peak[1] == float("inf") and peak[2] == -float("inf")
    assert peak[3] == logits[3].max()


@settings(max_examples=60)
@given(
    vocab=st.integers(1, 900),
    dtype=st.sampled_from(DTYPES),
    shares=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
    impossible=st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 999),
)
def test_pick_is_the_token_in_whose_mass_the_share_falls(
    kernels: DrawKernels,
    vocab: int,
    dtype: torch.dtype,
    shares: list[float],
    temperature: float,
    impossible: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(shares), vocab, generator=generator) * 3
    logits[:, 1:][torch.rand(len(shares), vocab - 1, generator=generator) < impossible] = -math.inf
    logits = logits.to(dtype)
    knobs = torch.tensor([[share, temperature, 0, math.inf, 0] for share in shares], dtype=torch.float64)
    token, logprob, log_kept, peak = kernels.pick(logits, range(len(shares)), knobs, 256).unbind(dim=1)
    assert (log_kept == 0).all()
    heat = torch.tensor(temperature).double()  # rounded as in the kernels
    exact = torch.log_softmax(logits.double() / heat, dim=-1)
    for i, (row, at) in enumerate(zip(exact, token.long().tolist(), strict=True)):
        upto = row.exp().cumsum(0)
        assert row[at] > -math.inf and upto[at] - row[at].exp() - 1e-6 <= shares[i] <= upto[at] + 1e-6
    assert torch.equal(peak, logits.double().amax(dim=-1))
    torch.testing.assert_close(logprob, exact.gather(1, token.long()[:, None])[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pick_shows_what_is_not_finite(kernels: DrawKernels, dtype: torch.dtype) -> None:
    logits = torch.randn(4, 300).to(dtype)
    logits[0, 290], logits[1, 5], logits[2] = math.nan, math.inf, -math.inf
    for knobs in ({}, {"top_k": 3}, {"heat": 0}):
        check_not_finite(pick(kernels, logits, 0.5, **knobs))


def check_not_finite(picks: Tensor) -> None:
    token, peak = picks[:, 0], picks[:, 3]
    assert peak[0].isnan() and peak[1] == math.inf and peak[2] == -math.inf and peak[3].isfinite()
    assert ((token >= 0) & (token < 300)).all()


def test_pick_stays_where_there_is_mass_when_the_share_is_rounded_to_all(kernels: DrawKernels) -> None:
    logits = torch.full((1, 700), -math.inf)
    logits[0, [3, 300, 310]] = 0.0
    token, logprob, *_ = pick(kernels, logits, math.nextafter(1, 0))[0].tolist()
    assert token == 310 and logprob == pytest.approx(-math.log(3))
    assert pick(kernels, logits, 0.0)[0, 0] == 3


@settings(max_examples=150)
@given(
    data=st.data(),
    vocab=st.integers(1, 700),
    dtype=st.sampled_from(DTYPES),
    step=st.sampled_from([0.0, 0.5]),
    scale=st.sampled_from([0.1, 2.0, 30.0]),
)
def test_limited_picks_are_among_what_is_kept(
    kernels: DrawKernels, data: st.DataObject, vocab: int, dtype: torch.dtype, step: float, scale: float
) -> None:
    rows = 4

    def some(values: list[float], dtype: torch.dtype) -> Tensor:
        drawn = data.draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows))
        return torch.tensor(drawn, dtype=dtype)

    logits = randn(rows, vocab, dtype=dtype, seed=data.draw(st.integers(0, 999))) * scale
    if step:
        logits = (logits / step).round() * step  # many equal ones
    heat = some([1.0, 0.7, 3.0], torch.float64)
    top_k = some([0, 0, 1, 5, 60], torch.float64)
    top_p = some([0.1, 0.9, 0.999, math.inf], torch.float64)
    min_p = some([0.0, 0.0, 0.05], torch.float64)
    share = some([0.0, 0.3, 0.8, math.nextafter(1, 0)], torch.float64)
    found = kernels.pick(logits, range(rows), torch.stack([share, heat, top_k, top_p, min_p], dim=1), 64)
    top_k, heat = top_k.where(top_k < vocab, 0), heat.float()
    for row in range(rows):
        token, logprob, log_kept, peak = found[row].tolist()
        scaled = logits[row].float() / heat[row]
        exact = torch.log_softmax(scaled.double(), dim=-1)
        weights = (scaled - scaled.max()).double().exp()
        ranked = sorted(range(vocab), key=lambda i: (-float(logits[row, i]), i))
        if top_k[row]:
            ranked = [i for i in ranked if scaled[i] >= scaled[ranked[int(top_k[row]) - 1]]]
        total = float(weights[ranked].sum())
        sure, possible, before = [], [], 0.0  # a sum that ends on a limit may be on either side of it
        for i in ranked:
            if before < float(top_p[row]) * total * (1 + 1e-5) and weights[i] >= float(min_p[row]) * (
                1 - 1e-5
            ):
                possible.append(i)
            if before < float(top_p[row]) * total * (1 - 1e-5) and weights[i] >= float(min_p[row]) * (
                1 + 1e-5
            ):
                sure.append(i)
            before += float(weights[i])
        assert int(token) in possible and peak == logits[row].max()
        assert logprob == pytest.approx(float(exact[int(token)]), abs=1e-5, rel=1e-5)
        masses = [float(exact[each].exp().sum()) if each else 0.0 for each in (sure, possible)]
        assert masses[0] - 1e-5 <= math.exp(log_kept) <= masses[1] + 1e-5
        if sure == possible and not (top_k[row] == 0 and top_p[row] > 1 and min_p[row] == 0):
            upto = exact[sure].exp().cumsum(0) / exact[sure].exp().sum()
            at = sure.index(int(token))
            assert upto[at] - exact[int(token)].exp() / masses[0] - 1e-5 <= share[row] <= upto[at] + 1e-5


def pick(
    kernels: DrawKernels,
    logits: Tensor,
    share: float,
    *,
    heat: float = 1.0,
    top_k: int = 0,
    top_p: float = math.inf,
) -> Tensor:
    """Every row drawn alike."""
    knobs = torch.tensor([[share, heat, top_k, top_p, 0.0]] * len(logits), dtype=torch.float64)
    return kernels.pick(logits, range(len(logits)), knobs, 256)


def test_limited_picks_at_an_extreme_temperature_stay_inside_the_vocabulary(kernels: DrawKernels) -> None:
    logits = torch.full((1, 70), -torch.inf)
    logits[0, :5] = torch.arange(5.0)
    for top_k, expected in ((3, {4, 3, 2}), (50, {4, 3, 2, 1, 0})):
        shares = [i / 100 for i in range(100)]
        found = {int(pick(kernels, logits, u, heat=3e38, top_k=top_k)[0, 0]) for u in shares}
        assert found == expected


def test_limits_that_keep_few_or_nearly_all(kernels: DrawKernels) -> None:
    """40 tokens share the mass, or all of them do."""
    logits = randn(8, 50_000)
    logits[:, 1000:1040] += 12
    for top_k in (0, 1, 10, 50, 200):
        found = pick(kernels, logits, 0.5, top_k=top_k, top_p=0.9)[:, 0]
        assert ((found >= 1000) & (found < 1040)).all()
    _, _, log_kept, _ = pick(kernels, randn(2, 50_000) * 0.1, 0.5, top_p=0.9).unbind(dim=1)
    torch.testing.assert_close(log_kept.exp(), torch.full_like(log_kept, 0.9), atol=1e-4, rtol=0)


@settings(max_examples=60)
@given(st.integers(1, 700), st.sampled_from(DTYPES), st.integers(0, 999))
def test_greedy_picks_are_the_first_of_the_highest(
    kernels: DrawKernels, vocab: int, dtype: torch.dtype, seed: int
) -> None:
    logits = randn(3, vocab, seed=seed).round().to(dtype)  # many equal ones
    token, logprob, log_kept, peak = pick(kernels, logits, 0.7, heat=0, top_k=2).unbind(dim=1)
    assert torch.equal(token.long(), logits.max(dim=-1).indices) and torch.equal(logprob, log_kept)
    assert torch.equal(peak, logits.double().amax(dim=-1))
    exact = torch.log_softmax(logits.double(), dim=-1).gather(1, token.long()[:, None])[:, 0]
    torch.testing.assert_close(logprob, exact, atol=1e-5, rtol=1e-5)


def test_rows_draw_from_the_logits_that_are_named(kernels: DrawKernels) -> None:
    logits = randn(4, 300)
    knobs = torch.tensor([[i / 6, 1.0, 0, math.inf, 0] for i in range(6)], dtype=torch.float64)
    sources = [2, 0, 0, 3, 1, 2]
    expected = kernels.pick(logits[sources], range(6), knobs, 64)
    assert torch.equal(kernels.pick(logits, sources, knobs, 64), expected)
    assert kernels.pick(logits, [], knobs[:0], 64).shape == (0, 4)
    with pytest.raises(AssertionError):
        kernels.pick(logits, [4], knobs[:1], 64)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), *[st.integers(0, 2**32 - 1)] * 4), max_size=5))
def test_noise_is_that_of_the_noise_room(
    kernels: DrawKernels, places: list[tuple[int, int, int, int, int]]
) -> None:
    keys, indices, positions = [p[:3] for p in places], [p[3] for p in places], [p[4] for p in places]
    assert kernels.uniforms(places).tolist() == uniforms(keys, indices, positions).tolist()


def test_noise_refuses_words_beyond_32_bits(kernels: DrawKernels) -> None:
    with pytest.raises(AssertionError, match="32-bit"):
        kernels.uniforms([(0, 0, 0, 2**32, 0)])


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 5},
        {"top_k": 950},
        {"top_p": 0.9},
        {"top_p": 0.9999999},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    ],
)
def test_draws_are_the_same_in_compiled_code(kernels: DrawKernels, params: dict[str, Any]) -> None:
    """Up to shares that fall on the edge between two tokens, or of what is kept. A seventh is impossible."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 1000, generator=generator) * 3
    logits[:, ::7] = -math.inf
    rows = [make_row(key=(i, 1, 2), temperature=0.7, **params) for i in range(300)]
    ours, theirs = sampling.draw(logits, rows, None, kernels), sampling.draw(logits, rows)
    same = 0
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one, DrawnToken) and isinstance(other, DrawnToken)
        if one.token_id == other.token_id:
            same += 1
            assert one.policy_logprob == pytest.approx(other.policy_logprob, abs=1e-5)
            assert one.log_kept_mass == pytest.approx(other.log_kept_mass, abs=1e-3)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
    assert same >= 298
