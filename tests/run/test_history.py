"""benchmarks/history.py: rounds that are followed on a text, and what earlier answers offer along it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

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
    offer = history.Offer(np.zeros(12), np.full(12, 3), right)
    # First turn: token 2 from the prefill; 3 and 4; then 5 and 6, where 9 drafts end with the turn. Then 10 and 11.
    assert history.walk(own, offer, np.ones(12, bool)) == (3, 3, 9, 3)
    nothing = history.Offer(*(np.zeros(12, np.int64) for _ in range(3)))
    assert history.walk(own, nothing, np.zeros(12, bool)) == (6, 0, 0, 0)


def test_an_old_answer_offers_its_tokens_at_the_same_positions(history: ModuleType) -> None:
    text, old = np.array([1, 1, 5, 6, 7, 8, 9, 3]), np.array([1, 1, 5, 6, 2, 8, 9])
    offer = history.same_seed(text, old, prompt=2)
    assert offer.right.tolist() == [0, 0, 2, 1, 0, 0, 1, 0]
    assert offer.offered.tolist() == [0, 0, 5, 4, 3, 0, 1, 0], "right after a difference nothing is offered"
    assert offer.match.tolist() == [0, 0, 8, 8, 8, 0, 1, 0]


def test_the_index_offers_what_followed_most_often_and_no_token_before_its_time(history: ModuleType) -> None:
    index = history.SuffixIndex()
    for text in ([1, 2, 3, 4], [7, 2, 3, 9], [8, 2, 3, 9]):
        index.add(text)
    assert index.follow([1, 2, 3], 0, 0) == (3, 4), "the longest match decides"
    assert index.follow([6, 2, 3], 0, 0) == (2, 9), "then the most frequent token"
    assert index.follow([5], 0, 0) == (0, -1)
    index.set_siblings([[5, 6, 7], [5, 6, 8]])
    assert index.follow([5], 0, 1) == (0, -1), "its sibling has no second token yet"
    assert index.follow([5, 6], 0, 3) == (2, 8) and index.follow([5, 6], 1, 3) == (2, 7)
    index.set_siblings([[], []], [[5, 6, 7], [5, 6, 8]])
    assert index.follow([5, 6], 0, 0) == (2, 8), "an earlier epoch's is known from the start, except under its own seed"


def test_history_replaces_the_drafter_where_its_match_is_long(history: ModuleType) -> None:
    drafter = history.Offer(np.zeros(3, np.int64), np.full(3, 2), np.array([1, 1, 1]))
    old = history.Offer(np.array([4, 5, 8]), np.array([8, 8, 0]), np.array([0, 7, 0]))
    offer, by_drafter = history.mixed(drafter, old, 5)
    assert offer.right.tolist() == [1, 7, 1] and by_drafter.tolist() == [True, False, True]


@pytest.mark.slow
def test_a_recorded_run_is_measured(history: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__record": "true", "train__steps": 2}
    run(make_start(tmp_path / "start"), tmp_path / "run", **options)
    history.main([f"small={tmp_path / 'run'}", "--quick", "--out", str(tmp_path / "found.json")])
    assert "small: 2 recorded steps (an epoch is longer), 4 prompts, 8 answers" in capsys.readouterr().out
    [found] = json.loads((tmp_path / "found.json").read_text())
    survival = {row["age"]: row["share"][0] for row in found["survival"]}
    assert survival["0 steps (control)"] == 1 >= survival["1 step old"] > survival["another seed (control)"]
    tokens = {row["way"]: row["tokens"]["value"] for row in found["ways"]}
    assert tokens["a: mtp"] >= 1 and tokens["c: same seed, 1 step old"] > 1
