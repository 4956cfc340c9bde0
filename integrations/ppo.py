"""PPO with a learned value function on accelerate, generating on the very weights it trains.

A step is four calls in order: draw prompts, roll out and score them, turn that into an
:class:`Experience`, update policy and value. The engine's logprobs are the old logprobs of the
ratio where they equal the trainer's own forward; otherwise that forward is run. ``ppo_config.py``
holds the settings, ``ppo_math.py`` the models and the arithmetic. All ranks have equally many
rows, with masked dummies where prompts run out, so that all take the same backwards and
reductions.

Letters: B completions, P longest prompt, T longest completion.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from rollout.engine import RolloutEngine
from rollout.integrations import ppo_math
from rollout.integrations.accelerate import (
    GAP_ROWS,
    LogprobGap,
    generate,
    innermost_model,
    over_ranks,
    rollout_logs,
    rollout_seed,
    share_of_rank,
)
from rollout.integrations.ppo_config import PPOConfig
from rollout.integrations.ppo_math import Experience, PolicyWithValue
from rollout.results import RolloutBatch
from rollout.types import Completion

__all__ = ["PPOConfig", "PPOTrainer", "TrainerState"]

STATE_FILE = "trainer_state.json"  # written last: a checkpoint with it is complete

RewardFunc: TypeAlias = Callable[..., Any]
Callback: TypeAlias = Callable[[int, dict[str, float]], None]


@dataclass(slots=True, kw_only=True)
class TrainerState:
    """What a checkpoint holds besides weights and optimizer; the one mutable record of a run."""

    step: int = 0
    episode: int = 0
    kl_coef: float


class PPOTrainer:
    """Proximal policy optimisation of a transformers causal LM or a PEFT model around one.

    Example::

        args = PPOConfig(output_dir="runs/ppo", max_steps=50, learning_rate=1e-5)
        trainer = PPOTrainer(model, args, dataset, reward, tokenizer)
        trainer.train()
        trainer.save_model("runs/ppo/model")

    Args:
        model: the policy, its trainable weights in fp32. Its dropout is switched off, since old and
            new logprobs must differ by the weights alone.
        train_dataset: rows with a ``"prompt"`` (text, chat messages or token ids); the other columns
            go to the reward functions.
        reward_funcs: functions of ``(prompts=, completions=, completion_ids=, **columns)`` that give a
            number per completion, as in TRL, or sequence-classification models; scores are added up.
        processing_class: the policy's tokenizer.
        reward_processing_class: the tokenizer of reward models.
        ref_model: where KL is measured from. ``None``: the adapter switched off, or a frozen copy.
        value_model: its body (and ``score`` layer, if it has one) starts the value function.
        peft_config: train this adapter instead of the model.
        engine_config: of the engine, see :class:`~rollout.config.EngineConfig`.
        callbacks: called with (step, logs) after each step, on every rank.
        optimizer_cls_and_kwargs: instead of AdamW; ``lr`` is ``learning_rate`` unless given here.
        accelerator: instead of one made from ``args``.

    Raises:
        ValueError: two arguments contradict each other, or something is missing.
        UnsupportedModelError: the engine cannot serve the model, or the job shards it.
    """

    def __init__(
        self,
        model: nn.Module,
        args: PPOConfig,
        train_dataset: Any,
        reward_funcs: RewardFunc | nn.Module | Sequence[RewardFunc | nn.Module],
        processing_class: PreTrainedTokenizerBase,
        *,
        reward_processing_class: PreTrainedTokenizerBase | None = None,
        ref_model: nn.Module | None = None,
        value_model: nn.Module | None = None,
        peft_config: Any = None,
        engine_config: Any = None,
        callbacks: Sequence[Callback] = (),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.args, self.callbacks = args, tuple(callbacks)
        self.accelerator = _checked_accelerator(accelerator, args)
        innermost_model(model, self.accelerator)  # refuses sharded jobs before anything is made
        self._dataset = _checked_dataset(train_dataset)
        self.tokenizer, self._pad_id = processing_class, _pad_id(processing_class)
        self._rewards = _checked_rewards(reward_funcs, reward_processing_class, self.accelerator.device)
        self._reward_tokenizer = reward_processing_class
        module, reference = ppo_math.build_models(
            model,
            ref_model=ref_model,
            value_model=value_model,
            peft_config=peft_config,
            value_backbone=args.value_backbone,
            temperature=args.temperature,
            needs_reference=args.kl_coef > 0,
        )
        self._reference = None if reference is None else reference.to(self.accelerator.device)
        trainable = [p for p in module.parameters() if p.requires_grad]
        kind, kwargs = optimizer_cls_and_kwargs or (torch.optim.AdamW, {"weight_decay": 0.0})
        optimizer = kind(trainable, **({"lr": args.learning_rate} | kwargs))
        self._first_lrs = [group["lr"] for group in optimizer.param_groups]
        self._model, self._optimizer = self.accelerator.prepare(module, optimizer)
        bare = innermost_model(self._model, self.accelerator)
        assert isinstance(bare, PolicyWithValue)
        self._bare = bare
        self.engine = RolloutEngine(bare.policy, processing_class, engine_config)
        self.state = TrainerState(kl_coef=args.kl_coef)
        if self.accelerator.log_with:
            settings = {field.name: getattr(args, field.name) for field in fields(args)}
            plain = {k: v for k, v in settings.items() if isinstance(v, (int, float, str))}
            self.accelerator.init_trackers("ppo", config=plain)

    @property
    def model(self) -> nn.Module:
        """The policy that is trained, unwrapped."""
        return self._bare.policy

    @property
    def batch_size(self) -> int:
        """Prompts per step over all processes."""
        args = self.args
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.num_mini_batches
        return args.batch_size or rows * self.accelerator.num_processes

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.args.max_steps or -(-(self.args.total_episodes or 0) // self.batch_size)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> None:
        """Go on from the current step (or the checkpoint; ``True``: the newest) to the last one.

        A resumed run goes on bit by bit as the uninterrupted one would have; build the trainer from
        the same model and settings, since the reference is not part of a checkpoint.

        Raises:
            RolloutError: prompts failed; they are named, and the trainer can go on.
            ValueError: a reward function gave something else than a number per completion.
        """
        if resume_from_checkpoint:
            folder = self._checkpoint_to_resume(resume_from_checkpoint)
            self.accelerator.load_state(str(folder))
            self.state = TrainerState(**json.loads((folder / STATE_FILE).read_text()))
        self._model.train()  # gradient checkpointing works in this mode only; dropout is off
        silent = self.args.disable_tqdm or not self.accelerator.is_main_process
        with tqdm(total=self.num_steps, initial=self.state.step, disable=silent, unit="step") as bar:
            while self.state.step < self.num_steps:
                logs = self._step()
                bar.set_postfix({"score": f"{logs['objective/scores']:.3g}"}, refresh=False)
                bar.update()
                if self.accelerator.log_with:
                    self.accelerator.log(logs, step=self.state.step)
                for callback in self.callbacks:
                    callback(self.state.step, logs)
                if self.args.save_steps and self.state.step % self.args.save_steps == 0:
                    self.save_checkpoint()

    def save_model(self, folder: str) -> None:
        """The policy (of a PEFT model: its adapter) and the tokenizer. Every rank may call this."""
        if self.accelerator.is_main_process:
            self.model.save_pretrained(folder)  # type: ignore[operator]
            self.tokenizer.save_pretrained(folder)
        self.accelerator.wait_for_everyone()

    def save_checkpoint(self) -> str:
        """Everything that :meth:`train` resumes from; returns its folder. Every rank must call this."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.step}"
        is_main = self.accelerator.is_main_process
        if is_main:
            (folder / STATE_FILE).unlink(missing_ok=True)  # an older run's folder is incomplete from here
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(folder))
        self.accelerator.wait_for_everyone()
        if is_main:
            (folder / STATE_FILE).write_text(json.dumps(asdict(self.state)))
            for old in (
                self._checkpoints()[: -self.args.save_total_limit] if self.args.save_total_limit else ()
            ):
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()
        return str(folder)

    def _checkpoints(self) -> list[Path]:
        """Complete ones in ``output_dir``, oldest first. By time: an older run may have gone further."""
        states = Path(self.args.output_dir).glob(f"checkpoint-*/{STATE_FILE}")
        return [state.parent for state in sorted(states, key=lambda state: state.stat().st_mtime_ns)]

    def _checkpoint_to_resume(self, given: str | bool) -> Path:
        found = self._checkpoints() if given is True else [Path(str(given))]
        if not found or not (found[-1] / STATE_FILE).exists():
            raise ValueError(
                f"resume_from_checkpoint={given!r}: no complete checkpoint there or in "
                f"output_dir={self.args.output_dir!r}; give a folder that save_checkpoint returned, or None"
            )
        return found[-1]

    def _step(self) -> dict[str, float]:
        """Roll out, score, learn. Until the update nothing of the trainer's state has changed."""
        state = self.state
        places = ppo_math.prompt_places(state.step, self.batch_size, len(self._dataset), self.args.seed)
        rows = [self._dataset[place] for place in share_of_rank(places, self.accelerator)]
        params = self.args.sampling_params(seed=rollout_seed(self.args.seed, self.accelerator, state.step))
        try:
            batch = generate(self.engine, [row["prompt"] for row in rows], params, self.accelerator)
            scores = self._score(rows, batch.completions)
        finally:
            self.engine.release_memory()  # pages and packed copies are not needed by the update
        started = time.perf_counter()
        experience, logs = self._experience(batch, scores)
        rate = 1 - state.step / self.num_steps if self.args.lr_scheduler_type == "linear" else 1.0
        for group, first_lr in zip(self._optimizer.param_groups, self._first_lrs, strict=True):
            group["lr"] = first_lr * rate
        logs |= self._update(experience)
        logs |= {"kl_coef": state.kl_coef, "lr": self._optimizer.param_groups[0]["lr"]}
        state.step += 1
        state.episode += self.batch_size
        if self.args.target_kl is not None:
            gain = self.batch_size / self.args.kl_horizon
            state.kl_coef = ppo_math.next_kl_coef(
                state.kl_coef, logs["objective/kl"], target=self.args.target_kl, gain=gain
            )
        return logs | {"episode": state.episode, "seconds_training": time.perf_counter() - started}

    def _score(self, rows: list[dict[str, Any]], completions: Sequence[Completion]) -> list[float]:
        """The summed scores of this rank's completions."""
        if not rows:
            return []
        prompts = [row["prompt"] for row in rows]
        ids = [list(c.token_ids) for c in completions]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        answers = [
            [{"role": "assistant", "content": text}] if _is_chat(prompt) else text
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        scores = np.zeros(len(rows))
        for reward in self._rewards:
            if isinstance(reward, nn.Module):
                given = self._model_scores(reward, prompts, answers)
            else:
                given = reward(prompts=prompts, completions=answers, completion_ids=ids, **columns)
            scores += ppo_math.checked_scores(reward, given, len(rows))
        if self.args.missing_eos_penalty is not None:
            scores -= self.args.missing_eos_penalty * np.array([not c.is_finished for c in completions])
        return [float(score) for score in scores]

    @torch.no_grad()
    def _model_scores(self, reward: nn.Module, prompts: list[Any], answers: list[Any]) -> list[float]:
        tokenizer = self._reward_tokenizer
        assert tokenizer is not None
        texts = [self._whole_text(*each, tokenizer) for each in zip(prompts, answers, strict=True)]
        # special tokens come from the template, or the prompt has them
        padding = {"padding": True, "padding_side": "right", "add_special_tokens": False}
        encoded = tokenizer(texts, return_tensors="pt", **padding).to(self.accelerator.device)

        def run(ids: Tensor, attention_mask: Tensor, _: int) -> Tensor:
            logits: Tensor = reward(input_ids=ids, attention_mask=attention_mask).logits
            return logits[:, 0].float()

        mask = encoded["attention_mask"]
        scores: list[float] = self._in_chunks(run, encoded["input_ids"], mask, mask).tolist()
        return scores

    def _whole_text(self, prompt: Any, answer: Any, tokenizer: PreTrainedTokenizerBase) -> str:
        """Prompt and completion as a reward model reads them."""
        if _is_chat(prompt):
            return str(tokenizer.apply_chat_template([*prompt, *answer], tokenize=False))
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special_tokens=True)
        return f"{text}{answer}"

    @torch.no_grad()
    def _experience(self, batch: RolloutBatch, scores: list[float]) -> tuple[Experience, dict[str, float]]:
        """Logprobs, values, rewards and advantages of the batch, and what to log of them."""
        args, device = self.args, self.accelerator.device
        num_rows = int(over_ranks(self.accelerator, sums={}, maxima={"rows": len(batch)})["rows"])
        tensors = ppo_math.with_dummies(batch, num_rows, self._pad_id).to_tensors(self._pad_id, device)
        ids = torch.cat([tensors.prompt_ids, tensors.completion_ids], 1)
        attention_mask = torch.cat([tensors.prompt_mask, tensors.completion_mask], 1)
        mask = tensors.completion_mask.bool()
        logprobs, logs = self._old_logprobs(ids, attention_mask, mask, tensors.policy_logprobs, batch)
        values = self._in_chunks(self._bare.values, ids, attention_mask, mask) * mask
        reference = self._reference_logprobs(ids, attention_mask, mask, logprobs)
        kl = ppo_math.kl_estimate(logprobs, reference, args.kl_estimator) * mask
        padded = torch.tensor([*scores, *[0.0] * (num_rows - len(scores))], device=device)
        rewards = ppo_math.token_rewards(kl, padded, mask, self.state.kl_coef)
        if args.whiten_rewards:
            rewards = ppo_math.whiten(rewards, mask, shift_mean=False, total=self.accelerator.reduce)
        advantages, returns = ppo_math.gae(rewards, values, mask, args.gamma, args.lam)
        if args.whiten_advantages:
            advantages = ppo_math.whiten(advantages, mask, total=self.accelerator.reduce)
        sums = {"scores": sum(scores), "kl": float(kl.sum()), "tokens": int(mask.sum()), "rows": len(batch)}
        numbers = over_ranks(self.accelerator, sums=sums, maxima={})
        mean = {name: numbers[name] / max(numbers["rows"], 1) for name in sums}
        penalty = -self.state.kl_coef * mean["kl"]
        logs |= {
            "objective/scores": mean["scores"],
            "objective/kl": mean["kl"],
            "objective/non_score_reward": penalty,
            "objective/rlhf_reward": mean["scores"] + penalty,
            "completions/mean_length": mean["tokens"],
        }
        made = {"values": values, "advantages": advantages, "returns": returns}
        return Experience(ids=ids, attention_mask=attention_mask, mask=mask, logprobs=logprobs, **made), logs

    def _old_logprobs(
        self, ids: Tensor, attention_mask: Tensor, mask: Tensor, drawn: Tensor, batch: RolloutBatch
    ) -> tuple[Tensor, dict[str, float]]:
        """The engine's logprobs ``drawn`` [B, T], or the trainer's own if they differ; all ranks alike."""
        sample = slice(0, GAP_ROWS)
        own = self._in_chunks(self._bare.logprobs, ids[sample], attention_mask[sample], mask[sample])
        gap = LogprobGap.between(drawn[sample], own, mask[sample])
        logs = rollout_logs([batch.metrics] if len(batch) else [], gap, self.accelerator)
        # written so that NaN recomputes
        is_recomputed = not logs["rollout/logprob_gap_max"] < self.args.logprob_gap_bound
        logs["rollout/logprobs_recomputed"] = float(is_recomputed)
        if is_recomputed:
            drawn = self._in_chunks(self._bare.logprobs, ids, attention_mask, mask)
        return drawn.where(mask, 0.0), logs

    def _reference_logprobs(
        self, ids: Tensor, attention_mask: Tensor, mask: Tensor, logprobs: Tensor
    ) -> Tensor:
        """[B, T]; the policy's own where no reference is wanted, so that the KL is 0."""
        if self.args.kl_coef == 0:
            return logprobs
        policy: Any = self._bare.policy
        model = policy if self._reference is None else self._reference
        run = partial(ppo_math.forward_logprobs, model, temperature=self.args.temperature)
        with policy.disable_adapter() if self._reference is None else nullcontext():
            return self._in_chunks(run, ids, attention_mask, mask).where(mask, 0.0)

    def _in_chunks(
        self, run: Callable[[Tensor, Tensor, int], Tensor], ids: Tensor, attention_mask: Tensor, mask: Tensor
    ) -> Tensor:
        """``run`` on a few rows at a time: [B, ...] float32. Without DDP: ranks need not keep step."""
        size = self.args.per_device_train_batch_size
        parts = zip(ids.split(size), attention_mask.split(size), strict=True)
        with self.accelerator.autocast():
            return torch.cat([run(*part, mask.shape[1]) for part in parts])

    def _update(self, experience: Experience) -> dict[str, float]:
        """All epochs over the experience; what to log, as means over all tokens of all epochs."""
        args, num_rows = self.args, len(experience.ids)
        totals: dict[str, Tensor] = {}
        for epoch in range(args.num_ppo_epochs):
            order = ppo_math.shuffled_rows(num_rows, self.args.seed, self.state.step, epoch)
            minibatches = order.to(experience.ids.device).tensor_split(min(args.num_mini_batches, num_rows))
            local = torch.stack([experience.mask[places].sum() for places in minibatches])
            counts = self.accelerator.reduce(local).clamp(min=1)  # tokens over all ranks
            for places, count in zip(minibatches, counts, strict=True):
                for name, value in self._take_step(experience, places, count).items():
                    totals[name] = totals.get(name, 0.0) + value
        sums = {name: float(value) for name, value in totals.items()}
        numbers = over_ranks(self.accelerator, sums=sums, maxima={})
        tokens = max(numbers.pop("tokens"), 1)
        return {name: value / tokens for name, value in numbers.items()}

    def _take_step(self, experience: Experience, places: Tensor, count: Tensor) -> dict[str, Tensor]:
        """One optimizer step on the rows at ``places``; sums over this rank's tokens, for the log."""
        totals: dict[str, Tensor] = {}
        parts = places.split(self.args.per_device_train_batch_size)
        for i, part in enumerate(parts):
            is_last = i == len(parts) - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self._model):
                rows = experience.rows(part)
                loss, stats = ppo_math.ppo_loss(
                    rows,
                    *self._model(rows.ids, rows.attention_mask, rows.mask.shape[1]),
                    cliprange=self.args.cliprange,
                    cliprange_value=self.args.cliprange_value,
                    vf_coef=self.args.vf_coef,
                )
                # DDP takes the mean over ranks; the mean over tokens is wanted
                self.accelerator.backward(loss * (self.accelerator.num_processes / count))
            totals = {name: totals.get(name, 0.0) + value for name, value in stats.items()}
        if self.args.max_grad_norm is not None:
            self.accelerator.clip_grad_norm_(self._model.parameters(), self.args.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return totals


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _checked_accelerator(given: Accelerator | None, args: PPOConfig) -> Accelerator:
    accelerator = given or Accelerator(
        cpu=args.use_cpu,
        mixed_precision="bf16" if args.bf16 else None,
        log_with=None if args.report_to == "none" else args.report_to,
        project_dir=args.output_dir,
    )
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"the accelerator has gradient_accumulation_steps={accelerator.gradient_accumulation_steps}; "
            "leave it at 1 there and set it in PPOConfig, which scales losses by tokens"
        )
    if args.bf16 and accelerator.mixed_precision != "bf16":
        raise ValueError(
            f"bf16=True and the accelerator has mixed_precision={accelerator.mixed_precision!r}; "
            "make it with mixed_precision='bf16' or set bf16=False"
        )
    return accelerator


def _checked_dataset(dataset: Any) -> Any:
    if len(dataset) == 0 or "prompt" not in dataset[0]:
        found = sorted(dataset[0]) if len(dataset) else "no rows"
        raise ValueError(f"train_dataset has {found}; give at least one row with a 'prompt'")
    return dataset


def _pad_id(tokenizer: Any) -> int:
    if isinstance(tokenizer, ProcessorMixin):
        raise ValueError(
            f"processing_class is a {type(tokenizer).__name__}; vision models are not supported: give the "
            "tokenizer of a text model"
        )
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ValueError("the tokenizer has neither a pad token nor an EOS token; set tokenizer.pad_token")


def _checked_rewards(
    rewards: Any, tokenizer: PreTrainedTokenizerBase | None, device: torch.device
) -> list[RewardFunc | nn.Module]:
    """The rewards as a list, models ready to run."""
    listed = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
    if not listed or not all(callable(reward) for reward in listed):
        raise ValueError(f"reward_funcs={rewards!r}; give a function, a reward model, or a list of them")
    for reward in listed:
        if not isinstance(reward, nn.Module):
            continue
        config: Any = reward.config
        if tokenizer is None or tokenizer.pad_token_id is None or config.pad_token_id is None:
            raise ValueError(
                "a reward model needs reward_processing_class, and a pad_token_id in that tokenizer and in "
                "the model's config; set what is missing"
            )
        if config.num_labels != 1:
            raise ValueError(
                f"the reward model has num_labels={config.num_labels}; a score is 1 number: load it with "
                "num_labels=1"
            )
        reward.requires_grad_(False).eval().to(device)
    return listed
