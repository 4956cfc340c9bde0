"""GRPO on a small real model, on two CPU cores, in a few minutes: learn to answer with the number only.

SmolLM2-135M-Instruct is asked one- and two-digit additions. Half of the reward is for an answer of
digits alone, half for the right number. The only difference to a plain TRL script is the import of
``GRPOTrainer``. Shows a row per step, saves a picture of the curves and a checkpoint that TRL and
transformers load.

    python recipes/grpo_quickstart.py --out runs/quickstart
    accelerate launch --config_file recipes/accelerate/cpu.yaml recipes/grpo_quickstart.py

``--compare 3`` adds three steps of TRL's own trainer on transformers' continuous batching, from the
same weights on the same prompts, for the time that it takes to generate.

Left out: an evaluation set beyond five held-out questions, a learning-rate schedule worth the name,
reference-model KL (``beta``), LoRA, and every knob that a longer run would want.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch
import trl
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, ProgressCallback
from trl import GRPOConfig

from rollout import RolloutEngine, SamplingParams
from rollout.demo_model import demo_model
from rollout.integrations.trl import GRPOTrainer

matplotlib.use("Agg")  # a file, no window
from matplotlib import pyplot

HELD_OUT = [(7, 5), (2, 4), (8, 1), (6, 9), (40, 27)]
COLUMNS = {
    "step": "step",
    "reward": "reward",
    "length": "completions/mean_length",
    "tokens/s": "rollout/tokens_per_second",
    "logprob gap": "rollout/logprob_gap_max",
    "s generating": "seconds_generating",
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
    """TRL's form of a reward function: all completions of a step, and the dataset's columns."""
    return [
        score(completion[0]["content"], right) for completion, right in zip(completions, answer, strict=True)
    ]


class Timed:
    """Measures generation in both trainers alike, with all that each does around it."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = self
        started = time.perf_counter()
        try:
            return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        finally:
            trainer._metrics["train"]["seconds_generating"].append(time.perf_counter() - started)


class TimedRollout(Timed, GRPOTrainer):
    """Generates with a RolloutEngine."""


class TimedTRL(Timed, trl.GRPOTrainer):
    """Generates as TRL does."""


class StepTable(ProgressCallback):
    """TRL's progress bar with one row of a table per step; keeps the numbers for the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The bar and the table's head."""
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.write("  ".join(f"{name:>12}" for name in COLUMNS))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """A row for every log of a training step."""
        if not logs or "reward" not in logs:
            return
        numbers = {"step": state.global_step, **logs}
        numbers["seconds_training"] = numbers["step_time"] - numbers["seconds_generating"]
        self.rows.append(numbers)
        if self.training_bar is not None:
            cells = (
                f"{float(numbers[key]):12.4g}" if key in numbers else " " * 12 for key in COLUMNS.values()
            )
            self.training_bar.write("  ".join(cells))


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Reward, length, seconds and logprob gap over the steps."""
    steps = [row["step"] for row in rows]
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), sharex=True, constrained_layout=True)
    panels = (("reward",), ("length",), ("s generating", "s training"), ("logprob gap",))
    for axis, names in zip(axes.flat, panels, strict=True):
        for name in names:
            axis.plot(steps, [row[COLUMNS[name]] for row in rows], marker="o", label=name)
        axis.set_title(", ".join(names))
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[1, 0].legend()
    for axis in axes[1]:
        axis.set_xlabel("optimizer step")
    figure.savefig(path, dpi=120)


def answers(engine: RolloutEngine, tokenizer: Any) -> list[str]:
    """Greedy answers to the held-out questions."""
    batch = engine.generate(
        [question(a, b) for a, b in HELD_OUT], SamplingParams(max_new_tokens=24, temperature=0)
    )
    return [tokenizer.decode(list(c.token_ids), skip_special_tokens=True).strip() for c in batch]


def make_trainer(kind: Any, args: argparse.Namespace, source: str, **changes: Any) -> tuple[Any, StepTable]:
    """A trainer of this kind on fresh weights, and its table."""
    table = StepTable()
    config = GRPOConfig(
        output_dir=str(args.out),
        per_device_train_batch_size=args.prompts_per_step * args.samples,
        num_generations=args.samples,
        max_completion_length=args.max_completion_length,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,  # StepTable shows the bar
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        **{"max_steps": args.steps, **changes},
    )
    more = {"logprob_gap_bound": 1e-3} if issubclass(kind, GRPOTrainer) else {}
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=additions(256),
        processing_class=AutoTokenizer.from_pretrained(source),
        callbacks=[table],
        **more,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, table


def show(
    table: StepTable, before: list[str], after: list[str], args: argparse.Namespace, num_processes: int
) -> None:
    """The picture, the held-out answers and the reward at both ends of the run."""
    draw(table.rows, args.out / "curves.png")
    shown = Table("question", "before", "after", title="held-out questions, greedy")
    for (a, b), old, new in zip(HELD_OUT, before, after, strict=True):
        shown.add_row(f"{a} + {b}", old, new)
    console = Console()
    console.print(shown)
    last = table.rows[-max(1, len(table.rows) // 4) :]
    console.print(
        f"reward: {table.rows[0]['reward']:.3f} in the first step, "
        f"{sum(row['reward'] for row in last) / len(last):.3f} in the last {len(last)} "
        f"({num_processes} processes)"
    )
    console.print(f"curves: {args.out / 'curves.png'}; checkpoint: {args.out / 'checkpoint'}")


def compare(ours: StepTable, args: argparse.Namespace, source: str) -> None:
    """Seconds per step that TRL's own trainer takes to generate, beside ours on the same steps."""
    trainer, table = make_trainer(
        TimedTRL, args, source, max_steps=args.compare, use_transformers_continuous_batching=True
    )
    trainer.train()
    if not trainer.accelerator.is_main_process:
        return
    for name, rows in (("this engine", ours.rows), ("TRL with transformers", table.rows)):
        rows = rows[: args.compare]
        seconds = sum(row["seconds_generating"] for row in rows)
        tokens = sum(row["completions/mean_length"] for row in rows) * args.prompts_per_step * args.samples
        print(
            f"{name:>22}: {seconds / len(rows):6.2f} s generating per step, {tokens / seconds:6.1f} tokens/s"
        )


def main() -> None:
    """Train, then show what changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="folder or hub id (default: the demo model)")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo_quickstart"))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--max-completion-length", type=int, default=16)
    parser.add_argument("--prompts-per-step", type=int, default=4, help="per process")
    parser.add_argument("--samples", type=int, default=8, help="completions per prompt")
    parser.add_argument("--compare", type=int, default=0, help="steps of TRL's own trainer afterwards")
    args = parser.parse_args()
    source = args.model or demo_model()
    trainer, table = make_trainer(TimedRollout, args, source)
    tokenizer = trainer.processing_class
    before = answers(trainer.engine, tokenizer)
    trainer.train()
    after = answers(trainer.engine, tokenizer)
    trainer.save_model(str(args.out / "checkpoint"))
    if trainer.accelerator.is_main_process:
        show(table, before, after, args, trainer.accelerator.num_processes)
    if args.compare:
        compare(table, args, source)


if __name__ == "__main__":
    main()
