"""Every way a user can be wrong: one line that says what is wrong and where, and nothing half-written."""

import argparse
import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forked
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiny_mimo
import torch

from megatron_rlspec import cli, data, metrics
from megatron_rlspec.config import Config, ConfigError, DataConfig, RewardConfig, load
from megatron_rlspec.data import DataError
from megatron_rlspec.rl.rewards import Scorer
from megatron_rlspec.rollout.sglang.server import serve
from megatron_rlspec.rollout.sglang.server.serve import ServeError
from megatron_rlspec.speculation.cost_table import CostTable, CostTableError, PrefillCost, Provenance, RoundCost
from megatron_rlspec.types import OFF, SpecConfig
from megatron_rlspec.weights.checkpoint import CheckpointError, check, read_hf, write_hf
from megatron_rlspec.weights.names import name_table

MAKE_TASK = Path(__file__).parent.parent / "examples/quickstart/make_task.py"
MODEL = tiny_mimo.config(hidden=16, layers=1, heads=2, kv_heads=1, ffn=16, vocab=64)
Act = Callable[["Place"], object]
Row = tuple[str, type[Exception], Act, tuple[str, ...]]  # name, error, what the user does, what the line must hold
ROWS: list[Row] = []


class Place:
    """`here`: an empty directory of this row alone; `tokenizer_path`: one token per character."""

    def __init__(self, here: Path, tokenizer: Path) -> None:
        self.here, self.tokenizer_path = here, tokenizer

    def file(self, name: str, content: str | bytes) -> Path:
        (self.here / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return self.here / name


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    runpy.run_path(str(MAKE_TASK))["write_tokenizer"](path)
    return path


# ---- options --------------------------------------------------------------------------------------------------------

OPTIONS = [  # command-line text of options, and what the line must hold
    ("optimizer.lrr=1", "unknown option optimizer.lrr", "did you mean optimizer.lr?"),
    ("optimiser.lr=1", "unknown option optimiser", "did you mean optimizer?"),
    ("rollout.n_samples=8", "unknown option rollout.n_samples"),
    ("seed=1", "seed"),
    ("optimizer.lr=fast", "optimizer.lr", "number", "'fast'"),
    ("optimizer.lr=0", "optimizer.lr", "greater than 0"),
    ("optimizer.lr=-1", "optimizer.lr", "greater than 0"),
    ("optimizer.beta1=1", "optimizer.beta1", "less than 1"),
    ("optimizer.beta2=-0.1", "optimizer.beta2", "at least 0"),
    ("optimizer.eps=0", "optimizer.eps", "greater than 0"),
    ("optimizer.clip_grad=-1", "optimizer.clip_grad", "from 0 to 1e+06"),
    ("optimizer.distributed=perhaps", "optimizer.distributed", "true or false", "'perhaps'"),
    ("optimizer.decay_steps=5 optimizer.warmup_steps=9", "optimizer", "decay_steps=5", "warmup_steps=9"),
    ("model.dtype=int8", "model.dtype", "'bfloat16'", "'int8'"),
    ("model.max_length=0", "model.max_length", "from 1 to 16777216"),
    ("model.max_length=4.5", "model.max_length", "integer", "'4.5'"),
    ("data.shuffle=often", "data.shuffle", "true or false"),
    ("reward.timeout_seconds=0", "reward.timeout_seconds", "greater than 0"),
    ("reward.workers=0", "reward.workers", "from 1 to 1024"),
    ("rollout.engine=vllm", "rollout.engine", "'sglang' or 'embedded'", "'vllm'"),
    ("rollout.engines=none", "rollout.engines", "integer", "'none'"),
    ("rollout.temperature=-0.5", "rollout.temperature", "from 0 to 100"),
    ("rollout.top_p=0", "rollout.top_p", "greater than 0"),
    ("rollout.top_p=1.5", "rollout.top_p", "at most 1"),
    ("rollout.top_k=0", "rollout", "top_k=0", "-1"),
    ("rollout.mem_fraction=1", "rollout.mem_fraction", "less than 1"),
    ("rollout.staleness=-1", "rollout.staleness", "from 0 to 1"),
    ("rollout.max_new_tokens=5000", "rollout.max_new_tokens=5000", "model.max_length=4096"),
    ("rollout.urls=localhost:30000", "rollout", "urls=localhost:30000", "http://"),
    ("rollout.urls=http://a:1 rollout.engines=2", "rollout", "engines=2", "urls=http://a:1"),
    ("rollout.engine=embedded spec.mode=off rollout.engines=2", "engine=embedded", "engines=2"),
    ("rollout.engine=embedded spec.mode=off rollout.urls=http://a:1", "engine=embedded", "urls=http://a:1"),
    ("rollout.staleness=2", "rollout.staleness", "from 0 to 1"),
    ("algorithm.stale_clip=0", "algorithm.stale_clip", "greater than 0"),
    ("spec.mode=on", "spec.mode", "'adaptive', 'fixed' or 'off'", "'on'"),
    ("spec.num_steps=-1", "spec.num_steps", "from 0 to 64"),
    ("spec.num_steps=4", "spec", "num_steps=4", "candidate_steps=[0, 1, 2, 3, 5]"),
    ("spec.candidate_steps=1,x", "spec.candidate_steps", "integer", "'x'"),
    ("spec.candidate_steps=3,-1", "spec.candidate_steps", "at least 0", "got -1"),
    ("spec.candidate_steps=, spec.mode=off", "spec", "candidate_steps=[]"),
    ("spec.verifier=greedy", "spec.verifier", "'position_keyed'", "'greedy'"),
    ("spec.mode=fixed spec.cost_table=c.json", "spec", "cost_table=c.json", "mode=fixed"),
    ("spec.topk=2", "spec", "topk=2", "mode=adaptive"),
    ("spec.mode=fixed spec.topk=2", "spec.topk=2", "rollout.engine=sglang"),
    ("spec.mode=fixed spec.tree_budget=batch", "spec.tree_budget=batch", "rollout.engine=sglang"),
    ("rollout.engine=embedded spec.mode=fixed spec.topk=2 spec.verifier=rejection", "topk=2", "verifier=rejection"),
    ("spec.mode=fixed spec.num_draft_tokens=9", "spec", "num_draft_tokens=9", "num_steps=3"),
    ("spec.probe_share=0.5", "spec.probe_share", "from 0 to 0.2"),
    ("algorithm.ratio=ppo", "algorithm.ratio", "'token', 'sequence' or 'cispo'"),
    ("algorithm.dual_clip=0.5", "algorithm", "dual_clip=0.5", "above 1"),
    ("algorithm.dual_clip=3 algorithm.ratio=cispo", "dual_clip=3.0", "ratio=cispo"),
    ("algorithm.overlong_tokens=2000", "algorithm.overlong_tokens=2000", "rollout.max_new_tokens=1024"),
    (
        "algorithm.dynamic_sampling=true rollout.samples_per_prompt=1",
        "algorithm.dynamic_sampling=true",
        "rollout.samples_per_prompt=1",
    ),
    (
        "algorithm.dynamic_sampling=true rollout.temperature=0",
        "algorithm.dynamic_sampling=true",
        "rollout.temperature=0",
    ),
    ("drafter.depth=0", "drafter.depth", "from 1 to 64"),
    ("drafter.loss=mse", "drafter.loss", "'ce'", "'mse'"),
    ("drafter.depth_decay=1.1", "drafter.depth_decay", "at most 1"),
    ("parallel.tensor=0", "parallel.tensor", "from 1 to 65536"),
    ("parallel.sequence=true", "parallel", "sequence=true", "tensor=1"),
    ("sft.drafter_only=true drafter.train=false", "sft.drafter_only=true", "drafter.train=false"),
    ("sft.drafter_only=true drafter.mtp_detach_heads=false", "sft.drafter_only=true", "drafter.mtp_detach_heads=false"),
    ("train.steps=0", "train.steps", "from 1 to 1000000000"),
    ("train.keep=all", "train.keep", "integer", "'all'"),
    ("train.max_bad_steps=-1", "train.max_bad_steps", "from 0 to"),
]


def options(text: str) -> Act:
    return lambda place: load(None, dict(part.split("=", 1) for part in text.split()))


ROWS += [(f"options {text}", ConfigError, options(text), parts) for text, *parts in OPTIONS]

TOML = [
    ("x = = 1", "run.toml: not valid TOML"),
    ("[model", "run.toml: not valid TOML", "Expected ']'"),
    ("[model]\npath = 'a'\npath = 'b'", "run.toml: not valid TOML", "Cannot overwrite"),
    (b"[model]\npath = '\xff'", "run.toml: not UTF-8"),
    ("[modle]\npath = 'a'", "run.toml: unknown option modle", "did you mean model?"),
    ("[model]\nparth = 'a'", "run.toml: unknown option model.parth", "did you mean model.path?"),
    ("model = 'a'", "run.toml: model: expected a table [model]"),
    ("[model]\npath = 3", "run.toml: model.path", "expected text", "got 3"),
    ("[train]\nsteps = 1.5", "run.toml: train.steps", "integer", "got 1.5"),
    ("[train]\nsteps = [1]", "run.toml: train.steps", "integer"),
    ("[spec]\ncandidate_steps = 3", "run.toml: spec.candidate_steps", "a list of integers", "got 3"),
    ("[rollout]\nmax_new_tokens = 9999", "run.toml: rollout.max_new_tokens=9999", "model.max_length=4096"),
]
for content, *parts in TOML:
    ROWS.append(
        (f"toml {content!r}", ConfigError, lambda p, c=content: load(p.file("run.toml", c)), tuple(parts)),
    )
ROWS += [
    ("toml missing", ConfigError, lambda p: load(p.here / "no.toml"), ("no.toml", "No such file")),
    ("toml directory", ConfigError, lambda p: load(p.here), ("Is a directory",)),
]


def run(command: str, text: str, ranks: int = 1) -> Act:
    given = {"model.path": "m", "data.path": "d.jsonl", "sft.path": "s.jsonl"}
    return lambda place: load(
        None, given | dict(part.split("=", 1) for part in text.format(here=place.here).split())
    ).check_run(command, ranks)


def over_old_results(place: Place) -> None:
    (place.here / "hf").mkdir()
    run("train", "train.run_dir={here}")(place)


def over_a_file(place: Place) -> None:
    place.file("run", "")
    run("train", "train.run_dir={here}/run")(place)


ROWS += [
    ("run without model", ConfigError, run("train", "model.path="), ("model.path is empty", "Hugging Face")),
    ("run without data", ConfigError, run("train", "data.path="), ("data.path is empty", ".jsonl")),
    ("sft without data", ConfigError, run("sft", "sft.path="), ("sft.path is empty", ".jsonl")),
    ("eval without data", ConfigError, run("train", "train.eval_every=5"), ("train.eval_every=5", "data.eval_path")),
    ("sft eval without data", ConfigError, run("sft", "sft.eval_every=5"), ("sft.eval_every=5", "data.eval_path")),
    ("three ranks", ConfigError, run("train", "parallel.tensor=2", 3), ("parallel.tensor=2", "multiple of 2", "3")),
    (
        "too few ranks",
        ConfigError,
        run("train", "parallel.pipeline=2 parallel.context=2", 2),
        ("pipeline=2 x context=2", "multiple of 4 ranks, but 2"),
    ),
    (
        "small micro-batch",
        ConfigError,
        run("train", "train.tokens_per_micro_batch=512"),
        ("train.tokens_per_micro_batch=512", "model.max_length=4096"),
    ),
    (
        "small cache",
        ConfigError,
        run("train", "rollout.max_total_tokens=512"),
        ("rollout.max_total_tokens=512", "model.max_length=4096"),
    ),
    ("run over results", ConfigError, over_old_results, ("train.run_dir=", "holds hf/")),
    ("run over a file", ConfigError, over_a_file, ("train.run_dir=", "expected a directory")),
    ("option without value", ConfigError, lambda p: cli.parse("train", ["--optimizer.lr"]), ("--optimizer.lr",)),
    ("stray word", ConfigError, lambda p: cli.parse("train", ["quickly"]), ("unknown option quickly",)),
    ("misspelt flag", ConfigError, lambda p: cli.parse("sft", ["--sft.step=3"]), ("sft.step", "sft.steps?")),
]

# ---- rows of data ---------------------------------------------------------------------------------------------------

GOOD = '{"prompt": "a1", "label": "1"}\n'
LINES = [  # the second line of a JSONL file of prompts
    ("{", ":2: not valid JSON"),
    ('{"prompt": "a1", "label": "1"', ":2: not valid JSON"),
    ("[1]", ":2: a list, expected an object"),
    ("3", ":2: a number, expected an object"),
    ("null", ":2: null, expected an object"),
    ("{}", ":2: no prompt", "the row has nothing"),
    ('{"question": "a", "label": "1"}', ":2: no prompt", "the row has question, label"),
    ('{"prompt": null, "label": "1"}', ":2: prompt is null, expected a value"),
    ('{"prompt": "", "label": "1"}', ":2: the prompt is empty"),
    ('{"prompt": 3, "label": "1"}', ":2: the prompt is a number"),
    ('{"prompt": [{"role": "user"}], "label": "1"}', ":2: the prompt is a list", "data.apply_chat_template=true"),
    ('{"prompt": "a1"}', ":2: no label", "the row has prompt"),
    ('{"prompt": "a1", "label": [1]}', ":2: label is a list, expected text or a number"),
    ('{"prompt": "a1", "label": true}', ":2: label is true or false"),
    ('{"prompt": "a1", "label": "1", "metadata": 3}', ":2: metadata is a number, expected an object"),
]


def prompts(name: str, content: str | bytes, longest: int = 100, **settings: object) -> Act:
    def act(place: Place) -> None:
        tokenizer = data.load_tokenizer(place.tokenizer_path)
        data.read_prompts(place.file(name, content), DataConfig(**settings), tokenizer, longest)

    return act


for line, *parts in LINES:
    ROWS.append((f"jsonl {line}", DataError, prompts("x.jsonl", GOOD + line), ("x.jsonl" + parts[0], *parts[1:])))
CHAT = {"apply_chat_template": True}


def demonstrations(line: str) -> Act:
    def act(place: Place) -> None:
        tokenizer = data.load_tokenizer(place.tokenizer_path)
        data.read_demonstrations(place.file("x.jsonl", line), DataConfig(), tokenizer, 5)

    return act


def parquet(rows: list[dict]) -> Act:
    def act(place: Place) -> None:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place.here / "x.parquet")
        tokenizer = data.load_tokenizer(place.tokenizer_path)
        data.read_prompts(place.here / "x.parquet", DataConfig(), tokenizer, 100)

    return act


ROWS += [
    ("jsonl not UTF-8", DataError, prompts("x.jsonl", b'{"prompt": "\xff"}'), ("x.jsonl:1: not valid JSON",)),
    ("jsonl empty", DataError, prompts("x.jsonl", ""), ("x.jsonl", "the file has no rows")),
    (
        "jsonl too long",
        DataError,
        prompts("x.jsonl", GOOD, 1),
        ("x.jsonl", "at most 1 tokens", "all 1 rows are longer"),
    ),
    ("csv", DataError, prompts("x.csv", "prompt,label"), ("x.csv", ".jsonl or .parquet")),
    ("no template", DataError, prompts("x.jsonl", GOOD, **CHAT), ("data.apply_chat_template=true", "no template")),
    ("no file", DataError, lambda p: list(data.read_rows(p.here / "no.jsonl")), ("no.jsonl: No such file",)),
    ("no parquet", DataError, lambda p: list(data.read_rows(p.here / "no.parquet")), ("no.parquet", "No such file")),
    ("not parquet", DataError, prompts("x.parquet", "PAR1 but not so"), ("x.parquet: truncated or not Parquet",)),
    (
        "parquet row",
        DataError,
        parquet([{"prompt": "a", "label": "1"}, {"prompt": None}]),
        ("x.parquet: row 2: prompt is null",),
    ),
    ("parquet label", DataError, parquet([{"prompt": "a"}]), ("x.parquet: row 1: no label", "the row has prompt")),
    ("no response", DataError, demonstrations('{"prompt": "a"}'), ("x.jsonl:1: no response", "the row has prompt")),
    ("response 3", DataError, demonstrations('{"prompt": "a", "response": 3}'), ("x.jsonl:1: response is a number",)),
    ("long response", DataError, demonstrations('{"prompt": "a", "response": "12345"}'), ("at most 5 tokens",)),
    ("no tokenizer", DataError, lambda p: data.load_tokenizer(p.here / "no"), ("no: no such directory",)),
    ("empty tokenizer", DataError, lambda p: data.load_tokenizer(p.here), ("no tokenizer that Transformers can load",)),
    (
        "tokenizer of another model",
        DataError,
        lambda p: data.check_vocabulary(data.load_tokenizer(p.tokenizer_path), 8),
        ("the tokenizer has", "vocab_size=8"),
    ),
    (
        "order of other data",
        DataError,
        lambda p: data.Order(5, 1).restore({"size": 6, "seed": 1, "epoch": 0, "position": 0}),
        ("size was 6, but is 5 now",),
    ),
    (
        "torn records",
        metrics.RecordError,
        lambda p: metrics.read_records(p.file("m.jsonl", '{"step": 0}\n{"st\n{"step": 2}\n')),
        ("m.jsonl:2: not valid JSON",),
    ),
]

# ---- checkpoints ----------------------------------------------------------------------------------------------------


def checkpoint(spoil: Callable[[Path], object] = lambda path: None, drop: str = "-", **changes: object) -> Act:
    """A good checkpoint, but for `changes` of config.json, tensors whose name holds `drop`, and what `spoil` does."""

    def act(place: Place) -> None:
        path = place.here / "model"
        tensors = {name: tensor for name, tensor in tiny_mimo.weights(MODEL).items() if drop not in name}
        config = {key: value for key, value in (MODEL | changes).items() if value is not None}
        write_hf(path, config, tensors, shard_bytes=4096)
        spoil(path)
        found, tensors = read_hf(path)
        check(name_table(found), tensors)

    return act


def shard(path: Path) -> Path:
    return sorted(path.glob("*.safetensors"))[0]


def cut(path: Path) -> None:
    shard(path).write_bytes(shard(path).read_bytes()[:-10])


def edit_index(path: Path) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.extra.weight"] = shard(path).name
    file.write_text(json.dumps(index))


INDEX = "model.safetensors.index.json"
ROWS += [
    ("checkpoint missing", CheckpointError, lambda p: read_hf(p.here / "no"), ("no: no such directory", "expected")),
    ("checkpoint empty", CheckpointError, lambda p: read_hf(p.here), ("config.json: No such file",)),
    ("no config", CheckpointError, checkpoint(lambda m: (m / "config.json").unlink()), ("model/config.json: No such",)),
    (
        "broken config",
        CheckpointError,
        checkpoint(lambda m: (m / "config.json").write_text("{")),
        ("model/config.json: not valid JSON",),
    ),
    (
        "list for config",
        CheckpointError,
        checkpoint(lambda m: (m / "config.json").write_text("[]")),
        ("model/config.json: expected a JSON object",),
    ),
    ("truncated", CheckpointError, checkpoint(cut), ("model-00001-of", "truncated or not safetensors")),
    (
        "empty shard",
        CheckpointError,
        checkpoint(lambda m: shard(m).write_bytes(b"")),
        ("model-00001-of", "truncated or not safetensors"),
    ),
    (
        "shard missing",
        CheckpointError,
        checkpoint(lambda m: shard(m).unlink()),
        ("model-00001-of", "no such file", INDEX),
    ),
    ("index missing", CheckpointError, checkpoint(lambda m: (m / INDEX).unlink()), ("model: neither", INDEX)),
    (
        "index without map",
        CheckpointError,
        checkpoint(lambda m: (m / INDEX).write_text("{}")),
        (INDEX, "weight_map"),
    ),
    ("index promises more", CheckpointError, checkpoint(edit_index), ("lacks model.extra.weight", INDEX)),
    ("no MTP tensors", CheckpointError, checkpoint(drop="mtp_layers"), ("model: lacks 16 of the drafter's 16",)),
    ("one MTP tensor less", CheckpointError, checkpoint(drop="input_proj"), ("lacks 1 of the drafter's", "input_proj")),
    (
        "no drafter",
        CheckpointError,
        checkpoint(num_nextn_predict_layers=0),
        ("no MTP layer", "rlspec convert --add-mtp"),
    ),
    ("no head", CheckpointError, checkpoint(drop="lm_head"), ("model: lacks lm_head.weight", "MiMoForCausalLM needs")),
    ("other vocabulary", CheckpointError, checkpoint(vocab_size=65), ("64 rows", "vocab_size=65")),
    ("other layers", CheckpointError, checkpoint(num_hidden_layers=2), ("lacks model.layers.1.", "more tensors")),
    ("other model", ValueError, checkpoint(architectures=["GPT2LMHeadModel"]), ("GPT2LMHeadModel is not supported",)),
    ("no architecture", ValueError, checkpoint(architectures=None), ("architecture missing is not supported",)),
    ("no hidden_size", ValueError, checkpoint(hidden_size=None), ("config.json has no 'hidden_size'",)),
    ("hidden_size text", ValueError, checkpoint(hidden_size="16"), ("hidden_size is '16'", "positive integer")),
    ("odd heads", ValueError, checkpoint(num_key_value_heads=3), ("num_attention_heads=2", "num_key_value_heads=3")),
    (
        "checkpoint in the way",
        CheckpointError,
        lambda p: write_hf(p.here, MODEL, {}),
        ("exists already", "never overwritten"),
    ),
]


def session(settings: str = "", **changes: object) -> Act:
    """What `Session` finds out before it starts engines or trainer."""

    def act(place: Place) -> None:
        from megatron_rlspec.session import Session

        rows = place.file("rows.jsonl", GOOD)
        shape = {key: value for key, value in (MODEL | changes).items() if value is not None}
        write_hf(place.here / "model", shape, tiny_mimo.weights(MODEL), tokenizer_from=place.tokenizer_path)
        given = dict(part.split("=", 1) for part in settings.split())
        config = load(None, {"model.path": str(place.here / "model"), "train.run_dir": str(place.here / "run")} | given)
        try:
            Session(config, str(rows))
        finally:
            assert not (place.here / "run").exists()

    return act


def pending(content: bytes | None) -> Act:
    """Resuming from a checkpoint whose drawn rollout is gone or damaged."""

    def act(place: Place) -> None:
        from megatron_rlspec.checkpoints import Checkpoints
        from megatron_rlspec.types import Group, Prompt

        checkpoints = Checkpoints(place.here, keep=2)
        checkpoints.write_state(2, {}, [Group(Prompt(0, np.arange(2)), [])])
        assert checkpoints.read_state(checkpoints.path(2))[1]
        file = place.here / "checkpoints/step-000002.groups"
        file.unlink() if content is None else file.write_bytes(content)
        checkpoints.read_state(checkpoints.path(2))

    return act


ROWS += [
    (
        "drawn rollout missing",
        CheckpointError,
        pending(None),
        ("step-000002.groups: No such file", "step-000002 to go on"),
    ),
    ("drawn rollout cut", CheckpointError, pending(b"\x92\x82"), ("step-000002.groups: its checksum differs",)),
    ("drawn rollout of another kind", CheckpointError, pending(b"\x81\x01\x02"), ("step-000002.groups",)),
    ("scaled rotary", ConfigError, session(rope_scaling={"type": "yarn"}), ("config.json of", "of type yarn")),
    ("window", ConfigError, session(use_sliding_window=True), ("config.json of", "use_sliding_window=true")),
    ("activation", ConfigError, session(hidden_act="gelu"), ("config.json of", "hidden_act=gelu", "expected 'silu'")),
    ("no MLP width", ConfigError, session(intermediate_size=None), ("config.json of", "no intermediate_size")),
    ("dense experts", ConfigError, session("parallel.expert=2"), ("config.json of", "parallel.expert=2")),
    ("one group cut", ConfigError, session("parallel.tensor=2"), ("num_key_value_heads=1", "parallel.tensor=2")),
    ("one layer cut", ConfigError, session("parallel.pipeline=2"), ("config.json of", "num_hidden_layers")),
    ("short context", ConfigError, session(max_position_embeddings=64), ("model.max_length=4096", "embeddings=64")),
    ("unknown family", CheckpointError, session(architectures=["GPT2LMHeadModel"]), ("model: arch", "GPT2LMHeadModel")),
    ("held-out file missing", DataError, session("data.eval_path=no.jsonl"), ("no.jsonl: No such file",)),
    ("run's cost table missing", CostTableError, session("spec.cost_table=no.json"), ("no.json: No such file",)),
]
if not torch.cuda.is_available():
    no_gpu = ("spec.verifier=rejection", "no GPU here")
    ROWS.append(("rejection without a GPU", ConfigError, session("spec.verifier=rejection"), no_gpu))

# ---- cost tables ----------------------------------------------------------------------------------------------------


def cost_table(edit: Callable[[dict], object]) -> Act:
    def act(place: Place) -> None:
        provenance = Provenance("tiny", "cpu", "float32", "sglang", "0", "2025-01-01")
        cells = [RoundCost(1, b, 100 * b, c, 1.0 + b) for b in (1, 4) for c in (OFF, SpecConfig(3))]
        content = CostTable(provenance, cells, [PrefillCost(1, 1, 10, 1.0)]).to_json()
        edit(content)
        CostTable.load(place.file("cost.json", json.dumps(content)))

    return act


COSTS: list[tuple[str, Callable[[dict], object], str]] = [
    ("schema", lambda t: t.update(schema="other"), "not a cost table"),
    ("version", lambda t: t.update(version=99), "version 99"),
    ("units", lambda t: t.update(units={"time": "s"}), "units {'time': 's'}"),
    ("no rounds", lambda t: t.update(rounds=[]), "no round"),
    ("no rounds key", lambda t: t.pop("rounds"), "no field 'rounds'"),
    ("no provenance", lambda t: t.pop("provenance"), "no field 'provenance'"),
    ("unknown field", lambda t: t["rounds"][0].update(cost=3), "unknown field 'cost'"),
    ("nan", lambda t: t["rounds"][0].update(ms=float("nan")), "ms=nan"),
    ("negative", lambda t: t["rounds"][0].update(ms=-1), "ms=-1"),
    ("text", lambda t: t["rounds"][0].update(ms="1"), "ms='1', expected a number"),
    ("hole", lambda t: t["rounds"].pop(), "hole at tp=1 batch=4"),
    ("twice", lambda t: t["rounds"].append(t["rounds"][0]), "measured twice"),
    ("no off", lambda t: t.update(rounds=[r for r in t["rounds"] if r["topk"]]), "no plain-decoding row"),
    ("no batch", lambda t: t["rounds"][0].update(batch=0), "batch=0"),
    ("bad chain", lambda t: t["rounds"][-1].update(num_draft_tokens=9), "num_draft_tokens=9"),
    ("prefill", lambda t: t["prefill"][0].update(ms=0), "prefill tp=1"),
    ("switch", lambda t: t.update(switch_ms=-1), "switch_ms=-1"),
]
ROWS += [(f"cost table {name}", CostTableError, cost_table(edit), ("cost.json: ", part)) for name, edit, part in COSTS]
ROWS += [
    ("cost table missing", CostTableError, lambda p: CostTable.load(p.here / "no.json"), ("no.json: No such file",)),
    (
        "cost table no JSON",
        CostTableError,
        lambda p: CostTable.load(p.file("c.json", "ms")),
        ("c.json: not valid JSON",),
    ),
]

# ---- serve, schedules, rewards --------------------------------------------------------------------------------------


def serving(text: str) -> Act:
    def act(place: Place) -> None:
        place.file("config.json", "{}")
        serve._serve(*serve.parser().parse_known_args(["--model", str(place.here), "--port", "33333", *text.split()]))

    return act


def port_taken(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"cannot listen on 127.0.0.1:{port}"):
            serving(f"--port {port}")(place)
        serving(f"--port {port}")(place)


def without_model(place: Place) -> None:
    options = argparse.Namespace(
        model=str(place.here), host="127.0.0.1", port=33333, api_key="", stop_with_parent=False
    )
    serve._serve(options, [])


SERVE = [
    ("--host 0.0.0.0", "--host 0.0.0.0", "--api-key"),
    ("--host :: ", "--host ::", "--api-key"),
    ("--host example.invalid", "--host example.invalid", "--api-key"),
    ("--device cpu --verifier rejection", "--verifier rejection", "GPU"),
    ("--device cpu --enable-mixed-chunk", "--enable-mixed-chunk", "--spec off"),
    ("--device cpu --num-steps -1", "num_steps must not be negative", "-1"),
    ("--device cpu --candidate-steps 1,x", "--candidate-steps 1,x", "integers"),
    ("--device cpu --cost-table no.json", "--cost-table no.json", "no such file"),
    ("--device cpu --spec fixed --cost-table x.json", "--cost-table", "--spec adaptive"),
    ("--device cpu --schedule no.json", "--schedule"),
    ("--device cpu --schedule {", "--schedule"),
    ("--device cpu --schedule []", "--schedule"),
    ("--device cpu --schedule {}", "--schedule", "configs"),
    ('--device cpu --schedule {"batch_edges":[],"context_edges":[0],"configs":[]}', "--schedule", "batch_edges"),
    ('--device cpu --schedule {"batch_edges":[8,1],"context_edges":[0],"configs":[]}', "--schedule", "increasing"),
    ('--device cpu --schedule {"batch_edges":[1],"context_edges":[0],"configs":[]}', "--schedule", "1 rows"),
    ('--device cpu --schedule {"batch_edges":[1],"context_edges":[0],"configs":[[[3,1,9]]]}', "num_draft_tokens=9"),
    ('--device cpu --schedule {"batch_edges":[1],"context_edges":[0],"configs":[[[2,2,4]]]}', "only chains"),
]
ROWS += [(f"serve {text}", ServeError, serving(text), parts) for text, *parts in SERVE]
if not torch.cuda.is_available():
    ROWS.append(("serve on a GPU", ServeError, serving("--device cuda"), ("--device cuda", "no CUDA device")))


def reward(kind: str) -> Act:
    return lambda place: Scorer(RewardConfig(kind=kind, workers=1)).close()


ROWS += [
    ("serve port taken", ServeError, port_taken, ("cannot listen on 127.0.0.1:", "Address already in use")),
    ("serve without model", ServeError, without_model, ("--model", "no config.json there")),
    ("reward unknown", ConfigError, options("reward.kind=exactly"), ("reward.kind=exactly", "module:function")),
    ("reward module", ConfigError, reward("no_such_module:f"), ("reward.kind=no_such_module:f", "ModuleNotFoundError")),
    ("reward function", ConfigError, reward("json:no"), ("reward.kind=json:no", "AttributeError")),
    ("reward not callable", ConfigError, reward("json:__name__"), ("reward.kind=json:__name__", "is not a function")),
]


def test_there_are_a_hundred_and_each_is_one_of_its_kind():
    names = [name for name, *_ in ROWS]
    assert len(names) == len(set(names)) >= 100


@pytest.mark.parametrize(("error", "act", "parts"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_one_line_says_what_and_where(error, act, parts, tmp_path, tokenizer_path):
    with pytest.raises(error) as raised:
        act(Place(tmp_path, tokenizer_path))
    line = str(raised.value)
    assert "\n" not in line and all(part in line for part in parts), line
    assert cli.exit_code(raised.value) == 2 or type(raised.value) is ValueError
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".partial", ".part"))]


# ---- the command line itself ----------------------------------------------------------------------------------------

COMMANDS = [
    ("trian", "unknown command 'trian'"),
    ("train", "model.path is empty"),
    ("train --optimizer.lrr 1", "did you mean optimizer.lr?"),
    ("train --optimizer.lr", "--optimizer.lr"),
    ("train --config no.toml", "no.toml: No such file"),
    ("sft --model.path m --sft.path s.jsonl --parallel.tensor 2", "but this is one process, which torchrun did not"),
    ("train --model.path m --data.path d --parallel.tensor 2 --dry-run", "multiple of 2 ranks, but --ranks is 1"),
    ("plan no.json", "no.json: No such file"),
    ("serve --model no", "--model no: no config.json"),
    ("serve --model . --host 0.0.0.0", "--api-key"),
]


def command(arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_rlspec.cli", *arguments.split()],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("arguments", "part"), COMMANDS, ids=[arguments for arguments, _ in COMMANDS])
def test_a_command_line_ends_in_one_line_and_2(arguments, part, tmp_path):
    ended = command(arguments, tmp_path)
    assert ended.returncode == 2 and ended.stderr.startswith("rlspec"), ended.stderr
    assert part in ended.stderr and ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_only_rank_0_prints_the_error(tmp_path):
    ended = command("train", tmp_path, RANK="1", WORLD_SIZE="2")
    assert ended.returncode == 2 and ended.stderr == ""


def test_mistakes_are_reported_before_torch_is_imported(tmp_path):
    code = (
        "import sys, megatron_rlspec.cli as c\ntry: c.main(['train'])\nexcept SystemExit: print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout == "False\n" and "model.path is empty" in ended.stderr


def test_a_loss_that_is_not_finite_ends_the_run_with_a_checkpoint(tmp_path, tokenizer_path):
    """A norm of 1e30, whose gradient overflows: two steps are skipped, then the run says so and stops."""
    tokenizer = data.load_tokenizer(tokenizer_path)
    shape = MODEL | {"vocab_size": len(tokenizer)}
    tensors = tiny_mimo.weights(shape)
    tensors["model.norm.weight"] *= 1e30
    write_hf(tmp_path / "model", shape, tensors, tokenizer_from=tokenizer_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a1", "response": "b2"}\n' * 4)
    arguments = (
        "sft --model.path model --model.dtype float32 --sft.path rows.jsonl --sft.samples_per_step 2 --sft.steps 9 "
        "--optimizer.clip_grad 0 --train.max_bad_steps 2 --train.run_dir run"
    )
    ended = forked.run_module("megatron_rlspec.cli", arguments.split(), folder=tmp_path)
    line = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr[-2000:]
    assert line.startswith("rlspec: step ") and "not finite 2 steps in a row (train.max_bad_steps=2)" in line
    stopped = int(line.split()[2].rstrip(":"))
    assert (tmp_path / line.split()[-1]).is_dir() and line.endswith(f"run/checkpoints/step-{stopped + 1:06d}")
    events = [event["message"] for event in metrics.read_records(tmp_path / "run/events.jsonl")]
    assert len(events) == 2 and all("step skipped" in message for message in events)
    records = metrics.read_records(tmp_path / "run/metrics.jsonl")
    assert [record["policy/skipped"] for record in records[-2:]] == [1, 1] and not (tmp_path / "run/hf").exists()


def test_a_defect_keeps_its_traceback():
    assert cli.exit_code(KeyError("x")) is None and cli.exit_code(FileNotFoundError("x")) is None
    assert cli.exit_code(OSError(28, "No space left on device")) == 1
    assert Config().train.max_bad_steps > 0
