"""Products of rows with weights in panels. Letters: O outer and I inner size of a weight matrix."""

import ctypes

import torch
from torch import Tensor

from rollout.native.library import KINDS, Library, PanelMatrix

UNIT_BYTES = 4
"""Of the inner size that lie together in a panel: one float32 or two bf16."""


class Panels:
    """A weight matrix ``[O, I]`` and its bias, copied to the order in which the products read them.

    Made by :meth:`Products.pack`. The result of a row is the same whatever rows are multiplied with it.

    Example::

        panels = products.pack(weight, None)
        panels.multiply(x)      # x @ weight.T
    """

    _panels: Tensor

    def __init__(
        self, library: Library, weight: Tensor, bias: Tensor | None, spare: "Panels | None" = None
    ) -> None:
        outer, inner = weight.shape
        assert weight.numel() > 0 and weight.device.type == "cpu"
        rows = library.panel_rows
        row_units = inner * weight.element_size() // UNIT_BYTES
        count, units = -(-outer // rows), -(-row_units // library.step_units) * library.step_units
        self.dtype, self.outer, self.inner = weight.dtype, outer, inner
        self._library = library
        shape = (count, units, rows)
        if spare is not None and spare._panels.shape == shape:
            self._panels = spare._panels  # fresh memory takes as long as the copying
        else:
            self._panels = torch.empty(shape, dtype=torch.int32)
        self._bias = None
        if bias is not None:
            assert bias.shape == (outer,) and bias.dtype == weight.dtype
            self._bias = torch.zeros(count * rows, dtype=bias.dtype)
            self._bias[:outer] = bias
        weight = weight.contiguous()
        library["pack"](self._panels.data_ptr(), weight.data_ptr(), outer, row_units)
        self.matrix = PanelMatrix(
            self._panels.data_ptr(), None if self._bias is None else self._bias.data_ptr(), inner, outer
        )

    @property
    def num_bytes(self) -> int:
        """Of the copy: the weights, filled up to whole panels."""
        return self._panels.numel() * UNIT_BYTES

    @property
    def has_whole_halves(self) -> bool:
        """Whether the two halves of the outer size are panels of their own, as a layer's gates must be."""
        return self.outer % (2 * self._library.panel_rows) == 0

    def multiply(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` of ``[..., I]``: ``[..., O]`` in the weights' dtype, as ``x`` must be."""
        assert x.shape[-1] == self.inner and x.dtype == self.dtype and x.device.type == "cpu"
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.outer), dtype=x.dtype)
        self._library["multiply"](
            KINDS[x.dtype, x.dtype],
            out.data_ptr(),
            x.data_ptr(),
            ctypes.byref(self.matrix),
            x.numel() // self.inner,
        )
        return out


class Products:
    """Matrix products on CPUs with bf16 dot products, faster than oneDNN's for the rows of decode steps.

    The linears of a model with 135M weights, oneDNN's time over ours at 1, 16, 32, 64, 128 and 1024 rows:
    AMD Zen 4 in bf16 1.5, 1.45, 1.2, -, 1.0, 0.94, in fp32 1.45, 1.2, 1.1, -, 1.0, 0.93; Intel with AMX in
    fp32 1.2, 1.3, 1.4, 1.25, 1.05, 0.85 (earlier versions). Intel with AMX in bf16 at 1, 16, 32, 64, 128
    and 512 rows: 1.8, 1.8, 1.9, 1.2, 1.1 and, as the CPU holds tiles back or not, 0.8 to 1.35.
    """

    def __init__(self, library: Library) -> None:
        self._library = library

    def can_pack(self, weight: Tensor) -> bool:
        """Whether there is code for the weight's dtype and its sizes."""
        has_code = (weight.dtype, weight.dtype) in KINDS and weight.device.type == "cpu"
        size = weight.shape[1] * weight.element_size()
        return has_code and weight.numel() > 0 and size % UNIT_BYTES == 0

    def pack(self, weight: Tensor, bias: Tensor | None, spare: Panels | None = None) -> Panels:
        """Weights ``[O, I]`` and a bias ``[O]`` of one dtype, see :meth:`can_pack`. The memory of ``spare``,
        which nobody multiplies with any more, is used again where it is as large."""
        return Panels(self._library, weight, bias, spare)
