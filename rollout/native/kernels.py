"""The compiled functions on tensors: shapes and types are checked here, the arithmetic is in C++.

Letters: T tokens, D hidden size, N query heads, K kv heads, H head dim, R rows, W page-table width,
P pages, S slots of a page.
"""

import ctypes
import functools
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rollout.native.build import BuildError, load_library
from rollout.native.decode import DecodeCall, LayerPlace
from rollout.native.draws import DrawKernels
from rollout.native.layers import LayerKernels, LayerWeights
from rollout.native.library import HEAD_DIMS, KINDS, LANES, MAX_HEAD_DIM, Library, attention_arguments
from rollout.native.products import Products

logger = logging.getLogger("rollout")


class Kernels:
    """Parts of a decoder layer, paged attention and draws, on CPU tensors without gradients.

    Each function equals the torch operators it stands for, up to the order of sums, fused
    multiply-adds and an exp that is good to 2e-7; bf16 results are rounded where eager torch rounds, but
    become 0 below the smallest normal number where the CPU has an instruction for rounding.

    Example::

        normed = load_kernels().rms_norm(x, weight, eps)
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = Library(library)
        self.products = Products(self._library) if self._library.panel_rows else None
        """Products of matrices; ``None`` on a CPU without bf16 dot products."""
        self.layers = LayerKernels(self._library) if self._library.panel_rows else None
        """Decoder layers on those products."""
        self.draws = DrawKernels(self._library)
        """Draws of tokens."""

    def timing(self) -> AbstractContextManager[dict[str, float]]:
        """Adds up the seconds inside each function while the block runs: no profiler sees them."""
        return self._library.timing()

    def decode_call(self, weights: Sequence[LayerWeights], places: Sequence[LayerPlace]) -> DecodeCall:
        """Decoder layers as one call, see :class:`DecodeCall`; only where there are :attr:`layers`."""
        assert self.layers is not None
        return DecodeCall(self._library, weights, places)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``weight * x / sqrt(mean(x**2) + eps)`` over the last dimension of ``[..., D]``."""
        size = _last(x, weight)
        x, out = x.contiguous(), torch.empty_like(x)
        kind = _kind(x.dtype, x.dtype)
        self._library["norm"](
            kind, out.data_ptr(), None, x.data_ptr(), None, weight.data_ptr(), x.numel() // size, size, eps
        )
        return out

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``x + delta`` and its :meth:`rms_norm`."""
        size = _last(x, weight)
        x, delta = x.contiguous(), delta.contiguous()
        assert x.shape == delta.shape
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._library["norm"](
            _kind(x.dtype, delta.dtype),
            out.data_ptr(),
            total.data_ptr(),
            x.data_ptr(),
            delta.data_ptr(),
            weight.data_ptr(),
            x.numel() // size,
            size,
            eps,
        )
        return total, out

    def rotate(
        self,
        x: Tensor,
        num_queries: int,
        num_keys: int,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Rotary embedding of the heads that ``x`` begins with, the queries and then the keys.

        Args:
            x: [T, at least (N + K) * H].
            num_queries, num_keys: N and K.
            cos, sin: [1, T, H].
            norms: weights [H] of the queries' and the keys' :meth:`rms_norm`, which comes first.
            eps: of the norms.

        Returns ``[T, N + K, H]``.
        """
        _, tokens, size = cos.shape
        heads = num_queries + num_keys
        assert x.shape[0] == tokens and x.shape[1] >= heads * size and x.stride(1) == 1
        assert size % (2 * LANES) == 0 and size <= MAX_HEAD_DIM
        assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype
        assert norms is None or all(n.dtype == x.dtype == cos.dtype and n.shape == (size,) for n in norms)
        assert sin.shape == cos.shape and x.device.type == "cpu"
        out = torch.empty((tokens, heads, size), dtype=x.dtype)
        query_norm, key_norm = (None, None) if norms is None else (norm.data_ptr() for norm in norms)
        self._library["rotate"](
            _kind(cos.dtype, x.dtype),
            out.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            query_norm,
            key_norm,
            eps,
            tokens,
            heads,
            num_queries,
            size,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``[T, 2 * D]``, the gates first: ``[T, D]``."""
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        assert (
            gate_up.device.type == "cpu"
            and gate_up.is_contiguous()
            and gate_up.shape[1] == 2 * size
            and size % LANES == 0
        )
        out = torch.empty((tokens, size), dtype=gate_up.dtype)
        self._library["silu_mul"](
            _kind(gate_up.dtype, gate_up.dtype), out.data_ptr(), gate_up.data_ptr(), tokens, size
        )
        return out

    def store(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write ``key`` and ``value`` to ``slots`` of the pages.

        Args:
            keys, values: [K, P, S, H] of one shape.
            key, value: [T, K, H] in the pages' dtype, tokens may lie apart.
            slots: [T] int64, page * S + slot.
        """
        assert keys.shape == values.shape and keys.is_contiguous() and values.is_contiguous()
        key, value, slots = _checked_tokens(keys, values, key, value, slots)
        tokens, heads, size = key.shape
        width = keys.element_size()
        self._library["store"](
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0) * width,
            key.data_ptr(),
            key.stride(0) * width,
            value.data_ptr(),
            value.stride(0) * width,
            slots.data_ptr(),
            tokens,
            heads,
            size * width,
        )

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        pages: Tensor,
        seen: Tensor,
        scaling: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        new: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attention of one query token per row over the keys in its pages.

        Args:
            query: [R, N, H], rows may lie apart.
            keys, values: [K, P, S, H] in the query's dtype.
            pages: [R, W] int64, each row's page table.
            seen: [R, 2] int64, first key seen and end, counted from the first slot of the table.
            scaling: factor of the scores; softcap: see ``AttentionCall`` of the backends.
            sinks: [N] float32.
            new: the rows' own key, value and slots, as for :meth:`store`; stored before any row reads.

        Returns ``[R, N, H]``.
        """
        rows, heads, size = query.shape
        assert size in HEAD_DIMS and keys.shape == values.shape and keys.dtype == values.dtype == query.dtype
        assert keys.is_contiguous() and values.is_contiguous() and pages.is_contiguous()
        assert pages.shape[0] == rows and seen.shape == (rows, 2) and seen.is_contiguous()
        assert pages.dtype == seen.dtype == torch.int64 and query.device.type == "cpu"
        assert keys.shape[3] == size and heads % keys.shape[0] == 0
        if sinks is not None:
            assert sinks.shape == (heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous()
        query = _with_whole_tokens(query)
        if new is not None:
            new = _checked_tokens(keys, values, *new)
        out = torch.empty((rows, heads, size), dtype=query.dtype)
        call = attention_arguments(out, query, keys, values, pages, seen, scaling, softcap, sinks, new)
        done = self._library["attend"](_kind(query.dtype, query.dtype), ctypes.byref(call), size)
        assert done, f"no code for head dim {size}"
        return out


def chosen_kernels(mode: bool | str, device: torch.device) -> Kernels | None:
    """The compiled functions under ``EngineConfig.native_kernels``, or ``None``: torch's own serve.

    Raises:
        ValueError: they are insisted upon and the device is no CPU.
        BuildError: they are insisted upon and cannot be compiled.
    """
    if mode is False or (mode == "auto" and device.type != "cpu"):
        return None
    if device.type != "cpu":
        raise ValueError(f"native_kernels=True needs a model on the CPU, this one is on {device}")
    try:
        return load_kernels()
    except BuildError:
        if mode is True:
            raise
        return None


def load_kernels() -> Kernels:
    """The compiled functions; made once per process.

    Raises:
        BuildError: they cannot be compiled, which is not tried again.
    """
    made = _load_once()
    if isinstance(made, BuildError):
        raise made
    return made


@functools.cache
def _load_once() -> Kernels | BuildError:
    try:
        return Kernels(load_library())
    except BuildError as error:
        logger.warning("no compiled kernels, torch's own operators are used: %s", error)
        return error


def _checked_tokens(
    keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What is to be stored in pages ``[K, P, S, H]``, with each token in one piece."""
    assert key.shape == value.shape and key.shape[1:] == (keys.shape[0], keys.shape[3])
    assert key.dtype == value.dtype == keys.dtype == values.dtype
    assert slots.shape == key.shape[:1] and slots.dtype == torch.int64 and slots.is_contiguous()
    return _with_whole_tokens(key), _with_whole_tokens(value), slots


def _with_whole_tokens(x: Tensor) -> Tensor:
    """``[T, heads, H]`` with all of a token in one piece, tokens anywhere."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _last(x: Tensor, weight: Tensor) -> int:
    size = x.shape[-1]
    assert weight.shape == (size,) and weight.dtype == x.dtype and size % LANES == 0
    assert weight.is_contiguous() and x.device.type == "cpu"
    return size


def _kind(wide: torch.dtype, narrow: torch.dtype) -> int:
    return KINDS[wide, narrow]
