#!/usr/bin/env bash
# Everything that needs a GPU, in under four minutes: the tests, then a table of speeds. Installs
# nothing; run it in an environment that has torch for CUDA and what pyproject.toml asks for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" PYTHONPATH="$PWD"

status=0
timeout 150 python -m pytest -q -m gpu tests/gpu || status=$?
if python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    timeout 80 python tests/gpu/speed.py || status=$?
fi
exit "$status"
