"""Decoder layers of the view in compiled kernels.

A layer is known by what it does, not by its class: if its modules are those of a pre-norm decoder
layer with rotary embedding and a gated MLP, the fused one is run beside it on a small input, and takes
its place only if queries, keys, values and the result agree, at both ends of the positions. Any other
layer stays as it is.

Where the kernels make all of the layer's products, what comes before its attention is one call and what
comes after it another. Else (an adapter around a linear, nothing packed, autocast, an inner size that is no
multiple of 32, another CPU) the linears are called as modules, and the kernels do what is between them.
"""

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rollout.attention import TokenStep, attend_to_itself
from rollout.native import LANES, Kernels, LayerWeights
from rollout.packing import JointLinear
from rollout.types import RankError

logger = logging.getLogger("rollout")

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
MLP = ("gate_proj", "up_proj", "down_proj")
TRIAL_SCALE = 0.02
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
        if weight is None or eps is None or len(module._parameters) != 1:
            raise ValueError(f"{type(module).__name__} is no norm with a weight and variance_epsilon")
        if weight.numel() % LANES or not weight.is_contiguous():
            raise ValueError(f"a weight {tuple(weight.shape)} with strides {weight.stride()} has no code")
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
        self.options = _constant_options(asked.options)
        """What the layer passes to its attention."""
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
        self._head_norms = (norms[0].weight, norms[1].weight) if norms else None
        self._head_eps = norms[0].eps if norms else 0.0

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        rollout_step: TokenStep,
        **kwargs: object,
    ) -> Tensor:
        """``[1, T, D] -> [1, T, D]``; without what else transformers passes the trial saw no difference."""
        hidden, (cos, sin) = hidden_states[0].contiguous(), position_embeddings
        layers, weights = self._kernels.layers, self.weights(hidden.dtype)
        if layers is None or weights is None or cos.dtype != hidden.dtype:
            return self._in_parts(hidden, cos, sin, rollout_step)[None]
        sizes = self._num_queries, self._num_keys, self._num_keys
        query, key, value = layers.start(hidden, weights, cos, sin).split_with_sizes(sizes, dim=1)
        attended = rollout_step.attend_tokens(self.attention, query, key, value, self.options)
        return layers.end(hidden, attended.flatten(1), weights)[None]

    @property
    def attention(self) -> nn.Module:
        """The plain layer's attention."""
        return self._attention[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states."""
        return self._input_norm.weight.dtype

    def weights(self, dtype: torch.dtype) -> LayerWeights | None:
        """For compiled halves in ``dtype``, where kernels make all products and gates end with a panel."""
        qkv, out = self._qkv.panels(dtype), self._out.panels(dtype)
        gate_up, down = self._gate_up.panels(dtype), self._down.panels(dtype)
        if qkv is None or out is None or gate_up is None or down is None or not gate_up.has_whole_halves:
            return None
        return LayerWeights(
            input_norm=self._input_norm.weight,
            input_eps=self._input_norm.eps,
            head_norms=self._head_norms,
            head_eps=self._head_eps,
            qkv=qkv,
            num_queries=self._num_queries,
            num_keys=self._num_keys,
            attention_out=out,
            mlp_norm=self._mlp_norm.weight,
            mlp_eps=self._mlp_norm.eps,
            gate_up=gate_up,
            down=down,
        )

    def _in_parts(self, hidden: Tensor, cos: Tensor, sin: Tensor, rollout_step: TokenStep) -> Tensor:
        """``[T, D] -> [T, D]``, the linears called by themselves."""
        kernels = self._kernels
        queries, keys, dim = self._num_queries, self._num_keys, cos.shape[-1]
        qkv = self._qkv(kernels.rms_norm(hidden, *self._input_norm))
        rotated = kernels.rotate(qkv, queries, keys, cos, sin, self._head_norms, self._head_eps)
        value = qkv[:, (queries + keys) * dim :].unflatten(1, (keys, -1))
        attended = rollout_step.attend_tokens(
            self.attention, rotated[:, :queries], rotated[:, queries:], value, self.options
        )
        hidden, normed = kernels.add_rms_norm(hidden, self._out(attended.flatten(1)), *self._mlp_norm)
        gated = kernels.silu_mul(self._gate_up(normed))
        return hidden + self._down(gated)


class Trial(nn.Module):
    """Stands in for a layer during one forward and finds out whether it can be fused.

    The two are compared on small random hidden states, beside which what the branches add shows, and
    under random norm weights, since many orders of operations are one while a norm's weights are 1.
    """

    def __init__(self, plain: nn.Module, kernels: Kernels) -> None:
        super().__init__()
        self.plain = plain
        self.result = plain
        self._kernels = kernels

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        """The plain layer's output; :attr:`result` is the layer to use from now on."""
        output: Tensor = self.plain(hidden_states, **{**kwargs, "rollout_step": RecordingStep()})
        try:
            self.result = self._fused(hidden_states, kwargs)
        except Exception as error:  # whatever it is: the plain layer is there
            logger.info("%s is not fused: %s: %s", type(self.plain).__name__, type(error).__name__, error)
        return output

    def _fused(self, hidden_states: Tensor, kwargs: Mapping[str, object]) -> FusedLayer:
        """The fused layer.

        Raises:
            ValueError: it does not compute the same.
        """
        generator = torch.Generator().manual_seed(0)  # private: no global state
        x = torch.randn(hidden_states.shape, generator=generator).to(hidden_states) * TRIAL_SCALE
        twin, step = _with_random_norms(self.plain, generator), RecordingStep()
        expected = twin(x, **{**kwargs, "rollout_step": step})
        (asked,) = step.seen
        replay = ReplayingStep(asked)
        found = FusedLayer(twin, self._kernels, asked)(x, **{**kwargs, "rollout_step": replay})
        differs_in = replay.differs_in + ([] if _agree(found, expected) else ["results"])
        if not _is_silu(self.plain.get_submodule("mlp"), generator):
            differs_in.append("activations")
        if differs_in:
            raise ValueError(f"its {', '.join(differs_in)} differ")
        return FusedLayer(self.plain, self._kernels, asked)


def fuse_layers(view: nn.Module, kernels: Kernels, device: torch.device, position_limit: int) -> int:
    """Put fused layers in place of those that agree with them; returns how many there are.

    Args:
        view: ready to run on ``device``.
        kernels: compiled ones.
        position_limit: tokens of a sequence; layers are tried at the ends and the middle of that.

    Costs three passes of four tokens through the view.
    """
    trials: list[tuple[nn.Module, str, Trial]] = []
    for parent in list(view.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and _looks_fusible(child):
                trials.append((parent, name, Trial(child, kernels)))
    if not trials:
        return 0
    for parent, name, trial in trials:
        parent._modules[name] = trial
    last = position_limit - 1
    positions = torch.tensor([[0, min(3, last), last // 2, last]], device=device)
    try:
        view(
            input_ids=torch.zeros_like(positions),
            position_ids=positions,
            use_cache=False,
            rollout_step=RecordingStep(),
        )
    except RankError:
        raise
    except Exception as error:  # the model's own code, met in a way it does not expect
        logger.info("no layer is fused: %s: %s", type(error).__name__, error)
        for *_, trial in trials:
            trial.result = trial.plain
    finally:
        for parent, name, trial in trials:
            parent._modules[name] = trial.result
    count = sum(isinstance(trial.result, FusedLayer) for *_, trial in trials)
    logger.info("%d of %d decoder layers are fused", count, len(trials))
    return count


def unfuse_layers(view: nn.Module) -> None:
    """Put the plain layers back."""
    for parent in list(view.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, FusedLayer):
                parent._modules[name] = child.plain


def _looks_fusible(module: nn.Module) -> bool:
    """Whether the modules are those of a layer that could be fused, and hold no tensors of their own."""
    if module._modules.keys() != LAYER:
        return False
    attention, mlp = module.get_submodule("self_attn"), module.get_submodule("mlp")
    names = attention._modules.keys()
    return (
        names - set(HEAD_NORMS) == set(ATTENTION)
        and len(names & set(HEAD_NORMS)) in (0, 2)
        and mlp._modules.keys() == {*MLP, "act_fn"}
        and not any(each._parameters or each._buffers for each in (module, attention, mlp))
    )


def _with_random_norms(plain: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy of the layer with norms of its own; everything else is shared."""
    attention, mlp = plain.get_submodule("self_attn"), plain.get_submodule("mlp")
    shared = [
        parent.get_submodule(name) for parent, names in ((attention, ATTENTION), (mlp, MLP)) for name in names
    ]
    shared += [vars(each)["config"] for each in (plain, attention, mlp) if "config" in vars(each)]
    twin: nn.Module = copy.deepcopy(plain, {id(each): each for each in shared})
    twin_attention = twin.get_submodule("self_attn")
    norms = [twin.get_submodule(name) for name in ("input_layernorm", "post_attention_layernorm")]
    norms += [twin_attention.get_submodule(n) for n in HEAD_NORMS if n in twin_attention._modules]
    for norm in norms:
        weight = Norm.of(norm).weight
        drawn = torch.rand(weight.shape, generator=generator) + 0.5
        norm.weight = nn.Parameter(drawn.to(weight), requires_grad=False)
    return twin


def _is_silu(mlp: nn.Module, generator: torch.Generator) -> bool:
    x = torch.randn(64, generator=generator) * 4
    return _agree(torch.nn.functional.silu(x), mlp.get_submodule("act_fn")(x))


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
