"""TRL's trainers on the engine: same config, same logs, weights trained and rolled out alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig

import rollout
from rollout import RolloutEngine, RolloutError
from rollout.integrations.trl import GRPOTrainer, use_engine
from tiny_tokenizer import EOS_ID, VOCAB_SIZE, tiny_tokenizer
from trl_tiny import digest, grpo, length, logged, rloo, tiny_model, vowels

# trl and its datasets open caches and loops of their own; what they warn of is not ours to mend
pytestmark = pytest.mark.filterwarnings("default")

# letters end completions, so that some are left after masking
MASKED = {
    "mask_truncated_completions": True,
    "generation_kwargs": {"stop_strings": list("bcdfghjklmnpqrstvwxyz")},
}


def assert_each_step_is_noticed(trainer: Any) -> None:
    first, second, third = logged(trainer, "rollout/weight_version")
    assert (second, third) == (first + 1, first + 2)


def test_grpo_trains_and_logs_the_engines_numbers(tmp_path: Path) -> None:
    trainer = grpo(tmp_path)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert_each_step_is_noticed(trainer)
    assert all(speed > 0 for speed in logged(trainer, "rollout/tokens_per_second"))
    assert all(seconds > 0 for seconds in logged(trainer, "rollout/seconds"))
    # the engine's logprobs against the trainer's own forward on the same weights
    for name in ("rollout/logprob_gap_max", "sampling/sampling_logp_difference/max"):
        assert len(logged(trainer, name)) == 3
        assert 0 < max(logged(trainer, name)) < 1e-4
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1.0] * 3, abs=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.1},
        {"num_iterations": 2},
        {"steps_per_generation": 2},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
        {"vllm_importance_sampling_correction": False},
        {"vllm_importance_sampling_mode": "token_truncate"},
        MASKED,
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"use_transformers_continuous_batching": True},
        {"scale_rewards": "batch", "loss_type": "dr_grpo"},
        {"temperature": 0.7, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
        {"generation_kwargs": {"min_new_tokens": 4}},
    ],
    ids=lambda changes: ", ".join(changes),
)
def test_settings_that_touch_generation(tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer = grpo(tmp_path, rewards=[vowels, length], **changes)
    trainer.train()
    assert trainer.state.global_step == 3
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert digest(trainer.model) != digest(tiny_model())


def test_under_bf16_the_engine_computes_as_the_trainer_does(tmp_path: Path) -> None:
    """Weights stay fp32, the forward is bf16: an engine that rolled out in fp32 would be off by the
    rounding of bf16."""
    trainer = grpo(tmp_path, bf16=True, max_steps=1)
    in_fp32 = RolloutEngine(tiny_model(), tiny_tokenizer())
    rollout, rounding = trainer.rollout, []

    def compared(prompt_ids: Any) -> Any:
        drawn = rollout(prompt_ids)
        scored = in_fp32.score([c.prompt_ids for c in drawn], [c.token_ids for c in drawn])
        for completion, plain in zip(drawn, scored, strict=True):
            rounding.extend(abs(a - b) for a, b in zip(completion.policy_logprobs, plain, strict=True))
        return drawn

    trainer.rollout = compared
    trainer.train()
    (gap,) = logged(trainer, "rollout/logprob_gap_mean")
    assert 0 < gap < 0.75 * sum(rounding) / len(rounding)


def test_evaluation_takes_its_own_number_of_generations(tmp_path: Path) -> None:
    trainer = grpo(
        tmp_path,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=2,
        num_generations_eval=1,
    )
    asked: list[tuple[bool, int]] = []
    rollout = trainer.rollout

    def watched(prompt_ids: Any) -> Any:
        asked.append((trainer.model.training, len(prompt_ids)))
        return rollout(prompt_ids)

    trainer.rollout = watched
    trainer.train()
    assert asked == [(True, 4), (False, 2)] * 3
    assert len(logged(trainer, "eval_rollout/tokens_per_second")) == 3


def test_equal_prompts_become_the_samples_of_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = grpo(tmp_path, max_steps=1)
    generate, sizes = trainer.engine.generate, []

    def watched(prompts: Any, params: Any, **more: Any) -> Any:
        sizes.append([each.n for each in params])
        return generate(prompts, params, **more)

    monkeypatch.setattr(trainer.engine, "generate", watched)
    trainer.train()
    assert sizes == [[2, 2]]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_lora_rolls_out_the_adapter_that_is_trained(tmp_path: Path, beta: float) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = grpo(tmp_path, more={"peft_config": lora}, beta=beta)
    trainer.train()
    assert max(logged(trainer, "rollout/logprob_gap_max")) < 1e-4
    assert logged(trainer, "rollout/weight_version")[-1] >= 2


@pytest.mark.parametrize(
    "changes", [{"beta": 0.0}, {"beta": 0.1}, MASKED, MASKED | {"beta": 0.0}], ids=lambda c: ", ".join(c)
)
def test_rloo_trains(tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer = rloo(tmp_path, **changes)
    trainer.train()
    assert len(logged(trainer, "kl")) == (0 if changes.get("beta") == 0.0 else 3)
    if "mask_truncated_completions" not in changes:  # there a step whose rows are all masked changes nothing
        assert_each_step_is_noticed(trainer)
    assert 0 < max(logged(trainer, "rollout/logprob_gap_max")) < 1e-4
    assert digest(trainer.model) != digest(tiny_model())


@pytest.mark.parametrize("make", [grpo, rloo])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path, make: Any) -> None:
    """Also a test of the seeds: an engine that counted its own requests would draw step 1's noise
    again in step 3. (One epoch: across epochs TRL's sampler does not resume its order.)"""
    data = {"train_dataset": Dataset.from_dict({"prompt": [f"Say {i}" for i in range(8)]})}
    whole = make(tmp_path / "whole", max_steps=4, more=data)
    whole.train()
    first = make(tmp_path / "parts", max_steps=4, more=data, save_strategy="steps", save_steps=2)
    first.train()
    second = make(tmp_path / "parts", max_steps=4, more=data)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert second.state.global_step == 4
    assert digest(second.model) == digest(first.model) == digest(whole.model)


def test_the_trained_weights_do_not_depend_on_the_engine_being_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps on the same recorded completions, with TRL alone and with the engine attached."""
    recorded = [[5, 6, 7, EOS_ID], [8, 9, 10, 11], [65, 66, EOS_ID], [97, 101, 105, EOS_ID]]
    digests = []
    for kind in (trl.GRPOTrainer, GRPOTrainer):
        trainer = grpo(tmp_path, kind=kind, max_steps=5, vllm_importance_sampling_correction=False)

        def replay(prompt_ids: Any, *_: Any, trainer: Any = trainer, **__: Any) -> Any:
            if isinstance(trainer, GRPOTrainer):
                trainer.rollout(prompt_ids)  # the engine works as ever; its tokens are not used
            return [list(ids) for ids in recorded], None

        monkeypatch.setattr(trainer, "_generate_single_turn", replay)
        trainer.train()
        digests.append(digest(trainer.model))
    assert digests[0] == digests[1] != digest(tiny_model())


@pytest.mark.parametrize("kind", [trl.GRPOTrainer, trl.RLOOTrainer])
def test_trls_own_trainers_generate_with_the_engine_after_attach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    changes = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"page_size": 16},
        "num_generations": 4,
    }
    if kind is trl.GRPOTrainer:
        model = rollout.attach(tiny_model())
        trainer = grpo(tmp_path, kind=kind, model=model, **changes)
    else:
        trainer = rloo(tmp_path, kind=kind, **changes)
        model = rollout.attach(trainer.model)
    generate_batch, seen = model.generate_batch, []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        outputs = generate_batch(*args, **kwargs)
        seen.append([output.completion for output in outputs.values()])
        return outputs

    monkeypatch.setattr(model, "generate_batch", recorded)
    before = digest(trainer.model)
    trainer.train()
    assert digest(trainer.model) != before
    versions = [{version for c in batch for version in c.versions} for batch in seen]
    assert versions == [{0}, {1}, {2}], "each step's weights are noticed"
    assert all(len({c.token_ids for c in batch}) > 1 for batch in seen)
    assert len({batch[0].token_ids for batch in seen}) > 1
    assert trainer.model.training


def test_a_failing_rollout_names_the_prompts_and_the_run_can_go_on(tmp_path: Path) -> None:
    trainer = grpo(tmp_path)
    before = digest(trainer.model)
    too_long = [7] * 300
    with pytest.raises(RolloutError, match=r"prompts at \[1, 2\] of 4 .* outside the vocabulary"):
        trainer.rollout([[5, 6], [VOCAB_SIZE + 5], too_long, [7]])
    assert digest(trainer.model) == before
    trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize(
    "rewards, error",
    [
        (lambda completions, **_: 1 / 0, ZeroDivisionError),
        (lambda completions, **_: [1.0], ValueError),
    ],
)
def test_a_failing_reward_function_leaves_a_trainer_that_can_go_on(
    tmp_path: Path, rewards: Any, error: type[Exception]
) -> None:
    trainer = grpo(tmp_path)
    before = digest(trainer.model)
    good = trainer.reward_funcs
    trainer.reward_funcs = [rewards]
    with pytest.raises(error):
        trainer.train()
    assert digest(trainer.model) == before
    assert not trainer.use_vllm and trainer.engine.cache_bytes == 0
    trainer.reward_funcs = good
    trainer.train()
    assert trainer.state.global_step == 3


def test_a_tokenizer_without_a_pad_token_works(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    trainer = grpo(tmp_path, more={"processing_class": tokenizer})
    trainer.train()
    assert max(logged(trainer, "rollout/logprob_gap_max")) < 1e-4


def test_what_cannot_work_is_refused_at_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        grpo(tmp_path, generation_kwargs={"num_beams": 4})
    with pytest.raises(ValueError, match="unknown settings"):
        grpo(tmp_path, transformers_continuous_batching_config={"no_such_setting": 1})
    with pytest.raises(ValueError, match="use_vllm=True generates with vLLM"):
        grpo(tmp_path, use_vllm=True)
    for wrap in (torch.compile, torch.nn.DataParallel):
        with pytest.raises(TypeError, match=r"Unwrap DDP and torch\.compile first"):
            grpo(tmp_path, model=wrap(tiny_model()))
    vision = grpo(tmp_path, kind=trl.GRPOTrainer)
    vision._is_vlm = True  # what TRL finds out from a multimodal processor
    with pytest.raises(ValueError, match="multimodal"):
        use_engine(vision)
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    with pytest.raises(ImportError, match=r"trl 1\.17\.0 is not supported"):
        grpo(tmp_path)
