#!/usr/bin/env bash
# Makes .venv in the repository root from a CPU lock file and installs this package in it, unless that is up to date.
#   bash tools/setup_cpu.sh                      an existing .venv keeps its Python; a new one has Python 3.11
#   PYTHON=python3.12 bash tools/setup_cpu.sh    Python 3.12, with the megatron-core that needs it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stop() { echo "setup: $*" >&2; exit 2; }
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$@"; }

python=python3.11
[ -x .venv/bin/python ] && python=.venv/bin/python
python=${PYTHON:-$python}
found=$(version "$python") || stop "$python does not run; Python 3.11 or 3.12 is needed (set PYTHON=/path/to/it)"
case $found in
    3.11) locks=(requirements/cpu.txt) ;;
    3.12) locks=(requirements/cpu-py312.txt requirements/cuda-libraries.txt) ;;
    *) stop "$python is Python $found; 3.11 or 3.12 is needed (set PYTHON=/path/to/it)" ;;
esac
if [ -x .venv/bin/python ]; then
    there=$(version .venv/bin/python) || there=broken
    [ "$there" = "$found" ] || stop ".venv is of Python $there, not $found; remove it (rm -r .venv) or unset PYTHON"
fi
stamp=.venv/installed-$(sha256sum "${locks[@]}" requirements/tasks.txt pyproject.toml setup.py | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0

echo "setup: installing $(grep -c == "${locks[0]}") pinned packages into .venv (once, a few minutes)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
rm -f .venv/installed-*
# --no-deps: the lock is complete, and SGLang pins a torch that has no CPU build.
install -r "${locks[0]}"
# This reads the metadata, because a CUDA build of torch cannot be imported before its libraries are installed.
if .venv/bin/python -c 'import sys; from importlib.metadata import requires
sys.exit(not any(need.startswith("nvidia-") for need in requires("torch") or ()))'; then
    [ "$found" = 3.12 ] || stop "pip took a CUDA build of torch; point pip at PyTorch's CPU wheels for torch==2.13.0 and run again"
    echo "setup: pip found no CPU build of torch; installing the libraries that the CUDA build loads (5.9 GB)"
    install -r "${locks[1]}"
fi
failed=$(.venv/bin/python -c 'import torch' 2>&1) || stop "torch does not load: ${failed##*$'\n'}"
if command -v "${CC:-cc}" >/dev/null; then
    install -r requirements/tasks.txt
else
    echo "setup: no C compiler (${CC:-cc}), so reasoning_gym is left out; only data.path=reasoning_gym:TASK and its tests need it"
fi
install --no-build-isolation -e .
touch "$stamp"
