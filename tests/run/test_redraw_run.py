"""Runs with `rollout.redraw`: what they train is what the newest policy generates."""

import pytest
import torch
from short_run import make_start, run

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.records.recorder import read_records

# Without tis_clip the engine's log-probs, whose rounding follows the batch, do not reach the policy.
OPTIONS = {"rollout__engine": "embedded", "spec__mode": "fixed", "algorithm__tis_clip": 0, "optimizer__lr": 1e-2}
ENGINES = ("embedded", "sglang")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return make_start(tmp_path_factory.mktemp("start"))


def policy(run_dir) -> dict[str, torch.Tensor]:
    return dict(read_hf(run_dir / "hf")[1].items())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_one_step_ahead_with_redraw_trains_the_bits_of_a_run_that_waits(start, tmp_path, engine):
    waiting, ahead, redrawn = (tmp_path / name for name in ("waiting", "ahead", "redrawn"))
    options = OPTIONS | {"rollout__engine": engine, "train__steps": 3}
    run(start, waiting, **options)
    run(start, ahead, **(options | {"algorithm__tis_clip": 2.0}), rollout__staleness=1)
    run(start, redrawn, **options, rollout__staleness=1, rollout__redraw="true")
    expected = policy(waiting)
    differ = [name for name, tensor in policy(redrawn).items() if not torch.equal(tensor, expected[name])]
    assert differ == []
    assert read_records(ahead / "metrics.jsonl")[-1]["policy/staleness"] == 1, "nothing was stale"
    records = read_records(redrawn / "metrics.jsonl")
    for record, plain in zip(records, read_records(waiting / "metrics.jsonl"), strict=True):
        assert record["rollout/reward"] == plain["rollout/reward"]
        assert record.get("policy/staleness", 0) == 0
    redrawn_tokens, kept = (sum(r[f"rollout/{name}_tokens"] for r in records[1:]) for name in ("redrawn", "kept"))
    assert 0 < kept < redrawn_tokens


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_samples_that_go_on_are_the_newest_policys(start, tmp_path, engine):
    options = OPTIONS | {"rollout__engine": engine, "train__steps": 3}
    run(start, tmp_path / "run", **options, rollout__partial=1, rollout__redraw="true")
    records = read_records(tmp_path / "run/metrics.jsonl")
    assert [record.get("policy/staleness", 0) for record in records] == [0] * 3
    assert sum(record["rollout/kept_tokens"] for record in records) > 0
    assert all(record["rollout/continued_tokens"] == 0 for record in records)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"spec.verifier": "rejection"}, "expected spec.verifier=position_keyed"),
        ({"rollout.partial": "1", "rollout.mask_offpolicy": "true"}, "leaves no tokens of older policies"),
        ({"algorithm.dynamic_sampling": "true"}, "has chosen groups by them"),
        ({"rollout.function": "tool:use"}, "redraw=true checks one reply"),
    ],
)
def test_what_cannot_be_redrawn_is_refused_in_one_line(options, line):
    ahead = {"rollout.engine": "embedded", "rollout.staleness": "1", "rollout.redraw": "true"}
    assert load(None, ahead).rollout.redraw
    with pytest.raises(ConfigError, match=line):
        load(None, ahead | options)
