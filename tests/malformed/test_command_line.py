"""Commands themselves: names, arguments, ranks, rewards and durations of rounds, before anything starts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Case, check, ids, model_files, write_model

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

CASES = REWARDS + DURATIONS + COMMANDS


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
