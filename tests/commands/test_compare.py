"""Accept lengths compared in pairs: the intervals, and drafters measured on one policy by a real engine."""

import json

import numpy as np
import pytest
import torch

from megatron_rlspec.commands import compare
from megatron_rlspec.config import ConfigError
from megatron_rlspec.models.hf_files import read_hf, write_hf
from megatron_rlspec.speculation.acceptance import accept_length


def tables(gain: float, prompts: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Return rounds of two drafters on prompts of very different difficulty; the first accepts `gain` more a round."""
    draw = np.random.default_rng(0)
    rounds = draw.integers(5, 40, prompts)
    rate = draw.uniform(0.2, 2.8, prompts)  # of the prompt, for every drafter
    found = []
    for extra in (gain, 0.0):
        accepted = draw.poisson(rounds * (rate + extra))
        found.append(np.stack([rounds, accepted], 1))
    return found[0], found[1]


def test_a_paired_difference_sees_what_separate_intervals_hide():
    better, worse = tables(gain=0.1)
    one, other = compare.estimate(better), compare.estimate(worse)
    assert one.low < other.high, "the intervals of the two overlap"
    pair = compare.estimate(better, worse)
    assert pair.low > 0 and pair.shown == "above 0"
    assert pair.value == pytest.approx(one.value - other.value)
    assert pair.high - pair.low < 0.6 * (one.high - one.low)
    assert compare.estimate(worse, better).shown == "below 0"
    assert compare.estimate(better, better) == compare.Estimate(0.0, 0.0, 0.0)


def test_an_accept_length_is_a_ratio_of_sums():
    table = np.array([[10, 5], [1, 3]])  # of 11 rounds, 5 accepted one draft and 1 accepted three
    assert compare.estimate(table).value == accept_length([5, 5, 0, 1])
    seconds = compare.estimate(table / 100)  # benchmarks compare CPU seconds in this way, and these may be below 1
    assert seconds.value == pytest.approx(accept_length([5, 5, 0, 1]))


@pytest.fixture(scope="module")
def drafters(start, tmp_path_factory):
    """Return two model directories that differ in their drafter alone."""
    config, tensors = read_hf(start / "model")
    torch.manual_seed(0)
    other = {name: tensors[name] for name in tensors}
    for name in other:
        if name.endswith("input_proj.weight"):
            other[name] = torch.randn_like(other[name])
    path = tmp_path_factory.mktemp("drafters") / "other"
    write_hf(path, config, other, tokenizer_from=start / "model")
    return {"own": start / "model", "other": path}


def test_drafters_of_one_policy_draw_one_text(start, drafters, tmp_path, capsys):
    out = tmp_path / "table.json"
    rows = (start / "task/eval.jsonl").read_text()
    (tmp_path / "held-out.jsonl").write_text(rows.replace('"prompt":', '"question":'))
    (tmp_path / "run.toml").write_text('[data]\nprompt_key = "question"\n')
    words = [str(start / "model"), *(f"{name}={path}" for name, path in drafters.items())]
    words += ["--prompts", str(tmp_path / "held-out.jsonl"), "--config", str(tmp_path / "run.toml")]
    assert compare.main([*words, "--steps", "1,3", "--max-new-tokens", "16", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["prompts"] == found["equal_texts"] == 8
    assert [(row["steps"], row["drafter"]) for row in found["accept_lengths"]] == [
        (1, "own"),
        (1, "other"),
        (3, "own"),
        (3, "other"),
    ]
    for row in found["differences"]:
        own, other = (
            next(r["value"] for r in found["accept_lengths"] if (r["steps"], r["drafter"]) == (row["steps"], name))
            for name in ("own", "other")
        )
        assert row["value"] == pytest.approx(own - other) and row["low"] <= row["value"] <= row["high"]
    assert "texts equal under all drafters: 8 of 8" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["nameless"], ["a=x", "a=y"]], ids=["no name", "twice"])
def test_a_drafter_without_a_name_is_refused(start, words, capsys):
    with pytest.raises(SystemExit) as ended:
        compare.main([str(start / "model"), *words, "--prompts", "p.jsonl"])
    assert ended.value.code == 2 and "expected NAME=DIR, each name once" in capsys.readouterr().err


def test_answers_of_one_token_are_one_line(start):
    words = [str(start / "model"), f"a={start / 'model'}", "--prompts", str(start / "task/eval.jsonl")]
    with pytest.raises(ConfigError, match="ended with its first token"):
        compare.main([*words, "--max-new-tokens", "1", "--steps", "1"])


def test_a_resample_without_any_round_is_finite():
    some = np.array([[0, 0]] * 300 + [[3, 1]])  # half of the resamples hold no round
    assert np.isfinite([*vars(compare.estimate(some)).values()]).all()
