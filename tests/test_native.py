"""The compiled kernels against the torch operators they stand for, and how they are compiled."""

import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout import sampling
from rollout.native import HEAD_DIMS, BuildError, Kernels, build, chosen_kernels, load_kernels
from rollout.native import kernels as kernels_room
from rollout.types import DrawnToken
from test_sampling import make_row

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return load_kernels()


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As transformers writes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """fp32 up to the order of sums; bf16 to the bit but for one in a thousand, a last bit apart."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        return
    assert (ours != theirs).float().mean() <= 1e-3
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6)


# ---- element-wise parts


@pytest.mark.parametrize("tokens", [1, 3, 200])  # 200 x 96 goes to several threads
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_transformers_norm(kernels: Kernels, dtype: torch.dtype, tokens: int) -> None:
    x, delta = randn(1, tokens, 96, dtype=dtype) * 3, randn(1, tokens, 96, dtype=dtype, seed=1)
    weight = randn(96, dtype=dtype, seed=2)
    assert_same(kernels.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5))
    total, normed = kernels.add_rms_norm(x, delta, weight, 0.5)
    assert torch.equal(total, x + delta)
    assert_same(normed, rms_norm(x + delta, weight, 0.5))


def test_norm_under_autocast_adds_bf16_to_fp32(kernels: Kernels) -> None:
    x, delta, weight = randn(1, 5, 64), randn(1, 5, 64, dtype=torch.bfloat16, seed=1), randn(64, seed=2)
    total, normed = kernels.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta) and total.dtype == torch.float32
    assert_same(normed, rms_norm(x + delta, weight, 1e-5))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [T, N, H]``, as transformers writes it."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("size", [32, 64, 96])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_of_queries_and_keys_side_by_side(
    kernels: Kernels, dtype: torch.dtype, size: int, has_norms: bool
) -> None:
    tokens, queries, keys = 70, 3, 2
    joint = randn(tokens, (queries + 2 * keys) * size, dtype=dtype)
    cos, sin = randn(tokens, size, dtype=dtype, seed=1), randn(tokens, size, dtype=dtype, seed=2)
    norms = (randn(size, dtype=dtype, seed=3), randn(size, dtype=dtype, seed=4)) if has_norms else None
    found = kernels.rotate(joint, queries, keys, cos[None], sin[None], norms, 1e-6)
    heads = joint.view(tokens, -1, size)
    query, key = heads[:, :queries], heads[:, queries : queries + keys]
    if norms is not None:
        query, key = rms_norm(query, norms[0], 1e-6), rms_norm(key, norms[1], 1e-6)
    assert_same(found, torch.cat([rotate(query, cos, sin), rotate(key, cos, sin)], dim=1))


def test_rotation_under_autocast_rounds_once(kernels: Kernels) -> None:
    x, cos, sin = randn(9, 4 * 32, dtype=torch.bfloat16), randn(9, 32, seed=1), randn(9, 32, seed=2)
    found = kernels.rotate(x, 3, 1, cos[None], sin[None])
    assert_same(found, rotate(x.view(9, 4, 32), cos, sin).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_silu(kernels: Kernels, dtype: torch.dtype) -> None:
    gate_up = randn(150, 2 * 112, dtype=dtype) * 20  # far into both flat ends of the sigmoid
    gate, up = gate_up.chunk(2, dim=-1)
    assert_same(kernels.silu_mul(gate_up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_go_through(kernels: Kernels, dtype: torch.dtype) -> None:
    """A diverged model must show: nothing may turn its NaN into a number."""
    x = randn(1, 3, 32, dtype=dtype)
    x[0, 1, 5] = float("nan")
    weight = torch.ones(32, dtype=dtype)
    assert kernels.rms_norm(x, weight, 1e-5).isnan().any(dim=-1).tolist() == [[False, True, False]]
    gated = kernels.silu_mul(torch.cat([x[0], torch.ones_like(x[0])], dim=-1))
    assert gated.isnan().sum() == 1
    infinite = torch.full((1, 64), float("inf"), dtype=dtype)
    assert (kernels.silu_mul(infinite) == float("inf")).all()


# ---- pages


def test_store_writes_the_named_slots_and_no_other(kernels: Kernels) -> None:
    keys, values = torch.zeros(2, 5, 4, 16), torch.zeros(2, 5, 4, 16)
    joint = randn(6, 6 * 16)
    key, value = (joint[:, i * 32 : (i + 1) * 32].unflatten(1, (2, 16)) for i in (1, 2))  # as they come
    slots = torch.tensor([4, 19, 7, 8, 5, 12])
    kernels.store(keys, values, key, value, slots)
    for pages, x in ((keys, key), (values, value)):
        expected = torch.zeros_like(pages)
        expected.flatten(1, 2).index_copy_(1, slots, x.transpose(0, 1))
        assert torch.equal(pages, expected)
    again = torch.zeros_like(keys), torch.zeros_like(values)
    heads_first = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value))
    kernels.store(*again, *heads_first, slots)
    assert torch.equal(again[0], keys) and torch.equal(again[1], values)


@st.composite
def attention_cases(draw: st.DrawFn) -> dict[str, int | float | bool]:
    return {
        "size": draw(st.sampled_from(sorted(HEAD_DIMS))),
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 9)),
        "rows": draw(st.integers(1, 9)),
        "page_size": draw(st.sampled_from([4, 5, 16, 32])),
        "width": draw(st.integers(1, 6)),
        "softcap": draw(st.sampled_from([0.0, 3.0])),
        "has_sinks": draw(st.booleans()),
        "is_bf16": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }


@settings(max_examples=60)
@given(case=attention_cases())
def test_paged_attention_is_softmax_attention(kernels: Kernels, case: dict[str, int | float | bool]) -> None:
    size, rows, page_size, width = (int(case[k]) for k in ("size", "rows", "page_size", "width"))
    kv_heads, group, seed = int(case["kv_heads"]), int(case["group"]), int(case["seed"])
    dtype = torch.bfloat16 if case["is_bf16"] else torch.float32
    generator = torch.Generator().manual_seed(seed)
    num_pages = rows * width + 1
    keys, values = (randn(kv_heads, num_pages, page_size, size, dtype=dtype, seed=seed + i) for i in (1, 2))
    tables = torch.randperm(num_pages, generator=generator)[: rows * width].view(rows, width).contiguous()
    end = torch.randint(1, width * page_size + 1, (rows,), generator=generator)
    begin = (torch.rand(rows, generator=generator) * end).long()
    unseen = torch.ones(kv_heads, num_pages, page_size, dtype=torch.bool)
    query = randn(rows, kv_heads * group, size, dtype=dtype, seed=seed + 3)
    sinks = randn(kv_heads * group, seed=seed + 4) if case["has_sinks"] else None
    expected = []
    for row in range(rows):
        slots = [(int(tables[row, i // page_size]), i % page_size) for i in range(begin[row], end[row])]
        at = tuple(torch.tensor(x) for x in zip(*slots, strict=True))
        unseen[:, at[0], at[1]] = False
        key, value = (x[:, at[0], at[1]].float().repeat_interleave(group, dim=0) for x in (keys, values))
        scores = torch.einsum("nh,nch->nc", query[row].float(), key) * 0.3
        if case["softcap"]:
            scores = case["softcap"] * torch.tanh(scores / case["softcap"])
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], dim=1)
        weights = torch.softmax(scores, dim=-1)[:, : key.shape[1]]
        expected.append(torch.einsum("nc,nch->nh", weights, value))
    keys[unseen], values[unseen] = float("nan"), float("nan")  # what is not seen is not read
    seen = torch.stack([begin, end], dim=1)
    arguments = (keys, values, tables, seen, 0.3, float(case["softcap"]), sinks)
    found = kernels.attend(query, *arguments)
    tolerance = 2**-8 if case["is_bf16"] else 2e-6
    torch.testing.assert_close(found.float(), torch.stack(expected), rtol=tolerance, atol=2e-6 * size)
    # a row is the same whatever comes with it
    alone = kernels.attend(query[:1], keys, values, tables[:1], seen[:1], *arguments[4:])
    assert torch.equal(alone[0], found[0])


def test_a_row_that_sees_nothing_attends_to_nothing(kernels: Kernels) -> None:
    pages = randn(2, 3, 16, 32)
    seen = torch.tensor([[0, 0], [3, 9]])
    out = kernels.attend(randn(2, 4, 32), pages, pages, torch.ones(2, 1, dtype=torch.int64), seen, 1.0)
    assert (out[0] == 0).all() and out[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_number_of_threads(kernels: Kernels, dtype: torch.dtype) -> None:
    """Rows, panels and draws are divided by hand; there may be more threads than any of them."""
    lengths = [1, 40, 3, 7, 48, 2, 5]
    rows, pages = len(lengths), randn(2, 30, 16, 32, dtype=dtype)
    table = torch.arange(1, 22).view(rows, 3)
    seen = torch.tensor([[0, length] for length in lengths])
    query, logits = randn(rows, 4, 32, dtype=dtype), randn(rows, 500, dtype=dtype, seed=1)
    share = torch.linspace(0, 0.9, rows, dtype=torch.float64)
    panels = None if kernels.products is None else kernels.products.pack(randn(8, 128, dtype=dtype), None)
    wide = None if kernels.products is None else kernels.products.pack(randn(700, 512, dtype=dtype), None)

    def results() -> list[Tensor]:
        found = [kernels.attend(query, pages, pages, table, seen, 0.2)]
        found += [kernels.attend(query[:2], pages, pages, table[:2], seen[:2], 0.2)]
        for top_k in (torch.zeros(rows, dtype=torch.int64), torch.full((rows,), 9)):
            found.append(kernels.pick(logits, share, torch.ones(rows), top_k, share + 0.1, 0 * share, 64))
        found += [] if panels is None else [panels.multiply(randn(90, 128, dtype=dtype, seed=2))]
        found += [] if wide is None else [wide.multiply(randn(33, 512, dtype=dtype, seed=2))]
        return found

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = results()
        for threads in (2, 3, 7, 40):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, results(), expected))
    finally:
        torch.set_num_threads(before)


def test_attention_may_store_the_rows_own_keys_first(kernels: Kernels) -> None:
    pages = randn(2, 4, 4, 32), randn(2, 4, 4, 32, seed=1)
    apart = pages[0].clone(), pages[1].clone()
    key, value = randn(3, 2, 32, seed=2), randn(3, 2, 32, seed=3)
    slots, tables = torch.tensor([5, 9, 15]), torch.tensor([[1], [2], [3]])
    seen = torch.tensor([[0, 2], [0, 2], [0, 4]])
    query = randn(3, 4, 32, seed=4)
    together = kernels.attend(query, *pages, tables, seen, 0.2, new=(key, value, slots))
    kernels.store(*apart, key, value, slots)
    assert torch.equal(together, kernels.attend(query, *apart, tables, seen, 0.2))
    assert torch.equal(pages[0], apart[0]) and torch.equal(pages[1], apart[1])


def test_a_nan_key_spoils_its_own_row_alone(kernels: Kernels) -> None:
    keys, values = randn(1, 3, 4, 16), randn(1, 3, 4, 16, seed=1)
    keys[0, 1, 2, 3] = float("nan")
    tables, seen = torch.tensor([[1], [2]]), torch.tensor([[0, 4], [0, 4]])
    out = kernels.attend(randn(2, 2, 16, seed=2), keys, values, tables, seen, 0.25)
    assert out[0].isnan().all() and out[1].isfinite().all()


# ---- the passes of a draw


@pytest.mark.parametrize("vocab", [1, 15, 256, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_spread_is_peak_and_mass_by_block(kernels: Kernels, dtype: torch.dtype, vocab: int) -> None:
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
def test_spread_shows_what_is_not_finite(kernels: Kernels, dtype: torch.dtype) -> None:
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
    kernels: Kernels,
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
    share, heat = torch.tensor(shares, dtype=torch.float64), torch.full((len(shares),), temperature)
    nothing = torch.zeros(len(shares), dtype=torch.int64), share + 2, torch.zeros_like(share)
    token, logprob, log_kept, peak = kernels.pick(logits, share, heat, *nothing, 256).unbind(dim=1)
    assert (log_kept == 0).all()
    exact = torch.log_softmax(logits.double() / heat.double()[:, None], dim=-1)
    for i, (row, at) in enumerate(zip(exact, token.long().tolist(), strict=True)):
        upto = row.exp().cumsum(0)
        assert row[at] > -math.inf and upto[at] - row[at].exp() - 1e-6 <= shares[i] <= upto[at] + 1e-6
    assert torch.equal(peak, logits.double().amax(dim=-1))
    torch.testing.assert_close(logprob, exact.gather(1, token.long()[:, None])[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pick_shows_what_is_not_finite(kernels: Kernels, dtype: torch.dtype) -> None:
    logits = torch.randn(4, 300).to(dtype)
    logits[0, 290], logits[1, 5], logits[2] = math.nan, math.inf, -math.inf
    for limits in ({}, {"top_k": torch.full((4,), 3)}):
        check_not_finite(pick(kernels, logits, 0.5, **limits))


def check_not_finite(picks: Tensor) -> None:
    token, peak = picks[:, 0], picks[:, 3]
    assert peak[0].isnan() and peak[1] == math.inf and peak[2] == -math.inf and peak[3].isfinite()
    assert ((token >= 0) & (token < 300)).all()


def test_pick_stays_where_there_is_mass_when_the_share_is_rounded_to_all(kernels: Kernels) -> None:
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
    kernels: Kernels, data: st.DataObject, vocab: int, dtype: torch.dtype, step: float, scale: float
) -> None:
    rows = 4

    def some(values: list[float], dtype: torch.dtype) -> Tensor:
        drawn = data.draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows))
        return torch.tensor(drawn, dtype=dtype)

    logits = randn(rows, vocab, dtype=dtype, seed=data.draw(st.integers(0, 999))) * scale
    if step:
        logits = (logits / step).round() * step  # many equal ones
    heat = some([1.0, 0.7, 3.0], torch.float32)
    top_k = some([0, 0, 1, 5, 60], torch.int64).where(torch.tensor(vocab > 60), 0)
    top_p = some([0.1, 0.9, 0.999, math.inf], torch.float64)
    min_p = some([0.0, 0.0, 0.05], torch.float64)
    share = some([0.0, 0.3, 0.8, math.nextafter(1, 0)], torch.float64)
    found = kernels.pick(logits, share, heat, top_k, top_p, min_p, 64)
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


def pick(kernels: Kernels, logits: Tensor, share: float, heat: float = 1.0, **limits: Tensor) -> Tensor:
    rows = len(logits)
    return kernels.pick(
        logits,
        torch.full((rows,), share, dtype=torch.float64),
        torch.full((rows,), heat),
        limits.get("top_k", torch.zeros(rows, dtype=torch.int64)),
        limits.get("top_p", torch.full((rows,), math.inf, dtype=torch.float64)),
        torch.zeros(rows, dtype=torch.float64),
        256,
    )


def test_limited_picks_at_an_extreme_temperature_stay_inside_the_vocabulary(kernels: Kernels) -> None:
    logits = torch.full((1, 70), -torch.inf)
    logits[0, :5] = torch.arange(5.0)
    for top_k, expected in ((3, {4, 3, 2}), (50, {4, 3, 2, 1, 0})):
        shares = [i / 100 for i in range(100)]
        found = {int(pick(kernels, logits, u, 3e38, top_k=torch.tensor([top_k]))[0, 0]) for u in shares}
        assert found == expected


def test_limits_that_keep_few_or_nearly_all(kernels: Kernels) -> None:
    """40 tokens share the mass, or all of them do."""
    logits = randn(8, 50_000)
    logits[:, 1000:1040] += 12
    top_k = torch.tensor([0, 0, 0, 0, 1, 10, 50, 200])
    top_p = torch.full((8,), 0.9, dtype=torch.float64)
    found = pick(kernels, logits, 0.5, top_k=top_k, top_p=top_p)[:, 0]
    assert ((found >= 1000) & (found < 1040)).all()
    _, _, log_kept, _ = pick(kernels, randn(2, 50_000) * 0.1, 0.5, top_p=top_p[:2]).unbind(dim=1)
    torch.testing.assert_close(log_kept.exp(), top_p[:2], atol=1e-4, rtol=0)


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
def test_draws_are_the_same_in_compiled_code(kernels: Kernels, params: dict[str, Any]) -> None:
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


def test_timing_adds_up_by_function_and_ends(kernels: Kernels) -> None:
    x, weight = randn(3, 32), randn(32)
    with kernels.timing() as seconds:
        kernels.rms_norm(x, weight, 1e-5)
    assert set(seconds) == {"norm"} and seconds["norm"] > 0
    before = dict(seconds)
    kernels.rms_norm(x, weight, 1e-5)
    assert seconds == before


# ---- compiling


def test_without_a_compiler_torch_serves_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels_room._load_once.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    try:
        with caplog.at_level(logging.WARNING, logger="rollout"):
            assert chosen_kernels("auto", CPU) is None
            assert chosen_kernels("auto", CPU) is None
        assert caplog.text.count("no-such-compiler is not on the path; install g++ or set CXX") == 1
        with pytest.raises(BuildError, match="no-such-compiler"):
            chosen_kernels(True, CPU)
        assert chosen_kernels(False, CPU) is None
    finally:
        kernels_room._load_once.cache_clear()


def test_kernels_are_for_the_cpu() -> None:
    assert chosen_kernels("auto", torch.device("cuda")) is None
    with pytest.raises(ValueError, match="native_kernels=True needs a model on the CPU, this one is on cuda"):
        chosen_kernels(True, torch.device("cuda"))


def test_a_failing_compiler_leaves_nothing_and_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken-g++"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no AVX today' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(BuildError, match="no AVX today"):
        build.load_library()
    assert list((tmp_path / "cache" / "rollout").iterdir()) == []


def test_a_user_without_a_home_gets_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build, "user_cache_dir", no_home)
    with pytest.raises(BuildError, match="Could not determine home directory"):
        build.load_library()


def test_the_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -m64")
    assert build.find_compiler() == ["g++", "-m64"]
    monkeypatch.setenv("CXX", "")
    assert build.find_compiler() == ["g++"]


def test_two_processes_may_compile_at_once(tmp_path: Path) -> None:
    code = "from rollout.native import load_kernels; load_kernels(); print('made')"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=300)[0].strip() for process in running] == ["made", "made"]
    assert len(list((tmp_path / "rollout").iterdir())) == 1


def test_the_library_is_made_once(kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.load_library()
    (made,) = (tmp_path / "rollout").iterdir()
    written = made.stat().st_mtime_ns
    build.load_library()
    assert [path.stat().st_mtime_ns for path in (tmp_path / "rollout").iterdir()] == [written]
