"""One step on the device: page moves, forward through the view, drawing. Also the probe.

The probe is one tiny forward at construction in which every attention layer shows what it needs
of the cache; what cannot be served exactly is refused there, with the layer named.

Letters: T packed tokens, D rows with logits, N query heads, K kv heads, H head dim, V vocabulary.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rollout.attention import IMPLEMENTATION, AttentionBackend, AttentionCall
from rollout.batch import StepBatch
from rollout.kv_cache import CacheLayout, KVCache, LayerShape
from rollout.types import UnsupportedModelError

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
IGNORED_OPTIONS = frozenset(
    {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids", "position_embeddings"}
)
"""Keyword arguments of attention layers that are either understood or without effect here. Any
other one that carries a tensor (a position bias, say) would be lost, so its layer is refused."""
PROBE_TOKENS = 2


def engine_mode() -> AbstractContextManager[object]:
    """No gradients, and no inference tensors even when the caller is in inference mode: what the
    engine keeps (pages, rotary caches of the view) must stay usable in any later mode."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What the probe learnt: the cache layout and which attention module is which layer."""

    layout: CacheLayout
    layer_of: Mapping[int, int]
    """``id(module)`` of the view's attention modules -> layer number."""
    vocab_size: int


@dataclass(slots=True)
class ProbeStep:
    """Records what each attention layer asks for; attends plainly so that the forward goes on."""

    layer_types: tuple[str, ...] | None
    config_window: int | None
    shapes: list[LayerShape] = field(default_factory=list)
    layer_of: dict[int, int] = field(default_factory=dict)
    dtype: torch.dtype | None = None

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
        self.shapes.append(
            LayerShape(key.shape[1], key.shape[-1], value.shape[-1], self._window(layer, options))
        )
        self.dtype = (
            torch.get_autocast_dtype(value.device.type)
            if torch.is_autocast_enabled(value.device.type)
            else value.dtype
        )
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()

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
            return window
        if self.layer_types[layer] == "full_attention":
            return None
        return window if window is not None else self.config_window


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step's attention: write keys and values to pages, then attend through the backend."""

    batch: StepBatch
    cache: KVCache
    backend: AttentionBackend
    layer_of: Mapping[int, int]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        options: Mapping[str, object],
    ) -> Tensor:
        """Attends for one layer; see ``AttentionStep``."""
        layer = self.layer_of[id(module)]
        dtype = self.cache.layout.dtype
        group = self.batch.groups[self.cache.group_of(layer)]
        pages = self.cache.layer(layer)
        scaling, softcap, sinks = options.get("scaling"), options.get("softcap"), options.get("s_aux")
        call = AttentionCall(
            query=query[0].to(dtype),
            key=key[0].to(dtype),
            value=value[0].to(dtype),
            scaling=scaling if isinstance(scaling, float) else query.shape[-1] ** -0.5,
            softcap=softcap if isinstance(softcap, float) else None,
            sinks=sinks if isinstance(sinks, Tensor) else None,
        )
        pages.write(group.slots, call.key, call.value)
        return self.backend.attend(call, pages, group).unsqueeze(0)


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
    step = ProbeStep(
        None if layer_types is None else tuple(layer_types), getattr(config, "sliding_window", None)
    )
    tokens = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device=device)
    positions = torch.arange(PROBE_TOKENS, device=device).unsqueeze(0)
    logits = view(input_ids=tokens, position_ids=positions, use_cache=False, rollout_step=step).logits
    if not step.shapes or len(step.shapes) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"{len(step.shapes)} of {config.num_hidden_layers} layers attend through transformers' "
            "AttentionInterface; layers of another kind (linear attention, state space, custom "
            "attention) cannot be served"
        )
    assert step.dtype is not None
    layout = CacheLayout.from_layers(step.shapes, step.dtype, device)
    return ModelPlan(layout, step.layer_of, logits.shape[-1])


def forward(
    view: nn.Module, plan: ModelPlan, batch: StepBatch, cache: KVCache, backend: AttentionBackend
) -> Tensor:
    """Run the view over a step: logits ``[D, V]`` of the rows that draw."""
    for g, group in enumerate(batch.groups):
        # copies first: a page that somebody else clears may be a copy's source
        if group.copy_sources is not None and group.copy_targets is not None:
            cache.copy_pages(g, group.copy_sources, group.copy_targets)
        if group.fresh_pages is not None:
            cache.clear_pages(g, group.fresh_pages)
    logits: Tensor = view(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.logit_index,
        rollout_step=PagedStep(batch, cache, backend, plan.layer_of),
    ).logits[0]
    if logits.shape[0] != batch.logit_index.shape[0]:  # a model that ignores logits_to_keep
        logits = logits.index_select(0, batch.logit_index)
    return logits


def set_attention(view: nn.Module) -> None:
    """Make the view's layers call our attention function: only the view's own configs change."""
    for module in view.modules():
        config = vars(module).get("config")
        if config is not None and "_attn_implementation_internal" in vars(config):
            config._attn_implementation = IMPLEMENTATION


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
