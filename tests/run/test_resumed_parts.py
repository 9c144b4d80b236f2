"""Parts of a run that goes on from a checkpoint."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from megatron_rlspec import loop
from megatron_rlspec.config import load
from megatron_rlspec.run.drafter_training import Drafting
from megatron_rlspec.run.extension import DrafterSchedule
from megatron_rlspec.run.state_file import Drawn
from megatron_rlspec.speculation.vocabulary import DraftVocabulary
from megatron_rlspec.types import Group, OpenGroup, Prompt, Request, Sample


def group(version):
    prompt = Prompt(0, np.arange(2))
    sample = Sample("s", prompt, np.arange(4), np.ones(4), np.zeros(4), policy_versions=((version, 0, 2),))
    return Group(prompt, [sample])


def test_the_drafter_learns_the_words_of_the_checkpoint_before_the_next_rollout():
    given = []
    trainer = SimpleNamespace(set_draft_vocabulary=lambda words: given.append(words.tolist()))
    drafting = Drafting(trainer, DraftVocabulary(2, 9), DrafterSchedule(), records=True)
    drafting.restore({"words": {"ids": [3, 7], "counts": [1.0, 2.0]}})
    assert given == [[3, 7]]


def test_a_checkpoint_says_how_old_its_tokens_will_be():
    """After 5 steps version 6 trains next; with a rollout that ran ahead, begun groups end at version 7."""
    begun = OpenGroup([Request("r", Prompt(0, np.arange(2)), 1), Request("q", Prompt(0, np.arange(2)), 2)])
    assert Drawn().age(5, partial=True) == 0
    assert Drawn(begun=[begun]).age(5, partial=True) == 0, "none has a token"
    begun.samples = group(5).samples
    assert Drawn(begun=[begun]).age(5, partial=True) == 1
    assert Drawn([group(5)], begun=[begun]).age(5, partial=True) == 2
    assert Drawn([group(5)], begun=[begun]).age(5, partial=False) == 1


@pytest.mark.parametrize(
    ("done", "expected"), [(0, ["first", "step-000002", "last"]), (2, ["step-000002", "last"]), (4, ["last"])]
)
def test_an_evaluation_that_was_due_when_a_run_ended_is_made_by_the_next(monkeypatch, done, expected):
    run = MagicMock(done=done)
    run.__enter__.return_value = run
    run.due = lambda every: run.done % every == 0
    run.records.steps = lambda total: iter(range(done, total))
    run.checkpoint = lambda: setattr(run, "done", run.done + 1)
    monkeypatch.setattr(loop, "Session", lambda *_, **__: run)
    loop.train(load(None, {"train.steps": "4", "train.eval_every": "2"}))
    assert [call.args[0] for call in run.evaluate.call_args_list] == expected
