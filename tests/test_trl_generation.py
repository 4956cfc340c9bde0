"""What TRL's trainers make of the engine's completions: endings, logprobs, tools, other ways in."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig

from rollout import RolloutEngine
from rollout.integrations.ledger import Ledger
from rollout.integrations.trl import EngineMixin, rollout_func, use_engine
from rollout.integrations.trl_sampling import sampling_params
from rollout.types import Completion, FinishReason
from tiny_tokenizer import tiny_tokenizer
from trl_tiny import digest, grpo, logged, rloo, settings, tiny_model

pytestmark = pytest.mark.filterwarnings("default")

EXACT = {"logprob_gap_bound": 1e-3}


def completion(prompt: list[int], tokens: list[int], reason: FinishReason = FinishReason.EOS) -> Completion:
    numbers = tuple(-0.5 * (i + 1) for i in range(len(tokens)))
    return Completion(
        request_id="r",
        index=0,
        prompt_ids=tuple(prompt),
        token_ids=tuple(tokens),
        logprobs=numbers,
        policy_logprobs=numbers,
        log_kept_mass=(0.0,) * len(tokens),
        versions=(0,) * len(tokens),
        finish_reason=reason,
    )


def test_the_ledger_finds_a_plain_row() -> None:
    ledger = Ledger()
    ledger.add([completion([1, 2], [3, 4]), completion([1, 2], [5], FinishReason.LENGTH)])
    row = ledger.find([1, 2], [3, 4])
    assert row.policy_logprobs == (-0.5, -1.0) and row.is_drawn == (True, True) and not row.is_truncated
    assert ledger.find([1, 2], [5]).is_truncated


def test_the_ledger_puts_a_tool_calling_row_together() -> None:
    """Two requests with two tool tokens (8, 9) between them; the trainer cut the second at 6 tokens."""
    ledger = Ledger()
    ledger.add([completion([1, 2], [3, 4])])
    ledger.add([completion([1, 2, 3, 4, 8, 9], [5, 6, 7])])
    row = ledger.find([1, 2], [3, 4, 8, 9, 5, 6])
    assert row.policy_logprobs == (-0.5, -1.0, 0.0, 0.0, -0.5, -1.0)
    assert row.is_drawn == (True, True, False, False, True, True)
    assert row.is_truncated
    assert not ledger.find([1, 2], [3, 4, 8, 9, 5, 6, 7]).is_truncated


def test_the_ledger_does_not_know_what_others_drew() -> None:
    ledger = Ledger()
    ledger.add([completion([1, 2], [3, 4])])
    row = ledger.find([1, 2], [4, 3])
    assert row.is_drawn == (False, False) and row.policy_logprobs == (0.0, 0.0)


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
