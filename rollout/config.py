"""The engine's settings: one frozen object, checked when it is built.

Names shared with transformers' ``ContinuousBatchingConfig`` keep its meaning. Settings of that
class which this engine does not offer are refused by name, never dropped.
"""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollout.types import MAX_SEED, require_int, require_number

MIN_PAGE_SIZE = 4
SCHEDULER_SAFETY_MARGINS = {"fifo": 0.15, "prefill_first": 0.0}
WEIGHT_CHANGE_POLICIES = ("recompute", "keep", "cancel")
DEFAULT_MEMORY_SHARE = 0.5
MAX_COMPILE_LEVEL = 3
ALWAYS_SO = frozenset(
    {
        "return_logprobs",
        "per_request_processors",
        "drop_unsupported_processors",
        "disable_nccl_graph_mixing",
    }
)
"""Settings of transformers that choose what is always the case here: logprobs are returned, every
request has parameters of its own, and no processor is ever dropped. The last one is an environment
variable that transformers' object sets itself when it is built."""
DEPRECATED = frozenset({"block_size", "use_default_compile_configs", "max_cached_graphs"})
"""Old names of transformers: its object has turned them into new ones when it is built, dicts have not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of a :class:`~rollout.engine.RolloutEngine`.

    Example::

        EngineConfig(max_memory=2 * 2**30, page_size=16)
        EngineConfig.from_any({"scheduler_type": "prefill_first"})

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range, or two fields contradict each other.
    """

    page_size: int | None = None
    """Tokens per page of the key/value cache, at least 4. ``None`` means 32, or what the attention
    backend's kernels need: 256 for flash attention 2, on which ``flash`` and ``varlen`` mostly rest."""
    num_blocks: int | None = None
    """Pages per layer group. ``None`` sizes the cache by ``max_memory`` or by the requests."""
    max_memory: int | None = None
    """Upper bound of the key/value cache in bytes. ``None`` uses ``max_memory_percent``."""
    max_memory_percent: float | None = None
    """Share of the free memory (device memory, or what psutil calls available) that the cache may
    take at the most, measured when the cache is first made. ``None`` means 0.5. Without
    ``num_blocks`` the cache grows to what the requests at hand can fill and not beyond."""
    max_batch_tokens: int | None = None
    """Tokens that go through the model in one step at the most; longer prompts are split over
    several steps. ``None`` means 8192. A step never has more tokens than its pages hold, so the
    memory bound of the cache bounds it, too."""
    max_requests_per_batch: int | None = None
    """Sequences running at the same time at the most. ``None`` means 1024."""
    scheduler_type: str = "fifo"
    """``"fifo"`` serves running sequences before it starts new ones; ``"prefill_first"`` starts
    new ones first."""
    safety_margin: float | None = None
    """Share of the pages that must be free before another sequence is started, in [0, 1]. ``None``
    means 0.15 for ``fifo`` and 0 for ``prefill_first``."""
    allow_block_sharing: bool = True
    """Share pages between samples of a prompt and between equal prefixes."""
    attn_implementation: str = "auto"
    """Attention backend, see :mod:`rollout.attention`: ``"flash"`` and ``"varlen"`` for GPUs, ``"native"``
    for CPUs, ``"sdpa"`` and ``"eager"`` for both. ``"auto"`` takes the fastest that serves the model."""
    native_kernels: bool | str = "auto"
    """Use kernels that are compiled for this CPU when first needed (by g++ in 10 to 20 seconds, kept in
    the user's cache): paged attention, the passes of a draw, and the norms, rotary embedding, gated MLP
    and, where the CPU has bf16 dot products, packed linears of decoder layers that are seen to agree with
    them. ``"auto"`` does so for models on the CPU and logs a warning where they cannot be
    compiled, ``True`` insists, ``False`` never does."""
    on_weight_change: str = "recompute"
    """What happens to requests in flight when the weights change: ``"recompute"`` their keys and
    values under the new weights, ``"keep"`` the old ones (mixing both, as asynchronous RL does),
    or ``"cancel"`` them, keeping what was generated. Shared prefixes are never reused across a
    change, whatever is chosen."""
    pack_weights: bool | str = "auto"
    """Keep derived copies of linear weights in the layout that the CPU multiplies fastest. They
    follow every weight change. ``"auto"`` packs where measuring showed a gain, ``False`` never."""
    seed: int | None = 0
    """Seeds the noise of requests that bring no seed of their own. Ranks of a distributed job draw
    differently under the same seed, those of one divided model alike (the first one's seed counts).
    ``None`` takes the one that torch was seeded with (a random one, if nobody did), which is the default
    of transformers' object."""
    cpu_offload_space: float | None = 0.0
    """GiB of host memory for pages of preempted sequences, which are copied back instead of computed
    again. ``None`` takes what the threshold allows; 0 computes them again."""
    cpu_offload_space_safety_threshold: float = 0.8
    """Share of the available memory that ``cpu_offload_space`` may take at the most; more is cut down to
    it with a warning."""
    default_compile_level: int = 0
    """0 to 3: ``torch.compile`` of the model, for a kind of step that has no compile config of its own:
    1 is mode "default", 2 "max-autotune-no-cudagraphs", 3 that with fixed shapes (``dynamic=False``).
    Under flash attention it leaves steps with prompts alone. A model that is compiled keeps torch's own
    linears and layers: on a CPU nothing is packed or fused then."""
    varlen_compile_config: Any = None
    """``CompileConfig`` of transformers, or a dict of its fields: how steps with prompts are compiled."""
    decode_compile_config: Any = None
    """The same for steps in which every sequence adds one token."""
    use_cuda_graph: bool | tuple[bool, bool] | None = None
    """Record CUDA graphs and replay them: for (steps with prompts, decode-only steps), or one answer
    for both. Only decode-only steps are ever recorded. ``None`` does so on a GPU if the attention needs
    no masks, or if a padding interval or asynchronous batching asks for it. Where it is asked for and
    not possible, a warning says why and steps run without."""
    q_padding_interval_size: int = 0
    """Recorded steps are padded to a multiple of so many rows; 0 means 64. Steps that are compiled with
    fixed shapes are padded to that times a power of two."""
    kv_padding_interval_size: int = 0
    """Recorded steps are padded to a multiple of so many keys per row, at most to the longest sequence
    that the model allows; 0 means 16384."""
    use_async_batching: bool | None = None
    """Launch a decode-only step before the tokens of the one before it are read, so that the device need
    not wait for the host. Needs CUDA graphs; where there are none, a warning says so and steps follow
    each other. ``None`` means no."""
    max_blocks_per_request: int | None = None
    """Pages of a sequence up to which its decode rows take the fast path of the backends ``flash`` and
    ``varlen`` (one query per row, a table of so many pages, no mask); longer ones go with the prompts. 0
    never takes it, and is forced where layers slide. ``None`` sizes the table by the sequences."""
    auto_switch_to_flash: bool = True
    """Let ``attn_implementation="auto"`` take ``flash`` on a GPU where flash-attn or ``kernels`` is
    installed; else it starts with ``varlen``."""
    cpu_group_timeout: float | None = 300.0
    """Seconds that a rank of a tensor-parallel model waits for the others; ``None`` for any time."""
    max_queue_size: int = 0
    """Requests that wait for a manager's loop to take them at the most; 0 for any number."""

    def __post_init__(self) -> None:
        if self.page_size is not None:
            require_int("page_size", self.page_size, low=MIN_PAGE_SIZE)
        for name in ("num_blocks", "max_memory", "max_batch_tokens", "max_requests_per_batch"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), low=1)
        if self.max_memory_percent is not None:
            require_number("max_memory_percent", self.max_memory_percent, low=0.0, high=1.0, low_open=True)
        if self.safety_margin is not None:
            require_number("safety_margin", self.safety_margin, low=0.0, high=1.0)
        if self.seed is not None:
            require_int("seed", self.seed, low=0, high=MAX_SEED)
        _require_choice("scheduler_type", self.scheduler_type, tuple(SCHEDULER_SAFETY_MARGINS))
        _require_choice("on_weight_change", self.on_weight_change, WEIGHT_CHANGE_POLICIES)
        _require_choice("pack_weights", self.pack_weights, ("auto", True, False))
        _require_choice("native_kernels", self.native_kernels, ("auto", True, False))
        _require_choice("allow_block_sharing", self.allow_block_sharing, (True, False))
        self._check_offloading()
        self._check_device_settings()
        if self.num_blocks is not None and self.max_memory is not None:
            raise ValueError(
                f"num_blocks={self.num_blocks} and max_memory={self.max_memory} both size the cache; "
                "give one of them"
            )
        if self.max_memory is not None and self.max_memory_percent is not None:
            raise ValueError(
                f"max_memory={self.max_memory} and max_memory_percent={self.max_memory_percent} both "
                "bound the cache; give one of them"
            )

    def _check_offloading(self) -> None:
        threshold = self.cpu_offload_space_safety_threshold
        require_number("cpu_offload_space_safety_threshold", threshold, low=0.0, high=1.0)
        if self.cpu_offload_space is not None:
            require_number("cpu_offload_space", self.cpu_offload_space, low=0.0, high=math.inf)

    def _check_device_settings(self) -> None:
        require_int("default_compile_level", self.default_compile_level, low=0, high=MAX_COMPILE_LEVEL)
        for name in ("varlen_compile_config", "decode_compile_config"):
            given = getattr(self, name)
            if not (given is None or isinstance(given, Mapping) or type(given).__name__ == "CompileConfig"):
                raise TypeError(
                    f"{name} has type {type(given).__name__}; give a CompileConfig or a dict of its fields"
                )
        for name in ("q_padding_interval_size", "kv_padding_interval_size", "max_queue_size"):
            require_int(name, getattr(self, name), low=0)
        if self.max_blocks_per_request is not None:
            require_int("max_blocks_per_request", self.max_blocks_per_request, low=0)
        if self.cpu_group_timeout is not None:
            require_number("cpu_group_timeout", self.cpu_group_timeout, low=0.0, high=math.inf, low_open=True)
        pairs = tuple((a, b) for a in (True, False) for b in (True, False))
        _require_choice("use_cuda_graph", self.use_cuda_graph, (None, True, False, *pairs))
        _require_choice("use_async_batching", self.use_async_batching, (None, True, False))
        _require_choice("auto_switch_to_flash", self.auto_switch_to_flash, (True, False))
        is_compiling = self.default_compile_level or (
            self.varlen_compile_config is not None or self.decode_compile_config is not None
        )
        if self.pack_weights is True and is_compiling:
            raise ValueError(
                "pack_weights=True and compile settings exclude each other: a compiled model keeps torch's "
                "own linears; leave pack_weights at 'auto'"
            )
        if self.use_async_batching and self.cuda_graphs is not None and not self.cuda_graphs[1]:
            raise ValueError(
                "use_async_batching=True needs CUDA graphs of decode-only steps and "
                f"use_cuda_graph={self.use_cuda_graph} has none; change one of them"
            )

    @property
    def cuda_graphs(self) -> tuple[bool, bool] | None:
        """``use_cuda_graph`` for (steps with prompts, decode-only steps); ``None`` to be decided."""
        graphs = self.use_cuda_graph
        return (graphs, graphs) if isinstance(graphs, bool) else graphs

    @property
    def resolved_safety_margin(self) -> float:
        """``safety_margin`` with the scheduler's default filled in."""
        if self.safety_margin is not None:
            return self.safety_margin
        return SCHEDULER_SAFETY_MARGINS[self.scheduler_type]

    @property
    def resolved_max_batch_tokens(self) -> int:
        """``max_batch_tokens`` with its default filled in."""
        return 8192 if self.max_batch_tokens is None else self.max_batch_tokens

    @property
    def resolved_max_requests(self) -> int:
        """``max_requests_per_batch`` with its default filled in."""
        return 1024 if self.max_requests_per_batch is None else self.max_requests_per_batch

    def changed(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {f.name: values[f.name] for f in fields(self) if values[f.name] != _default_of(f)}

    @classmethod
    def from_any(cls, config: Any) -> "EngineConfig":
        """Build from ``None``, an ``EngineConfig``, a dict, or transformers' config object.

        Raises:
            TypeError: ``config`` is none of these.
            ValueError: a key is unknown, or transformers' object asks for something not offered.
        """
        if config is None:
            return cls()
        if isinstance(config, cls):
            return config
        if isinstance(config, Mapping):
            return cls._from_mapping(config)
        if dataclasses.is_dataclass(config) and type(config).__name__ == "ContinuousBatchingConfig":
            return cls._from_transformers(config)
        raise TypeError(
            f"config has type {type(config).__name__}; give an EngineConfig, a dict of its fields, or "
            "transformers' ContinuousBatchingConfig"
        )

    @classmethod
    def _from_mapping(cls, config: Mapping[str, Any]) -> "EngineConfig":
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(config) - known - ALWAYS_SO - DEPRECATED)
        if unknown:
            names = ", ".join(f.name for f in fields(cls))
            raise ValueError(f"unknown settings {unknown}; known settings: {names}")
        values = {name: value for name, value in config.items() if name in known}
        return cls(**(values | _renewed(config)))

    @classmethod
    def _from_transformers(cls, config: Any) -> "EngineConfig":
        """Take over what we share; refuse what was changed from its default and is not known here."""
        known = {f.name for f in fields(cls)}
        values, refused = {}, []
        for f in fields(config):
            value = getattr(config, f.name)
            if f.name in known:
                values[f.name] = value
            elif f.name not in ALWAYS_SO | DEPRECATED and value != _default_of(f):
                refused.append(f"{f.name}={value!r}")
        if refused:
            raise ValueError(
                f"these ContinuousBatchingConfig settings are not offered by RolloutEngine: "
                f"{', '.join(refused)}; leave them at their defaults"
            )
        return cls(**values)


def _renewed(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a dict says under deprecated names, under the new ones."""
    values: dict[str, Any] = {}
    for name in sorted(DEPRECATED & set(config)):
        given, hint = config[name], "it has no effect any more"
        if name == "block_size":
            hint = "use page_size"
            if given is not None:
                values["page_size"] = given
        elif name == "use_default_compile_configs":
            hint = f"use default_compile_level ({MAX_COMPILE_LEVEL} is what True meant, 0 what False did)"
            if given is not None:
                values["default_compile_level"] = MAX_COMPILE_LEVEL if given else 0
        warnings.warn(f"the setting {name} is deprecated: {hint}", FutureWarning, stacklevel=4)
    doubled = sorted(set(values) & set(config))
    if doubled:
        raise ValueError(f"{doubled[0]} is given twice, once under its old name; keep the new one")
    return values


def _default_of(f: "dataclasses.Field[Any]") -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


def _require_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    # identity of type as well: 1 == True, and 1 is no answer to a yes/no question
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise ValueError(f"{name}={value!r}; allowed: {', '.join(map(repr, allowed))}")
