"""`rlspec serve --print` and `--for`: what starts SGLang's own server with the plugin, by hand or by another project.

The names of the projects' settings stand in these files of theirs:

    verl   verl/workers/rollout/sglang_rollout/async_sglang_server.py (`engine_kwargs`, `mtp`),
           verl/trainer/config/ppo_trainer.yaml (`ray_kwargs`)
    miles  miles/backends/sglang_utils/arguments.py (every option of SGLang behind `--sglang-`)
"""

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
# how a project's command line states a variable and an option of SGLang
_FORMS = {
    "verl": (
        "+ray_kwargs.ray_init.runtime_env.env_vars.{}=\\'{}\\'",
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.{}={}",
    ),
    "miles": ("# in env_vars of `ray job submit --runtime-env-json`: {}={}", "--sglang-{}={}"),
}
PROJECTS = tuple(_FORMS)
_VERL_MTP = "actor_rollout_ref.model.mtp.{}={}"
_IN_VERL_MTP = ("algorithm", "num-steps", "eagle-topk", "num-draft-tokens")


def shell_commands(
    arguments: Sequence[str], settings: Settings, slots: Mapping[str, Any], *, has_key: bool
) -> str:
    """Return the commands: one writes the step counts for which graphs are captured, one starts the server.

    slots    step counts to switch between, by batch size; empty without drafts
    has_key  the server takes its key from the environment
    """
    words = [f"{name}={value}" for name, value in _environment(settings).items()]
    words.append("python -m sglang.launch_server")
    words += [shlex.quote(argument) for argument in arguments]
    if slots:
        words.append(f"--speculative-adaptive-config={_ADAPTIVE_FILE}")
    if has_key:
        words.append(f'--api-key="${KEY}"')
    return "\n".join([*_adaptive_file(slots), " \\\n  ".join(words)])


def for_project(
    project: str, arguments: Sequence[str], settings: Settings, slots: Mapping[str, Any]
) -> str:
    """Return what starts the engines of verl or miles with drafts; the arguments are those of `shell_commands`."""
    variable, option = _FORMS[project]
    lines = _adaptive_file(slots)
    lines += [variable.format(name, value) for name, value in _environment(settings).items()]
    mtp = project == "verl" and "--speculative-algorithm=EAGLE" in arguments
    if mtp:
        lines += [_VERL_MTP.format(name, True) for name in ("enable", "enable_rollout")]
    drafting = [f"--speculative-adaptive-config=$PWD/{_ADAPTIVE_FILE}"] if slots else []
    for argument in [*arguments, *drafting]:
        name, _, value = argument.removeprefix("--").partition("=")
        if not name.startswith(("speculative-", "sampling-")):
            continue
        form = _VERL_MTP if mtp and name.endswith(_IN_VERL_MTP) else option
        if project == "verl":
            name = name.replace("-", "_")
            value = value or "True"
        lines.append(form.format(name, value).removesuffix("="))
    return "\n".join(lines)


def _adaptive_file(slots: Mapping[str, Any]) -> list[str]:
    """Return the lines that write SGLang's file of step counts."""
    return [f"cat > {_ADAPTIVE_FILE} <<'END'", json.dumps(slots), "END"] if slots else []


def _environment(settings: Settings) -> dict[str, str]:
    """Return the variables, quoted for a shell: 1, or the settings that are not the defaults."""
    defaults = dataclasses.asdict(Settings())
    changed = {}
    for name, value in dataclasses.asdict(settings).items():
        if value != defaults[name]:
            changed[name] = value
    environment = {VARIABLE: shlex.quote(json.dumps(changed)) if changed else "1"}
    if _LONGER_CONTEXT in os.environ:
        environment[_LONGER_CONTEXT] = "1"
    return environment
