"""Commands: names, arguments, ranks and rewards, before anything starts."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import Case, check, ids, model_files, write_model

from megatron_rlspec.rollout.sglang.http import serve

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


def run_with(code: str = "") -> Callable[[Path], None]:
    """Write a model, rows, and mine.py with `code`."""

    def write(here: Path) -> None:
        write_model(here / "model")
        (here / "rows.jsonl").write_text(ROW)
        (here / "mine.py").write_text(code)

    return write


def reward(name: str, code: str, told: str, act: str = TRAIN) -> Case:
    return Case(f"reward {name}", f"{act}--reward.kind mine:f", ("reward.kind=mine:f: ", told), run_with(code))


REWARDS = [
    reward("that raises", "raise OSError('no such thing')", "OSError: no such thing"),
    reward("of no function, for a warm start", "", "has no attribute 'f'", act=SFT),
]

COMMANDS = [
    Case(
        "durations of rounds missing",
        TRAIN + "--ranks 2 --rollout.engine embedded --tail.tp 1,2 --tail.cost_table no.json",
        ("no.json: No such file",),
        run_with(),
    ),
    Case("unknown command", "trian", ("unknown command 'trian'", "train")),
    Case("no ranks", "train --dry-run --ranks 0", ("--ranks 0", "a number from 1")),
    Case("size of GPUs", "train --gpu-gib 80", ("--gpu-gib has no effect without --dry-run",)),
    Case("ranks of torchrun", "train --ranks 4", ("--ranks 4", "WORLD_SIZE=1", "unset them"), environment=TORCHRUN),
    Case("port of torchrun", "train", ("MASTER_PORT='99999'",), environment=TORCHRUN | {"MASTER_PORT": "99999"}),
    Case("rank of torchrun", "train", ("LOCAL_RANK='x'",), environment=TORCHRUN | {"LOCAL_RANK": "x"}),
    Case("two files", "train --config a.toml --config b.toml", ("--config twice",)),
    Case("words of Hydra", "train optimizer.lr=1e-5", ("unexpected word optimizer.lr=1e-5", "--optimizer.lr 1e-5")),
    Case(
        "one rank of two",
        TRAIN + "--parallel.tensor 2",
        ("parallel.tensor=2", "torchrun started 1"),
        run_with(),
        environment=TORCHRUN,
    ),
]


def port_taken(here: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        serve.main(["--model", str(here), "--port", str(taken.getsockname()[1])])


MODEL = {"config.json": '{"torch_dtype": "float32"}'}
STARTED = [
    Case("serve port taken", port_taken, ("cannot listen on 127.0.0.1:", "Address already in use"), MODEL),
]
SERVE = [
    ("--device cpu --draft-vocabulary 9 --tp 2", "--draft-vocabulary 9", "a multiple of 2"),
]
if not torch.cuda.is_available():
    SERVE.append(("--device cuda", "--device cuda", "no CUDA device"))
for text, *words in SERVE:
    STARTED.append(Case(f"serve {text}", f"serve --model {{here}} --port 31997 {text}", tuple(words), MODEL))

CASES = REWARDS + COMMANDS + STARTED


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
