"""Configurations: a TOML file, and options on the command line."""

import pytest
from harness import Case, check, ids

NAMED = "train --model.path m --data.path d.jsonl "  # what stands before an option that only `check_run` looks at


def option(text: str, *expects: str, command: str = "train") -> Case:
    return Case(f"{command} {text}", f"{command} {text}", expects)


def toml(text: str, *expects: str) -> Case:
    return Case(f"toml {text!r}"[:70], "train --config run.toml", ("run.toml", *expects), {"run.toml": text})


VALUES = [
    option("--optimizer.lr inf", "optimizer.lr", "a finite number"),
    option("--rollout.temperature 1e-300", "rollout.temperature", "0 (greedy)"),
    option("--drafter.loss mse", "drafter.loss", "'ce', 'forward_kl' or module:function", "'mse'"),
    option(
        "--reward.kind math --data.label_key=", "reward.kind=math compares with the label, but data.label_key is empty"
    ),
    option("--reward.workers 2", "reward.workers=2 has no effect while reward.kind=exact"),
    Case("run_dir below a file", NAMED + "--train.run_dir f/x/y", ("train.run_dir=f/x/y", "Not a dir"), {"f": ""}),
    Case("run_dir holds results", NAMED + "--train.run_dir r", ("train.run_dir=r", "holds hf/"), {"r/hf/x": ""}),
]

UNKNOWN = [
    option("--lr 8", "unknown option lr", "did you mean optimizer.lr or drafter.lr?"),
    toml("[rollout]\nn_samples_per_prompt = 8", "here: rollout.samples_per_prompt"),
]

FILES = [
    toml("[train]\nsteps = true", "train.steps: expected a valid integer", "got true"),
    toml("[model", "not valid TOML"),
    Case("toml missing", "train --config no.toml", ("no.toml: No such file", "expected a TOML file")),
]

CONTRADICTIONS = [
    option("--spec.ragged true --spec.drafts argmax", "spec.ragged=true", "spec.drafts=coupled"),
    option("--spec.num_steps 4", "spec.num_steps=4", "candidate_steps=[0, 1, 2, 3, 5]"),
    option("--spec.mode fixed --spec.ragged true", "spec.ragged=true", "mode=fixed"),
    option("--parallel.sequence true", "parallel.sequence=true", "tensor=1"),
    option("--rollout.engine embedded --rollout.engines 2", "engine=embedded", "engines=2"),
    option("--optimizer.decay_steps 5 --optimizer.warmup_steps 9", "optimizer.decay_steps=5", "warmup_steps=9"),
    Case("greedy groups", NAMED + "--rollout.temperature 0", ("rollout.temperature=0", "no advantage")),
    Case("uneven mini-batches", NAMED + "--train.updates_per_rollout 7", ("updates_per_rollout=7 does not divide",)),
    option("--algorithm.tis_clip 0 --rollout.staleness 1", "algorithm.tis_clip=0 leaves out the weights"),
    option(
        "--model.path m --sft.path s.jsonl --drafter.train false",
        "sft.drafter_only=true",
        "drafter.train=false",
        command="sft",
    ),
    option("--model.path m", "data.path is empty", ".jsonl"),
    Case("too few ranks", NAMED + "--parallel.tensor 2", ("parallel.tensor=2", "multiple of 2 ranks")),
    Case("small cache", NAMED + "--rollout.max_total_tokens 4109", ("max_total_tokens=4109", "at least 4110")),
    Case("small micro-batch", NAMED + "--train.tokens_per_micro_batch 8", ("tokens_per_micro_batch=8", "4096")),
    Case("no held-out data", NAMED + "--train.eval_every 8", ("train.eval_every=8", "data.eval_path")),
]

CASES = VALUES + UNKNOWN + FILES + CONTRADICTIONS


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_one_line(case, tmp_path, capfd, monkeypatch):
    check(case, tmp_path, capfd, monkeypatch)
