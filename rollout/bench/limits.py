"""How fast this machine could be at the most: the arithmetic and the bytes that a workload needs.

The least time runs every request at once, what prompts begin with alike computed once and read once a step,
every step at the measured rate of matrix products or of memory, whichever takes longer. No scheduling,
sampling, softmax or norms.
"""

import statistics
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.bench.workloads import Workload

GEMM_SHAPES = ((512, 2048, 2048), (2048, 1024, 1024), (4096, 576, 3072))
"""Rows, inner and outer sizes; the best counts: no model's products should come out above the limit."""
STREAM_BYTES = 2**28
MEASURE_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """What the machine reached in this process, with its threads."""

    flops: float
    """Per second in a matrix product, in the faster of fp32 and the model's dtype."""
    bytes_per_second: float
    """Read in one sum over a tensor far larger than a core's own caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """On a shared machine rates come and go, within milliseconds, too."""

    best: MachineRates
    """In the fastest single call."""
    usual: MachineRates
    """In the median call of the fastest way: what there was to be had most of the time."""

    @classmethod
    def over(cls, measured: "Sequence[MeasuredRates]") -> "MeasuredRates":
        """Of several times: the best of the best, the mean of the usual ones."""
        best, usual = [m.best for m in measured], [m.usual for m in measured]
        return cls(
            best=MachineRates(
                flops=max(rates.flops for rates in best),
                bytes_per_second=max(rates.bytes_per_second for rates in best),
            ),
            usual=MachineRates(
                flops=statistics.mean(rates.flops for rates in usual),
                bytes_per_second=statistics.mean(rates.bytes_per_second for rates in usual),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What one token costs a model."""

    body_flops: float
    """In the linears below the output head."""
    head_flops: float
    """In the output head, needed only for tokens that are followed by a draw."""
    weight_bytes: int
    kv_bytes: int
    """Of one token in the cache, over all layers."""
    attention_flops: float
    """Per pair of query and key, over all layers and heads."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelCost":
        """Counted from the modules and the config of a decoder with equal attention layers."""
        config = model.config.get_text_config()
        head = model.get_output_embeddings().weight
        linears = {id(m.weight): m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)}
        body = sum(w.numel() for w in linears.values()) - head.numel()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        layers = config.num_hidden_layers
        return cls(
            body_flops=2.0 * body,
            head_flops=2.0 * head.numel(),
            weight_bytes=(body + head.numel()) * head.element_size(),
            kv_bytes=2 * layers * config.num_key_value_heads * head_dim * head.element_size(),
            attention_flops=4.0 * layers * heads * head_dim,
        )


def measure_rates(dtype: torch.dtype) -> MeasuredRates:
    """This machine's rates now; about eight seconds."""
    best = usual = 0.0
    for rows, inner, outer in GEMM_SHAPES:
        for kind in {torch.float32, dtype}:
            a, b = torch.randn(rows, inner).to(kind), torch.randn(inner, outer).to(kind)
            for product in _products(a, b):
                flops, seconds = 2 * rows * inner * outer, _seconds(product)
                best, usual = max(best, flops / min(seconds)), max(usual, flops / statistics.median(seconds))
    seconds = _seconds(torch.ones(STREAM_BYTES // 4).sum)
    return MeasuredRates(
        best=MachineRates(flops=best, bytes_per_second=STREAM_BYTES / min(seconds)),
        usual=MachineRates(flops=usual, bytes_per_second=STREAM_BYTES / statistics.median(seconds)),
    )


def _products(a: Tensor, b: Tensor) -> list[Callable[[], Tensor]]:
    """The ways of multiplying that this process has: torch's own, and oneDNN's on packed weights."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
    ways: list[Callable[[], Tensor]] = [partial(torch.mm, a, b, out=out)]
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(b.t().contiguous(), a.shape[0])
        ways.append(partial(torch.ops.mkldnn._linear_pointwise, a, packed, None, "none", [], ""))
    return ways


def _seconds(run: Callable[[], Tensor]) -> list[float]:
    """The time of each of some calls."""
    run()
    times: list[float] = []
    end = time.perf_counter() + MEASURE_SECONDS
    while not times or time.perf_counter() < end:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times


def least_seconds(workload: Workload, cost: ModelCost, rates: MachineRates) -> float:
    """The least time for a run of the workload, see the top of this file."""
    prompts = set(workload.prompts)
    beginnings = _beginnings(prompts)
    total = _step(
        cost.body_flops * len(beginnings)
        + cost.head_flops * len(prompts)
        + cost.attention_flops * sum(len(beginning) for beginning in beginnings),
        cost.weight_bytes + cost.kv_bytes * len(beginnings),
        rates,
    )
    rows = [(prompt, params.max_new_tokens) for prompt, _, params in workload.requests]
    for position in range(1, max(length for _, length in rows)):  # the first token comes of the prompt
        left = [prompt for prompt, length in rows if length > position]
        if prompts != set(left):
            prompts = set(left)
            beginnings = _beginnings(prompts)
        keys = sum(len(prompt) + position for prompt in left)
        total += _step(
            (cost.body_flops + cost.head_flops) * len(left) + cost.attention_flops * keys,
            cost.weight_bytes + cost.kv_bytes * (len(beginnings) + position * len(left)),
            rates,
        )
    return total * workload.num_rollouts


def _beginnings(prompts: Set[tuple[int, ...]]) -> Set[tuple[int, ...]]:
    """One for each key and value that these prompts need, when they share what they begin with."""
    return {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}


def _step(flops: float, num_bytes: float, rates: MachineRates) -> float:
    return max(flops / rates.flops, num_bytes / rates.bytes_per_second)
