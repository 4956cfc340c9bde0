"""Compiled kernels as other CPUs would have them."""

import shlex

import pytest
import torch

from rollout.native import Kernels, build


def kernels_without(capability: str) -> Kernels:
    """Those of this CPU had it not what torch calls by this name; skips where it has not."""
    if not torch.cpu.get_capabilities().get(capability, False):
        pytest.skip(f"this CPU has no {capability}: its kernels are those without it already")
    option = capability.replace("avx512_f", "avx512f").replace("_", "-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", shlex.join([*build.find_compiler(), f"-mno-{option}"]))
        return Kernels(build.load_library())
