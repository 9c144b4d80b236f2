"""Which extensions a run imports: none by default."""

import os
import sys

import pytest
import short_run
from torch import distributed
from train_ranks import on_ranks

EXTENSIONS = "megatron_rlspec.extensions."
OPTIONS = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__steps": 1, "train__save_every": 0}


def imported(start, run_dir, options):
    """Run `rlspec train` in this process, and return the extensions that it has imported."""
    from megatron_rlspec.commands import training

    os.chdir(short_run.TESTS)  # where the reward's module is
    training.train(short_run.words(start, run_dir, "train", OPTIONS | options)[1:])
    assert not distributed.is_initialized()  # the command has left its job
    return sorted({name.removeprefix(EXTENSIONS) for name in sys.modules if name.startswith(EXTENSIONS)})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, set()),
        pytest.param({"drafter__update_every": 2}, {"drafter_schedules"}, marks=pytest.mark.slow),
        (
            {"spec__tree_budget": "sample", "spec__topk": 2, "spec__num_draft_tokens": 4},
            {"kinds", "migration", "trees"},
        ),
    ],
    ids=["default", "drafter", "trees"],
)
def test_a_run_imports_the_extensions_that_its_options_ask_for(start, tmp_path, options, expected):
    (found,) = on_ranks(1, imported, start, tmp_path / "run", options)
    assert {name.partition(".")[0] for name in found} == expected
