"""Teacher-forced logprobs of given tokens, through the view and the attention that generate.

Short sequences share a step; a long one goes through its pages in several, so that neither logits
nor scores grow with its length.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from rollout.attention import AttentionBackend
from rollout.batch import build_batch
from rollout.kv_cache import KVCache
from rollout.probe import ModelPlan
from rollout.requests import Prompt, RequestBuilder
from rollout.runner import forward
from rollout.sampling import score
from rollout.sequence import PlannedRow, StepPlan
from rollout.sequence import Sequence as Sample
from rollout.tables import PageTables
from rollout.types import NonFiniteLogits, SamplingParams, require_number

MAX_LOGITS = 2**26
"""Logits of one forward at the most: 256 MB of float32."""
PAGE_SIZE = 64
"""Tokens per page, rounded up to what the backend can have."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens ``start .. start + length`` of a sample, whose next tokens are scored where known."""

    sample: Sample
    start: int
    length: int

    @property
    def scored(self) -> range:
        """Positions of this chunk whose logits predict a completion token."""
        first = len(self.sample.request.prompt_ids) - 1
        return range(max(first, self.start), self.start + self.length)


def score_sequences(
    view: nn.Module,
    plan: ModelPlan,
    backend: AttentionBackend,
    requests: RequestBuilder,
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[int]],
    temperature: float,
) -> list[tuple[float, ...]]:
    """``policy_logprobs`` of each completion after its prompt; see ``RolloutEngine.score``."""
    require_number("temperature", temperature, low=0.0, high=math.inf)
    if isinstance(prompts, str) or len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts for {len(completions)} completions; give lists, one each")
    num_groups = len(plan.layout.groups)
    samples = [
        _sample(requests, prompt, completion, num_groups)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    scores: dict[int, list[float]] = {id(sample): [] for sample in samples}
    for pack in _packs(samples, max_tokens=max(1, MAX_LOGITS // plan.vocab_size)):
        cache, tables = _pages_for(pack, plan, backend)
        for chunks in pack:
            numbers = iter(_score_step(view, plan, backend, cache, tables, chunks, temperature))
            for chunk in chunks:
                scores[id(chunk.sample)] += [next(numbers) for _ in chunk.scored]
    for i, sample in enumerate(samples):
        if not all(map(math.isfinite, scores[id(sample)])):
            raise NonFiniteLogits(f"completion {i} has logprobs that are not finite; check the weights")
    return [tuple(scores[id(sample)]) for sample in samples]


def _sample(requests: RequestBuilder, prompt: Prompt, completion: Sequence[int], num_groups: int) -> Sample:
    request = requests.build(prompt, SamplingParams(max_new_tokens=1))
    added = requests.encode(completion)
    if not added:
        raise ValueError("a completion to score is empty; give at least one token")
    requests.check_ids("a completion", added)
    requests.check_prompt((*request.prompt_ids, *added[:-1]))  # the last token takes no position
    (sample,) = requests.samples(request, num_groups)
    sample.ids += added
    return sample


def _packs(samples: list[Sample], max_tokens: int) -> Iterator[list[list[_Chunk]]]:
    """Steps that share pages: one step of several whole samples, or several steps of a long one."""
    step: list[_Chunk] = []
    for sample in samples:
        length = len(sample.ids) - 1
        if length > max_tokens:
            starts = range(0, length, max_tokens)
            yield [[_Chunk(sample, start, min(max_tokens, length - start))] for start in starts]
            continue
        if step and sum(chunk.length for chunk in step) + length > max_tokens:
            yield [step]
            step = []
        step.append(_Chunk(sample, 0, length))
    if step:
        yield [step]


def _pages_for(
    pack: list[list[_Chunk]], plan: ModelPlan, backend: AttentionBackend
) -> tuple[KVCache, PageTables]:
    page_size = -(-PAGE_SIZE // backend.page_multiple) * backend.page_multiple
    tokens = {id(chunk.sample): len(chunk.sample.ids) for step in pack for chunk in step}
    pages = sum(-(-count // page_size) for count in tokens.values())
    num_pages = (pages,) * len(plan.layout.groups)
    cache = KVCache(plan.layout, page_size, backend.page_order)
    cache.resize(num_pages)
    windows = plan.layout.windows
    return cache, PageTables(page_size=page_size, windows=windows, num_pages=num_pages, share=False)


def _score_step(
    view: nn.Module,
    plan: ModelPlan,
    backend: AttentionBackend,
    cache: KVCache,
    tables: PageTables,
    chunks: list[_Chunk],
    temperature: float,
) -> list[float]:
    """Logprobs of all scored positions of the chunks, in order."""
    layout = plan.layout
    fresh: list[list[int]] = [[] for _ in layout.groups]
    for chunk in chunks:
        _, taken = tables.extend(chunk.sample, chunk.start + chunk.length)
        for all_taken, more in zip(fresh, taken, strict=True):
            all_taken += more
    step = StepPlan(
        rows=tuple(PlannedRow(sequence=c.sample, start=c.start, length=c.length) for c in chunks),
        fresh_pages=tuple(map(tuple, fresh)),
    )
    batch = build_batch(
        step,
        page_size=cache.page_size,
        windows=layout.windows,
        dtype=layout.dtype,
        device=layout.device,
        masks=backend.needs_masks,
        run_rules=backend.run_rules,
    )
    starts = {id(row.sequence): at for row, at in zip(batch.packed_rows, batch.row_starts, strict=True)}
    where = [starts[id(c.sample)] + position - c.start for c in chunks for position in c.scored]
    targets = [c.sample.ids[position + 1] for c in chunks for position in c.scored]
    batch = replace(batch, logit_index=torch.tensor(where, dtype=torch.int64, device=layout.device))
    logits = forward(view, plan, batch, cache, backend)
    for chunk in chunks:
        chunk.sample.num_computed = chunk.start + chunk.length
    numbers: list[float] = score(
        logits,
        torch.tensor(targets, dtype=torch.int64, device=layout.device),
        torch.full((len(targets),), float(temperature), device=layout.device),
    ).tolist()
    return numbers
