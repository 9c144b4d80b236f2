"""`rlspec train`, `sft`, `answer` and `replay`: their options, and the checks before anything heavy is imported.

Imports of torch, Megatron and the run stand inside functions: a mistake in an option is then told within a second, and
the environment is prepared before CUDA and NCCL read it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from megatron_rlspec import arguments
from megatron_rlspec.commands import COMMANDS, doctor
from megatron_rlspec.config import Command, Config, ConfigError, load, load_replay, options
from megatron_rlspec.config.load import unknown_option
from megatron_rlspec.config.run_dir import claimed
from megatron_rlspec.host import environment
from megatron_rlspec.host.interruption import Interruption
from megatron_rlspec.models import hub
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.run.inputs import (
    check_inputs,
    leaves_engines_open,
    model_config,
    naming_paths,
    with_drafter,
)
from megatron_rlspec.tasks import data
from megatron_rlspec.texts import printable

if TYPE_CHECKING:
    from megatron_rlspec.run.extension import DrafterScheduleBuilder, Extensions

Name = Command | Literal["answer"]
# torchrun on this machine alone, by `host/launch.py`; the number of ranks follows
TORCHRUN = (
    "-m",
    "megatron_rlspec.host.launch",
    "--standalone",
    "--local-addr",
    "127.0.0.1",
    "--nproc-per-node",
)
NOTES = """\
Every option can stand in the TOML file, as [section] key = value; the command line wins over the file.
docs/configuration.md has the options, docs/runs.md the files of a run and its exit codes."""


# The most used options of each command, which `--help` shows; `--help-all` shows all.
MOST_USED: dict[Name, str] = {
    "train": "model.path data.path data.eval_path reward.kind rollout.prompts_per_step rollout.samples_per_prompt "
    "rollout.max_new_tokens rollout.temperature spec.mode optimizer.lr train.steps train.run_dir train.resume "
    "log.sinks",
    "sft": "model.path sft.path sft.steps sft.drafter_only sft.held_out train.run_dir",
    "answer": "model.path data.path answer.path answer.prompts rollout.samples_per_prompt rollout.temperature",
    "replay": "drafter.loss drafter.lr replay.policy_step train.run_dir",
}


def train(argv: list[str]) -> None:
    """Run `rlspec train`. Mistakes in options and files are found before the heavy imports."""
    if "--dry-run" in argv:
        return dry_run(argv)
    _run("train", argv)


def _run(command: Command, argv: list[str]) -> None:
    """Check the command line, lock the run directory for this process, and run the command's loop.

    With --ranks N above 1 this process checks, and then becomes a torchrun that starts N ranks of this command. Every
    rank runs this function without --ranks.
    """
    ranks, argv = ranks_of(argv)
    started = environment.ranks_started(os.environ)
    if ranks and started:
        raise ConfigError(
            f"--ranks {ranks}: RANK and WORLD_SIZE={started} are set, as by torchrun; unset them, or leave --ranks out"
        )
    environment.prepare(os.environ)  # CUDA and NCCL read it once, so before torch is imported
    config = parse(command, argv, ranks)
    if ranks > 1:
        # Checked here, where one process prints one line. The ranks check again, under the lock.
        _check(config, command)
        words = [*TORCHRUN, str(ranks), "-m", "megatron_rlspec.cli", command, *argv]
        os.execv(sys.executable, [sys.executable, *words])
    with claimed(Path(config.train.run_dir), config.train.resume):
        _check(config, command)
        # before the configuration is changed: in a changed copy options count as set by the user
        engines_open = leaves_engines_open(config)
        if config.drafter.fresh and command != "replay":
            from megatron_rlspec.run.fresh import with_fresh_drafter

            config = with_fresh_drafter(config)
        # before the heavy imports, so that Ctrl-C during them ends with one line
        interruption = Interruption().install()
        with interruption.errors_as_interrupted():
            rollout = config.rollout
            starts_sglang = rollout.engine == "sglang" and not rollout.urls
            doctor.check_versions(starts_sglang=starts_sglang and config.generates(command))
            from megatron_rlspec import loop
            from megatron_rlspec.run.loading import settle
            from megatron_rlspec.train import runtime

            config = settle(config, command, engines_open)
            run_loop = {"train": loop.train, "sft": loop.warm_start, "replay": loop.replay}[command]
            try:
                run_loop(config, interruption, extensions(config))
            finally:
                runtime.leave()  # destroys the process groups, also after an error: otherwise NCCL prints a warning


def _check(config: Config, command: Command) -> None:
    """Check the files that the run and its extensions read. Raises ConfigError, DataError or RoundCostError."""
    check_inputs(config, command)
    if config.tail.cost_table:
        from megatron_rlspec.extensions.migration.plans import round_costs

        round_costs.read(config.tail.cost_table, config.tail.tp)


sft = partial(_run, "sft")
replay = partial(_run, "replay")


def ranks_of(argv: list[str]) -> tuple[int, list[str]]:
    """Return the number of --ranks, 0 without it, and the other arguments. Raises ConfigError.

    It is taken out of `argv` because the ranks get the other arguments, and must not start ranks themselves.
    """
    parser = _Parser(add_help=False)
    parser.add_argument("--ranks", type=int)
    known, rest = parser.parse_known_args(argv)
    ranks = known.ranks
    if ranks is None:
        return 0, rest
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks}: expected a number from 1")
    return ranks, rest


def migrates(config: Config) -> bool:
    """Return whether running samples may move between engines, or engines may change their tensor-parallel size."""
    return config.tail.rebalance or config.tail.tp != (1,)


def extensions(config: Config) -> Extensions:
    """Return the extensions that a configuration asks for. With the default options on one rank none is imported.

    The fields of `Extensions` (`run/extension.py`) are None where the core does without an extension.
    """
    from megatron_rlspec.run.extension import Extensions

    schedule: DrafterScheduleBuilder | None = None
    drafter = config.drafter
    has_schedule = drafter.separate or drafter.update_every > 1 or drafter.reward_weight != "none"
    if drafter.train and has_schedule:
        from megatron_rlspec.extensions.drafter_schedules.online import OnlineLearner

        schedule = OnlineLearner
    elif drafter.train and drafter.fresh and not config.replay.run:
        from megatron_rlspec.extensions.drafter_schedules.fresh import FreshLearner

        schedule = FreshLearner

    migration = None
    if migrates(config):
        from megatron_rlspec.extensions.migration import builders

        migration = partial(builders.migration, config)

    kinds = None
    embedded = config.rollout.engine == "embedded"
    several_ranks = environment.ranks_started(os.environ) > 1
    # Embedded engines of several ranks are one fleet, which rank 0 leads: it is part of the extension `migration`.
    if migrates(config) or (embedded and several_ranks):
        from megatron_rlspec.extensions.kinds import KINDS

        kinds = KINDS
    return Extensions(schedule, migration, kinds)


def answer(argv: list[str]) -> None:
    """Run `rlspec answer`, in one process. Prints at its end what the file holds (`commands/answer.py`)."""
    config = parse("answer", argv)
    with naming_paths(config):
        hf_config = model_config(config, "serve")
        data.check_prompts(config.data.path, config.data)
    hf_config = with_drafter(config, hf_config)
    # a model without a drafter: EAGLE-3's is under DRAFTER, MTP layers are counted by the policy's config.json
    if not (DRAFTER in hf_config or hf_config.get("num_nextn_predict_layers")):
        plain = config.spec.model_copy(update={"mode": "off"})
        config = config.model_copy(update={"spec": plain})
    with Interruption("; run the same command again to go on").install().errors_as_interrupted():
        from megatron_rlspec.commands import answer

        print(answer.answer(config, hf_config))


def dry_run(argv: list[str]) -> None:
    """Print what each rank of `--ranks N` would hold, and start nothing. Needs config.json, but no weights or GPU."""
    ranks, argv = ranks_of(argv)
    ranks = ranks or environment.ranks_started(os.environ) or 1
    gpu_gib = parser_of("train").parse_known_args(argv)[0].gpu_gib
    if gpu_gib is not None and not gpu_gib > 0:
        raise ConfigError(f"--gpu-gib {gpu_gib:g}: expected a number above 0")
    config = parse("train", argv, ranks)
    with naming_paths(config):
        hf_config = model_config(config, "train", weights=False, tokenizer=False)
    engines_open = leaves_engines_open(config)
    if config.drafter.fresh:
        from megatron_rlspec.run.fresh import describe_fresh_drafter

        config, hf_config = describe_fresh_drafter(config, hf_config)
    else:
        hf_config = with_drafter(config, hf_config, weights=False)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # layers are described, not run: no GPU is touched
    from megatron_rlspec.train import dry_run

    for line in dry_run.report(config, hf_config, ranks, gpu_gib, engines_open):
        print(line)


class _Parser(arguments.Parser):
    """Raises ConfigError for a mistake, where `arguments.Parser` ends the process: rank 0 alone must print it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(command: Name, argv: list[str], ranks: int | None = None) -> Config:
    """Return the configuration of a command line, checked for this command. Raises ConfigError.

    ranks  number of --ranks; 0 or None: as many as torchrun started, or one
    """
    parsed, unknown = parser_of(command).parse_known_args(argv)
    if unknown:
        raise ConfigError(_unknown_word(unknown[0]))
    # Options `section.key` have no default in the parser, so only those that the user gave are here. The other keys are
    # taken out below.
    overrides = vars(parsed)
    files = overrides.pop("config") or [None]
    if len(files) > 1:
        raise ConfigError(
            "--config twice: expected one file; options of the command line win over it"
        )
    file = files[0]
    for name in ("dry_run", "gpu_gib"):  # `dry_run` reads them
        overrides.pop(name, None)
    if command == "replay":
        recorded = overrides.pop("run")
        config = load_replay(recorded, file, overrides)
    else:
        config = load(file, overrides)
    config = _with_local_models(config)
    if command == "answer":
        config.check_answer()
        # No answer moves to another engine: `rlspec answer` has no migration.
        return config.model_copy(update={"tail": Config().tail})
    started = ranks or environment.ranks_started(os.environ)
    if ranks:
        why_so_many = f"--ranks is {ranks}"
    elif started:
        why_so_many = f"torchrun started {started}"
    else:
        why_so_many = "this is one process; --ranks N starts several"
    config.check_run(command, started or 1, why_so_many)
    return config


def _with_local_models(config: Config) -> Config:
    """Return `config` with directories in place of names on the Hub; downloads the models. Raises CheckpointError."""
    model = config.model.model_copy(update={"path": hub.local(config.model.path)})
    drafter = config.drafter.model_copy(update={"path": hub.local(config.drafter.path)})
    return config.model_copy(update={"model": model, "drafter": drafter})


def _unknown_word(word: str) -> str:
    """Return the message for a word of the command line that no option takes."""
    name, equals, value = word.partition("=")
    if name.startswith("-"):
        return unknown_option(name.removeprefix("--"))
    wanted = f"--{name} {value}" if equals else f"--config {name}"
    return printable(f"unexpected word {word[:80]}; expected {wanted[:80]}")


def parser_of(command: Name) -> arguments.Parser:
    """Return the parser of one of the four commands: every option of the configuration as --section.key."""
    about = COMMANDS[command]
    run = "RUN " if command == "replay" else ""
    parser = _Parser(
        prog=f"rlspec {command}",
        usage=f"rlspec {command} {run}[--config FILE] [--section.key value ...]",
        description=about.text,
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        example=about.example,
        first=["--ranks", "--dry-run", *(f"--{name}" for name in MOST_USED[command].split())],
    )
    # argparse's own pattern has no exponents, no inf and no nan: it would take -1e-4 for an option. The attribute is a
    # private one of argparse.
    parser._negative_number_matcher = re.compile(r"^-\.?(\d|inf|nan)")
    add = parser.add_argument
    if command == "replay":
        add("run", metavar="RUN", help="run directory of `rlspec train --train.record_gib 20`")
    add("--config", metavar="FILE", action="append", help="TOML file, one table per section")
    if command != "answer":
        add(
            "--ranks",
            metavar="N",
            default=argparse.SUPPRESS,
            help="training processes, one a GPU (default 1)",
        )
    if command == "train":
        add(
            "--dry-run",
            action="store_true",
            help="start nothing: print parameters and memory of each pipeline stage's ranks",
        )
        add(
            "--gpu-gib",
            metavar="X",
            type=float,
            help="with --dry-run: refuse what does not fit in GPUs of X GiB",
        )
        parser.needs("--dry-run", "--gpu-gib")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options():
        section = option.name.partition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(f"[{section}]")
        text = f"{option.help} (default {option.shown})" if option.shown else option.help
        # Values stay text, without a default: `config.load` converts them, and must tell what the user gave.
        groups[section].add_argument(
            f"--{option.name}",
            metavar=option.metavar,
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),  # argparse formats help texts with %
        )
    return parser
