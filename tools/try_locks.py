#!/usr/bin/env python3
"""Install the locks of requirements/ into empty environments and try what a first day does there.

    python tools/try_locks.py cpu-3.11 cpu-3.12 --folder DIR

One line a step: the installation, `rlspec doctor`, `rlspec train --dry-run`, and an import of the trainer beside a
Transformer Engine that is installed and does not load. pip's and the commands' output is in DIR/NAME.log. An
environment takes 3 to 12 GB and is removed afterwards, unless --keep is given. Exit status 1 if a step failed.
Interpreters are python3.11 and python3.12, or what PYTHON311 and PYTHON312 name.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The interpreter, and the locks in their order.
TRIALS = {
    "cpu-3.11": ("python3.11", ("cpu.txt", "tasks.txt", "docs.txt")),
    "cpu-3.12": ("python3.12", ("cpu.txt", "tasks.txt", "docs.txt")),
    "gpu": ("python3.12", ("gpu.txt",)),
    "slime-tests": ("python3.11", ("slime-tests.txt",)),
}
MODEL = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": True,
}
BROKEN = 'raise OSError("libtransformer_engine.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal")\n'
IMPORT = "from megatron_rlspec.train import optimizer, runtime; print(runtime.has_transformer_engine())"


class Trial:
    """One environment, and the log of what runs in it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.venv = folder / name
        self.log = folder / f"{name}.log"
        self.log.write_text("")
        self.failed = False

    def step(self, what: str, command: list[str | Path], expected: int = 0, **environment: str) -> str:
        """Run a command and print one line. Returns its output."""
        began = time.monotonic()
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
        done = subprocess.run(
            [str(word) for word in command], cwd=self.log.parent, env=own, text=True, stdout=-1, stderr=-2
        )
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(map(str, command))}\n{done.stdout}\n")
        last = (done.stdout.strip().splitlines() or [""])[-1]
        said = "ok" if done.returncode == expected else f"FAILED (exit {done.returncode})"
        self.failed |= done.returncode != expected
        print(f"{self.name}: {what}: {said}, {time.monotonic() - began:.0f} s: {last[:160]}", flush=True)
        return done.stdout

    def run(self) -> None:
        interpreter, locks = TRIALS[self.name]
        python = self.venv / "bin/python"
        interpreter = os.environ.get(interpreter.replace(".", "").upper(), interpreter)
        self.step("environment", [interpreter, "-m", "venv", "--clear", self.venv])
        if self.failed:
            return
        pip = [python, "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check", "--no-deps"]
        for lock in locks:
            self.step(f"pip install -r {lock}", [*pip, "-r", ROOT / "requirements" / lock])
            if self.failed:
                return
        cuda = self.step("build of torch", [python, "-c", "import importlib.metadata as m; print(m.version('torch'))"])
        if "+cpu" not in cuda and self.name != "gpu":
            self.step("pip install -r cuda-libraries.txt", [*pip, "-r", ROOT / "requirements/cuda-libraries.txt"])
        source = self.venv / "source"
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__"))
        self.step("pip install .", [*pip, "--no-build-isolation", source])
        rlspec = self.venv / "bin/rlspec"
        self.step("rlspec doctor", [rlspec, "doctor"])
        model = self.venv / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        self.step(
            "rlspec train --dry-run", [rlspec, "train", "--dry-run", "--model.path", model, "--data.path", "rows"]
        )
        self._unloadable(python)

    def _unloadable(self, python: Path) -> None:
        """Import the trainer beside a Transformer Engine whose library does not load."""
        broken = self.venv / "broken"
        (broken / "transformer_engine").mkdir(parents=True)
        (broken / "transformer_engine/__init__.py").write_text(BROKEN)
        info = broken / "transformer_engine-2.20.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.20.2\n")
        command = [python, "-W", "ignore", "-c", IMPORT]
        said = self.step("trainer beside an unloadable Transformer Engine", command, PYTHONPATH=str(broken))
        told = [line for line in said.splitlines() if line.startswith("Transformer Engine is installed but does not")]
        if len(told) != 1 or said.split()[-1:] != ["False"]:
            self.failed = True
            print(f"{self.name}: expected one line about Transformer Engine and False", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=TRIALS, metavar="NAME", help=", ".join(TRIALS))
    parser.add_argument("--folder", type=Path, required=True, help="for environments and logs")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in options.names:
        trial = Trial(name, folder)
        trial.run()
        failed |= trial.failed
        if not options.keep:
            shutil.rmtree(trial.venv, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
