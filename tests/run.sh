#!/usr/bin/env bash
# Sets up .venv if needed, checks style and runs the tests with two workers. Arguments go to pytest:
#   bash tests/run.sh -m slow                   the long tests
#   bash tests/run.sh -n 0 tests/rl -k entropy  some tests, in one process
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_cpu.sh
export OMP_NUM_THREADS=1
.venv/bin/ruff check --quiet .
.venv/bin/ruff format --check --quiet . || { echo "run.sh: 'ruff format .' would change files" >&2; exit 1; }
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
