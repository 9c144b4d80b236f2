"""`rlspec slime -- COMMAND`: run slime's own command line with a trained drafter and speculating engines.

Hook paths, SGLang flags and environment are added and printed; the user's own settings stay. Without `rlspec slime` in
front, the command runs slime unchanged. This file imports nothing of slime: the command may run on another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_rlspec import arguments
from megatron_rlspec.config import ConfigError, DrafterConfig, SpecSection, load
from megatron_rlspec.config.spec import MOST_DRAFTS
from megatron_rlspec.host import environment
from megatron_rlspec.integrations.slime import refusals
from megatron_rlspec.integrations.slime.refusals import (
    DRAFT_MODEL,
    EAGLE3,
    SAMPLER,
    flags,
    rule,
    whole_number,
)
from megatron_rlspec.rollout.sglang.settings import Settings
from megatron_rlspec.speculation import graphs
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.solver import chains
from megatron_rlspec.types import Verifier

HOOKS = "megatron_rlspec.integrations.slime.hooks"
METRICS = "megatron_rlspec.integrations.slime.metrics"
DRIVERS = ("train.py", "train_async.py")
# flag -> our function, and the attribute of args that holds the user's function, which ours calls
CHAINED = {
    "--custom-megatron-init-path": (f"{HOOKS}.init", "rlspec_inner_init_path"),
    "--custom-model-provider-path": (f"{HOOKS}.model_provider", "rlspec_inner_provider_path"),
    "--rollout-function-path": (f"{METRICS}.generate_rollout", "rlspec_inner_rollout_path"),
    "--eval-function-path": (f"{METRICS}.generate_rollout", "rlspec_inner_eval_path"),
    "--custom-rollout-log-function-path": (f"{METRICS}.log_rollout", "rlspec_inner_log_path"),
}
DRAFTER = (
    *("kind", "path", "train"),
    *("depth", "loss", "depth_decay", "lr", "warmup_steps"),
    *("reward_weight", "update_every"),
)
# Under these flags SGLang keeps the number of steps it starts with (`adaptive_unsupported_reason`). It only warns.
FIXED = (
    "--sglang-enable-two-batch-overlap",
    "--sglang-enable-multi-layer-eagle",
    "--sglang-enable-pdmux",
)
DELTA_NET = "--attention-output-gate"  # slime's models with delta nets have it, and no other
# Attention that is not unrolled: `SlimeDrafter` trains one depth through Megatron's own layer.
ONE_DEPTH = ("--multi-latent-attention", DELTA_NET, "--allgather-cp")
# Flags that name the largest batch of a CUDA graph, the first that is given.
MOST_BATCH = (
    "--sglang-cuda-graph-max-bs-decode",
    "--sglang-cuda-graph-max-bs",
    "--sglang-max-running-requests",
)
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@dataclass
class Additions:
    """The additions: `flags` to slime's, `settings` to its args by YAML, `environment` to its processes.

    `notes`, one line each, list decisions that were made for the user.
    """

    flags: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    adaptive: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def plan(
    command: Sequence[str],
    drafter: Mapping[str, Any],
    steps: Sequence[int] | None,
    start: int | None,
    cost_table: str = "",
    verifier: Verifier = "target_only",
) -> Additions:
    """Decide what to add to `command` (slime's arguments, the driver excluded). Pure.

    drafter     our options, by their names in `[drafter]`; depth may be None: the deepest that the attention allows
    steps       step counts that the engines may choose from; None: the default, or one number if SGLang cannot adapt it
    start       num_steps until the first rollout has ended; None: the command's own, or the default
    cost_table  file by which our rule chooses in the engines; "": it chooses by the model's sizes and what it learns
    verifier    of the engines; position_keyed gives each sample a seed

    Raises ConfigError if slime's own flags contradict it.
    """
    given = flags(command)
    refusals.refuse(given, drafter)
    out = Additions()
    if verifier == "position_keyed":
        refusals.refuse_keyed(given)
        if SAMPLER not in given:
            out.flags += [SAMPLER, "pytorch"]
    fixed = _fixed_by(given)
    steps, start = _steps(given, steps, start, fixed, out.notes)
    depth = _depth(given, drafter["depth"], out.notes)
    eagle3 = drafter["kind"] == "eagle3"
    inside = {} if eagle3 else {"--enable-mtp-training": None, "--mtp-num-layers": "1"}
    for flag, value in inside.items():
        if flag not in given:
            out.flags += [flag] if value is None else [flag, value]
    for flag, (ours, inner) in CHAINED.items():
        if theirs := given.get(flag):
            out.settings[inner] = theirs
        out.flags += [flag, ours]
    engines = {
        "--sglang-speculative-algorithm": EAGLE3 if eagle3 else "EAGLE",
        "--sglang-speculative-num-steps": str(start),
        "--sglang-speculative-eagle-topk": "1",
        "--sglang-speculative-num-draft-tokens": str(start + 1),
    } | ({DRAFT_MODEL: drafter["path"]} if eagle3 else {})
    for flag, value in engines.items():
        if flag not in given:
            out.flags += [flag, value]
    if len(steps) > 1 and "--sglang-speculative-adaptive" not in given:
        out.flags.append("--sglang-speculative-adaptive")
        if "--sglang-speculative-adaptive-config" not in given:
            out.adaptive = _captured(given, steps, cost_table)
    out.settings |= {f"rlspec_{name}": drafter[name] for name in DRAFTER} | {"rlspec_depth": depth}
    out.settings |= {"rlspec_candidate_steps": sorted(steps), "rlspec_cost_table": cost_table}
    out.settings["rlspec_verifier"] = verifier
    if cost_table and len(steps) == 1:
        remedy = f"{fixed}; leave it out" if fixed else "give --candidate-steps more than one"
        raise ConfigError(f"--cost-table {cost_table}: nothing to choose from: {remedy}")
    # Without a table the engines keep `num_steps` until the first rollout has been observed.
    chosen = rule(cost_table, steps) if cost_table else None
    out.environment |= Settings(verifier, chosen).to_environment()
    return out


def _steps(
    given: Mapping[str, str | None],
    steps: Sequence[int] | None,
    start: int | None,
    fixed: str,
    notes: list[str],
) -> tuple[list[int], int]:
    """Return the step counts that the engines may choose from, and the one at the start. Raises ConfigError."""
    theirs = whole_number(given.get("--sglang-speculative-num-steps"))
    if start is not None and theirs is not None and start != theirs:
        raise ConfigError(
            f"--num-steps {start}, but --sglang-speculative-num-steps {theirs}; give one of them"
        )
    if start is None:
        alone = steps[0] if steps is not None and len(steps) == 1 else None
        start = next(n for n in (theirs, alone, SpecSection().num_steps) if n is not None)
    if steps is None:
        steps = [start] if fixed else sorted({*SpecSection().candidate_steps, start})
    elif fixed and len(steps) > 1:
        raise ConfigError(
            f"--candidate-steps {','.join(map(str, steps))}: {fixed}; give one number"
        )
    if wrong := [n for n in (start, *steps) if not 0 <= n <= MOST_DRAFTS]:
        raise ConfigError(f"{wrong[0]} draft steps: expected a number from 0 to {MOST_DRAFTS}")
    if not any(steps):
        raise ConfigError(
            "--candidate-steps 0 never drafts; run slime without rlspec, or give another number"
        )
    if start not in steps:
        raise ConfigError(f"num_steps={start} is not among candidate_steps={list(steps)}")
    if fixed:
        notes.append(f"the number of draft steps is fixed at {start}: {fixed}")
    return list(steps), start


def _fixed_by(given: Mapping[str, str | None]) -> str:
    """Return why the number of steps cannot change while the engines run; "" if it can."""
    for flag in FIXED:
        if flag in given and given[flag] != "1":
            return f"under {flag} SGLang does not adapt it"
    topk = given.get("--sglang-speculative-eagle-topk", "1")
    if topk != "1":
        return f"SGLang adapts chains only, not --sglang-speculative-eagle-topk {topk}"
    if DELTA_NET in given:
        return "a changing number was never tested with the state of this model's delta nets"
    return ""


def _depth(given: Mapping[str, str | None], depth: int | None, notes: list[str]) -> int:
    """Return the depth that the drafter is trained to. Raises ConfigError."""
    reason = next((flag for flag in ONE_DEPTH if flag in given), "")
    if not reason:
        return DrafterConfig().depth if depth is None else depth
    if depth is None:
        notes.append(f"the drafter is trained to depth 1: {reason} supports no other")
    elif depth > 1:
        raise ConfigError(
            f"{reason} with depth={depth}: it supports only depth 1; set --drafter.depth 1"
        )
    return 1


def _captured(
    given: Mapping[str, str | None], steps: Sequence[int], cost_table: str
) -> dict[str, Any]:
    """Return the step counts from each batch size on, for which SGLang captures CUDA graphs. Raises CostTableError."""
    asked = [whole_number(given.get(flag)) for flag in MOST_BATCH]
    wide = refusals.engine_gpus(given) >= 4
    most = next((n for n in asked if n), 512 if wide else 256)  # SGLang's own on GPUs above 60 GiB
    table = (
        CostTable.load(cost_table).of_engine(refusals.engine_gpus(given)) if cost_table else None
    )
    layers = whole_number(given.get("--num-layers"))
    if layers is None and table is None:
        return {"1": {"candidate_steps": sorted(steps)}}
    return graphs.slots(graphs.needed(chains(steps), most, layers or 1, table), most)


def complete(command: Sequence[str], added: Additions, folder: Path) -> list[str]:
    """Return the whole command with `added` in it; write the YAML and JSON files that it names into `folder`."""
    at = driver(command)
    head = list(command[: at + 1])
    arguments = list(command[at + 1 :])
    given = flags(arguments)
    settings = dict(added.settings)
    if theirs := given.get("--custom-config-path"):
        settings = {**_yaml(theirs), **settings}
    settings["rlspec_folder"] = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "slime.yaml"
    config.write_text(yaml.safe_dump(settings))
    extra = [*added.flags, "--custom-config-path", str(config)]
    if added.adaptive:
        adaptive = folder / "adaptive.json"
        adaptive.write_text(json.dumps(added.adaptive))
        extra += ["--sglang-speculative-adaptive-config", str(adaptive)]
    return [*_into_job(head, added.environment), *arguments, *extra]


def _yaml(path: str) -> dict[str, Any]:
    """Read the user's --custom-config-path. Raises ConfigError."""
    try:
        found = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not valid YAML of plain values"
        raise ConfigError(f"--custom-config-path {path}: {reason}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--custom-config-path {path}: expected a mapping of options")
    return found


def driver(command: Sequence[str]) -> int:
    """Return the index of slime's driver in a command; its arguments follow."""
    for i, word in enumerate(command):
        if Path(word).name in DRIVERS:
            return i
    raise ConfigError(
        f"no {' or '.join(DRIVERS)} in the command {shlex.join(command) or '(empty)'}"
    )


def _into_job(head: list[str], added: Mapping[str, str]) -> list[str]:
    """Add the environment to the runtime environment of a `ray job submit`; its workers do not inherit ours."""
    if "submit" not in head:
        return head
    out: list[str] = []
    done = False
    for i, word in enumerate(head):
        before = head[i - 1] if i else ""
        name, equals, value = word.partition("=")
        if name == "--runtime-env":
            raise ConfigError(
                "--runtime-env: rlspec adds --runtime-env-json, and Ray takes one of them; give this one"
            )
        if before == "--runtime-env-json" or (name == "--runtime-env-json" and equals):
            runtime = _runtime(word if not equals or before == "--runtime-env-json" else value)
            runtime["env_vars"] = _of_workers(runtime.get("env_vars", {}), added)
            word = (f"{name}=" if before != "--runtime-env-json" else "") + json.dumps(runtime)
            done = True
        out.append(word)
    if not done:
        at = out.index("submit") + 1
        out[at:at] = ["--runtime-env-json", json.dumps({"env_vars": _of_workers({}, added)})]
    return out


def _runtime(text: str) -> dict[str, Any]:
    """Read the user's --runtime-env-json. Raises ConfigError."""
    try:
        runtime = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--runtime-env-json: not valid JSON: {error}") from None
    if not isinstance(runtime, dict) or not isinstance(runtime.get("env_vars", {}), dict):
        raise ConfigError("--runtime-env-json: expected an object, and an object in its env_vars")
    return runtime


def _of_workers(theirs: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of all Ray workers: the user's, what train ranks need, and ours.

    slime starts its train ranks with NCCL_CUMEM_ENABLE of its driver, and SGLang its engines with that of the node
    (ray/actor_group.py, entrypoints/engine.py). As a variable of the job it is the same everywhere.
    """
    return {**theirs, **environment.of_ranks(theirs), **added}


def job_environment(added: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes a driver pass `added` to its workers in a Ray cluster that was started before it.

    Such workers inherit from the cluster, not from the driver. Ray's own job server sets this variable to give a driver
    its runtime environment, and `ray.init` merges it (`ray/_private/worker.py`, read at 2.60).
    """
    job = json.loads(inherited.get(RAY_JOB, "{}"))
    runtime = job.get("runtime_env") or {}
    # PYTHONPATH: where the driver finds Megatron, its workers must find it, too.
    own = {
        name: inherited[name] for name in ("PYTHONPATH", *environment.RANKS) if name in inherited
    }
    runtime["env_vars"] = _of_workers({**own, **runtime.get("env_vars", {})}, added)
    return {RAY_JOB: json.dumps({**job, "runtime_env": runtime})}


def parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="rlspec slime",
        usage="rlspec slime [options] -- python train.py …, or ray job submit …",
        description=__doc__.partition(" This file imports")[0].partition(": ")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        example="rlspec slime -- python train.py --sglang-speculative-algorithm NEXTN ...",
        first=("--num-steps", "--cost-table", "--folder", "--dry-run"),
    )
    defaults = DrafterConfig()
    spec = SpecSection()
    for name in DRAFTER:
        default = getattr(defaults, name)
        kind = str if isinstance(default, bool) else type(default)
        text = DrafterConfig.model_fields[name].description
        p.add_argument(f"--drafter.{name}", dest=name, type=kind, help=f"{text} ({default})")
    p.add_argument(
        "--candidate-steps",
        help=f"steps the engines may choose from ({','.join(map(str, spec.candidate_steps))}; where SGLang does not "
        "adapt them, the number at the start)",
    )
    p.add_argument(
        "--num-steps",
        type=int,
        help=f"steps at the start (--sglang-speculative-num-steps of the command, or {spec.num_steps})",
    )
    p.add_argument(
        "--cost-table",
        default="",
        help="file written by `rlspec profile`: engines choose by its times; without it, by those of their rounds",
    )
    p.add_argument(
        "--verifier",
        choices=("target_only", "position_keyed"),
        default="target_only",
        help="target_only: SGLang's own verification; position_keyed: each sample gets a seed, texts do not depend on "
        "drafts, and drafts take the verifier's noise (target_only)",
    )
    p.add_argument(
        "--folder",
        default="rlspec-slime",
        help="for the files the command names; all nodes must see it",
    )
    p.add_argument(
        "--yaml",
        action="store_true",
        help="print a YAML for --custom-config-path instead of running",
    )
    p.add_argument("--dry-run", action="store_true", help="print the completed command and stop")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is added, then replace this process by the completed command; with --dry-run or --yaml only print."""
    argv = list(sys.argv[1:] if argv is None else argv)
    split = argv.index("--") if "--" in argv else len(argv)
    ours = argv[:split]
    command = argv[split + 1 :]
    options = parser().parse_args(ours)
    arguments = command
    if not options.yaml:
        at = driver(command)
        refusals.refuse_relative(command[at])
        arguments = command[at + 1 :]
    asked = {name: getattr(options, name) for name in DRAFTER if getattr(options, name) is not None}
    if asked.get("kind") == "eagle3" and (theirs := flags(arguments).get(DRAFT_MODEL)):
        asked.setdefault("path", theirs)
    config = load(None, {f"drafter.{name}": str(value) for name, value in asked.items()})
    drafter = config.drafter.model_dump()
    drafter["depth"] = asked.get("depth")
    if drafter["path"]:
        drafter["path"] = str(Path(drafter["path"]).absolute())
    steps = _numbers(options.candidate_steps) if options.candidate_steps else None
    table = str(Path(options.cost_table).absolute()) if options.cost_table else ""
    added = plan(arguments, drafter, steps, options.num_steps, table, options.verifier)
    if table:
        tp = refusals.engine_gpus(flags(arguments))
        refusals.check_table(table, added.settings["rlspec_candidate_steps"], tp)
    if drafter["kind"] == "eagle3":
        refusals.check_target(flags(arguments), drafter["path"])
    if options.yaml:
        print(as_yaml(added, Path(options.folder).absolute()), end="")
        return 0
    for note in added.notes:
        print(f"rlspec slime: {note}", flush=True)
    whole = complete(command, added, Path(options.folder).absolute())
    for title, entries in (
        (
            "environment",
            [f"{k}={v}" for k, v in {**environment.RANKS, **added.environment}.items()],
        ),
        ("flags", added.flags),
        ("args", [f"{k}: {v}" for k, v in added.settings.items()]),
    ):
        print(f"rlspec slime adds {title}: {'  '.join(entries)}", flush=True)
    if options.dry_run:
        print(shlex.join(whole))
        return 0
    script = whole[driver(whole)]
    if Path(whole[0]).name.startswith("python") and not Path(script).exists():
        raise ConfigError(
            f"{script}: no such file; start the command in slime's directory, or give the file's path"
        )
    own = {**os.environ, **environment.of_ranks(os.environ), **added.environment}
    os.execvpe(whole[0], whole, {**own, **job_environment(added.environment, os.environ)})


def as_yaml(added: Additions, folder: Path) -> str:
    """Format the additions as attributes of slime's args; the environment, which a YAML cannot set, as comments."""
    settings: dict[str, Any] = {**added.settings, "rlspec_folder": str(folder)}
    for name, value in flags(added.flags).items():
        settings[name.removeprefix("--").replace("-", "_")] = (
            True if value is None else _number(value)
        )
    head = "".join(f"# {note}\n" for note in added.notes)
    for name, text in {**environment.RANKS, **added.environment}.items():
        head += f"# set in the environment of all Ray workers: {name}={text}\n"
    if added.adaptive:
        path = folder / "adaptive.json"
        settings["sglang_speculative_adaptive_config"] = str(path)
        head += f"# {path} must hold: {json.dumps(added.adaptive)}\n"
    return head + yaml.safe_dump(settings)


def _numbers(text: str) -> list[int]:
    """Read `--candidate-steps`. Raises ConfigError."""
    if not all(part.isascii() and part.isdigit() for part in text.split(",")):
        raise ConfigError(f"--candidate-steps {text}: expected whole numbers and commas")
    steps = [int(part) for part in text.split(",")]
    if len(set(steps)) < len(steps):
        raise ConfigError(f"--candidate-steps {text}: expected different numbers")
    return steps


def _number(text: str) -> int | str:
    return int(text) if text.isdigit() else text
