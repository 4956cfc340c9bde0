"""What TRL's trainers make of the engine's completions: endings, logprobs, tools, other ways in."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, RLOOConfig

from rollout import RolloutEngine, RolloutError, SamplingParams
from rollout.integrations.trl import GRPOTrainer, RLOOTrainer, rollout_func, use_engine
from rollout.integrations.trl_engine import EngineMixin
from rollout.integrations.trl_sampling import sampling_params
from rollout.types import Completion, FinishReason
from tiny_tokenizer import EOS_ID, tiny_tokenizer
from trl_tiny import digest, grpo, logged, rloo, settings, tiny_model

pytestmark = pytest.mark.filterwarnings("default")

EXACT = {"logprob_gap_bound": 1e-3}


def scored(trainer: Any) -> dict[str, torch.Tensor]:
    """One generate-and-score on the trainer's first batch."""
    trainer.model.train()
    inputs = next(iter(trainer.get_train_dataloader()))
    output: dict[str, torch.Tensor] = trainer._generate_and_score_completions(inputs)
    return output


@pytest.mark.parametrize("make", [grpo, rloo])
def test_completions_that_a_stop_string_ended_are_not_truncated(tmp_path: Path, make: Any) -> None:
    """TRL alone takes every completion without EOS for truncated: with stop strings all of them."""
    stops = [chr(code) for code in range(ord("!"), ord("~"))]
    trainer = make(
        tmp_path, generation_kwargs={"stop_strings": stops}, mask_truncated_completions=True, max_steps=1
    )
    endings: list[Completion] = []
    rollout = trainer.rollout
    trainer.rollout = lambda ids: [endings.append(c) or c for c in rollout(ids)]
    output = scored(trainer)
    reasons = {c.finish_reason for c in endings}
    assert FinishReason.STOP in reasons  # chosen so that nearly every printable token ends
    is_kept = output["completion_mask"].any(dim=1).tolist()
    assert is_kept == [not c.is_truncated for c in endings]
    clipped = sum(c.is_truncated for c in endings) / len(endings)
    metrics = trainer._metrics["train"]
    assert metrics["completions/clipped_ratio"] == [pytest.approx(clipped)]
    assert metrics["rollout/truncated"] == [pytest.approx(clipped)]
    assert trainer.mask_truncated_completions is True


def test_truncated_rows_are_masked_and_the_count_of_tokens_follows(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, mask_truncated_completions=True, max_completion_length=3)
    endings: list[Completion] = []
    rollout = trainer.rollout
    trainer.rollout = lambda ids: [endings.append(c) or c for c in rollout(ids)]
    output = scored(trainer)
    assert any(c.is_truncated for c in endings)
    kept = sum(len(c.token_ids) for c in endings if not c.is_truncated)
    assert output["num_items_in_batch"].item() == output["completion_mask"].sum().item() == kept


def policy_forwards(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each forward of the policy that TRL runs without gradients, as they come."""
    rows: list[int] = []
    base = trl.GRPOTrainer if isinstance(trainer, trl.GRPOTrainer) else trl.RLOOTrainer
    forward = base._get_per_token_logps_and_entropies

    def watched(self: Any, model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if model is trainer.model and not torch.is_grad_enabled():
            rows.append(len(input_ids))
        return forward(self, model, input_ids, *args, **kwargs)

    monkeypatch.setattr(base, "_get_per_token_logps_and_entropies", watched)
    return rows


@pytest.mark.parametrize("make", [grpo, rloo])
def test_the_engines_logprobs_stand_in_for_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    # SGD: Adam's normalisation would blow up the rounding of gradients near zero
    changes = {"num_iterations": 2, "per_device_train_batch_size": 8, "max_steps": 4, "optim": "sgd"}
    plain = make(tmp_path, **changes)
    plain.train()
    reusing = make(tmp_path, more=EXACT, **changes)
    rows = policy_forwards(reusing, monkeypatch)
    reusing.train()
    assert rows == [2, 2]  # the sample of each of the two generations, never all 8 rows
    assert max(logged(reusing, "rollout/logprob_gap_max")) < 1e-4
    for ours, theirs in zip(reusing.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert digest(reusing.model) != digest(plain.model) != digest(tiny_model())


@pytest.mark.parametrize("make", [grpo, rloo])
def test_logprobs_outside_the_bound_are_computed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    trainer = make(tmp_path, more={"logprob_gap_bound": 0.0}, max_steps=2)
    rows = policy_forwards(trainer, monkeypatch)
    trainer.train()
    assert rows == [2, 4, 2, 4]
    plain = make(tmp_path, max_steps=2)
    plain.train()
    assert digest(trainer.model) == digest(plain.model)


def test_the_gap_is_measured_where_trl_runs_no_forward_of_its_own(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, vllm_importance_sampling_correction=False)
    trainer.train()
    assert len(logged(trainer, "rollout/logprob_gap_max")) == 3
    assert 0 < max(logged(trainer, "rollout/logprob_gap_max")) < 1e-4


def test_the_gap_shows_a_rollout_under_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = grpo(tmp_path, max_steps=1)
    other = tiny_model()
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    trainer.engine = RolloutEngine(other, tiny_tokenizer())
    trainer.train()
    assert logged(trainer, "rollout/logprob_gap_mean")[0] > 0.1


def test_truncated_sampling_keeps_a_ratio_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """... and would not without the kept mass, which is what TRL gets from other engines."""
    trainer = grpo(tmp_path, top_p=0.7)
    trainer.train()
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1.0] * 3, abs=1e-3)
    naive = grpo(tmp_path, top_p=0.7, vllm_importance_sampling_mode="token_truncate")

    def single_turn(prompt_ids: Any, *_: Any, **__: Any) -> Any:
        completions = naive.rollout(prompt_ids)
        return [list(c.token_ids) for c in completions], [list(c.logprobs) for c in completions]

    monkeypatch.setattr(naive, "_generate_single_turn", single_turn)
    naive.train()
    assert all(ratio < 0.9 for ratio in logged(naive, "sampling/importance_sampling_ratio/mean"))


class ToolTokenizer(PreTrainedTokenizerFast):
    """Takes every first answer for a call of ``double(21)``, and every later one for text."""

    def parse_response(self, ids: list[int], prefix: list[int], **_: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.decode(ids, skip_special_tokens=True)}
        if "<tool>" not in self.decode(prefix):
            call = {"name": "double", "arguments": {"number": 21}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        return message


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: what to double.

    Returns:
        Twice the number.
    """
    return 2 * number


def tool_trainer(folder: Path, **changes: Any) -> Any:
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
        "{% for call in m.get('tool_calls', []) %}{{ call['function'] | tojson }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    fast = tiny_tokenizer()
    tokenizer = ToolTokenizer(tokenizer_object=fast._tokenizer, eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template, tokenizer.response_template = template, "parse_response is our own"
    prompts = [[{"role": "user", "content": text}] for text in ("Twice 21?", "21 and 21?")]
    return grpo(
        folder,
        rewards=lambda completions, **_: [float(len(c[-1]["content"])) for c in completions],
        more={
            "processing_class": tokenizer,
            "tools": [double],
            "train_dataset": Dataset.from_dict({"prompt": prompts}),
            "eval_dataset": None,
        },
        max_completion_length=60,
        generation_kwargs={"max_new_tokens": 8},
        **changes,
    )


@pytest.mark.parametrize("bound", [None, 1e-3])
def test_a_tool_calling_loop_goes_through_the_engine(tmp_path: Path, bound: float | None) -> None:
    trainer = tool_trainer(tmp_path)
    trainer._gap_bound = bound
    output = scored(trainer)
    metrics = trainer._metrics["train"]
    assert metrics["tools/call_frequency"] == [1.0] and metrics["tools/failure_frequency"] == [0.0]
    # both turns of every row are drawn, the tool's answer between them is not
    turns = output["tool_mask"].diff(dim=1)
    assert ((turns == -1).sum(dim=1) == 1).all() and (output["tool_mask"] == 0).any(dim=1).all()
    text = trainer._tokenizer.decode(output["completion_ids"][0])
    assert "<tool>42<assistant>" in text
    assert 0 < metrics["rollout/logprob_gap_max"][0] < 1e-4
    trainer.train()
    assert trainer.state.global_step == 3


def test_a_users_rollout_func_can_use_the_trainers_engine(tmp_path: Path) -> None:
    def episode(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        drawn = trainer.rollout(prompt_ids)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [list(c.token_ids) for c in drawn],
            "logprobs": [list(c.policy_logprobs) for c in drawn],
        }

    trainer = grpo(tmp_path, more={"rollout_func": episode})
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert all(speed > 0 for speed in logged(trainer, "rollout/tokens_per_second"))


def test_rollout_func_serves_trls_own_trainer(tmp_path: Path) -> None:
    model = tiny_model()
    engine = RolloutEngine(model, tiny_tokenizer())
    trainer = grpo(tmp_path, kind=trl.GRPOTrainer, model=model, more={"rollout_func": rollout_func(engine)})
    trainer.train()
    assert trainer.state.global_step == 3 and engine.weight_version >= 2
    assert engine.cache_bytes == 0
    other = grpo(tmp_path, kind=trl.GRPOTrainer, more={"rollout_func": rollout_func(engine)})
    with pytest.raises(ValueError, match="another model than the trainer's"):
        other.train()


def test_use_engine_converts_a_trainer_and_keeps_its_class(tmp_path: Path) -> None:
    class Mine(trl.GRPOTrainer):
        num_updates = 0

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.num_updates += 1
            return super().training_step(*args, **kwargs)

    trainer = grpo(tmp_path, kind=Mine)
    assert use_engine(trainer, {"page_size": 16}) is trainer
    assert isinstance(trainer, (Mine, EngineMixin)) and trainer.engine.config.page_size == 16
    trainer.train()
    assert trainer.num_updates == 3 and len(logged(trainer, "rollout/tokens_per_second")) == 3
    reference = grpo(tmp_path, more={"engine_config": {"page_size": 16}})
    reference.train()
    assert digest(trainer.model) == digest(reference.model)
    with pytest.raises(TypeError, match="no engine yet"):
        use_engine(trainer)


def test_use_engine_leaves_a_trainer_alone_that_it_cannot_serve(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, kind=trl.GRPOTrainer, generation_kwargs={"num_beams": 2})
    with pytest.raises(ValueError, match="num_beams"):
        use_engine(trainer)
    assert type(trainer) is trl.GRPOTrainer
    with pytest.raises(TypeError, match=r"trl\.GRPOTrainer or trl\.RLOOTrainer"):
        use_engine(object())
    assert use_engine(rloo(tmp_path, kind=trl.RLOOTrainer)).engine is not None


def test_generation_kwargs_override_the_config(tmp_path: Path) -> None:
    changes = {"top_p": 0.9, "generation_kwargs": {"top_p": 0.5, "do_sample": False}}
    params = sampling_params(GRPOConfig(**settings(tmp_path, **changes)))
    assert params.top_p == 0.5 and params.is_greedy


def test_a_config_is_not_changed(tmp_path: Path) -> None:
    args = GRPOConfig(**settings(tmp_path, generation_kwargs={"stop_strings": "x", "do_sample": True}))
    before = copy.deepcopy(args.generation_kwargs)
    assert sampling_params(args).stop_strings == ("x",)
    assert args.generation_kwargs == before


def test_a_tools_answer_at_the_limit_is_truncated(tmp_path: Path) -> None:
    trainer = tool_trainer(tmp_path, mask_truncated_completions=True, logging_steps=1)
    trainer.max_completion_length = 26  # the first turn and the tool's answer fit, hardly a token more
    output = scored(trainer)
    is_cut = [row[-1] not in trainer.eos_token_ids for row in completion_rows(output)]
    assert all(is_cut) and not output["completion_mask"].any()
    assert trainer._metrics["train"]["completions/clipped_ratio"] == [1.0]


def completion_rows(output: dict[str, torch.Tensor]) -> list[list[int]]:
    widths = output["tool_mask"].shape[1]
    return [row[:widths].tolist() for row in output["completion_ids"]]


def test_a_config_becomes_exactly_the_parameters_asked_for(tmp_path: Path) -> None:
    asked = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.1}
    more = {"min_new_tokens": 2, "stop_strings": ["x", "yz"]}
    params = sampling_params(GRPOConfig(**settings(tmp_path, **asked, generation_kwargs=more)))
    assert params == SamplingParams(max_new_tokens=8, min_new_tokens=2, stop_strings=("x", "yz"), **asked)
    neutral = sampling_params(RLOOConfig(**settings(tmp_path)))
    assert neutral == SamplingParams(max_new_tokens=8, temperature=RLOOConfig.temperature, top_k=0)


RECORDED = [[5, 6, 7, EOS_ID], [8, 9, 10, 11], [65, 66, EOS_ID], [97, 101, 105, EOS_ID]]


def replaying(make: Any, kind: Any, folder: Path, logprobs: Any = None, **changes: Any) -> Any:
    """A trainer after three steps on recorded completions, two of three ended by EOS."""
    trainer = make(folder, kind=kind, **changes)

    def replay(prompt_ids: Any, *_: Any, **__: Any) -> Any:
        ids = [list(row) for row in RECORDED]
        return ids if make is rloo else (ids, logprobs)

    trainer._generate_single_turn = replay
    trainer.train()
    return trainer


@pytest.mark.parametrize("make", [grpo, rloo])
@pytest.mark.parametrize("masks", [True, False])
def test_on_the_same_completions_all_is_as_in_trl(tmp_path: Path, make: Any, masks: bool) -> None:
    changes = {"mask_truncated_completions": masks, "beta": 0.1}
    if make is grpo:
        changes["vllm_importance_sampling_correction"] = False
    theirs = replaying(make, trl.GRPOTrainer if make is grpo else trl.RLOOTrainer, tmp_path, **changes)
    ours = replaying(make, GRPOTrainer if make is grpo else RLOOTrainer, tmp_path, **changes)
    assert digest(ours.model) == digest(theirs.model) != digest(tiny_model())
    for mine, his in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        shared = [name for name in his if "time" not in name and "per_second" not in name]
        assert {name: mine[name] for name in shared} == pytest.approx({name: his[name] for name in shared})


def test_the_ratio_weighs_the_loss(tmp_path: Path) -> None:
    """Logprobs that claim every token was twice as likely halve the step of plain SGD."""
    changes = {"optim": "sgd", "max_steps": 1, "max_grad_norm": 0.0, "weight_decay": 0.0}
    mode = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 10.0}
    plain = replaying(grpo, GRPOTrainer, tmp_path, vllm_importance_sampling_correction=False, **changes)
    engine = RolloutEngine(tiny_model(), tiny_tokenizer())
    prompts = [p for p in first_prompts(plain) for _ in range(2)]
    true = engine.score(prompts, RECORDED)
    claimed = [[value + math.log(2) for value in row] for row in true]
    halved = replaying(grpo, GRPOTrainer, tmp_path, logprobs=claimed, **mode, **changes)
    assert logged(halved, "sampling/importance_sampling_ratio/mean") == pytest.approx([0.5], abs=1e-3)
    start = dict(tiny_model().named_parameters())
    moved = 0.0
    for (name, full), half in zip(plain.model.named_parameters(), halved.model.parameters(), strict=True):
        torch.testing.assert_close((half - start[name]) * 2, full - start[name], atol=1e-5, rtol=1e-2)
        moved = max(moved, (full - start[name]).abs().max().item())
    assert moved > 1e-4


def first_prompts(trainer: Any) -> list[list[int]]:
    """Token ids of the two prompts of a trainer's first step."""
    rows = next(iter(trainer.get_train_dataloader()))
    return trainer._tokenize_prompts([row["prompt"] for row in rows[::2]])[0]


def test_foreign_tokens_in_the_loss_keep_the_trainers_own_logprobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout_func that appends a token without masking it: the engine knows no logprob of it."""

    def episode(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        ids = [[*c.token_ids, 65] for c in trainer.rollout(prompt_ids)]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}

    trainer = grpo(tmp_path, more={"rollout_func": episode, **EXACT}, num_iterations=2, max_steps=2)
    rows = policy_forwards(trainer, monkeypatch)
    trainer.train()  # also: logprobs=None is nothing to correct by, and no error
    assert rows == [2, 4]
    assert not logged(trainer, "sampling/importance_sampling_ratio/mean")


def test_a_failing_step_is_tried_again_with_the_same_noise(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, max_steps=2)
    generate, seeds = trainer.engine.generate, []

    def watched(prompts: Any, params: Any, **more: Any) -> Any:
        seeds.append(params[0].seed)
        return generate(prompts, params, **more)

    trainer.engine.generate = watched
    good, trainer.reward_funcs = trainer.reward_funcs, [lambda completions, **_: 1 / 0]
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.reward_funcs = good
    trainer.train()
    failed, again, second_step = seeds
    assert failed == again != second_step


def test_a_rollout_that_fails_inside_training_ends_it_with_the_prompts_named(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": ["a" * 300, "b" * 300]})  # the model has 256 positions
    trainer = grpo(tmp_path, more={"train_dataset": data})
    before = digest(trainer.model)
    with pytest.raises(RolloutError, match=r"prompts at \[0, 1\] of 2 .* 256 positions"):
        trainer.train()
    assert digest(trainer.model) == before and trainer.model.training and not trainer.use_vllm


def test_vespo_needs_a_ratio_per_token(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vespo"):
        grpo(tmp_path, loss_type="vespo")
    grpo(tmp_path, loss_type="vespo", vllm_importance_sampling_mode="token_mask")
