from pathlib import Path

import pytest

from megatron_rlspec.config import Config, ConfigError, load, options


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
    with pytest.raises(ConfigError, match="^spec.candidate_steps: expected") as error:  # not: in the file
        load(path, {"spec.candidate_steps": "[1, 3"})
    assert '(got "[1, 3")' in str(error.value)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"optimizer.lrr": "1"}, "unknown option optimizer.lrr; did you mean optimizer.lr?"),
        ({"optimiser.lr": "1"}, "unknown option optimiser; did you mean optimizer?"),
        ({"optimizer.lr": "fast"}, 'optimizer.lr: expected a valid number (got "fast")'),
        ({"optimizer.lr": "-1"}, "optimizer.lr: expected greater than 0 (got -1.0)"),
        ({"spec.num_steps": "4"}, "num_steps=4 is not among candidate_steps"),
        ({"parallel.sequence": "true"}, "sequence=true needs tensor > 1, but tensor=1"),
        ({"rollout.max_new_tokens": "9999"}, "rollout.max_new_tokens=9999 leaves no room"),
    ],
)
def test_mistakes_are_reported_in_one_line(overrides, message):
    with pytest.raises(ConfigError) as error:
        load(None, overrides)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_every_option_is_documented():
    assert not [option.name for option in options() if not option.help]
    assert Config().optimizer.lr == {option.name: option.default for option in options()}["optimizer.lr"]
