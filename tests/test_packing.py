"""Packed linears against the plain linear they replace, and their loyalty to the weight version."""

import pytest
import torch
from torch import nn

from rollout.native import Products, load_kernels
from rollout.packing import MIN_PACKED_ROWS, JointLinear, PackedLinear, PackedLinears


@pytest.fixture(params=["products", "onednn"], autouse=True)
def products(request: pytest.FixtureRequest) -> Products | None:
    """Both ways of multiplying, where the CPU has both."""
    if request.param == "onednn":
        return None
    made = load_kernels().products
    if made is None:
        pytest.skip("this CPU has no bf16 dot products: oneDNN multiplies")
    return made


def make(
    products: Products | None, dtype: torch.dtype, bias: bool = True
) -> tuple[nn.Linear, nn.Sequential, PackedLinears]:
    generator = torch.Generator().manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    view = nn.Sequential(plain)
    packed = PackedLinears(True)
    packed.install(view, products)
    return plain, view, packed


@pytest.mark.parametrize("rows", [1, MIN_PACKED_ROWS, 33, 300])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_plain(products: Products | None, dtype: torch.dtype, bias: bool, rows: int) -> None:
    plain, view, _ = make(products, dtype, bias)
    assert type(view[0]) is PackedLinear and view[0].weight is plain.weight
    x = torch.randn(2, rows, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        expected, found = plain(x), view(x)
    assert found.shape == expected.shape and found.dtype == dtype
    # bf16: one rounding of the same exact products, so at most a last bit apart
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    assert torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def test_autocast_gives_what_autocast_gives_a_plain_linear(products: Products | None) -> None:
    plain, view, _ = make(products, torch.float32)
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = plain(x), view(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=2**-7)
    with torch.no_grad():
        assert torch.allclose(view(x), plain(x), atol=1e-5)  # and back: the copy was fp32 of bf16


def test_the_copy_follows_the_version_and_only_the_version(products: Products | None) -> None:
    plain, view, packed = make(products, torch.float32)
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = view(x)
        plain.weight.mul_(2)
        assert torch.equal(view(x), before)  # the engine's job is to say that the version changed
        packed.version += 1
        assert torch.allclose(view(x), plain(x), atol=1e-4)


def test_bytes_are_reported_and_given_back(products: Products | None) -> None:
    _, view, packed = make(products, torch.float32)
    assert packed.num_bytes == 0
    with torch.no_grad():
        view(torch.zeros(16, 48))
    assert packed.num_bytes == (80 if products is None else 96) * 48 * 4  # panels are of 32
    packed.release()
    assert packed.num_bytes == 0


def test_off_means_off_and_shared_modules_are_packed_once(products: Products | None) -> None:
    view = nn.Sequential(nn.Linear(4, 4))
    PackedLinears(False).install(view, products)
    assert type(view[0]) is nn.Linear
    shared = nn.Linear(4, 4)
    view = nn.Sequential(shared, nn.ReLU(), shared)
    PackedLinears(True).install(view, products)
    assert view[0] is view[2] and type(view[0]) is PackedLinear


class Branches(nn.Module):
    """Three linears on one tensor and a fourth on what they give, as in an attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 6), nn.Linear(8, 4), nn.Linear(8, 2)
        self.d = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(torch.cat([self.a(x), self.b(x), self.c(x)], dim=-1))


def joined_branches(products: Products | None) -> tuple[Branches, Branches, PackedLinears]:
    plain, view = Branches(), Branches()
    view.load_state_dict(plain.state_dict())
    packed = PackedLinears(True)
    packed.install(view, products)
    with torch.no_grad(), packed.watching():
        view(torch.zeros(2, 8))
    return plain, view, packed


def test_linears_on_one_tensor_are_joined_and_give_the_same(products: Products | None) -> None:
    plain, view, packed = joined_branches(products)
    assert view.a.group is view.b.group is view.c.group is not view.d.group
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.allclose(view(x), plain(x), atol=1e-5)
    assert packed.num_bytes == (8 * 12 + 12 * 8) * 4 if products is None else (8 + 12) * 32 * 4
    assert view.a.group._input is None and not view.a.group._outputs  # nothing is kept afterwards


def test_joined_linears_stay_right_when_called_otherwise(products: Products | None) -> None:
    """Out of order, alone, twice, or on different tensors in between: never a stale output."""
    plain, view, _ = joined_branches(products)
    x, y = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for name, tensor in (("c", x), ("a", y), ("a", y), ("b", x), ("c", x), ("b", y), ("a", x)):
            expected, found = getattr(plain, name)(tensor), getattr(view, name)(tensor)
            assert torch.allclose(found, expected, atol=1e-5)
        view.a(x)
        x.mul_(2)  # in place: the very same tensor object
        assert torch.allclose(view.b(x), plain.b(x), atol=1e-5)


def test_a_shape_without_code_is_left_to_onednn(products: Products | None) -> None:
    view = nn.Sequential(nn.Linear(7, 5, dtype=torch.bfloat16))  # an odd number of bf16 to a row
    plain = nn.Linear(7, 5, dtype=torch.bfloat16)
    plain.load_state_dict(view[0].state_dict())
    PackedLinears(True).install(view, products)
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        assert torch.allclose(view(x).float(), plain(x).float(), rtol=2**-7, atol=2**-7)


def test_asking_for_panels_packs_nothing_for_onednn(products: Products | None) -> None:
    _, view, packed = make(products, torch.float32)
    panels = JointLinear([view[0]]).panels(torch.float32)
    assert (panels is None) == (products is None) == (packed.num_bytes == 0)
