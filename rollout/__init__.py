"""Rollouts for reinforcement learning, generated on the very parameters being trained."""

from rollout.config import EngineConfig
from rollout.drop_in import attach, detach
from rollout.engine import RolloutEngine
from rollout.results import RolloutBatch, RolloutTensors
from rollout.types import (
    Completion,
    DuplicateRequestError,
    FinishReason,
    NonFiniteLogits,
    RankError,
    RolloutError,
    RolloutMetrics,
    SamplingParams,
    UnsupportedModelError,
)

__all__ = [
    "Completion",
    "DuplicateRequestError",
    "EngineConfig",
    "FinishReason",
    "NonFiniteLogits",
    "RankError",
    "RolloutBatch",
    "RolloutEngine",
    "RolloutError",
    "RolloutMetrics",
    "RolloutTensors",
    "SamplingParams",
    "UnsupportedModelError",
    "attach",
    "detach",
]
