"""All layers of decode steps as one call, made ready once for the weights and pages of the moment.

Letters: R rows of one token, D hidden size, N query heads, K kv heads, H head dim, P pages, S slots of a
page, W page-table width.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.native.layers import LayerWeights, check_tokens, end_of, start_of
from rollout.native.library import (
    HEAD_DIMS,
    KINDS,
    AttentionArguments,
    DecodeLayer,
    DecodeRowsArguments,
    DecodeStep,
    Library,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlace:
    """Where one layer's keys and values are, and how it attends; see ``Kernels.attend``."""

    keys: Tensor
    """[K, P, S, H], as values."""
    values: Tensor
    group: int
    """Which of a step's :class:`DecodeRows` are the layer's."""
    scaling: float
    softcap: float | None
    sinks: Tensor | None
    """[N] float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """Where a step's rows find and leave their keys and values, in all layers of a group."""

    pages: Tensor
    """[R, W] int64."""
    seen: Tensor
    """[R, 2] int64."""
    slots: Tensor
    """[R] int64."""


class DecodeCall:
    """Layers one after the other for rows of one token each: their start, attention and end.

    It knows the addresses of products' weights and of pages but does not hold them: whoever has it throws it
    away when they are made anew or given back.

    Args:
        library: compiled functions.
        weights: of each layer, all of the same sizes and found right by ``LayerWeights.check``.
        places: of each layer.

    Example::

        call = DecodeCall(library, weights, places)
        hidden = call(hidden, cos, sin, [DecodeRows(pages=pages, seen=seen, slots=slots)])
    """

    def __init__(
        self, library: Library, weights: Sequence[LayerWeights], places: Sequence[LayerPlace]
    ) -> None:
        first = weights[0]
        assert first.head_dim in HEAD_DIMS and all(each.sizes == first.sizes for each in weights)
        self._library = library
        self._dtype, self._num_groups = first.qkv.dtype, max(place.group for place in places) + 1
        self._size, self._dim = first.qkv.inner, first.head_dim
        norms = [
            norm for each in weights for norm in (each.input_norm, each.mlp_norm, *(each.head_norms or ()))
        ]
        self._held = [*(norm.detach() for norm in norms), *(place.sinks for place in places)]
        self._layers = (DecodeLayer * len(weights))()
        for layer, each, place in zip(self._layers, weights, places, strict=True):
            _check_place(place, each)
            layer.start, layer.end, layer.group = start_of(each), end_of(each), place.group
            layer.attention = AttentionArguments(
                keys=place.keys.data_ptr(),
                values=place.values.data_ptr(),
                sinks=None if place.sinks is None else place.sinks.data_ptr(),
                head_stride=place.keys.stride(0),
                page_size=place.keys.shape[2],
                kv_heads=each.num_keys,
                group=each.num_queries // each.num_keys,
                scaling=place.scaling,
                softcap=place.softcap or 0.0,
            )

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, groups: Sequence[DecodeRows]) -> Tensor:
        """``[R, D] -> [R, D]``.

        Args:
            hidden: [R, D] in the weights' dtype, as the angles.
            cos, sin: [1, R, H].
            groups: the rows in each group of layers.
        """
        rows = hidden.shape[0]
        check_tokens(hidden, self._size, self._dim, self._dtype, cos, sin)
        assert len(groups) >= self._num_groups
        arguments = (DecodeRowsArguments * len(groups))()
        for each, group in zip(arguments, groups, strict=True):
            _check_rows(group, rows)
            each.pages, each.seen = group.pages.data_ptr(), group.seen.data_ptr()
            each.slots, each.width = group.slots.data_ptr(), group.pages.shape[1]
        out = hidden.clone()
        step = DecodeStep(
            hidden=out.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(), groups=arguments, rows=rows
        )
        seconds = (ctypes.c_double * 2)()
        kind = KINDS[hidden.dtype, hidden.dtype]
        self._library["decode_layers"](kind, self._layers, len(self._layers), ctypes.byref(step), seconds)
        self._library.move_seconds(seconds[0], "decode_layers", "multiply")
        self._library.move_seconds(seconds[1], "decode_layers", "attend")
        return out


def _check_place(place: LayerPlace, weights: LayerWeights) -> None:
    keys, values = place.keys, place.values
    assert keys.shape == values.shape and keys.dtype == values.dtype == weights.qkv.dtype
    assert keys.shape[0] == weights.num_keys and keys.shape[3] == weights.head_dim
    assert keys.is_contiguous() and values.is_contiguous() and place.group >= 0
    if place.sinks is not None:
        assert place.sinks.shape == (weights.num_queries,) and place.sinks.dtype == torch.float32
        assert place.sinks.is_contiguous()


def _check_rows(group: DecodeRows, rows: int) -> None:
    pages, seen, slots = group.pages, group.seen, group.slots
    assert pages.shape[0] == rows and seen.shape == (rows, 2) and slots.shape == (rows,)
    assert pages.dtype == seen.dtype == slots.dtype == torch.int64
    assert pages.is_contiguous() and seen.is_contiguous() and slots.is_contiguous()
