"""docs/troubleshooting.md: its commands print the lines that stand below them, and it has every kind of event."""

import ast
import json
import shlex
import shutil
from pathlib import Path

import pytest
from docs_pages import DOCS, blocks
from safetensors.torch import load_file

import megatron_rlspec
from megatron_rlspec import cli

PAGE = "troubleshooting.md"
FILES = {
    "run.toml": '[model]\npath = "model"\ndtype = "float32"\nmax_length = 256\n\n[data]\npath = "prompts.jsonl"\n\n'
    "[rollout]\nmax_new_tokens = 24\n",
    "prompts.json": "[]",
    "no-label.jsonl": '{"prompt": "1 + 1 ="}\n',
    "messages.jsonl": '{"prompt": [{"role": "user", "content": "1 + 1 ="}], "label": "2"}\n',
    "long.jsonl": json.dumps({"prompt": "3 nights " * 80, "label": "2"}) + "\n",
    "my_reward.py": "def score(prompt, response):\n    return 1.0\n",
    "cost.json": "{}",
    "runs/there/metrics.jsonl": '{"step": 0}\n',
}
EXAMPLES = [block.strip().split("\n") for block in blocks(PAGE, "console")]


@pytest.fixture(scope="module")
def folder(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with everything that the page's commands name."""
    here = tmp_path_factory.mktemp("trouble")
    for name, text in FILES.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    shutil.copy(start / "task/rl.jsonl", here / "prompts.jsonl")
    for name, changes in {
        "model": {},
        "cut": {},
        "plain": {"architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 0},
        "gpt2": {"architectures": ["GPT2LMHeadModel"]},
    }.items():
        shutil.copytree(start / "model", here / name)
        config = here / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    weights = here / "cut/model.safetensors"
    assert load_file(weights)
    weights.write_bytes(weights.read_bytes()[:-10])
    return here


@pytest.mark.parametrize(
    "command, line", EXAMPLES, ids=[example[0].partition("run.toml ")[2][:40] for example in EXAMPLES]
)
def test_a_command_prints_its_line(folder, command, line, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RLSPEC_API_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(command.removeprefix("$ rlspec ")))
    assert ended.value.code == 2
    assert capfd.readouterr().err.strip() == line


def kinds() -> set[str]:
    """Return the first argument of every call of `Recorder.event` in the package."""
    found: set[str] = set()
    for path in Path(megatron_rlspec.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if ".event(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "event":
                found |= {kind.value for kind in node.args[:1] if isinstance(kind, ast.Constant)}
    return found


def test_the_page_has_every_kind_of_event():
    text = (DOCS / PAGE).read_text()
    assert len(kinds()) >= 9
    assert not [kind for kind in kinds() if f"\n[{kind}] " not in text]
