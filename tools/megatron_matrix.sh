#!/usr/bin/env bash
# Runs the tests of the train step, parity, bit-identity and experts with other releases of megatron-core than the one in
# .venv. The .venv needs Python 3.12. docs/install.md has the results.
#   PYTHON=python3.12 bash tools/setup_cpu.sh && bash tools/megatron_matrix.sh [VERSION ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -gt 0 ] || set -- 0.17.1 0.18.2
python=$PWD/.venv/bin/python
[ "$("$python" -c 'import sys; print(sys.version_info >= (3, 12))')" = True ] || {
    echo "megatron_matrix: .venv is of Python 3.11, which these releases do not support; see tools/setup_cpu.sh" >&2
    exit 2
}
tests=(tests/losses tests/packing/test_shift.py tests/train/test_{model_parity,isolation,experts,parallel_equality,resume}.py)
tests+=(tests/models/test_{names,families}.py)
export OMP_NUM_THREADS=1
failed=0
for version; do
    folder=$PWD/build/megatron-core-$version
    [ -e "$folder/megatron" ] || "$python" -m pip install --quiet --no-deps --target "$folder" "megatron-core==$version"
    found=$(PYTHONPATH=$folder "$python" -W ignore -c 'import megatron.core as m; print(m.__file__)' 2>/dev/null | tail -1)
    [[ $found = "$folder"/* ]] || { echo "megatron_matrix: $found was imported, not $version" >&2; exit 2; }
    echo "== megatron-core $version"
    PYTHONPATH=$folder "$python" -m pytest -p no:cacheprovider -W ignore "${tests[@]}" || failed=1
done
exit $failed
