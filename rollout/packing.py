"""Derived weight copies for CPU linears: oneDNN's prepacked layout, kept true to the weights.

A packed copy belongs to one weight version and one compute dtype and is made again when either
changes. On CPUs without bf16 instructions a bf16 linear is computed on an fp32 copy: products of
bf16 numbers are exact in fp32 and the result is rounded to bf16 once, as the hardware would do.
"""

from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

MIN_PACKED_ROWS = 4
"""Below this the plain kernel is faster (measured: 1 row fp32 9 ms plain, 15 ms packed)."""
MAX_PACKED_FP32_ROWS = 192
"""Above this the plain fp32 kernel is as fast (measured: equal at 128 rows, 0.7x at 1024)."""
MAX_AUTO_MEMORY_SHARE = 0.25
"""``pack_weights="auto"`` packs only where the copies take at most this share of free memory."""


@dataclass(frozen=True, slots=True)
class _Packed:
    version: int
    dtype: torch.dtype
    weight: Tensor
    bias: Tensor | None


class PackedLinears:
    """Replaces a view's linears by packed ones and keeps them at the right weight version.

    Example::

        packed = PackedLinears("auto")
        packed.install(view)          # on the engine's view, never on the trainer's model
        packed.version = 3            # copies of older versions are made again when next used
    """

    def __init__(self, mode: bool | str) -> None:
        self._mode = mode
        self.version = 0
        self._linears: list[PackedLinear] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that the derived copies take now."""
        return sum(linear.packed_bytes for linear in self._linears)

    def install(self, view: nn.Module) -> None:
        """Swap every plain CPU linear of ``view`` for a packed one on the same parameters."""
        self._linears = []
        if self._mode is False or not torch.backends.mkldnn.is_available():
            return
        targets: list[tuple[nn.Module, str, nn.Linear]] = [
            (parent, name, child)
            for parent in view.modules()
            for name, child in parent._modules.items()  # named_children() tells a shared child once
            if type(child) is nn.Linear and _can_pack(child.weight)
        ]
        size = sum(child.weight.numel() * _packed_dtype(child.weight.dtype).itemsize for *_, child in targets)
        if self._mode == "auto" and size > MAX_AUTO_MEMORY_SHARE * psutil.virtual_memory().available:
            return
        made: dict[int, PackedLinear] = {}
        for parent, name, child in targets:
            if id(child) not in made:
                made[id(child)] = PackedLinear(child, self)
            parent._modules[name] = made[id(child)]
        self._linears = list(made.values())

    def release(self) -> None:
        """Give the copies' memory back; they are made again when next used."""
        for packed in self._linears:
            packed.drop()


class PackedLinear(nn.Linear):
    """``nn.Linear`` on the same parameters, multiplied in a prepacked layout."""

    def __init__(self, plain: nn.Linear, owner: PackedLinears) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.training = plain.training
        self._owner = owner
        self._packed: _Packed | None = None

    @property
    def packed_bytes(self) -> int:
        """Bytes of the derived copy, 0 when there is none."""
        if self._packed is None:
            return 0
        return self.weight.numel() * _packed_dtype(self._packed.dtype).itemsize

    def drop(self) -> None:
        """Forget the derived copy."""
        self._packed = None

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in] -> [..., out]`` in the dtype that ``nn.Linear`` would give here."""
        rows = input.numel() // self.in_features
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else self.weight.dtype
        fast = _packed_dtype(dtype)
        if rows < MIN_PACKED_ROWS or (dtype == torch.float32 and rows > MAX_PACKED_FP32_ROWS):
            return linear(input, self.weight, self.bias)
        packed = self._current(dtype, fast)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            input.to(dtype).to(fast), packed.weight, packed.bias, "none", [], ""
        )
        return out.to(dtype)

    def _current(self, dtype: torch.dtype, fast: torch.dtype) -> _Packed:
        packed = self._packed
        if packed is None or packed.version != self._owner.version or packed.dtype != dtype:
            self._packed = None  # its memory goes back before the next copy is made
            weight = self.weight.detach().to(dtype).to(fast)
            packed = _Packed(
                version=self._owner.version,
                dtype=dtype,
                weight=torch.ops.mkldnn._reorder_linear_weight(weight, 64),
                bias=None if self.bias is None else self.bias.detach().to(dtype).to(fast),
            )
            self._packed = packed
        return packed


def _can_pack(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


def _packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to multiply in: fp32 instead of bf16 where the CPU has no bf16 instructions."""
    if dtype == torch.bfloat16 and not torch.cpu.get_capabilities().get("avx512_bf16", False):
        return torch.float32
    return dtype
