"""`rlspec slime -- COMMAND`: run slime's own command line with a trained drafter and speculating engines.

It adds hook paths, SGLang flags and environment variables to the command, and prints them. Our hooks call the user's
functions, and the user's other flags stay. Without `rlspec slime` in front, the command runs slime unchanged.

`plan.py` decides what is added, and `refusals.py` what is refused; this file completes the command and runs it. It
imports nothing of slime, because slime may run on another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_rlspec import arguments
from megatron_rlspec.compat.installed import version
from megatron_rlspec.config import ConfigError, DrafterConfig, SpecSection, load
from megatron_rlspec.config.spec import MOST_DRAFTS
from megatron_rlspec.host import environment
from megatron_rlspec.integrations.slime import refusals
from megatron_rlspec.integrations.slime.flags import read_flags
from megatron_rlspec.integrations.slime.plan import ADAPTIVE, Additions, plan

DRIVERS = ("train.py", "train_async.py")
# Options of section [drafter] that act inside slime.
DRAFTER_OPTIONS = (
    *("kind", "path", "train"),
    *("depth", "loss", "depth_decay", "lr", "warmup_steps"),
)
# slime's flag: a YAML file whose entries become attributes of its `args`.
CONFIG = "--custom-config-path"
RUNTIME = "--runtime-env-json"  # of `ray job submit`
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # read by `ray.init`


def parser() -> arguments.Parser:
    """Return the parser of the words before `--`."""
    p = arguments.Parser(
        prog="rlspec slime",
        usage="rlspec slime [options] -- python train.py …, or ray job submit …",
        description="run slime's own command line with a trained drafter and speculating engines.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        example="rlspec slime -- python train.py --sglang-speculative-algorithm NEXTN ...",
        first=("--candidate-steps", "--folder", "--dry-run"),
    )
    for name in DRAFTER_OPTIONS:
        option = DrafterConfig.model_fields[name]
        p.add_argument(
            f"--drafter.{name}", dest=name, help=f"{option.description} ({option.default})"
        )
    steps = ",".join(map(str, SpecSection().candidate_steps))
    p.add_argument(
        "--candidate-steps",
        type=arguments.distinct_integers(0, MOST_DRAFTS),
        help=f"steps the engines may choose from ({steps}; where SGLang does not adapt them, the number at the start)",
    )
    p.add_argument(
        "--verifier",
        choices=("target_only", "position_keyed"),
        help="position_keyed: each sample gets a seed, texts do not depend on drafts, and drafts take the verifier's "
        "noise; target_only: SGLang's own verification (position_keyed where the engines can do it)",
    )
    p.add_argument(
        "--folder",
        default="rlspec-slime",
        help="for the files the command names; all nodes must see it",
    )
    p.add_argument("--dry-run", action="store_true", help="print the completed command and stop")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is added, then replace this process by the completed command; with --dry-run only print.

    Writes the files of `complete` in both cases. Returns only with --dry-run. Raises ConfigError.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    split = argv.index("--") if "--" in argv else len(argv)
    options = parser().parse_args(argv[:split])
    command = argv[split + 1 :]
    slime_arguments = command[driver_index(command) + 1 :]
    user_flags = read_flags(slime_arguments)
    drafter = _drafter_section(options)
    added = plan(slime_arguments, drafter, options.candidate_steps, options.verifier)
    if drafter.kind == "eagle3":
        if version("sglang") == "0.5.15.post1":
            raise ConfigError(
                "--drafter.kind eagle3: SGLang 0.5.15.post1 has no EAGLE-3 drafters; SGLang 0.5.23 has them, and "
                "needs torch 2.14.1 and CUDA 13"
            )
        added.environment |= refusals.check_eagle3(user_flags, drafter.path)
    completed = complete(command, added, Path(options.folder).absolute())
    _print_additions(added)
    if options.dry_run:
        print(shlex.join(completed))
        return 0
    env = {**os.environ, **environment.of_ranks(os.environ), **added.environment}
    env |= job_environment(added.environment, os.environ)
    try:
        os.execvpe(completed[0], completed, env)
    except OSError as error:
        raise ConfigError(f"{completed[0]}: {error.strerror}") from None


def _drafter_section(options: argparse.Namespace) -> DrafterConfig:
    """Return section [drafter] of the options; what is not given has its default. Raises ConfigError."""
    given = {}
    for name in DRAFTER_OPTIONS:
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    if given.get("path"):  # slime's processes may have another working directory
        given["path"] = str(Path(given["path"]).absolute())
    return load(None, {f"drafter.{name}": value for name, value in given.items()}).drafter


def _print_additions(added: Additions) -> None:
    """Print the notes, then one line each with the variables, the flags and the settings that are added."""
    for note in added.notes:
        print(f"rlspec slime: {note}", flush=True)
    variables = [f"{k}={v}" for k, v in {**environment.RANK_DEFAULTS, **added.environment}.items()]
    settings = [f"{k}: {v}" for k, v in added.settings.items()]
    for title, entries in (
        ("environment", variables),
        ("flags", added.flags),
        ("args.rlspec", settings),
    ):
        print(f"rlspec slime adds {title}: {'  '.join(entries)}", flush=True)


def driver_index(command: Sequence[str]) -> int:
    """Return the index of slime's driver in a command; its arguments follow. Raises ConfigError."""
    for i, word in enumerate(command):
        if Path(word).name in DRIVERS:
            return i
    shown = shlex.join(command) or "(empty)"
    raise ConfigError(f"no {' or '.join(DRIVERS)} in the command {shown}")


# ---- the completed command ------------------------------------------------------------------------------------------


def complete(command: Sequence[str], added: Additions, folder: Path) -> list[str]:
    """Return the whole command with `added` in it; write the YAML and JSON files that it names into `folder`.

    Added flags come last: of a repeated flag slime takes the last one. The user's own --custom-config-path is read, and
    a file with all its entries and ours takes its place. Two commands at once need two folders: both would write the
    same files.
    """
    split = driver_index(command) + 1
    slime_arguments = list(command[split:])
    folder.mkdir(parents=True, exist_ok=True)
    user_file = read_flags(slime_arguments).get(CONFIG)
    settings = _read_yaml(user_file) if user_file else {}
    settings["rlspec"] = {**added.settings, "folder": str(folder)}
    file = folder / "slime.yaml"
    file.write_text(yaml.safe_dump(settings))
    flags = [*added.flags, CONFIG, str(file)]
    if added.adaptive:
        adaptive = folder / "adaptive.json"
        adaptive.write_text(json.dumps(added.adaptive))
        flags += [f"{ADAPTIVE}-config", str(adaptive)]
    head = list(command[:split])
    if "submit" in head:  # `ray job submit`
        head = _with_runtime(head, added.environment)
    return [*head, *slime_arguments, *flags]


def _read_yaml(path: str) -> dict[str, Any]:
    """Read the YAML file of the user's --custom-config-path. Raises ConfigError."""
    try:
        settings = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not valid YAML of plain values"
        raise ConfigError(f"{CONFIG} {path}: {reason}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{CONFIG} {path}: expected a mapping of options")
    return settings


def _with_runtime(head: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Add variables to the runtime environment of a `ray job submit`, whose workers do not inherit ours.

    head  the command up to slime's driver. Raises ConfigError for a runtime environment that cannot be added to.
    """
    words: list[str] = []
    for word in head:
        # `--name value` and `--name=value` become the same two words
        name, equals, value = word.partition("=")
        words += [name, value] if equals and name.startswith("--runtime-env") else [word]
    if "--runtime-env" in words:
        raise ConfigError(
            f"--runtime-env: rlspec adds {RUNTIME}, and Ray takes one of them; give this one"
        )
    if RUNTIME not in words:
        place = words.index("submit") + 1
        words[place:place] = [RUNTIME, "{}"]
    place = words.index(RUNTIME) + 1
    try:
        runtime = json.loads(words[place])
    except ValueError as error:
        raise ConfigError(f"{RUNTIME}: not valid JSON: {error}") from None
    runtime["env_vars"] = _worker_variables(runtime.get("env_vars", {}), variables)
    words[place] = json.dumps(runtime)
    return words


def _worker_variables(users: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of all Ray workers: the user's, what train ranks need, and ours, which win.

    slime starts its train ranks with NCCL_CUMEM_ENABLE of its driver, and SGLang its engines with that of the node
    (ray/actor_group.py, entrypoints/engine.py). As a variable of the job it is the same everywhere.
    """
    return {**users, **environment.of_ranks(users), **added}


def job_environment(added: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes a driver pass `added` to its workers in a Ray cluster that was started before it.

    Such workers inherit from the cluster, not from the driver. Ray's own job server sets this variable to give a driver
    its runtime environment, and `ray.init` merges it (`ray/_private/worker.py`, read at 2.60).

    inherited  the environment of this process, in which a Ray job may have set the variable already
    """
    job = json.loads(inherited.get(RAY_JOB, "{}"))
    runtime = job.get("runtime_env") or {}
    users = {}
    # PYTHONPATH: where the driver finds Megatron, its workers must find it, too.
    for name in ("PYTHONPATH", *environment.RANK_DEFAULTS):
        if name in inherited:
            users[name] = inherited[name]
    users |= runtime.get("env_vars", {})
    runtime["env_vars"] = _worker_variables(users, added)
    return {RAY_JOB: json.dumps({**job, "runtime_env": runtime})}
