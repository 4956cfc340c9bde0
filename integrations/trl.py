"""TRL's GRPO and RLOO trainers, generating with one engine on the very weights they train.

Change one import and nothing else::

    from rollout.integrations.trl import GRPOTrainer     # instead of: from trl import GRPOTrainer

or convert a trainer that is there already: ``use_engine(trainer)``. TRL's public hook is served, too:
``trl.GRPOTrainer(..., rollout_func=rollout_func(engine))``.

The subclasses replace the one method in which TRL generates. GRPO also gets the logprobs that the
tokens were drawn with, so that TRL's importance-sampling correction and its ``sampling/*`` metrics,
which TRL ties to ``use_vllm``, work here too (``vllm_importance_sampling_correction`` switches them).
Under top-k, top-p or min-p the logprobs handed over are those before truncation, so that the ratio
has mean 1 instead of the kept mass. Where TRL takes a completion for truncated because its last token
is no EOS, the engine's finish reasons decide instead.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import trl
from packaging.version import Version
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing

from rollout.config import EngineConfig
from rollout.engine import RolloutEngine
from rollout.integrations.accelerate import (
    LogprobGap,
    innermost_model,
    over_ranks,
    rollout_logs,
)
from rollout.integrations.ledger import StepRecord
from rollout.integrations.trl_sampling import Seeds, check_arguments, generate_each, sampling_params
from rollout.types import Completion
from rollout.weights import base_model_of

TESTED_TRL = ("1.16", "1.17")
"""First version that is tested, and first one that is not any more."""
GAP_ROWS = 2
"""Completions whose engine logprobs are compared with the trainer's own forward, where the trainer
does not run that forward for all of them anyway."""


class EngineMixin:
    """Puts a :class:`RolloutEngine` in the place where a TRL trainer generates.

    Args:
        model, reward_funcs, args, ...: as TRL's trainer takes them.
        engine_config: an EngineConfig or a dict of its fields. Without it,
            ``args.transformers_continuous_batching_config`` is taken.
        logprob_gap_bound: nats. While the engine's logprobs are within it of the trainer's own, on a
            sample of rows that every step checks, they are taken for the trainer's old logprobs
            instead of a forward over all rows. ``None`` runs that forward as TRL does.

    Raises:
        ImportError: this TRL is outside the tested range.
        TypeError: the model is wrapped by DDP or ``torch.compile``; let TRL do that.
        ValueError: ``use_vllm``, a vision model, or ``generation_kwargs`` that are not understood.
        UnsupportedModelError: FSDP or DeepSpeed, or a model that the engine cannot serve.
    """

    engine: RolloutEngine

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *more: Any,
        engine_config: Any = None,
        logprob_gap_bound: float | None = None,
        **kwargs: Any,
    ) -> None:
        check_trl_version()
        if args is not None:
            check_arguments(args)
        if isinstance(model, nn.Module):
            base_model_of(model)  # refuses a wrapped model, on which TRL would stumble
        super().__init__(model, reward_funcs, args, *more, **kwargs)  # type: ignore[call-arg]
        self.start_engine(engine_config, logprob_gap_bound)

    def start_engine(self, engine_config: Any = None, logprob_gap_bound: float | None = None) -> None:
        """Build the engine on the trainer's model, or refuse what cannot work."""
        trainer: Any = self
        check_arguments(trainer.args)
        if trainer._is_vlm:
            raise ValueError(
                "the processing class is a multimodal processor; RolloutEngine generates text only: "
                "give a text model with its tokenizer, or use TRL's own trainer"
            )
        config = engine_config
        if config is None:
            config = trainer.args.transformers_continuous_batching_config
        self._params = sampling_params(trainer.args)
        self._gap_bound = logprob_gap_bound
        self._record: StepRecord | None = None
        self._seeds = Seeds()
        model = innermost_model(trainer.model, trainer.accelerator)
        self.engine = RolloutEngine(model, trainer._tokenizer, EngineConfig.from_any(config))

    def rollout(self, prompt_ids: Sequence[Sequence[int]]) -> list[Completion]:
        """One completion per prompt, under the trainer's sampling settings.

        Use it in a ``rollout_func`` of your own, too: ``trainer.rollout(ids)`` as often as the
        episode needs.

        Raises:
            RolloutError: some prompts failed; they are named, and the trainer's state is intact.
        """
        trainer: Any = self
        params = replace(self._params, seed=self._seeds.next(trainer))
        batch = generate_each(self.engine, prompt_ids, params, trainer.accelerator)
        if self._record is not None:
            self._record.ledger.add(batch)
            self._record.metrics.append(batch.metrics)
        return list(batch)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        trainer: Any = self
        masks_truncated = trainer.mask_truncated_completions
        # TRL would mask by the last token; below it is done by the finish reasons
        trainer.mask_truncated_completions = False
        self._record = StepRecord(
            masks_truncated=masks_truncated, awaits_old_logprobs=self._computes_old_logprobs()
        )
        try:
            with self._correcting():
                output = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
            if masks_truncated:
                self._mask_truncated(output)
            self._log_rollout(output)
        finally:
            trainer.mask_truncated_completions = masks_truncated
            self._record = None
            self.engine.release_memory()  # neither pages nor packed copies outlive the weights
        return output

    def _generate(self, prompts: Any) -> Any:
        trainer: Any = self
        outputs = super()._generate(prompts)  # type: ignore[misc]
        record = self._record
        if record is None:
            return outputs
        prompt_ids, completion_ids = outputs[:2]
        record.rows = [record.ledger.find(*ids) for ids in zip(prompt_ids, completion_ids, strict=True)]
        ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        record.is_truncated = [
            # what a rollout_func drew elsewhere can only be judged as TRL does
            row.is_truncated if any(row.is_drawn) else ids[-1] not in ends
            for row, ids in zip(record.rows, completion_ids, strict=True)
        ]
        self._correct_ending_metrics(record, completion_ids)
        return outputs

    def _correct_ending_metrics(self, record: StepRecord, completion_ids: Any) -> None:
        """Write the four metrics that TRL bases on the last token anew from the finish reasons."""
        trainer: Any = self
        device = trainer.accelerator.device
        lengths = [
            sum(row.is_drawn) or len(ids) for row, ids in zip(record.rows, completion_ids, strict=True)
        ]
        lengths = trainer.accelerator.gather(torch.tensor(lengths, device=device)).float()
        truncated = trainer.accelerator.gather(torch.tensor(record.is_truncated, device=device))
        ended = lengths[~truncated] if not truncated.all() else torch.zeros(1)
        values = {
            "clipped_ratio": truncated.float().mean(),
            "mean_terminated_length": ended.mean(),
            "min_terminated_length": ended.min(),
            "max_terminated_length": ended.max(),
        }
        metrics = trainer._metrics["train" if trainer.model.training else "eval"]
        for name, value in values.items():
            metrics[f"completions/{name}"][-1] = value.item()

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kw: Any,
    ) -> Any:
        """TRL's forward; for the old logprobs the engine's numbers are compared or taken instead."""
        forward = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        record = self._record
        if record is None or not record.awaits_old_logprobs:
            return forward(model, input_ids, attention_mask, logits_to_keep, *args, **kw)
        record.awaits_old_logprobs = False
        ours, is_drawn = record.policy_logprobs(logits_to_keep, input_ids.device)
        if self._gap_bound is not None:
            record.gap = self._gap_on_sample(input_ids, attention_mask, ours, is_drawn)
            if self._is_within_bound(record):
                return ours, None, None
        result = forward(model, input_ids, attention_mask, logits_to_keep, *args, **kw)
        record.gap = LogprobGap.between(ours, result[0], is_drawn)
        return result

    def _is_within_bound(self, record: StepRecord) -> bool:
        """Whether the engine's logprobs may stand in, on every rank: near enough, and all rows its own
        (a rollout_func may draw elsewhere)."""
        trainer: Any = self
        assert record.gap is not None
        foreign = sum(not any(row.is_drawn) for row in record.rows)
        worst = over_ranks(
            trainer.accelerator, sums={}, maxima={"gap": record.gap.largest, "foreign": foreign}
        )
        return worst["gap"] <= self._gap_bound and not worst["foreign"]

    def _gap_on_sample(
        self, input_ids: Tensor, attention_mask: Tensor, ours: Tensor, is_drawn: Tensor
    ) -> LogprobGap:
        """The gap on the first rows, by a forward of the trainer's that leaves its RNG as it was."""
        trainer: Any = self
        rows = slice(0, GAP_ROWS)
        devices = [input_ids.device] if input_ids.device.type == "cuda" else []
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices),
            disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs),
        ):
            theirs = super()._get_per_token_logps_and_entropies(  # type: ignore[misc]
                trainer.model, input_ids[rows], attention_mask[rows], ours.shape[1]
            )[0]
        return LogprobGap.between(ours[rows], theirs, is_drawn[rows])

    def _log_rollout(self, output: dict[str, Tensor]) -> None:
        trainer: Any = self
        record = self._record
        assert record is not None
        if record.gap is None:
            ids, mask = (
                torch.cat([output[f"prompt_{what}"], output[f"completion_{what}"]], dim=1)
                for what in ("ids", "mask")
            )
            ours, is_drawn = record.policy_logprobs(output["completion_ids"].shape[1], ids.device)
            record.gap = self._gap_on_sample(ids, mask, ours, is_drawn & output["completion_mask"].bool())
        metrics = trainer._metrics["train" if trainer.model.training else "eval"]
        for name, value in rollout_logs(record.metrics, record.gap, trainer.accelerator).items():
            metrics[name].append(value)

    def _mask_truncated(self, output: dict[str, Tensor]) -> None:
        """Leave the truncated rows out of the loss, as ``mask_truncated_completions`` asks."""
        trainer: Any = self
        assert self._record is not None
        mask = output["completion_mask"]
        keep = ~torch.tensor(self._record.is_truncated, device=mask.device)
        for name in {"completion_mask", "tool_mask"} & output.keys():
            output[name] = output[name] * keep.unsqueeze(1)
        loss_mask = output["completion_mask"] * output.get("tool_mask", 1)
        if "num_items_in_batch" in output:
            output["num_items_in_batch"] = trainer.accelerator.gather(loss_mask.sum()).sum()

    def _computes_old_logprobs(self) -> bool:
        """Whether TRL runs the policy over the completions before the update."""
        raise NotImplementedError

    @contextmanager
    def _correcting(self) -> Iterator[None]:
        """Nothing to switch on where the trainer has no importance-sampling correction (RLOO)."""
        yield


class RLOOMixin(EngineMixin):
    """The engine in ``trl.RLOOTrainer`` and its subclasses."""

    def _generate_single_turn(self, prompt_ids: Any, images: Any, multimodal_fields: Any) -> Any:
        return [list(completion.token_ids) for completion in self.rollout(prompt_ids)]

    def _computes_old_logprobs(self) -> bool:
        return True

    def _get_per_token_logps_and_entropies(self, *args: Any, **kw: Any) -> Any:
        """RLOO sums logprobs under the mask while it scores; there truncated rows count as 0 in it."""
        logprobs, *more = super()._get_per_token_logps_and_entropies(*args, **kw)
        if self._record is not None and self._record.masks_truncated:
            is_truncated = torch.tensor(self._record.is_truncated, device=logprobs.device)
            logprobs = logprobs.masked_fill(is_truncated.unsqueeze(1), 0.0)
        return (logprobs, *more)


class GRPOMixin(EngineMixin):
    """The engine in ``trl.GRPOTrainer`` and its subclasses."""

    use_vllm: bool

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

    def _computes_old_logprobs(self) -> bool:
        trainer: Any = self
        generate_every = trainer.args.steps_per_generation * trainer.num_iterations
        is_misaligned = trainer.args.gradient_accumulation_steps % generate_every != 0
        return bool(is_misaligned or trainer.vllm_importance_sampling_correction)

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

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        with self._correcting():
            loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        return loss


class RLOOTrainer(RLOOMixin, trl.RLOOTrainer):
    """``trl.RLOOTrainer`` generating with an engine; see :class:`EngineMixin` for what is added."""


class GRPOTrainer(GRPOMixin, trl.GRPOTrainer):
    """``trl.GRPOTrainer`` generating with an engine; see :class:`EngineMixin` for what is added."""


def use_engine(trainer: Any, engine_config: Any = None, logprob_gap_bound: float | None = None) -> Any:
    """Make a trainer that is there already generate with an engine, and return it.

    The object stays the same; its class becomes a subclass of what it was, so that your own
    overrides go on working.

    Example::

        trainer = use_engine(MyGRPOTrainer(model, ...))
        trainer.train()

    Raises:
        TypeError: no GRPO or RLOO trainer of TRL, or one that has an engine.
        ValueError, UnsupportedModelError, ImportError: as :class:`EngineMixin` raises them; the
            trainer is then as it was.
    """
    check_trl_version()
    before = type(trainer)
    if isinstance(trainer, EngineMixin) or not isinstance(trainer, (trl.GRPOTrainer, trl.RLOOTrainer)):
        raise TypeError(
            f"trainer has type {before.__name__}; give a trl.GRPOTrainer or trl.RLOOTrainer (or a "
            "subclass) that has no engine yet"
        )
    mixin = GRPOMixin if isinstance(trainer, trl.GRPOTrainer) else RLOOMixin
    converted: Any = trainer
    converted.__class__ = type(before.__name__, (mixin, before), {})
    try:
        converted.start_engine(engine_config, logprob_gap_bound)
    except BaseException:
        converted.__class__ = before
        raise
    return converted


def rollout_func(engine: RolloutEngine) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A ``rollout_func`` for ``trl.GRPOTrainer``: TRL's public hook for generation.

    TRL then neither corrects by the logprobs nor runs tools; :class:`GRPOTrainer` does both.

    Example::

        engine = RolloutEngine(model, tokenizer)
        trl.GRPOTrainer(model, rewards, args, rollout_func=rollout_func(engine))

    The function raises ValueError when the engine is on another model than the trainer's.
    """
    check_trl_version()
    seeds = Seeds()

    def generate_for(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ours = {id(parameter) for parameter in engine.model.parameters()}
        if not all(id(parameter) in ours for parameter in trainer.model.parameters()):
            raise ValueError(
                "the engine is on another model than the trainer's; build it on the model that you "
                "give to the trainer (or on trainer.model)"
            )
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        params = replace(sampling_params(trainer.args), seed=seeds.next(trainer))
        try:
            batch = generate_each(engine, prompt_ids, params, trainer.accelerator)
        finally:
            engine.release_memory()
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [list(c.token_ids) for c in batch],
            "logprobs": [list(c.logprobs) for c in batch],
        }

    return generate_for


def check_trl_version() -> None:
    """Raises ImportError with one sentence when TRL is outside the tested range."""
    first, beyond = map(Version, TESTED_TRL)
    if not first <= Version(trl.__version__) < beyond:
        raise ImportError(
            f"trl {trl.__version__} is not supported: this integration is tested with >= {first} and "
            f"< {beyond}; install such a version"
        )
