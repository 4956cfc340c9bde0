"""The command line, run in this process on a tiny random model: files in, files and exit status out."""

import argparse
import dataclasses
import io
import json
import math
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout import EngineConfig, RolloutBatch, RolloutEngine, SamplingParams
from rollout.cli import ENGINE_OPTIONS, SAMPLING_OPTIONS, main, memory_size
from rollout.jsonl import LINE_PARAMS
from tiny_models import MAX_POSITIONS, tiny_llama
from tiny_tokenizer import EOS_ID, VOCAB_SIZE, tiny_tokenizer

FIELDS = [
    "id",
    "index",
    "prompt_ids",
    "token_ids",
    "text",
    "logprobs",
    "policy_logprobs",
    "log_kept_mass",
    "versions",
    "finish_reason",
    "stop_match",
    "error",
    "cached_tokens",
]
OUT_OF_VOCABULARY = {"prompt_ids": [10_000]}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model that knows every byte, with a chat template, as a folder."""
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(folder)
    tiny_llama(vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(model_path: str) -> Any:
    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture
def generate(model_path: str, tmp_path: Path) -> Callable[..., int]:
    """Runs ``rollout generate`` from ``prompts.jsonl`` to ``out.jsonl``; returns its exit status."""

    def run(lines: list[Any], *flags: str) -> int:
        _write(tmp_path / "prompts.jsonl", lines)
        return main(_command(tmp_path, model_path, *flags))

    return run


def _command(folder: Path, model: str, *flags: str) -> list[str]:
    files = ["--prompts", str(folder / "prompts.jsonl"), "--out", str(folder / "out.jsonl")]
    return ["generate", "--model", model, *files, "--max-new-tokens", "6", "--no-progress", *flags]


def _write(path: Path, lines: list[Any]) -> None:
    """Objects as JSON, strings as they are."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")


def _read(path: Path) -> list[dict[str, Any]]:
    return [_strict_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _strict_json(line: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    record: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return record


def _row(table: str, what: str) -> str:
    """The value cell of one row of the printed table."""
    match = re.search(rf"^\W*{re.escape(what)}\s+\W\s+(.*?)\s*\W$", table, re.MULTILINE)
    assert match, f"no row {what!r} in\n{table}"
    return match[1]


def test_three_kinds_of_prompts_in_order(
    generate: Callable[..., int], tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"prompt": "H\u00e9llo", "id": "text"},
        {"prompt_ids": [5, 6, 7], "id": 17, "params": {"n": 3, "max_new_tokens": 4}},
        "",  # a blank line counts for the numbering only
        {"messages": [{"role": "user", "content": "Hi"}]},
    ]
    assert generate(lines, "--n", "2", "--ignore-eos") == 0
    records = _read(tmp_path / "out.jsonl")
    assert [(r["id"], r["index"]) for r in records] == [
        ("text", 0),
        ("text", 1),
        (17, 0),
        (17, 1),
        (17, 2),
        (4, 0),
        (4, 1),
    ]
    assert records[0]["prompt_ids"] == tokenizer("H\u00e9llo")["input_ids"]
    assert records[2]["prompt_ids"] == [5, 6, 7]
    assert records[5]["prompt_ids"] == tokenizer("<user>Hi<assistant>")["input_ids"]
    assert [len(r["token_ids"]) for r in records] == [6, 6, 4, 4, 4, 6, 6]
    assert capsys.readouterr().out == ""


def test_fields_of_a_record(generate: Callable[..., int], tmp_path: Path, tokenizer: Any) -> None:
    assert generate([{"prompt": "abc"}], "--n", "4", "--top-k", "20", "--temperature", "0.7") == 0
    for record in _read(tmp_path / "out.jsonl"):
        assert list(record) == FIELDS
        assert record["text"] == tokenizer.decode(record["token_ids"], skip_special_tokens=True)
        for name in ("logprobs", "policy_logprobs", "log_kept_mass", "versions"):
            assert len(record[name]) == len(record["token_ids"]), name
        for sampled, policy, kept in zip(
            record["logprobs"], record["policy_logprobs"], record["log_kept_mass"], strict=True
        ):
            assert sampled == pytest.approx(policy - kept, abs=1e-5)
        assert record["versions"] == [0] * len(record["token_ids"])
        assert record["error"] is None and record["finish_reason"] in ("eos", "length")


def test_special_tokens_are_not_in_the_text(generate: Callable[..., int], tmp_path: Path) -> None:
    line = {"prompt": "abc", "params": {"logit_bias": {str(EOS_ID): 1000}}}
    assert generate([line]) == 0
    (record,) = _read(tmp_path / "out.jsonl")
    assert record["token_ids"] == [EOS_ID] and record["text"] == ""
    assert (record["finish_reason"], record["stop_match"]) == ("eos", EOS_ID)


def test_stops_from_flags_and_lines(generate: Callable[..., int], tmp_path: Path, tokenizer: Any) -> None:
    [a], [b], [c] = (tokenizer(char)["input_ids"] for char in "abc")
    lines = [{"prompt": "x", "params": {"logit_bias": {str(token): 1000}}} for token in (a, b, c)]
    lines[2]["params"]["stop_strings"] = ["ccc"]
    assert generate(lines, "--stop", "zz", "--stop", "aa", "--stop-token-id", str(b)) == 0
    records = _read(tmp_path / "out.jsonl")
    assert [r["text"] for r in records] == ["aa", "b", "ccc"]
    assert [r["stop_match"] for r in records] == ["aa", b, "ccc"]


def test_line_params_go_before_flags(generate: Callable[..., int], tmp_path: Path) -> None:
    lines = [{"prompt": "abc"}, {"prompt": "abc", "params": {"max_new_tokens": 2, "temperature": 0}}]
    assert generate(lines, "--ignore-eos", "--temperature", "2") == 0
    warm, greedy = _read(tmp_path / "out.jsonl")
    assert len(warm["token_ids"]) == 6 and len(greedy["token_ids"]) == 2
    assert greedy["logprobs"] == [0.0, 0.0] and 0.0 not in warm["logprobs"]


def test_same_seed_same_bytes(generate: Callable[..., int], tmp_path: Path) -> None:
    lines = [{"prompt": "abc"}, {"prompt": "abc"}, {"prompt": "abc", "params": {"seed": 3}}]
    outs, files = [], []
    for seed in ("7", "7", "8"):
        assert generate(lines, "--n", "3", "--ignore-eos", "--seed", seed) == 0
        outs.append([r["token_ids"] for r in _read(tmp_path / "out.jsonl")])
        files.append((tmp_path / "out.jsonl").read_bytes())
    assert files[0] == files[1]
    assert outs[0][:6] != outs[2][:6], "--seed changed nothing"
    assert outs[0][6:] == outs[2][6:], "a line's own seed does not depend on --seed"
    assert outs[0][:3] != outs[0][3:6], "two lines with the same prompt drew the same noise"


BAD_LINES = {
    "not JSON": ('{"prompt": "a"', "not valid JSON at column 15"),
    "not UTF-8": ('{"prompt": "\u00e4"}'.encode("latin-1").decode("utf-8", "surrogateescape"), "utf-8"),
    "no object": ("[1, 2]", "[1, 2] is no object"),
    "no prompt": ({"id": "x"}, "no prompt given; give exactly one of prompt, prompt_ids, messages"),
    "two prompts": ({"prompt": "a", "prompt_ids": [1]}, "prompt and prompt_ids given"),
    "wrong text": ({"prompt": 5}, "prompt=5 is wrong; give a string"),
    "wrong ids": ({"prompt_ids": [1, True]}, "prompt_ids=[1, True] is wrong; give a list of whole numbers"),
    "wrong chat": ({"messages": ["hi"]}, "messages=['hi'] is wrong"),
    "wrong id": ({"prompt": "a", "id": None}, "id=None is wrong"),
    "unknown key": ({"prompt": "a", "param": {}}, "unknown keys ['param']"),
    "wrong params": ({"prompt": "a", "params": 3}, "params=3 is wrong"),
    "unknown param": ({"prompt": "a", "params": {"max_tokens": 3}}, "unknown params ['max_tokens']"),
    "a function": ({"prompt": "a", "params": {"logits_processors": []}}, "['logits_processors']"),
    "wrong type": ({"prompt": "a", "params": {"n": "3"}}, "n='3' has type str"),
    "out of range": ({"prompt": "a", "params": {"top_p": 0}}, "top_p=0 is out of range"),
    "against a flag": ({"prompt": "a", "params": {"min_new_tokens": 9}}, "above max_new_tokens=6"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=list(BAD_LINES))
def test_bad_line_is_refused_before_the_model_is_loaded(
    line: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    source = tmp_path / "prompts.jsonl"
    source.write_bytes(b'{"prompt": "good"}\n' + text.encode("utf-8", "surrogateescape") + b"\n")
    # a model that cannot be loaded: the complaint would be about it
    assert main(_command(tmp_path, str(tmp_path / "no-such-model"))) == 2
    complaint = _only_complaint(capsys)
    assert complaint.startswith(f"rollout: {source}, line 2: ") and message in complaint
    assert not (tmp_path / "out.jsonl").exists()


def _only_complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that was printed, on stderr."""
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


WRONG_FLAGS = {
    "contradicting params": (
        ["--min-new-tokens", "7"],
        "rollout: min_new_tokens=7 is above max_new_tokens=6; raise max_new_tokens or lower min_new_tokens",
    ),
    "contradicting sizes": (
        ["--num-blocks", "8", "--max-memory", "1"],
        f"rollout: num_blocks=8 and max_memory={2**30} both size the cache; give one of them",
    ),
    "out of range": (
        ["--temperature", "-1"],
        "rollout: temperature=-1.0 is out of range; allowed: >= 0.0 and finite",
    ),
}


@pytest.mark.parametrize(("flags", "message"), WRONG_FLAGS.values(), ids=list(WRONG_FLAGS))
def test_wrong_flags(
    flags: list[str], message: str, generate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate([{"prompt": "a"}], *flags) == 2
    assert _only_complaint(capsys) == message


def test_argparse_complains_in_one_line(
    generate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, words in (
        (["--n", "many"], "argument --n: invalid int value: 'many'"),
        (["--max-new", "3"], "unrecognized arguments: --max-new 3"),
        (["--max-memory", "2 apples"], "'2 apples' is no size"),
        (["--attn", "magic"], "invalid choice: 'magic'"),
    ):
        with pytest.raises(SystemExit) as exit_:
            generate([{"prompt": "a"}], *flags)
        assert exit_.value.code == 2
        assert words in _only_complaint(capsys)


def test_missing_files(
    tmp_path: Path, model_path: str, generate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    assert main(_command(tmp_path, model_path)) == 2
    assert _only_complaint(capsys) == f"rollout: {prompts}: No such file or directory"
    assert generate([]) == 2
    assert _only_complaint(capsys) == f"rollout: {prompts} holds no prompts; give one JSON object per line"
    assert generate([{"prompt": "a"}], "--out", str(tmp_path / "no" / "out.jsonl")) == 2
    assert "does not exist; make it first" in _only_complaint(capsys)
    assert generate([{"prompt": "a"}], "--out", str(tmp_path)) == 2
    assert "is no regular file" in _only_complaint(capsys)
    assert generate([{"prompt": "a"}], "--out", str(prompts)) == 2
    assert "the prompts would be lost" in _only_complaint(capsys)
    assert _read(prompts) == [{"prompt": "a"}]


def test_missing_model_keeps_the_old_output(
    generate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.jsonl").write_text("old")
    assert generate([{"prompt": "a"}], "--model", str(tmp_path / "nowhere")) == 2
    message = _only_complaint(capsys)
    assert message.startswith(f"rollout: --model {tmp_path / 'nowhere'} is no local folder and cannot be")
    assert _contents(tmp_path) == {"out.jsonl": "old", "prompts.jsonl": '{"prompt": "a"}\n'}


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (OSError("disk full"), 2)])
def test_a_run_cut_short_keeps_the_old_output(
    error: BaseException,
    status: int,
    model_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ends in the middle of writing, after the first of two lines."""
    (tmp_path / "out.jsonl").write_text("old")
    dumps, records = json.dumps, []

    def dump_once(record: Any, **options: Any) -> str:
        records.append(record)
        if len(records) == 2:
            raise error
        return dumps(record, **options)

    _write(tmp_path / "prompts.jsonl", [{"prompt": "a"}])
    monkeypatch.setattr("rollout.cli.json.dumps", dump_once)
    assert main(_command(tmp_path, model_path, "--n", "2")) == status
    assert _contents(tmp_path) == {"out.jsonl": "old", "prompts.jsonl": '{"prompt": "a"}\n'}


def _contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_stdin_to_stdout(
    model_path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b'{"prompt": "abc"}\n{"prompt_ids": [1]}\n'))
    monkeypatch.setattr(sys, "stdin", stdin)
    argv = ["generate", "--model", model_path, "--prompts", "-", "--out", "-", "--max-new-tokens", "2"]
    monkeypatch.setattr(sys, "argv", ["rollout", *argv])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("rollout", run_name="__main__")
    assert exit_.value.code == 0
    captured = capsys.readouterr()
    records = [_strict_json(line) for line in captured.out.splitlines()]
    assert [record["id"] for record in records] == [1, 2]
    assert "2/2" in captured.err, "no progress bar on stderr"


def test_bad_line_of_stdin(
    model_path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}\n")))
    assert main(["generate", "--model", model_path, "--prompts", "-", "--out", "-"]) == 2
    assert _only_complaint(capsys).startswith("rollout: <stdin>, line 1: no prompt given")


@pytest.mark.parametrize(("on_error", "status"), [("return", 0), ("raise", 1)])
def test_failed_completions_are_written(
    on_error: str,
    status: int,
    generate: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    too_long = {"prompt_ids": [1] * MAX_POSITIONS, "id": "long"}
    lines = [{"prompt": "good"}, OUT_OF_VOCABULARY, {"prompt": "good"}, too_long]
    assert generate(lines, "--n", "2", "--on-error", on_error) == status
    records = _read(tmp_path / "out.jsonl")
    assert [r["id"] for r in records] == [1, 1, 2, 2, 3, 3, "long", "long"]
    for record in records:
        failed = record["id"] in (2, "long")
        assert (record["error"] is not None) == (record["finish_reason"] == "error") == failed
        assert bool(record["token_ids"]) == (not failed)
    assert records[2]["error"].startswith("ValueError: the prompt has ids [10000] outside the vocabulary")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(r"\berror 4\b", captured.err), "the table does not count the failures"
    complaint = f"4 of 8 completions failed, first {tmp_path / 'prompts.jsonl'}, line 2: ValueError: "
    assert (complaint in captured.err) == (on_error == "raise")


def test_table_tells_the_numbers(
    generate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"prompt": "a" * 20, "params": {"n": 3}},
        {"prompt": "b", "params": {"max_new_tokens": 2}},
    ]
    assert generate(lines, "--ignore-eos", "--page-size", "4") == 0
    table, records = capsys.readouterr().err, _read(tmp_path / "out.jsonl")
    cached = sum(r["cached_tokens"] for r in records)
    assert cached > 0
    assert _row(table, "completions") == "4"
    assert _row(table, "generated tokens") == "20"
    assert _row(table, "mean / min / max length") == "5.0 / 2 / 6"
    assert _row(table, "finish reasons") == "length 4"
    assert _row(table, "cached tokens") == str(cached)
    assert _row(table, "preemptions") == "0"
    assert int(_row(table, "steps")) >= 6
    assert float(_row(table, "cache size in MiB")) > 0
    seconds, speed = float(_row(table, "seconds")), float(_row(table, "tokens/s"))
    assert speed == pytest.approx(20 / seconds, rel=0.05)
    assert 0 < float(_row(table, "seconds in forward")) <= seconds


def test_infinite_numbers_become_null(
    generate: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class InfiniteEngine(RolloutEngine):
        def generate(self, *args: Any, **kwargs: Any) -> RolloutBatch:
            batch = super().generate(*args, **kwargs)
            broken = (math.nan, -math.inf, math.inf, -1.5, -1.5, -1.5)
            return RolloutBatch(
                tuple(dataclasses.replace(c, logprobs=broken) for c in batch), metrics=batch.metrics
            )

    monkeypatch.setattr("rollout.cli.RolloutEngine", InfiniteEngine)
    assert generate([{"prompt": "abc"}], "--ignore-eos") == 0
    (record,) = _read(tmp_path / "out.jsonl")
    assert record["logprobs"] == [None, None, None, -1.5, -1.5, -1.5]


def test_engine_flags_reach_the_engine(generate: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[EngineConfig] = []

    class WatchedEngine(RolloutEngine):
        def __init__(self, model: Any, tokenizer: Any, config: EngineConfig) -> None:
            configs.append(config)
            super().__init__(model, tokenizer, config)

    monkeypatch.setattr("rollout.cli.RolloutEngine", WatchedEngine)
    flags = "--seed 3 --page-size 8 --max-memory 64MiB --max-batch-tokens 300"
    flags += " --scheduler prefill_first --attn eager --dtype bfloat16 --device cpu"
    assert generate([{"prompt": "abc"}]) == 0
    assert generate([{"prompt": "abc"}], *flags.split()) == 0
    assert configs == [
        EngineConfig(),
        EngineConfig(
            seed=3,
            page_size=8,
            max_memory=2**26,
            max_batch_tokens=300,
            scheduler_type="prefill_first",
            attn_implementation="eager",
        ),
    ]


def test_every_sampling_parameter_can_be_given() -> None:
    names = {f.name for f in dataclasses.fields(SamplingParams)}
    assert names - set(LINE_PARAMS) == {"logits_processors"}
    # --seed is the engine's; a bias is a matter of a prompt
    assert names - {o.name for o in SAMPLING_OPTIONS} == {"seed", "logit_bias", "logits_processors"}
    assert {o.name for o in ENGINE_OPTIONS} <= {f.name for f in dataclasses.fields(EngineConfig)}


def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "--help"])
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        f"--max-new-tokens N tokens to generate at the most (default: {SamplingParams().max_new_tokens})"
        in text
    )
    assert f"(default: {EngineConfig().scheduler_type})" in text


@pytest.mark.parametrize(
    ("text", "size"),
    [("2", 2**31), ("1.5", 3 * 2**29), ("512MiB", 2**29), ("512 mib", 2**29), ("2GB", 2 * 10**9), ("7B", 7)],
)
def test_memory_size(text: str, size: int) -> None:
    assert memory_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2TiB", "1.2.3", "nan", "inf", "1e3", "2147483648"])
def test_no_memory_size(text: str) -> None:
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"no size|without a unit is GiB; for bytes write 2147483648B"
    ):
        memory_size(text)


def test_demo_model_answers_a_chat(
    demo_model_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = "What is the capital of France?"
    _write(tmp_path / "prompts.jsonl", [{"messages": [{"role": "user", "content": question}]}])
    assert main(_command(tmp_path, "demo", "--temperature", "0", "--max-new-tokens", "16")) == 0
    (record,) = _read(tmp_path / "out.jsonl")
    assert "Paris" in record["text"], record["text"]
    assert "<|" not in record["text"]
