"""Compiled kernels as other CPUs would have them."""

import shlex

import pytest

from rollout.native import Kernels, build


def kernels_without(instructions: str) -> Kernels:
    """Those of this CPU if it had not these instructions, named as g++'s option names them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", shlex.join([*build.find_compiler(), f"-mno-{instructions}"]))
        return Kernels(build.load_library())
