"""How the kernels are compiled, and what serves where they are not."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollout.native import BuildError, Kernels, build, chosen_kernels, load_kernels
from rollout.native import kernels as kernels_room

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return load_kernels()


def test_without_a_compiler_torch_serves_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels_room._load_once.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    try:
        with caplog.at_level(logging.WARNING, logger="rollout"):
            assert chosen_kernels("auto", CPU) is None
            assert chosen_kernels("auto", CPU) is None
        assert caplog.text.count("no-such-compiler is not on the path; install g++ or set CXX") == 1
        with pytest.raises(BuildError, match="no-such-compiler"):
            chosen_kernels(True, CPU)
        assert chosen_kernels(False, CPU) is None
    finally:
        kernels_room._load_once.cache_clear()


def test_kernels_are_for_the_cpu() -> None:
    assert chosen_kernels("auto", torch.device("cuda")) is None
    with pytest.raises(ValueError, match="native_kernels=True needs a model on the CPU, this one is on cuda"):
        chosen_kernels(True, torch.device("cuda"))


def test_a_failing_compiler_leaves_nothing_and_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken-g++"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no AVX today' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(BuildError, match="no AVX today"):
        build.load_library()
    assert list((tmp_path / "cache" / "rollout").iterdir()) == []


def test_a_user_without_a_home_gets_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build, "user_cache_dir", no_home)
    with pytest.raises(BuildError, match="Could not determine home directory"):
        build.load_library()


def test_the_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -m64")
    assert build.find_compiler() == ["g++", "-m64"]
    monkeypatch.setenv("CXX", "")
    assert build.find_compiler() == ["g++"]


def test_two_processes_may_compile_at_once(tmp_path: Path) -> None:
    code = "from rollout.native import load_kernels; load_kernels(); print('made')"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=300)[0].strip() for process in running] == ["made", "made"]
    assert len(list((tmp_path / "rollout").iterdir())) == 1


def test_the_library_is_made_once(kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.load_library()
    (made,) = (tmp_path / "rollout").iterdir()
    written = made.stat().st_mtime_ns
    build.load_library()
    assert [path.stat().st_mtime_ns for path in (tmp_path / "rollout").iterdir()] == [written]
