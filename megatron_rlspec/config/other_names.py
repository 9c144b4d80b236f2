"""Options of TRL, verl, slime, SkyRL, Megatron and SGLang: what stands for them here, from `other_names.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
# options here (several have commas between them) -> names elsewhere
OPTIONS: dict[str, list[str]] = _TABLES["options"]
# one sentence -> names elsewhere
SENTENCES: dict[str, list[str]] = _TABLES["sentences"]
_ANSWERS: dict[str, str] = {}
for _answer, _names in (OPTIONS | SENTENCES).items():
    _ANSWERS |= dict.fromkeys(_names, _answer)


def answer_to(option: str) -> str:
    """Return what stands here for an option of another project; "" if it is not known."""
    parts = option.replace("-", "_").split(".")
    for first in range(len(parts)):
        name = ".".join(parts[first:])
        if name in _ANSWERS:
            return _ANSWERS[name]
    return ""
