#!/usr/bin/env bash
# Packs what a GPU machine without a network lacks into one archive of about 40 MB (180 with FlashAttention 3): SGLang, its kernel library, megatron-core,
# this package with benchmarks/, and their dependencies (requirements/offline-bundle.txt has the versions and what must be there).
#   bash tools/offline_bundle.sh [--arch 90] [--attention triton] [--add REQUIREMENT]... [--split MIB [--policy DIR]] FILE.tar.xz
#     --arch       GPU architecture of the kernel library: 90 (H100, H200) or 100 (B200)
#     --attention  triton, or fa3: FlashAttention 3, SGLang's default on an H100 or H200
#     --add        one more distribution, as colorama==0.4.6, without its dependencies
#     --split      write FILE.tar.xz.00, .01, ... of at most so many MiB, for a way that takes no larger ones, and say what
#                  travels together; cat FILE.tar.xz.* is the archive
#     --policy     also list what `benchmarks/gpu_session.py --session b` needs: DIR/packed of tools/smollm2_drafter.py
#   PYTHON   an interpreter with pip; any version
# It downloads about 450 MB. docs/install.md says how the archive is used. Left out, because it is large and one GPU does not need it:
#   sglang         image and video models, its tests, its Rust extensions (a Python implementation takes their place)
#   sglang-kernel  FlashAttention 3 (1.1 GB unpacked) without --attention fa3, libraries of other architectures
#   xgrammar       structured output: stubs for the names that SGLang imports. Use --grammar-backend none
#   flashinfer     its filters of probabilities are those of sglang-kernel
#   flash_mla      attention of DeepSeek's models: stubs for the names that every speculating engine imports
#   cutlass        SGLang imports it on every GPU for a fused product that only Blackwell has; on others it no longer does
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
arch=90
attention=triton
added=()
piece=
policy=
fail() { echo "offline_bundle: $1" >&2; exit 2; }
while [[ ${1-} == --* ]]; do
  [[ $# -gt 1 ]] || fail "$1 needs a value"
  case $1 in
    --arch) arch=$2 ;;
    --attention) attention=$2 ;;
    --add) added+=("$2") ;;
    --split) piece=$2 ;;
    --policy) policy=$2 ;;
    *) fail "$1: expected --arch, --attention, --add, --split or --policy" ;;
  esac
  shift 2
done
[[ $# == 1 && $1 == *.tar.xz ]] || fail "expected one archive to write, FILE.tar.xz"
[[ $arch == 90 || $arch == 100 ]] || fail "--arch $arch: expected 90 or 100"
[[ $attention == triton || $attention == fa3 && $arch == 90 ]] || fail "--attention $attention: expected triton, or fa3 for --arch 90"
[[ -z $piece || $piece =~ ^[1-9][0-9]*$ ]] || fail "--split $piece: expected a number of MiB"
[[ -z $policy || -n $piece && -f $policy/prompts.jsonl ]] || fail "--policy $policy: expected --split, and prompts.jsonl in the directory"
[[ -d $(dirname "$1") ]] || fail "$(dirname "$1"): no such directory"
archive=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
for program in "$python" unzip tar xz sha256sum; do
  command -v "$program" >/dev/null || fail "$program not found"
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wheels=$work/wheels
root=$work/rlspec-offline
site=$root/site
mkdir -p "$wheels" "$site"

echo "offline_bundle: downloading"
platforms=(--platform manylinux1_x86_64 --platform manylinux2010_x86_64 --platform manylinux2014_x86_64)
for glibc in {5..39}; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
  --dest "$wheels" -r "$here/requirements/offline-bundle.txt" "${added[@]}" || fail "pip cannot download what is listed above"
mkdir "$work/source"
for name in pyproject.toml setup.py README.md LICENSE megatron_rlspec patches examples; do
  cp -r "$here/$name" "$work/source/"
done
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" "$work/source" || fail "pip cannot build this package"

echo "offline_bundle: unpacking"
for wheel in "$wheels"/*.whl; do
  case $(basename "$wheel") in
    sglang_kernel-*)
      kept=('sgl_kernel/*.py' "sgl_kernel/sm$arch/*" '*.dist-info/*')
      [[ $attention == triton ]] || kept+=('sgl_kernel/flash_ops.*')
      unzip -qo "$wheel" "${kept[@]}" -d "$site" ;;
    sglang-*) unzip -qo "$wheel" -x 'sglang/multimodal_gen/*' 'sglang/test/*' '*.so' -d "$site" ;;
    torch_memory_saver-*) unzip -qo "$wheel" -x '*_cu12.abi3.so' '*_preload.abi3.so' '*_torch.abi3.so' -d "$site" ;;
    *) unzip -qo "$wheel" -d "$site" ;;
  esac
done
[[ -n $(compgen -G "$site/sgl_kernel/sm$arch/common_ops*.so") ]] || fail "sglang-kernel has no library sm$arch/common_ops"
mv "$site"/megatron_rlspec-*.data/data/share "$root/"
rm -rf "$site"/*.data
mkdir "$root/benchmarks" "$root/tools"
(cd "$here/benchmarks" && find . -name '*.py' -exec cp --parents {} "$root/benchmarks" \;)
cp "$here/tools/gguf_to_hf.py" "$root/tools/"  # for a policy of tools/smollm2_drafter.py

mkdir -p "$site/xgrammar" "$site/flashinfer"
cat > "$site/xgrammar/__init__.py" <<'END'
from pydantic import BaseModel


class StructuralTag(BaseModel): ...


get_model_structural_tag = None
END
cat > "$site/xgrammar/structural_tag.py" <<'END'
from pydantic import BaseModel


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (BaseModel,), {})
END
mkdir "$site/flash_mla"
echo 'fused_norm_rope_attn_rope_cast = None' > "$site/flash_mla/__init__.py"
echo 'class FlashMLASchedMeta: ...' > "$site/flash_mla/flash_mla_interface.py"
touch "$site/flashinfer/__init__.py"
cat > "$site/flashinfer/sampling.py" <<'END'
from sgl_kernel import top_k_renorm_prob as top_k_renorm_probs
from sgl_kernel import top_p_renorm_prob as top_p_renorm_probs

__all__ = ["top_k_renorm_probs", "top_p_renorm_probs"]
END
# SGLang compiles this operator with FlashInfer's headers; the kernel library has it compiled.
cat > "$site/sglang/kernels/ops/speculative/sampling.py" <<'END'
from sgl_kernel.speculative import tree_speculative_sampling_target_only

__all__ = ["tree_speculative_sampling_target_only"]
END
[[ $arch == 100 ]] || "$python" - "$site/sglang/srt/layers/dual_gemm.py" <<'END' || fail "SGLang's dual_gemm.py has changed"
import sys
from pathlib import Path

path = Path(sys.argv[1])
text = path.read_text()
before = "        if not is_cuda():\n            return None\n"
if text.count(before) != 1:
    sys.exit(1)
path.write_text(text.replace(before, "        return None  # its kernels need Blackwell, their import needs CUTLASS\n"))
END

cat > "$root/env.sh" <<'END'
# Source this in bash, from any directory, before every command that imports SGLang.
RLSPEC_OFFLINE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export RLSPEC_OFFLINE PYTHONPATH=$RLSPEC_OFFLINE/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# SGLang's just-in-time kernels link with libcudart, which lies beside nvcc unless nvcc is a wrapper script.
if [[ -z ${CUDA_HOME-} ]]; then
  for RLSPEC_CUDA in "$(dirname "$(dirname "$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")")" \
    /usr/local/cuda-13.0 /usr/local/cuda; do
    [[ -e $RLSPEC_CUDA/lib64/libcudart.so ]] && export CUDA_HOME=$RLSPEC_CUDA && break
  done
  unset RLSPEC_CUDA
fi
[[ -n ${CUDA_HOME-} ]] || echo "env.sh: no CUDA toolkit with lib64/libcudart.so found; set CUDA_HOME" >&2
export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1 SGLANG_IS_FLASHINFER_AVAILABLE=false
export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python
export SGLANG_CACHE_DIR=${SGLANG_CACHE_DIR:-$RLSPEC_OFFLINE/cache} HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export SGLANG_JIT_CACHE_DIR=$SGLANG_CACHE_DIR/jit TRITON_CACHE_DIR=$SGLANG_CACHE_DIR/triton
rlspec() { python3 -m megatron_rlspec.cli "$@"; }
# Options of engines for which this archive has the kernels.
export RLSPEC_ENGINE="--attention-backend ATTENTION --grammar-backend none --disable-prefill-cuda-graph --disable-flashinfer-autotune"
END
sed -i "s/ATTENTION/$attention/" "$root/env.sh"
(cd "$wheels" && sha256sum ./*.whl) | sed 's|\./||' > "$root/wheels.sha256"
(cd "$root" && find . -type f ! -name files.sha256 -print0 | sort -z | xargs -0 sha256sum) > "$root/files.sha256"

echo "offline_bundle: packing"
tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner -cf - rlspec-offline | xz -6 -T2 > "$work/archive"
mv "$work/archive" "$archive"
(cd "$(dirname "$archive")" && sha256sum "$(basename "$archive")" > "$(basename "$archive").sha256")
echo "offline_bundle: $archive, $(du -m "$archive" | cut -f1) MB; $(du -sm "$root" | cut -f1) MB unpacked"
[[ -n $piece ]] || exit 0

rm -f "$archive".[0-9]*
split -b "${piece}M" -d "$archive" "$archive."
rm "$archive"
together=1
sum=0
for file in "$archive".[0-9]* ${policy:+"$policy"/*}; do
  size=$(stat -c %s "$file")
  [[ $size -le $((piece << 20)) ]] || fail "$file: $((size >> 20)) MiB, expected at most $piece"
  if [[ $((sum + size)) -gt $((piece << 20)) ]]; then
    together=$((together + 1))
    sum=0
  fi
  sum=$((sum + size))
  echo "transfer $together: $file, $((size >> 20)) MiB"
done
