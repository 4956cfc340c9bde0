"""Forwards of the view without the wrappers that transformers puts around them.

The wrappers translate deprecated arguments, fill in defaults from the config and collect hidden states, none
of which a step asks for; they take a hundredth of a decode step on the CPU.
"""

import logging
from collections.abc import Callable
from types import FunctionType, MethodType

import torch
from torch import nn

from rollout.stacked import own_values_logits

logger = logging.getLogger("rollout")

WRAPPERS = frozenset(
    f"transformers.utils.{module}" for module in ("deprecation", "generic", "output_capturing")
)
"""Modules whose wrappers are passed over; those of anybody else (a user's, an autocast) stay."""


class BareForward:
    """A module's forward as its author wrote it."""

    def __init__(self, module: nn.Module, function: FunctionType) -> None:
        self._call = MethodType(function, module)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """What the module's forward gives."""
        return self._call(*args, **kwargs)


def bare_forwards(view: nn.Module, device: torch.device) -> int:
    """Pass over the wrappers of every forward in ``view``, if the model computes the same without; returns
    how many forwards had any. Costs two passes of four tokens."""
    found = [(module, bare_of(type(module).forward)) for module in view.modules()]
    found = [
        (module, bare)
        for module, bare in found
        if bare is not type(module).forward and "forward" not in vars(module)
    ]
    if not found:
        return 0
    is_done = False
    try:
        expected = own_values_logits(view, device)
        for module, bare in found:
            assert isinstance(bare, FunctionType)
            setattr(module, "forward", BareForward(module, bare))  # noqa: B010  (an instance's own)
        if not torch.equal(own_values_logits(view, device), expected):
            raise ValueError("the model computes something else without them")
        is_done = True
    except Exception as error:  # the model's own code, met in a way it does not expect
        logger.info("wrappers of forwards are kept: %s: %s", type(error).__name__, error)
    finally:
        if not is_done:
            wrapped_forwards(view)
    return len(found) if is_done else 0


def wrapped_forwards(view: nn.Module) -> None:
    """Go back to the forwards with their wrappers."""
    for module in view.modules():
        if isinstance(vars(module).get("forward"), BareForward):
            del module.forward


def bare_of(forward: Callable[..., object]) -> Callable[..., object]:
    """The function inside the wrappers of transformers."""
    while isinstance(forward, FunctionType) and "__wrapped__" in vars(forward):
        if forward.__globals__["__name__"] not in WRAPPERS:
            break
        forward = vars(forward)["__wrapped__"]
    return forward
