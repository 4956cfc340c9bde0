"""The tensors behind the page numbers: sizes, allocation, growth, release, page copies.

Letters: L layers of a group, K kv heads, P pages (page 0 is the null page), S slots in a page,
H head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

MAX_COPY_BYTES = 2**23
"""Pages up to this size are copied in all layers at once. 30 layers on 2 cores: 8 pages 0.55 ms, by layers
0.74; 96 pages 20 ms, by layers 6."""


class PageOrder(Enum):
    """How a page lies in memory; what a backend reads fastest."""

    HEADS_FIRST = "heads first"  # [K, P, S, H]: a head's keys of a page lie together
    TOKENS_FIRST = "tokens first"  # [P, S, K, H]: what paged kernels are made for


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token, and how far back its queries see."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    """Sliding window in tokens, the query's own included; ``None`` sees everything."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of equal shape: they share page tables."""

    shape: LayerShape
    layers: tuple[int, ...]

    def page_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers of the group."""
        per_token = self.shape.num_kv_heads * (self.shape.key_dim + self.shape.value_dim)
        return len(self.layers) * page_size * per_token * dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Everything about the cache that the model fixes."""

    groups: tuple[CacheGroup, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_layers(
        cls, shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device
    ) -> "CacheLayout":
        """Group layers by shape, in the order in which the shapes first appear."""
        layers_of: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(shapes):
            layers_of.setdefault(shape, []).append(layer)
        groups = tuple(CacheGroup(shape, tuple(layers)) for shape, layers in layers_of.items())
        return cls(groups, dtype, device)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each group."""
        return tuple(group.shape.window for group in self.groups)

    def page_bytes(self, page_size: int) -> tuple[int, ...]:
        """Bytes of one page of each group."""
        return tuple(group.page_bytes(page_size, self.dtype) for group in self.groups)


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's keys ``[K, P, S, H]`` and values ``[K, P, S, H]``: views into the cache, with
    dimensions in this order however the pages lie in memory."""

    keys: Tensor
    values: Tensor

    def tokens_first(self) -> tuple[Tensor, Tensor]:
        """The same with dimensions ``[P, S, K, H]``, which are contiguous under that page order."""
        return self.keys.permute(1, 2, 0, 3), self.values.permute(1, 2, 0, 3)

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store the step's keys and values ``[T, K, H]`` at ``slots`` ``[T] int64`` (page * S + slot)."""
        self.keys.flatten(1, 2).index_copy_(1, slots, key.transpose(0, 1))
        self.values.flatten(1, 2).index_copy_(1, slots, value.transpose(0, 1))


class KVCache:
    """Keys and values of all layers in pages, made on demand.

    Example::

        cache = KVCache(layout, page_size=32)
        cache.resize((128,))                 # 128 pages in the only group, plus the null page
        cache.layer(0).write(slots, key, value)
        cache.release()                      # memory goes back; resize() takes it again

    With ``has_scrap`` each group has one page more, which belongs to nobody: rows that only fill up a
    recorded step write there.
    """

    def __init__(
        self,
        layout: CacheLayout,
        page_size: int,
        order: PageOrder = PageOrder.HEADS_FIRST,
        *,
        has_scrap: bool = False,
    ) -> None:
        self.layout = layout
        self.page_size = page_size
        self.order = order
        self.epoch = 0
        """Counts how often the tensors were made anew: what holds their addresses is then void."""
        self._num_scrap = int(has_scrap)
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._layers: dict[int, LayerPages] = {}  # views made once: a step asks for each
        self._num_pages: tuple[int, ...] = tuple(0 for _ in layout.groups)
        self._place = {
            layer: (g, i) for g, group in enumerate(layout.groups) for i, layer in enumerate(group.layers)
        }

    @property
    def has_scrap(self) -> bool:
        """Whether each group has a page that belongs to nobody."""
        return self._num_scrap > 0

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Usable pages of each group."""
        return self._num_pages

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensors take now."""
        return sum(t.numel() * t.element_size() for pair in self._tensors for t in pair)

    def resize(self, num_pages: tuple[int, ...]) -> None:
        """Make room for ``num_pages`` per group; what lies in existing pages is kept."""
        assert all(new >= old for new, old in zip(num_pages, self._num_pages, strict=True))
        if num_pages == self._num_pages:
            return
        self.epoch += 1
        self._layers = {}  # they hold the old tensors
        grown = []
        for g, (group, count) in enumerate(zip(self.layout.groups, num_pages, strict=True)):
            old = self._tensors[g] if self._tensors else (None, None)
            shape = group.shape
            grown.append(
                (
                    self._make(len(group.layers), shape.num_kv_heads, count, shape.key_dim, old[0]),
                    self._make(len(group.layers), shape.num_kv_heads, count, shape.value_dim, old[1]),
                )
            )
            if self._tensors:
                self._tensors[g] = grown[-1]  # let the old tensors go before the next group grows
        self._tensors = grown
        self._num_pages = num_pages

    def release(self) -> None:
        """Give all memory back."""
        self.epoch += 1
        self._tensors, self._layers = [], {}
        self._num_pages = tuple(0 for _ in self.layout.groups)

    def layer(self, layer: int) -> LayerPages:
        """The pages of one layer."""
        if layer not in self._layers:
            group, index = self._place[layer]
            keys, values = self._tensors[group]
            self._layers[layer] = LayerPages(keys[index], values[index])
        return self._layers[layer]

    def group_of(self, layer: int) -> int:
        """The group a layer belongs to."""
        return self._place[layer][0]

    @property
    def scrap_pages(self) -> tuple[int, ...]:
        """Each group's page for what nobody reads."""
        assert self._num_scrap, "the cache was made without"
        return tuple(count + 1 for count in self._num_pages)

    def copy_pages(self, group: int, sources: Tensor, targets: Tensor) -> None:
        """Copy pages ``sources`` to ``targets`` (``[C] int64`` each) in all layers of a group.

        All sources are read before any target is written: a page may be both at once.
        """
        is_host = self.layout.device.type == "cpu"
        for tensor in self._tensors[group]:
            size = len(sources) * tensor[:, :, 0].numel() * tensor.element_size()
            # of many pages a layer at a time: what was read then stays in the CPU's cache until it is written
            for part in tensor.unbind() if is_host and size > MAX_COPY_BYTES else (tensor,):
                part[..., targets, :, :] = part[..., sources, :, :]

    def clear_pages(self, group: int, pages: Tensor) -> None:
        """Zero pages ``[C] int64`` taken from a former owner, so that no NaN of its can be read."""
        for tensor in self._tensors[group]:
            tensor.index_fill_(2, pages, 0)

    def read_pages(self, group: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of pages ``[C] int64`` in host memory: keys and values ``[L, K, C, S, H]`` of a group."""
        keys, values = self._tensors[group]
        return _to_host(keys.index_select(2, pages)), _to_host(values.index_select(2, pages))

    def write_pages(self, group: int, pages: Tensor, stored: tuple[Tensor, Tensor]) -> None:
        """Fill pages ``[C] int64`` with what :meth:`read_pages` gave."""
        for tensor, copy in zip(self._tensors[group], stored, strict=True):
            tensor.index_copy_(2, pages, copy.to(tensor.device, non_blocking=True))

    def _make(self, layers: int, heads: int, pages: int, dim: int, old: Tensor | None) -> Tensor:
        # not torch.zeros: memory is touched only when a page is taken and cleared
        sizes = [layers, heads, 1 + pages + self._num_scrap, self.page_size, dim]
        in_memory = (0, 2, 3, 1, 4) if self.order is PageOrder.TOKENS_FIRST else (0, 1, 2, 3, 4)
        new = torch.empty_permuted(sizes, in_memory, dtype=self.layout.dtype, device=self.layout.device)
        new[:, :, 0] = 0  # the null page, which padded table entries read
        if old is not None:
            # no scrap page is kept; smaller only after a growth that failed half-way
            kept = min(old.shape[2] - self._num_scrap, pages + 1)
            new[:, :, 1:kept] = old[:, :, 1:kept]
        return new


def _to_host(copy: Tensor) -> Tensor:
    """A copy in host memory: pinned if it comes from a GPU, which then need not be waited for."""
    if copy.device.type == "cpu":
        return copy
    host = torch.empty(copy.shape, dtype=copy.dtype, pin_memory=True)
    return host.copy_(copy, non_blocking=True)
