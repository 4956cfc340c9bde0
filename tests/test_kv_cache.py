"""The cache's tensors: layout, growth, copies, clearing."""

import pytest
import torch

from rollout import kv_cache
from rollout.kv_cache import CacheLayout, KVCache, LayerShape, PageOrder

FULL, WINDOWED = LayerShape(2, 4, 6, None), LayerShape(1, 8, 8, 16)


def make(num_pages: tuple[int, int] = (3, 2)) -> KVCache:
    layout = CacheLayout.from_layers((FULL, WINDOWED, FULL), torch.float32, torch.device("cpu"))
    cache = KVCache(layout, page_size=4)
    cache.resize(num_pages)
    return cache


def test_layers_of_equal_shape_share_a_group_and_bytes_add_up() -> None:
    cache = make()
    assert [(g.shape, g.layers) for g in cache.layout.groups] == [(FULL, (0, 2)), (WINDOWED, (1,))]
    assert cache.layout.windows == (None, 16)
    assert cache.layout.page_bytes(4) == (2 * 4 * 2 * (4 + 6) * 4, 1 * 4 * 1 * (8 + 8) * 4)
    # one null page on top in each group
    assert cache.num_bytes == 4 * 640 + 3 * 256
    assert [cache.group_of(layer) for layer in range(3)] == [0, 1, 0]


def test_tokens_land_in_their_slots() -> None:
    cache = make()
    key = torch.arange(2 * 2 * 4.0).reshape(2, 2, 4)  # token, head, dim
    value = torch.arange(2 * 2 * 6.0).reshape(2, 2, 6)
    cache.layer(2).write(torch.tensor([4, 11]), key, value)  # page 1 slot 0, page 2 slot 3
    assert torch.equal(cache.layer(2).keys[:, 1, 0], key[0])
    assert torch.equal(cache.layer(2).keys[:, 2, 3], key[1])
    assert torch.equal(cache.layer(2).values[:, 2, 3], value[1])


def test_growth_keeps_pages_and_the_null_page_stays_zero() -> None:
    cache = make()
    cache.clear_pages(0, torch.tensor([1, 2, 3]))
    cache.layer(0).write(torch.tensor([5]), torch.ones(1, 2, 4), torch.ones(1, 2, 6))
    cache.resize((9, 4))
    assert cache.num_pages == (9, 4)
    assert cache.layer(0).keys[:, 1, 1].eq(1).all() and cache.layer(0).keys[:, 1, 0].eq(0).all()
    assert cache.layer(0).keys[:, 0].eq(0).all() and cache.layer(0).values[:, 0].eq(0).all()


def test_copies_read_before_they_write() -> None:
    """Page 1 goes to 2 while 2 goes to 3: one after the other, 3 would get page 1."""
    cache = make()
    cache.clear_pages(0, torch.tensor([1, 2, 3]))
    for page in (1, 2, 3):
        cache.layer(0).keys[:, page] = page
    cache.copy_pages(0, torch.tensor([1, 2]), torch.tensor([2, 3]))
    assert [float(cache.layer(0).keys[0, page, 0, 0]) for page in (1, 2, 3)] == [1, 1, 2]


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("is_by_layers", [False, True])
def test_copies_reach_every_layer_and_nothing_else(
    order: PageOrder, is_by_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_by_layers:
        monkeypatch.setattr(kv_cache, "MAX_COPY_BYTES", 0)
    layout = CacheLayout.from_layers((FULL, WINDOWED, FULL), torch.float32, torch.device("cpu"))
    cache = KVCache(layout, page_size=4, order=order)
    cache.resize((5, 5))
    for layer in range(3):
        for each in (cache.layer(layer).keys, cache.layer(layer).values):
            each[:] = torch.randn(each.shape)
    before = [[each.clone() for each in (cache.layer(n).keys, cache.layer(n).values)] for n in range(3)]
    sources, targets = [1, 2, 1], [2, 1, 4]  # a swap, and a page that goes to two places
    cache.copy_pages(0, torch.tensor(sources), torch.tensor(targets))
    for layer in range(3):
        for each, old in zip(
            (cache.layer(layer).keys, cache.layer(layer).values), before[layer], strict=True
        ):
            expected = old.clone()
            if layer != 1:
                for source, target in zip(sources, targets, strict=True):
                    expected[:, target] = old[:, source]
            assert torch.equal(each, expected)


def test_release_and_remake() -> None:
    cache = make()
    cache.release()
    assert cache.num_bytes == 0 and cache.num_pages == (0, 0)
    cache.resize((1, 1))
    assert cache.num_bytes == 2 * 640 + 2 * 256


def test_a_layers_pages_follow_the_tensors() -> None:
    """The views are kept between steps: after growth and after release they must be the new ones."""
    cache = make((2, 2))
    before = cache.layer(0)
    assert cache.layer(0) is before
    cache.resize((5, 2))
    grown = cache.layer(0)
    assert grown.keys.shape[1] == 6 and grown.keys.data_ptr() != before.keys.data_ptr()
    cache.layer(0).keys[:, 1] = 7
    assert (grown.keys[:, 1] == 7).all()
    cache.release()
    cache.resize((3, 2))
    assert cache.layer(0).keys.shape[1] == 4


def test_both_page_orders_hold_the_same_and_differ_in_memory_only() -> None:
    """Growth, copies, clearing and writing see dimensions in one order, whatever lies behind them."""
    caches = []
    for order in PageOrder:
        layout = CacheLayout.from_layers((FULL, WINDOWED, FULL), torch.float32, torch.device("cpu"))
        cache = KVCache(layout, page_size=4, order=order)
        cache.resize((3, 2))
        cache.clear_pages(0, torch.tensor([1, 2, 3]))
        cache.layer(2).write(torch.tensor([6, 13]), torch.randn(2, 2, 4), torch.randn(2, 2, 6))
        cache.layer(2).write(
            torch.tensor([4, 11]), torch.arange(16.0).view(2, 2, 4), torch.arange(24.0).view(2, 2, 6)
        )
        cache.layer(2).write(torch.tensor([6, 13]), torch.ones(2, 2, 4), torch.ones(2, 2, 6))
        cache.copy_pages(0, torch.tensor([1, 2]), torch.tensor([2, 3]))
        cache.resize((5, 2))
        cache.clear_pages(0, torch.tensor([1, 4, 5]))
        caches.append(cache)
    one, other = caches
    assert one.num_bytes == other.num_bytes
    assert torch.equal(one.layer(2).keys, other.layer(2).keys)
    assert torch.equal(one.layer(2).values, other.layer(2).values)
    assert one.layer(2).keys[:, 2, 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert one.layer(2).keys.is_contiguous() and not other.layer(2).keys.is_contiguous()
    keys, values = other.layer(2).tokens_first()
    assert keys.shape == (6, 4, 2, 4) and keys.is_contiguous() and values.is_contiguous()
    assert keys[2, 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
