#!/usr/bin/env bash
# Sets up .venv if needed and runs the tests. Arguments go to pytest: bash tests/run.sh -m slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_cpu.sh
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest "$@"
