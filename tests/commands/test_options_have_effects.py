"""Every option of the commands that are not runs changes what the command prints, writes or hands on, or is refused.

tests/run/test_options_read.py has the commands that are runs, tests/rollout/test_serve_options.py has `rlspec serve`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from unittest import mock

import pytest
from weight_oracles import mimo_checkpoint

from megatron_rlspec import arguments, cli
from megatron_rlspec.commands import compare, simulate
from megatron_rlspec.conversion.convert import convert, plan
from megatron_rlspec.extensions.simulator.hardware import ModelSizes, hardware_table
from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.train import runtime

CLUSTER = """
[cluster]
engines = 2
hardware = "H100"
max_running = 8
[workload]
prompts = 3
samples = 4
median = 40
p95 = 200
cap = 256
[acceptance]
sibling = 0.4
"""
ROW = {"step": 0, "rollout/reward": 0.3, "policy/loss": 0.1}
SAMPLE = {"step": 0, "prompt": "a", "response": "b", "label": "1", "reward": 1.0, "accepted": [0, 2]}
# Of each command: the words before the option, and after them those that set it.
CASES: dict[str, dict[str, tuple[str, str]]] = {
    "simulate": {
        "--policies": ("c.toml --seeds 1 --policies off", "--policies k3"),
        "--seeds": ("c.toml --policies off,k3 --seeds 2", "--seeds 3"),
        "--sweep": ("c.toml --policies off --seeds 1", "--sweep cluster.max_running=4,8"),
        "--json": ("c.toml --policies off --seeds 1", "--json o.json"),
    },
    "plan": {
        "--tp": ("t.json --tp 1", "--tp 2"),
        "--acceptance": ("t.json --tp 1", "--acceptance 0.3"),
        "--steps": ("t.json --tp 1", "--steps 0,1"),
        "--max-batch": ("t.json --tp 1", "--max-batch 8"),
        "--max-length": ("t.json --tp 1", "--max-length 300000"),
        "--length": ("t.json --tp 1 --sglang s.json", "--length 200000"),
        "--why": ("t.json --tp 1", "--why 4,4096"),
        "--cluster": ("--seeds 1", "--cluster c.toml"),
        "--train-seconds": ("--cluster c.toml --seeds 1", "--train-seconds 9"),
        "--wake-seconds": ("--cluster c.toml --seeds 1 --train-seconds 9", "--wake-seconds 50"),
        "--seeds": ("--cluster c.toml", "--seeds 1"),
        "--check": ("t.json", "--check"),
        "--json": ("t.json --tp 1", "--json o.json"),
        "--sglang": ("t.json --tp 1", "--sglang o.json"),
        "--vllm": ("t.json --tp 1", "--vllm o.json"),
    },
    "slime": {
        "--drafter.kind": ("--dry-run --drafter.path hf", "--drafter.kind eagle3"),
        "--drafter.path": ("--dry-run --drafter.kind eagle3", "--drafter.path hf"),
        "--drafter.train": ("--dry-run", "--drafter.train false"),
        "--drafter.depth": ("--dry-run", "--drafter.depth 2"),
        "--drafter.loss": ("--dry-run", "--drafter.loss ce"),
        "--drafter.depth_decay": ("--dry-run", "--drafter.depth_decay 0.5"),
        "--drafter.lr": ("--dry-run", "--drafter.lr 0.01"),
        "--drafter.warmup_steps": ("--dry-run", "--drafter.warmup_steps 7"),
        "--drafter.reward_weight": ("--dry-run", "--drafter.reward_weight rank"),
        "--drafter.update_every": ("--dry-run", "--drafter.update_every 3"),
        "--candidate-steps": ("--dry-run", "--candidate-steps 0,3"),
        "--num-steps": ("--dry-run", "--num-steps 1"),
        "--cost-table": ("--dry-run --candidate-steps 0,1,3", "--cost-table t.json"),
        "--verifier": ("--dry-run", "--verifier position_keyed"),
        "--folder": ("--dry-run", "--folder elsewhere"),
        "--yaml": ("--dry-run", "--yaml"),
        "--dry-run": ("", "--dry-run"),
    },
    "report": {"--out": ("run", "--out page.html")},
    "doctor": {
        "--config": ("", "--config c.json"),
        "--gpu": ("", "--gpu"),
        "--path": ("", "--path checkout"),
        "--json": ("", "--json o.json"),
    },
    "completion": {},
    "convert": {
        "--to": ("hf out", "--to hf"),
        "--dtype": ("hf out", "--dtype float32"),
        "--hf": ("megatron out", "--hf other"),
        "--add-mtp": ("plain out --to megatron", "--add-mtp"),
        "--drop-mtp": ("hf out --to megatron", "--drop-mtp"),
        "--add-eagle3": ("hf out", "--add-eagle3"),
        "--draft-vocabulary": ("hf out --add-eagle3", "--draft-vocabulary 9"),
        "--spec": ("hf out", "--spec local"),
        "--dry-run": ("hf out", "--dry-run"),
        "--check": ("hf out", "--check"),
        "--quiet": ("hf out", "--quiet"),
    },
}
MEASURES = "o.json --engine embedded --model hf --steps 0,1 --batches 1 --lengths 16 --tolerance 10"
COMPARES = "hf a=hf --prompts p.jsonl --steps 1 --max-new-tokens 8"
SLOW: dict[str, dict[str, tuple[str, str]]] = {
    "profile": {
        "--model": ("o.json --engine embedded", "--model hf --seconds 0"),
        "--draft-model": ("o.json --model hf --url http://HERE", "--draft-model none"),
        "--engine": ("o.json --url http://HERE", "--engine embedded"),
        "--url": ("o.json", "--url http://HERE"),
        "--api-key": ("o.json --url http://HERE", "--api-key secret"),
        "--tp": (MEASURES, "--tp 3"),
        "--dtype": (MEASURES, "--dtype float32"),
        "--steps": (MEASURES, "--steps 0,2"),
        "--batches": (MEASURES, "--batches 2"),
        "--lengths": (MEASURES, "--lengths 32"),
        "--seconds": (MEASURES + " --batches 1,2", "--seconds 0"),
        "--validate": (MEASURES + " --batches 1,4", "--validate 1"),
        "--model-name": (MEASURES, "--model-name x"),
        "--hardware": (MEASURES, "--hardware x"),
        "--note": (MEASURES, "--note x"),
        "--fresh": ("t.json --engine embedded --model hf", "--fresh --steps 0 --seconds 0"),
    },
    "compare": {
        "--prompts": (COMPARES, "--prompts q.jsonl"),
        "--config": (COMPARES, "--config labels.toml"),
        "--count": (COMPARES, "--count 2"),
        "--steps": (COMPARES, "--steps 2"),
        "--temperature": (COMPARES, "--temperature 0.5"),
        "--max-new-tokens": (COMPARES, "--max-new-tokens 12"),
        "--max-running-requests": (COMPARES, "--max-running-requests 1"),
        "--max-total-tokens": (COMPARES, "--max-total-tokens 40"),
        "--url": (COMPARES, "--url http://HERE"),
        "--run": (COMPARES, "--run run"),
        "--out": (COMPARES, "--out o.json"),
    },
}
ELSEWHERE = {"--tolerance": "tests/commands/test_sweep.py: it depends on what is measured"}
SECONDS = "plan --train-seconds", "plan --wake-seconds", "plan --seeds", "doctor --gpu"
TIMES = re.compile(r"\d+(\.\d+)?(e-?\d+)? ?(ms|s|%)|\d{4}-\d\d-\d\d|0x[0-9a-f]+")


@pytest.fixture(scope="module")
def files(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write what the commands read: a cluster, cost tables, models, a run and prompts."""
    here = tmp_path_factory.mktemp("files")
    (here / "c.toml").write_text(CLUSTER)
    hardware_table("H100", ModelSizes(7e9, 131_072.0, 32, 4096, 0.1), (1, 2)).save(here / "t.json")
    shutil.copytree(start / "model", here / "hf")
    config, tensors = mimo_checkpoint(num_nextn_predict_layers=0)
    qwen = config | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    del qwen["num_nextn_predict_layers"]
    write_hf(here / "plain", qwen, tensors, tokenizer_from=start / "model")
    shutil.copytree(start / "model", here / "other")
    (here / "other/generation_config.json").write_text("{}")
    convert(plan(here / "hf", here / "megatron"))
    (here / "run").mkdir()
    for name, row in {"metrics": ROW, "events": {"kind": "a", "message": "b"}, "samples": SAMPLE}.items():
        (here / f"run/{name}.jsonl").write_text(json.dumps(row) + "\n")
    (here / "run/config.json").write_text(json.dumps({"train": {"steps": 12}}))
    (here / "c.json").write_text("{}")
    (here / "train.py").write_text("")
    (here / "checkout/slime").mkdir(parents=True)
    (here / "checkout/slime/__init__.py").touch()
    rows = (start / "task/eval.jsonl").read_text().splitlines(keepends=True)
    (here / "p.jsonl").write_text("".join(rows[:4]))
    (here / "q.jsonl").write_text("".join(rows[4:]))
    (here / "labels.toml").write_text('[data]\nprompt_key = "label"\n')  # the answers as prompts
    return here


class Handler(BaseHTTPRequestHandler):
    """No engine: it keeps the key that it was given."""

    def do_POST(self) -> None:
        self.server.keys.add(self.headers.get("Authorization"))
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


def outcome(command: str, words: str, files: Path, here: Path, capfd: pytest.CaptureFixture) -> dict[str, object]:
    """Return what a command line did: exit code, what it printed, wrote, sent and handed on."""
    shutil.copytree(files, here, symlinks=True)
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.keys = set()
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        given = words.replace("HERE", f"127.0.0.1:{server.server_port}").split()
        given += "-- python train.py".split() if command == "slime" else []
        became: list[object] = []

        def handed(*given: object, **named: object) -> EmbeddedEngine:
            became.append(sorted((name, value) for name, value in named.items() if name.startswith("max_")))
            return EmbeddedEngine(*given, **named)

        with (
            mock.patch.object(os, "execvpe", lambda *program: became.append(program[:2])),
            mock.patch.object(compare, "EmbeddedEngine", handed),
        ):
            try:
                os.chdir(here)
                code: object = cli.run(lambda: cli.named(cli.COMMANDS[command].run)(given))
            except SystemExit as ended:
                code = ended.code
            finally:
                os.chdir("..")
                runtime.shut_down()  # --check starts one rank in this process
        server.shutdown()
        port = str(server.server_port)
    out, err = capfd.readouterr()
    assert "Traceback" not in err, err
    after = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    shutil.rmtree(here)
    return {
        "code": code,
        "printed": [TIMES.sub("", text.replace(port, "")) for text in (out, err)],
        "wrote": {
            str(path.relative_to(here)): told(path, data) for path, data in after.items() if before.get(path) != data
        },
        "sent": server.keys,
        "handed on": became,
    }


def told(path: Path, data: bytes) -> object:
    """Return the content of a file without what was timed."""
    if path.suffix != ".json" or b'"provenance"' not in data:
        return TIMES.sub("", data.decode(errors="replace"))
    table = json.loads(data)
    measured = [[row[key] for key in sorted(row) if "ms" not in key] for row in table["rounds"]]
    return measured, {key: value for key, value in table["provenance"].items() if key != "date"}


def options_of(command: str) -> set[str]:
    found = cli.COMMANDS[command]
    parser = cli.named(found.parser or found.run.partition(":")[0] + ":parser")()
    names = {name for action in parser._actions for name in action.option_strings if name.startswith("--")}
    return names - arguments.HELP - ELSEWHERE.keys()


ALL = {name: CASES.get(name, {}) | SLOW.get(name, {}) for name in CASES | SLOW}


@pytest.mark.parametrize("command", ALL)
def test_the_table_has_every_option(command: str) -> None:
    assert options_of(command) == ALL[command].keys()


def cases() -> Iterator[object]:
    for command, options in ALL.items():
        for name, words in options.items():
            marks = [pytest.mark.slow] if command in SLOW or f"{command} {name}" in SECONDS else []
            yield pytest.param(command, *words, marks=marks, id=f"{command} {name}")


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, str], dict[str, object]]:
    """Keep what command lines without the option did."""
    return {}


@pytest.mark.parametrize(("command", "before", "words"), list(cases()))
def test_an_option_changes_what_its_command_does(command, before, words, files, known, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    here = Path("here")
    if (command, before) not in known:
        known[command, before] = outcome(command, before, files, here, capfd)
    without, with_it = known[command, before], outcome(command, f"{before} {words}", files, here, capfd)
    assert with_it != without
    assert with_it["code"] != 2 or with_it["printed"][1].count("\n") == 1  # refused


CHANGES: dict[str, dict[str, object]] = {  # of a file of `rlspec simulate`: other values of its options
    "cluster": {
        **{"engines": 3, "hardware": "A100", "parameters": 2e9, "layers": 64, "hidden": 8192, "drafter": 0.5},
        **{
            "context_bytes": 9e6,
            "tp": 1,
            "sizes": [1, 2],
            "max_running": 3,
            "max_tokens": 600,
            "chunk": 64,
            "link": 0.01,
        },
        **{"pause": 0.01, "switch": 9.0},
    },
    "workload": {
        **{"prompts": 5, "samples": 6, "prompt_tokens": 999, "median": 90.0, "p95": 300.0, "cap": 90, "group": 0.0},
    },
    "acceptance": {
        **{"easy": [0.5, 0.5, 0.5], "hard": [0.1, 0.1, 0.1], "persistence": 0.0, "share": 0.1, "spread": 0.0},
        "sibling": 0.9,
    },
    "training": {
        **{"steps": 3, "colocated": True, "staleness": 1, "score": 99.0, "train": 999.0, "push": 9.0, "wake": 50.0},
        **{"update": 0.9, "again": 0.9, "drift": 0.5, "behind": 2.0, "repair": 0.1},
    },
}
BASE = {
    "cluster": {"engines": 2, "hardware": "H100", "tp": 2, "max_running": 8},
    "workload": {"prompts": 6, "samples": 4, "median": 40.0, "p95": 200.0, "cap": 256},
    "acceptance": {"sibling": 0.4},
    "training": {"steps": 2, "train": 9e4},
}
TAIL = {  # of long responses, for which the tensor-parallel size changes
    "cluster": {"engines": 4, "hardware": "H100", "max_running": 4},
    "workload": {"prompts": 4, "samples": 4, "median": 100.0, "p95": 2000.0, "cap": 4096},
    "training": {},
}
OF_TAIL = ("sizes", "switch")
ALL_KINDS = ("k3", "k2t2n4", "adaptive+tp", "adaptive+auto", "adaptive+kd", "adaptive+kd+overlap")


@pytest.mark.slow
@pytest.mark.parametrize("section", CHANGES)
def test_an_option_of_a_simulated_cluster_changes_its_result(section: str) -> None:
    """Some options need a policy that moves samples, changes sizes or trains the drafter: policies of all kinds run."""

    def result(key: str, value: object) -> object:
        """Simulate with `key = value`; "": with the base's own."""
        tree = {name: dict(values) for name, values in (TAIL if key in OF_TAIL else BASE).items()}
        tree["training"] |= {"colocated": True} if key == "wake" else {}
        tree[section] |= {key: value} if value is not None else {}
        config = simulate.validated(tree, "test")
        apart = key not in ("wake", "colocated", "staleness")  # overlapped updates need GPUs that wait
        names = ("off+tp",) if key in OF_TAIL else [name for name in ALL_KINDS if apart or "overlap" not in name]
        policies = {name: simulate.policy(name, config) for name in names}
        found = simulate.compare(config, policies, 1)
        return {name: str(runs) for name, runs in found.items()}

    fields = type(getattr(simulate.validated(BASE, "test"), section)).model_fields
    assert fields.keys() - {"table"} == CHANGES[section].keys()
    without = {"": result("", None)}
    without |= {name: result(name, None) for name in CHANGES[section] if name in ("wake", *OF_TAIL)}
    silent = []
    for key, value in CHANGES[section].items():
        before = without.get(key, without[""])
        if all(before[name] == seconds for name, seconds in result(key, value).items()):
            silent.append(key)
    assert silent == []
