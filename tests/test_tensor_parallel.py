"""Two gloo ranks of a CPU compute one model: the tokens of one process, the same orders on both, no hang.

The ranks run ``worker_tensor_parallel.py``: once under torchrun for all that works, once as two plain
processes for ranks that differ, are stuck, and die (torchrun would end the survivor before it can tell).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiny_models import TINY_MODELS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
WORKER = str(ROOT / "tests" / "worker_tensor_parallel.py")
LIMIT = 180.0
MODELS: dict[str, dict[str, Any]] = {
    # fused layers and joint linears on the shards; biases, tied embeddings; projections that are joined
    # again and split again; experts
    "llama_wide": {"num_key_value_heads": 2},
    "qwen2": {},
    "phi3": {},
    "qwen3_moe": {},
}
KV_HEADS = {"llama_wide": 1, "qwen2": 1, "phi3": 2, "qwen3_moe": 1}
"""On each rank, of two: phi3's plan leaves its keys whole."""
FUSED = {"llama_wide": 2, "qwen2": 2, "phi3": 0, "qwen3_moe": 0}
TOLERANCE = 3e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint per model, and one with a kv head that two ranks cannot share."""
    folder = tmp_path_factory.mktemp("models")
    for name, changes in MODELS.items():
        TINY_MODELS[name](**changes).save_pretrained(folder / name)
    TINY_MODELS["llama_wide"](num_key_value_heads=1).save_pretrained(folder / "one_kv_head")
    return folder


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def seen_by(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def seen(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks saw together."""
    out = tmp_path_factory.mktemp("together")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, WORKER, "together", str(folder), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-5000:]
    return seen_by(out)


@pytest.fixture(scope="module")
def apart(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What they saw apart; the second one dies in the end."""
    out = tmp_path_factory.mktemp("apart")
    ranks = [
        subprocess.Popen(
            [sys.executable, WORKER, "apart", str(folder), str(out)],
            env={**environment(), "RANK": str(rank), "WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        first, second = (rank.communicate(timeout=LIMIT)[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 0, first[-5000:]
    assert ranks[1].returncode == -9, second[-5000:]
    return seen_by(out)


def assert_close(ours: list[Any], theirs: list[Any]) -> None:
    """The same tokens and ends, and logprobs within rounding."""
    assert [(tokens, end) for tokens, _, end in ours] == [(tokens, end) for tokens, _, end in theirs]
    for (_, found, _), (_, expected, _) in zip(ours, theirs, strict=True):
        assert found == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_draw_what_one_process_draws(seen: list[dict[str, Any]], name: str) -> None:
    first, second = (rank["engine"][name] for rank in seen)
    assert first["divided"] == second["divided"]  # to the last bit
    assert_close(first["divided"], first["whole"])
    assert first["scores"] == second["scores"]
    for found, expected in zip(first["scores"], first["whole_scores"], strict=True):
        assert found == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_pages_hold_the_local_kv_heads(seen: list[dict[str, Any]], name: str) -> None:
    for rank in seen:
        assert rank["engine"][name]["kv_heads"] == [KV_HEADS[name]]


@pytest.mark.parametrize("name", MODELS)
def test_fused_layers_and_derived_copies_work_on_the_shards(seen: list[dict[str, Any]], name: str) -> None:
    """They must not skip the sums between the ranks: that they are there and the tokens right says so."""
    for rank in seen:
        assert rank["engine"][name]["num_fused"] == FUSED[name]
        assert rank["engine"][name]["derived_bytes"] > 0


def test_a_crowd_is_preempted_alike_on_both_ranks(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["crowd"] for rank in seen)
    assert first == second
    assert first["num_preemptions"] > 0 and first["pages_loaded"] > 0
    assert_close(first["divided"], first["whole"])


def test_only_one_rank_draws_and_its_tokens_and_errors_are_everybodys(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["draws"] for rank in seen)
    assert first["num_calls"] > 0 and second["num_calls"] == 0
    assert first["random"] == second["random"]  # under seeds that differ
    assert first["failed"] == second["failed"]
    assert [error for error, _ in first["failed"]] == ["NoneType", "NonFiniteLogits", "NoneType"]


def test_a_change_that_one_rank_sees_is_a_new_version_on_all(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["weights"] for rank in seen)
    assert first == second
    assert first["versions"] == [0, 1, 1]
    for divided, whole in zip(first["divided"], first["whole"], strict=True):
        assert_close(divided, whole)
    assert first["divided"][0] != first["divided"][1]


def test_adapters_around_divided_linears_are_served_and_switched(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["adapters"] for rank in seen)
    assert first["divided"] == second["divided"]
    for divided, whole in zip(first["divided"], first["whole"], strict=True):
        assert_close(divided, whole)
    on, off = first["divided"]
    assert on != off


def test_other_divisions_and_sizes_that_do_not_fit_the_kv_heads_are_refused(
    seen: list[dict[str, Any]],
) -> None:
    for rank in seen:
        assert "tp_size=2 does not divide num_key_value_heads=1" in rank["refused"]["heads"]
        assert "DTensor over ('fsdp',)" in rank["refused"]["fsdp"]
        assert "DTensor over ('ep',)" in rank["refused"]["experts"]
        assert rank["refused"]["async"].startswith("use_async_batching=True launches a step before")


def test_the_timeout_is_the_groups_and_none_means_any_time(seen: list[dict[str, Any]]) -> None:
    """torch itself would take None for 30 minutes."""
    assert seen[0]["timeouts"] == [7.0, 10 * 365 * 24 * 3600.0]


def test_one_rank_drives_and_all_get_the_results(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["manager"] for rank in seen)
    assert first["driven"] == second["driven"]
    assert [request_id for request_id, *_ in first["driven"]] == ["req_0", "req_1", "req_2"]
    assert first["same"] == second["same"]  # where both ranks run the same script
    tokens = [tokens for tokens, *_ in first["after"]]
    assert [row[1] for row in first["driven"]] == [row[1] for row in first["same"]] == tokens


@pytest.mark.parametrize("canceller", [0, 1])
def test_either_rank_cancels_for_both(seen: list[dict[str, Any]], canceller: int) -> None:
    first, second = (rank["manager"][f"long-{canceller}"] for rank in seen)
    assert first == second and first[2] == "cancelled" and 0 < len(first[1]) < 200


def test_either_rank_pauses_both_and_an_update_counts_from_one_token_on(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["manager"] for rank in seen)
    assert first["grew_in_pause"] == 0  # while rank 1 paused
    assert first["paused_at"] == second["paused_at"]
    assert first["held"] == second["held"]
    versions = first["held"][1]
    assert versions == [0] * first["paused_at"] + [1] * (60 - first["paused_at"])


def test_requests_that_rank_0_does_not_add_fail_with_a_sentence(seen: list[dict[str, Any]]) -> None:
    other = seen[1]["manager"]
    assert "did not add it within cpu_group_timeout; add requests on rank 0" in other["unasked"][2]
    assert "is another one on rank 0" in other["differs"]


def test_either_rank_stops_both(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["manager"] for rank in seen)
    assert first["last"] == second["last"] and first["last"][2] == "length" and len(first["last"][1]) == 20
    assert first["stopped"] == second["stopped"] == [False, 0]  # no thread, no cache
    assert first["cut"] == second["cut"] and "stopped before" in first["cut"][0]
    assert first["after"] == second["after"]  # the engines still agree


def test_a_script_at_two_speeds_gets_equal_outputs_while_threads_cancel_and_pause(
    seen: list[dict[str, Any]],
) -> None:
    first, second = (rank["chaos"] for rank in seen)
    assert first == second
    ends = [end for *_, end in first["outputs"]]
    assert len(ends) == 45 and set(ends) == {"length", "cancelled"}


def test_the_guides_block_runs_on_all_ranks(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["guide"] for rank in seen)
    assert first == second
    assert first["outputs"] == first["again"] == first["streamed"]
    assert [len(tokens) for tokens in first["outputs"]] == [8, 8, 8]
    greedy = [tokens[:6] for tokens in first["outputs"]]
    assert greedy == [tokens for tokens, *_ in seen[0]["manager"]["after"]]


def test_ranks_that_are_told_different_things_stop_with_both_sides(apart: list[dict[str, Any]]) -> None:
    for rank in apart:
        assert "(5, 6, 7)" in rank["differ"]["error"] and "(5, 6, 8)" in rank["differ"]["error"]
        assert "out of step" in rank["differ_again"]["error"]
        assert "{'page_size': 4, 'cpu_g" in rank["configs"]["error"]
        assert "{'page_size': 5, 'cpu_g" in rank["configs"]["error"]


def test_a_rank_that_fails_ends_the_others_wait_at_once(apart: list[dict[str, Any]]) -> None:
    assert "got no answer from the other ranks" in apart[0]["failed"]["error"]
    assert apart[0]["failed"]["seconds"] < 30.0  # of 60
    assert "the step failed with TypeError" in apart[1]["failed"]["error"]


def test_a_stuck_rank_is_waited_for_no_longer_than_the_timeout(apart: list[dict[str, Any]]) -> None:
    assert "cpu_group_timeout=2 s" in apart[0]["stuck"]["error"]
    assert 1.5 < apart[0]["stuck"]["seconds"] < 5.5  # it is stuck for 6
    assert apart[1]["stuck"]["error"] is not None


def test_a_killed_rank_makes_the_other_raise_within_the_timeout(apart: list[dict[str, Any]]) -> None:
    survivor = apart[0]
    assert "got no answer from the other ranks" in survivor["orphan"]["error"]
    assert survivor["orphan"]["seconds"] < 10.0  # the timeout is 5
    assert survivor["ended"] == [False, "RankError"]  # its thread ended
    assert survivor["killed"]["error"] is not None and survivor["killed"]["seconds"] < 10.0
