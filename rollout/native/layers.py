"""Decoder layers on products in panels: the two halves around attention, and all layers of a decode step.

Letters: T tokens, R rows of one token, D hidden size, N query heads, K kv heads, H head dim, P pages,
S slots of a page, W page-table width.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.native.library import (
    HEAD_DIMS,
    KINDS,
    LANES,
    MAX_HEAD_DIM,
    DecodeLayer,
    LayerEnd,
    LayerStart,
    Library,
    attention_arguments,
)
from rollout.native.products import Panels


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """What a decoder layer with rotary embedding and a gated MLP multiplies with, all of one dtype."""

    input_norm: Tensor
    """[D], its eps below."""
    input_eps: float
    head_norms: tuple[Tensor, Tensor] | None
    """[H] each, of queries and keys."""
    head_eps: float
    qkv: Panels
    """Queries, keys and values side by side."""
    num_queries: int
    num_keys: int
    attention_out: Panels
    mlp_norm: Tensor
    """[D]."""
    mlp_eps: float
    gate_up: Panels
    down: Panels

    @property
    def head_dim(self) -> int:
        """H."""
        return self.qkv.outer // (self.num_queries + 2 * self.num_keys)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """D, N, K and (N + 2 * K) * H."""
        return self.qkv.inner, self.num_queries, self.num_keys, self.qkv.outer

    def check(self) -> None:
        """Assert what the kernels count on."""
        size, dim = self.qkv.inner, self.head_dim
        assert dim <= MAX_HEAD_DIM
        norms = [self.input_norm, self.mlp_norm, *(self.head_norms or ())]
        assert [norm.shape for norm in norms] == [(size,), (size,), (dim,), (dim,)][: len(norms)]
        assert all(norm.dtype == self.qkv.dtype and norm.is_contiguous() for norm in norms)
        assert self.qkv.outer == (self.num_queries + 2 * self.num_keys) * dim and dim % (2 * LANES) == 0
        assert self.attention_out.inner == self.num_queries * dim
        assert size == self.attention_out.outer == self.gate_up.inner == self.down.outer
        assert (
            self.gate_up.outer == 2 * self.down.inner and size % LANES == 0 and self.down.inner % LANES == 0
        )
        assert len({each.dtype for each in (self.qkv, self.attention_out, self.gate_up, self.down)}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlace:
    """Where a decode step's rows find and leave one layer's keys and values; see ``Kernels.attend``."""

    keys: Tensor
    """[K, P, S, H], as values."""
    values: Tensor
    pages: Tensor
    """[R, W] int64."""
    seen: Tensor
    """[R, 2] int64."""
    slots: Tensor
    """[R] int64."""
    scaling: float
    softcap: float | None
    sinks: Tensor | None
    """[N] float32."""


class LayerKernels:
    """Compiled decoder layers; all tensors have the dtype of the layer's weights.

    Example::

        qkv = layers.start(hidden, weights, cos, sin)
        hidden = layers.end(hidden, attention_of(qkv), weights)
    """

    def __init__(self, library: Library) -> None:
        self._library = library

    def start(self, hidden: Tensor, weights: LayerWeights, cos: Tensor, sin: Tensor) -> Tensor:
        """A layer up to its attention: norm, projections and rotary embedding.

        Args:
            hidden: [T, D].
            weights: the layer's.
            cos, sin: [1, T, H].

        Returns ``[T, N + 2 * K, H]``: queries and keys, rotated, and the values.
        """
        weights.check()
        _check_tokens(hidden, weights, cos, sin)
        out = torch.empty(_qkv_shape(hidden, weights), dtype=hidden.dtype)
        call = _start_of(out, hidden, weights, cos, sin)
        seconds = self._library["start_layer"](KINDS[hidden.dtype, hidden.dtype], ctypes.byref(call))
        self._library.move_seconds(seconds, "start_layer", "multiply")
        return out

    def end(self, hidden: Tensor, attended: Tensor, weights: LayerWeights) -> Tensor:
        """A layer from its attention on: its projection, the norm, the gated MLP and both residuals.

        Args:
            hidden: [T, D], what the layer was given.
            attended: [T, N * H].
            weights: the layer's.

        Returns ``[T, D]``.
        """
        weights.check()
        attended = attended.contiguous()
        assert hidden.is_contiguous() and attended.shape == (hidden.shape[0], weights.attention_out.inner)
        assert hidden.dtype == attended.dtype == weights.qkv.dtype and hidden.shape[1] == weights.qkv.inner
        out = torch.empty_like(hidden)
        call = _end_of(out, hidden, attended, weights)
        seconds = self._library["end_layer"](KINDS[hidden.dtype, hidden.dtype], ctypes.byref(call))
        self._library.move_seconds(seconds, "end_layer", "multiply")
        return out

    def decode(
        self,
        hidden: Tensor,
        weights: Sequence[LayerWeights],
        cos: Tensor,
        sin: Tensor,
        places: Sequence[DecodePlace],
    ) -> Tensor:
        """Layers one after the other for rows of one token each: :meth:`start`, attention and :meth:`end`.

        Args:
            hidden: [R, D].
            weights: of each layer, all of the same sizes and found right by :meth:`LayerWeights.check`,
                which would cost as much as the calls that are saved here.
            cos, sin: [1, R, H].
            places: of each layer.

        Returns ``[R, D]``.
        """
        first = weights[0]
        rows, dim = hidden.shape[0], first.head_dim
        _check_tokens(hidden, first, cos, sin)
        assert dim in HEAD_DIMS
        out = hidden.clone()
        qkv = torch.empty(_qkv_shape(hidden, first), dtype=hidden.dtype)
        query, key, value = qkv.split_with_sizes((first.num_queries, first.num_keys, first.num_keys), dim=1)
        attended = torch.empty((rows, first.num_queries, dim), dtype=hidden.dtype)
        calls = (DecodeLayer * len(weights))()
        for call, each, place in zip(calls, weights, places, strict=True):
            assert each.sizes == first.sizes
            _check_place(place, rows, each, hidden.dtype)
            call.start = _start_of(qkv, out, each, cos, sin)
            call.attention = attention_arguments(
                attended,
                query,
                place.keys,
                place.values,
                place.pages,
                place.seen,
                place.scaling,
                place.softcap,
                place.sinks,
                (key, value, place.slots),
            )
            call.end = _end_of(out, out, attended, each)
        seconds = (ctypes.c_double * 2)()
        self._library["decode_layers"](KINDS[hidden.dtype, hidden.dtype], calls, len(weights), seconds)
        self._library.move_seconds(seconds[0], "decode_layers", "multiply")
        self._library.move_seconds(seconds[1], "decode_layers", "attend")
        return out


def _check_tokens(hidden: Tensor, weights: LayerWeights, cos: Tensor, sin: Tensor) -> None:
    assert hidden.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    assert hidden.shape[1] == weights.qkv.inner
    assert cos.shape == sin.shape == (1, hidden.shape[0], weights.head_dim)
    assert hidden.dtype == cos.dtype == sin.dtype == weights.qkv.dtype and hidden.device.type == "cpu"


def _check_place(place: DecodePlace, rows: int, weights: LayerWeights, dtype: torch.dtype) -> None:
    keys, values, pages, seen, slots = place.keys, place.values, place.pages, place.seen, place.slots
    assert keys.shape == values.shape and keys.dtype == values.dtype == dtype
    assert keys.shape[0] == weights.num_keys and keys.shape[3] == weights.head_dim
    assert keys.is_contiguous() and values.is_contiguous()
    assert pages.shape[0] == rows and seen.shape == (rows, 2) and slots.shape == (rows,)
    assert pages.dtype == seen.dtype == slots.dtype == torch.int64
    assert pages.is_contiguous() and seen.is_contiguous() and slots.is_contiguous()
    if place.sinks is not None:
        assert place.sinks.shape == (weights.num_queries,) and place.sinks.dtype == torch.float32
        assert place.sinks.is_contiguous()


def _qkv_shape(hidden: Tensor, weights: LayerWeights) -> tuple[int, int, int]:
    return hidden.shape[0], weights.num_queries + 2 * weights.num_keys, weights.head_dim


def _start_of(out: Tensor, hidden: Tensor, weights: LayerWeights, cos: Tensor, sin: Tensor) -> LayerStart:
    norms = weights.head_norms
    query_norm, key_norm = (None, None) if norms is None else (norm.data_ptr() for norm in norms)
    return LayerStart(
        out.data_ptr(),
        hidden.data_ptr(),
        weights.input_norm.data_ptr(),
        ctypes.pointer(weights.qkv.matrix),
        cos.data_ptr(),
        sin.data_ptr(),
        query_norm,
        key_norm,
        hidden.shape[0],
        weights.num_queries,
        weights.num_keys,
        weights.head_dim,
        weights.input_eps,
        weights.head_eps,
    )


def _end_of(out: Tensor, hidden: Tensor, attended: Tensor, weights: LayerWeights) -> LayerEnd:
    return LayerEnd(
        out.data_ptr(),
        hidden.data_ptr(),
        weights.mlp_norm.data_ptr(),
        attended.data_ptr(),
        ctypes.pointer(weights.attention_out.matrix),
        ctypes.pointer(weights.gate_up.matrix),
        ctypes.pointer(weights.down.matrix),
        hidden.shape[0],
        weights.mlp_eps,
    )
