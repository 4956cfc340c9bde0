"""Run by ``test_two_processes.py`` in one process and in two: PPO on draws that do not depend on the rank.

The main process writes its logs and a summary of the weights as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from rollout.integrations import ppo
from rollout.integrations.ppo import PPOConfig, PPOTrainer
from tiny_models import TINY_MODELS
from tiny_tokenizer import EOS_ID, VOCAB_SIZE, tiny_tokenizer

ROWS = [{"prompt": text} for text in ("Hello", "The sea is", "Count: 1 2 3", "abc", "q", "zz")]


def score(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Something that differs from completion to completion."""
    return [sum(ids) % 7 / 3 for ids in completion_ids]


def main(out: Path, folder: str) -> None:
    """Two steps over three prompts: the ranks' shares are two rows and one."""
    ppo.rollout_seed = lambda seed, accelerator, step: 1000 * seed + step  # the same on every rank
    ppo.ppo_math.shuffled_rows = lambda num_rows, *_: torch.arange(num_rows)
    logs: list[dict[str, float]] = []
    trainer = PPOTrainer(
        TINY_MODELS["llama"](vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID),
        PPOConfig(
            output_dir=folder,
            max_steps=2,
            batch_size=3,
            per_device_train_batch_size=1,
            num_ppo_epochs=2,
            response_length=6,
            value_backbone="shared",
            whiten_rewards=True,
            use_cpu=True,
            disable_tqdm=True,
        ),
        ROWS,
        score,
        tiny_tokenizer(),
        callbacks=[lambda step, values: logs.append(values)],
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.05}),
    )
    trainer.train()
    sums = {name: float(p.double().abs().sum()) for name, p in trainer.model.named_parameters()}
    if trainer.accelerator.is_main_process:
        out.write_text(json.dumps({"logs": logs, "weights": sums, "num": trainer.accelerator.num_processes}))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
