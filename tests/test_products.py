"""Products with weights in panels against products in float64, and decoder layers around them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernel_builds import kernels_without
from rollout.native import DecodeRows, Kernels, LayerPlace, LayerWeights, Products, load_kernels

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=["best", "without tiles"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Those of this CPU, and those that it would have without AMX."""
    if request.param == "best":
        made = load_kernels()
    else:
        made = kernels_without("amx_bf16")
    if made.products is None:
        pytest.skip("this CPU has no bf16 dot products: oneDNN multiplies")
    return made


@pytest.fixture(scope="module")
def products(kernels: Kernels) -> Products:
    assert kernels.products is not None
    return kernels.products


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_is_product(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """fp32 up to the order of sums; bf16 rounded once, so half a last bit and those sums apart."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    rounding = 2**-8 * exact.abs() if x.dtype == torch.bfloat16 else 0
    assert found.dtype == x.dtype and found.shape == exact.shape
    assert ((found.double() - exact).abs() <= rounding + 1e-6 * size).all()


@settings(max_examples=80)
@given(
    rows=st.one_of(st.integers(1, 30), st.integers(190, 400)),
    inner=st.integers(1, 100),
    outer=st.integers(1, 140),
    has_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_product_is_the_product(
    products: Products, rows: int, inner: int, outer: int, has_bias: bool, dtype: torch.dtype, seed: int
) -> None:
    inner *= 2
    x, weight = randn(rows, inner, dtype=dtype, seed=seed), randn(outer, inner, dtype=dtype, seed=seed + 1)
    bias = randn(outer, dtype=dtype, seed=seed + 2) if has_bias else None
    assert_is_product(products.pack(weight, bias).multiply(x), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [400, 1024, 2048, 2600, 4096])
@pytest.mark.parametrize("has_bias", [True, False])
def test_long_rows_and_rows_a_power_of_two_apart(
    products: Products, dtype: torch.dtype, inner: int, has_bias: bool
) -> None:
    weight = randn(300, inner, dtype=dtype, seed=1)
    bias = randn(300, dtype=dtype, seed=2) if has_bias else None
    panels = products.pack(weight, bias)
    for rows in (1, 6, 7, 12, 13, 35, 40, 64, 250):
        x = randn(rows, inner, dtype=dtype)
        assert_is_product(panels.multiply(x), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("units", [97, 288, 289, 448, 512, 700, 288 * 3])
def test_rows_in_blocks_that_share_chunks_are_those_alone(
    products: Products, dtype: torch.dtype, units: int
) -> None:
    """Many panels, so that threads take panels and not rows, and blocks of rows take chunks in turn."""
    inner = units * 4 // dtype.itemsize
    x, weight = randn(70, inner, dtype=dtype), randn(2100, inner, dtype=dtype, seed=1)
    panels = products.pack(weight, None)
    alone = torch.cat([panels.multiply(row[None]) for row in x])
    assert_is_product(alone, x, weight, None)
    for count in (33, 35, 40, 48, 64, 70):
        assert torch.equal(panels.multiply(x[:count]), alone[:count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outer", [8, 500])
def test_a_row_is_the_same_whatever_rows_come_with_it(
    products: Products, dtype: torch.dtype, outer: int
) -> None:
    x, weight = randn(250, 1030, dtype=dtype), randn(outer, 1030, dtype=dtype, seed=1)
    panels = products.pack(weight, None)
    together = panels.multiply(x)
    for count in (1, 5, 12, 13, 64, 200):
        assert torch.equal(panels.multiply(x[:count]), together[:count])
    assert torch.equal(panels.multiply(x[None, 7:9]), together[None, 7:9])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_in_their_row(products: Products, dtype: torch.dtype) -> None:
    x = randn(20, 64, dtype=dtype)
    x[3, 5], x[4, 6] = float("nan"), float("inf")
    out = products.pack(randn(40, 64, dtype=dtype, seed=1), None).multiply(x)
    assert out[3].isnan().all() and out[4].isinf().all()
    assert out[[0, 1, 2, *range(5, 20)]].isfinite().all()


def test_what_can_be_packed_and_how_much_it_takes(products: Products) -> None:
    assert products.can_pack(torch.zeros(5, 3)) and products.can_pack(torch.zeros(5, 4).bfloat16())
    assert not products.can_pack(torch.zeros(5, 3).bfloat16())
    assert not products.can_pack(torch.zeros(5, 4).double())
    assert not products.can_pack(torch.zeros(0, 4)) and not products.can_pack(torch.zeros(4, 0))
    assert products.pack(torch.zeros(48, 10), None).num_bytes == 64 * 16 * 4  # panels of 32 rows, 16 units
    assert products.pack(torch.zeros(64, 64).bfloat16(), None).num_bytes == 64 * 64 * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (31, 30), (33, 64), (70, 34), (64, 128)])
def test_panels_hold_units_of_32_rows_side_by_side(
    products: Products, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """The weights turned by torch, zeros where they have ended."""
    outer, inner = shape
    weight = randn(outer, inner, dtype=dtype)
    units = weight.view(torch.int32)
    filled = torch.nn.functional.pad(units, (0, -units.shape[1] % 16, 0, -outer % 32))
    expected = filled.view(-1, 32, filled.shape[1]).transpose(1, 2)
    assert torch.equal(products.pack(weight, None)._panels, expected)


def test_spare_memory_is_used_again_where_it_is_as_large(products: Products) -> None:
    old = products.pack(torch.full((70, 34), torch.nan), torch.ones(70))
    address, x, weight = old.matrix.panels, randn(3, 34), randn(70, 34, seed=1)
    panels = products.pack(weight, None, old)
    assert panels.matrix.panels == address
    assert_is_product(panels.multiply(x), x, weight, None)
    other = products.pack(randn(100, 34), None, panels)
    assert other.matrix.panels != address
    assert_is_product(panels.multiply(x), x, weight, None)


def test_weights_may_be_a_view(products: Products) -> None:
    wide = randn(20, 30)
    x = randn(3, 20, seed=1)
    assert_is_product(products.pack(wide.T, None).multiply(x), x, wide.T, None)


# ---- layers


def layer_weights(
    products: Products, dtype: torch.dtype, has_head_norms: bool, size: int = 64, inner: int = 96
) -> LayerWeights:
    queries, keys, dim = 3, 1, 32
    weights = (
        products.pack(
            randn(outer, size_in, dtype=dtype, seed=seed) * size_in**-0.5, randn(outer, dtype=dtype, seed=9)
        )
        for seed, (outer, size_in) in enumerate(
            [((queries + 2 * keys) * dim, size), (size, queries * dim), (2 * inner, size), (size, inner)]
        )
    )
    qkv, attention_out, gate_up, down = weights
    norms = randn(dim, dtype=dtype, seed=5), randn(dim, dtype=dtype, seed=6)
    return LayerWeights(
        input_norm=randn(size, dtype=dtype, seed=7),
        input_eps=1e-5,
        head_norms=norms if has_head_norms else None,
        head_eps=1e-6,
        qkv=qkv,
        num_queries=queries,
        num_keys=keys,
        attention_out=attention_out,
        mlp_norm=randn(size, dtype=dtype, seed=8),
        mlp_eps=1e-4,
        gate_up=gate_up,
        down=down,
    )


@pytest.mark.parametrize("tokens", [1, 9, 209, 400])  # 209: 192 and 17, whose blocks overlap
# 48: half a panel, in bf16 half a step of tiles; 656, 640: sums are put aside and taken up again
@pytest.mark.parametrize("sizes", [(64, 96), (48, 32), (656, 640)])
@pytest.mark.parametrize("has_head_norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_halves_of_a_layer_are_its_parts(
    kernels: Kernels,
    products: Products,
    dtype: torch.dtype,
    has_head_norms: bool,
    sizes: tuple[int, int],
    tokens: int,
) -> None:
    assert kernels.layers is not None
    weights = layer_weights(products, dtype, has_head_norms, *sizes)
    weights.check()
    hidden, attended = randn(tokens, sizes[0], dtype=dtype), randn(tokens, 96, dtype=dtype, seed=1)
    given = hidden.clone()
    cos, sin = randn(1, tokens, 32, dtype=dtype, seed=2), randn(1, tokens, 32, dtype=dtype, seed=3)
    joint = weights.qkv.multiply(kernels.rms_norm(hidden, weights.input_norm, weights.input_eps))
    rotated = kernels.rotate(joint, 3, 1, cos, sin, weights.head_norms, weights.head_eps)
    found = kernels.layers.start(hidden, weights, cos, sin)
    assert torch.equal(found[:, :4], rotated) and torch.equal(found[:, 4], joint[:, 4 * 32 :])
    total, normed = kernels.add_rms_norm(
        hidden, weights.attention_out.multiply(attended), weights.mlp_norm, weights.mlp_eps
    )
    gated = kernels.silu_mul(weights.gate_up.multiply(normed))
    expected = total + weights.down.multiply(gated)
    assert torch.equal(kernels.layers.end(hidden, attended, weights), expected)
    assert torch.equal(hidden, given)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [5, 209])
def test_layers_of_a_decode_step_are_their_parts(
    kernels: Kernels,
    products: Products,
    rows: int,
    dtype: torch.dtype,
    has_sinks: bool,
    softcap: float | None,
) -> None:
    """Two layers, the second on tables of its own as with a sliding window."""
    assert kernels.layers is not None
    weights = [layer_weights(products, dtype, has_head_norms) for has_head_norms in (False, True)]
    cos, sin = randn(1, rows, 32, dtype=dtype, seed=2), randn(1, rows, 32, dtype=dtype, seed=3)
    places = [
        LayerPlace(
            keys=randn(1, 2 * rows + 2, 4, 32, dtype=dtype, seed=10 + i),
            values=randn(1, 2 * rows + 2, 4, 32, dtype=dtype, seed=20 + i),
            group=i,
            scaling=0.2,
            softcap=softcap,
            sinks=randn(3, seed=30 + i) if has_sinks else None,
        )
        for i in range(2)
    ]
    ends = torch.tensor([6, 3, 8, 2, 5]).repeat(rows)[:rows]
    groups = [
        DecodeRows(
            pages=torch.arange(2 * rows).view(rows, 2) + i,
            seen=torch.stack([torch.arange(rows) % 2 * i, ends], dim=1),
            slots=torch.arange(rows) * 8 + ends - 1 + 4 * i,
        )
        for i in range(2)
    ]
    pages = [(place.keys.clone(), place.values.clone()) for place in places]
    hidden = randn(rows, 64, dtype=dtype)
    given = hidden.clone()
    call = kernels.decode_call(weights, places)
    found = call(hidden, cos, sin, groups)
    assert torch.equal(hidden, given)
    for each, place, group, (keys, values) in zip(weights, places, groups, pages, strict=True):
        query, key, value = kernels.layers.start(hidden, each, cos, sin).split((3, 1, 1), dim=1)
        new = key, value, group.slots
        rules = 0.2, softcap, place.sinks
        attended = kernels.attend(query, keys, values, group.pages, group.seen, *rules, new=new)
        hidden = kernels.layers.end(hidden, attended.flatten(1), each)
        assert torch.equal(place.keys, keys) and torch.equal(place.values, values)
    assert torch.equal(found, hidden)
    assert torch.equal(call(given, cos, sin, groups), found)  # and once more on the same pages


def test_layers_of_different_sizes_are_not_one_call(kernels: Kernels, products: Products) -> None:
    weights = layer_weights(products, torch.float32, has_head_norms=False)
    other = replace(weights, num_keys=2, num_queries=1)
    pages = randn(1, 4, 4, 32)
    place = LayerPlace(keys=pages, values=pages.clone(), group=0, scaling=1.0, softcap=None, sinks=None)
    for layers, places in (
        ([weights, other], [place, place]),
        ([weights], [replace(place, keys=pages[:, :, :, :16])]),
        ([weights], [replace(place, sinks=torch.zeros(2))]),
    ):
        with pytest.raises(AssertionError):
            kernels.decode_call(layers, places)


def test_rows_that_do_not_fit_are_noticed(kernels: Kernels, products: Products) -> None:
    weights = layer_weights(products, torch.float32, has_head_norms=False)
    pages = randn(1, 4, 4, 32)
    place = LayerPlace(keys=pages, values=pages.clone(), group=0, scaling=1.0, softcap=None, sinks=None)
    call = kernels.decode_call([weights], [place])
    hidden, cos = randn(2, 64), randn(1, 2, 32)
    rows = DecodeRows(
        pages=torch.zeros(2, 1, dtype=torch.int64),
        seen=torch.ones(2, 2, dtype=torch.int64),
        slots=torch.tensor([1, 2]),
    )
    call(hidden, cos, cos, [rows])
    for wrong in (
        [replace(rows, seen=torch.ones(3, 2, dtype=torch.int64))],
        [replace(rows, slots=torch.tensor([1, 2], dtype=torch.int32))],
        [],
    ):
        with pytest.raises(AssertionError):
            call(hidden, cos, cos, wrong)
    with pytest.raises(AssertionError):
        call(hidden.bfloat16(), cos, cos, [rows])


def test_weights_that_do_not_fit_together_are_noticed(products: Products) -> None:
    weights = layer_weights(products, torch.float32, has_head_norms=False)
    wrong = {
        "down": products.pack(torch.zeros(64, 80), None),
        "attention_out": products.pack(torch.zeros(64, 64), None),
        "mlp_norm": torch.zeros(32),
        "gate_up": products.pack(torch.zeros(192, 64).bfloat16(), None),
    }
    for name, value in wrong.items():
        with pytest.raises(AssertionError):
            replace(weights, **{name: value}).check()
    with pytest.raises(AssertionError):  # 80 gates end within a panel
        layer_weights(products, torch.float32, has_head_norms=False, inner=80).check()


def test_timing_tells_products_from_the_rest_of_a_layer(kernels: Kernels, products: Products) -> None:
    assert kernels.layers is not None
    weights = layer_weights(products, torch.float32, has_head_norms=False)
    with kernels.timing() as seconds:
        kernels.layers.end(randn(50, 64), randn(50, 96), weights)
    assert set(seconds) == {"end_layer", "multiply"} and min(seconds.values()) > 0
