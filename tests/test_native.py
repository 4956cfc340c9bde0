"""The compiled kernels against the torch operators they stand for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernel_builds import kernels_without
from rollout.native import HEAD_DIMS, Kernels, load_kernels

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=["best", "without AVX-512"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Those of this CPU, and those of one whose vectors the compiler makes of smaller ones."""
    return load_kernels() if request.param == "best" else kernels_without("avx512_f")


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
    knobs = torch.tensor([[i / rows, 1.0, i % 2 * 9, 0.9, 0.0] for i in range(rows)], dtype=torch.float64)
    knobs[::3, 3] = 2.0  # some without limits
    panels = None if kernels.products is None else kernels.products.pack(randn(8, 128, dtype=dtype), None)
    wide = None if kernels.products is None else kernels.products.pack(randn(700, 512, dtype=dtype), None)

    def results() -> list[Tensor]:
        found = [kernels.attend(query, pages, pages, table, seen, 0.2)]
        found += [kernels.attend(query[:2], pages, pages, table[:2], seen[:2], 0.2)]
        found.append(kernels.draws.pick(logits, range(rows), knobs, 64))
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


def test_tokens_of_one_prompt_see_what_other_threads_store(kernels: Kernels) -> None:
    """One head, so that threads divide the rows: the first row reads all that the others store."""
    rows = 60
    key, value, query = randn(rows, 1, 32), randn(rows, 1, 32, seed=1), randn(rows, 2, 32, seed=2)
    stored = torch.zeros(1, 16, 4, 32), torch.zeros(1, 16, 4, 32)
    slots, tables = torch.arange(rows).flip(0), torch.arange(16).repeat(rows, 1)
    seen = torch.stack([torch.zeros_like(slots), slots + 1], dim=1)
    kernels.store(*stored, key, value, slots)
    expected = kernels.attend(query, *stored, tables, seen, 0.2)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7) * 5:
            torch.set_num_threads(threads)
            pages = torch.zeros_like(stored[0]), torch.zeros_like(stored[1])
            found = kernels.attend(query, *pages, tables, seen, 0.2, new=(key, value, slots))
            assert torch.equal(found, expected)
    finally:
        torch.set_num_threads(before)


def test_a_nan_key_spoils_its_own_row_alone(kernels: Kernels) -> None:
    keys, values = randn(1, 3, 4, 16), randn(1, 3, 4, 16, seed=1)
    keys[0, 1, 2, 3] = float("nan")
    tables, seen = torch.tensor([[1], [2]]), torch.tensor([[0, 4], [0, 4]])
    out = kernels.attend(randn(2, 2, 16, seed=2), keys, values, tables, seen, 0.25)
    assert out[0].isnan().all() and out[1].isfinite().all()


def test_timing_adds_up_by_function_and_ends(kernels: Kernels) -> None:
    x, weight = randn(3, 32), randn(32)
    with kernels.timing() as seconds:
        kernels.rms_norm(x, weight, 1e-5)
    assert set(seconds) == {"norm"} and seconds["norm"] > 0
    before = dict(seconds)
    kernels.rms_norm(x, weight, 1e-5)
    assert seconds == before
