"""Every option has an effect, or is refused: what each needs is declared beside it."""

import importlib
import json
import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from megatron_rlspec import cli
from megatron_rlspec.commands import training
from megatron_rlspec.config import Config, ConfigError, load, load_replay, options
from megatron_rlspec.config.base import Needs
from megatron_rlspec.config.effects import option

DEFAULTS = Config()
DECLARED = [
    (known.name, needs)
    for known in options()
    for needs in option(DEFAULTS, known.name)[1].metadata
    if isinstance(needs, Needs)
]
# Values that other checks want, where "another than the default" is not enough.
OTHERS = {"spec.candidate_steps": "0,3", "drafter.loss": "tv", "tail.rebalance": "kv", "rollout.function": "m:f"}
OTHERS |= {"spec.num_steps": "2", "spec.num_draft_tokens": "4", "tail.tp": "1,2"}
OTHERS |= {"spec.cost_table": "costs.json", "rollout.urls": "http://127.0.0.1:1", "reward.kind": "math"}
OTHERS |= {"train.eval_temperature": "0.5"}
OTHERS |= {"push.transport": "http", "data.eval_path": "e.jsonl", "algorithm.dual_clip": "3", "algorithm.loss": "m:f"}
OTHERS |= {"data.eval_sets": "a=a.jsonl,b=b.jsonl"}


def another(name: str) -> str:
    """Return a value that is not the default, as a command line writes it."""
    value, field = option(DEFAULTS, name)
    if name in OTHERS:
        return OTHERS[name]
    kind = field.annotation
    if get_origin(kind) is Literal:
        return next(str(choice) for choice in get_args(kind) if choice != value)
    if isinstance(value, bool):
        return str(not value).lower()
    return str(value + 1 if isinstance(value, int) else value * 0.9 or 0.1) if not isinstance(value, str) else "other"


def setting(text: str, holds: bool) -> dict[str, str]:
    """Return the option that makes a setting of `Needs` hold, or not hold."""
    name, equals, wanted = text.partition("=")
    name, differs = name.removesuffix("!"), name.endswith("!")
    value = option(DEFAULTS, name)[0]
    if not equals:
        return {} if value is holds else {name: another(name)} if holds != (value is True) else {}
    if differs == holds:
        return {} if ("" if value == () else str(value)) != wanted else {name: another(name)}
    return {name: wanted}


@pytest.mark.parametrize(("name", "needs"), DECLARED, ids=lambda value: str(value)[:50])
def test_an_option_without_effect_is_refused(name, needs, tmp_path):
    missing = {}
    for other, further in DECLARED:  # all other needs hold
        missing |= setting(further.settings[0], True) if other == name and further is not needs else {}
    switched_off = {key: value for text in needs.settings for key, value in setting(text, False).items()}
    missing |= switched_off
    with pytest.raises(ConfigError, match="has no effect while") as told:
        load(None, {name: another(name), **missing})
    assert name in str(told.value) and "\n" not in str(told.value)
    if not switched_off:
        return
    section, _, key = name.partition(".")
    value = another(name)
    text = value if re.fullmatch(r"[\d.e-]+|true|false", value) else json.dumps(value)
    if isinstance(option(DEFAULTS, name)[0], tuple):
        text = f"[{value}]" if re.fullmatch(r"[\d,]+", value) else json.dumps(value.split(","))
    (tmp_path / "c.toml").write_text(f"[{section}]\n{key} = {text}\n")
    load(tmp_path / "c.toml", missing)  # a command line switches off what a file sets up


@pytest.mark.parametrize(("name", "needs"), DECLARED, ids=lambda value: str(value)[:50])
def test_an_option_with_what_it_needs_is_taken(name, needs):
    given: dict[str, str] = {}
    for other, further in DECLARED:
        given |= setting(further.settings[0], True) if other == name else {}
    given |= {"tail.rebalance": "kv"} if name.startswith("tail.") else {}
    loaded = load(None, {**given, name: another(name)})
    assert option(loaded, name)[0] != option(DEFAULTS, name)[0]


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ({"reward.kind": "math"}, "reward.kind"),
        ({"rollout.samples_per_prompt": "4"}, "rollout.samples_per_prompt"),
        ({"train.seed": "9", "drafter.share": "1"}, "train.seed"),
        ({"train.seed": "9"}, ""),  # it draws the samples that the drafter learns from
        ({"train.seed": "9", "drafter.replay": "uniform"}, ""),
        ({"train.seed": "9", "replay.fresh_drafter": "true"}, ""),
        ({"reward.kind": "math", "replay.policy_step": "3"}, ""),
        ({"reward.kind": "exact", "drafter.lr": "1e-3"}, ""),
    ],
)
def test_a_replay_that_follows_recorded_rollouts_refuses_what_draws_them(overrides, refused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEFAULTS.model_dump()))
    given = {"train.run_dir": str(tmp_path / "again"), **overrides}
    if not refused:
        load_replay(str(tmp_path), None, given)
        return
    with pytest.raises(ConfigError, match=f"^{refused} has no effect on a replay"):
        load_replay(str(tmp_path), None, given)


def test_a_run_that_kept_its_best_policy_can_be_replayed(tmp_path):
    own = {"model.path": "m", "data.path": "d.jsonl", "data.eval_path": "e.jsonl", "train.save_best": "true"}
    (tmp_path / "config.json").write_text(json.dumps(load(None, own).model_dump()))
    given = {"train.run_dir": str(tmp_path / "again")}
    load_replay(str(tmp_path), None, given).check_run("replay", 1)
    with pytest.raises(ConfigError, match="train.save_best=true keeps the best policy of `rlspec train`"):
        load_replay(str(tmp_path), None, given | {"train.save_best": "true"}).check_run("replay", 1)


@pytest.mark.parametrize("name", ["train.eval_prompts", "train.eval_samples", "train.eval_temperature"])
def test_a_warm_start_with_evaluations_takes_how_they_sample(name, tmp_path):
    own = {"model.path": "m", "sft.path": "s.jsonl", "train.run_dir": str(tmp_path / "run"), name: another(name)}
    words = [text for key, value in own.items() for text in (f"--{key}", value)]
    training.parse("sft", [*words, "--data.eval_path", "e.jsonl"])
    with pytest.raises(ConfigError, match=f"{name} has no effect on rlspec sft without evaluations"):
        training.parse("sft", [*words, "--data.eval_path", "e.jsonl", "--sft.eval_every", "0"])


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(
            ("train", "sft.steps"),
            ("sft", "algorithm.kl_coef"),
            ("answer", "optimizer.lr"),
            ("train", "replay.policy_step"),
        ),
        *(("sft", "train.steps"), ("sft", "rollout.prompts_per_step"), ("sft", "rollout.top_p"), ("sft", "spec.mode")),
        *(("answer", "train.save_every"), ("answer", "tail.rebalance"), ("answer", "drafter.lr")),
    ],
)
def test_a_command_line_holds_no_option_that_the_command_does_not_read(command, name):
    with pytest.raises(ConfigError, match=f"{name} has no effect on rlspec {command}"):
        training.parse(command, [f"--{name}", another(name)])


@pytest.mark.parametrize("command", ["plan", "convert", "compare", "report", "doctor", "profile"])
def test_every_option_of_a_command_is_read(command):
    """By its name, in the module of the command. What an option needs beside it names options that exist."""
    module = importlib.import_module(f"megatron_rlspec.{cli.COMMANDS[command].run.partition(':')[0]}")
    parser = module.parser()
    text = Path(module.__file__).read_text()
    own = [action.dest for action in parser._actions if not {"--help", "--help-all"} & {*action.option_strings}]
    assert [dest for dest in own if not re.search(rf"\b(args|options)\.{dest}\b|\"{dest}\"", text)] == []
    known = {name for action in parser._actions for name in (*action.option_strings, action.dest)}
    assert {name for _, others, names in parser._rules for name in f"{others} {names}".split()} <= known
