"""`tools/setup_cpu.sh`: the lock that it chooses, and its errors. Interpreters are stand-ins."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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


def test_a_cuda_build_of_torch_gets_its_libraries(machine):
    machine.torch("Requires-Dist: filelock\nRequires-Dist: nvidia-cudnn-cu13==9.20.0.48\n")
    assert machine.setup(machine.python("3.12")) == (0, "")
    assert machine.installed() == ["requirements/cpu.txt", "requirements/cuda-libraries.txt"]
    assert "pip found a CUDA build of torch" in machine.printed and machine.stamped() == 1


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
