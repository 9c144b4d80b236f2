"""`rlspec serve --print` and `--for`: what starts SGLang's own server with the plugin, by hand or by another project.

The arguments, settings and slots of the functions here are the three results of `serve.arguments_for`. Nothing is
started, and no file is written. The projects define the names of their settings in these files of theirs:

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

# Set by `checks.check` for an EAGLE-3 drafter with a shorter context (`conversion.eagle3.environment_of`).
_LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
_ADAPTIVE_FILE = "rlspec-adaptive.json"
# Project -> how its command line states an environment variable, and an option of SGLang: both with name and value.
# The shell turns \' into a quote for Hydra, which then reads a text and not a number or a dictionary.
_FORMS = {
    "verl": (
        "+ray_kwargs.ray_init.runtime_env.env_vars.{}=\\'{}\\'",
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.{}={}",
    ),
    "miles": ("# in env_vars of `ray job submit --runtime-env-json`: {}={}", "--sglang-{}={}"),
}
PROJECTS = tuple(_FORMS)
_VERL_MTP = "actor_rollout_ref.model.mtp.{}={}"
# Ends of SGLang's options --speculative-* that verl takes from its own section `mtp` and not from `engine_kwargs`.
_IN_VERL_MTP = ("algorithm", "num-steps", "eagle-topk", "num-draft-tokens")


def shell_commands(
    arguments: Sequence[str], settings: Settings, slots: Mapping[str, Any], *, has_key: bool
) -> str:
    """Return shell commands: one writes the step counts for which graphs are captured, one starts the server.

    arguments  SGLang's options: ours as words `--name=value`, and the user's own words behind them
    slots      content of --speculative-adaptive-config; empty without drafts
    has_key    the server takes its key from the variable RLSPEC_API_KEY, so that the key is not printed
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
    """Return the settings, one a line, with which verl or miles starts its engines with drafts.

    Shell lines that write the file of step counts come first. Of SGLang's options only those of drafts and of sampling
    are printed; the project sets the others itself.

    project  one of PROJECTS

    The other arguments are those of `shell_commands`, without words of the user's own (`serve._device_of_printed`
    refuses them).
    """
    variable_form, option_form = _FORMS[project]
    lines = _adaptive_file(slots)
    lines += [variable_form.format(name, value) for name, value in _environment(settings).items()]
    # An MTP drafter. With an EAGLE-3 drafter the value is EAGLE3, and all options stay in `engine_kwargs`.
    mtp = project == "verl" and "--speculative-algorithm=EAGLE" in arguments
    if mtp:
        lines += [_VERL_MTP.format(name, True) for name in ("enable", "enable_rollout")]
    drafting = [f"--speculative-adaptive-config=$PWD/{_ADAPTIVE_FILE}"] if slots else []
    for argument in [*arguments, *drafting]:
        name, _, value = argument.removeprefix("--").partition("=")
        if not name.startswith(("speculative-", "sampling-")):
            continue
        # Before "-" becomes "_" below: `_IN_VERL_MTP` has SGLang's names.
        form = _VERL_MTP if mtp and name.endswith(_IN_VERL_MTP) else option_form
        if project == "verl":  # Hydra: Python names, and a value even for a flag
            name = name.replace("-", "_")
            value = value or "True"
        lines.append(form.format(name, value).removesuffix("="))  # a flag of miles has no value
    return "\n".join(lines)


def _adaptive_file(slots: Mapping[str, Any]) -> list[str]:
    """Return the shell lines that write SGLang's file of step counts; [] without drafts."""
    return [f"cat > {_ADAPTIVE_FILE} <<'END'", json.dumps(slots), "END"] if slots else []


def _environment(settings: Settings) -> dict[str, str]:
    """Return environment variables, quoted for a shell.

    RLSPEC_SGLANG is 1 for default settings, else JSON of those that differ; `settings.Settings.from_environment` reads
    both.
    """
    defaults = dataclasses.asdict(Settings())
    changed = {}
    for name, value in dataclasses.asdict(settings).items():
        if value != defaults[name]:
            changed[name] = value
    environment = {VARIABLE: shlex.quote(json.dumps(changed)) if changed else "1"}
    if _LONGER_CONTEXT in os.environ:
        environment[_LONGER_CONTEXT] = "1"
    return environment
