"""Options from a file and a command line, and names that people type who come from TRL, verl, slime or SkyRL."""

from pathlib import Path

import pytest

from megatron_rlspec.config import ConfigError, load, options
from megatron_rlspec.config.load import unknown_option
from megatron_rlspec.config.other_names import OPTIONS, SENTENCES


def test_file_and_overrides(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[optimizer]\nlr = 1e-5\n[spec]\ncandidate_steps = [0, 3]\n")
    config = load(path, {"optimizer.lr": "2e-5", "spec.num_steps": "0"})
    assert config.optimizer.lr == 2e-5 and config.spec.candidate_steps == (0, 3) and config.spec.num_steps == 0
    for text in ("1,3", "[1, 3]"):
        assert load(path, {"spec.candidate_steps": text}).spec.candidate_steps == (1, 3)
    home = load(path, {"data.path": "~/a.jsonl,~/b~/c.jsonl", "train.run_dir": "~/runs"})
    assert home.data.path == f"{Path.home()}/a.jsonl,{Path.home()}/b~/c.jsonl"
    assert home.train.run_dir == f"{Path.home()}/runs"
    assert load(path, {"rollout.stop": r'["\n", ","]'}).rollout.stop == ("\n", ",")
    assert load(path, {"rollout.stop": "5"}).rollout.stop == ("5",)  # texts, not numbers
    with pytest.raises(ConfigError, match="^spec.candidate_steps: expected") as error:  # not: in the file
        load(path, {"spec.candidate_steps": "[1, 3"})
    assert '(got "[1, 3")' in str(error.value)


def test_a_wrong_value_is_reported_with_its_option_and_what_was_expected():
    with pytest.raises(ConfigError, match=r'^optimizer.lr: expected a valid number \(got "fast"\)$'):
        load(None, {"optimizer.lr": "fast"})
    with pytest.raises(ConfigError, match="rollout.max_new_tokens=9999 leaves no room"):
        load(None, {"rollout.max_new_tokens": "9999"})


def test_an_option_is_refused_where_what_it_needs_is_off(tmp_path):
    with pytest.raises(ConfigError, match="^drafter.depth=2 has no effect while drafter.train=false$"):
        load(None, {"drafter.depth": "2", "drafter.train": "false"})
    (tmp_path / "c.toml").write_text("[drafter]\ndepth = 2\n")
    load(tmp_path / "c.toml", {"drafter.train": "false"})  # a command line switches off what a file sets up


OURS = {option.name for option in options()}
TYPED = {
    "max-steps": "train.steps",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "placement.tensor",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "parallel.tensor",
    "sglang-mem-fraction-static": "rollout.engine_options",
    "spec.topk": "drafts are chains of spec.num_steps tokens; there are no draft trees",
    "spec.cost_table": "engines measure what their rounds cost; tail.cost_table is for tail.tp",
}


def test_every_name_is_answered_once_by_an_option_or_a_sentence():
    names = [name for others in (OPTIONS | SENTENCES).values() for name in others]
    assert len(names) == len(set(names)) and len(names) > 250
    assert not {option for ours in OPTIONS for option in ours.split(", ")} - OURS
    for name in names:
        assert "did you mean" not in unknown_option(name)
        assert name.replace("-", "_") not in OURS


@pytest.mark.parametrize("typed", TYPED)
def test_the_longest_end_of_a_name_decides(typed):
    assert unknown_option(typed).endswith(f"; here: {TYPED[typed]}")
