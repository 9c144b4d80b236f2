"""`tools/offline_bundle.sh` with stand-ins for pip and the wheels: what it packs, and its errors."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tools/offline_bundle.sh"
DUAL_GEMM = """class DualGemm:
    def _select_mode(self):
        if not is_cuda():
            return None

        import cutlass
"""
WHEELS = {
    "sglang-0.5.23-cp312-cp312-linux_x86_64.whl": {
        "sglang/__init__.py": "",
        "sglang/multimodal_gen/large.py": "",
        "sglang/srt/rust_extensions/_server.so": "",
        "sglang/srt/layers/dual_gemm.py": DUAL_GEMM,
        "sglang/kernels/ops/speculative/sampling.py": "import flashinfer",
    },
    "sglang_kernel-0.4.5-cp310-abi3-linux_x86_64.whl": {
        "sgl_kernel/__init__.py": "",
        "sgl_kernel/flash_ops.abi3.so": "",
        "sgl_kernel/sm90/common_ops.abi3.so": "",
        "sgl_kernel/sm100/common_ops.abi3.so": "",
        "sglang_kernel-0.4.5.dist-info/METADATA": "",
    },
    "torch_memory_saver-0.0.10-cp39-abi3-linux_x86_64.whl": {
        "torch_memory_saver_hook_mode_torch.abi3.so": "",
        "torch_memory_saver_hook_mode_torch_cu12.abi3.so": "",
        "torch_memory_saver_hook_mode_torch_cu13.abi3.so": "",
    },
    "megatron_rlspec-0.2.0-py3-none-any.whl": {
        "megatron_rlspec/__init__.py": "",
        "megatron_rlspec-0.2.0.data/data/share/megatron_rlspec/examples/quickstart.sh": "",
        "megatron_rlspec-0.2.0.dist-info/entry_points.txt": "[sglang.srt.plugins]",
    },
}
# A Python whose pip notes what it is asked for and has the wheels at hand; all else is the real one's.
PYTHON = """#!/bin/bash
case "$*" in
    "-m pip "*) echo "$*" >> {folder}/asked
        while [[ $# -gt 0 ]]; do
            case $1 in
                --dest) cp {folder}/wheels/[^m]*.whl "$2" ;;
                --wheel-dir) cp {folder}/wheels/megatron_rlspec*.whl "$2" ;;
            esac
            shift
        done ;;
    *) exec {real} "$@" ;;
esac
"""
ENVIRONMENT = "PYTHONPATH CUDA_HOME SGLANG_CACHE_DIR SGLANG_IS_FLASHINFER_AVAILABLE RLSPEC_ENGINE"


@pytest.fixture
def python(tmp_path):
    (tmp_path / "wheels").mkdir()
    for name, files in WHEELS.items():
        with zipfile.ZipFile(tmp_path / "wheels" / name, "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)
    stand_in = tmp_path / "python"
    stand_in.write_text(PYTHON.format(folder=tmp_path, real=sys.executable))
    stand_in.chmod(0o755)
    return stand_in


def pack(python, *options):
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHON": str(python)}
    return subprocess.run(["bash", str(SCRIPT), *options], env=environment, capture_output=True, text=True)


@pytest.fixture
def bundle(python, tmp_path):
    done = pack(python, "--add", "colorama==0.4.6", str(tmp_path / "bundle.tar.xz"))
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "bundle.tar.xz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    return tmp_path / "unpacked/rlspec-offline"


def test_what_one_gpu_needs_is_packed_and_the_rest_is_not(bundle, tmp_path):
    site = bundle / "site"
    libraries = {str(path.relative_to(site)) for path in site.rglob("*.so")}
    assert libraries == {"sgl_kernel/sm90/common_ops.abi3.so", "torch_memory_saver_hook_mode_torch_cu13.abi3.so"}
    assert not (site / "sglang/multimodal_gen").exists() and not list(site.glob("*.data"))
    assert (site / "megatron_rlspec-0.2.0.dist-info/entry_points.txt").is_file()
    assert (bundle / "share/megatron_rlspec/examples/quickstart.sh").is_file()
    assert (bundle / "benchmarks/gpu_session.py").is_file() and (bundle / "benchmarks/gpu/steady.py").is_file()
    source = (site / "sglang/srt/layers/dual_gemm.py").read_text()
    assert "is_cuda" not in source and source.index("return None") < source.index("import cutlass")
    assert "flashinfer" not in (site / "sglang/kernels/ops/speculative/sampling.py").read_text()
    asked = (tmp_path / "asked").read_text()
    assert "requirements/offline-bundle.txt colorama==0.4.6" in asked and asked.count("--no-deps") == 2


def test_pieces_are_listed_by_what_travels_together(python, tmp_path):
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "drafter.safetensors").write_bytes(bytes(600_000))
    (packed / "policy.gguf.00").write_bytes(bytes(1 << 20))
    (packed / "prompts.jsonl").write_text("{}\n")
    done = pack(python, "--split", "1", "--policy", str(packed), str(tmp_path / "bundle.tar.xz"))
    assert done.returncode == 0, done.stderr
    told = [line.split()[1:3] for line in done.stdout.splitlines() if line.startswith("transfer")]
    names = [(call, Path(path.rstrip(",")).name) for call, path in told]
    assert names == [
        ("1:", "bundle.tar.xz.00"),
        ("1:", "drafter.safetensors"),
        ("2:", "policy.gguf.00"),
        ("3:", "prompts.jsonl"),
    ]
    whole = (tmp_path / "bundle.tar.xz.00").read_bytes()
    told_sum = (tmp_path / "bundle.tar.xz.sha256").read_text().split()[0]
    assert hashlib.sha256(whole).hexdigest() == told_sum and not (tmp_path / "bundle.tar.xz").exists()


@pytest.mark.parametrize("toolkit", [True, False])
def test_the_environment_is_sourced_from_anywhere(bundle, tmp_path, toolkit):
    (tmp_path / "cuda/lib64").mkdir(parents=True)
    (tmp_path / "cuda/bin").mkdir()
    (tmp_path / "cuda/lib64/libcudart.so").touch()
    shutil.copy("/bin/true", tmp_path / "cuda/bin/nvcc")
    path = f"{tmp_path}/cuda/bin:/usr/bin:/bin" if toolkit else "/usr/bin:/bin"
    code = f'set -eu; . "{bundle}/env.sh"; for name in {ENVIRONMENT}; do echo "$name=${{!name-}}"; done'
    environment = {"PATH": path, "PYTHONPATH": "/mine"}
    done = subprocess.run(["bash", "-c", code], env=environment, cwd="/", capture_output=True, text=True, check=True)
    told = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert told["PYTHONPATH"] == f"{bundle}/site:/mine" and told["SGLANG_CACHE_DIR"] == f"{bundle}/cache"
    assert told["SGLANG_IS_FLASHINFER_AVAILABLE"] == "false" and "triton" in told["RLSPEC_ENGINE"]
    if toolkit:
        assert told["CUDA_HOME"] == str(tmp_path / "cuda") and not done.stderr
    else:
        assert told["CUDA_HOME"] or "no CUDA toolkit" in done.stderr


@pytest.mark.parametrize(
    "options, message",
    [
        (["--arch", "70", "bundle.tar.xz"], "--arch 70: expected 90 or 100"),
        (["no/such/bundle.tar.xz"], "no/such: no such directory"),
        (["--split", "0", "bundle.tar.xz"], "--split 0: expected a number of MiB"),
    ],
)
def test_a_mistake_is_one_line(python, options, message):
    done = pack(python, *options)
    assert (done.returncode, done.stderr) == (2, f"offline_bundle: {message}\n")


def test_a_changed_sglang_is_refused(python, tmp_path):
    name = "sglang-0.5.23-cp312-cp312-linux_x86_64.whl"
    with zipfile.ZipFile(tmp_path / "wheels" / name, "w") as wheel:
        for path, text in (WHEELS[name] | {"sglang/srt/layers/dual_gemm.py": "class DualGemm: ..."}).items():
            wheel.writestr(path, text)
    done = pack(python, str(tmp_path / "bundle.tar.xz"))
    assert done.returncode == 2 and "SGLang's dual_gemm.py has changed" in done.stderr
    assert not (tmp_path / "bundle.tar.xz").exists()
