"""Decoder layers on products in panels: the two halves around attention.

Letters: T tokens, D hidden size, N query heads, K kv heads, H head dim.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.native.library import KINDS, LANES, MAX_HEAD_DIM, LayerEnd, LayerStart, Library
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
        assert self.gate_up.outer == 2 * self.down.inner and self.gate_up.has_whole_halves
        assert size % LANES == 0
        assert len({each.dtype for each in (self.qkv, self.attention_out, self.gate_up, self.down)}) == 1


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
        check_tokens(hidden, weights.qkv.inner, weights.head_dim, weights.qkv.dtype, cos, sin)
        heads = weights.num_queries + 2 * weights.num_keys
        out = torch.empty((hidden.shape[0], heads, weights.head_dim), dtype=hidden.dtype)
        call = start_of(weights)
        call.out, call.hidden, call.tokens = out.data_ptr(), hidden.data_ptr(), hidden.shape[0]
        call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
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
        out = hidden.clone()
        call = end_of(weights)
        call.hidden, call.tokens = out.data_ptr(), hidden.shape[0]
        call.attended, call.attended_stride = attended.data_ptr(), attended.stride(0)
        seconds = self._library["end_layer"](KINDS[hidden.dtype, hidden.dtype], ctypes.byref(call))
        self._library.move_seconds(seconds, "end_layer", "multiply")
        return out


def check_tokens(
    hidden: Tensor, size: int, head_dim: int, dtype: torch.dtype, cos: Tensor, sin: Tensor
) -> None:
    """Assert that hidden states [T, D] and angles [1, T, H] are what the kernels count on."""
    assert hidden.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    assert hidden.shape[1] == size and cos.shape == sin.shape == (1, hidden.shape[0], head_dim)
    assert hidden.dtype == cos.dtype == sin.dtype == dtype and hidden.device.type == "cpu"


def start_of(weights: LayerWeights) -> LayerStart:
    """A layer up to its attention, without the addresses of tokens."""
    norms = weights.head_norms
    query_norm, key_norm = (None, None) if norms is None else (norm.data_ptr() for norm in norms)
    return LayerStart(
        norm=weights.input_norm.data_ptr(),
        qkv=ctypes.pointer(weights.qkv.matrix),
        query_norm=query_norm,
        key_norm=key_norm,
        queries=weights.num_queries,
        keys=weights.num_keys,
        head_dim=weights.head_dim,
        eps=weights.input_eps,
        head_eps=weights.head_eps,
    )


def end_of(weights: LayerWeights) -> LayerEnd:
    """A layer from its attention on, without the addresses of tokens."""
    return LayerEnd(
        norm=weights.mlp_norm.data_ptr(),
        attention_out=ctypes.pointer(weights.attention_out.matrix),
        gate_up=ctypes.pointer(weights.gate_up.matrix),
        down=ctypes.pointer(weights.down.matrix),
        eps=weights.mlp_eps,
    )
