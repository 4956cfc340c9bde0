"""torch.compile of the view: which kind of step is compiled how, and the compiled forwards.

Steps with prompts ("varlen") and steps in which every row has one token ("decode") have settings of
their own. An explicit ``varlen_compile_config`` or ``decode_compile_config`` goes before the level:

    level   mode                            dynamic
    0       not compiled
    1       "default"                       True
    2       "max-autotune-no-cudagraphs"    True
    3       "max-autotune-no-cudagraphs"    False

The hand-over to our attention is a graph break (see :mod:`rollout.attention`), so a step's own object
is never traced and no step compiles anything that a step of its shape compiled before. Layers share
their code: the number of compilations does not grow with the depth of the model. With
``dynamic=False`` each shape is compiled anew, so steps are padded to few shapes (:func:`padded_size`).

A view that is compiled keeps torch's own linears and layers: packed linears and fused layers (CPU)
decide in Python at every call, which a compiler would have to break at or bake in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._inductor import list_mode_options
from transformers import CompileConfig

from rollout.config import EngineConfig

INDUCTOR = "inductor"
UNSET_MODE: str = CompileConfig().mode
"""What a config says that names no mode; such a mode is only meant for inductor without options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSettings:
    """One kind of step's arguments of ``torch.compile``."""

    dynamic: bool | None
    backend: str | Callable[..., Any] = INDUCTOR
    mode: str | None = None
    options: Mapping[str, Any] | None = None

    @classmethod
    def of_level(cls, level: int) -> "CompileSettings | None":
        """See the table at the top of this file."""
        if level == 0:
            return None
        return cls(mode="default" if level == 1 else "max-autotune-no-cudagraphs", dynamic=level < 3)

    @classmethod
    def of_config(cls, name: str, given: Any) -> "CompileSettings":
        """From transformers' ``CompileConfig`` or a dict of its fields; ``name`` is the setting's.

        Raises:
            ValueError: a field is unknown, asks for one graph, or two fields exclude each other.
        """
        if isinstance(given, Mapping):
            known = vars(CompileConfig())
            unknown = sorted(set(given) - set(known))
            if unknown:
                raise ValueError(f"{name} has unknown fields {unknown}; known: {', '.join(known)}")
            given = CompileConfig(**given)
        if given.fullgraph:
            raise ValueError(
                f"{name} has fullgraph=True, and paged attention is a graph break in every layer; "
                "set fullgraph=False"
            )
        mode = given.mode
        if mode == UNSET_MODE and (given.options is not None or given.backend != INDUCTOR):
            mode = None
        if mode is not None and given.options is not None:
            raise ValueError(f"{name} has mode={mode!r} and options; torch.compile takes one of them")
        return cls(dynamic=given.dynamic, backend=given.backend, mode=mode, options=given.options)

    @property
    def records_graphs(self) -> bool:
        """Whether inductor would record CUDA graphs of its own."""
        if self.backend != INDUCTOR:
            return False
        options = self.options
        if options is None:
            options = list_mode_options().get(self.mode or "default") or {}
        return bool(options.get("triton.cudagraphs", False))

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether every shape is compiled anew, so that steps are padded to few."""
        return self.dynamic is False

    def compile(self, view: nn.Module) -> nn.Module:
        """``view`` compiled when it is first called."""
        # torch says that a function comes back; for a module it is a module
        compiled: Any = torch.compile(
            view,
            dynamic=self.dynamic,
            backend=self.backend,
            mode=self.mode,
            options=None if self.options is None else dict(self.options),
        )
        assert isinstance(compiled, nn.Module)
        return compiled


@dataclass(frozen=True, slots=True)
class CompileChoice:
    """How each kind of step is compiled; ``None`` where it is not."""

    varlen: CompileSettings | None
    decode: CompileSettings | None

    def of(self, is_decode: bool) -> CompileSettings | None:
        """The settings of one kind of step."""
        return self.decode if is_decode else self.varlen


def is_compiling(config: EngineConfig) -> bool:
    """Whether any kind of step may be compiled."""
    return config.default_compile_level > 0 or not (
        config.varlen_compile_config is None and config.decode_compile_config is None
    )


def choose_compilation(config: EngineConfig, *, is_flash: bool) -> CompileChoice:
    """The settings of both kinds of steps.

    Args:
        config: the engine's.
        is_flash: whether attention is by flash kernels: then the level leaves steps with prompts alone.

    Raises:
        ValueError: a compile config asks for what is not possible.
    """
    level = CompileSettings.of_level(config.default_compile_level)
    varlen, decode = None if is_flash else level, level
    if config.varlen_compile_config is not None:
        varlen = CompileSettings.of_config("varlen_compile_config", config.varlen_compile_config)
    if config.decode_compile_config is not None:
        decode = CompileSettings.of_config("decode_compile_config", config.decode_compile_config)
    return CompileChoice(varlen, decode)


def padded_size(count: int, interval: int) -> int:
    """The smallest ``interval * 2**k`` that holds ``count``: few sizes, since each is compiled.

    Example::

        padded_size(70, 64)     # 128
    """
    size = interval
    while size < count:
        size *= 2
    return size
