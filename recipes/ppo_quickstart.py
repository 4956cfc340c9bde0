"""PPO on a small real model, on two CPU cores, in a few minutes: learn to answer with the number only.

The task of ``grpo_quickstart.py``: additions; half of the reward is for an answer of digits alone,
half for the right number. Here a value function, trained along, says what to expect of each token, so
that one answer per question is enough. Shows a row per step, saves a picture of the curves and a
checkpoint that transformers loads.

    python recipes/ppo_quickstart.py --out runs/ppo_quickstart
    accelerate launch --config_file recipes/accelerate/cpu.yaml recipes/ppo_quickstart.py

Left out: an evaluation set beyond five held-out questions, a learned reward model, LoRA, resuming,
trackers, and every knob that a longer run would want.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import matplotlib
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout import RolloutEngine, SamplingParams
from rollout.demo_model import demo_model
from rollout.integrations.ppo import PPOConfig, PPOTrainer

matplotlib.use("Agg")  # a file, no window
from matplotlib import pyplot

HELD_OUT = [(7, 5), (2, 4), (8, 1), (6, 9), (40, 27)]
COLUMNS = {
    "score": "objective/scores",
    "kl": "objective/kl",
    "value loss": "loss/value_avg",
    "length": "completions/mean_length",
    "tokens/s": "rollout/tokens_per_second",
    "logprob gap": "rollout/logprob_gap_max",
    "s generating": "rollout/seconds",
    "s training": "seconds_training",
}
"""Column of the table -> key of the trainer's log."""


def question(a: int, b: int) -> list[dict[str, str]]:
    """The chat prompt of one addition."""
    return [
        {"role": "system", "content": "Answer with the number only."},
        {"role": "user", "content": f"What is {a} + {b}?"},
    ]


def additions(count: int) -> Dataset:
    """Random additions, most of one-digit numbers, without the held-out ones."""
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        highest = 9 if rng.random() < 0.75 else 49
        a, b = rng.randint(1, highest), rng.randint(1, highest)
        if (a, b) not in HELD_OUT:
            rows.append({"prompt": question(a, b), "answer": str(a + b)})
    return Dataset.from_list(rows)


def score(text: str, right: str) -> float:
    """Half for the share of digits in the answer, half for the right number and nothing else."""
    text = text.strip().rstrip(".")
    digits = sum(char.isdigit() for char in text) / max(len(text), 1)
    return 0.5 * digits + 0.5 * (text == right)


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """One score per completion, from what the trainer hands over and the dataset's columns."""
    return [
        score(completion[0]["content"], right) for completion, right in zip(completions, answer, strict=True)
    ]


class StepTable:
    """Prints one row per step above the progress bar and keeps the numbers for the picture."""

    def __init__(self, is_shown: bool) -> None:
        self.rows: list[dict[str, float]] = []
        self._is_shown = is_shown

    def __call__(self, step: int, logs: dict[str, float]) -> None:
        """A row for a step; the head before the first."""
        if not self.rows:
            self._print("step", *COLUMNS)
        self.rows.append({"step": step, **logs})
        self._print(step, *(f"{logs[key]:.4g}" for key in COLUMNS.values()))

    def _print(self, *cells: Any) -> None:
        if self._is_shown:
            tqdm.write("  ".join(f"{cell!s:>12}" for cell in cells))


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Score, length, KL and value loss over the steps."""
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), sharex=True, constrained_layout=True)
    for axis, name in zip(axes.flat, ("score", "length", "kl", "value loss"), strict=True):
        axis.plot([row["step"] for row in rows], [row[COLUMNS[name]] for row in rows], marker="o")
        axis.set_title(name)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.savefig(path, dpi=120)


def answers(engine: RolloutEngine, tokenizer: Any) -> list[str]:
    """Greedy answers to the held-out questions."""
    batch = engine.generate(
        [question(a, b) for a, b in HELD_OUT], SamplingParams(max_new_tokens=32, temperature=0)
    )
    return [tokenizer.decode(list(c.token_ids), skip_special_tokens=True).strip() for c in batch]


def main() -> None:
    """Train, then show what changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="folder or hub id (default: the demo model)")
    parser.add_argument("--out", type=Path, default=Path("runs/ppo_quickstart"))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--response-length", type=int, default=16)
    parser.add_argument("--prompts-per-step", type=int, default=16, help="over all processes")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--value-backbone", choices=("own", "shared"), default="shared")
    args = parser.parse_args()
    source = args.model or demo_model()
    tokenizer = AutoTokenizer.from_pretrained(source)
    trainer = PPOTrainer(
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
        PPOConfig(
            output_dir=str(args.out),
            max_steps=args.steps,
            batch_size=args.prompts_per_step,
            per_device_train_batch_size=8,
            num_mini_batches=2,
            num_ppo_epochs=2,
            response_length=args.response_length,
            learning_rate=args.learning_rate,
            kl_coef=0.02,
            value_backbone=args.value_backbone,
            use_cpu=not torch.cuda.is_available(),
        ),
        additions(256),
        reward,
        tokenizer,
    )
    table = StepTable(trainer.accelerator.is_main_process)
    trainer.callbacks = (table,)
    before = answers(trainer.engine, tokenizer)
    trainer.train()
    after = answers(trainer.engine, tokenizer)
    trainer.save_model(str(args.out / "checkpoint"))
    if not trainer.accelerator.is_main_process:
        return
    draw(table.rows, args.out / "curves.png")
    shown = Table("question", "before", "after", title="held-out questions")
    for (a, b), old, new in zip(HELD_OUT, before, after, strict=True):
        shown.add_row(f"{a} + {b}", old, new)
    console = Console()
    console.print(shown)
    console.print(f"curves: {args.out / 'curves.png'}; checkpoint: {args.out / 'checkpoint'}")


if __name__ == "__main__":
    main()
