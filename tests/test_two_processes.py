"""Two gloo processes on a CPU: each rolls out its share, and nothing hangs where a share is empty."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trl_tiny import model_folder

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent


def launch(script: Path, *flags: str, num_processes: int = 2) -> str:
    """Output of a script that must end well."""
    config = str(ROOT / "recipes" / "accelerate" / "cpu.yaml")
    # a free port of its own: another run on this machine may hold the default one
    launcher = ("-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0")
    command = [sys.executable, *(launcher if num_processes == 2 else ()), str(script), *flags]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT / "tests")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks of the worker saw."""
    out = tmp_path_factory.mktemp("ranks") / "seen.json"
    launch(ROOT / "tests" / "worker_two_ranks.py", str(out))
    ranks: list[dict[str, Any]] = json.loads(out.read_text())
    assert [rank["rank"] for rank in ranks] == [0, 1]
    return ranks


def test_a_rank_without_prompts_takes_part(seen: list[dict[str, Any]]) -> None:
    assert [rank["num_alone"] for rank in seen] == [3, 0]
    assert seen[0]["logs"] == seen[1]["logs"]
    logs, tokens = seen[0]["logs"], seen[0]["tokens_alone"]
    assert tokens > 0 and seen[1]["tokens_alone"] == 0
    # the tokens of both ranks over the seconds of the slower one
    assert logs["rollout/tokens_per_second"] * logs["rollout/seconds"] == pytest.approx(tokens)


def test_shares_follow_the_ranks(seen: list[dict[str, Any]]) -> None:
    assert [rank["shares"] for rank in seen] == [[["a", "b"], []], [["c"], []]]


def test_ranks_draw_differently_from_the_same_prompt(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["same_prompt"] for rank in seen)
    assert first and second and first != second


def test_ranks_roll_out_the_same_updated_weights(seen: list[dict[str, Any]]) -> None:
    assert [rank["version"] for rank in seen] == [1, 1]
    assert seen[0]["greedy"] == seen[1]["greedy"]


def test_the_quickstart_runs_in_two_processes(tmp_path: Path) -> None:
    flags = ("--steps", "2", "--prompts-per-step", "2", "--samples", "2", "--max-completion-length", "4")
    script = ROOT / "recipes" / "grpo_quickstart.py"
    out = launch(script, "--model", str(model_folder()), "--out", str(tmp_path), *flags)
    assert "(2 processes)" in out
    assert out.count("held-out questions") == 1  # the main process alone reports
    assert (tmp_path / "checkpoint" / "model.safetensors").exists()


def test_ppo_trains_where_one_rank_has_no_prompts(tmp_path: Path) -> None:
    """One prompt per step for two ranks: rank 1 takes part in every update with masked rows alone."""
    flags = ("--steps", "2", "--prompts-per-step", "1", "--response-length", "4")
    script = ROOT / "recipes" / "ppo_quickstart.py"
    out = launch(script, "--model", str(model_folder()), "--out", str(tmp_path), *flags)
    assert out.count("held-out questions") == 1
    assert (tmp_path / "checkpoint" / "model.safetensors").exists()


def test_ppo_in_two_processes_equals_one_process(tmp_path: Path) -> None:
    """Three prompts on two ranks, with equal draws: one rank has a row more, the other a dummy."""
    seen = {}
    for num_processes in (1, 2):
        out = tmp_path / f"{num_processes}.json"
        script = ROOT / "tests" / "worker_ppo.py"
        launch(script, str(out), str(tmp_path / "run"), num_processes=num_processes)
        seen[num_processes] = json.loads(out.read_text())
        assert seen[num_processes]["num"] == num_processes
    assert seen[2]["weights"] == pytest.approx(seen[1]["weights"], rel=1e-6)
    for one, two in zip(seen[1]["logs"], seen[2]["logs"], strict=True):
        learnt = [name for name in one if name.partition("/")[0] in ("objective", "policy", "loss", "val")]
        assert len(learnt) >= 8
        assert {n: two[n] for n in learnt} == pytest.approx({n: one[n] for n in learnt}, rel=1e-3, abs=1e-5)
