"""Which engines are started with `--extensions`, and which names it takes (`test_engine_ends.py` has an engine)."""

from __future__ import annotations

import argparse
import asyncio
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rlspec.config import load
from megatron_rlspec.extensions.migration.builders import served
from megatron_rlspec.extensions.migration.sglang import serving
from megatron_rlspec.rollout.placement import GpuLayout
from megatron_rlspec.rollout.sglang import extensions
from megatron_rlspec.rollout.sglang.http.checks import ServeError, check

MOVES: dict[str, object] = {"tail.rebalance": "kv"}


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


def test_an_engine_without_a_folder_of_columns_forgets_what_it_could_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that `rlspec serve` did not start. Its server must not ask for the folder again and again."""
    package = "megatron_rlspec.rollout.sglang.http"  # SGLang's server is not needed here
    monkeypatch.setitem(sys.modules, f"{package}.bodies", SimpleNamespace(run_command=None))
    found = runpy.run_path(str(Path(serving.__file__).with_name("reservations.py")))
    reservations = found["Reservations"]()
    reservations._files = found["Kept"](seconds=0.0)

    async def keep() -> None:
        reservations.of_files(SimpleNamespace(notes=[SimpleNamespace(name="0" * 32)]))
        await asyncio.wait_for(reservations._task, 30)

    asyncio.run(keep())
