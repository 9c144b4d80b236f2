"""The table of metric keys: every key that the sources write is in it, and each of its keys is written somewhere."""

import ast
import re
from pathlib import Path

import megatron_rlspec
from megatron_rlspec.records.metric_names import METRICS, find

SOURCES = sorted(Path(megatron_rlspec.__file__).parent.rglob("*.py"))
GROUPS = "rollout|policy|drafter|spec|predict|drift|push|health|engine"
WRITTEN = re.compile(rf"(?:{GROUPS})/\w+|seconds_\w+")
# Parts of keys, and the axis of slime's plots.
PARTS = {"drafter/ce", "drafter/covered", "drafter/tokens", "predict/next_tokens_k", "seconds_1"}
PARTS |= {"drift/tokens", "rollout/step"}


def keys_in_sources() -> dict[str, Path]:
    """Return the keys that stand as whole texts in the sources; `{}` of an f-string becomes a digit."""
    found = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)
            else:
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if WRITTEN.fullmatch(text) and not text.endswith(("_", "/1", "/1_response")) and text not in PARTS:
                found[text] = path
    return found


def test_every_key_of_the_sources_is_described():
    keys = keys_in_sources()
    missing = {key: path.name for key, path in keys.items() if find(key) is None}
    assert len(keys) > 45 and not missing


def test_a_key_is_described_by_its_own_entry():
    """And not by a family before it, as rollout/reward_seconds_waited was by that of a reward's parts."""
    for metric in METRICS:
        assert find(re.sub("<.*>", "1", metric.key)) is metric, metric.key


def test_every_described_key_is_written():
    words = set().union(*(re.findall(r"\w+", path.read_text()) for path in SOURCES))
    for metric in METRICS:
        name = metric.key.rpartition("/")[2].partition("<")[0].removeprefix("seconds_").rstrip("_")
        assert any(word == name or word.startswith(f"{name}_") for word in words), metric.key
