"""Compiled CPU kernels: what a decoder layer does besides its linears, and what a draw reads of logits."""

from rollout.native.build import BuildError
from rollout.native.kernels import HEAD_DIMS, KINDS, LANES, Kernels, chosen_kernels, load_kernels

__all__ = ["HEAD_DIMS", "KINDS", "LANES", "BuildError", "Kernels", "chosen_kernels", "load_kernels"]
