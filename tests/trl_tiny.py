"""TRL trainers on a tiny random model, ready to run a few steps on a CPU in a second."""

import atexit
import hashlib
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, RLOOConfig

from rollout.integrations.trl import GRPOTrainer, RLOOTrainer
from tiny_models import TINY_MODELS
from tiny_tokenizer import EOS_ID, VOCAB_SIZE, tiny_tokenizer

PROMPTS = ["Hello", "The sea is", "Count: 1 2 3", "abc"]


@cache
def model_folder() -> Path:
    """A tiny model with its tokenizer on disk: TRL loads the reference model by the policy's name."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    TINY_MODELS["llama"](vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)


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


def trainer_arguments(args: Any, model: Any = None, rewards: Any = vowels) -> dict[str, Any]:
    return {
        "model": tiny_model() if model is None else model,
        "reward_funcs": rewards,
        "args": args,
        "train_dataset": Dataset.from_dict({"prompt": PROMPTS}),
        "eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:2]}),
        "processing_class": tiny_tokenizer(),
    }


def grpo(
    folder: Path,
    *,
    model: Any = None,
    rewards: Any = vowels,
    kind: Any = GRPOTrainer,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A GRPO trainer; ``more`` are arguments of the trainer, ``changes`` of its config."""
    args = GRPOConfig(**settings(folder, **changes))
    return kind(**trainer_arguments(args, model, rewards) | (more or {}))


def rloo(folder: Path, *, kind: Any = RLOOTrainer, more: dict[str, Any] | None = None, **changes: Any) -> Any:
    """An RLOO trainer, likewise."""
    return kind(**trainer_arguments(RLOOConfig(**settings(folder, **changes))) | (more or {}))


def logged(trainer: Any, name: str) -> list[float]:
    """A number of the log, once per training step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def digest(model: Any) -> str:
    """sha256 over the bits of all parameters."""
    raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(raw).hexdigest()
