"""Draws against a slow twin: transformers' own processors, one row at a time, full sort.

The twin runs the warpers in float64, so that a difference is a wrong rule, not a rounding of theirs.
"""

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rollout import drawing, sampling, truncation
from rollout.native import DrawKernels, load_kernels
from rollout.sampling import score
from rollout.sampling_row import SamplingRow
from rollout.types import DrawnToken, NonFiniteLogits, SamplingParams

KEY = (17, 3, 0)


class Way:
    """Every test of this file runs twice: on torch's operators and on the compiled kernels."""

    kernels: DrawKernels | None = None


@pytest.fixture(params=["torch", "native"], autouse=True, scope="module")
def way(request: pytest.FixtureRequest) -> None:
    Way.kernels = load_kernels().draws if request.param == "native" else None


def draw(
    logits: Tensor, rows: Sequence[SamplingRow], logit_rows: Sequence[int] | None = None
) -> tuple[DrawnToken | Exception, ...]:
    return sampling.draw(logits, rows, logit_rows, Way.kernels)


def make_row(
    *,
    prompt: Sequence[int] = (0,),
    generated: Sequence[int] = (),
    ending: Sequence[int] = (),
    key: tuple[int, int, int] = KEY,
    index: int = 0,
    **params: Any,
) -> SamplingRow:
    ids = [*prompt, *generated]
    return SamplingRow(SamplingParams(**params), ids, len(prompt), frozenset(ending), key, index)


def samples(num: int, **kwargs: Any) -> list[SamplingRow]:
    """``num`` samples of one request: rows that differ in their index only."""
    row = make_row(**kwargs)
    return [dataclasses.replace(row, index=i) for i in range(num)]


def drawn(entry: DrawnToken | Exception) -> DrawnToken:
    assert isinstance(entry, DrawnToken), entry
    return entry


class Twin(NamedTuple):
    """What the slow way says about one row; all [V] float64."""

    policy: Tensor  # log-probabilities of the raw logits
    processed: Tensor  # log-probabilities before truncation
    sampled: Tensor  # log-probabilities really sampled, -inf where cut

    @property
    def kept(self) -> set[int]:
        return set(self.sampled.isfinite().nonzero()[:, 0].tolist())

    @property
    def log_kept_mass(self) -> float:
        return float(self.processed[self.sampled > -math.inf].logsumexp(0))

    @property
    def is_cut(self) -> bool:
        return bool(((self.processed > -math.inf) & (self.sampled == -math.inf)).any())


def slow_twin(logits: Tensor, row: SamplingRow) -> Twin:
    """Logits [V] of one row through transformers' processors, in their order."""
    params = row.params
    ids: Any = torch.tensor([list(row.ids)])  # transformers asks for LongTensor, which no call returns
    raw = logits[None].float()
    scores = raw.clone()
    for token, bias in params.logit_bias.items():
        scores[0, token] += bias
    scores = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))(ids, scores)
    for token, count in Counter(row.ids[row.prompt_len :]).items():
        scores[0, token] -= params.frequency_penalty * count + params.presence_penalty
    if row.ending_ids:
        mask = MinNewTokensLengthLogitsProcessor(row.prompt_len, params.min_new_tokens, list(row.ending_ids))
        scores = mask(ids, scores)
    for processor in params.logits_processors:
        scores = processor(ids, scores)
    heat = TemperatureLogitsWarper(float(params.temperature or 1.0))
    policy, processed = heat(ids, raw).double(), heat(ids, scores).double()
    sampled = processed
    if params.is_greedy:
        best = int(sampled[0].argmax())
        sampled = torch.full_like(processed, -math.inf)
        sampled[0, best] = 0.0
    else:
        if params.top_k:
            sampled = TopKLogitsWarper(params.top_k)(ids, sampled)
        if params.top_p < 1:
            sampled = lowest_of_equals(TopPLogitsWarper(params.top_p)(ids, sampled), sampled)
        if params.min_p > 0:
            sampled = MinPLogitsWarper(params.min_p)(ids, sampled)
    return Twin(*(x[0].log_softmax(-1) for x in (policy, processed, sampled)))


def lowest_of_equals(cut: Tensor, scores: Tensor) -> Tensor:
    """Of equal tokens at the edge of top-p keep the lowest ids, and as many as transformers kept.

    Its sort is not stable: which of them it keeps is chance (seen: torch 2.13, float32, 40 tokens).
    """
    edge = cut[cut > -math.inf].min()
    equals = (scores == edge).nonzero()[:, 1]
    num_kept = int((cut == edge).sum())
    fixed = cut.clone()
    fixed[0, equals[:num_kept]] = edge
    fixed[0, equals[num_kept:]] = -math.inf
    return fixed


def check(entry: DrawnToken | Exception, twin: Twin) -> None:
    """The token is one that the twin keeps, and all three numbers agree."""
    token = drawn(entry)
    assert twin.sampled[token.token_id] > -math.inf, "drew a token outside the kept set"
    assert token.logprob == pytest.approx(float(twin.sampled[token.token_id]), abs=1e-5)
    assert token.policy_logprob == pytest.approx(float(twin.policy[token.token_id]), abs=1e-5)
    assert token.log_kept_mass == pytest.approx(twin.log_kept_mass, abs=1e-5)
    assert twin.is_cut or token.log_kept_mass == 0.0


def random_logits(
    num_rows: int, vocab: int, seed: int, scale: float = 3.0, step: float | None = None
) -> Tensor:
    """Normal logits [num_rows, vocab]; rounded to multiples of ``step`` (so with ties) if given."""
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return logits if step is None else (logits / step).round() * step


# ---- against the slow twin


def double_evens(ids: Tensor, scores: Tensor) -> Tensor:
    assert ids.dtype == torch.int64 and ids.shape[0] == 1 and scores.dtype == torch.float32
    factor = torch.ones_like(scores)
    factor[:, ::2] = 2.0
    return scores * factor


def forbid_last_id(ids: Tensor, scores: Tensor) -> Tensor:
    scores[0, ids[0, -1]] = -math.inf  # in place, as many of transformers' processors work
    return scores


@st.composite
def any_rows(draw_: st.DrawFn, vocab: int) -> SamplingRow:
    token = st.integers(0, vocab - 1)
    bias = st.dictionaries(token, st.sampled_from([-3.0, 1.5, -math.inf]), max_size=min(3, vocab - 1))
    return make_row(
        prompt=draw_(st.lists(token, min_size=1, max_size=8)),
        generated=draw_(st.lists(token, max_size=8)),
        ending=draw_(st.lists(token, max_size=2, unique=True)) if vocab > 8 else (),
        index=draw_(st.integers(0, 10)),
        temperature=draw_(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0, 1.7])),
        top_k=draw_(st.sampled_from([None, None, 0, 1, 3, 40, 64, 65, 500])),
        top_p=draw_(st.sampled_from([1.0, 1.0, 0.0517, 0.371, 0.6133, 0.9017, 0.9907])),
        min_p=draw_(st.sampled_from([0.0, 0.0, 0.0213, 0.31, 1.0])),
        repetition_penalty=draw_(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        presence_penalty=draw_(st.sampled_from([0.0, 0.0, 0.9, -0.4])),
        frequency_penalty=draw_(st.sampled_from([0.0, 0.0, 0.7])),
        min_new_tokens=draw_(st.sampled_from([0, 0, 4, 20])),
        logit_bias=draw_(bias) if vocab > 8 else {},
        logits_processors=draw_(st.sampled_from([(), (), (double_evens,), (double_evens, forbid_last_id)]))
        if vocab > 8
        else (),
    )


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 7, 63, 64, 65, 256, 257, 700, 1025]), st.integers(0, 1000))
def test_mixed_batches_agree_with_transformers(data: st.DataObject, vocab: int, seed: int) -> None:
    rows = data.draw(st.lists(any_rows(vocab), min_size=1, max_size=8))
    step = data.draw(st.sampled_from([None, 0.5, 2.0]))
    logits = random_logits(len(rows), vocab, seed, step=step)
    for entry, row, row_logits in zip(draw(logits, rows), rows, logits, strict=True):
        check(entry, slow_twin(row_logits, row))


CUTS: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.6133},
    {"min_p": 0.11},
    {"top_k": 12, "top_p": 0.8017, "min_p": 0.02},
    {"top_k": 7, "temperature": 0.7},
    {"top_p": 0.9017, "temperature": 1.6},
]


@pytest.mark.parametrize("params", CUTS, ids=str)
def test_the_kept_set_is_that_of_transformers(params: dict[str, Any]) -> None:
    """Drawn 3,000 times each kept token (all above 1/200) shows up, and no other, ties included."""
    logits = random_logits(1, 40, seed=4, scale=1.0, step=0.25)
    rows = samples(3000, **params)
    twin = slow_twin(logits[0], rows[0])
    seen = {drawn(entry).token_id for entry in draw(logits, rows, [0] * len(rows))}
    assert seen == twin.kept
    assert twin.is_cut and float(twin.sampled[list(seen)].min()) > math.log(1 / 200)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_float_type_is_drawn_in_float32(dtype: torch.dtype) -> None:
    logits = random_logits(len(CUTS), 300, seed=11).to(dtype)
    rows = [make_row(index=i, **params) for i, params in enumerate(CUTS)]
    entries = draw(logits, rows)
    assert entries == draw(logits.float(), rows)
    for entry, row, line in zip(entries, rows, logits, strict=True):
        check(entry, slow_twin(line, row))


def test_top_k_keeps_every_tie_with_the_kth_value() -> None:
    """100 ties for the second place: more than the first stage of 64 candidates can show."""
    logits = torch.zeros(1, 1100)
    logits[0, 1000] = 4.0
    logits[0, torch.arange(0, 1000, 10)] = 2.0
    rows = samples(2000, top_k=2)
    entries = [drawn(entry) for entry in draw(logits, rows, [0] * len(rows))]
    assert {entry.token_id for entry in entries} == {1000, *range(0, 1000, 10)}
    mass = (math.exp(4) + 100 * math.exp(2)) / (math.exp(4) + 100 * math.exp(2) + 999)
    assert entries[0].log_kept_mass == pytest.approx(math.log(mass), abs=1e-5)


def test_top_p_cuts_the_highest_of_equal_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 1.0, -2.0]])
    rows = samples(500, top_p=0.8)
    assert {drawn(entry).token_id for entry in draw(logits, rows, [0] * 500)} == {0, 1, 2}
    assert slow_twin(logits[0], rows[0]).kept == {0, 1, 2}


@pytest.mark.parametrize("vocab", [70, 1500, 9001])
@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.9907}, {"top_p": 0.5017}, {"min_p": 1e-4}, {"top_k": 1200}, {"top_k": 40, "top_p": 0.9017}],
    ids=str,
)
def test_flat_logits_fall_back_to_the_full_sort(
    params: dict[str, Any], vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random_logits(4, vocab, seed=vocab, scale=0.3)
    logits[2] = logits[2].bfloat16()  # many ties
    logits[3] = 0.0  # nothing but ties
    rows = [make_row(index=i % 3, **params) for i in range(12)]
    sources = [i // 3 for i in range(12)]
    staged = draw(logits, rows, sources)
    twins = [slow_twin(line, rows[0]) for line in logits]
    for entry, source in zip(staged, sources, strict=True):
        check(entry, twins[source])
    monkeypatch.setattr(truncation, "STAGES", ())
    for entry, sorted_entry in zip(staged, draw(logits, rows, sources), strict=True):
        assert drawn(entry).token_id == drawn(sorted_entry).token_id
        assert drawn(entry).logprob == pytest.approx(drawn(sorted_entry).logprob, abs=1e-6)


@pytest.mark.parametrize("width", [1, 5, 64, 150])
@pytest.mark.parametrize("vocab", [2000, 6007])
def test_candidates_are_the_highest_scores_in_order(width: int, vocab: int) -> None:
    scores = random_logits(3, vocab, seed=width, step=0.001)
    scores[1] = -scores[1].abs()
    scores[2, ::2] = -0.0
    scores[2, 1::2] = 0.0
    scores[2, 5] = -math.inf
    scores[0, vocab - 1] = 50.0  # in the tail that fits no group
    expected = scores.sort(dim=-1, descending=True, stable=True)
    ids = truncation._candidates(scores, width)
    values = scores.gather(1, ids)
    assert values.tolist() == expected.values[:, :width].tolist()
    for line_values, line_ids, line in zip(values, ids, expected.indices, strict=True):
        is_proven = line_values > line_values[-1]  # of the last ties only some are candidates
        assert line_ids[is_proven].tolist() == line[:width][is_proven].tolist()
        assert all(
            a < b for a, b, same in zip(line_ids, line_ids[1:], line_values.diff() == 0, strict=False) if same
        )


def test_all_mass_in_one_token() -> None:
    logits = torch.full((1, 1000), -200.0)
    logits[0, 600] = 100.0
    cases: list[dict[str, Any]] = [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"temperature": 0}]
    rows = [make_row(index=i, **params) for params in cases for i in range(50)]
    for entry in draw(logits, rows, [0] * len(rows)):
        assert drawn(entry) == DrawnToken(600, 0.0, 0.0, 0.0)


def test_one_token_vocabulary() -> None:
    rows = [make_row(), make_row(top_k=1), make_row(top_p=0.5), make_row(temperature=0), make_row(min_p=0.5)]
    for entry in draw(torch.tensor([[-7.0]]), rows, [0] * len(rows)):
        assert drawn(entry) == DrawnToken(0, 0.0, 0.0, 0.0)


# ---- the distribution of many draws


def chi_square_limit(degrees: int) -> float:
    """Quantile at p = 1e-6, by the approximation of Wilson and Hilferty."""
    z = 4.7534
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


DISTRIBUTIONS: list[tuple[dict[str, Any], int]] = [
    ({}, 50),
    ({}, 600),
    ({"temperature": 0.7}, 50),
    ({"top_k": 12}, 50),
    ({"top_p": 0.8017}, 150),
    ({"min_p": 0.03}, 150),
    ({"temperature": 0.7, "top_k": 100, "top_p": 0.95}, 150),
    ({"repetition_penalty": 1.5, "logits_processors": (double_evens,)}, 50),
]


@pytest.mark.parametrize(("params", "vocab"), DISTRIBUTIONS, ids=str)
def test_frequencies_match_the_probabilities(params: dict[str, Any], vocab: int) -> None:
    num_draws = 2_000 if "logits_processors" in params else 20_000
    logits = random_logits(1, vocab, seed=vocab, scale=1.5)
    rows = samples(num_draws, prompt=(1, 2, 3), **params)
    entries = draw(logits, rows, [0] * num_draws)
    counts = np.bincount([drawn(entry).token_id for entry in entries], minlength=vocab)
    expected = slow_twin(logits[0], rows[0]).sampled.exp().numpy() * num_draws
    assert counts[expected == 0].sum() == 0
    common = expected >= 5  # the rule of thumb for chi-square; the rare ones are counted together
    observed, wanted = counts[common].tolist(), expected[common].tolist()
    if expected[~common].sum() >= 5:
        observed.append(counts[~common].sum())
        wanted.append(expected[~common].sum())
    chi_square = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    assert len(wanted) > 5 and chi_square < chi_square_limit(len(wanted) - 1)


def fix_noise(monkeypatch: pytest.MonkeyPatch, uniform: float) -> None:
    """Let all rows draw with one number."""
    monkeypatch.setattr(drawing, "uniforms", lambda keys, *_: np.full(len(keys), uniform))
    monkeypatch.setattr(DrawKernels, "uniforms", lambda _, places: np.full(len(places), uniform))


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53, 1.0])
def test_impossible_tokens_are_never_drawn(uniform: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends of the unit interval; 1.0 stands for a product that rounding lifts to the total."""
    fix_noise(monkeypatch, uniform)
    logits = torch.full((3, 1000), -math.inf)
    logits[0, 300:310] = torch.randn(10, generator=torch.Generator().manual_seed(1))
    logits[1, [0, 999]] = torch.tensor([0.0, -500.0])  # exp(-500) is 0 in float32
    logits[2, 100:800] = 0.1
    cases: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.01}, {"temperature": 1.3}]
    for params in cases:
        first, second, third = (drawn(entry).token_id for entry in draw(logits, [make_row(**params)] * 3))
        assert 300 <= first < 310
        assert second == 0
        assert 100 <= third < 800


def test_rare_tokens_are_not_rounded_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of mass 1 before 50,000 of 1e-8 each, all below the last bit of float32.

    Block sums are float32, so a draw may land some 1e-7 of the mass away, here a few dozen tokens;
    adding 1e-8 to 1 in float32, one token after the other, would never reach the second one.
    """
    rare = 1e-8
    logits = torch.full((1, 50_001), math.log(rare))
    logits[0, 0] = 0.0
    for wanted in (100, 30_000):
        uniform = (1 + (wanted - 0.5) * rare) / (1 + 50_000 * rare)
        fix_noise(monkeypatch, uniform)
        assert abs(drawn(draw(logits, [make_row()])[0]).token_id - wanted) <= 60


# ---- the three numbers


@settings(max_examples=25, deadline=None)
@given(
    st.floats(0.2, 3.0),
    st.sampled_from([None, 1, 10, 200]),
    st.floats(0.05, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 99),
)
def test_truncation_alone_explains_the_gap_between_the_logprobs(
    temperature: float, top_k: int | None, top_p: float, min_p: float, seed: int
) -> None:
    logits = random_logits(6, 500, seed)
    params: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    rows = samples(6, **params)
    for entry in draw(logits, rows):
        token = drawn(entry)
        assert token.logprob <= 0.0 and token.log_kept_mass <= 0.0
        assert token.logprob == pytest.approx(token.policy_logprob - token.log_kept_mass, abs=1e-5)


def test_greedy_beside_sampled_rows() -> None:
    """T=0: the draw is certain (0.0), the policy logprob stays untempered and finite (FAULTS 17)."""
    logits = torch.tensor([[1.0, 5.0, 2.0, 5.0]] * 3)
    rows = [make_row(temperature=0, top_p=0.5), make_row(temperature=1), make_row(temperature=1e-30)]
    greedy, plain, cold = (drawn(entry) for entry in draw(logits, rows))
    at_best = float(logits[0].log_softmax(-1)[1])
    assert greedy.token_id == 1, "the lowest of equal ids"
    assert greedy.logprob == 0.0
    assert greedy.policy_logprob == pytest.approx(at_best, abs=1e-6)
    assert greedy.log_kept_mass == pytest.approx(at_best, abs=1e-6)
    assert plain.log_kept_mass == 0.0 and plain.logprob == plain.policy_logprob
    assert cold.token_id in (1, 3) and cold.logprob == pytest.approx(-math.log(2))


def test_extreme_temperatures_stay_finite() -> None:
    logits = random_logits(1, 300, seed=1)
    cases: list[dict[str, Any]] = [
        {"temperature": t, **cut}
        for t in (1e-300, 1e-20, 1e20, 1e300)
        for cut in ({}, {"top_p": 0.9}, {"top_k": 3})
    ]
    for entry, case in zip(
        draw(logits, [make_row(**c) for c in cases], [0] * len(cases)), cases, strict=True
    ):
        token = drawn(entry)
        assert all(map(math.isfinite, (token.logprob, token.policy_logprob, token.log_kept_mass))), case
        assert case["temperature"] > 1 or token.token_id == int(logits.argmax()), case


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 300), st.sampled_from([torch.float32, torch.bfloat16]))
def test_score_is_log_softmax_at_the_target(num_rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = random_logits(num_rows, vocab, seed=vocab).to(dtype)
    targets = torch.arange(num_rows) % vocab
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0, 0.7, 0.0, 1.0, 1.3, 0.9])[:num_rows]
    result = score(logits, targets, temperature)
    for i, t in enumerate(temperature.tolist()):
        wanted = (logits[i].float() / (t or 1.0)).log_softmax(-1)[targets[i]]
        assert result.dtype == torch.float32 and result[i] == pytest.approx(float(wanted), abs=1e-6)


def test_score_agrees_with_draw_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(50, 600, seed=2).bfloat16()
    rows = [make_row(index=i, temperature=0.5 + i / 50) for i in range(50)]
    entries = [drawn(entry) for entry in draw(logits, rows)]
    heat = torch.tensor([row.params.temperature for row in rows])
    monkeypatch.setattr(sampling, "HOST_CHUNK", 4000)  # 6 rows at a time
    scores = score(logits, torch.tensor([entry.token_id for entry in entries]), heat)
    assert [entry.policy_logprob for entry in entries] == pytest.approx(scores.tolist(), abs=1e-5)
    assert list(draw(logits, rows)) == entries


# ---- rows never meet


def zoo() -> list[SamplingRow]:
    """One row of every kind, and some twice."""
    history: dict[str, Any] = {"prompt": (5, 6, 7), "generated": (8, 9, 9)}
    return [
        make_row(index=0),
        make_row(index=1, temperature=0.6),
        make_row(index=2, temperature=0),
        make_row(index=3, top_k=20),
        make_row(index=4, top_p=0.97),
        make_row(index=5, min_p=0.001, temperature=1.4),
        make_row(index=6, repetition_penalty=1.2, **history),
        make_row(index=7, presence_penalty=0.5, frequency_penalty=0.2, top_p=0.9, **history),
        make_row(index=8, min_new_tokens=10, ending=(1, 2), **history),
        make_row(index=9, logits_processors=(double_evens, forbid_last_id), **history),
        make_row(index=10, logit_bias={3: 4.0, 4: -math.inf}, temperature=0),
        make_row(index=11, logit_bias={3: 4.0}, top_k=900, logits_processors=(double_evens,)),
        make_row(index=12, top_p=0.2, top_k=3),
    ]


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 99), st.randoms(use_true_random=False), st.sampled_from([300, 1500, 5000]))
def test_a_row_draws_the_same_alone_and_in_any_company(
    seed: int, shuffler: random.Random, vocab: int
) -> None:
    rows = zoo()
    logits = random_logits(len(rows), vocab, seed)
    together = draw(logits, rows)
    order = list(range(len(rows))) * 2
    shuffler.shuffle(order)
    order = order[: shuffler.randint(1, len(order))]
    shuffled = draw(logits, [rows[i] for i in order], order)
    for i, entry in zip(order, shuffled, strict=True):
        assert entry == together[i]
    for i, row in enumerate(rows):
        assert draw(logits[i : i + 1], [row]) == together[i : i + 1]


def test_a_row_does_not_depend_on_the_chunk_it_falls_into(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(30, 1500, seed=3)
    rows = [make_row(index=i, top_p=0.9 if i % 2 else 1.0) for i in range(30)]
    together = draw(logits, rows)
    monkeypatch.setattr(sampling, "HOST_CHUNK", 1500)  # one row at a time
    assert draw(logits, rows) == together


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_every_type_are_drawn_in_chunks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in any order, some of them from the same logits, which a model may lay out as it likes."""
    rows, sources = zoo(), [i * 7 % 5 for i in range(len(zoo()))]
    logits = random_logits(5, 300, seed=5).to(dtype)
    expected = draw(logits.float(), rows, sources)
    by_column, in_order = logits.T.contiguous().T, rows[:5]
    assert draw(by_column, rows, sources) == expected
    assert draw(by_column, in_order) == draw(logits.float(), in_order)
    monkeypatch.setattr(sampling, "HOST_CHUNK", 600)  # two rows at a time
    assert draw(logits, rows, sources) == draw(by_column, rows, sources) == expected


@pytest.mark.parametrize("top_k", [300, 2**31 + 1, 2**63 - 1, 10**400])
def test_a_top_k_beyond_the_vocabulary_is_no_limit(top_k: int) -> None:
    logits = random_logits(1, 300, seed=6)
    for params in ({}, {"top_p": 0.8}, {"min_p": 0.02}):
        limited, free = samples(20, top_k=top_k, **params), samples(20, **params)
        assert draw(logits, limited, [0] * 20) == draw(logits, free, [0] * 20)


def test_a_broken_row_changes_no_other() -> None:
    rows = zoo()
    logits = random_logits(len(rows), 1500, seed=8)
    expected = draw(logits, rows)
    for broken in range(len(rows)):
        damaged = logits.clone()
        damaged[broken, 1499] = math.nan
        entries = draw(damaged, rows)
        assert isinstance(entries[broken], NonFiniteLogits)
        assert entries[:broken] + entries[broken + 1 :] == expected[:broken] + expected[broken + 1 :]


def test_a_token_depends_on_key_index_and_position_only() -> None:
    logits = torch.zeros(1, 50_000)

    def token(**address: Any) -> int:
        return drawn(draw(logits, [make_row(**address)])[0]).token_id

    tokens = [token(index=i) for i in range(8)]
    assert len(set(tokens)) == 8, "n samples of one request differ (FAULTS 44)"
    together = draw(logits, [make_row(index=i) for i in range(8)], [0] * 8)
    assert [drawn(entry).token_id for entry in together] == tokens
    assert token(prompt=(4, 4, 4), generated=(9, 9)) == token(prompt=(1,), generated=(2, 3))
    different: list[dict[str, Any]] = [
        {"key": (18, 3, 0)},
        {"key": (17, 4, 0)},
        {"key": (17, 3, 1)},
        {"generated": (1,)},
    ]
    assert len({tokens[0], *(token(**address) for address in different)}) == 5


def test_no_global_generator_is_read_or_written() -> None:
    def states() -> str:
        return repr((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))

    rows, logits = zoo(), random_logits(13, 1500, seed=5)
    before = states()
    first = draw(logits, rows)
    assert states() == before
    torch.manual_seed(99)
    assert draw(logits, rows) == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_not_modified(dtype: torch.dtype) -> None:
    logits = random_logits(13, 1500, seed=6).to(dtype).requires_grad_()
    before = logits.detach().clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = draw(logits, zoo())
    assert torch.equal(logits, before)
    with torch.inference_mode():
        assert draw(before, zoo()) == under_autocast


# ---- penalties, masks, processors


def test_repetition_penalty_counts_the_prompt() -> None:
    """Prompt "a a a" under a strong penalty: a is out, as in transformers, penalised once (FAULTS 32)."""
    logits = torch.tensor([[6.0, 2.0, -1.0, -3.0]])
    row = make_row(prompt=(0, 0, 0, 2), repetition_penalty=5.0, temperature=0)
    token = drawn(draw(logits, [row])[0])
    assert token.token_id == 1
    processed = torch.tensor([6.0 / 5, 2.0, -5.0, -3.0]).log_softmax(-1)
    assert token.log_kept_mass == pytest.approx(float(processed[1]), abs=1e-6)
    assert token.policy_logprob == pytest.approx(float(logits[0].log_softmax(-1)[1]), abs=1e-6)


def test_repetition_penalty_ignores_prompt_ids_that_the_head_lacks() -> None:
    logits = random_logits(1, 20, seed=1)
    row = make_row(prompt=(3, 25, 999), repetition_penalty=2.0)
    check(draw(logits, [row])[0], slow_twin(logits[0], row))


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    logits = torch.zeros(1, 4)
    row = make_row(prompt=(0, 0, 1), generated=(1, 2, 2), presence_penalty=0.5, frequency_penalty=0.25)
    scores = torch.tensor([0.0, -0.75, -1.0, 0.0]).log_softmax(-1)
    for index in range(20):
        token = drawn(draw(logits, [SamplingRow(row.params, row.ids, 3, frozenset(), KEY, index)])[0])
        assert token.logprob == pytest.approx(float(scores[token.token_id]), abs=1e-6)


def test_min_new_tokens_masks_every_ending_id() -> None:
    """Not only the main EOS (FAULTS 31), and the logprob knows of the mask."""
    logits = torch.tensor([[9.0, 0.0, 8.0, 1.0, 7.0]])
    kwargs: dict[str, Any] = {"ending": (0, 2, 4), "min_new_tokens": 2}
    early = samples(100, generated=(1,), **kwargs)
    entries = [drawn(entry) for entry in draw(logits, early, [0] * 100)]
    assert {entry.token_id for entry in entries} == {1, 3}
    masked = torch.tensor([0.0, 1.0]).log_softmax(-1)
    for entry in entries:
        assert entry.logprob == pytest.approx(float(masked[(entry.token_id - 1) // 2]), abs=1e-6)
        assert entry.policy_logprob == pytest.approx(
            float(logits[0].log_softmax(-1)[entry.token_id]), abs=1e-6
        )
    late = make_row(generated=(1, 1), temperature=0, **kwargs)
    assert drawn(draw(logits, [late])[0]).token_id == 0


def test_processors_see_prompt_and_completion_and_run_in_order() -> None:
    seen: list[tuple[list[list[int]], Tensor]] = []

    def keep(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append((ids.tolist(), scores))
        return scores + 1.0

    def as_double(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.where(torch.arange(4) == 3, 50.0, scores.double())

    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    row = make_row(prompt=(1, 2), generated=(3,), logits_processors=(keep, as_double, keep), temperature=0)
    assert drawn(draw(logits, [row])[0]).token_id == 3
    assert [ids for ids, _ in seen] == [[[1, 2, 3]]] * 2
    assert seen[0][1].tolist() == [[1.0, 2.0, 3.0, 4.0]]
    assert seen[1][1].tolist() == [[2.0, 3.0, 4.0, 50.0]]


# ---- errors stay with their row


def raising(ids: Tensor, scores: Tensor) -> Tensor:
    raise KeyError("my own bug")


def wrong_shape(ids: Tensor, scores: Tensor) -> Tensor:
    return scores[:, :-1]


def nothing(ids: Tensor, scores: Tensor) -> None:
    return None


def all_masked(ids: Tensor, scores: Tensor) -> Tensor:
    return torch.full_like(scores, -math.inf)


def to_nan(ids: Tensor, scores: Tensor) -> Tensor:
    return scores * math.nan


@pytest.mark.parametrize(
    ("processor", "error", "message"),
    [
        (raising, KeyError, "my own bug"),
        (wrong_shape, ValueError, r"wrong_shape.*\(1, 9\).*\(1, 10\)"),
        (nothing, ValueError, "nothing.*NoneType"),
        (all_masked, NonFiniteLogits, "no finite value"),
        (to_nan, NonFiniteLogits, "processors the logits hold NaN"),
    ],
)
def test_a_failing_processor_fails_its_row_alone(
    processor: Callable[..., Any], error: type[Exception], message: str
) -> None:
    logits = random_logits(3, 10, seed=1)
    rows = [make_row(logits_processors=(double_evens,)), make_row(logits_processors=(processor,)), make_row()]
    first, failed, last = draw(logits, rows)
    assert type(failed) is error
    with pytest.raises(error, match=message):
        raise failed
    check(first, slow_twin(logits[0], rows[0]))
    check(last, slow_twin(logits[2], rows[2]))


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 2}, {"repetition_penalty": 1.1}], ids=str
)
def test_non_finite_logits_fail_their_rows_alone(params: dict[str, Any]) -> None:
    """Never token 0 with a NaN logprob (FAULTS 14, 15)."""
    logits = random_logits(6, 400, seed=9)
    logits[1, 399] = math.nan
    logits[2, 0] = math.inf
    logits[3] = -math.inf
    logits[4, :399] = -math.inf  # one finite logit is enough
    entries = draw(logits, [make_row(**params)] * 6)
    for i, what in ((1, "NaN"), (2, r"\+inf"), (3, "no finite value")):
        assert isinstance(entries[i], NonFiniteLogits)
        with pytest.raises(NonFiniteLogits, match=rf"model's logits hold {what}; check"):
            raise entries[i]  # type: ignore[misc]
    assert drawn(entries[4]).token_id == 399
    for i in (0, 5):
        check(entries[i], slow_twin(logits[i], make_row(**params)))


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": dict.fromkeys(range(10), -math.inf)},
        {"ending": range(10), "min_new_tokens": 1},
        {"repetition_penalty": 1e-300, "prompt": range(10)},
        {"presence_penalty": -1e300, "generated": (1,)},
    ],
    ids=str,
)
def test_params_that_leave_nothing_to_draw_fail_their_row_alone(params: dict[str, Any]) -> None:
    logits = random_logits(2, 10, seed=1)
    failed, fine = draw(logits, [make_row(**params), make_row(presence_penalty=0.5, repetition_penalty=1.1)])
    with pytest.raises(NonFiniteLogits, match="after bias, penalties, masks and processors"):
        raise failed  # type: ignore[misc]
    assert drawn(fine)


@pytest.mark.parametrize(
    "params", [{"logit_bias": {10: 1.0}}, {"ending": (3, 10)}, {"stop_token_ids": (10,)}], ids=str
)
def test_ids_outside_the_vocabulary_are_refused_for_their_row(params: dict[str, Any]) -> None:
    logits = random_logits(2, 10, seed=1)
    refused, fine = draw(logits, [make_row(**params), make_row()])
    with pytest.raises(ValueError, match="id 10 is outside the vocabulary of 10 logits; allowed: 0 to 9"):
        raise refused  # type: ignore[misc]
    assert drawn(fine)
    assert isinstance(draw(logits, [make_row(**params)])[0], ValueError)


def test_no_rows() -> None:
    assert draw(torch.zeros(0, 10), []) == ()
