"""`rlspec simulate`: its table, equal results for equal seeds, and mistakes in one line."""

import json
from pathlib import Path

import pytest

from megatron_rlspec import cli
from megatron_rlspec.commands import simulate
from megatron_rlspec.config.base import ConfigError

CLUSTER = """
[cluster]
engines = 3
hardware = "H100"
max_running = 16
[workload]
prompts = 6
samples = 4
median = 40
p95 = 200
cap = 256
"""


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def test_policies_are_compared_on_equal_lengths(cluster, tmp_path, capsys):
    out = tmp_path / "out.json"
    names = ["off", "k3", "adaptive", "adaptive+in_flight", "adaptive+auto"]
    command = [str(cluster), "--seeds", "2", "--json", str(out)]
    assert simulate.main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("simulated: 3 engines of tp=1, 6 x 4 samples") and "1.00 [1.00, 1.00]" in printed
    assert printed.splitlines()[2].split() == ["seconds", "tokens/s", "times", "off", "busy", "moves"]
    found = json.loads(out.read_text())
    assert found["simulated"] is True and list(found["sweep"][""]) == names
    tokens = [[run["traces"][0]["tokens"] for run in runs] for runs in found["sweep"][""].values()]
    assert all(row == tokens[0] for row in tokens) and tokens[0][0] != tokens[0][1]
    medians = {name: sorted(run["seconds"] for run in runs)[0] for name, runs in found["sweep"][""].items()}
    assert medians["k3"] < medians["off"] and medians["adaptive"] < medians["off"]
    first = out.read_text()
    assert simulate.main(command) == 0
    assert out.read_text() == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("H100", "H101"), "cluster.hardware: expected '', 'A40'"),
        (("engines = 3", "engine = 3"), "cluster.engine: Extra inputs are not permitted"),
        (("median = 40", "median = 400"), "workload: p95=200: expected more than median=400"),
        (('hardware = "H100"', ""), "cluster: expected either table or hardware"),
        (("[workload]", "[workload"), "not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(cluster, capsys, change, message):
    cluster.write_text(CLUSTER.replace(*change))
    assert cli.run(lambda: simulate.main([str(cluster)])) == 2
    err = capsys.readouterr().err
    assert message in err and str(cluster) in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["k", "fast", "off+kv+auto", "adaptive+teleport", ""])
def test_an_unknown_policy_is_refused(cluster, name):
    with pytest.raises(ConfigError, match="expected off, k3, a tree"):
        simulate.policy(name, simulate.read(cluster))


def test_steps_are_compared_and_swept(cluster, capsys):
    cluster.write_text(CLUSTER + "[training]\nsteps = 2\n")
    command = [str(cluster), "--seeds", "1", "--policies", "off,adaptive+kd+overlap"]
    assert simulate.main([*command, "--sweep", "cluster.engines=1,3"]) == 0
    printed = capsys.readouterr().out
    assert "a step, mean of 2" in printed and "cluster.engines=1 " in printed and "cluster.engines=3 " in printed
    assert "of a rollout's cost lookups lie outside the table's computed points" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policies", "off+kd"], "expected a [training] section"),
        (["--sweep", "engines=3"], "expected SECTION.OPTION=VALUE"),
        (["--sweep", "cluster.engines=0"], "cluster.engines: expected greater than 0 (got 0)"),
        (["--sweep", "cluster.motors=3"], "cluster.motors: Extra inputs"),
        (["--sweep", "training.steps=3"], "no [training] section"),
        (["--policies", "off,k2t2n4"], "k2t2n4: acceptance.sibling is missing, which chains do not record"),
        (["--policies", "k2t2n40"], "k2t2n40: num_draft_tokens=40, but"),
        (["--policies", "k3+sample"], "+sample is for trees"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(cluster, capsys, options, message):
    assert cli.run(lambda: simulate.main([str(cluster), *options])) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(("name", "engines"), [("h100", 8), ("ablation", 4)])
def test_the_examples_are_valid(name, engines):
    path = Path(__file__).parents[2] / "examples" / "simulate" / f"{name}.toml"
    assert simulate.read(path).cluster.engines == engines
