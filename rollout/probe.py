"""What a model needs of the engine, found out once and refused by name where it cannot be served.

The probe is one tiny forward in which every attention layer shows what it asks of the cache. The
other facts (positions, EOS ids, device) are read off the model's configs and parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rollout.attention import AttentionTraits, attend_to_itself
from rollout.kv_cache import CacheLayout, LayerShape
from rollout.types import RankError, UnsupportedModelError

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
IGNORED_OPTIONS = frozenset(
    {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids", "position_embeddings"}
)
"""Keyword arguments of attention layers that are either understood or without effect here. Any
other one that carries a tensor (a position bias, say) would be lost, so its layer is refused."""
PROBE_TOKENS = 2


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What the probe learnt: the cache layout and which attention module is which layer."""

    layout: CacheLayout
    traits: AttentionTraits
    layer_of: Mapping[int, int]
    """``id(module)`` of the view's attention modules -> layer number."""
    vocab_size: int
    keeps_logits: bool
    """Whether the model computes logits only for the rows named by ``logits_to_keep``."""


@dataclass(slots=True)
class ProbeStep:
    """Records what each attention layer asks for; attends plainly so that the forward goes on."""

    layer_types: tuple[str, ...] | None
    config_window: int | None
    shapes: list[LayerShape] = field(default_factory=list)
    layer_of: dict[int, int] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    has_softcap: bool = False
    has_sinks: bool = False

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        options: Mapping[str, object],
    ) -> Tensor:
        """Checks one layer; see ``AttentionStep``."""
        layer = len(self.shapes)
        name = f"attention layer {layer} ({type(module).__name__})"
        self._refuse_unservable(name, module, query, key, attention_mask, options)
        self.layer_of[id(module)] = layer
        self.has_softcap |= options.get("softcap") is not None
        self.has_sinks |= options.get("s_aux") is not None
        self.shapes.append(
            LayerShape(key.shape[1], key.shape[-1], value.shape[-1], self._window(layer, options))
        )
        self.dtype = (
            torch.get_autocast_dtype(value.device.type)
            if torch.is_autocast_enabled(value.device.type)
            else value.dtype
        )
        return attend_to_itself(query, value)

    def _refuse_unservable(
        self,
        name: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        attention_mask: Tensor | None,
        options: Mapping[str, object],
    ) -> None:
        if id(module) in self.layer_of:
            raise UnsupportedModelError(f"{name} attends twice in one forward, which is not supported")
        if query.shape[0] != 1 or query.shape[2] != PROBE_TOKENS or key.shape[2] != PROBE_TOKENS:
            raise UnsupportedModelError(
                f"{name} got queries {tuple(query.shape)} and keys {tuple(key.shape)} for {PROBE_TOKENS} "
                "tokens: cross attention and prompt or prefix tuning are not supported"
            )
        if attention_mask is not None:
            raise UnsupportedModelError(f"{name} brings an attention mask of its own, which is not supported")
        if options.get("is_causal") is False or vars(module).get("is_causal") is False:
            raise UnsupportedModelError(f"{name} is not causal; only decoder-only models can generate here")
        for option in ("scaling", "softcap"):
            if not isinstance(options.get(option), Real | None):
                raise UnsupportedModelError(f"{name} passes {option}={options[option]!r}, not a number")
        unknown = sorted(
            key for key, value in options.items() if isinstance(value, Tensor) and key not in IGNORED_OPTIONS
        )
        if unknown:
            raise UnsupportedModelError(f"{name} passes {', '.join(unknown)}, which is not supported")

    def _window(self, layer: int, options: Mapping[str, object]) -> int | None:
        """The layer's sliding window. ``layer_types`` decides where the config has them, since
        some models pass a window to every layer."""
        passed = options.get("sliding_window")
        window = passed if isinstance(passed, int) else None
        if self.layer_types is None:
            if window is None and self.config_window is not None:
                raise UnsupportedModelError(
                    f"the config has sliding_window={self.config_window} and attention layer {layer} passes "
                    "none; whether it slides cannot be known, so the model is not supported"
                )
            return window
        if self.layer_types[layer] == "full_attention":
            return None
        return window if window is not None else self.config_window


def probe(view: nn.Module, config: PreTrainedConfig, device: torch.device) -> ModelPlan:
    """Find out what the view's layers need of the cache.

    Raises:
        UnsupportedModelError: a layer cannot be served exactly.
    """
    # transformers' own objects: which settings a config has depends on its model type
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError("encoder-decoder models and cross attention are not supported")
    layer_types = getattr(config, "layer_types", None)
    for layer, kind in enumerate(layer_types or ()):
        if kind not in SERVED_LAYER_TYPES:
            raise UnsupportedModelError(
                f"layer {layer} has type {kind!r}; supported: {', '.join(sorted(SERVED_LAYER_TYPES))}"
            )
    slides = getattr(config, "use_sliding_window", True)
    step = ProbeStep(
        None if layer_types is None else tuple(layer_types),
        getattr(config, "sliding_window", None) if slides else None,
    )
    tokens = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device=device)
    positions = torch.arange(PROBE_TOKENS, device=device).unsqueeze(0)
    try:
        logits = view(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=torch.tensor([1], device=device),
            rollout_step=step,
        ).logits
    except (UnsupportedModelError, RankError):
        raise
    except Exception as error:  # whatever a model's own code raises when it is served like this
        raise UnsupportedModelError(
            f"a forward of {type(view).__name__} with paged attention fails: {type(error).__name__}: {error}"
        ) from error
    if not step.shapes or len(step.shapes) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"{len(step.shapes)} of {config.num_hidden_layers} layers attend through transformers' "
            "AttentionInterface; layers of another kind (linear attention, state space, custom "
            "attention) cannot be served"
        )
    assert step.dtype is not None
    layout = CacheLayout.from_layers(step.shapes, step.dtype, device)
    traits = AttentionTraits(has_softcap=step.has_softcap, has_sinks=step.has_sinks)
    return ModelPlan(layout, traits, step.layer_of, logits.shape[-1], keeps_logits=logits.shape[1] == 1)


def position_limit(config: PreTrainedConfig) -> int:
    """How many tokens a sequence may have.

    Rotary embeddings of type "dynamic" and "longrope" change their frequencies for *all* rows of a
    batch once one row is longer than the original training length, so that length is the limit:
    one request must never change another's numbers.
    """
    limit: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for kind in kinds:
        if kind.get("rope_type") in ("dynamic", "longrope"):
            original = kind.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, original or limit)
    return limit


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Union of the EOS ids that generation config, model config and tokenizer name."""
    named: list[int | list[int] | None] = [model.config.get_text_config().eos_token_id]
    if model.generation_config is not None:
        named.append(model.generation_config.eos_token_id)
    if tokenizer is not None:
        named.append(tokenizer.eos_token_id)
    ids: set[int] = set()
    for value in named:
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return frozenset(ids)


def single_device(model: nn.Module) -> torch.device:
    """The device of all parameters.

    Raises:
        ValueError: they lie on several devices.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise ValueError(f"the model's parameters lie on {sorted(map(str, devices))}; put all on one device")
    return devices.pop()
