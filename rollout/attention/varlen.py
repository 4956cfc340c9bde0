"""torch's own paged attention, ``torch.nn.attention.varlen.varlen_attn``: flash kernels, no package.

Known of the kernels behind it (as of torch 2.13) and minded here:

- By default they are flash attention 2, whose tables need pages of 256 tokens or a multiple. With
  ``torch.nn.attention.activate_flash_attention_impl("FA3")`` any page size will do.
- Splitting a row's keys over several blocks gives wrong results there when rows are paged
  (https://github.com/pytorch/pytorch/issues/194167), so it is switched off. Numbers then do not
  depend on which other rows share the step, either.
- A causal mask keeps them from folding the query heads of a kv head into one block. A decode run needs
  no mask, so it is called without.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollout.attention.backend import AttentionCall
from rollout.attention.paged import KernelLimits, KernelUnavailable
from rollout.runs import PagedRun

MODULE = "torch.nn.attention.varlen"
NEEDED = frozenset({"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"})
"""Keyword arguments of ``varlen_attn``: it exists since torch 2.10, tables of pages came later."""
MIN_CAPABILITY = (8, 0)
FA2_PAGE_MULTIPLE = 256


class VarlenKernel:
    """``varlen_attn`` as a paged kernel; see ``PagedKernel``.

    Args:
        varlen_attn: the function, or one that takes the same arguments.
        limits: what it serves.
        takes_cu_k: whether it wants to be told where each row's keys would begin. Flash attention 2
            does; flash attention 3 refuses to be told when there is a table.
    """

    name = f"torch {torch.__version__} varlen_attn"

    def __init__(self, varlen_attn: Callable[..., Any], limits: KernelLimits, *, takes_cu_k: bool) -> None:
        self._varlen_attn = varlen_attn
        self.limits = limits
        self._takes_cu_k = takes_cu_k

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, run: PagedRun, call: AttentionCall
    ) -> Tensor:
        """See ``PagedKernel``."""
        causal = (-1 if run.window is None else run.window - 1, 0)
        out: Tensor = self._varlen_attn(
            query,
            keys,
            values,
            run.cu_q,
            run.cu_k if self._takes_cu_k else None,
            run.max_q,
            run.max_k,
            scale=call.scaling,
            window_size=(-1, -1) if run.is_decode else causal,
            enable_gqa=True,
            seqused_k=run.lengths,
            block_table=run.table,
            num_splits=1,
        )
        return out


def find_varlen(device: torch.device) -> VarlenKernel:
    """torch's kernels for a device.

    Raises:
        KernelUnavailable: this torch or this device has none; the message says which and why.
    """
    if device.type != "cuda":
        raise KernelUnavailable(f"the model is on {device} and torch's varlen_attn needs a CUDA device")
    if torch.version.hip is not None:
        raise KernelUnavailable("torch's varlen_attn takes no tables of pages on ROCm")
    try:
        varlen_attn = importlib.import_module(MODULE).varlen_attn
    except ImportError as error:
        raise KernelUnavailable(f"torch {torch.__version__} has no {MODULE}; update torch") from error
    missing = NEEDED - set(inspect.signature(varlen_attn).parameters)
    if missing:
        names = ", ".join(sorted(missing))
        raise KernelUnavailable(f"varlen_attn of torch {torch.__version__} lacks {names}; update torch")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise KernelUnavailable(
            f"{device} has compute capability {capability[0]}.{capability[1]} and varlen_attn needs 8.0"
        )
    active = importlib.import_module("torch.nn.attention").current_flash_attention_impl()
    if active not in (None, "FA3"):
        raise KernelUnavailable(
            f"torch's flash attention is switched to {active}, which is not served; call "
            "torch.nn.attention.restore_flash_attention_impl()"
        )
    multiple = FA2_PAGE_MULTIPLE if active is None else 1
    limits = KernelLimits(page_multiple=multiple, softcap=False, sinks=False)
    return VarlenKernel(varlen_attn, limits, takes_cu_k=active is None)
