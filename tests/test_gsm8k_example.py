"""The GSM8K example: its script runs to its end with a tiny Qwen2 and 200 rows, and its layouts fit their GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from published import PUBLISHED
from test_getting_started import stand_in

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples/gsm8k"


def start(folder: Path, size: str, *options: str, model: str = "model") -> subprocess.CompletedProcess:
    """Run the script in `folder`. Returns the ended process."""
    environment = {**os.environ, "MODEL": model, "DATA": "data", "RUN": "run"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(EXAMPLE / "gsm8k.sh"), size, *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=840)


def rows(folder: Path) -> None:
    """Write 200 rows to train on and 20 to evaluate on, in GSM8K's format."""
    (folder / "data").mkdir(parents=True)
    make = [sys.executable, str(ROOT / "examples/arithmetic/make_arithmetic.py")]
    for name, count in (("train", 200), ("test", 20)):
        out = folder / "data" / f"{name}-00000-of-00001.jsonl"
        subprocess.run([*make, "--out", str(out), "--rows", str(count)], check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "model"),
    [("8x80", "Qwen2.5-1.5B-Instruct"), ("1x24", "Qwen2.5-0.5B-Instruct")],
)
def test_every_size_fits_its_gpus(tmp_path, size, model):
    rows(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(PUBLISHED[model]))
    ended = start(tmp_path, size, "--dry-run")
    assert ended.returncode == 0 and "its drafter" in ended.stdout, ended.stderr[-2000:]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_script_runs_to_its_end_on_a_cpu(tmp_path):
    stand_in(tmp_path / "made")
    rows(tmp_path)
    ended = start(tmp_path, "cpu", "--train.steps", "2", "--train.eval_prompts", "4", model="made/my-model")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(records) == 2 and records[-1]["drafter/loss_1"] > 0
    assert (tmp_path / "run/hf/config.json").exists() and list((tmp_path / "run").glob("start-mtp-*"))
    assert "[sample] the first of the evaluation: prompt '" in ended.stderr


def test_a_missing_file_is_named(tmp_path):
    (tmp_path / "data").mkdir()
    ended = start(tmp_path, "cpu")
    assert ended.returncode != 0 and "no train*.parquet or train*.jsonl in data" in ended.stderr
    rows(tmp_path / "other")
    assert "SIZE=7x7; expected 8x80, 1x80, 1x24 or cpu" in start(tmp_path / "other", "7x7").stderr
