"""GRPO on a small real model, on two CPU cores, in a few minutes: learn to answer with the number only.

SmolLM2-135M-Instruct is asked one- and two-digit additions. It is rewarded for the right number and
more so for nothing but the number. The only difference to a plain TRL script is the import of
``GRPOTrainer``. Shows a row per step, saves a picture of the curves and a checkpoint that TRL and
transformers load.

    python recipes/grpo_quickstart.py --out runs/quickstart

Left out: an evaluation set beyond five held-out questions, a learning-rate schedule worth the name,
reference-model KL (``beta``), LoRA, and every knob that a longer run would want.
"""

import argparse
import random
import re
from pathlib import Path
from typing import Any

import matplotlib
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig

from rollout import RolloutEngine, SamplingParams
from rollout.demo_model import demo_model
from rollout.integrations.trl import GRPOTrainer

matplotlib.use("Agg")  # a file, no window
from matplotlib import pyplot

HELD_OUT = [(7, 5), (23, 4), (18, 31), (6, 9), (40, 27)]
COLUMNS = {
    "step": "step",
    "reward": "reward",
    "length": "completions/mean_length",
    "tokens/s": "rollout/tokens_per_second",
    "logprob gap": "sampling/sampling_logp_difference/mean",
    "s generating": "rollout/seconds",
    "s training": "seconds_training",
}
"""Column of the table -> key of TRL's log."""


def question(a: int, b: int) -> list[dict[str, str]]:
    """The chat prompt of one addition."""
    return [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]


def additions(count: int) -> Dataset:
    """Random additions of one- and two-digit numbers, without the held-out ones."""
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        a, b = rng.randint(1, 49), rng.randint(1, 49)
        if (a, b) not in HELD_OUT:
            rows.append({"prompt": question(a, b), "answer": str(a + b)})
    return Dataset.from_list(rows)


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 for the number alone, up to 0.5 for the number in few words, 0 without it."""
    scores = []
    for completion, right in zip(completions, answer, strict=True):
        text = completion[0]["content"].strip()
        if text.rstrip(".") == right:
            scores.append(1.0)
        elif right in re.findall(r"\d+", text):
            scores.append(0.5 / (1 + len(text) / 20))
        else:
            scores.append(0.0)
    return scores


class StepTable(TrainerCallback):
    """Prints one row per step and keeps the numbers for the picture."""

    def __init__(self, console: Console) -> None:
        self.rows: list[dict[str, float]] = []
        self._console = console
        console.print("  ".join(f"{name:>12}" for name in COLUMNS), soft_wrap=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """A row for every log of a training step."""
        if not logs or "reward" not in logs:
            return
        numbers = {"step": state.global_step, **logs}
        numbers["seconds_training"] = numbers["step_time"] - numbers["rollout/seconds"]
        self.rows.append(numbers)
        if state.is_world_process_zero:
            cells = (f"{float(numbers.get(key, 0)):12.4g}" for key in COLUMNS.values())
            self._console.print("  ".join(cells), soft_wrap=True)


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Reward, length, speed and logprob gap over the steps."""
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), sharex=True, constrained_layout=True)
    for axis, name in zip(axes.flat, ("reward", "length", "tokens/s", "logprob gap"), strict=True):
        axis.plot([row["step"] for row in rows], [row.get(COLUMNS[name], 0.0) for row in rows], marker="o")
        axis.set_title(name)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("optimizer step")
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
    parser.add_argument("--out", type=Path, default=Path("runs/grpo_quickstart"))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--max-completion-length", type=int, default=32)
    parser.add_argument("--prompts-per-step", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    args = parser.parse_args()
    console = Console()
    source = args.model or demo_model()
    tokenizer = AutoTokenizer.from_pretrained(source)
    table = StepTable(console)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(args.out),
            per_device_train_batch_size=args.prompts_per_step * args.samples,
            num_generations=args.samples,
            max_completion_length=args.max_completion_length,
            max_steps=args.steps,
            learning_rate=2e-5,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
        ),
        train_dataset=additions(256),
        processing_class=tokenizer,
        callbacks=[table],
    )
    before = answers(trainer.engine, tokenizer)
    trainer.train()
    after = answers(trainer.engine, tokenizer)
    if not trainer.accelerator.is_main_process:
        return
    trainer.save_model(str(args.out / "checkpoint"))
    draw(table.rows, args.out / "curves.png")
    shown = Table("question", "before", "after", title="held-out questions")
    for (a, b), old, new in zip(HELD_OUT, before, after, strict=True):
        shown.add_row(f"{a} + {b}", old, new)
    console.print(shown)
    console.print(f"curves: {args.out / 'curves.png'}; checkpoint: {args.out / 'checkpoint'}")


if __name__ == "__main__":
    main()
