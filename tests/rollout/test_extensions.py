"""An engine without `--extensions` has none of their routes and commands, and imports none of their files."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import requests
import tiny_mimo

from megatron_rlspec.config import Config, ConfigError, load
from megatron_rlspec.extensions.migration.builders import served
from megatron_rlspec.extensions.migration.sglang import schemas, serving
from megatron_rlspec.rollout.placement import GpuLayout
from megatron_rlspec.rollout.sglang import extensions
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess, launch
from megatron_rlspec.rollout.sglang.http.checks import ServeError, check

CONFIG = tiny_mimo.config(hidden=64, layers=1, heads=4, kv_heads=2, ffn=64, vocab=64)
SERVE = "--device cpu --dtype float32 --max-total-tokens 1024 --max-running-requests 4".split()
# Every process of the engine writes a line for each module that it imports.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPROFILEIMPORTTIME": "1"}
MOVES: dict[str, object] = {"tail.rebalance": "kv"}


def imported(log: Path) -> set[str]:
    """Return the modules of extensions that the engine's processes have imported."""
    names = {line.rpartition("|")[2].strip() for line in log.read_text(errors="replace").splitlines()}
    assert "megatron_rlspec.rollout.sglang.scheduler.controller" in names, "the log has no imports"
    return {name for name in names if name.startswith("megatron_rlspec.extensions")}


def post(process: EngineProcess, path: str, body: object) -> requests.Response:
    headers = {"Authorization": f"Bearer {process.api_key}"}
    return requests.post(f"{process.url}/rlspec/{path}", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize(
    "asked",
    [(), pytest.param(("--extensions", "migration"), marks=pytest.mark.slow)],
    ids=["without", "with migration"],
)
def test_an_engine_has_what_it_was_asked_for(tmp_path: Path, asked: tuple[str, ...]) -> None:
    model = tiny_mimo.write(tmp_path / "mimo", CONFIG, tiny_mimo.weights(CONFIG))
    with launch(model, tmp_path / "log", arguments=[*SERVE, *asked], environment=ENVIRONMENT) as process:
        process.wait()
        request = {"id": "a", "input_ids": [1, 2, 3], "sampling": {"max_new_tokens": 8}}
        assert post(process, "generate", {"requests": [request]}).status_code == 200
        assert post(process, "control/describe", {}).json()["extensions"] == list(asked[1:])
        paths = [f"control/{name}" for name in schemas.COMMANDS] + ["columns/send", "columns/fetch"]
        answers = {path: post(process, path, {}) for path in paths}
        attached = load(None, {"rollout.urls": process.url, **MOVES})
        if asked:
            assert 404 not in [answer.status_code for answer in answers.values()]
            assert {"kv_moves", "columns"} <= {name.rpartition(".")[2] for name in imported(tmp_path / "log")}
            return
        for path, answer in answers.items():
            told = answer.json()["error"]
            assert answer.status_code == 404 and told.startswith(f'no route "/rlspec/{path}"; known are '), told
        assert not imported(tmp_path / "log")
        assert not Path("/dev/shm", f"rlspec-kv-{process.directory.name}").exists()
        with pytest.raises(ConfigError, match="was started without --extensions migration"):
            attach(attached, process, tmp_path)
        other = load(None, {"rollout.urls": process.url, "spec.verifier": "target_only"})
        with pytest.raises(ConfigError, match="spec.verifier=target_only.*started with --verifier position_keyed"):
            attach(other, process, tmp_path)


def attach(config: Config, process: EngineProcess, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RLSPEC_API_KEY", process.api_key)
        served(config, folder, GpuLayout())


def test_engines_of_a_run_that_moves_samples_are_started_with_migration(tmp_path: Path) -> None:
    for options, asked in (({}, False), (MOVES, True)):
        arguments, _ = served(load(None, options), tmp_path, GpuLayout())._command("engine-0", 0)
        assert (arguments[-2:] == ["--extensions", "migration"]) is asked


def test_an_unknown_extension_is_refused_in_one_line() -> None:
    assert extensions.known() == ["migration"] and extensions.loaded(["migration"]) == [serving]
    for name in ("migrations", "../migration", "simulator", "", "migration"):
        options = argparse.Namespace(host="127.0.0.1", port=32104, api_key="", extensions=f"migration,{name}")
        twice = "--extensions migration,migration: migration twice"
        told = twice if name == "migration" else f"--extensions {name}: expected names of migration"
        with pytest.raises(ServeError, match=told):
            check(options)
