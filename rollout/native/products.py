"""Products of rows with weights in panels, and the decoder layer built around them.

Letters: T tokens, D hidden size, N query heads, K kv heads, H head dim, O outer and I inner size.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.native.library import LayerEnd, LayerStart, Library, PanelMatrix

LANES = 16
PANEL = 32
UNIT_BYTES = 4
KINDS = {torch.float32: 0, torch.bfloat16: 1}


class Panels:
    """A weight matrix ``[O, I]`` and its bias, copied to the order in which the products read them.

    Made by :meth:`Products.pack`. The result of a row is the same whatever rows are multiplied with it.

    Example::

        panels = products.pack(weight, None)
        panels.multiply(x)      # x @ weight.T
    """

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None) -> None:
        outer, inner = weight.shape
        units = inner * weight.element_size() // UNIT_BYTES
        count = -(-outer // PANEL)
        self.dtype, self.outer, self.inner = weight.dtype, outer, inner
        self._library = library
        self._panels = torch.empty((count, units, PANEL), dtype=torch.int32)
        self._bias = None
        if bias is not None:
            assert bias.shape == (outer,) and bias.dtype == weight.dtype
            self._bias = torch.zeros(count * PANEL, dtype=bias.dtype)
            self._bias[:outer] = bias
        weight = weight.contiguous()
        library["pack"](self._panels.data_ptr(), weight.data_ptr(), outer, units)
        self.matrix = PanelMatrix(
            self._panels.data_ptr(), None if self._bias is None else self._bias.data_ptr(), inner, outer
        )

    @property
    def num_bytes(self) -> int:
        """Of the copy: the weights, filled up to whole panels."""
        return self._panels.numel() * UNIT_BYTES

    def multiply(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` of ``[..., I]``: ``[..., O]`` in the weights' dtype, as ``x`` must be."""
        assert x.shape[-1] == self.inner and x.dtype == self.dtype and x.device.type == "cpu"
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.outer), dtype=x.dtype)
        self._library["multiply"](
            KINDS[x.dtype],
            out.data_ptr(),
            x.data_ptr(),
            ctypes.byref(self.matrix),
            x.numel() // self.inner,
        )
        return out


@dataclass(frozen=True, slots=True)
class LayerPanels:
    """The four products of a decoder layer."""

    qkv: Panels
    """Queries, keys and values side by side."""
    attention_out: Panels
    gate_up: Panels
    down: Panels


class Products:
    """Matrix products that are faster than oneDNN's on CPUs with bf16 dot products and without AMX.

    AMD Zen 4, the linears of a model with 135M weights, in bf16: 1 row 1.5x, 16 rows 1.45x, 32 rows
    1.2x, 128 rows 1.0x, 1024 rows 0.94x; in fp32 1.45x, 1.2x, 1.1x, 1.0x, 0.93x.
    """

    def __init__(self, library: Library) -> None:
        self._library = library

    def can_pack(self, weight: Tensor) -> bool:
        """Whether there is code for the weight's dtype and its inner size."""
        size = weight.shape[1] * weight.element_size()
        return weight.dtype in KINDS and weight.device.type == "cpu" and size % UNIT_BYTES == 0

    def pack(self, weight: Tensor, bias: Tensor | None) -> Panels:
        """Weights ``[O, I]`` and a bias ``[O]`` of one dtype, see :meth:`can_pack`."""
        return Panels(self._library, weight, bias)

    def start_layer(
        self,
        hidden: Tensor,
        norm: Tensor,
        eps: float,
        panels: LayerPanels,
        num_queries: int,
        num_keys: int,
        cos: Tensor,
        sin: Tensor,
        head_norms: tuple[Tensor, Tensor] | None = None,
        head_eps: float = 0.0,
    ) -> Tensor:
        """A layer up to its attention: norm, projections and rotary embedding.

        Args:
            hidden: [T, D].
            norm, eps: weight [D] and eps of the norm of the input.
            num_queries, num_keys: N and K.
            cos, sin: [1, T, H].
            head_norms, head_eps: weights [H] of the norms of queries and keys, if there are any.

        All tensors have the panels' dtype. Returns ``[T, N + 2 * K, H]``: queries and keys, rotated, and
        the values.
        """
        tokens, size = hidden.shape
        head_dim = cos.shape[-1]
        dtype, qkv = hidden.dtype, panels.qkv
        weights = (norm, *(head_norms or ()))
        assert hidden.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
        assert size == qkv.inner == norm.shape[0] and size % LANES == 0 and head_dim % (2 * LANES) == 0
        assert cos.shape == sin.shape == (1, tokens, head_dim)
        assert qkv.outer == (num_queries + 2 * num_keys) * head_dim
        assert all(x.dtype == dtype and x.is_contiguous() for x in (cos, sin, *weights)) and dtype == qkv.dtype
        out = torch.empty((tokens, num_queries + 2 * num_keys, head_dim), dtype=dtype)
        query_norm, key_norm = (None, None) if head_norms is None else (x.data_ptr() for x in head_norms)
        call = LayerStart(
            out.data_ptr(),
            hidden.data_ptr(),
            norm.data_ptr(),
            ctypes.pointer(qkv.matrix),
            cos.data_ptr(),
            sin.data_ptr(),
            query_norm,
            key_norm,
            tokens,
            num_queries,
            num_keys,
            head_dim,
            eps,
            head_eps,
        )
        seconds = self._library["start_layer"](KINDS[dtype], ctypes.byref(call))
        self._library.move_seconds(seconds, "start_layer", "multiply")
        return out

    def end_layer(
        self, hidden: Tensor, attended: Tensor, norm: Tensor, eps: float, panels: LayerPanels
    ) -> Tensor:
        """A layer from its attention on: its projection, the norm, the gated MLP and both residuals.

        Args:
            hidden: [T, D], what the layer was given.
            attended: [T, N * H].
            norm, eps: of the norm before the MLP.

        All tensors have the panels' dtype. Returns ``[T, D]``.
        """
        tokens, size = hidden.shape
        out_panels, gate_up, down = panels.attention_out, panels.gate_up, panels.down
        attended = attended.contiguous()
        assert hidden.is_contiguous() and attended.shape == (tokens, out_panels.inner)
        assert hidden.dtype == attended.dtype == norm.dtype == down.dtype and norm.shape == (size,)
        assert size == out_panels.outer == gate_up.inner == down.outer and size % LANES == 0
        assert gate_up.outer == 2 * down.inner and down.inner % LANES == 0 and norm.is_contiguous()
        out = torch.empty_like(hidden)
        call = LayerEnd(
            out.data_ptr(),
            hidden.data_ptr(),
            norm.data_ptr(),
            attended.data_ptr(),
            ctypes.pointer(out_panels.matrix),
            ctypes.pointer(gate_up.matrix),
            ctypes.pointer(down.matrix),
            tokens,
            eps,
        )
        seconds = self._library["end_layer"](KINDS[hidden.dtype], ctypes.byref(call))
        self._library.move_seconds(seconds, "end_layer", "multiply")
        return out
