"""Between the host and the device without waiting, where the device works on its own.

An upload from pageable memory makes the host wait until everything before it is done; one from pinned
memory is queued like any other work. On a CPU both are nothing.
"""

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, queued behind the device's work."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    # the pinned copy is given back to its pool only when the device has read it
    return tensor.pin_memory().to(device, non_blocking=True)


def refill(target: Tensor, source: Tensor) -> None:
    """Overwrite ``target`` by ``source`` from the host, queued behind the target's device's work."""
    if target.device.type == "cuda":
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)


class Readback:
    """A tensor on its way to the host.

    Example::

        readback = Readback(table)      # queued: more work may be queued behind it
        numbers = readback.wait()       # waits for this copy only
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """The tensor on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
