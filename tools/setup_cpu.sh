#!/usr/bin/env bash
# Makes .venv in the repository root for a machine without a GPU and installs this package in it, unless it is up to date.
#   bash tools/setup_cpu.sh                      an existing .venv keeps its Python; a new one has 3.11, or else 3.12
#   bash tools/setup_cpu.sh --no-hints           the same, for another script that goes on
#   PYTHON=python3.12 bash tools/setup_cpu.sh    Python 3.12, with the megatron-core that needs it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
log=.venv/setup.log
exec 3>&1
reporter=
trap '[ -z "$reporter" ] || kill "$reporter" 2>/dev/null' EXIT
stop() { echo "setup: $*" >&2; exit 2; }
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
there() { { find .venv/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' 2>/dev/null || true; } | wc -l; }
installed() { n=$(there); most "$((n > before ? n - before : 0))" "$1"; }
packages() { cat "$@" | sed '/python_version </d' | grep -c ==; }  # a package with a version for each Python is one
most() { echo "$(($1 < $2 ? $1 : $2))"; }
fetched() { grep -cE '^ *(Downloading|Using cached|Processing) .*\.(whl|tar\.gz|zip)( |$)' "$log" || true; }

report() {  # one line every 20 s; `sleep` must not hold the output open after this script has ended
    while sleep 20 >/dev/null 2>&1 3>&-; do
        echo "setup: $(($(date +%s) - started)) s: $(most "$(fetched)" "$1") of $1 files here, $(installed "$1") of $1 packages installed"
    done
}

# --no-deps: the locks are complete, and SGLang pins a torch that has no CPU build. pip's own lines, also its warnings,
# go into the log.
install() {  # install FILES ARGUMENTS...
    : >"$log"
    reporter=$(report "$1" >&3 & echo $!)  # in a shell of its own: no job of this one
    shift
    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-deps "$@" >"$log" 2>&1 || {
        grep '^ *ERROR: ' "$log" | tail -3 >&2 || true
        stop "pip could not install '$*'; its output is in $log. The next run goes on with what is there"
    }
    kill "$reporter" || true
    reporter=
}

python=${PYTHON:-}
[ -n "$python" ] || for python in .venv/bin/python python3.11 python3.12 python3; do
    case $(version "$python") in 3.11 | 3.12) break ;; esac
done
found=$(version "$python") || {
    said=$("$python" -c '' 2>&1 | tr -s '\n ' ' ') || true  # a shim of pyenv says which versions it has
    stop "$python does not run; Python 3.11 or 3.12 is needed (set PYTHON=/path/to/it). It says: $said"
}
case $found in
    3.11 | 3.12) ;;
    *) stop "$python is Python $found; 3.11 or 3.12 is needed (set PYTHON=/path/to/it)" ;;
esac
if [ -e .venv ]; then
    there=$(version .venv/bin/python) || there=broken
    [ "$there" = "$found" ] || stop ".venv is of Python $there, not $found; remove it (rm -r .venv) or unset PYTHON"
fi
lock=requirements/cpu.txt
cuda=requirements/cuda-libraries.txt
stamp=.venv/installed-$(sha256sum "$lock" "$cuda" requirements/tasks.txt pyproject.toml setup.py | sha256sum | cut -c1-16)
if [ -e "$stamp" ]; then
    echo "setup: .venv is up to date"
    exit 0
fi

started=$(date +%s)
echo "setup: installing $(packages "$lock") packages for Python $found into .venv: 3.3 GB on disk, 3 to 15 minutes"
[ -e .venv ] || "$python" -m venv .venv || { rm -rf .venv; stop "$python has no venv; install it (Debian, Ubuntu: python$found-venv)"; }
before=$(there)  # pip, and what an earlier lock has
rm -f .venv/installed-*
install 1 "$(grep ^torch== "$lock")"
# This reads the metadata, because a CUDA build of torch cannot be imported before its libraries are installed.
if .venv/bin/python -c 'import sys; from importlib.metadata import requires
sys.exit(not any(need.startswith("nvidia-") for need in requires("torch") or ()))'; then
    echo "setup: pip found a CUDA build of torch. It works without a GPU, with the libraries that it loads: 6 GB in all"
    install "$(packages "$lock" "$cuda")" -r "$lock" -r "$cuda"
else
    install "$(packages "$lock")" -r "$lock"
fi
failed=$(.venv/bin/python -c 'import torch' 2>&1) || stop "torch does not load: ${failed##*$'\n'}"
if command -v "${CC:-cc}" >/dev/null; then
    install "$(packages requirements/tasks.txt)" -r requirements/tasks.txt
else
    echo "setup: no C compiler (${CC:-cc}), so reasoning_gym is left out; only examples/reasoning_gym and its tests need it"
fi
install 1 --no-build-isolation -e .
touch "$stamp"
echo "setup: done after $(($(date +%s) - started)) s"
[ "${1:-}" = --no-hints ] || echo "What to type next:
    . .venv/bin/activate            # then: rlspec --help
    bash examples/quickstart.sh     # RL on a tiny model, 5 to 8 minutes
    bash tests/run.sh               # the fast tests"
