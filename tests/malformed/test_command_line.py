"""Commands themselves: names, arguments, ranks, rewards and durations of rounds, before anything starts."""

import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Case, check, ids, model_files, write_model

from megatron_rlspec.config import load
from megatron_rlspec.rollout.sglang.http import serve
from megatron_rlspec.run import state_file
from megatron_rlspec.run.checkpoints import Checkpoints
from megatron_rlspec.types import Group, Prompt

TRAIN = "train --model.path model --data.path rows.jsonl --model.max_length 64 --rollout.max_new_tokens 32 "
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
ROW = '{"prompt": "a1", "label": "1", "response": "b"}\n'
SFT = (
    "sft --model.path model --sft.path rows.jsonl --data.eval_path rows.jsonl --sft.eval_every 5 --model.max_length 64 "
)
SFT += "--rollout.max_new_tokens 32 "


def run_with(**files: str) -> Callable[[Path], None]:
    """A model, rows, and files by name with `__` for a dot."""

    def write(here: Path) -> None:
        write_model(here / "model")
        (here / "rows.jsonl").write_text(ROW)
        for name, text in files.items():
            (here / name.replace("__", ".")).write_text(text)

    return write


def reward(name: str, code: str, *expects: str, kind: str = "mine:f", act: str = TRAIN) -> Case:
    expects = (f"reward.kind={kind}: ", *expects)
    return Case(f"{act.split()[0]} reward {name}", f"{act}--reward.kind {kind}", expects, run_with(mine__py=code))


REWARDS = [
    reward("that raises", "raise OSError('no such thing')", "OSError: no such thing"),
    reward("that exits with 3", "import os; os._exit(3)", "process ended with exit code 3"),
    reward("of no function, for a warm start", "", "has no attribute 'f'", act=SFT),
]

DURATIONS = [
    Case(
        "durations of rounds missing",
        TRAIN + "--ranks 2 --rollout.engine embedded --tail.tp 1,2 --tail.cost_table no.json",
        ("no.json: No such file",),
        run_with(),
    )
]

COMMANDS = [
    Case("unknown command", "trian", ("unknown command 'trian'", "train")),
    Case("ranks 1e9", "train --dry-run --ranks 1000000000", ("--ranks 1000000000", "16384")),
    Case("size of GPUs", "train --gpu-gib 80", ("--gpu-gib has no effect without --dry-run",)),
    Case("ranks of torchrun", "train --ranks 4", ("--ranks 4", "WORLD_SIZE=1", "unset them"), environment=TORCHRUN),
    Case(
        "ranks that do not divide",
        "train --dry-run --ranks 3 --model.path m --data.path d --parallel.tensor 2",
        ("parallel.tensor=2", "multiple of 2 ranks", "--ranks is 3"),
    ),
    Case("words of Hydra", "train optimizer.lr=1e-5", ("unexpected word optimizer.lr=1e-5", "--optimizer.lr 1e-5")),
    Case(
        "one rank of two",
        TRAIN + "--parallel.tensor 2",
        ("parallel.tensor=2", "torchrun started 1"),
        run_with(),
        environment=TORCHRUN,
    ),
]


# ---- what the first look cannot see: a run's model, a checkpoint's state, a server ----------------------------------


def opened(here: Path) -> None:
    """Open a run of a dense model with split experts, which must fail before it starts engines or trainer."""
    from megatron_rlspec.run.session import Session

    paths = {"model.path": "model", "data.path": "rows.jsonl", "train.run_dir": "run"}
    Session(load(None, {name: str(here / path) for name, path in paths.items()} | {"parallel.expert": "2"}))


def read_state(here: Path) -> state_file.State:
    checkpoints = Checkpoints(here)
    return checkpoints.read_state(checkpoints.path(2))


def state(content: bytes | None) -> Callable[[Path], None]:
    """Write the state of a checkpoint, which is then missing or damaged."""

    def write(here: Path) -> None:
        file = here / "checkpoints/step-000002.state"
        state_file.write(file, {}, state_file.Drawn([Group(Prompt(0, np.arange(2)), [])]))
        assert read_state(here).drawn.ahead
        file.unlink() if content is None else file.write_bytes(content)

    return write


def port_taken(here: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        serve.main(["--model", str(here), "--port", str(taken.getsockname()[1])])


MODEL = {"config.json": '{"torch_dtype": "float32"}'}
STARTED = [
    Case("dense experts", opened, ("config.json of", "parallel.expert=2"), run_with()),
    Case("state missing", read_state, ("no such file", "earlier version", "step-000002 to go on"), state(None)),
    Case("state cut", read_state, ("step-000002.state: its checksum differs",), state(b"\x92\x82")),
    Case("serve port taken", port_taken, ("cannot listen on 127.0.0.1:", "Address already in use"), MODEL),
]
SERVE = [
    ("--device cpu --draft-vocabulary 9 --tp 2", "--draft-vocabulary 9", "a multiple of 2"),
]
if not torch.cuda.is_available():
    SERVE.append(("--device cuda", "--device cuda", "no CUDA device"))
for text, *words in SERVE:
    STARTED.append(Case(f"serve {text}", f"serve --model {{here}} --port 31997 {text}", tuple(words), MODEL))

CASES = REWARDS + DURATIONS + COMMANDS + STARTED


@pytest.fixture(scope="module", autouse=True)
def imports():
    model_files()


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_one_line(case, tmp_path, capfd, monkeypatch):
    check(case, tmp_path, capfd, monkeypatch)


def test_only_rank_0_prints_the_error(tmp_path, capfd, monkeypatch):
    case = Case("rank 1", "train", lines=0, environment={"RANK": "1", "WORLD_SIZE": "2"})
    check(case, tmp_path, capfd, monkeypatch)
    assert capfd.readouterr().err == ""
