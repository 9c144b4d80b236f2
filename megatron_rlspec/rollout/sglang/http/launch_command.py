"""`rlspec serve --print`: the shell commands that start SGLang's own server with the plugin."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rlspec.rollout.sglang.settings import KEY, VARIABLE, Settings

_LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"  # `conversion.eagle3.environment_of`
_ADAPTIVE_FILE = "rlspec-adaptive.json"


def shell_commands(
    arguments: Sequence[str], settings: Settings, slots: Mapping[str, Any], *, has_key: bool
) -> str:
    """Return the commands: one writes the step counts for which graphs are captured, one starts the server.

    slots    step counts to switch between, by batch size; empty without drafts
    has_key  the server takes its key from the environment
    """
    lines = []
    words = [f"{VARIABLE}={shlex.quote(_value(settings))}"]
    if _LONGER_CONTEXT in os.environ:
        words.append(f"{_LONGER_CONTEXT}=1")
    words.append("python -m sglang.launch_server")
    words += [shlex.quote(argument) for argument in arguments]
    if slots:
        lines += [f"cat > {_ADAPTIVE_FILE} <<'END'", json.dumps(slots), "END"]
        words.append(f"--speculative-adaptive-config={_ADAPTIVE_FILE}")
    if has_key:
        words.append(f'--api-key="${KEY}"')
    lines.append(" \\\n  ".join(words))
    return "\n".join(lines)


def _value(settings: Settings) -> str:
    """Return the variable's value: 1, or the settings that are not the defaults."""
    defaults = dataclasses.asdict(Settings())
    changed = {}
    for name, value in dataclasses.asdict(settings).items():
        if value != defaults[name]:
            changed[name] = value
    return json.dumps(changed) if changed else "1"
