"""The harness itself: it must fail for a case that breaks one of its rules."""

import os
import signal

import pytest
from harness import Case, check, ids, write_model

from megatron_rlspec.config import ConfigError


def raising(error: Exception):
    def act(here):
        raise error

    return act


def leaving(name: str):
    def act(here):
        (here / name).write_text("x")
        raise ConfigError("wrong")

    return act


def printing(text: str):
    def act(here):
        print(text)
        raise ConfigError("wrong")

    return act


def hanging(here):
    signal.raise_signal(signal.SIGALRM)  # as the timer does


def forgotten(here):
    os.environ["RLSPEC_FORGOTTEN"] = "1"
    raise ConfigError("wrong")


def remove(here):
    (here / "kept").unlink()
    raise ConfigError("wrong")


@pytest.mark.parametrize(
    "case, why",
    [
        (Case("no error", lambda here: None), "exit code 0"),
        (Case("a defect", raising(KeyError("x"))), "Traceback"),
        (Case("another word", raising(ConfigError("wrong")), ("right",)), "right"),
        (Case("another code", raising(ConfigError("wrong")), code=1), "exit code 2"),
        (Case("something written", leaving("new")), "new"),
        (Case("something replaced", leaving("kept"), writes={"kept": "x"}), "kept"),
        (Case("something removed", remove, writes={"kept": "x"}), "kept"),
        (Case("a hang", hanging), "no end after"),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_the_harness_fails_for_a_broken_rule(case, why, tmp_path, capfd, monkeypatch):
    with pytest.raises(AssertionError, match=why):
        check(case, tmp_path, capfd, monkeypatch)


@pytest.mark.parametrize("fork", [False, True])
def test_a_kept_one_passes(fork, tmp_path, capfd, monkeypatch):
    case = Case(
        "typo", "train --optimizer.lrr 1", ("optimizer.lrr", "optimizer.lr?"), lambda p: write_model(p / "m"), fork=fork
    )
    assert check(case, tmp_path, capfd, monkeypatch).startswith("rlspec: unknown option")
    check(Case("state", forgotten, ("wrong",), fork=True), tmp_path, capfd, monkeypatch)
    assert "RLSPEC_FORGOTTEN" not in os.environ


def test_names_are_unique():
    with pytest.raises(ValueError, match="twice"):
        ids([Case("a", "train"), Case("a", "sft")])
