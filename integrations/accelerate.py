"""What every trainer on accelerate needs of the engine: the innermost model, and numbers over ranks."""

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from rollout.types import UnsupportedModelError

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def innermost_model(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """The model below DDP and ``torch.compile``, on whose tensors the engine works.

    Raises:
        UnsupportedModelError: the job shards its model over ranks.
    """
    if accelerator.distributed_type in SHARDED:
        raise UnsupportedModelError(
            f"distributed type {accelerator.distributed_type} shards the model over ranks, and the engine "
            "needs whole weights on each; use DDP (accelerate launch --multi_gpu) or a single process"
        )
    inner: nn.Module = accelerator.unwrap_model(model, keep_torch_compile=False)
    return inner


def over_ranks(numbers: Mapping[str, float], accelerator: Accelerator) -> dict[str, float]:
    """Each number combined over all ranks: ``*_max`` by maximum, ``*_sum`` by sum, others by mean.

    Every rank must call this with the same keys.
    """
    names = sorted(numbers)
    local = torch.tensor([[numbers[name] for name in names]], dtype=torch.float32, device=accelerator.device)
    rows = accelerator.gather(local)
    combined = {}
    for column, name in enumerate(names):
        values = rows[:, column]
        if name.endswith("_max"):
            combined[name] = float(values.max())
        elif name.endswith("_sum"):
            combined[name] = float(values.sum())
        else:
            combined[name] = float(values.mean())
    return combined
