"""TRL's GRPO and RLOO trainers, generating with one engine on the very weights they train.

Change one import and nothing else::

    from rollout.integrations.trl import GRPOTrainer     # instead of: from trl import GRPOTrainer

The subclasses replace the one method in which TRL generates. GRPO also gets the logprobs that the
tokens were drawn with, so that TRL's importance-sampling correction and its ``sampling/*`` metrics,
which TRL ties to ``use_vllm``, work here too (``vllm_importance_sampling_correction`` switches them).
Under top-k, top-p or min-p the logprobs handed over are those before truncation, so that the ratio
has mean 1 instead of the kept mass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import trl
from packaging.version import Version
from transformers import PreTrainedTokenizerBase

from rollout.config import EngineConfig
from rollout.engine import RolloutEngine
from rollout.integrations.accelerate import innermost_model, over_ranks
from rollout.results import RolloutBatch
from rollout.types import Completion, RolloutError, SamplingParams

TESTED_TRL = ("1.16", "1.17")
"""First version that is tested, and first one that is not any more."""
GENERATION_KWARGS = {
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop_strings": "stop_strings",
}
"""``generation_kwargs`` of TRL that are understood -> fields of SamplingParams."""
GAP_ROWS = 2
"""Completions per generation whose engine logprobs are compared with the trainer's own forward."""


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
    values |= {GENERATION_KWARGS[name]: value for name, value in extra.items()}
    if isinstance(values.get("stop_strings"), str):
        values["stop_strings"] = [values["stop_strings"]]
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


class EngineMixin:
    """Puts a :class:`RolloutEngine` in the place where a TRL trainer generates."""

    engine: RolloutEngine

    def __init__(self, *args: Any, engine_config: Any = None, **kwargs: Any) -> None:
        check_trl_version()
        super().__init__(*args, **kwargs)
        self.start_engine(engine_config)

    def start_engine(self, engine_config: Any) -> None:
        """Build the engine on the trainer's model, or refuse what cannot work."""
        trainer: Any = self
        if trainer.use_vllm:
            raise ValueError(
                "use_vllm=True generates with vLLM; set it to False to generate with RolloutEngine"
            )
        if trainer._is_vlm:
            raise ValueError("vision models are not supported by RolloutEngine; use a text model")
        config = engine_config
        if config is None:
            config = {
                "seed": trainer.args.seed,
                **(trainer.args.transformers_continuous_batching_config or {}),
            }
        self._params = sampling_params(trainer.args)
        self._is_corrected = False
        self._last_batch: RolloutBatch | None = None
        tokenizer: PreTrainedTokenizerBase = trainer._tokenizer
        model = innermost_model(trainer.model, trainer.accelerator)
        self.engine = RolloutEngine(model, tokenizer, EngineConfig.from_any(config))

    def rollout(self, prompt_ids: Sequence[Sequence[int]]) -> list[Completion]:
        """One completion per prompt; equal neighbours are samples of one request.

        Raises:
            RolloutError: some prompts failed; they are named, and the trainer's state is intact.
        """
        trainer: Any = self
        runs = [(list(ids), len(list(run))) for ids, run in groupby(map(list, prompt_ids))]
        params = [self._with_n(n) for _, n in runs]
        batch = self.engine.generate([ids for ids, _ in runs], params, on_error="return")
        if batch.failed:
            places = [i for i, completion in enumerate(batch) if completion.error is not None]
            raise RolloutError(
                f"generation failed for the prompts at {places} of this step; first: "
                f"{type(batch.failed[0].error).__name__}: {batch.failed[0].error}",
                batch,
            ) from batch.failed[0].error
        self._last_batch = batch
        self._log_rollout(trainer, batch)
        return list(batch)

    def _with_n(self, n: int) -> SamplingParams:
        from_args = {name: getattr(self._params, name) for name in SamplingParams.__dataclass_fields__}
        return SamplingParams(**(from_args | {"n": n}))

    def _log_rollout(self, trainer: Any, batch: RolloutBatch) -> None:
        metrics = batch.metrics
        numbers = over_ranks(
            {
                "tokens_per_second_sum": metrics.tokens_per_second,
                "cached_tokens_sum": float(metrics.cached_tokens),
                "seconds_max": metrics.seconds,
                "truncated": metrics.truncated_fraction,
                "weight_version_max": float(metrics.weight_version),
            },
            trainer.accelerator,
        )
        mode = "train" if trainer.model.training else "eval"
        for name, value in numbers.items():
            short = name.removesuffix("_sum").removesuffix("_max")
            trainer._metrics[mode][f"rollout/{short}"].append(value)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        trainer: Any = super()
        try:
            with self._correcting():
                return trainer._generate_and_score_completions(inputs)
        finally:
            self.engine.release_memory()  # neither pages nor packed copies outlive the weights

    @contextmanager
    def _correcting(self) -> Iterator[None]:
        """Nothing to switch on where the trainer has no importance-sampling correction (RLOO)."""
        yield


class RLOOTrainer(EngineMixin, trl.RLOOTrainer):
    """``trl.RLOOTrainer`` with ``engine_config=`` (an EngineConfig or a dict of its fields)."""

    def _generate_single_turn(self, prompt_ids: Any, images: Any, multimodal_fields: Any) -> Any:
        return [list(completion.token_ids) for completion in self.rollout(prompt_ids)]


class GRPOTrainer(EngineMixin, trl.GRPOTrainer):
    """``trl.GRPOTrainer`` with ``engine_config=`` (an EngineConfig or a dict of its fields)."""

    def _generate_single_turn(
        self,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> Any:
        completions = self.rollout(prompt_ids)
        ids = [list(completion.token_ids) for completion in completions]
        # before truncation: the correction then is for the weights alone, not for the kept mass
        logprobs = [
            [drawn + kept for drawn, kept in zip(c.logprobs, c.log_kept_mass, strict=True)]
            for c in completions
        ]
        return ids, logprobs

    @contextmanager
    def _correcting(self) -> Iterator[None]:
        """TRL asks ``use_vllm`` whether to correct. It is true only while TRL scores and computes the
        loss; wherever else it has an effect (:meth:`_generate`) it is false again."""
        self.use_vllm = True
        try:
            yield
        finally:
            self.use_vllm = False

    def _generate(self, prompts: Any) -> Any:
        was_correcting, self.use_vllm = self.use_vllm, False
        try:
            return super()._generate(prompts)
        finally:
            self.use_vllm = was_correcting

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        with self._correcting():
            loss: torch.Tensor = super()._compute_loss(model, inputs)
        return loss


def check_trl_version() -> None:
    """Raises ImportError with one sentence when TRL is outside the tested range."""
    first, beyond = map(Version, TESTED_TRL)
    if not first <= Version(trl.__version__) < beyond:
        raise ImportError(
            f"trl {trl.__version__} is not supported: this integration is tested with >= {first} and "
            f"< {beyond}; install such a version"
        )
