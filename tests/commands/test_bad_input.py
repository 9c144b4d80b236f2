"""Mistakes of a user: each gets one line that says what is wrong and where, and leaves no partial file.

`tests/malformed/` holds the tables of malformed files and command lines. This file holds the other mistakes.
"""

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
from megatron_rlspec.config import Config, ConfigError, load
from megatron_rlspec.host.ports import ENGINES, free_port
from megatron_rlspec.models.hf_files import CheckpointError, write_hf
from megatron_rlspec.records import recorder
from megatron_rlspec.rollout.sglang.http import serve
from megatron_rlspec.tasks import data

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


GOOD = '{"prompt": "a1", "label": "1"}\n'

# ---- checkpoints ----------------------------------------------------------------------------------------------------


def session(settings: str) -> Act:
    """Open a `Session`, which must fail before it starts engines or trainer."""

    def act(place: Place) -> None:
        from megatron_rlspec.run.session import Session

        rows = place.file("rows.jsonl", GOOD)
        write_hf(place.here / "model", MODEL, tiny_mimo.weights(MODEL), tokenizer_from=place.tokenizer_path)
        given = dict(part.split("=", 1) for part in settings.split()) | {"data.path": str(rows)}
        config = load(None, {"model.path": str(place.here / "model"), "train.run_dir": str(place.here / "run")} | given)
        try:
            Session(config)
        finally:
            assert not (place.here / "run").exists()

    return act


def pending(content: bytes | None) -> Act:
    """Resume from a checkpoint whose state is missing or damaged."""

    def act(place: Place) -> None:
        from megatron_rlspec.run.checkpoints import Checkpoints
        from megatron_rlspec.run.state_file import Drawn, write
        from megatron_rlspec.types import Group, Prompt

        checkpoints = Checkpoints(place.here)
        file = place.here / "checkpoints/step-000002.state"
        write(file, {}, Drawn([Group(Prompt(0, np.arange(2)), [])]))
        assert checkpoints.read_state(checkpoints.path(2)).drawn.ahead
        file.unlink() if content is None else file.write_bytes(content)
        checkpoints.read_state(checkpoints.path(2))

    return act


ROWS += [
    (
        "state missing",
        CheckpointError,
        pending(None),
        ("step-000002.state: no such file", "earlier version", "step-000002 to go on"),
    ),
    ("state cut", CheckpointError, pending(b"\x92\x82"), ("step-000002.state: its checksum differs",)),
    ("dense experts", ConfigError, session("parallel.expert=2"), ("config.json of", "parallel.expert=2")),
]

# ---- serve, schedules, rewards --------------------------------------------------------------------------------------


def serving(text: str) -> Act:
    def act(place: Place) -> None:
        place.file("config.json", '{"torch_dtype": "float32"}')
        given = ["--model", str(place.here), "--port", str(free_port(ENGINES)), *text.split()]
        serve.main(given)

    return act


def port_taken(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            serving(f"--port {port}")(place)
        serving(f"--port {port}")(place)


SERVE = [
    ("--device cpu --speculative-use-rejection-sampling", "--speculative-use-rejection-sampling", "--spec off"),
    ("--device cpu --disaggregation-mode prefill", "--disaggregation-mode", "--spec off"),
    ("--device cpu --draft-vocabulary 9 --tp 2", "--draft-vocabulary 9", "a multiple of 2"),
]
ROWS += [(f"serve {text}", ConfigError, serving(text), parts) for text, *parts in SERVE]
if not torch.cuda.is_available():
    ROWS.append(("serve on a GPU", ConfigError, serving("--device cuda"), ("--device cuda", "no CUDA device")))


ROWS += [("serve port taken", ConfigError, port_taken, ("cannot listen on 127.0.0.1:", "Address already in use"))]


@pytest.mark.parametrize(("error", "act", "parts"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_one_line_names_mistake_and_place(error, act, parts, tmp_path, tokenizer_path):
    with pytest.raises(error) as raised:
        act(Place(tmp_path, tokenizer_path))
    line = str(raised.value)
    assert "\n" not in line and all(part in line for part in parts), line
    assert cli.exit_code(raised.value) == 2 or type(raised.value) is ValueError
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".partial", ".part"))]


# ---- the command line itself ----------------------------------------------------------------------------------------


def test_a_command_line_ends_in_one_line_and_2(tmp_path):
    """In a process of its own: the tables of `tests/malformed` run in the tests' process."""
    ended = forked.run_module("megatron_rlspec.cli", ["serve", "--model", "no"], folder=tmp_path)
    assert ended.returncode == 2 and ended.stderr.startswith("rlspec: --model no: no config.json"), ended.stderr
    assert ended.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


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
    assert (
        line.startswith("rlspec: step ") and "not finite; 2 steps in a row were skipped (train.max_bad_steps=2)" in line
    )
    stopped = int(line.split()[2].rstrip(":"))
    assert (tmp_path / line.split()[-1]).is_dir() and line.endswith(f"run/checkpoints/step-{stopped:06d}")
    records = recorder.read_records(tmp_path / "run/events.jsonl")
    events = [record["message"] for record in records if record["kind"] == "loss"]
    assert len(events) == 2 and all("step skipped" in message for message in events)
    records = recorder.read_records(tmp_path / "run/metrics.jsonl")
    assert [record["policy/skipped"] for record in records[-2:]] == [1, 1] and not (tmp_path / "run/hf").exists()


def test_a_defect_keeps_its_traceback():
    assert cli.exit_code(KeyError("x")) is None and cli.exit_code(FileNotFoundError("x")) is None
    assert cli.exit_code(OSError(28, "No space left on device")) == 1
    assert Config().train.max_bad_steps > 0


def unloadable() -> None:
    raise ImportError("libcudart.so.12: cannot open shared object file: No such file or directory")


@pytest.mark.parametrize(
    ("act", "expects"),
    [
        (lambda: np.empty(10**16), ("out of memory: ", "--dry-run` counts")),
        (lambda: torch.empty(10**16), ("out of memory: ", "DefaultCPUAllocator")),
        (unloadable, ("does not load: libcudart.so.12", "rlspec doctor")),
    ],
    ids=["numpy", "torch", "torch's libraries"],
)
def test_what_the_machine_cannot_do_is_one_line(act, expects, capsys):
    assert cli.run(act) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(part in err for part in expects), err
