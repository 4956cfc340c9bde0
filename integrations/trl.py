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

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import trl
from torch import Tensor

from rollout.engine import RolloutEngine
from rollout.integrations.trl_engine import EngineMixin, check_trl_version
from rollout.integrations.trl_sampling import Seeds, before_truncation, generate_each, sampling_params


class RLOOMixin(EngineMixin):
    """The engine in ``trl.RLOOTrainer`` and its subclasses."""

    def _generate_single_turn(self, prompt_ids: Any, images: Any, multimodal_fields: Any) -> Any:
        return [list(completion.token_ids) for completion in self.rollout(prompt_ids)]

    def _generate(self, prompts: Any) -> Any:
        outputs = super()._generate(prompts)
        if self._record is not None:
            self._record.awaits_old_logprobs = True
        return outputs

    def _masks_of_others(self, outputs: tuple[Any, ...]) -> list[list[int]] | None:
        return None

    def _mask_truncated(self, output: dict[str, Tensor]) -> None:
        """... and out of the logged KL, of which TRL has divided the sum by all tokens."""
        trainer: Any = self
        before = trainer.accelerator.gather(output["completion_mask"].sum()).sum()
        super()._mask_truncated(output)
        after = trainer.accelerator.gather(output["completion_mask"].sum()).sum()
        if trainer.beta != 0.0:
            self._mode_metrics["kl"][-1] *= (before / after.clamp(min=1)).item()

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
        logprobs = [before_truncation(completion) for completion in completions]
        return ids, logprobs

    def _masks_of_others(self, outputs: tuple[Any, ...]) -> list[list[int]] | None:
        masks: list[list[int]] | None = outputs[2]
        return masks

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
        trainer: Any = self
        was_correcting, self.use_vllm = self.use_vllm, False
        outputs = super()._generate(prompts)
        if self._record is None:
            return outputs
        # a rollout_func may give no logprobs; then there is nothing to correct by
        self.use_vllm = was_correcting and outputs[4] is not None
        generate_every = trainer.args.steps_per_generation * trainer.num_iterations
        is_misaligned = trainer.args.gradient_accumulation_steps % generate_every != 0
        is_corrected = self.use_vllm and trainer.vllm_importance_sampling_correction
        self._record.awaits_old_logprobs = bool(is_misaligned or is_corrected)
        return outputs

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        with self._correcting() if "importance_sampling_ratio" in inputs else nullcontext():
            loss: Tensor = super()._compute_loss(model, inputs)
        return loss


class RLOOTrainer(RLOOMixin, trl.RLOOTrainer):
    """``trl.RLOOTrainer`` generating with an engine; see :class:`EngineMixin` for what is added."""


class GRPOTrainer(GRPOMixin, trl.GRPOTrainer):
    """``trl.GRPOTrainer`` generating with an engine; see :class:`EngineMixin` for what is added."""


def use_engine(trainer: Any, engine_config: Any = None, logprob_gap_bound: float | None = None) -> Any:
    """Make a trainer that is there already generate with an engine, and return it.

    The object stays the same; its class becomes a subclass of what it was, so that your own
    overrides go on working, but for ``_generate_single_turn``, whose place the engine takes.

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
            "logprobs": [before_truncation(c) for c in batch],
        }

    return generate_for
