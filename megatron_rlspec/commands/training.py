"""`rlspec train`, `sft`, `answer` and `replay`: their options, and the checks before anything heavy is imported."""

from __future__ import annotations

import argparse
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from megatron_rlspec import arguments
from megatron_rlspec.commands import doctor
from megatron_rlspec.config import Command, Config, ConfigError, load, load_replay, options
from megatron_rlspec.config.effects import option, unread
from megatron_rlspec.config.load import unknown_option
from megatron_rlspec.config.run_dir import claimed
from megatron_rlspec.config.tail import TailConfig
from megatron_rlspec.host import environment
from megatron_rlspec.host.interruption import Interruption
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.run.inputs import check_inputs, with_drafter
from megatron_rlspec.tasks import data
from megatron_rlspec.texts import printable

if TYPE_CHECKING:
    from megatron_rlspec.run.extension import Extensions

TORCHRUN = (
    "-m",
    "megatron_rlspec.host.launch",
    "--standalone",
    "--local-addr",
    "127.0.0.1",
    "--nproc-per-node",
)
MOST_RANKS = 16384  # Megatron takes 10 s to lay out so many
TRAIN_NOTES = """\
--ranks N starts N training processes on this machine, one for each GPU that trains. On several machines, start
`torchrun ... -m megatron_rlspec.cli COMMAND ...` on each, without --ranks.

With `train --dry-run` nothing starts: it prints parameters, memory and place of each of N ranks. Where a rank needs
more than --gpu-gib G, it refuses the layout.

Every option below can stand in the TOML file, as [section] key = value; the command line wins over the file.

  rlspec train --ranks 2 --config examples/quickstart/quickstart.toml --optimizer.lr 1e-5 --train.run_dir runs/mine

The run directory holds metrics.jsonl, events.jsonl, samples.jsonl, config.json, tensorboard/, checkpoints/, logs/ of
engines and, at the end, hf/: the policy and its drafter as a Hugging Face checkpoint; an EAGLE-3 drafter is in
hf_drafter/. Ctrl-C, SIGTERM and the end of the terminal (SIGHUP, except under nohup) end a run after its present
step, with a checkpoint; --train.resume true continues it.

Exit codes: 2, a mistake in what was asked; 1, the run failed; 130, 143 and 129, Ctrl-C, SIGTERM and SIGHUP."""

REPLAY_NOTES = """\
The options are those of the recorded run, except for what --config and the command line set; train.run_dir must be set.

  rlspec replay runs/recorded --ranks 2 --drafter.loss tv --train.run_dir runs/tv

With as many ranks as the run, and the same options, the drafter is bit for bit the one that the run trained.
docs/replay.md has the variants."""


# Of each command: what it does, an example, and the options that `--help` shows; `--help-all` shows the rest.
FIRST: dict[Command | Literal["answer"], tuple[str, str, str]] = {
    "train": (
        "GRPO with a drafter that learns in the same step. With --dry-run it only prints the memory of each rank.",
        "rlspec train --config run.toml --model.path MODEL --drafter.fresh true",
        "model.path data.path data.eval_path reward.kind drafter.fresh optimizer.lr train.steps train.run_dir",
    ),
    "sft": (
        "Supervised warm start of policy and drafter, or of the drafter alone.",
        "rlspec sft --ranks 2 --config run.toml --sft.path answers.jsonl \\\n    --sft.drafter_only true",
        "model.path sft.path sft.steps sft.drafter_only sft.held_out train.run_dir",
    ),
    "answer": (
        "Let a model write answers to prompts, as token ids: what a drafter is warmed up on.",
        "rlspec answer --model.path MODEL --data.path prompts.jsonl \\\n    --answer.path answers.jsonl",
        "model.path data.path answer.path answer.prompts rollout.samples_per_prompt rollout.temperature",
    ),
    "replay": (
        "Train a drafter again along a recorded run.",
        "rlspec replay runs/recorded --ranks 2 --drafter.loss tv \\\n    --train.run_dir runs/tv",
        "drafter.loss drafter.lr replay.policy_step train.run_dir",
    ),
}


def train(argv: list[str]) -> None:
    """Run `rlspec train`. Mistakes in options and files are found before the heavy imports."""
    if "--dry-run" in argv:
        return dry_run(argv)
    _run("train", argv)


def sft(argv: list[str]) -> None:
    """Run `rlspec sft`."""
    _run("sft", argv)


def replay(argv: list[str]) -> None:
    """Run `rlspec replay`."""
    _run("replay", argv)


def _run(command: Command, argv: list[str]) -> None:
    """Check what is asked, keep the run directory for this process, and run the command's loop.

    With --ranks above 1 this process checks, and becomes a torchrun of so many ranks.
    """
    ranks, argv = ranks_of(argv)
    started = environment.ranks_started(os.environ)
    if ranks and started:
        raise ConfigError(
            f"--ranks {ranks}: RANK and WORLD_SIZE={started} are set, as by torchrun; unset them, or leave --ranks out"
        )
    environment.prepare(os.environ)
    config = parse(command, argv, ranks)
    if ranks > 1:
        check_inputs(config, command)
        os.execv(
            sys.executable,
            [sys.executable, *TORCHRUN, str(ranks), "-m", "megatron_rlspec.cli", command, *argv],
        )
    with claimed(Path(config.train.run_dir), config.train.resume):
        check_inputs(config, command)
        if config.drafter.fresh and command != "replay":
            from megatron_rlspec.run.fresh import with_fresh_drafter

            config = with_fresh_drafter(config)
        interruption = Interruption().install()
        with interruption.translating():
            doctor.refuse_if_affected(config, engines=config.generates(command))
            from megatron_rlspec import loop
            from megatron_rlspec.train import runtime

            act = {"train": loop.train, "sft": loop.warm_start, "replay": loop.replay}[command]
            try:
                act(config, interruption, extensions(config))
            finally:
                runtime.leave()


def ranks_of(argv: list[str]) -> tuple[int, list[str]]:
    """Return the number of --ranks, 0 without it, and the other arguments. Raises ConfigError."""
    parser = _Parser(add_help=False)
    parser.add_argument("--ranks", type=int)
    known, rest = parser.parse_known_args(argv)
    if known.ranks is not None and not 1 <= known.ranks <= MOST_RANKS:
        raise ConfigError(f"--ranks {known.ranks}: expected a number from 1 to {MOST_RANKS}")
    return known.ranks or 0, rest


def extensions(config: Config) -> Extensions:
    """Return the extensions that a configuration asks for. With its defaults, on one rank, none is imported."""
    from megatron_rlspec.run.extension import Extensions

    drafter = None
    options = config.drafter
    if options.train and (
        options.separate or options.update_every > 1 or options.reward_weight != "none"
    ):
        from megatron_rlspec.extensions.drafter_schedules.online import OnlineLearner

        drafter = partial(OnlineLearner, config)
    migration = None
    migrates = config.tail.rebalance != "off" or config.tail.tp != (1,)
    if migrates:
        from megatron_rlspec.extensions.migration.wiring import RunMigration

        migration = partial(RunMigration, config)
    kinds = None
    several = (
        config.rollout.engine == "embedded" and (environment.ranks_started(os.environ) or 1) > 1
    )
    if migrates or several or config.spec.tree_budget != "none":
        from megatron_rlspec.extensions.kinds import KINDS

        kinds = KINDS
    return Extensions(drafter, migration, kinds)


def answer(argv: list[str]) -> None:
    """Run `rlspec answer`. Prints at its end what the file holds."""
    config = parse("answer", argv)
    longest = config.model.max_length
    hf_config = check_model(
        config.model.path, "serve", drafter=False, longest=longest, spare=config.spare
    )
    data.check_prompts(config.data.path, config.data)
    hf_config = with_drafter(config, hf_config)
    if DRAFTER not in hf_config and not hf_config.get("num_nextn_predict_layers"):
        config = config.model_copy(update={"spec": config.spec.model_copy(update={"mode": "off"})})
    with Interruption("; run the same command again to go on").install().translating():
        from megatron_rlspec.commands import answer

        print(answer.answer(config, hf_config))


def dry_run(argv: list[str]) -> None:
    """Print what each rank of `--ranks N` would hold, and start nothing. Needs config.json, but no weights or GPU."""
    ranks, argv = ranks_of(argv)
    ranks = ranks or environment.ranks_started(os.environ) or 1
    parser = _Parser(add_help=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--gpu-gib", type=float)
    options, rest = parser.parse_known_args(argv)
    if options.gpu_gib is not None and not options.gpu_gib > 0:
        raise ConfigError(f"--gpu-gib {options.gpu_gib:g}: expected a number above 0")
    config = parse("train", rest, ranks)
    sizes = {"longest": config.model.max_length, "spare": config.spare}
    hf_config = check_model(
        config.model.path, "train", drafter=False, weights=False, tokenizer=False, **sizes
    )
    if config.drafter.fresh:
        from megatron_rlspec.run.fresh import described

        config, hf_config = described(config, hf_config)
    else:
        hf_config = with_drafter(config, hf_config, weights=False)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # layers are described, not run: no GPU is touched
    from megatron_rlspec.train import dry_run

    for line in dry_run.report(config, hf_config, ranks, options.gpu_gib):
        print(line)


class _Parser(arguments.Parser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(
    command: Command | Literal["answer"], argv: list[str], ranks: int | None = None
) -> Config:
    """Return the configuration of a command line, for `ranks` or as many as torchrun started. Raises ConfigError."""
    parser = parser_of(command)
    known, unknown = parser.parse_known_args(argv)
    overrides = {
        name: value for name, value in vars(known).items() if name not in ("config", "run")
    }
    if unknown:
        name, equals, value = unknown[0].partition("=")
        if not name.startswith("-"):
            wanted = f"--{name} {value}" if equals else f"--config {name}"
            raise ConfigError(
                printable(f"unexpected word {unknown[0][:80]}; expected {wanted[:80]}")
            )
        raise ConfigError(unknown_option(name.removeprefix("--")))
    if len(known.config) > 1:
        raise ConfigError(
            "--config twice: expected one file; options of the command line win over it"
        )
    file = known.config[0] if known.config else None
    config = (
        load_replay(known.run, file, overrides) if command == "replay" else load(file, overrides)
    )
    for name in overrides:  # a file may serve several commands
        value, field = option(config, name)
        if command != "replay" and field is not None and value != field.default:
            if where := unread(config, command, name):
                raise ConfigError(f"{name} has no effect on {where}")
    if command == "answer":
        config.check_answer()
        # answers stay on the engine where they began
        return config.model_copy(update={"tail": TailConfig()})
    started = ranks or environment.ranks_started(os.environ)
    because = (
        f"torchrun started {started}"
        if started
        else "this is one process; --ranks N starts several"
    )
    if ranks:
        because = f"--ranks is {ranks}"
    config.check_run(command, started or 1, because)
    if config.tail != TailConfig():
        from megatron_rlspec.extensions.migration import checks

        checks.check(config, started or 1, because)
    return config


def parser_of(command: Command | Literal["answer"]) -> arguments.Parser:
    """Return the parser of one of the four commands: every option of the configuration as --section.key."""
    text, example, first = FIRST[command]
    parser = _Parser(
        prog=f"rlspec {command}",
        usage=f"rlspec {command} {'RUN ' if command == 'replay' else ''}[--config FILE] [--section.key value ...]",
        description=text,
        epilog=REPLAY_NOTES if command == "replay" else TRAIN_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        example=example,
        first=[
            "--config",
            *(["--ranks"] if command != "answer" else []),
            *(f"--{name}" for name in first.split()),
        ],
    )
    # argparse takes -1e-4 for an option
    parser._negative_number_matcher = re.compile(r"^-\.?(\d|inf|nan)")
    if command == "replay":
        parser.add_argument(
            "run", metavar="RUN", help="run directory of `rlspec train --train.record_gib 20`"
        )
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="TOML file, one table per section",
    )
    if command != "answer":
        help = "training processes, one a GPU (default 1)"
        parser.add_argument("--ranks", metavar="N", default=argparse.SUPPRESS, help=help)
    if command == "train":
        help = "start nothing: print parameters, memory and place of each rank"
        parser.add_argument("--dry-run", action="store_true", default=argparse.SUPPRESS, help=help)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for known in options():
        section = known.name.partition(".")[0]
        group = groups.setdefault(section, parser.add_argument_group(f"[{section}]"))
        text = f"{known.help} (default {known.shown})" if known.shown else known.help
        group.add_argument(
            f"--{known.name}",
            metavar=known.metavar,
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
        )
    return parser


train_parser, sft_parser, answer_parser, replay_parser = (
    partial(parser_of, name) for name in FIRST
)
