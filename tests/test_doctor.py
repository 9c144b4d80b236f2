"""The doctor's own arithmetic: whom a defect hits, what is refused, and what becomes of a probe that cannot tell."""

import json
import subprocess
import sys

import pytest

from megatron_rlspec import doctor
from megatron_rlspec.config import Config, ConfigError, load
from megatron_rlspec.doctor import Defect, Finding

EMBEDDED = {"rollout.engine": "embedded", "spec.mode": "fixed"}


def resumed(**overrides: str) -> Config:
    return load(None, {"optimizer.distributed": "true", "train.resume": "true", **overrides})


def findings(state: str) -> list[Finding]:
    return [Finding(d.name, d.package, state, "seen") for d in doctor.DEFECTS if "contract" not in d.name]


def test_only_present_defects_within_reach_hit():
    hits = {f.name: f.hits for f in doctor.affected(findings("present"), resumed()) if f.hits}
    assert hits == {"mcore-shared-step": "optimizer.distributed=true with train.resume=true"}
    assert not any(f.hits for f in doctor.affected(findings("absent"), resumed()))
    assert not any(f.hits for f in doctor.affected(findings("unknown"), resumed()))
    assert not any(f.hits for f in doctor.affected(findings("present"), Config()))


def test_refusal_says_what_why_and_what_to_do(monkeypatch):
    asked = []

    def examine(names):
        asked.extend(names)
        return [Finding(n, "p", "present" if n == "mcore-shared-step" else "absent", "19 share 1") for n in names]

    monkeypatch.setattr(doctor, "examine", examine)
    with pytest.raises(ConfigError) as error:
        doctor.refuse_if_affected(resumed(**EMBEDDED))
    message = str(error.value)
    assert "\n" not in message
    for part in ("optimizer.distributed=true", "bias correction", "19 share 1", "install Transformer Engine"):
        assert part in message
    assert asked == ["mcore-contract", "mcore-shared-step"], "only defects within reach are probed"
    doctor.refuse_if_affected(load(None, EMBEDDED))


def test_broken_contract_names_what_is_gone():
    contract = {
        "json.dumps": ("obj", "indent"),
        "json.loads": ("no_such_parameter",),
        "json.nowhere": (),
        "no_such_module.f": (),
    }
    assert doctor.broken_contract({"json.dumps": contract["json.dumps"]}) is None
    broken = doctor.broken_contract(contract)
    for part in ("json.loads(no_such_parameter)", "json.nowhere", "no_such_module.f"):
        assert part in broken
    assert "json.dumps" not in broken


def test_probe_outcomes():
    def crash():
        raise RuntimeError("first line\nsecond line")

    assert doctor._probe("x", "p", lambda: "saw it") == Finding("x", "p", "present", "saw it")
    assert doctor._probe("x", "p", lambda: None) == Finding("x", "p", "absent")
    assert doctor._probe("x", "p", crash) == Finding("x", "p", "unknown", "RuntimeError: first line")
    assert doctor._probe("x", "p", None).state == "read"


def test_every_defect_is_told_apart_and_explained():
    names = [d.name for d in doctor.DEFECTS]
    assert len(names) == len(set(names))
    for defect in doctor.DEFECTS:
        assert isinstance(defect, Defect) and defect.harm and defect.remedy
        assert defect.package in doctor.MODULES


def test_end_to_end_on_what_is_installed(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text("[optimizer]\ndistributed = true\n[train]\nresume = true\n")
    names = ["mcore-roll-unpadded", "mcore-shared-step", "mcore-contract"]
    command = [sys.executable, "-m", "megatron_rlspec.doctor", *names, "--config", str(config), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = {f["name"]: f for f in json.loads(done.stdout)}
    assert list(found) == ["mcore-contract", "mcore-roll-unpadded", "mcore-shared-step"]
    assert found["mcore-contract"]["state"] == "absent"
    assert found["mcore-roll-unpadded"]["state"] == "present" and not found["mcore-roll-unpadded"]["hits"]
    assert found["mcore-shared-step"]["hits"]
    assert done.returncode == 1


def test_unknown_defect_is_refused(capsys):
    with pytest.raises(SystemExit) as error:
        doctor.main(["mcore-nothing"])
    assert error.value.code == 2
    assert "known: mcore-contract" in capsys.readouterr().err
