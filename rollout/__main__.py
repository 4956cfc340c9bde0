"""``python -m rollout``: the same as the command ``rollout``."""

import sys

from rollout.cli import main

if __name__ == "__main__":
    sys.exit(main())
