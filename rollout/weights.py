"""The trainer's weights as the engine sees them: a view on the same tensors, and its versions.

Owns the view (a module tree of our own over the trainer's parameters and buffers), the fingerprint
by which any change is noticed, and the weight version. Derived copies live in
:mod:`rollout.packing`. Nothing of the trainer's model is ever written.
"""

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout.types import UnsupportedModelError

HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Where torch keeps a module's hooks. The view gets empty ones: hooks belong to training."""

Glance = tuple[tuple[int, ...], tuple[int, ...]]
"""Address and counted writes of every tensor."""
write_count = attrgetter("_version")
MESHES = frozenset({"DeviceMesh", "TransformersDeviceMesh"})
"""What a model that is divided among ranks holds of them; process groups are not copied."""
MODES = frozenset({"training", "gradient_checkpointing"})
"""Flags that the view sets for itself, so that the trainer's changes to them mean nothing."""


class Change(IntEnum):
    """How far the model differs from what was seen last; each kind includes the ones before it."""

    NONE = 0
    CONTENT = 1
    STRUCTURE = 2


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Equal fingerprints mean equal weights, modules and module settings."""

    structure: tuple[object, ...]
    """Modules, the identity of every tensor, and the modules' plain settings (adapters, scales)."""
    content: tuple[int, ...]
    """A checksum of every tensor's bits."""


class WeightTracker:
    """Notices changes of a model's weights and keeps the view and the version up to date.

    Example::

        weights = WeightTracker(model, prepare=lambda view: None)
        weights.update()         # True the first time: there is a view now, version 0
        optimizer.step()
        weights.update()         # True: version 1
        weights.update()         # False: nothing changed

    Args:
        model: the trainer's.
        prepare: makes a new view ready, or refuses it.
        agree: turns the change seen here into the one that counts. Ranks of a divided model see their own
            shards alone, and a change that one of them saw is a change for all.
    """

    def __init__(
        self,
        model: nn.Module,
        prepare: Callable[[nn.Module], None],
        agree: Callable[[Change], Change] = lambda change: change,
    ) -> None:
        self._model = model
        self._prepare = prepare
        self._agree = agree
        self._version = -1
        self._fingerprint: Fingerprint | None = None
        self._view: nn.Module | None = None
        self._hooks: dict[int, Callable[[int], None]] = {}
        self._hook_ids = itertools.count()
        self._checksum = Checksum()
        self._tensors: list[Tensor] = []  # as they lie here: of a sharded one, this rank's shard
        self._counted: list[Tensor] = []  # those, and the sharded ones, which count their own writes
        self._last_glance: Glance = ((), ())

    @property
    def version(self) -> int:
        """Version of the weights seen last; 0 until the first change."""
        return max(self._version, 0)

    @property
    def next_version(self) -> int:
        """Version that the next change starts."""
        return self._version + 1

    @property
    def view(self) -> nn.Module:
        """The module tree to generate with, on the trainer's own tensors."""
        assert self._view is not None, "update() comes first"
        return self._view

    def update(self) -> bool:
        """Compare all weights with those seen last; start a new version when they differ."""
        return self._adopt(force=False)

    def refresh(self) -> None:
        """Start a new version whether or not a change is seen."""
        self._adopt(force=True)

    def seems_changed(self) -> bool:
        """A look that costs microseconds: whether a tensor seen last counted a write or moved.

        Misses writes that do not count (fused optimizers, ``.data``) and new or replaced tensors;
        :meth:`update` misses nothing.
        """
        return _glance(self._tensors, self._counted) != self._last_glance

    def add_hook(self, hook: Callable[[int], None]) -> Callable[[], None]:
        """Have ``hook(version)`` called by :meth:`run_hooks`; returns a function that removes it."""
        hook_id = next(self._hook_ids)
        self._hooks[hook_id] = hook

        def remove() -> None:
            self._hooks.pop(hook_id, None)

        return remove

    def run_hooks(self) -> None:
        """Tell the hooks the version. The engine does so when nothing of the old one is left: a hook
        may raise, or use the engine."""
        for hook in list(self._hooks.values()):
            hook(self.version)

    def _adopt(self, *, force: bool) -> bool:
        tensors = [t for _, t in named_tensors(self._model)]
        shards = [shard_of(t) for t in tensors]
        counted = shards + [t for t in tensors if is_sharded(t)]
        glance = _glance(shards, counted)
        content = tuple(self._checksum(t) for t in shards)
        new, old = Fingerprint(structure_of(self._model), content), self._fingerprint
        if old is None or old.structure != new.structure:
            change = Change.STRUCTURE
        else:
            change = Change.CONTENT if force or old != new else Change.NONE
        change = self._agree(change)
        if change is Change.STRUCTURE:
            view = make_view(self._model)
            self._prepare(view)  # may refuse the model: nothing is adopted then, not even the glance
            self._view = view
        self._tensors, self._counted, self._last_glance = shards, counted, glance
        if change is Change.NONE:
            return False
        self._fingerprint = new
        self._version += 1
        return True


def _glance(tensors: list[Tensor], counted: list[Tensor]) -> Glance:
    # a step takes one: map() over the tensors costs a seventh of a loop in Python
    return tuple(map(Tensor.data_ptr, tensors)), tuple(map(write_count, counted))


def is_sharded(tensor: Tensor) -> bool:
    """Whether other ranks hold parts of it (torch's DTensor)."""
    return type(tensor).__name__ == "DTensor"


def shard_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies here: all of it, unless it is sharded."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer once, tied ones under their first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def structure_of(model: nn.Module) -> tuple[object, ...]:
    """Module identities, tensor identities and plain module settings, comparable with ``==``."""
    modules = tuple(
        # a forward patched onto the instance (mixed precision, fused kernels) is structure, too
        (name, id(module), type(module), id(vars(module).get("forward")), _settings(module))
        for name, module in model.named_modules()
    )
    tensors = tuple(
        (name, id(t), shard_of(t).data_ptr(), t.shape, t.dtype, t.device) for name, t in named_tensors(model)
    )
    return (modules, tensors)


def _settings(module: nn.Module) -> tuple[object, ...]:
    """Public plain values among a module's attributes: what an adapter is switched by, say."""
    return tuple(
        (name, repr(value))
        for name, value in vars(module).items()
        if name not in MODES
        and isinstance(value, (bool, int, float, str, list, tuple, dict, type(None)))
        and name not in HOOK_TABLES
        and _is_plain(value)
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))


class Checksum:
    """A position-sensitive checksum of a tensor's bits, exact for any change of a single word.

    Multilinear hashing modulo 2**64 (Carter and Wegman 1979) of the row sums and the column sums
    of the bits, read as integers: two passes at memory speed. A plain xor or sum would miss a
    negation or two swapped rows.
    """

    def __init__(self) -> None:
        self._multipliers: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, tensor: Tensor) -> int:
        """The checksum as a Python int."""
        if tensor.numel() == 0:
            return 0
        words = _words(tensor.detach())
        rows, columns = words.sum(1, dtype=torch.int64), words.sum(0, dtype=torch.int64)
        total = (rows * self._odd(rows)).sum() + 3 * (columns * self._odd(columns)).sum()
        return int(total)

    def _odd(self, like: Tensor) -> Tensor:
        key = (like.numel(), like.device)
        if key not in self._multipliers:
            generator = torch.Generator().manual_seed(like.numel())  # private: no global state
            numbers = torch.randint(-(2**62), 2**62, (like.numel(),), generator=generator)
            self._multipliers[key] = (numbers * 2 + 1).to(like.device)
        return self._multipliers[key]


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bits as a 2-D integer tensor, in the widest words that fit."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous()
    flat = flat.view(-1, flat.shape[-1]) if flat.ndim > 1 else flat.view(1, -1)
    narrow = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = flat.view(narrow[flat.element_size()])
    if (
        words.shape[1] * words.element_size() % 8 == 0
        and words.storage_offset() * words.element_size() % 8 == 0
    ):
        words = words.view(torch.int64)
    return words


def make_view(model: nn.Module) -> nn.Module:
    """A module tree of our own on the very tensors of ``model``.

    The copy is made by ``copy.deepcopy`` told to keep every parameter, buffer and other tensor and
    to start with empty hook tables; so it has its own flags and its own config. It is in eval mode
    without gradient checkpointing.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in itertools.chain(
            module.parameters(recurse=False),
            module.buffers(recurse=False),
            (value for value in vars(module).values() if isinstance(value, Tensor)),
        ):
            memo[id(tensor)] = tensor
        for value in vars(module).values():
            if type(value).__name__ in MESHES:
                memo[id(value)] = value
        for table in HOOK_TABLES:
            memo[id(vars(module)[table])] = OrderedDict()
    try:
        view: nn.Module = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedModelError(
            "the model holds something that cannot be copied beside its tensors (a lock, a file, a "
            f"process group, an activation?): {error}; remove it from the model before building the engine"
        ) from error
    foreign = frozenset(id(module) for module in model.modules())
    for module in view.modules():
        _unpatch_forward(module, foreign)
        if "gradient_checkpointing" in vars(module):
            setattr(module, "gradient_checkpointing", False)  # noqa: B010  (nn.Module's type hides it)
    return view.eval()


def _unpatch_forward(module: nn.Module, foreign: frozenset[int]) -> None:
    """Undo a ``forward`` patched onto the instance if it would run the trainer's modules.

    deepcopy binds methods and partials to the copy, but a plain function keeps whatever it closed
    over. An autocast that the patch asks for (accelerate's mixed precision) is kept.
    """
    patched = vars(module).get("forward")
    if patched is None:
        return
    reached = list(reachable(patched))
    if not any(id(thing) in foreign for thing in reached):
        return
    forward = type(module).forward
    for autocast in (thing for thing in reached if isinstance(thing, torch.autocast)):
        forward = autocast(forward)
    module.forward = MethodType(forward, module)


def reachable(callable_: object) -> Iterator[object]:
    """What a callable holds: closure cells, bound self, partial arguments, wrapped functions."""
    seen: set[int] = set()
    stack = [callable_]
    while stack:
        thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, FunctionType):
            for cell in thing.__closure__ or ():
                with suppress(ValueError):  # a cell that is still empty
                    stack.append(cell.cell_contents)
        elif isinstance(thing, MethodType):
            stack += [thing.__self__, thing.__func__]
        elif isinstance(thing, partial):
            stack += [thing.func, *thing.args, *thing.keywords.values()]
        elif callable(thing) and not isinstance(thing, (nn.Module, type)) and hasattr(thing, "__dict__"):
            stack += vars(thing).values()


def base_model_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside ``model``, which is checked to be one that can generate.

    Raises:
        TypeError: not a transformers model, or wrapped by DDP, FSDP or torch.compile.
    """
    base: object = model
    if type(model).__module__.startswith("peft."):  # by name: peft need not be installed
        base = model.get_base_model()  # type: ignore[operator]
    if not isinstance(base, PreTrainedModel):
        raise TypeError(
            f"model has type {type(model).__module__}.{type(model).__name__}; give a transformers "
            "PreTrainedModel or a PEFT model. Unwrap DDP and torch.compile first: model.module, "
            "model._orig_mod, or accelerator.unwrap_model(model)"
        )
    # transformers' own object: a model that it loaded in shards knows the mesh
    by_transformers = getattr(base, "_device_mesh", None) is not None
    for name, tensor in named_tensors(model):
        if is_sharded(tensor) and not (by_transformers and _mesh_names(tensor) == ("tp",)):
            raise UnsupportedModelError(
                f"parameter {name} is sharded (a DTensor over {_mesh_names(tensor)}); of sharded models only "
                "those that transformers loaded with DistributedConfig(tp_size=N) can generate. Use that or "
                "DDP, or gather the model first"
            )
        if tensor.device.type == "meta":
            raise UnsupportedModelError(f"parameter {name} is on the meta device; load the weights first")
    return base


def _mesh_names(tensor: Tensor) -> tuple[str, ...] | None:
    """Names of the dimensions of the ranks that hold a sharded tensor."""
    names: tuple[str, ...] | None = tensor.device_mesh.mesh_dim_names  # type: ignore[attr-defined]
    return names
