"""Derived weight copies for CPU linears, in a layout made for products and kept true to the weights.

A packed copy belongs to one weight version and one compute dtype and is made again when either
changes. Linears that read the same tensor (query, key and value; gate and up) are multiplied in
one go: which ones do is seen in a forward, not guessed from names. On CPUs without bf16
instructions a bf16 linear is computed on an fp32 copy: products of bf16 numbers are exact in fp32
and the result is rounded to bf16 once, as the hardware would do.

The layout is that of the compiled kernels' own products where the CPU can make them, else oneDNN's.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rollout.native import Panels, Products

HAS_BF16: bool = torch.cpu.get_capabilities().get("avx512_bf16", False)
"""Whether the CPU multiplies bf16 itself. CPUs that do were faster on packed copies at every number of
rows measured, from 1 to 256 (AMD Zen 5: 1 row bf16 9 ms packed, 13 plain; 256 rows fp32 175 and 457)."""
MIN_PACKED_ROWS = 4
"""On other CPUs the plain kernel is faster below this (Ice Lake: 1 row fp32 9 ms plain, 15 packed)."""
MAX_PACKED_FP32_ROWS = 192
"""On other CPUs the plain fp32 kernel is as fast above this (equal at 128 rows, 0.7x at 1024)."""
MAX_AUTO_MEMORY_SHARE = 0.25
"""``pack_weights="auto"`` packs only where the copies take at most this share of free memory."""
PACKED_DTYPES = (torch.float32, torch.bfloat16)
EXPECTED_ROWS = 64
"""The batch size that the layout is chosen for; it hardly matters (16, 64 and 128 measure alike)."""


@dataclass(frozen=True, slots=True)
class OneDnnWeight:
    """A weight matrix ``[O, I]`` and its bias in oneDNN's layout."""

    dtype: torch.dtype
    weight: Tensor
    bias: Tensor | None
    num_bytes: int

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> "OneDnnWeight":
        """Copied from plain tensors of one dtype."""
        return cls(
            dtype=weight.dtype,
            weight=torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS),
            bias=bias,
            num_bytes=weight.numel() * weight.element_size(),
        )

    def multiply(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` of ``[..., I]``: ``[..., O]``."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


@dataclass(frozen=True, slots=True)
class _Packed:
    version: int
    dtype: torch.dtype
    """Of the linear's output."""
    weight: OneDnnWeight | Panels


class PackedLinears:
    """Replaces a view's linears by packed ones and keeps them at the right weight version.

    Example::

        packed = PackedLinears("auto")
        packed.install(view, products)  # on the engine's view, never on the trainer's model
        with packed.watching():       # see which linears share their input
            view(input_ids)
        packed.version = 3            # copies of older versions are made again when next used
    """

    def __init__(self, mode: bool | str) -> None:
        self._mode = mode
        self.version = 0
        self._linears: list[PackedLinear] = []
        self._products: Products | None = None
        self._seconds = 0.0
        self._num_drops = 0
        self._seen: list[tuple[PackedLinear, Tensor]] | None = None

    @property
    def stamp(self) -> tuple[int, int]:
        """Of the copies' addresses: another one when some were given back or belong to an older version."""
        return self.version, self._num_drops

    @property
    def num_bytes(self) -> int:
        """Bytes that the derived copies take now."""
        return sum(group.num_bytes for group in self._groups())

    @property
    def products(self) -> Products | None:
        """What multiplies instead of oneDNN."""
        return self._products

    def install(self, view: nn.Module, products: Products | None) -> None:
        """Swap every plain CPU linear of ``view`` for a packed one on the same parameters.

        Args:
            view: the module tree.
            products: multiply where they can; ``None``: oneDNN does.
        """
        self._linears, self._products = [], products
        self.note_drop()
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

    @contextmanager
    def trial(self, version: int) -> Iterator[None]:
        """Inside, copies are those of ``version``, and a view may be installed. Where the block raises, all
        is as it was before it, and what was made in it is given back."""
        before = self.version, self._linears, self._products
        self.version = version
        try:
            yield
        except BaseException:
            self.release()
            self.version, self._linears, self._products = before
            raise

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Join linears that are called one after the other on the same tensor inside the block."""
        self._seen = []
        try:
            yield
            for run in _runs_of_one_input(self._seen):
                group = LinearGroup(run, self)
                for member in run:
                    member.group.drop()
                    member.group = group
        finally:
            self._seen = None

    @contextmanager
    def deriving(self) -> Iterator[None]:
        """Counts the time inside the block as spent on derived copies."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - started

    def take_seconds(self) -> float:
        """Seconds spent on derived copies since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def note_drop(self) -> None:
        """Called when copies are given back."""
        self._num_drops += 1

    def note(self, member: "PackedLinear", input: Tensor) -> None:
        """Called by each linear with its input; remembered only while watching."""
        if self._seen is not None:
            self._seen.append((member, input))

    def release(self) -> None:
        """Give the copies' memory back; they are made again when next used."""
        for group in self._groups():
            group.drop()

    def _groups(self) -> list["LinearGroup"]:
        return list({id(member.group): member.group for member in self._linears}.values())


class LinearGroup:
    """Linears that read the same tensor, multiplied in one go.

    The first member called on a tensor computes the outputs of all and keeps the others' until
    they are asked for on that very tensor; on any other tensor everything is computed again.
    """

    def __init__(self, members: "Sequence[PackedLinear]", owner: PackedLinears) -> None:
        self._members = members
        self._owner = owner
        self._packed: _Packed | None = None
        self._input: Tensor | None = None
        self._input_version = 0  # a write in place makes it another input
        self._outputs: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the derived copy, 0 when there is none."""
        return 0 if self._packed is None else self._packed.weight.num_bytes

    def drop(self) -> None:
        """Forget the derived copy and any output that was not asked for."""
        if self._packed is not None:
            self._owner.note_drop()
        self._packed = self._input = None
        self._outputs = {}

    def output(self, member: "PackedLinear", input: Tensor, dtype: torch.dtype) -> Tensor:
        """The member's output for ``input``, in ``dtype``."""
        is_known = self._input is input and self._input_version == input._version
        if not is_known or id(member) not in self._outputs:
            sizes = [each.out_features for each in self._members]
            outputs = self.joint_output(input, dtype).split_with_sizes(sizes, dim=-1)
            self._input, self._input_version = input, input._version
            self._outputs = {id(each): out for each, out in zip(self._members, outputs, strict=True)}
        out = self._outputs.pop(id(member))
        if not self._outputs:
            self._input = None  # let the input go as soon as everybody had it
        return out

    def joint_output(self, input: Tensor, dtype: torch.dtype) -> Tensor:
        """The outputs of all members side by side in the last dimension, in ``dtype``."""
        weight = self._current(dtype)
        if input.dtype != weight.dtype:
            input = input.to(dtype).to(weight.dtype)
        out = weight.multiply(input)
        return out if out.dtype == dtype else out.to(dtype)

    def panels(self, dtype: torch.dtype) -> Panels | None:
        """The weights of all members for products in ``dtype``; ``None`` where oneDNN makes them."""
        if self._owner.products is None or dtype not in PACKED_DTYPES:
            return None  # before anything is packed: oneDNN's layout does not serve every number of rows
        weight = self._current(dtype)
        return weight if isinstance(weight, Panels) and weight.dtype == dtype else None

    def serves(self, dtype: torch.dtype, rows: int) -> bool:
        """Whether a product of so many rows in ``dtype`` is faster on the packed copy."""
        if dtype not in PACKED_DTYPES:
            return False
        if HAS_BF16:
            return True
        return rows >= MIN_PACKED_ROWS and (dtype != torch.float32 or rows <= MAX_PACKED_FP32_ROWS)

    def is_made_of(self, modules: Sequence[nn.Module]) -> bool:
        """Whether these modules, in this order, are the members."""
        return [id(member) for member in self._members] == [id(module) for module in modules]

    def _current(self, dtype: torch.dtype) -> OneDnnWeight | Panels:
        packed, version = self._packed, self._owner.version
        if packed is None or packed.version != version or packed.dtype != dtype:
            spare = packed.weight if packed is not None and isinstance(packed.weight, Panels) else None
            packed = None
            self.drop()  # its memory goes back before the next copy is made, or is used again
            with self._owner.deriving():
                packed = self._packed = _Packed(version, dtype, self._pack(dtype, spare))
        return packed.weight

    def _pack(self, dtype: torch.dtype, spare: Panels | None) -> OneDnnWeight | Panels:
        fast = _packed_dtype(dtype)
        weights = [each.weight.detach().to(dtype).to(fast) for each in self._members]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        biases = [each.bias.detach().to(dtype).to(fast) for each in self._members if each.bias is not None]
        bias = torch.cat(biases) if biases else None
        products = self._owner.products
        if products is not None and products.can_pack(weight):
            return products.pack(weight, bias, spare)
        return OneDnnWeight.pack(weight, bias)


class PackedLinear(nn.Linear):
    """``nn.Linear`` on the same parameters, multiplied in a prepacked layout."""

    def __init__(self, plain: nn.Linear, owner: PackedLinears) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.training = plain.training
        self.group = LinearGroup([self], owner)
        self._owner = owner

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in] -> [..., out]`` in the dtype that ``nn.Linear`` would give here."""
        self._owner.note(self, input)
        dtype, rows = self.output_dtype(), input.numel() // self.in_features
        if not self.group.serves(dtype, rows):
            return linear(input, self.weight, self.bias)
        return self.group.output(self, input, dtype)

    def output_dtype(self) -> torch.dtype:
        """The dtype that ``nn.Linear`` would give now."""
        return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else self.weight.dtype


class JointLinear:
    """Several linears on one input as one callable: ``[T, in] -> [T, sum of out]``.

    One product where they are packed together, one each where not (an adapter around one of them).
    Made for the autocast of the moment, like whatever the engine finds out about a view.

    Example::

        qkv = JointLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        query, key, value = qkv(x).split_with_sizes(sizes, dim=-1)
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._group: LinearGroup | None = None
        first = self._modules[0]
        if isinstance(first, PackedLinear) and first.group.is_made_of(modules):
            self._group, self._dtype = first.group, first.output_dtype()

    def __call__(self, input: Tensor) -> Tensor:
        """See the class."""
        if self._group is not None and self._group.serves(self._dtype, input.shape[0]):
            return self._group.joint_output(input, self._dtype)
        outputs = [module(input) for module in self._modules]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def panels(self, dtype: torch.dtype) -> Panels | None:
        """The joint weights where the output is the compiled kernels' own product in ``dtype``."""
        return self._group.panels(dtype) if self._group is not None and self._dtype == dtype else None


def _runs_of_one_input(seen: list[tuple[PackedLinear, Tensor]]) -> list[list[PackedLinear]]:
    """Runs of linears, each called once in all, that followed each other on the same tensor."""
    calls: dict[int, int] = {}
    for member, _ in seen:
        calls[id(member)] = calls.get(id(member), 0) + 1
    runs: list[list[PackedLinear]] = []
    last: Tensor | None = None
    for member, input in seen:
        alone = calls[id(member)] > 1
        if not alone and input is last and _can_join(runs[-1][-1], member):
            runs[-1].append(member)
        else:
            runs.append([member])
        last = None if alone else input
    return [run for run in runs if len(run) > 1]


def _can_join(one: PackedLinear, other: PackedLinear) -> bool:
    return one.weight.dtype == other.weight.dtype and (one.bias is None) == (other.bias is None)


def _can_pack(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in PACKED_DTYPES


def _packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to multiply in: fp32 instead of bf16 where the CPU has no bf16 instructions."""
    return torch.float32 if dtype == torch.bfloat16 and not HAS_BF16 else dtype
