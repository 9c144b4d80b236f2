"""Mistakes of a user: each gets one line that says what is wrong and where, and leaves no partial file.

`tests/malformed/` holds the tables of malformed files and command lines. This file holds the other mistakes.
"""

import argparse
import json
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forked
import numpy as np
import pytest
import tiny_mimo
import torch

from megatron_rlspec import cli
from megatron_rlspec.commands import training
from megatron_rlspec.config import Config, ConfigError, DataConfig, RewardConfig, load
from megatron_rlspec.models.hf_files import CheckpointError, check, read_hf, write_hf
from megatron_rlspec.models.names import name_table
from megatron_rlspec.records import recorder
from megatron_rlspec.rollout.sglang.http import serve
from megatron_rlspec.rollout.sglang.http.checks import ServeError
from megatron_rlspec.speculation.cost_table import CostTableError
from megatron_rlspec.tasks import data
from megatron_rlspec.tasks.order import DataError
from megatron_rlspec.tasks.rewards import Scorer

MAKE_TASK = Path(__file__).parents[2] / "examples/quickstart/make_task.py"
MODEL = tiny_mimo.config(hidden=16, layers=1, heads=2, kv_heads=1, ffn=16, vocab=64)
Act = Callable[["Place"], object]
Row = tuple[str, type[Exception], Act, tuple[str, ...]]  # name, error, what the user does, what the line must hold
ROWS: list[Row] = []


class Place:
    """`here`: an empty directory of this row alone; `tokenizer_path`: one token per character."""

    def __init__(self, here: Path, tokenizer: Path) -> None:
        self.here = here
        self.tokenizer_path = tokenizer

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
    ("rollout.n_samples=8", "unknown option rollout.n_samples"),
    ("optimizer.lr=fast", "optimizer.lr", "number", '"fast"'),
    ("optimizer.lr=-1", "optimizer.lr", "greater than 0"),
    ("optimizer.beta2=-0.1", "optimizer.beta2", "greater than or equal to 0"),
    ("optimizer.eps=0", "optimizer.eps", "greater than 0"),
    ("optimizer.distributed=perhaps", "optimizer.distributed", "true or false", '"perhaps"'),
    ("model.dtype=int8", "model.dtype", "'bfloat16'", '"int8"'),
    ("model.max_length=4.5", "model.max_length", "integer", '"4.5"'),
    ("data.shuffle=often", "data.shuffle", "true or false"),
    ("reward.timeout_seconds=0", "reward.timeout_seconds", "greater than 0"),
    ("rollout.engines=none", "rollout.engines", "integer", '"none"'),
    ("rollout.top_p=0", "rollout.top_p", "greater than 0"),
    ("rollout.top_p=1.5", "rollout.top_p", "less than or equal to 1"),
    ("rollout.mem_fraction=1", "rollout.mem_fraction", "less than 1"),
    ("drafter.vocabulary=99 drafter.loss=mine:loss", "vocabulary=99", "forward_kl, reverse_kl or tv"),
    ("rollout.max_new_tokens=5000", "rollout.max_new_tokens=5000", "model.max_length=4096"),
    ("rollout.urls=http://a:1 rollout.engines=2", "rollout", "engines=2", "urls=http://a:1"),
    ("rollout.engine=embedded spec.mode=off rollout.urls=http://a:1", "engine=embedded", "urls=http://a:1"),
    ("spec.mode=on", "spec.mode", "'adaptive', 'fixed' or 'off'", '"on"'),
    ("spec.candidate_steps=3,-1", "spec.candidate_steps", "greater than or equal to 0", "got -1"),
    ("spec.candidate_steps=, spec.mode=off", "spec", "candidate_steps=[]"),
    ("spec.verifier=greedy", "spec.verifier", "'position_keyed'", '"greedy"'),
    ("spec.mode=fixed spec.topk=2", "spec.topk=2", "rollout.engine=sglang"),
    ("spec.mode=fixed spec.tree_budget=batch", "spec.tree_budget=batch", "rollout.engine=sglang"),
    ("rollout.engine=embedded spec.mode=fixed spec.topk=2 spec.verifier=rejection", "topk=2", "verifier=rejection"),
    ("spec.mode=fixed spec.num_draft_tokens=9", "spec", "num_draft_tokens=9", "num_steps=3"),
    ("algorithm.ratio=ppo", "algorithm.ratio", "'token', 'sequence' or 'cispo'"),
    ("algorithm.dual_clip=0.5", "algorithm", "dual_clip=0.5", "above 1"),
    ("algorithm.dual_clip=3 algorithm.ratio=cispo", "dual_clip=3.0", "ratio=cispo"),
    ("algorithm.overlong_tokens=2000", "algorithm.overlong_tokens=2000", "rollout.max_new_tokens=1024"),
    (
        "algorithm.dynamic_sampling=true rollout.samples_per_prompt=1",
        "algorithm.dynamic_sampling=true",
        "rollout.samples_per_prompt=1",
    ),
    ("drafter.depth_decay=1.1", "drafter.depth_decay", "less than or equal to 1"),
    ("train.keep=all", "train.keep", "integer", '"all"'),
]


def options(text: str) -> Act:
    return lambda place: load(None, dict(part.split("=", 1) for part in text.split()))


ROWS += [(f"options {text}", ConfigError, options(text), parts) for text, *parts in OPTIONS]

TOML = [
    ("[model]\npath = 'a'\npath = 'b'", "run.toml: not valid TOML", "Cannot overwrite"),
    ("[modle]\npath = 'a'", "run.toml: unknown option modle", "did you mean model?"),
    ("[model]\nparth = 'a'", "run.toml: unknown option model.parth", "did you mean model.path?"),
    ("[train]\nsteps = 1.5", "run.toml: train.steps", "integer", "got 1.5"),
    ("[train]\nsteps = [1]", "run.toml: train.steps", "integer"),
]
for content, *parts in TOML:
    ROWS.append(
        (f"toml {content!r}", ConfigError, lambda p, c=content: load(p.file("run.toml", c)), tuple(parts)),
    )


def run(command: str, text: str, ranks: int = 1) -> Act:
    given = {"model.path": "m", "data.path": "d.jsonl", "sft.path": "s.jsonl"}
    return lambda place: load(
        None, given | dict(part.split("=", 1) for part in text.format(here=place.here).split())
    ).check_run(command, ranks)


def over_a_file(place: Place) -> None:
    place.file("run", "")
    run("train", "train.run_dir={here}/run")(place)


ROWS += [
    ("run without model", ConfigError, run("train", "model.path="), ("model.path is empty", "Hugging Face")),
    (
        "sft of the drafter alone that moves the policy",
        ConfigError,
        run("sft", "drafter.mtp_detach_heads=false"),
        ("sft.drafter_only=true", "drafter.mtp_detach_heads=false"),
    ),
    (
        "sft held out",
        ConfigError,
        run("sft", "drafter.repeated_layer=false"),
        ("sft.held_out=64", "repeated_layer=true"),
    ),
    ("three ranks", ConfigError, run("train", "parallel.tensor=2", 3), ("parallel.tensor=2", "multiple of 2", "3")),
    (
        "too few ranks",
        ConfigError,
        run("train", "parallel.pipeline=2 parallel.context=2", 2),
        ("pipeline=2 x context=2", "multiple of 4 ranks, but 2"),
    ),
    ("run over a file", ConfigError, over_a_file, ("train.run_dir=", "expected a directory")),
    ("misspelt flag", ConfigError, lambda p: training.parse("sft", ["--sft.step=3"]), ("sft.step", "sft.steps?")),
]

# ---- rows of data ---------------------------------------------------------------------------------------------------

GOOD = '{"prompt": "a1", "label": "1"}\n'


def demonstrations(line: str) -> Act:
    def act(place: Place) -> None:
        tokenizer = data.load_tokenizer(place.tokenizer_path)
        data.read_demonstrations(place.file("x.jsonl", line), DataConfig(), tokenizer, 5)

    return act


ROWS += [
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
        "torn records",
        recorder.RecordError,
        lambda p: recorder.read_records(p.file("m.jsonl", '{"step": 0}\n{"st\n{"step": 2}\n')),
        ("m.jsonl:2: not valid JSON",),
    ),
]

# ---- checkpoints ----------------------------------------------------------------------------------------------------


def checkpoint(spoil: Callable[[Path], object] = lambda path: None, drop: str = "-", **changes: object) -> Act:
    """Check a good checkpoint after `changes` of config.json, without tensors named *`drop`*, and after `spoil`."""

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
    ("other model", ValueError, checkpoint(architectures=["GPT2LMHeadModel"]), ("GPT2LMHeadModel is not converted",)),
    ("no architecture", ValueError, checkpoint(architectures=None), ("architecture missing is not converted",)),
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
    """Open a `Session`, which must fail before it starts engines or trainer."""

    def act(place: Place) -> None:
        from megatron_rlspec.run.session import Session

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
    """Resume from a checkpoint whose drawn rollout is missing or damaged."""

    def act(place: Place) -> None:
        from megatron_rlspec.run.checkpoints import Checkpoints, Drawn
        from megatron_rlspec.types import Group, Prompt

        checkpoints = Checkpoints(place.here, keep=2)
        checkpoints.write_state(2, {}, Drawn([Group(Prompt(0, np.arange(2)), [])]))
        assert checkpoints.read_state(checkpoints.path(2))[1].ahead
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
    ("scaled rotary", ConfigError, session(rope_scaling={"type": "dynamic"}), ("config.json of", '"dynamic"')),
    ("window", ConfigError, session(use_sliding_window=True), ("config.json of", "use_sliding_window=true")),
    ("activation", ConfigError, session(hidden_act="gelu"), ("config.json of", 'hidden_act="gelu"', "expected 'silu'")),
    ("no MLP width", ConfigError, session(intermediate_size=None), ("config.json of", "no intermediate_size")),
    ("dense experts", ConfigError, session("parallel.expert=2"), ("config.json of", "parallel.expert=2")),
    ("one group cut", ConfigError, session("parallel.tensor=2"), ("num_key_value_heads=1", "parallel.tensor=2")),
    ("one layer cut", ConfigError, session("parallel.pipeline=2"), ("config.json of", "num_hidden_layers")),
    ("short context", ConfigError, session(max_position_embeddings=64), ("model.max_length=4096", "embeddings=64")),
    ("unknown family", CheckpointError, session(architectures=["GPT2LMHeadModel"]), ("model: arch", "GPT2LMHeadModel")),
    (
        "all words",
        ConfigError,
        session("drafter.vocabulary=99999"),
        ("drafter.vocabulary=99999", "fewer than the model"),
    ),
    ("held-out file missing", DataError, session("data.eval_path=no.jsonl"), ("no.jsonl: No such file",)),
    ("run's cost table missing", CostTableError, session("spec.cost_table=no.json"), ("no.json: No such file",)),
]
if not torch.cuda.is_available():
    no_gpu = ("spec.verifier=rejection", "no GPU here")
    ROWS.append(("rejection without a GPU", ConfigError, session("spec.verifier=rejection"), no_gpu))

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
        model=str(place.here), host="127.0.0.1", port=33333, api_key="", stop_with_parent=False, extensions=""
    )
    serve._serve(options, [])


SERVE = [
    ("--host 0.0.0.0", "--host 0.0.0.0", "--api-key"),
    ("--host :: ", "--host ::", "--api-key"),
    ("--host example.invalid", "--host example.invalid", "--api-key"),
    ("--device cpu --verifier rejection", "--verifier rejection", "GPU"),
    ("--device cpu --enable-mixed-chunk", "--enable-mixed-chunk", "--spec off"),
    ("--device cpu --disaggregation-mode prefill", "--disaggregation-mode", "--spec off"),
    ("--device cpu --candidate-steps 0,99999999", "expected numbers from 0 to 64"),
    ("--device cpu --candidate-steps 1,x", "--candidate-steps 1,x", "integers"),
    ("--device cpu --cost-table no.json", "--cost-table no.json", "no such file"),
    ("--device cpu --spec fixed --cost-table x.json", "--cost-table", "--spec adaptive"),
    ("--device cpu --draft-vocabulary 8 --tp 2", "--draft-vocabulary 8", "--tp 1, not 2"),
    ("--device cpu --draft-vocabulary 8 --tensor-parallel-size=4", "--draft-vocabulary 8", "--tp 1, not 4"),
    ("--device cpu --draft-vocabulary 8", "--draft-vocabulary 8", "no vocab_size"),
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
    ("reward module", ConfigError, reward("no_such_module:f"), ("reward.kind=no_such_module:f", "ModuleNotFoundError")),
    ("reward function", ConfigError, reward("json:no"), ("reward.kind=json:no", "AttributeError")),
    ("reward not callable", ConfigError, reward("json:__name__"), ("reward.kind=json:__name__", "is not a function")),
]


def test_every_case_has_a_name_of_its_own():
    names = [name for name, *_ in ROWS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("error", "act", "parts"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_one_line_names_mistake_and_place(error, act, parts, tmp_path, tokenizer_path):
    with pytest.raises(error) as raised:
        act(Place(tmp_path, tokenizer_path))
    line = str(raised.value)
    assert "\n" not in line and all(part in line for part in parts), line
    assert cli.exit_code(raised.value) == 2 or type(raised.value) is ValueError
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".partial", ".part"))]


# ---- the command line itself ----------------------------------------------------------------------------------------

COMMANDS = [
    ("trian", "unknown command 'trian'"),
    ("sft --model.path m --sft.path s.jsonl --parallel.tensor 2", "but this is one process; --ranks N starts several"),
    ("plan no.json", "no.json: No such file"),
    ("serve --model no", "--model no: no config.json"),
    ("serve --model . --host 0.0.0.0", "--api-key"),
]


@pytest.mark.parametrize(("arguments", "part"), COMMANDS, ids=[arguments for arguments, _ in COMMANDS])
def test_a_command_line_ends_in_one_line_and_2(arguments, part, tmp_path):
    ended = forked.run_module("megatron_rlspec.cli", arguments.split(), folder=tmp_path)
    assert ended.returncode == 2 and ended.stderr.startswith("rlspec"), ended.stderr
    assert part in ended.stderr and ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_mistakes_are_reported_before_torch_is_imported(tmp_path):
    code = (
        "import sys, megatron_rlspec.cli as c\ntry: c.main(['train'])\nexcept SystemExit: print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout == "False\n" and "model.path is empty" in ended.stderr


def test_a_loss_that_is_not_finite_ends_the_run_with_a_checkpoint(tmp_path, tokenizer_path):
    """A norm of 1e30 makes the gradient overflow: two steps are skipped, then the run stops with one line."""
    tokenizer = data.load_tokenizer(tokenizer_path)
    shape = MODEL | {"vocab_size": len(tokenizer)}
    tensors = tiny_mimo.weights(shape)
    tensors["model.norm.weight"] *= 1e30
    write_hf(tmp_path / "model", shape, tensors, tokenizer_from=tokenizer_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a1", "response": "b2"}\n' * 4)
    arguments = (
        "sft --model.path model --model.dtype float32 --sft.path rows.jsonl --sft.samples_per_step 2 --sft.steps 9 "
        "--sft.held_out 0 --sft.drafter_only false "
        "--optimizer.clip_grad 0 --train.max_bad_steps 2 --train.run_dir run"
    )
    ended = forked.run_module("megatron_rlspec.cli", arguments.split(), folder=tmp_path)
    line = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr[-2000:]
    assert line.startswith("rlspec: step ") and "not finite 2 steps in a row (train.max_bad_steps=2)" in line
    stopped = int(line.split()[2].rstrip(":"))
    assert (tmp_path / line.split()[-1]).is_dir() and line.endswith(f"run/checkpoints/step-{stopped + 1:06d}")
    events = [event["message"] for event in recorder.read_records(tmp_path / "run/events.jsonl")]
    assert len(events) == 2 and all("step skipped" in message for message in events)
    records = recorder.read_records(tmp_path / "run/metrics.jsonl")
    assert [record["policy/skipped"] for record in records[-2:]] == [1, 1] and not (tmp_path / "run/hf").exists()


def test_a_defect_keeps_its_traceback():
    assert cli.exit_code(KeyError("x")) is None and cli.exit_code(FileNotFoundError("x")) is None
    assert cli.exit_code(OSError(28, "No space left on device")) == 1
    assert Config().train.max_bad_steps > 0
