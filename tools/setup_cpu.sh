#!/usr/bin/env bash
# Makes .venv in the repository root from the CPU lock file and installs this package in it, unless that is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lock=requirements/cpu.txt
python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || { echo "setup: $python not found; Python 3.11 is needed (set PYTHON=/path/to/it)" >&2; exit 2; }
stamp=.venv/installed-$(sha256sum "$lock" pyproject.toml setup.py | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0
echo "setup: installing $(grep -c == "$lock") pinned packages into .venv (once, a few minutes)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
rm -f .venv/installed-*
# --no-deps: the lock is complete, and SGLang's own pins ask for a torch without a CPU build.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r "$lock"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
.venv/bin/python - <<'P'
import sys, torch
if torch.version.cuda:
    sys.exit("setup: pip took a CUDA build of torch; point pip at PyTorch's CPU wheels for torch==2.13.0 and run again")
P
touch "$stamp"
