"""GRPO on grade-school mathematics, GPU-sized, on one GPU or several under DDP.

Every flag of ``GRPOConfig`` works, and of ``ModelConfig`` those for the model, its revision, dtype and
attention, and for LoRA (``--use_peft``). The values below are where a 0.5B model on one 80 GB GPU
starts from. The reward is 1 for the right number after ``####`` or in the last place, plus 0.1 for the
form asked for (Cobbe et al. 2021, arXiv:2110.14168, for the data and its answer format).

    accelerate launch --config_file recipes/accelerate/single_gpu.yaml recipes/grpo_gsm8k.py
    accelerate launch --config_file recipes/accelerate/ddp.yaml --num_processes 4 recipes/grpo_gsm8k.py \
        --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct --learning_rate 5e-7

Left out: evaluation on the test split, FSDP and DeepSpeed (the engine needs whole weights on each
rank), and a reward that checks the reasoning. Not run on a GPU by the project's tests, which run it
small on a CPU.
"""

import re
from typing import Any

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config

from rollout.integrations.trl import GRPOTrainer

SYSTEM = "Reason step by step, then write the answer as a number after ####."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
DEFAULTS = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "dataset_name": "openai/gsm8k",
    "dataset_config": "main",
    "output_dir": "runs/grpo_gsm8k",
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "num_generations": 16,
    "max_completion_length": 512,
    "learning_rate": 1e-6,
    "beta": 0.0,
    "max_steps": 500,
    "logging_steps": 1,
    "save_steps": 100,
    "report_to": "none",
}


def last_number(text: str) -> str | None:
    """The number after the last ``####``, or else the last number of the text, without commas."""
    numbers = NUMBER.findall(text.rsplit("####", 1)[-1])
    if not numbers:
        return None
    chosen: str = numbers[0] if "####" in text else numbers[-1]
    return chosen.replace(",", "")


def correctness(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 for the right number."""
    return [
        float(last_number(completion[0]["content"]) == last_number(right))
        for completion, right in zip(completions, answer, strict=True)
    ]


def form(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """0.1 for exactly one ``####`` with a number behind it."""
    return [
        0.1 * bool(re.fullmatch(r"[^#]*####\s*" + NUMBER.pattern + r"\.?\s*", completion[0]["content"]))
        for completion in completions
    ]


def as_prompt(row: dict[str, str]) -> dict[str, Any]:
    """A dataset row with the chat prompt that TRL reads."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": messages, "answer": row["answer"]}


def main() -> None:
    """Train and save."""
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    parser.set_defaults_with_config(**DEFAULTS)
    script, config, model = parser.parse_args_and_config()
    if model.load_in_4bit or model.load_in_8bit:
        raise SystemExit(
            "the engine serves no quantised weights; leave out --load_in_4bit and --load_in_8bit"
        )
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype or "float32",  # weights in fp32; --bf16 runs them in bf16
        **(config.model_init_kwargs or {}),
    }
    data = load_dataset(script.dataset_name, script.dataset_config, split=script.dataset_train_split)
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=[correctness, form],
        args=config,
        train_dataset=data.map(as_prompt, remove_columns=["question"]),
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path),
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model(config.output_dir)


if __name__ == "__main__":
    main()
