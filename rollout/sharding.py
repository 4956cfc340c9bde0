"""A view on one rank's shards: each module works on plain local tensors, with the sums and joins that
transformers' tensor parallelism does around it.

transformers patches ``forward`` of each module in its plan with a style (colwise, rowwise, ...), and its
parameters are DTensors. The view takes the shards out of them, so that derived copies and fused layers
work on them as on any linear, and talks through the engine's ranks, so that every wait has its limit.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias

from torch import Tensor, nn

from rollout.parallel import Ranks, share_len
from rollout.types import UnsupportedModelError
from rollout.weights import is_sharded, reachable, shard_of

STYLE = "TensorParallelLayer"
"""transformers' base class of styles; it moved between versions, so it is known by name."""
INSTALLERS = ("transformers.distributed", "transformers.integrations.tensor_parallel")
"""Modules that patch ``forward``."""


class OverRanks(nn.Module):
    """Stands around a module that works on this rank's shards."""

    def __init__(self, part: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part = part
        self._ranks = ranks

    @property
    def weight(self) -> Tensor:
        """The part's own, which adapters look at for its dtype."""
        return self.part.get_parameter("weight")


class SumOverRanks(OverRanks):
    """A module that gives a part of a sum on each rank: row-wise linears, experts.

    Args:
        part: the module on this rank's shards, without bias.
        ranks: the ranks to sum over.
        bias: added once, after the sum.
        columns: the input's columns that are this rank's, where every rank has the whole input.
    """

    def __init__(
        self, part: nn.Module, ranks: Ranks, bias: Tensor | None = None, columns: slice | None = None
    ) -> None:
        super().__init__(part, ranks)
        self._bias, self._columns = (bias,), columns  # in a tuple: no parameter of this module

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The whole module's output, on every rank."""
        if self._columns is not None:
            input = input[..., self._columns]
        out = self._ranks.sum(self.part(input, *args, **kwargs))
        (bias,) = self._bias
        return out if bias is None else out + bias.to(out.dtype)


class JoinOverRanks(OverRanks):
    """A module that gives ``full_len`` columns in all, a slice of them on each rank."""

    def __init__(self, part: nn.Module, ranks: Ranks, full_len: int) -> None:
        super().__init__(part, ranks)
        self._full_len = full_len

    def forward(self, input: Tensor) -> Tensor:
        """The whole module's output ``[..., full_len]``, on every rank."""
        return self._ranks.join(self.part(input), self._full_len)


class RowsOverRanks(OverRanks):
    """An embedding whose rows, from ``first`` on, are this rank's."""

    def __init__(self, part: nn.Module, ranks: Ranks, first: int, num_rows: int) -> None:
        super().__init__(part, ranks)
        self._first, self._num_rows = first, num_rows

    def forward(self, input: Tensor) -> Tensor:
        """The embeddings of all ids, on every rank."""
        local = input - self._first
        is_here = (local >= 0) & (local < self._num_rows)
        found = self.part(local.clamp(0, self._num_rows - 1))
        return self._ranks.sum(found.masked_fill(~is_here.unsqueeze(-1), 0))


def shard_view(view: nn.Module, model: nn.Module, ranks: Ranks) -> None:
    """Make a fresh view of ``model`` work on this rank's shards.

    Raises:
        UnsupportedModelError: a module is divided in a style that is not known here; it is named.
    """
    if ranks.size == 1:
        return
    shards: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    replaced: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        ours = view.get_submodule(name)
        for key, parameter in module._parameters.items():
            if parameter is not None and is_sharded(parameter):
                shard = nn.Parameter(shard_of(parameter.detach()), requires_grad=False)
                ours._parameters[key] = shards.setdefault(id(parameter), shard)
        style = _style_of(module)
        if style is not None:
            replaced[id(ours)] = _on_shards(ours, style, ranks, name)
    for parent in list(view.modules()):
        for key, child in list(parent._modules.items()):
            if child is not None and id(child) in replaced:
                parent._modules[key] = replaced[id(child)]


def _style_of(module: nn.Module) -> Any:
    """The style that transformers' patched ``forward`` applies around the module's own, if any."""
    patched = vars(module).get("forward")
    if patched is None:
        return None
    style = next((thing for thing in reachable(patched) if STYLE in _bases(thing)), None)
    if style is None and isinstance(patched, FunctionType) and patched.__module__.startswith(INSTALLERS):
        installer = patched.__qualname__.partition(".")[0]
        if STYLES.get(installer) is not _as_it_is:
            raise UnsupportedModelError(
                f"a {type(module).__name__} is divided by {installer}, which is not served here"
            )
    return style


def _on_shards(part: nn.Module, style: Any, ranks: Ranks, name: str) -> nn.Module:
    """``part``, whose parameters are this rank's shards, with what ``style`` does around it."""
    for base in _bases(style):
        if base in STYLES:
            made = STYLES[base](part, style, ranks)
            if made is not None:
                return made
    raise UnsupportedModelError(
        f"module {name} is divided by {type(style).__name__}, which is not served here; leave it whole by "
        f"DistributedConfig(tp_plan=...), or load the model without tp_size"
    )


def _bases(thing: object) -> list[str]:
    return [each.__name__ for each in type(thing).__mro__]


def _placed(layout: object) -> str:
    """A placement's name: "Replicate", or "Shard" where it divides the last dimension."""
    kind = type(layout).__name__
    return kind if kind != "Shard" or layout.dim == -1 else "another Shard"  # type: ignore[attr-defined]


def _columns(part: nn.Module, style: Any, ranks: Ranks) -> nn.Module | None:
    """Column-wise linear: each rank gives a slice of the outputs, which may stay where it is."""
    if not isinstance(part, nn.Linear) or not style.use_local_output:
        return None
    if _placed(style.input_layouts) != "Replicate":
        return None
    full_len = part.out_features
    part.out_features = part.weight.shape[0]
    joins = {"Shard": False, "Replicate": True}.get(_placed(style.output_layouts))
    if joins is None:
        return None
    return JoinOverRanks(part, ranks, full_len) if joins else part


def _rows(part: nn.Module, style: Any, ranks: Ranks) -> nn.Module | None:
    """Row-wise linear: each rank multiplies a slice of the inputs, and the outputs are summed."""
    if not isinstance(part, nn.Linear) or not style.use_local_output:
        return None
    if _placed(style.output_layouts) != "Replicate":
        return None
    columns = None
    if _placed(style.input_layouts) == "Replicate":
        first = share_len(part.in_features, ranks.size) * ranks.local_rank
        columns = slice(first, first + part.weight.shape[1])
    elif _placed(style.input_layouts) != "Shard":
        return None
    part.in_features = part.weight.shape[1]
    bias = part._parameters["bias"]
    part._parameters["bias"] = None
    return SumOverRanks(part, ranks, bias, columns)


def _embedding(part: nn.Module, style: Any, ranks: Ranks) -> nn.Module | None:
    if not isinstance(part, nn.Embedding) or not style.use_local_output or part.max_norm is not None:
        return None
    if style.shard_dim == 1:
        return JoinOverRanks(part, ranks, part.embedding_dim)
    part.padding_idx = None  # a row of the whole table; without effect in a forward
    first = share_len(part.num_embeddings, ranks.size) * ranks.local_rank
    return RowsOverRanks(part, ranks, first, part.weight.shape[0])


def _summed(part: nn.Module, style: Any, ranks: Ranks) -> nn.Module:
    return SumOverRanks(part, ranks)


def _as_it_is(part: nn.Module, style: Any, ranks: Ranks) -> nn.Module | None:
    """Styles that do nothing around a forward without gradients."""
    return part


def _plain_only(part: nn.Module, style: Any, ranks: Ranks) -> nn.Module | None:
    """The base class does nothing, but one derived from it and not known here may do anything."""
    return part if type(style).__name__ == STYLE else None


Rule: TypeAlias = Callable[[nn.Module, Any, Ranks], nn.Module | None]
STYLES: dict[str, Rule] = {
    "ColwiseParallel": _columns,
    "RowwiseParallel": _rows,
    "EmbeddingParallel": _embedding,
    "MoeExpertsParallel": _summed,
    "AllReduceParallel": _summed,
    "ReplicatedWithGradAllReduce": _as_it_is,
    "LocalParamsParallel": _as_it_is,
    STYLE: _plain_only,
}
"""What to do for a style, by the name of its class; ``None`` where its settings are not known."""
