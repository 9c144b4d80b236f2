"""Configurations: a TOML file, and options on the command line."""

import os

import pytest
from harness import Case, check, ids

NAMED = "train --model.path m --data.path d.jsonl "  # what stands before an option that only `check_run` looks at


def option(text: str, *expects: str, command: str = "train") -> Case:
    return Case(f"{command} {text}", f"{command} {text}", expects)


def toml(text: str | bytes, *expects: str, name: str = "") -> Case:
    return Case(name or f"toml {text!r}"[:70], "train --config run.toml", ("run.toml", *expects), {"run.toml": text})


NUMBERS = [
    option(f"--{name} {value}", name, expected)
    for name, value, expected in (
        ("optimizer.lr", "inf", "a finite number"),
        ("algorithm.dual_clip", "1", "must be above 1"),
        ("rollout.temperature", "1e-300", "0 (greedy)"),
        ("rollout.top_k", "0", "leaves no token"),
        ("rollout.prompts_per_step", "200000", "at most 1048576 samples a step"),
        ("rollout.staleness", "0.5", "a valid integer"),
        ("train.seed", "9" * 5000, "a valid integer"),
        ("spec.candidate_steps", "3,3", "different numbers"),
    )
]

CHOICES = [
    option("--drafter.loss mse", "drafter.loss", "'ce', 'forward_kl', 'reverse_kl' or 'tv'", "'mse'"),
    option("--data.shuffle perhaps", "data.shuffle", "true or false", '"perhaps"'),
]

REWARDS = [
    option("--reward.kind ftp://x", "reward.kind=ftp://x", "http://"),
    option("--reward.kind http://", "reward.kind=http://", "no host name"),
    option("--reward.kind http://a:99999", "reward.kind=http://a:99999", "Port out of range"),
    option("--train.eval_samples 4 --train.eval_temperature 0", "train.eval_samples=4: at temperature 0 all responses"),
    option("--train.eval_temperature -0.5", "train.eval_temperature: expected 0 or more, or -1"),
    option(
        "--reward.kind math --data.label_key=", "reward.kind=math compares with the label, but data.label_key is empty"
    ),
    option("--reward.workers 2", "reward.workers=2 has no effect while reward.kind=exact"),
    option("--reward.kind exactly", "reward.kind=exactly", "module:function"),
]

PATHS = [
    Case("run_dir below a file", NAMED + "--train.run_dir f/x/y", ("train.run_dir=f/x/y", "Not a dir"), {"f": ""}),
    Case(
        "run_dir is a loop", NAMED + "--train.run_dir loop", ("loop",), lambda here: os.symlink("loop", here / "loop")
    ),
    Case("run_dir holds results", NAMED + "--train.run_dir r", ("train.run_dir=r", "holds hf/"), {"r/hf/x": ""}),
    Case("a surrogate", ["train", "--model.path", "m\udc80"], ("model.path", "unicode")),
    Case("a long path", ["train", "--model.path", "m" * 5000], ("model.path", "at most 4096 characters")),
    option("--rollout.urls localhost:30000", "rollout.urls=localhost:30000", "http://HOST:PORT"),
    option("--rollout.urls http://a:1,http://a:1", "rollout.urls=http://a:1,http://a:1", "each once"),
    option("--rollout.urls http://a:1,,ftp://b:1", "rollout.urls=ftp://b:1", "http://HOST:PORT"),
]

UNKNOWN = [
    option("--lr 8", "unknown option lr", "did you mean optimizer.lr or drafter.lr?"),
    toml("[rollout]\nn_samples_per_prompt = 8", "here: rollout.samples_per_prompt"),
    option("--model.parth m", "unknown option model.parth", "did you mean model.path?"),
    option("--optimizer.lr", "--optimizer.lr", "expected one argument"),
    option("--reward exact", "unknown option reward;", "reward.kind"),
]

FILES = [
    toml(b"\xff\xfe[\x00m\x00", "not UTF-8", name="toml in UTF-16"),
    toml(b"[model]\npath = '\xff'", "not UTF-8 text (byte 16"),
    toml("\ufeff[model]\nparth = 'a'", "did you mean model.path?", name="toml with a byte order mark"),
    toml("x = " + "[" * 5000 + "]" * 5000, "nested too deeply", name="toml nested"),
    toml(".".join(["a"] * 3000) + " = 1", "unknown option", name="toml with a long key"),
    toml("#" * (2 << 20), "expected at most 1048576", name="toml of 2 MB"),
    toml("[train]\nseed = " + "9" * 5000, "not valid TOML", "4300 digits", name="toml with a huge integer"),
    toml("[train]\nsteps = true", "train.steps: expected a valid integer", "got true"),
    toml('[model]\npath = "a\\u0000b"', "model.path: expected text without control characters"),
    toml("[spec]\ncandidate_steps = []", "spec.candidate_steps=[]"),
    toml("model = 'a'", "model: expected a table [model]", 'got "a"'),
    toml("[rollout]\nmax_new_tokens = 9999", "rollout.max_new_tokens=9999", "model.max_length=4096"),
    Case("toml missing", "train --config no.toml", ("no.toml: No such file", "expected a TOML file")),
    Case("toml is a directory", "train --config {here}", ("Is a directory", "expected a TOML file")),
    Case(
        "toml is a pipe",
        "train --config p",
        ("p: expected a regular file, found a pipe",),
        lambda here: os.mkfifo(here / "p"),
    ),
    Case(
        "toml of a replay without a table",
        "replay run --config run.toml --train.run_dir out",
        ("run.toml", "unknown option steps"),
        {"run.toml": "steps = 5", "run/config.json": "{}"},
    ),
    Case("toml is empty", "train --config e.toml", ("model.path is empty",), {"e.toml": ""}),
]

CONTRADICTIONS = [
    option("--spec.topk 2", "topk=2", "mode=adaptive"),
    option("--spec.num_steps 4", "spec.num_steps=4", "candidate_steps=[0, 1, 2, 3, 5]"),
    option("--spec.mode fixed --spec.cost_table c.json", "spec.cost_table=c.json", "mode=fixed"),
    option("--parallel.sequence true", "parallel.sequence=true", "tensor=1"),
    option("--rollout.engine embedded --rollout.engines 2", "engine=embedded", "engines=2"),
    option("--optimizer.decay_steps 5 --optimizer.warmup_steps 9", "optimizer.decay_steps=5", "warmup_steps=9"),
    option("--algorithm.dynamic_sampling true --rollout.temperature 0", "rollout.temperature=0"),
    option("--algorithm.dual_clip 3 --algorithm.ratio cispo", "ratio=cispo does not clip it"),
    option("--algorithm.overlong_tokens 2000", "overlong_tokens=2000 is longer than rollout.max_new_tokens=1024"),
    option("--algorithm.tis_clip 0 --rollout.staleness 1", "algorithm.tis_clip=0 leaves out the weights"),
    option(
        "--algorithm.tis_clip 0 --rollout.partial 1 --rollout.mask_offpolicy true", "tis_clip=0 leaves out the weights"
    ),
    option(
        "--model.path m --sft.path s.jsonl --drafter.train false",
        "sft.drafter_only=true",
        "drafter.train=false",
        command="sft",
    ),
    option("--model.path m", "data.path is empty", ".jsonl"),
    option("--model.path m", "sft.path is empty", ".jsonl", command="sft"),
    Case("too few ranks", NAMED + "--parallel.tensor 2", ("parallel.tensor=2", "multiple of 2 ranks")),
    Case("small cache", NAMED + "--rollout.max_total_tokens 4109", ("max_total_tokens=4109", "at least 4110")),
    Case("small micro-batch", NAMED + "--train.tokens_per_micro_batch 8", ("tokens_per_micro_batch=8", "4096")),
    Case(
        "small micro-batch of a layout",
        NAMED + "--ranks 8 --parallel.tensor 8 --parallel.sequence true --model.max_length 1500 "
        "--train.tokens_per_micro_batch 1500",
        ("tokens_per_micro_batch=1500", "1500", "multiples of 8"),
    ),
    Case("no held-out data", NAMED + "--train.eval_every 8", ("train.eval_every=8", "data.eval_path")),
]

CASES = NUMBERS + CHOICES + REWARDS + PATHS + UNKNOWN + FILES + CONTRADICTIONS


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_one_line(case, tmp_path, capfd, monkeypatch):
    check(case, tmp_path, capfd, monkeypatch)
