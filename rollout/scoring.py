"""Teacher-forced logprobs of given tokens, through the view and the attention that generate.

Letters: T packed tokens, D tokens to score, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

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
from rollout.types import SamplingParams, require_number

MAX_LOGITS = 2**26
"""Logits of one forward at the most: 256 MB of float32."""
PAGE_SIZE = 64


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
    require_number("temperature", temperature, low=0.0, high=float("inf"))
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts for {len(completions)} completions; give one each")
    params = SamplingParams(max_new_tokens=1)
    samples: list[Sample] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        prompt_ids = requests.encode(prompt)
        ids = [*prompt_ids, *requests.encode(completion)]
        if not prompt_ids or len(ids) == len(prompt_ids):
            raise ValueError("a prompt or completion to score is empty; give at least one token each")
        # checked as a prompt one token shorter: the last token needs no position of its own
        requests.build(ids[:-1], params)
        request = requests.build(prompt_ids, params)
        (sample,) = requests.samples(request, len(plan.layout.groups))
        sample.ids = ids
        samples.append(sample)
    results: list[tuple[float, ...]] = []
    for packed in _packs(samples, max_tokens=max(1, MAX_LOGITS // plan.vocab_size)):
        results += _score_pack(view, plan, backend, packed, temperature)
    return results


def _packs(samples: list[Sample], max_tokens: int) -> Iterator[list[Sample]]:
    pack: list[Sample] = []
    for sample in samples:
        if pack and sum(len(s.ids) for s in pack) + len(sample.ids) > max_tokens:
            yield pack
            pack = []
        pack.append(sample)
    if pack:
        yield pack


def _score_pack(
    view: nn.Module, plan: ModelPlan, backend: AttentionBackend, samples: list[Sample], temperature: float
) -> list[tuple[float, ...]]:
    layout = plan.layout
    pages = sum(-(-len(sample.ids) // PAGE_SIZE) for sample in samples)
    tables = PageTables(
        page_size=PAGE_SIZE, windows=layout.windows, num_pages=(pages,) * len(layout.groups), share=False
    )
    cache = KVCache(layout, PAGE_SIZE)
    cache.resize((pages,) * len(layout.groups))
    fresh: list[list[int]] = [[] for _ in layout.groups]
    for sample in samples:
        _, taken = tables.extend(sample, len(sample.ids) - 1)
        for all_taken, more in zip(fresh, taken, strict=True):
            all_taken += more
    step = StepPlan(
        rows=tuple(PlannedRow(sequence=s, start=0, length=len(s.ids) - 1) for s in samples),
        fresh_pages=tuple(map(tuple, fresh)),
    )
    batch = build_batch(
        step, page_size=PAGE_SIZE, windows=layout.windows, dtype=layout.dtype, device=layout.device
    )
    first_token = {
        id(row.sequence): start for row, start in zip(batch.packed_rows, batch.row_starts, strict=True)
    }
    where: list[int] = []
    targets: list[int] = []
    for sample in samples:
        prompt_len = len(sample.request.prompt_ids)
        start = first_token[id(sample)]
        where += range(start + prompt_len - 1, start + len(sample.ids) - 1)
        targets += sample.ids[prompt_len:]
    batch = replace(batch, logit_index=torch.tensor(where, device=layout.device))
    logits = forward(view, plan, batch, cache, backend)
    scores = score(
        logits,
        torch.tensor(targets, device=layout.device),
        torch.full((len(targets),), float(temperature), device=layout.device),
    ).tolist()
    out, done = [], 0
    for sample in samples:
        count = len(sample.ids) - len(sample.request.prompt_ids)
        out.append(tuple(scores[done : done + count]))
        done += count
    return out
