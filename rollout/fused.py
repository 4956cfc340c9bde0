"""Decoder layers of the view with everything but linears and attention in compiled kernels.

A layer is known by what it does, not by its class: if its modules are those of a pre-norm decoder
layer with rotary embedding and a gated MLP, the fused one is run beside it on a small input, and takes
its place only if queries, keys, values and the result agree. Any other layer stays as it is. The
linears are called as modules, so adapters and packed weights work as before.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rollout.attention import TokenStep, attend_to_itself
from rollout.native import LANES, Kernels
from rollout.packing import JointLinear

logger = logging.getLogger("rollout")

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
MLP = ("gate_proj", "up_proj", "down_proj")
TRIAL_TOKENS = 4
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6}
"""Largest difference from the plain layer, relative to its largest number: rounding, not formulas."""


@dataclass(frozen=True, slots=True)
class Attended:
    """What a layer handed to its attention, and what it got back."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: Mapping[str, object]
    output: Tensor


@dataclass(slots=True)
class RecordingStep:
    """Remembers what a plain layer asks of its attention; answers with the tokens' own values."""

    seen: list[Attended] = field(default_factory=list)

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
        output = attend_to_itself(query, value)
        self.seen.append(Attended(query, key, value, options, output))
        return output


@dataclass(slots=True)
class ReplayingStep:
    """Gives the fused layer the plain one's answer, and notes whether it asked the same."""

    plain: Attended
    differs_in: list[str] = field(default_factory=list)

    def attend_tokens(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, object]
    ) -> Tensor:
        """See ``TokenStep``."""
        plain = self.plain
        for name, ours, theirs in (
            ("queries", query, plain.query),
            ("keys", key, plain.key),
            ("values", value, plain.value),
        ):
            if not _agree(ours, theirs[0].transpose(0, 1)):
                self.differs_in.append(name)
        return plain.output[0]


class Norm(NamedTuple):
    """A root-mean-square norm's own tensor and number."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: nn.Module) -> "Norm":
        """Read off a norm of transformers.

        Raises:
            ValueError: it keeps something else than a weight and ``variance_epsilon``.
        """
        weight, eps = module._parameters.get("weight"), vars(module).get("variance_epsilon")
        if weight is None or eps is None or len(module._parameters) != 1 or weight.numel() % LANES:
            raise ValueError(f"{type(module).__name__} is no norm with a weight and variance_epsilon")
        return cls(weight, eps)


class FusedLayer(nn.Module):
    """A decoder layer on the modules of ``plain``; see the top of this file.

    Raises:
        ValueError: a norm of the layer is of another kind.
    """

    def __init__(self, plain: nn.Module, kernels: Kernels, asked: Attended) -> None:
        super().__init__()
        self.plain = plain
        self._kernels = kernels
        self._options = _constant_options(asked.options)
        self._num_queries, self._num_keys = asked.query.shape[1], asked.key.shape[1]
        attention, mlp = plain.get_submodule("self_attn"), plain.get_submodule("mlp")
        # not registered as modules a second time: they stay those of the plain layer
        self._qkv = JointLinear([attention.get_submodule(name) for name in ATTENTION[:3]])
        self._gate_up = JointLinear([mlp.get_submodule(name) for name in MLP[:2]])
        self._out = JointLinear([attention.get_submodule(ATTENTION[3])])
        self._down = JointLinear([mlp.get_submodule(MLP[2])])
        self._attention = (attention,)
        self._input_norm = Norm.of(plain.get_submodule("input_layernorm"))
        self._mlp_norm = Norm.of(plain.get_submodule("post_attention_layernorm"))
        norms = [Norm.of(attention.get_submodule(n)) for n in HEAD_NORMS if n in attention._modules]
        if len({norm.eps for norm in norms}) > 1:
            raise ValueError("its query and key norms have different eps")
        self._head_norms = ((norms[0].weight, norms[1].weight), norms[0].eps) if norms else ()

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        rollout_step: TokenStep,
        **kwargs: object,
    ) -> Tensor:
        """``[1, T, D] -> [1, T, D]``; what else transformers passes has no effect on such a layer."""
        kernels = self._kernels
        cos, sin = position_embeddings[0][0], position_embeddings[1][0]
        queries, keys, dim = self._num_queries, self._num_keys, cos.shape[-1]
        hidden = hidden_states[0]
        qkv = self._qkv(kernels.rms_norm(hidden, *self._input_norm))
        rotated = kernels.rotate(qkv, queries, keys, cos, sin, *self._head_norms)
        value = qkv[:, (queries + keys) * dim :].unflatten(1, (keys, -1))
        attended = rollout_step.attend_tokens(
            self._attention[0], rotated[:, :queries], rotated[:, queries:], value, self._options
        )
        hidden, normed = kernels.add_rms_norm(hidden, self._out(attended.flatten(1)), *self._mlp_norm)
        gated = kernels.silu_mul(self._gate_up(normed))
        return (hidden + self._down(gated))[None]


class Trial(nn.Module):
    """Stands in for a layer during one forward and finds out whether it can be fused."""

    def __init__(self, plain: nn.Module, kernels: Kernels) -> None:
        super().__init__()
        self.plain = plain
        self.result = plain
        self._kernels = kernels

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        """The plain layer's output; :attr:`result` is the layer to use from now on."""
        step = RecordingStep()
        expected: Tensor = self.plain(hidden_states, **{**kwargs, "rollout_step": step})
        try:
            (asked,) = step.seen
            fused = FusedLayer(self.plain, self._kernels, asked)
            replay = ReplayingStep(asked)
            output = fused(hidden_states, **{**kwargs, "rollout_step": replay})
            differs_in = replay.differs_in + ([] if _agree(output, expected) else ["results"])
            if differs_in:
                raise ValueError(f"its {', '.join(differs_in)} differ")
            self.result = fused
        except Exception as error:  # whatever it is: the plain layer is there
            logger.info("%s is not fused: %s: %s", type(self.plain).__name__, type(error).__name__, error)
        return expected


def fuse_layers(view: nn.Module, kernels: Kernels, device: torch.device) -> int:
    """Put fused layers in place of those that agree with them; returns how many there are.

    Costs two passes of four tokens through the view.
    """
    trials: list[tuple[nn.Module, str, Trial]] = []
    for parent in list(view.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and _looks_fusible(child):
                trials.append((parent, name, Trial(child, kernels)))
    for parent, name, trial in trials:
        parent._modules[name] = trial
    try:
        tokens = torch.arange(TRIAL_TOKENS, device=device)[None]
        view(input_ids=tokens, position_ids=tokens * 3, use_cache=False, rollout_step=RecordingStep())
    finally:
        for parent, name, trial in trials:
            parent._modules[name] = trial.result
    return sum(isinstance(trial.result, FusedLayer) for *_, trial in trials)


def unfuse_layers(view: nn.Module) -> None:
    """Put the plain layers back."""
    for parent in list(view.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, FusedLayer):
                parent._modules[name] = child.plain


def _looks_fusible(module: nn.Module) -> bool:
    """Whether the module's children, and theirs, are those of a layer that could be fused."""
    if module._modules.keys() != LAYER:
        return False
    attention, mlp = module.get_submodule("self_attn")._modules, module.get_submodule("mlp")._modules
    return (
        attention.keys() - set(HEAD_NORMS) == set(ATTENTION)
        and len(attention.keys() & set(HEAD_NORMS)) in (0, 2)
        and mlp.keys() - {"act_fn"} == set(MLP)
    )


def _constant_options(options: Mapping[str, object]) -> Mapping[str, object]:
    """The options of a layer's attention that are the same at every step.

    Raises:
        ValueError: it passes a tensor, which may be another one at the next step.
    """
    tensors = [name for name, value in options.items() if isinstance(value, Tensor)]
    if set(tensors) - {"position_ids"}:
        raise ValueError(f"it passes tensors to its attention: {', '.join(tensors)}")
    return {name: value for name, value in options.items() if name not in tensors}


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    coarse = ours.dtype if ours.dtype.itemsize < theirs.dtype.itemsize else theirs.dtype
    difference, size = (ours.float() - theirs.float()).abs().max(), theirs.float().abs().max()
    return bool(difference <= TOLERANCE[coarse] * size)
