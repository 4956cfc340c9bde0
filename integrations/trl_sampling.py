"""How a TRL trainer's configuration becomes requests: parameters, seeds, and the samples of a prompt."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from trl import GRPOConfig

from rollout.engine import RolloutEngine
from rollout.integrations.accelerate import generate, rollout_seed
from rollout.results import RolloutBatch
from rollout.types import Completion, SamplingParams

GENERATION_KWARGS = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "stop_strings",
)
"""``generation_kwargs`` of TRL that are understood; SamplingParams has them under the same names."""


def sampling_params(args: Any) -> SamplingParams:
    """What a ``GRPOConfig`` or ``RLOOConfig`` says about sampling.

    Raises:
        ValueError: ``generation_kwargs`` asks for something that the engine does not do.
    """
    values: dict[str, Any] = {
        "max_new_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
    }
    extra = dict(args.generation_kwargs or {})
    if extra.pop("do_sample", True) is False:
        extra["temperature"] = 0.0
    unknown = sorted(set(extra) - set(GENERATION_KWARGS))
    if unknown:
        raise ValueError(
            f"generation_kwargs has {unknown}, which RolloutEngine does not offer; "
            f"it understands {', '.join(GENERATION_KWARGS)} and do_sample"
        )
    values |= extra
    if isinstance(values.get("stop_strings"), str):
        values["stop_strings"] = [values["stop_strings"]]
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def check_arguments(args: Any) -> None:
    """Raises ValueError for what a TRL config asks and the engine cannot do."""
    if args.use_vllm:
        raise ValueError("use_vllm=True generates with vLLM; set it to False to generate with RolloutEngine")
    if isinstance(args, GRPOConfig) and args.vllm_importance_sampling_correction:
        per_token = ("token_truncate", "token_mask")
        if args.loss_type == "vespo" and args.vllm_importance_sampling_mode not in per_token:
            raise ValueError(
                "loss_type='vespo' corrects each token, and vllm_importance_sampling_mode="
                f"{args.vllm_importance_sampling_mode!r} gives one ratio per row; choose from {per_token}"
            )
    sampling_params(args)


def before_truncation(completion: Completion) -> list[float]:
    """Logprobs of a completion's tokens as drawn, but before top-k, top-p and min-p: a ratio to these
    corrects for the weights alone and has mean 1, not the kept mass."""
    pairs = zip(completion.logprobs, completion.log_kept_mass, strict=True)
    return [drawn + kept for drawn, kept in pairs]


class Seeds:
    """A seed for every generate call of a trainer, by the place of the call in the training run.

    Not by a running count: a resumed run draws what the uninterrupted one would have drawn.
    """

    def __init__(self) -> None:
        self._place = (True, -1)  # (training or evaluating, step) of the last call
        self._num_calls = 0  # calls there

    def next(self, trainer: Any) -> int:
        """The seed of the call that is about to be made."""
        place = (trainer.model.training, trainer.state.global_step)
        self._num_calls = self._num_calls + 1 if place == self._place else 0
        self._place = place
        return rollout_seed(trainer.args.seed, trainer.accelerator, *map(int, place), self._num_calls)


def generate_each(
    engine: RolloutEngine, prompt_ids: Sequence[Sequence[int]], params: SamplingParams, accelerator: Any
) -> RolloutBatch:
    """One completion per prompt; equal neighbours become the samples of one request."""
    runs = [(list(ids), len(list(run))) for ids, run in groupby(map(list, prompt_ids))]
    all_params = [replace(params, n=n) for _, n in runs]
    return generate(engine, [ids for ids, _ in runs], all_params, accelerator)
