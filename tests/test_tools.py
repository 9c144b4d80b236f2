"""`tools/offline_bundle.sh` and `tools/setup_cpu.sh`, with stand-ins for interpreters, pip and wheels."""

import re
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


FILES = ("tools/setup_cpu.sh", "pyproject.toml", "setup.py")
# A Python of the version asked for: pip notes what it is asked to install, -m venv copies this file.
INTERPRETER = """#!/bin/bash
case "$*" in
    *version_info*) echo {version} ;;
    "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    "-m pip install"*) echo "$*" >> {log} ;;
    *) PYTHONPATH={packages} exec {real} "$@" ;;
esac
"""


class Machine:
    def __init__(self, folder):
        self.root = folder / "checkout"
        shutil.copytree(ROOT / "requirements", self.root / "requirements")
        for name in FILES:
            (self.root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        self.packages = folder / "packages"
        self.log = folder / "pip"
        self.folder = folder
        self.log.touch()

    def torch(self, requires="", content=""):
        (self.packages / "torch-2.13.0.dist-info").mkdir(parents=True)
        metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n" + requires
        (self.packages / "torch-2.13.0.dist-info/METADATA").write_text(metadata)
        (self.packages / "torch.py").write_text(content)

    def python(self, version):
        path = self.folder / f"python{version}"
        named = {"version": version, "log": self.log, "packages": self.packages, "real": sys.executable}
        path.write_text(INTERPRETER.format(**named))
        path.chmod(0o755)
        return path

    def setup(self, python=""):
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), "CC": "no-compiler"}
        command = ["bash", str(self.root / "tools/setup_cpu.sh")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=self.folder)
        self.printed = done.stdout
        return done.returncode, done.stderr

    def installed(self):
        return re.findall(r"requirements/\S+", self.log.read_text())

    def stamped(self):
        return len(list(self.root.glob(".venv/installed-*")))


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_cpu_build_of_torch_needs_the_lock_only_and_a_changed_lock_is_installed_again(machine):
    machine.torch()
    assert machine.setup(machine.python("3.11")) == (0, "")
    for _ in range(2):
        assert machine.installed() == ["requirements/cpu.txt"] and machine.stamped() == 1
        assert machine.setup() == (0, "")  # .venv keeps its Python, and is up to date
    with open(machine.root / "requirements/cuda-libraries.txt", "a") as file:
        file.write("# changed\n")
    assert machine.setup() == (0, "")
    assert len(machine.installed()) == 2 and machine.stamped() == 1  # the lock twice


def test_an_impossible_setup_is_reported_in_one_line(machine):
    def line(python):
        code, text = machine.setup(python)
        assert code == 2 and len(text.splitlines()) == 1 and not machine.stamped(), text
        return text

    assert "no-such-python does not run; Python 3.11 or 3.12 is needed" in line("no-such-python")
    shim = machine.folder / "python3.12-shim"
    shim.write_text('#!/bin/bash\necho "pyenv: python3.12: command not found\n\nIt exists in: 3.12.1" >&2\nexit 127\n')
    shim.chmod(0o755)
    assert "It says: pyenv: python3.12: command not found It exists in: 3.12.1" in line(shim)
    assert "is Python 3.13; 3.11 or 3.12 is needed" in line(machine.python("3.13"))
    assert not machine.log.read_text()
    machine.torch("Requires-Dist: nvidia-cudnn-cu13==9.20.0.48\n", "raise ImportError('libcudnn.so.9: cannot open')")
    assert "torch does not load: ImportError: libcudnn.so.9: cannot open" in line(machine.python("3.11"))
    assert ".venv is of Python 3.11, not 3.12; remove it" in line(machine.python("3.12"))
