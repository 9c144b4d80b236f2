"""Options without effect are refused: what each needs is declared beside it, and each command reads its own."""

import json

import pytest

from megatron_rlspec.commands import training
from megatron_rlspec.config import Config, ConfigError, load, load_replay

CHANGED = {"reward.kind": "math", "rollout.samples_per_prompt": "4", "sft.steps": "7", "algorithm.kl_coef": "0.5"}
CHANGED |= {"optimizer.lr": "1e-5", "train.steps": "7", "drafter.lr": "1e-5", "train.eval_samples": "2"}


def test_an_option_is_refused_where_what_it_needs_is_off(tmp_path):
    with pytest.raises(ConfigError, match="^drafter.depth=2 has no effect while drafter.train=false$"):
        load(None, {"drafter.depth": "2", "drafter.train": "false"})
    (tmp_path / "c.toml").write_text("[drafter]\ndepth = 2\n")
    load(tmp_path / "c.toml", {"drafter.train": "false"})  # a command line switches off what a file sets up


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("train", "sft.steps"),
        ("sft", "algorithm.kl_coef"),
        ("sft", "train.steps"),
        ("answer", "optimizer.lr"),
        ("answer", "drafter.lr"),
    ],
)
def test_a_command_line_holds_no_option_that_the_command_does_not_read(command, name):
    with pytest.raises(ConfigError, match=f"{name} has no effect on rlspec {command}"):
        training.parse(command, [f"--{name}", CHANGED[name]])


def test_a_warm_start_with_evaluations_takes_how_they_sample(tmp_path):
    own = {"model.path": "m", "sft.path": "s.jsonl", "train.run_dir": str(tmp_path / "run"), "train.eval_samples": "2"}
    words = [text for key, value in own.items() for text in (f"--{key}", value)]
    training.parse("sft", [*words, "--data.eval_path", "e.jsonl"])
    with pytest.raises(ConfigError, match="train.eval_samples has no effect on rlspec sft without evaluations"):
        training.parse("sft", [*words, "--data.eval_path", "e.jsonl", "--sft.eval_every", "0"])


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ({"reward.kind": "math"}, "reward.kind"),
        ({"reward.kind": "math", "replay.policy_step": "3"}, ""),
        ({"train.seed": "9"}, ""),  # it draws the samples that the drafter learns from
        ({"train.seed": "9", "drafter.share": "1"}, "train.seed"),
    ],
)
def test_a_replay_that_follows_recorded_rollouts_refuses_what_draws_them(overrides, refused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(Config().model_dump()))
    given = {"train.run_dir": str(tmp_path / "again"), **overrides}
    if not refused:
        load_replay(str(tmp_path), None, given)
        return
    with pytest.raises(ConfigError, match=f"^{refused} has no effect on a replay"):
        load_replay(str(tmp_path), None, given)
