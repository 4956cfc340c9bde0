"""The recipes run from beginning to end, small: a tiny random model, a step or two."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from trl_tiny import model_folder

RECIPES = Path(__file__).parent.parent / "recipes"
pytestmark = pytest.mark.slow


def run(recipe: str, *flags: str) -> str:
    """Output of a recipe that must end well."""
    done = subprocess.run(
        [sys.executable, str(RECIPES / recipe), *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_grpo_plain() -> None:
    flags = ("--steps", "2", "--prompts", "2", "--samples", "2", "--max-new-tokens", "4")
    out = run("grpo_plain.py", "--model", str(model_folder()), *flags)
    gaps = [float(line.split("logprob gap ")[1].split()[0]) for line in out.splitlines() if "gap" in line]
    assert len(gaps) == 2 and max(gaps) < 1e-4


def test_grpo_quickstart(tmp_path: Path) -> None:
    flags = ("--steps", "2", "--prompts-per-step", "2", "--samples", "2", "--max-completion-length", "4")
    out = run("grpo_quickstart.py", "--model", str(model_folder()), "--out", str(tmp_path), *flags)
    assert "held-out questions" in out
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert (tmp_path / "checkpoint" / "model.safetensors").exists()


def test_grpo_gsm8k(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rows = [
        {"question": f"What is {i} and 1,000?", "answer": f"It adds up.\n#### 1,{i:03}"} for i in range(8)
    ]
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ("--model_name_or_path", str(model_folder()), "--dataset_name", str(data))
    small = {
        "dataset_config": "default",
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "num_generations": 2,
        "max_completion_length": 4,
        "use_cpu": True,
        "bf16": False,
    }
    out = run("grpo_gsm8k.py", *flags, *(part for k, v in small.items() for part in (f"--{k}", str(v))))
    assert "rewards/correctness/mean" in out and "rollout/tokens_per_second" in out
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_gsm8k_reads_answers() -> None:
    recipe = runpy.run_path(str(RECIPES / "grpo_gsm8k.py"))
    last_number = recipe["last_number"]
    assert last_number("2 and 3 make 5.\n#### 1,005") == "1005"
    assert last_number("so it is 7, no: -8.5.") == "-8.5"
    assert last_number("#### none") is None
    chat = [[{"role": "assistant", "content": text}] for text in ("a\n#### 12", "12", "#### 12 #### 12")]
    assert recipe["correctness"](chat, ["x #### 12"] * 3) == [1.0, 1.0, 1.0]
    assert recipe["form"](chat) == [0.1, 0.0, 0.0]


def test_the_accelerate_configs_load() -> None:
    for path in sorted((RECIPES / "accelerate").glob("*.yaml")):
        assert load_config_from_file(str(path)).num_processes >= 1
