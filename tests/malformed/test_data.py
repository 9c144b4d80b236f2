"""Data files: rows, lines and files that cannot be trained on."""

from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from harness import Case, check, ids, model_files, write_model

from megatron_rlspec.config import DataConfig, load
from megatron_rlspec.tasks import data
from megatron_rlspec.tasks.data import Order

TRAIN = "train --model.path model --model.max_length 64 --rollout.max_new_tokens 32 --data.path "
SFT = "sft --model.path model --model.max_length 64 --rollout.max_new_tokens 32 --sft.path "
GOOD = '{"prompt": "a1", "label": "1", "response": "b"}\n'


def beside_a_model(write: Callable[[Path], object]) -> Callable[[Path], None]:
    def both(here: Path) -> None:
        write_model(here / "model")
        write(here)

    return both


def content(name: str, text: str | bytes) -> Callable[[Path], None]:
    return beside_a_model(lambda here: (here / name).write_bytes(text.encode() if isinstance(text, str) else text))


def row(text: str, *expects: str, act: str = TRAIN) -> Case:
    """The second line of a file whose first is good."""
    where = ("x.jsonl:2: ", *expects)
    return Case(f"{act.split()[0]} {text}"[:100], f"{act}x.jsonl", where, content("x.jsonl", GOOD + text))


def file(name: str, path: str, write: Callable[[Path], object], *expects: str, act: str = TRAIN) -> Case:
    return Case(f"{act.split()[0]} {name}", act + path, expects, beside_a_model(write))


def parquet(rows: list[dict]) -> Callable[[Path], None]:
    return lambda here: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), here / "x.parquet")


ROWS = [
    row('{"prompt": "a1", "label": "1"', "not valid JSON"),
    row("{}", "no prompt; the row has nothing", "data.prompt_key"),
    row('{"prompt": [{"role": "user", "content": "x"}], "label": "1"}', "data.apply_chat_template=true"),
    row(
        '{"prompt": "[{}]", "label": "1"}',
        "prompt: expected a list of messages, not its text",
        act=TRAIN.replace("--data.path", "--data.apply_chat_template true --data.path"),
    ),
    row('{"prompt": "a1"}', "no label; the row has prompt", "data.label_key names the column"),
    row('{"prompt": "a1", "label": "1", "metadata": {"x": 1e999}}', "metadata holds NaN, infinity or"),
    row('{"prompt": "a\\ud800b", "label": "1"}', "prompt: expected a valid string, unable to parse raw data"),
    row('{"prompt": "a1"}', "no response; the row has prompt", "sft.response_key", act=SFT),
]

FILES = [
    file("missing", "no.jsonl", lambda here: None, "no.jsonl: No such file"),
    file("of another format", "x.csv", lambda here: (here / "x.csv").touch(), ".parquet", "csv?data_files=x.csv"),
    file("parquet cut", "x.parquet", lambda here: cut(here), "x.parquet: truncated or not Parquet"),
    file(
        "parquet second row",
        "x.parquet",
        parquet([{"prompt": "a", "label": "1"}, {"prompt": None}]),
        "row 2: prompt: expected a valid string",
    ),
    file(
        "held-out row",
        "x.jsonl --data.eval_path e.jsonl",
        lambda here: [(here / n).write_text(t) for n, t in (("x.jsonl", GOOD), ("e.jsonl", "{}"))],
        "e.jsonl:1: no prompt",
    ),
]


def cut(here: Path) -> None:
    parquet([{"prompt": "a", "label": "1"}] * 50)(here)
    (here / "x.parquet").write_bytes((here / "x.parquet").read_bytes()[:-20])


# ---- what the first look cannot see: a tokenizer is needed, or a checkpoint's state ---------------------------------


def read(longest: int = 32, **options: object) -> Callable[[Path], object]:
    def act(here: Path) -> object:
        return data.read_prompts(here / "x.jsonl", DataConfig(**options), data.load_tokenizer(here / "model"), longest)

    return act


def resumed(**changes: object) -> Callable[[Path], object]:
    state = {"size": 5, "seed": 1, "epoch": 0, "position": 2, "late": []} | changes
    return lambda here: Order(5, 1).restore(state)


LATER = [
    Case("prompts too long", read(1), ("at most 1 tokens", "all 1 rows are longer"), content("x.jsonl", GOOD)),
    Case("no template", read(apply_chat_template=True), ("has no template",), content("x.jsonl", GOOD)),
    Case("order of other data", resumed(size=6), ("size was 6, but is 5 now",)),
]

CASES = ROWS + FILES + LATER


@pytest.fixture(scope="module", autouse=True)
def imports():
    model_files()


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_one_line(case, tmp_path, capfd, monkeypatch):
    check(case, tmp_path, capfd, monkeypatch)


def test_good_files_pass(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\n" + GOOD.replace('"1"', "1.5").encode())
    config = load()
    data.check_prompts(tmp_path / "x.jsonl", config.data)
    data.check_demonstrations(tmp_path / "x.jsonl", config.data, "response")
    tokenizer = data.load_tokenizer(write_model(tmp_path / "model"))
    prompts, dropped = data.read_prompts(tmp_path / "x.jsonl", config.data, tokenizer, 8)
    assert [prompt.label for prompt in prompts] == ["1", "1.5"] and dropped == 0
