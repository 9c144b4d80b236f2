#!/usr/bin/env bash
# Makes the environment of `pytest -m slime` in a folder (.slime-tests unless one is given) and prints the command that
# runs these tests: slime and Megatron-LM at the commits that tests/integrations/README.md names, slime's own patch of
# Megatron, a virtual environment with this package, and the SGLang that slime pins in a folder of its own.
#   RLSPEC_SLIME, RLSPEC_SLIME_MEGATRON   repositories or checkouts to copy the commits from, in place of GitHub's
# Finished parts are not repeated. If a run is interrupted, the next run completes the folder.
set -euo pipefail
slime_commit=624b824a898ab0ec1fcb4d373004c7f3852bf515
megatron_commit=1dcf0dafa884ad52ffb243625717a3471643e087
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$here/.slime-tests}
python=${PYTHON:-python3.11}
fail() { echo "setup: $1" >&2; exit 2; }
command -v "$python" >/dev/null || fail "$python not found; Python 3.11 is needed (set PYTHON=/path/to/it)"
command -v git >/dev/null || fail "git not found"
mkdir -p "$folder" || fail "$folder cannot be made"
folder=$(cd "$folder" && pwd)

# fetch NAME SOURCE COMMIT: check one commit out; the folder appears when the checkout is complete
fetch() {
  local to=$folder/$1 part=$folder/.$1.part error
  [[ -d $to ]] && return
  echo "setup: $1 ${3:0:9} from $2"
  rm -rf "$part"
  git init --quiet "$part"
  error=$(git -C "$part" fetch --quiet --depth 1 "$2" "$3" 2>&1) || fail "no commit ${3:0:9} from $2: ${error%%$'\n'*}"
  git -C "$part" -c advice.detachedHead=false checkout --quiet FETCH_HEAD
  if [[ $1 == Megatron-LM ]]; then
    git -C "$part" apply "$folder/slime/docker/patch/latest/megatron.patch" || fail "slime's patch does not fit $2"
  fi
  mv "$part" "$to"
}

# absolute SOURCE: print a folder's absolute path, or an address unchanged
absolute() { if [[ -d $1 ]]; then (cd "$1" && pwd); else echo "$1"; fi; }

fetch slime "$(absolute "${RLSPEC_SLIME:-https://github.com/THUDM/slime}")" $slime_commit
fetch Megatron-LM "$(absolute "${RLSPEC_SLIME_MEGATRON:-https://github.com/NVIDIA/Megatron-LM}")" $megatron_commit

cd "$here"
locks=(requirements/cpu.txt requirements/slime-tests.txt requirements/sglang-0.5.15.txt pyproject.toml)
stamp=$folder/installed-$(sha256sum "${locks[@]}" | sha256sum | cut -c1-16)
if [[ ! -e $stamp ]]; then
  echo "setup: installing packages into $folder (once, a few minutes)"
  rm -rf "$folder"/installed-* "$folder/sglang-0.5.15"
  [[ -x $folder/venv/bin/python ]] || "$python" -m venv "$folder/venv"
  pip=("$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps)
  "${pip[@]}" -r requirements/slime-tests.txt
  "${pip[@]}" --target "$folder/sglang-0.5.15" -r requirements/sglang-0.5.15.txt
  "${pip[@]}" --no-build-isolation -e .
  "$folder/venv/bin/python" -c 'import sys, torch; sys.exit(bool(torch.version.cuda))' ||
    fail "pip took a CUDA build of torch; point pip at PyTorch's CPU wheels and run again"
  touch "$stamp"
fi

cat <<END
RLSPEC_SLIME=$folder/slime RLSPEC_SLIME_MEGATRON=$folder/Megatron-LM RLSPEC_SGLANG_OLD=$folder/sglang-0.5.15 \\
  $folder/venv/bin/python -m pytest -m slime tests/integrations
END
