#!/usr/bin/env bash
# Builds the documentation into build/docs, to be opened as files: bash tools/docs.sh [options of `mkdocs build`]
# A dead link, a page that is in no menu, or a docstring that cannot be read ends it with an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON_BIN:-.venv/bin/python}
if ! "$python" -c 'import material, mkdocstrings_handlers.python' 2>/dev/null; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/docs.txt
fi
export NO_MKDOCS_2_WARNING=1
"$python" -m mkdocs build --strict --config-file tools/docs/mkdocs.yml "$@"
