"""The compiled functions by name, with the types of their arguments, and what their calls take."""

import ctypes
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

LANES = 16
MAX_HEAD_DIM = 1024
HEAD_DIMS = frozenset({16, 32, 64, 80, 96, 128, 256})
"""Head dims that paged attention is compiled for."""
KINDS = {
    (torch.float32, torch.float32): 0,
    (torch.bfloat16, torch.bfloat16): 1,
    (torch.float32, torch.bfloat16): 2,  # autocast
}
"""(dtype of residuals, norms and angles; dtype of the linears' outputs) that there is code for."""


class AttentionArguments(ctypes.Structure):
    """The arguments of one attention, ``AttentionCall`` of ``attention.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "query", "keys", "values", "pages", "seen", "sinks")),
        *((name, ctypes.c_int64) for name in ("out_stride", "query_stride", "head_stride", "page_size")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "kv_heads", "group")),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("key", "value", "slots")),
        *((name, ctypes.c_int64) for name in ("key_stride", "value_stride")),
    )


def attention_arguments(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    seen: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    new: tuple[Tensor, Tensor, Tensor] | None,
) -> AttentionArguments:
    """Addresses and strides of tensors that were checked; see ``Kernels.attend``."""
    stored: tuple[int, ...] = ()
    if new is not None:
        key, value, slots = new
        addresses = key.data_ptr(), value.data_ptr(), slots.data_ptr()
        stored = (*addresses, key.stride(0), value.stride(0))
    return AttentionArguments(
        out.data_ptr(),
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        pages.data_ptr(),
        seen.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        out.stride(0),
        query.stride(0),
        keys.stride(0),
        keys.shape[2],
        query.shape[0],
        pages.shape[1],
        keys.shape[0],
        query.shape[1] // keys.shape[0],
        scaling,
        softcap or 0.0,
        *stored,
    )


class PanelMatrix(ctypes.Structure):
    """A weight matrix in panels, ``PanelMatrix`` of ``panels.h``."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inner", ctypes.c_int64),
        ("outer", ctypes.c_int64),
    )


class LayerStart(ctypes.Structure):
    """A layer up to its attention, ``LayerStart`` of ``layer.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "hidden", "norm")),
        ("qkv", ctypes.POINTER(PanelMatrix)),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "query_norm", "key_norm")),
        *((name, ctypes.c_int64) for name in ("tokens", "queries", "keys", "head_dim")),
        ("eps", ctypes.c_float),
        ("head_eps", ctypes.c_float),
    )


class LayerEnd(ctypes.Structure):
    """A layer from its attention on, ``LayerEnd`` of ``layer.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "norm", "attended")),
        *((name, ctypes.POINTER(PanelMatrix)) for name in ("attention_out", "gate_up", "down")),
        *((name, ctypes.c_int64) for name in ("tokens", "attended_stride")),
        ("eps", ctypes.c_float),
    )


class DecodeLayer(ctypes.Structure):
    """A whole layer of steps with one token per row, ``DecodeLayer`` of ``layer.h``."""

    _fields_ = (
        ("start", LayerStart),
        ("attention", AttentionArguments),
        ("end", LayerEnd),
        ("group", ctypes.c_int64),
    )


class DecodeRowsArguments(ctypes.Structure):
    """Where a step's rows lie in one group of layers, ``DecodeRows`` of ``layer.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pages", "seen", "slots")),
        ("width", ctypes.c_int64),
    )


class DecodeStep(ctypes.Structure):
    """What changes from step to step, ``DecodeStep`` of ``layer.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "cos", "sin")),
        ("groups", ctypes.POINTER(DecodeRowsArguments)),
        ("rows", ctypes.c_int64),
    )


class Library:
    """A compiled library's functions.

    Example::

        library = Library(load_library())
        with library.timing() as seconds:
            library["norm"](...)
        seconds["norm"]
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        i64, pointer, f32, int_ = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float, ctypes.c_int
        reference = ctypes.POINTER
        self._functions = {
            "norm": _typed(library.rollout_add_rms_norm, int_, *[pointer] * 5, i64, i64, f32),
            "rotate": _typed(
                library.rollout_rotate, int_, pointer, pointer, i64, *[pointer] * 4, f32, *[i64] * 4
            ),
            "silu_mul": _typed(library.rollout_silu_mul, int_, pointer, pointer, i64, i64),
            "store": _typed(
                library.rollout_store, pointer, pointer, i64, pointer, i64, pointer, i64, pointer, *[i64] * 3
            ),
            "attend": _typed(library.rollout_attend, int_, reference(AttentionArguments), i64),
            "spread": _typed(library.rollout_spread, int_, *[pointer] * 3, i64, pointer, i64, i64, i64),
            "pick": _typed(library.rollout_pick, int_, *[pointer] * 2, i64, *[pointer] * 2, *[i64] * 3),
            "uniforms": _typed(library.rollout_uniforms, pointer, pointer, i64),
        }
        self.panel_rows: int = library.rollout_panel_rows()
        """Weight rows that lie together in a panel; 0 on a CPU without bf16 dot products."""
        self.step_units: int = library.rollout_step_units()
        """Panels hold a multiple of so many units of each weight row."""
        if self.panel_rows:
            start, end = library.rollout_start_layer, library.rollout_end_layer
            start.restype = end.restype = ctypes.c_double
            self._functions |= {
                "pack": _typed(library.rollout_pack, pointer, pointer, i64, i64),
                "multiply": _typed(
                    library.rollout_multiply, int_, pointer, pointer, reference(PanelMatrix), i64
                ),
                "start_layer": _typed(start, int_, reference(LayerStart)),
                "end_layer": _typed(end, int_, reference(LayerEnd)),
                "decode_layers": _typed(
                    library.rollout_decode_layers,
                    int_,
                    reference(DecodeLayer),
                    i64,
                    reference(DecodeStep),
                    reference(ctypes.c_double),
                ),
            }
        self._seconds: dict[str, float] | None = None

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._functions[name]

    @contextmanager
    def timing(self) -> Iterator[dict[str, float]]:
        """Adds up the seconds inside each function while the block runs: no profiler sees them."""
        seconds: dict[str, float] = defaultdict(float)
        self._seconds = seconds
        plain = self._functions
        self._functions = {name: _timed(name, run, seconds) for name, run in plain.items()}
        try:
            yield seconds
        finally:
            self._functions, self._seconds = plain, None

    def move_seconds(self, seconds: float, source: str, target: str) -> None:
        """So much of what ``source`` took was the work of ``target``; nothing outside :meth:`timing`."""
        if self._seconds is not None:
            self._seconds[source] -= seconds
            self._seconds[target] += seconds


def _typed(function: Any, *argtypes: Any) -> Callable[..., Any]:
    """The C function with its types told; those that return nothing return an int nobody reads."""
    function.argtypes = argtypes
    typed: Callable[..., Any] = function
    return typed


def _timed(name: str, run: Callable[..., Any], seconds: dict[str, float]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return run(*arguments)
        finally:
            seconds[name] += time.perf_counter() - started

    return timed
