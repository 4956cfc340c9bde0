"""All decoder layers of a view as one module, which runs them in one compiled call where every token attends
by itself: in decode steps, and in steps with prompts that are short.

Calling a layer costs Python some hundred microseconds, which is a third of a step with few rows. Steps with
longer prompts go through the fused layers one by one.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from rollout.attention import StackStep, attend_to_itself
from rollout.fused import FusedLayer
from rollout.native import HEAD_DIMS, DecodeCall, DecodeRows, Kernels, LayerPlace, LayerWeights
from rollout.packing import PackedLinears
from rollout.types import RankError

logger = logging.getLogger("rollout")

TRIED_TOKENS = 4


class LayerStack(nn.Module):
    """Fused layers that follow each other, called like one.

    Args:
        layers: each is given what the one before returned.
        kernels: those that run all of them at once.
        packed: the layers' linears.
    """

    def __init__(self, layers: Sequence[FusedLayer], kernels: Kernels, packed: PackedLinears) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._in_order = tuple(layers)
        self._kernels, self._packed = kernels, packed
        self._asked = [(layer.attention, layer.options) for layer in layers]
        self._call: DecodeCall | None = None
        self._stamps: tuple[object, ...] = ()  # of the weights and pages that the call knows

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        rollout_step: StackStep,
        **kwargs: object,
    ) -> Tensor:
        """``[1, T, D] -> [1, T, D]``; see ``FusedLayer`` about ``kwargs``."""
        cos, sin = position_embeddings
        hidden = hidden_states[0]
        rows = rollout_step.decode_rows()
        if rows is not None and cos.dtype == hidden.dtype:
            call = self._call_for(rollout_step, hidden.dtype)
            if call is not None:
                return call(hidden.contiguous(), cos, sin, rows)[None]
        for layer in self._in_order:
            hidden_states = layer(
                hidden_states, position_embeddings=position_embeddings, rollout_step=rollout_step
            )
        return hidden_states

    def _call_for(self, step: StackStep, dtype: torch.dtype) -> DecodeCall | None:
        """The call for the step's pages and the weights in ``dtype``, if it is that of the pages, too."""
        if self._stamps != (dtype, step.pages_stamp, self._packed.stamp):
            self._call = None
            places, weights = step.layer_places(self._asked), panel_weights(self._in_order)
            assert weights is not None, "layers in parts are not stacked"
            if dtype == places[0].keys.dtype == weights[0].qkv.dtype:
                self._call = self._kernels.decode_call(weights, places)
            self._stamps = dtype, step.pages_stamp, self._packed.stamp  # after the weights were made
        return self._call


def panel_weights(layers: Sequence[FusedLayer]) -> list[LayerWeights] | None:
    """The layers' weights, if each has them for compiled halves."""
    weights = []
    for layer in layers:
        of_layer = layer.weights(layer.dtype)
        if of_layer is None:
            return None
        weights.append(of_layer)
    return weights


class Link(nn.Module):
    """Stands in for a layer during one forward and remembers what it was called with."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        assert isinstance(layer, FusedLayer)
        self.layer = layer
        self.calls: list[tuple[Tensor, object, Tensor]] = []

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        """The layer's output."""
        output: Tensor = self.layer(hidden_states, **kwargs)
        self.calls.append((hidden_states, kwargs["position_embeddings"], output))
        return output

    def leads_to(self, other: "Link") -> bool:
        """Whether each was called once, the other on what this one returned and with the same angles."""
        if len(self.calls) != 1 or len(other.calls) != 1:
            return False
        (_, angles, output), (given, other_angles, _) = self.calls[0], other.calls[0]
        return given is output and angles is other_angles


@dataclass(frozen=True, slots=True)
class _OwnValuesStep:
    """Each token attends to itself alone: layers are compared, not attention."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        options: Mapping[str, object],
    ) -> Tensor:
        """See ``AttentionStep``."""
        return attend_to_itself(query, value)

    def attend_tokens(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, object]
    ) -> Tensor:
        """See ``TokenStep``."""
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    def decode_rows(self) -> list[DecodeRows] | None:
        """See ``StackStep``."""
        return None

    def layer_places(self, asked: Sequence[tuple[nn.Module, Mapping[str, object]]]) -> list[LayerPlace]:
        """See ``StackStep``."""
        raise AssertionError("nothing is decoded")

    @property
    def pages_stamp(self) -> tuple[object, int]:
        """See ``StackStep``."""
        return None, 0


def stack_layers(view: nn.Module, kernels: Kernels, packed: PackedLinears, device: torch.device) -> int:
    """Put one stack in place of each list of fused layers that follow each other; returns their number.

    Costs two passes of four tokens through the view: one to see which layers follow each other, and one
    to see that the model takes a stack for its layers.
    """
    if kernels.layers is None:
        return 0
    lists = [each for each in view.modules() if isinstance(each, nn.ModuleList) and _can_stack(each)]
    if not lists:
        return 0
    before = [dict(each._modules) for each in lists]
    is_done = False
    try:
        chains = [_linked(each) for each in lists]
        expected = _logits(view, device)
        count = 0
        for each, chain, layers in zip(lists, chains, before, strict=True):
            each._modules = dict(layers)
            if all(one.leads_to(other) for one, other in pairwise(chain)):
                each._modules = {"0": LayerStack([link.layer for link in chain], kernels, packed)}
                count += 1
        if not torch.equal(_logits(view, device), expected):
            raise ValueError("the model computes something else with them")
        is_done = True
    except RankError:
        raise
    except Exception as error:  # the model's own code, met in a way it does not expect
        logger.info("layers are not stacked: %s: %s", type(error).__name__, error)
        count = 0
    finally:
        if not is_done:
            for each, layers in zip(lists, before, strict=True):
                each._modules = layers
    return count


def unstack_layers(view: nn.Module) -> None:
    """Put the fused layers back."""
    for parent in list(view.modules()):
        stack = parent._modules.get("0")
        if isinstance(stack, LayerStack):
            parent._modules = dict(stack.layers._modules)


def _can_stack(layers: nn.ModuleList) -> bool:
    """Whether a decode step's layers could be one call."""
    fused = [layer for layer in layers if isinstance(layer, FusedLayer)]
    weights = panel_weights(fused)
    if weights is None or len(fused) < max(2, len(layers)) or len({each.sizes for each in weights}) > 1:
        return False
    for each in weights:
        each.check()
    return weights[0].head_dim in HEAD_DIMS


def _linked(layers: nn.ModuleList) -> list[Link]:
    """Links that have taken the place of the layers."""
    chain = [Link(layer) for layer in layers]
    layers._modules = dict(zip(layers._modules, chain, strict=True))
    return chain


def _logits(view: nn.Module, device: torch.device) -> Tensor:
    positions = torch.arange(TRIED_TOKENS, device=device)[None]
    logits: Tensor = view(
        input_ids=positions,  # not the padding token alone, whose embedding may be all zeros
        position_ids=positions,
        use_cache=False,
        rollout_step=_OwnValuesStep(),
    ).logits
    return logits
