"""Every call that training makes binds against megatron-core 0.16.1 to 0.19.2, the version slime pins, and main."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import contracts
import megatron_calls
import pytest
from megatron_calls import Call, binds, calls, parse, recorded_names, show
from moe_oracles import GLM4_MOE

from megatron_rlspec.config import Config
from megatron_rlspec.train import experts, runtime

RECORD = json.loads(megatron_calls.RECORD.read_text())


def signatures(version):
    return {name: parse(text) if text else text for name, text in RECORD[version]["signatures"].items()}


def test_the_record_covers_the_named_versions():
    assert {version: entry["source"] for version, entry in RECORD.items()} == megatron_calls.VERSIONS


@pytest.mark.parametrize("version", RECORD)
def test_every_called_name_is_recorded(version):
    """If it fails, run python tests/train/megatron_calls.py MEGATRON_CHECKOUT"""
    assert sorted(RECORD[version]["signatures"]) == recorded_names()


@pytest.mark.parametrize("version", RECORD)
def test_every_call_binds(version):
    known = signatures(version)
    missing = {call.where: call.dotted for call in calls() if known[call.dotted] is None}
    assert not missing
    wrong = [binds(call, known[call.dotted]) for call in calls() if known[call.dotted]]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("folder", list(filter(None, os.environ.get("RLSPEC_MEGATRON", "").split(os.pathsep))))
def test_training_runs_on_another_version(folder):
    """Test policy, drafter and isolation on each checkout of Megatron-LM in RLSPEC_MEGATRON, separated by colons.

    Experts run on slime's pin. On main they do not run yet: its dispatcher needs more process groups.
    """
    here = Path(__file__).parent
    files = [str(here / f"test_{name}.py") for name in ("model_parity", "isolation")]
    if not Path(folder, "megatron/core/models/hybrid").exists():
        files.append(str(here / "test_experts.py"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([folder, str(here.parent.parent)])}
    where = "import megatron.core as m; print(m.__file__)"
    found = subprocess.run([sys.executable, "-c", where], env=environment, capture_output=True, text=True)
    assert Path(found.stdout.splitlines()[-1]).is_relative_to(folder), "another megatron-core comes first"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", *files]
    done = subprocess.run(command, env=environment, cwd=here.parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("version", RECORD)
def test_every_option_of_a_configuration_is_known(version):
    moe = experts.options(GLM4_MOE | {"n_group": 2}, Config())
    fields = signatures(version)["megatron.core.transformer.transformer_config.TransformerConfig"].parameters
    assert moe and not (set(moe) | set(runtime.device_options())) - set(fields)


def test_installed_signatures_equal_the_record():
    version = importlib.metadata.version("megatron-core")
    if version in RECORD:
        known = {name: text for name, text in RECORD[version]["signatures"].items() if text is not None}
        read = contracts.installed()
        found = {name: contracts.signature(name, read) for name in known}
        assert {name: show(f) if f else "" for name, f in found.items()} == known


CANNOT = [
    (Call("m.f", 2, (), False, "x.py:1"), "too many positional"),
    (Call("m.f", 1, ("gone",), False, "x.py:1"), "unexpected keyword argument 'gone'"),
    (Call("m.f", 0, ("b",), False, "x.py:1"), "missing a required argument: 'a'"),
    (Call("m.f", 0, ("gone",), True, "x.py:1"), "unexpected keyword argument 'gone'"),
]


@pytest.mark.parametrize(("call", "part"), CANNOT)
def test_a_call_that_does_not_bind_is_detected(call, part):
    assert part in binds(call, parse("(a, *, b=...)"))
    assert binds(call._replace(positional=1, keywords=("b",)), parse("(a, *, b=...)")) is None


def test_calls_are_found_in_our_sources():
    seen = {(call.dotted.rpartition(".")[2], call.where.partition(":")[0]) for call in calls()}
    for one in [
        ("TransformerConfig", "model.py"),  # through our subclass
        ("GPTModel", "model.py"),  # through super().__init__
        ("MultiTokenPredictionBlock", "drafter.py"),
        ("initialize_model_parallel", "runtime.py"),
        ("_get_megatron_optimizer_based_on_param_groups", "optimizer.py"),
    ]:
        assert one in seen


@pytest.mark.parametrize("version", RECORD)
def test_the_contract_is_kept(version):
    for name, wanted in contracts.MEGATRON.items():
        found = signatures(version)[name]
        assert found is not None and set(wanted) <= set(found.parameters if found else ()), name
