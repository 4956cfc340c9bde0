"""Compiled CPU kernels: the parts of a decoder layer, and what a draw reads of logits."""

from rollout.native.build import BuildError
from rollout.native.decode import DecodeCall, DecodeRows, LayerPlace
from rollout.native.draws import DrawKernels
from rollout.native.kernels import Kernels, chosen_kernels, load_kernels
from rollout.native.layers import LayerKernels, LayerWeights
from rollout.native.library import HEAD_DIMS, KINDS, LANES
from rollout.native.products import Panels, Products

__all__ = [
    "HEAD_DIMS",
    "KINDS",
    "LANES",
    "BuildError",
    "DecodeCall",
    "DecodeRows",
    "DrawKernels",
    "Kernels",
    "LayerKernels",
    "LayerPlace",
    "LayerWeights",
    "Panels",
    "Products",
    "chosen_kernels",
    "load_kernels",
]
