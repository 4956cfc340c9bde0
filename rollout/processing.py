"""What changes a row's logits before the temperature does: bias, penalties, masks, processors.

The order is that of transformers. Only rows that ask for something come here, as a chunk; each row
is changed by its own parameters and history alone.

Legend: C rows of one chunk, V vocabulary, W width of a padded matrix of ids.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.sampling_row import SamplingRow


def process(raw: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, dict[int, Exception]]:
    """Scores [C, V] float32 after bias, penalties, masks and processors, and the processors' errors."""
    vocab = raw.shape[1]
    padded = torch.nn.functional.pad(raw, (0, 1))  # the extra column swallows padding ids
    _add_bias(padded, rows)
    _penalise_repetition(padded, rows)
    _penalise_counts(padded, rows)
    _mask_endings(padded, rows)
    scores = padded[:, :vocab]
    failures: dict[int, Exception] = {}
    for c, row in enumerate(rows):
        try:
            _run_processors(scores[c : c + 1], row)
        except Exception as error:  # the caller's code: whatever it raises belongs to its row alone
            failures[c] = error
    return scores, failures


def _add_bias(padded: Tensor, rows: Sequence[SamplingRow]) -> None:
    biases = [row.params.logit_bias for row in rows]
    if any(biases):
        ids = _padded([list(bias) for bias in biases], padded.shape[1] - 1, padded.device)
        amounts = _padded([list(bias.values()) for bias in biases], 0.0, padded.device)
        padded.scatter_add_(1, ids, amounts)


def _penalise_repetition(padded: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Prompt and generated tokens alike, once each however often they occur."""
    penalties = [row.params.repetition_penalty for row in rows]
    if all(penalty == 1.0 for penalty in penalties):
        return
    sink = padded.shape[1] - 1
    seen = [row.ids if row.params.repetition_penalty != 1.0 else () for row in rows]
    # A prompt may hold ids that the head cannot produce (embeddings larger than the head).
    ids = _padded(seen, sink, padded.device).clamp_(max=sink)
    penalty = _padded([[penalty] for penalty in penalties], 1.0, padded.device)
    found = padded.gather(1, ids)
    padded.scatter_(1, ids, torch.where(found < 0, found * penalty, found / penalty))


def _penalise_counts(padded: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Presence and frequency, over generated tokens only."""
    if not any(row.has_counts for row in rows):
        return
    all_ids, amounts = [], []
    for row in rows:
        generated = row.ids[row.prompt_len :] if row.has_counts else ()
        ids, counts = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
        all_ids.append(ids)
        amounts.append(-(row.params.frequency_penalty * counts + row.params.presence_penalty))
    ids_matrix = _padded(all_ids, padded.shape[1] - 1, padded.device)
    padded.scatter_add_(1, ids_matrix, _padded(amounts, 0.0, padded.device))


def _mask_endings(padded: Tensor, rows: Sequence[SamplingRow]) -> None:
    if any(row.has_mask for row in rows):
        endings = [sorted(row.ending_ids) if row.has_mask else () for row in rows]
        padded.scatter_(1, _padded(endings, padded.shape[1] - 1, padded.device), -math.inf)


def _run_processors(scores: Tensor, row: SamplingRow) -> None:
    """Replace ``scores`` [1, V] by what the row's processors make of them."""
    if not row.params.logits_processors:
        return
    ids = torch.tensor([list(row.ids)], dtype=torch.int64, device=scores.device)
    current = scores.clone()  # a processor may write into it or keep it
    for processor in row.params.logits_processors:
        current = processor(ids, current)
        if not isinstance(current, Tensor) or current.shape != scores.shape:
            got = tuple(current.shape) if isinstance(current, Tensor) else type(current).__name__
            raise ValueError(
                f"logits processor {processor!r} returned {got}; it must return a tensor of shape "
                f"{tuple(scores.shape)}, that of the scores it was given"
            )
    scores.copy_(current)


def _padded(lists: Sequence[Sequence[Any] | np.ndarray], fill: int | float, device: torch.device) -> Tensor:
    """Ragged lists as one [C, W] matrix: int64 for an int ``fill``, float32 for a float one."""
    dtypes = (np.int64, torch.int64) if isinstance(fill, int) else (np.float64, torch.float32)
    matrix = np.full((len(lists), max(len(items) for items in lists)), fill, dtype=dtypes[0])
    for line, items in zip(matrix, lists, strict=True):
        line[: len(items)] = items
    return torch.from_numpy(matrix).to(device, dtypes[1])  # torch rounds 1e300 to inf without a warning
