"""docs/getting-started.md: its files and commands, run in their order on a tiny model without a drafter."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import short_run

PAGE = (Path(__file__).parent.parent / "docs/getting-started.md").read_text()
# What a tiny model on a CPU needs in place of the page's numbers.
SMALL = {
    'dtype = "bfloat16"': 'dtype = "float32"',
    "max_length = 1024": "max_length = 128",
    "prompts_per_step = 32": "prompts_per_step = 4\nmax_total_tokens = 8192\nmax_running_requests = 16",
    "samples_per_prompt = 8": "samples_per_prompt = 2",
    "max_new_tokens = 512": "max_new_tokens = 16",
    "[train]": "[sft]\nsteps = 4\nsamples_per_step = 8\nheld_out = 4\neval_every = 2\n\n[train]",
    "steps = 100\n": "steps = 2\n",
    "eval_prompts = 128": "eval_prompts = 4\nsave_every = 1",
}


def blocks(language: str) -> list[str]:
    """Return the page's blocks of code in a language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def stand_in(folder: Path) -> None:
    """Write the user's files: a Qwen2 with random weights and a chat template, prompts, and the reward."""
    short_run.make_start(folder / "made")
    short_run.without_drafter(folder / "made/model", folder / "my-model")
    settings = folder / "my-model/tokenizer_config.json"
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    rows = [{"prompt": f"{a} + {b} =", "label": str(a + b)} for a in range(4) for b in range(6)]
    for name, part in {"prompts": rows[:16], "held-out": rows[16:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (reward,) = blocks("python")
    (folder / "my_reward.py").write_text(reward)
    (text,) = blocks("toml")
    for theirs, small in SMALL.items():
        text = text.replace(theirs, small)
    (folder / "run.toml").write_text(text)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_run(tmp_path):
    stand_in(tmp_path)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    printed = ""
    for command in blocks("bash"):
        ended = subprocess.run(
            ["bash", "-euc", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        printed += ended.stdout + ended.stderr
        assert ended.returncode == 0, command + ended.stdout[-2000:] + ended.stderr[-3000:]
    assert "on 8 held-out answers" in printed  # the warm start's line: 4 prompts with 2 answers
    assert "1.0\n" in printed  # the reward, alone
    steps = (tmp_path / "runs/rl/metrics.jsonl").read_text().splitlines()
    assert len(steps) == 2 and json.loads(steps[-1])["drafter/loss_1"] > 0
    assert (tmp_path / "runs/rl/report.html").exists()
