"""Compiles the C++ sources beside this file, once per source, compiler and CPU.

The library is made for the very CPU it runs on (``-march=native``), so it is kept in the user's cache
under a name that says all of that. Compiled by GCC it uses the OpenMP runtime that torch has loaded:
one pool of threads, sized by ``torch.set_num_threads``.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from rollout.paths import user_cache_dir

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared")
COMPILER = "g++"
COMPILE_SECONDS = 300


class BuildError(RuntimeError):
    """The library could not be made; the message says why."""


def load_library() -> ctypes.CDLL:
    """The compiled library, made now if the cache does not hold it (10 to 20 seconds).

    ``CXX`` names another GCC than g++, with arguments if it needs any.

    Raises:
        BuildError: there is no compiler, or it fails, or there is nowhere to keep what it makes.
    """
    try:
        compiler = find_compiler()
        target = user_cache_dir() / f"kernels-{_fingerprint(compiler)}.so"
        if not target.is_file():
            _compile(compiler, target)
        return ctypes.CDLL(str(target))
    except BuildError:
        raise
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home
        raise BuildError(f"the kernels could not be made: {type(error).__name__}: {error}") from error


def find_compiler() -> list[str]:
    """The command of the C++ compiler.

    Raises:
        BuildError: it is not found.
    """
    command = shlex.split(os.environ.get("CXX", "")) or [COMPILER]
    if shutil.which(command[0]) is None:
        raise BuildError(f"there is no C++ compiler: {command[0]} is not on the path; install g++ or set CXX")
    return command


def _fingerprint(compiler: list[str]) -> str:
    """Of everything that the library depends on."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.h")) + sorted(SOURCES.glob("*.cpp")):
        digest.update(source.read_bytes())
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False, timeout=60).stdout
    digest.update(version + " ".join((*compiler, *FLAGS)).encode() + _cpu().encode())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """What ``-march=native`` looks at: on Linux the lines on the CPU's model and its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: list[str], target: Path) -> None:
    """Compile to a temporary name and move it into place: other processes may do the same."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        made = Path(work) / "kernels.so"
        command = [*compiler, *FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS)
        if done.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        made.replace(target)
