"""A paged kernel is tried once before it is trusted: a small step of every kind against plain matmuls.

The packages behind the kernels differ in what they accept, and some builds have computed paged rows
wrongly without a word. So a kernel that raises, or answers something else, is not taken.

Letters: N query heads, K kv heads, P pages, S slots in a page, H head dim.
"""

import torch
from torch import Tensor

from rollout.attention.backend import AttentionCall, AttentionTraits
from rollout.attention.eager import attend_row
from rollout.attention.paged import PagedKernel
from rollout.kv_cache import CacheGroup, CacheLayout, LayerPages
from rollout.runs import RowSpan, RunRules, build_runs

SHARPNESS = 4.0
"""Standard deviation of the scores: few keys of a row count, so an answer from other keys is far off."""
TOLERANCE = 0.1
"""Half precision is off by a hundredth at the most, a wrong row by more than 1 in some element."""
SOFTCAP = 10.0
MAX_KV_HEADS = 2


def why_wrong(
    kernel: PagedKernel, layout: CacheLayout, traits: AttentionTraits, rules: RunRules, page_size: int
) -> str | None:
    """What is wrong with a kernel's answers on this device; ``None`` where they are right."""
    trials = [(group, folded) for group in layout.groups for folded in (1, 2)]
    for group, heads_per_kv_head in trials:  # kernels have a way of their own for each of the latter
        try:
            with torch.autocast(layout.device.type, enabled=False):
                gap = _largest_gap(kernel, group, layout, traits, rules, page_size, heads_per_kv_head)
        except Exception as error:  # whatever a kernel raises
            return f"a trial of {kernel.name} failed with {type(error).__name__}: {error}"
        if not gap < TOLERANCE:  # NaN is no answer, either
            return f"a trial of {kernel.name} was off by {gap:.2g} from plain attention"
    return None


def _largest_gap(
    kernel: PagedKernel,
    group: CacheGroup,
    layout: CacheLayout,
    traits: AttentionTraits,
    rules: RunRules,
    page_size: int,
    heads_per_kv_head: int,
) -> float:
    shape, dtype, device = group.shape, layout.dtype, layout.device
    spans, num_decode = _rows(page_size, shape.window)
    tokens, num_pages = spans[-1].start + spans[-1].length, 1 + spans[-1].pages[0]
    num_kv_heads = min(shape.num_kv_heads, MAX_KV_HEADS)
    draw = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw).to(device, dtype)

    keys, values = (random(num_pages, page_size, num_kv_heads, shape.key_dim) for _ in range(2))
    query = random(tokens, heads_per_kv_head * num_kv_heads, shape.key_dim)
    call, exact = (
        AttentionCall(
            query=each,
            key=each,  # what the step would store is in the pages already
            value=each,
            scaling=SHARPNESS * shape.key_dim**-0.5,
            softcap=SOFTCAP if traits.has_softcap else None,
            sinks=torch.ones(query.shape[1], device=device) if traits.has_sinks else None,
        )
        for each in (query, query.float())
    )
    pages = LayerPages(*(x.float().permute(2, 0, 1, 3) for x in (keys, values)))
    expected = torch.cat([attend_row(exact, pages, span, shape.window) for span in spans], dim=1)
    runs = build_runs(spans, num_decode, page_size, shape.window, rules, device)
    out = torch.cat([kernel.attend(query[r.start : r.end], keys, values, r, call) for r in runs])
    return float((out.float() - expected.transpose(0, 1)).abs().max())


def _rows(page_size: int, window: int | None) -> tuple[list[RowSpan], int]:
    """Decode rows from long to short, a whole prompt and a continued one; how many of them decode."""
    shapes = [(4 * page_size + 1, 1), (page_size, 1), (page_size - 1, 1), (0, 1)]
    num_decode = len(shapes)
    shapes += [(0, page_size + 3), (2 * page_size - 1, 5)]
    spans: list[RowSpan] = []
    start, next_page = 0, 1
    for position, length in shapes:
        first = 0 if window is None else max(0, position - window + 1) // page_size
        count = -(-(position + length) // page_size) - first
        # the last page first: an answer that takes pages in their order is wrong
        pages = tuple(range(next_page + count - 1, next_page - 1, -1))
        spans.append(RowSpan(start, length, position, first, pages))
        start, next_page = start + length, next_page + count
    return spans, num_decode
