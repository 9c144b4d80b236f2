#!/usr/bin/env bash
# Sets up .venv if needed, checks style and runs the fast tests with two workers; other arguments go to pytest.
#   bash tests/run.sh --all                     the fast tier, the slow one, and those for GPUs and slime where they can run
#   bash tests/run.sh -m slow                   one tier
#   bash tests/run.sh -n 0 tests/rl -k entropy  some tests, in one process
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_cpu.sh --no-hints
export OMP_NUM_THREADS=1
.venv/bin/ruff check --quiet .
.venv/bin/ruff format --check --quiet . || { echo "run.sh: 'ruff format .' would change files" >&2; exit 1; }
pytest=(.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder)
[ "${1:-}" = --all ] || exec "${pytest[@]}" "$@"
shift

report=()
code=0
tier() {  # tier NAME ARGUMENTS...
    local name=$1 began=$SECONDS ended=0
    shift
    echo "run.sh: $name"
    "${pytest[@]}" "$@" || ended=$?
    [ "$ended" = 5 ] && ended=0  # no test of this tier among the arguments
    [ "$ended" = 0 ] || code=1
    report+=("$name: $(((SECONDS - began) / 60)) min $(((SECONDS - began) % 60)) s, exit code $ended")
}
tier "fast tier" "$@"
tier "slow tier" -m "slow and not gpu and not slime" "$@"
tier "GPU tests" -m gpu "$@"      # skip themselves where no CUDA device is
tier "slime's tests" -m slime "$@"  # skip themselves where no checkout of slime is
printf 'run.sh: %s\n' "${report[@]}"
exit "$code"
