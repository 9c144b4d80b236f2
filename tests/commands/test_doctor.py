"""The doctor's decisions: which settings a defect affects, what is refused, and probes that cannot decide."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rlspec import files
from megatron_rlspec.commands import doctor
from megatron_rlspec.commands.doctor import Defect, ProbeResult
from megatron_rlspec.config import Config, load

QUICKSTART = Path(__file__).parents[2] / "examples/quickstart/quickstart.toml"
EMBEDDED = load(None, {"rollout.engine": "embedded", "spec.mode": "fixed"})
ATTACHED = load(None, {"rollout.urls": "http://127.0.0.1:30000"})


def results(state: str) -> list[ProbeResult]:
    return [ProbeResult(d.name, d.package, state, "seen") for d in doctor.DEFECTS]


def hits(state: str, config: Config) -> dict[str, str]:
    return {f.name: f.hits for f in doctor.affected(results(state), config) if f.hits}


def test_only_present_defects_that_are_reached_are_hits():
    both = {"mcore-contract": "every configuration", "sglang-contract": 'rollout.engine="sglang"'}
    assert hits("present", Config()) == both
    assert set(hits("present", EMBEDDED)) == set(hits("present", ATTACHED)) == {"mcore-contract"}
    for state in ("absent", "unknown", "read", "not installed"):
        assert not hits(state, Config())


def test_resume_files_of_our_own_are_not_hit_by_the_shared_step():
    resumed = load(None, {"optimizer.distributed": "true", "train.resume": "true"})
    assert "mcore-shared-step" not in hits("present", resumed)  # tests/train/test_resume.py shows why


def test_only_what_the_run_needs_is_examined(monkeypatch):
    asked = []
    monkeypatch.setattr(doctor, "examine", lambda names: asked.append(names) or [])
    doctor.refuse_if_affected(Config(), engines=True)
    doctor.refuse_if_affected(Config(), engines=False)
    doctor.refuse_if_affected(EMBEDDED, engines=True)
    assert asked == [["mcore-contract", "sglang-contract"], ["mcore-contract"], ["mcore-contract"]]


@pytest.mark.parametrize("command", [pytest.param("train", marks=pytest.mark.slow), "sft"])
def test_training_refuses_an_affected_combination(command, tmp_path, start):
    """A megatron-core that renamed what the drafter calls is refused in one line, before it is imported."""
    core = Path(importlib.util.find_spec("megatron").submodule_search_locations[0], "core")
    shutil.copytree(core, tmp_path / "megatron/core", copy_function=os.symlink)
    layer = tmp_path / "megatron/core/transformer/multi_token_prediction.py"
    renamed = layer.read_text().replace("_proj_and_transformer_layer", "_project_and_run")
    layer.unlink()
    layer.write_text(renamed)
    arguments = {"train": ("--data.path", start / "task/rl.jsonl"), "sft": ("--sft.path", start / "task/train.jsonl")}[
        command
    ]
    short = ("--model.max_length", "256", "--rollout.max_new_tokens", "24")
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_rlspec.cli", command, "--model.path", start / "model", *short, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    for part in ("every configuration is not safe here", "_proj_and_transformer_layer", "install megatron-core 0.16.1"):
        assert part in ended.stderr


def test_what_is_installed_is_not_refused():
    doctor.refuse_if_affected(load(QUICKSTART), engines=True)
    doctor.refuse_if_affected(Config(), engines=True)


def test_probe_outcomes():
    def crash():
        raise RuntimeError("first line\nsecond line")

    assert doctor._probe("x", "p", lambda: "saw it") == ProbeResult("x", "p", "present", "saw it")
    assert doctor._probe("x", "p", lambda: None) == ProbeResult("x", "p", "absent")
    assert doctor._probe("x", "p", crash) == ProbeResult("x", "p", "unknown", "RuntimeError: first line")
    assert doctor._probe("x", "p", None).state == "read"


def test_every_defect_is_distinct_and_explained():
    names = [d.name for d in doctor.DEFECTS]
    assert len(names) == len(set(names))
    for defect in doctor.DEFECTS:
        assert isinstance(defect, Defect) and defect.harm and defect.remedy
        assert defect.package in doctor.MODULES


@pytest.mark.slow
def test_end_to_end_on_what_is_installed(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text("[optimizer]\ndistributed = true\n")
    names = ["mcore-roll-unpadded", "mcore-shared-step", "mcore-contract", "slime-contract"]
    command = [sys.executable, "-m", "megatron_rlspec.commands.doctor", *names, "--config", str(config), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = {f["name"]: f["state"] for f in json.loads(done.stdout)}
    slime = "absent" if importlib.util.find_spec("slime") else "not installed"
    present = {"mcore-roll-unpadded": "present", "mcore-shared-step": "present"}
    assert found == {"mcore-contract": "absent", **present, "slime-contract": slime}
    assert done.returncode == 0, "nothing present is within reach"


def test_unknown_defect_is_refused(capsys):
    with pytest.raises(SystemExit) as error:
        doctor.main(["mcore-nothing"])
    assert error.value.code == 2
    assert "known: mcore-contract" in capsys.readouterr().err


@pytest.mark.parametrize("width", [40, 80, 120])
def test_names_can_be_copied_back_at_any_width(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    seen = [ProbeResult(d.name, d.package, "present", "a long sentence " * 20, "rollout.x") for d in doctor.DEFECTS]
    doctor._show(seen, EMBEDDED, {})
    lines = capsys.readouterr().out.splitlines()
    assert [d.name for d in doctor.DEFECTS] == [line.split()[0] for line in lines if line.endswith("  present")]
    body = lines[: lines.index("", len(lines) - 3)]
    assert max(map(len, body)) <= width
    text = " ".join(" ".join(body).split())
    assert all(d.harm in text and d.remedy in text for d in doctor.DEFECTS)


def test_a_file_that_cannot_be_written_is_reported_before_anything_is_probed(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda *_: pytest.fail("probed"))
    with pytest.raises(files.FileError, match="there is no directory"):
        doctor.main(["--json", str(tmp_path / "no" / "x.json")])
