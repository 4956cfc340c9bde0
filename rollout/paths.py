"""Where the library keeps what it makes: the demo model, compiled kernels."""

import os
from pathlib import Path


def user_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/rollout``, or ``~/.cache/rollout``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rollout"
