"""Every option that a command line takes is read by a run of the command, and not only by checks of the command line.

tests/config/test_effects.py has the other half: an option that other settings leave without effect is refused.
"""

import json

import forked
import pytest
from short_run import TESTS, words

from megatron_rlspec.config import Config, load, load_replay, options
from megatron_rlspec.config.effects import lacking, option, unread
from megatron_rlspec.config.load import RECORDED

EMBEDDED = {"rollout__engine": "embedded", "rollout__max_new_tokens": 8}
ONE = EMBEDDED | {"rollout__samples_per_prompt": 2, "train__eval_prompts": 1, "train__steps": 1}
ALL_ON = {"rollout__staleness": 1, "algorithm__kl_coef": 0.1, "drafter__replay": "uniform", "train__record_gib": 1}
ALL_ON |= {"drafter__reward_weight": "rank", "algorithm__dynamic_sampling": "true", "rollout__partial": 1}
TALKS = {"rollout__function": "run_reward:one_reply", "spec__mode": "fixed", "spec__num_steps": 2}
SERVED = {"rollout__engine": "sglang"}
WARM = {"sft__steps": 1, "sft__samples_per_step": 2, "sft__drafter_only": "false"}
JUDGED = {"sft__eval_every": 1, "sft__held_out": 2}
# Chat templates; a cost table of several sizes; what is read before the command line was checked; `check_run` refuses.
ELSEWHERE = {"data.system_prompt", "tail.cost_table", "tail.tp", "train.run_dir", "train.resume"}
REFUSED = {"sft": {"train.save_best"}, "replay": {"train.save_best"}}


@pytest.fixture(scope="module")
def runs(start, tmp_path_factory):
    """Return each run's configuration, and the options that it read."""
    folder = tmp_path_factory.mktemp("read")
    warm = WARM | {"sft__path": start / "task/train.jsonl"}
    answers = {"answer__path": folder / "answers.jsonl", "answer__prompts": 1}
    drafted = EMBEDDED | {"answer__path": folder / "drafted.jsonl", "answer__prompts": 1, "spec__mode": "fixed"}
    asked = {
        "recorded": words(start, folder / "recorded", "train", ONE | ALL_ON),
        "talks": words(start, folder / "talks", "train", ONE | TALKS),
        "served": words(start, folder / "served", "train", SERVED | {"push__transport": "group"}),
        "moved": words(start, folder / "moved", "train", SERVED | {"tail__rebalance": "recompute"}),
        "warm": words(start, folder / "warm", "sft", {"sft__eval_every": 0, "sft__held_out": 0} | warm),
        "judged": words(start, folder / "judged", "sft", EMBEDDED | warm | JUDGED),
        "answers": words(start, folder / "answers", "answer", EMBEDDED | answers),
        "drafted": words(start, folder / "drafted", "answer", drafted),
        "sent": words(start, folder / "sent", "answer", answers),
        "followed": ["replay", str(folder / "recorded"), "--train.run_dir", str(folder / "followed")],
        "redrawn": ["replay", str(folder / "recorded"), "--train.run_dir", str(folder / "redrawn")],
    }
    asked["redrawn"] += ["--replay.policy_step", "0"]
    found: dict[str, tuple[Config, set[str]]] = {}
    for name, arguments in asked.items():
        file = folder / f"{name}.json"
        ended = forked.run_module("reading_run", arguments, folder=TESTS, environment={"READ": str(file)})
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-2000:]
        first = 2 if arguments[0] == "replay" else 1
        pairs = zip(arguments[first::2], arguments[first + 1 :: 2], strict=True)
        given = {text.removeprefix("--"): value for text, value in pairs}
        config = load_replay(arguments[1], None, given) if first == 2 else load(None, given)
        found[name] = config, set(json.loads(file.read_text()))
    return found


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("train", ("recorded", "talks", "served", "moved")),
        ("sft", ("warm",)),
        ("sft", ("judged", "warm", "talks", "served", "moved")),  # engines start alike, and generate alike
        ("answer", ("answers", "drafted", "sent")),
        ("replay", ("followed",)),
        ("replay", ("redrawn", "talks", "served", "moved")),
    ],
    ids=["train", "sft", "sft with evaluations", "answer", "replay that follows", "replay that draws"],
)
def test_what_a_command_takes_is_read_by_its_runs(command, names, runs):
    config, _ = runs[names[0]]
    taken = set()
    for known in options():
        field = option(config, known.name)[1]
        effective = any(not list(lacking(runs[name][0], field)) for name in names)
        recorded = command == "replay" and known.name.startswith(RECORDED)  # and refused
        if effective and not recorded and not unread(config, command, known.name):
            taken.add(known.name)
    assert len(taken) > 20
    read = set.union(*(runs[name][1] for name in names))
    assert " ".join(sorted(taken - read - ELSEWHERE - REFUSED.get(command, set()))) == ""
