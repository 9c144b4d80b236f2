"""The flags of a slime command line, before slime parses them. Imports nothing of slime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Flags = Mapping[str, str | None]  # a flag without a value has None

DRAFT_MODEL = "--sglang-speculative-draft-model-path"
SAMPLER = "--sglang-sampling-backend"
NUM_STEPS = "--sglang-speculative-num-steps"


def read_flags(arguments: Sequence[str]) -> dict[str, str | None]:
    """Read `--flag value`, `--flag=value` and bare flags. Of a repeated flag the last one counts, as in argparse."""
    values: dict[str, str | None] = {}
    for i, word in enumerate(arguments):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        if equals:
            values[name] = value
            continue
        following = arguments[i + 1] if i + 1 < len(arguments) else "--"
        values[name] = None if following.startswith("--") else following
    return values


def whole_number(value: str | None) -> int | None:
    """Return a flag's whole number; None for anything else, which slime's own parser refuses."""
    return int(value) if value and value.isdigit() else None
