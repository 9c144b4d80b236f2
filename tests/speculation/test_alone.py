"""The package `speculation` by itself: docs/speculation.md's example, in a process without torch and engines."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FORBID = """
import sys
for name in ("torch", "sglang", "megatron", "transformers"):
    sys.modules[name] = None  # importing it raises ImportError
"""


def test_the_example_in_the_docs_runs_without_torch_or_an_engine():
    text = (ROOT / "docs/speculation.md").read_text()
    example = re.search(r"## Alone, in ten lines\n\n```python\n(.*?)```", text, re.DOTALL).group(1)
    assert len(example.strip().splitlines()) <= 11
    command = [sys.executable, "-c", FORBID + example]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("k2 ")  # accepting two drafts of each round, it drafts two
