"""The engine inside a TRL trainer: what GRPO and RLOO share.

A step of a trainer is one ``_generate_and_score_completions``. While it runs, :class:`StepRecord` holds
what was drawn; from it come the log's ``rollout/*`` numbers, the true endings of rows, and, where the
trainer asks for them, the old logprobs.

Letters: B completions of a step on this rank, T longest completion.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
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
    GAP_ROWS,
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
        params = sampling_params(trainer.args)
        model = innermost_model(trainer.model, trainer.accelerator)
        self.engine = RolloutEngine(model, trainer._tokenizer, EngineConfig.from_any(config))
        self._params = params
        self._gap_bound = logprob_gap_bound
        self._record: StepRecord | None = None
        self._seeds = Seeds()

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
        self._record = StepRecord(masks_truncated=masks_truncated)
        seeds = copy(self._seeds)
        try:
            with self._correcting():
                output = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
            if masks_truncated:
                self._mask_truncated(output)
            self._log_rollout(output)
        except BaseException:
            self._seeds = seeds  # the step is tried again with the draws it would have had
            raise
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
        masks = self._masks_of_others(outputs) or [[1] * len(ids) for ids in completion_ids]
        record.is_trained = [[bool(value) for value in mask] for mask in masks]
        ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        record.is_truncated = [
            # what somebody else wrote last can only be judged as TRL does
            row.is_truncated if row.ends_drawn else ids[-1] not in ends
            for row, ids in zip(record.rows, completion_ids, strict=True)
        ]
        self._correct_ending_metrics(record)
        return outputs

    def _masks_of_others(self, outputs: tuple[Any, ...]) -> list[list[int]] | None:
        """Of what TRL's ``_generate`` gave: 0 for a token of a tool or environment; None: there is none."""
        raise NotImplementedError

    def _correct_ending_metrics(self, record: StepRecord) -> None:
        """Write the four metrics that TRL bases on the last token anew from the finish reasons."""
        trainer: Any = self
        device = trainer.accelerator.device
        lengths = torch.tensor([sum(row) for row in record.is_trained], device=device)
        lengths = trainer.accelerator.gather(lengths).float()
        truncated = trainer.accelerator.gather(torch.tensor(record.is_truncated, device=device))
        ended = lengths[~truncated] if not truncated.all() else torch.zeros(1)
        values = {
            "clipped_ratio": truncated.float().mean(),
            "mean_terminated_length": ended.mean(),
            "min_terminated_length": ended.min(),
            "max_terminated_length": ended.max(),
        }
        for name, value in values.items():
            self._mode_metrics[f"completions/{name}"][-1] = value.item()

    @property
    def _mode_metrics(self) -> Any:
        """TRL's lists of numbers to log, of training or of evaluation."""
        trainer: Any = self
        return trainer._metrics["train" if trainer.model.training else "eval"]

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
        """Whether the engine's logprobs may stand in, on every rank: near enough, and for all tokens
        that are learnt from (a rollout_func may write some of its own)."""
        trainer: Any = self
        assert record.gap is not None
        foreign = float(record.has_foreign_tokens)
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
        for name, value in rollout_logs(record.metrics, record.gap, trainer.accelerator).items():
            self._mode_metrics[name].append(value)

    def _mask_truncated(self, output: dict[str, Tensor]) -> None:
        """Leave the truncated rows out of the loss, as ``mask_truncated_completions`` asks."""
        trainer: Any = self
        assert self._record is not None
        mask = output["completion_mask"]
        keep = ~torch.tensor(self._record.is_truncated, device=mask.device)
        # old logprobs too: under an empty mask the new ones are 0, and exp(0 - old) must stay finite
        names = ("completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps")
        for name in output.keys() & set(names):
            output[name] = output[name] * keep.unsqueeze(1)
        loss_mask = output["completion_mask"] * output.get("tool_mask", 1)
        if "num_items_in_batch" in output:
            output["num_items_in_batch"] = trainer.accelerator.gather(loss_mask.sum()).sum()

    @contextmanager
    def _correcting(self) -> Iterator[None]:
        """Nothing to switch on where the trainer has no importance-sampling correction (RLOO)."""
        yield


def check_trl_version() -> None:
    """Raises ImportError with one sentence when TRL is outside the tested range."""
    first, beyond = map(Version, TESTED_TRL)
    if not first <= Version(trl.__version__) < beyond:
        raise ImportError(
            f"trl {trl.__version__} is not supported: this integration is tested with >= {first} and "
            f"< {beyond}; install such a version"
        )
