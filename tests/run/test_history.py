"""benchmarks/history.py: rounds that are followed on a text, and tokens of old answers that are right along it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from short_run import make_start, run

SCRIPT = Path(__file__).parents[2] / "benchmarks/history.py"


@pytest.fixture(scope="module")
def history() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        return importlib.import_module("history")


def test_rounds_end_with_their_turn_and_begin_after_its_first_token(history: ModuleType) -> None:
    """Two turns of 5 and 3 tokens, two tokens of a tool between them, two of a prompt before."""
    own = np.array([0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1], bool)
    right = np.array([9, 9, 9, 1, 9, 9, 9, 9, 9, 9, 9, 9])
    # First turn: token 2 from the prefill; 3 and 4; then 5 and 6, where 9 drafts end with the turn. Then 10 and 11.
    assert history.walk(own, right) == (3, 3)
    assert history.walk(own, np.zeros(12, np.int64)) == (6, 0)


def test_tokens_of_an_old_answer_are_right_at_the_same_positions(history: ModuleType) -> None:
    new = SimpleNamespace(tokens=np.array([1, 1, 5, 6, 7, 8, 9, 3]), prompt_len=2)
    old = SimpleNamespace(tokens=np.array([1, 1, 5, 6, 2, 8, 9]))
    assert history.same_seed(new, old).tolist() == [0, 0, 2, 1, 0, 0, 1, 0], "right after a difference none is drafted"


@pytest.mark.slow
def test_a_recorded_run_is_measured(history: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__record_gib": 1, "train__steps": 2}
    run(make_start(tmp_path / "start"), tmp_path / "run", **options)
    history.main([f"small={tmp_path / 'run'}", "--quick", "--out", str(tmp_path / "found.json")])
    assert "small: 2 recorded steps (an epoch is longer), 4 prompts, 8 answers" in capsys.readouterr().out
    [found] = json.loads((tmp_path / "found.json").read_text())
    survival = {row["age"]: row["share"][0] for row in found["survival"]}
    assert survival["0 steps (control)"] == 1 >= survival["1 step old"] > survival["another seed (control)"]
    tokens = {row["way"]: row["tokens"]["value"] for row in found["ways"]}
    assert tokens["mtp"] >= 1 and tokens["same seed, 1 step old"] > 1
