"""TRL's trainers on the engine: same config, same logs, weights trained and rolled out alike."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, RLOOConfig

from rollout import RolloutError
from rollout.integrations.trl import GRPOTrainer, RLOOTrainer
from rollout.integrations.trl_sampling import sampling_params
from tiny_models import TINY_MODELS
from tiny_tokenizer import EOS_ID, VOCAB_SIZE, tiny_tokenizer

# trl and its datasets open caches and loops of their own; what they warn of is not ours to mend
pytestmark = pytest.mark.filterwarnings("default")

PROMPTS = ["Hello", "The sea is", "Count: 1 2 3", "abc"]


@pytest.fixture(scope="module", autouse=True)
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TRL loads the reference model by the name of the policy: the tiny model needs a folder."""
    folder = tmp_path_factory.mktemp("model")
    TINY_MODELS["llama"](vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID).save_pretrained(folder)
    FOLDERS.append(folder)
    return folder


FOLDERS: list[Path] = []


def tiny_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDERS[-1], dtype=torch.float32)


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(char in "aeiou" for char in text)) for text in completions]


def length(completions: list[str], **_: Any) -> list[float]:
    return [len(text) / 10 for text in completions]


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 8,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        **changes,
    }


def grpo(folder: Path, model: Any = None, rewards: Any = vowels, peft: Any = None, **changes: Any) -> Any:
    return GRPOTrainer(
        model=model or tiny_model(),
        reward_funcs=rewards,
        args=GRPOConfig(**settings(folder, **changes)),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:2]}),
        processing_class=tiny_tokenizer(),
        peft_config=peft,
    )


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


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
    # the engine's logprobs against the trainer's own forward on the same weights
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1.0] * 3, abs=1e-4)


def test_truncated_sampling_keeps_a_ratio_of_one(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, top_p=0.7)
    trainer.train()
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1.0] * 3, abs=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.1},
        {"num_iterations": 2},
        {"steps_per_generation": 2},
        {"vllm_importance_sampling_correction": False},
        {"mask_truncated_completions": True},
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"scale_rewards": "batch", "loss_type": "dr_grpo"},
        {"temperature": 0.7, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
        {"generation_kwargs": {"min_new_tokens": 4}},
        {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "per_device_eval_batch_size": 2,
            "num_generations_eval": 1,
        },
    ],
    ids=lambda changes: ", ".join(changes),
)
def test_settings_that_touch_generation(tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer = grpo(tmp_path, rewards=[vowels, length], **changes)
    trainer.train()
    assert trainer.state.global_step == 3
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_lora_rolls_out_the_adapter_that_is_trained(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, peft=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), beta=0.1)
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert logged(trainer, "rollout/weight_version")[-1] >= 2


def test_rloo_trains(tmp_path: Path) -> None:
    trainer = RLOOTrainer(
        model=tiny_model(),
        reward_funcs=vowels,
        args=RLOOConfig(**settings(tmp_path)),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    assert_each_step_is_noticed(trainer)


def test_resume_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    again = grpo(tmp_path, max_steps=4, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 4


def digest(model: Any) -> str:
    raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(raw).hexdigest()


def test_the_trained_weights_do_not_depend_on_the_engine_being_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps on the same recorded completions, with TRL alone and with the engine attached."""
    recorded = [[5, 6, 7, EOS_ID], [8, 9, 10, 11], [65, 66, EOS_ID], [97, 101, 105, EOS_ID]]
    digests = []
    for trainer_class in (trl.GRPOTrainer, GRPOTrainer):
        trainer = trainer_class(
            model=tiny_model(),
            reward_funcs=vowels,
            args=GRPOConfig(**settings(tmp_path, vllm_importance_sampling_correction=False)),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tiny_tokenizer(),
        )

        def replay(prompt_ids: Any, *_: Any, trainer: Any = trainer, **__: Any) -> Any:
            if isinstance(trainer, GRPOTrainer):
                trainer.rollout(prompt_ids)  # the engine works as ever; its tokens are not used
            return [list(ids) for ids in recorded], None

        monkeypatch.setattr(trainer, "_generate_single_turn", replay)
        trainer.train()
        digests.append(digest(trainer.model))
    assert digests[0] == digests[1] != digest(tiny_model())


def test_what_cannot_work_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        grpo(tmp_path, generation_kwargs={"num_beams": 4})
    with pytest.raises(ValueError, match="unknown settings"):
        grpo(tmp_path, transformers_continuous_batching_config={"no_such_setting": 1})


def test_a_failing_rollout_names_the_prompts_and_leaves_the_model_alone(tmp_path: Path) -> None:
    trainer = grpo(tmp_path)
    before = digest(trainer.model)
    with pytest.raises(RolloutError, match=r"prompts at \[1\]"):
        trainer.rollout([[5, 6], [VOCAB_SIZE + 5], [7]])
    assert digest(trainer.model) == before
    assert len(trainer.rollout([[5, 6], [7]])) == 2


def test_generation_kwargs_override_the_config(tmp_path: Path) -> None:
    changes = {"top_p": 0.9, "generation_kwargs": {"top_p": 0.5, "do_sample": False}}
    params = sampling_params(GRPOConfig(**settings(tmp_path, **changes)))
    assert params.top_p == 0.5 and params.is_greedy
