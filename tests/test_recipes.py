"""The recipes run from beginning to end, small: a tiny random model, a step or two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
