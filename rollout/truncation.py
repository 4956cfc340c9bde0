"""Draws after top-k, top-p and min-p: which tokens are kept, how much mass that is, and one of them.

Legend: C rows of one chunk, V vocabulary, K candidates.
"""

import math

import torch
from torch import Tensor

from rollout.spread import Knobs, Spread, invert

STAGES = (64, 1024, 8192)
"""Candidates tried for a truncated row before all V are sorted: a sort costs some 20 times topk(64)."""
FOLD = 8
"""Tokens per group when candidates are sought: the best K tokens lie in the K best groups."""


def pick_truncated(scores: Tensor, spread: Spread, knobs: Knobs) -> tuple[Tensor, Tensor]:
    """Draw after top-k, top-p and min-p: tokens [C] int64 and log of the kept mass [C] float64.

    Goes through stages, each with more candidates; a row ends at the first that proves its kept set.
    """
    num_rows, vocab = scores.shape
    token = torch.zeros(num_rows, dtype=torch.int64, device=scores.device)
    log_kept = torch.zeros_like(knobs.uniform)
    todo = torch.arange(num_rows, device=scores.device)
    scores = scores.float()
    for width in (*(stage for stage in STAGES if stage < vocab), vocab):
        if bool(((knobs.top_k[todo] >= width) & (knobs.top_k[todo] < vocab)).all()):
            continue  # none of them can be proven by so few
        rest = scores if len(todo) == num_rows else scores[todo]
        ids = _candidates(rest, width)
        part = spread.at(todo), knobs.at(todo), torch.full_like(todo, width == vocab, dtype=torch.bool)
        drawn, kept, is_settled = _pick_among(rest.gather(1, ids), ids, *part, vocab)
        done = todo[is_settled]
        token[done], log_kept[done] = drawn[is_settled], kept[is_settled]
        todo = todo[~is_settled]
        if len(todo) == 0:
            break
    return token, log_kept


def _candidates(scores: Tensor, width: int) -> Tensor:
    """Ids of the ``width`` highest scores of each row, [C, K] int64, descending.

    Among equals the lower id comes first. transformers leaves that to an unstable sort, so which of
    several equal tokens its top-p cuts depends on the build; here it is always the highest ids.
    """
    if width == scores.shape[1]:
        return scores.sort(dim=-1, descending=True, stable=True).indices
    ids = _highest(scores, width)
    # One integer key (falling score above, id below) makes the order total; faster than two sorts.
    bits = (scores.gather(1, ids) + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative floats count downwards
    return ((~rising).long() << 32 | ids).sort(dim=-1).values & 0xFFFFFFFF


def _highest(scores: Tensor, width: int) -> Tensor:
    """Ids of the ``width`` highest scores of each row, [C, K] int64, in no order."""
    num_rows, vocab = scores.shape
    num_groups = vocab // FOLD
    if 4 * width > num_groups:
        return scores.topk(width, sorted=False).indices
    # Groups are strided (j, j + num_groups, ...), so that amax runs along memory; what is left over
    # at the end of the vocabulary always takes part.
    grouped = scores[:, : FOLD * num_groups].view(num_rows, FOLD, num_groups)
    best = grouped.amax(dim=1).topk(width, sorted=False).indices
    strides = torch.arange(0, FOLD * num_groups, num_groups, device=scores.device)
    tail = torch.arange(FOLD * num_groups, vocab, device=scores.device).expand(num_rows, -1)
    ids = torch.cat([(best[:, :, None] + strides).flatten(1), tail], dim=1)
    return ids.gather(1, scores.gather(1, ids).topk(width, sorted=False).indices)


def _pick_among(
    values: Tensor, ids: Tensor, spread: Spread, knobs: Knobs, is_complete: Tensor, vocab: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from candidates ``ids`` [C, K], whose scores ``values`` [C, K] float32 fall.

    ``is_complete`` [C] says whether they are the whole vocabulary. Returns the token, the log of the
    kept mass and whether it is proven, each [C]. It is when the candidates reach strictly below the
    lowest kept score (under top-k below the k-th, whose ties all count towards top-p), so that nothing
    outside can belong to the kept set.
    """
    num_candidates = ids.shape[1]
    scaled = values / knobs.temperature  # ties are those after division, as in transformers
    weights = ((values - spread.peak) / knobs.temperature).exp().double()
    kth = scaled.gather(1, knobs.top_k.clamp(max=num_candidates) - 1)
    limited = knobs.top_k < vocab
    in_top_k = (scaled >= kth) | ~limited
    mass = (weights * in_top_k).sum(dim=-1, keepdim=True)
    mass = torch.where(limited | is_complete[:, None], mass, spread.total)
    before = weights.cumsum(dim=-1) - weights
    possible = values > -math.inf
    keep = possible & in_top_k & (before < knobs.top_p * mass) & (weights >= knobs.min_p)
    lowest = torch.where(limited, kth, scaled.where(keep, math.inf).amin(dim=-1, keepdim=True))
    is_proven = (lowest > scaled[:, -1:])[:, 0] | is_complete
    cumulative = (weights * keep).cumsum(dim=-1)
    token = ids.gather(1, invert(cumulative, knobs.uniform[:, None] * cumulative[:, -1:]))
    is_cut = (possible & ~keep).any(dim=-1) | ~is_complete
    log_kept = (cumulative[:, -1] / spread.total[:, 0]).log().clamp(max=0.0).where(is_cut, 0.0)
    return token[:, 0], log_kept, is_proven
