"""`rlspec COMMAND`: the list of commands, and `train` and `sft`. Other commands have modules of their own."""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NoReturn

from megatron_rlspec import data, doctor, environment, memory
from megatron_rlspec.config import Command, Config, ConfigError, load, load_replay, options
from megatron_rlspec.config.load import unknown_option
from megatron_rlspec.inputs import check_inputs, with_drafter
from megatron_rlspec.interruption import Interrupted, Interruption
from megatron_rlspec.weights.model_config import DRAFTER
from megatron_rlspec.weights.model_directory import check_model

COMMANDS = {
    "train": ("megatron_rlspec.cli:train", "GRPO with a co-trained drafter (start it under torchrun)"),
    "sft": ("megatron_rlspec.cli:sft", "supervised warm start of policy and drafter (under torchrun)"),
    "answer": ("megatron_rlspec.cli:answer", "let a model write answers to prompts: what a drafter is warmed up on"),
    "replay": ("megatron_rlspec.cli:replay", "train a drafter again along a recorded run (under torchrun)"),
    "serve": (
        "megatron_rlspec.rollout.sglang.server.foreground:main",
        "one SGLang engine with lossless verification, weight pushes and adaptive drafting",
    ),
    "profile": (
        "megatron_rlspec.rollout.profile:main",
        "measure how long an engine's decode rounds take: a cost table",
    ),
    "plan": ("megatron_rlspec.speculation.plan:main", "the best speculative config per batch, from a cost table"),
    "simulate": ("megatron_rlspec.simulate:main", "what a rollout would take on a cluster, under several policies"),
    "convert": ("megatron_rlspec.convert:main", "Hugging Face <-> Megatron checkpoints, MTP layer included"),
    "compare": ("megatron_rlspec.compare:main", "accept lengths of several drafters on one policy, paired"),
    "report": ("megatron_rlspec.report:main", "one HTML page of a run"),
    "slime": (
        "megatron_rlspec.integrations.slime.launch:main",
        "run a slime command line with a trained drafter and adaptive speculation",
    ),
    "doctor": ("megatron_rlspec.doctor:main", "which known defects the installed packages have"),
}
# Errors that are printed as one line -> exit code: 2 for a mistake of the user, 1 for a failure of the run. The modules
# are not imported for this: an error of a module can only occur after its import.
ERRORS = {
    "megatron_rlspec.config:ConfigError": 2,
    "megatron_rlspec.data:DataError": 2,
    "megatron_rlspec.weights.checkpoint:CheckpointError": 2,
    "megatron_rlspec.speculation.cost_table:CostTableError": 2,
    "megatron_rlspec.rollout.sglang.server.serve:ServeError": 2,
    "megatron_rlspec.integrations.patches:PatchError": 2,
    "megatron_rlspec.metrics:RecordError": 2,
    "megatron_rlspec.files:FileError": 2,
    "megatron_rlspec.rollout.sweep:SweepError": 1,
    "megatron_rlspec.engine:EngineError": 1,
    "megatron_rlspec.weights.push:PushError": 1,
    "megatron_rlspec.weights.contract:HealthError": 1,
    "megatron_rlspec.train.checkpoint:SaveError": 1,
    "megatron_rlspec.session:RunStopped": 1,
}
# Packages that a bare `pip install` leaves out -> the extra that brings each.
EXTRAS = {
    "torch": "train",
    "megatron": "train",
    "transformers": "train",
    "sglang": "sglang",
    "matplotlib": "plot",
    "gguf": "gguf",
}
# Six warnings that Megatron prints at its import. They are dropped on a machine without a GPU, where the fallback is
# intended. On a GPU they stay, because training is slow there without these packages.
MEGATRON_FALLS_BACK = r"(Transformer Engine and )?Apex (is|are) not installed\. Falling back to "
MEGATRON_OWN_DEFAULT = "full scope is deprecated"  # megatron-core's warning about its own default of cuda_graph_scope
COMPUTING = ("train", "sft", "replay", "answer")  # commands that compute with the model in their own process
GPU_DEVICE = "/dev/nvidiactl"
MOST_RANKS = 16384  # Megatron takes 10 s to lay out so many
# The disk is full or read-only, or a path is of no use: no bug of ours.
MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG, errno.EEXIST}
MACHINE |= {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTEMPTY, errno.EMFILE}
TRAIN_NOTES = """\
With --dry-run [--ranks N] nothing starts: it prints parameters, memory and place of each of N ranks. Where a rank needs
more than --gpu-gib G, it refuses the layout.

Every option below can stand in the TOML file, as [section] key = value; the command line wins over the file.

  torchrun --standalone --nproc-per-node 2 -m megatron_rlspec.cli train \\
      --config examples/quickstart/quickstart.toml --optimizer.lr 1e-5 --train.run_dir runs/mine

The run directory holds metrics.jsonl, events.jsonl, samples.jsonl, config.json, tensorboard/, checkpoints/, logs/ of
engines and, at the end, hf/: the policy and its drafter as a Hugging Face checkpoint; an EAGLE-3 drafter is in
hf_drafter/. Ctrl-C and SIGTERM end a run after its present step, with a checkpoint; --train.resume true continues it.

Exit codes: 2, a mistake in what was asked; 1, the run failed; 130 and 143, Ctrl-C and SIGTERM."""

REPLAY_NOTES = """\
The options are those of the recorded run, except for what --config and the command line set; train.run_dir must be set.

  torchrun --standalone --nproc-per-node 2 -m megatron_rlspec.cli replay runs/recorded \\
      --drafter.loss tv --train.run_dir runs/tv

With as many ranks as the run, and the same options, the drafter is bit for bit the one that the run trained.
docs/replay.md has the variants."""


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: rlspec COMMAND [options]      rlspec COMMAND --help shows its options\n")
        for name, (_, text) in COMMANDS.items():
            print(f"  {name:9} {text}")
        sys.exit(0 if argv else 2)
    if argv[0] not in COMMANDS:
        sys.exit(_complain(f"unknown command {argv[0]!r}; one of: {', '.join(COMMANDS)}", 2))
    if not os.path.exists(GPU_DEVICE):
        warnings.filterwarnings("ignore", MEGATRON_FALLS_BACK, UserWarning)
        if argv[0] in COMPUTING:
            memory.keep_freed()
    warnings.filterwarnings("ignore", MEGATRON_OWN_DEFAULT, UserWarning)
    module, _, function = COMMANDS[argv[0]][0].partition(":")
    sys.exit(run(lambda: getattr(importlib.import_module(module), function)(argv[1:])))


def run(act: Callable[[], object]) -> int:
    """Run a command and return its exit code. Prints one line for an error that has an `exit_code`; raises others."""
    try:
        ended = act()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more when it ends
        return 1  # the program that read the output, such as `head`, has ended
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS or importlib.util.find_spec(package):
            raise  # not one of the packages that may be missing
        install = f"pip install 'megatron_rlspec[{EXTRAS[package]}]'"
        return _complain(f"this command needs {package}, which is not installed here: {install}", 2)
    except (KeyboardInterrupt, Interrupted) as error:
        return _complain(str(error) or "interrupted", getattr(error, "exit_code", 130))
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        return _complain(_message(error), code, every_rank=getattr(error, "every_rank", False))
    return ended if isinstance(ended, int) else 0


def exit_code(error: Exception) -> int | None:
    """Return 2 for a mistake of the user, 1 for a run that failed, None for a bug, which needs its traceback."""
    for name, code in ERRORS.items():
        module, _, kind = name.partition(":")
        if module in sys.modules and isinstance(error, getattr(sys.modules[module], kind)):
            return getattr(error, "exit_code", code)
    return 1 if isinstance(error, OSError) and error.errno in MACHINE or _lost_rank(error) else None


def _lost_rank(error: Exception) -> bool:
    """Return whether a collective call failed because another rank ended. That rank, or torchrun, prints the reason."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "DistBackendError" in names or (isinstance(error, RuntimeError) and "gloo/" in str(error))


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if _lost_rank(error):
        return f"another rank ended or cannot be reached ({str(error)[:200]})"
    return str(error)


def train(argv: list[str]) -> None:
    """Run `rlspec train`. Mistakes in options and files are found before the heavy imports."""
    if "--dry-run" in argv:
        return dry_run(argv)
    environment.prepare(os.environ)
    config = parse("train", argv)
    check_inputs(config, "train")
    interruption = Interruption().install()
    with interruption.translating():
        doctor.refuse_if_affected(config, engines=True)
        from megatron_rlspec import loop

        loop.train(config, interruption)


def sft(argv: list[str]) -> None:
    """Run `rlspec sft`."""
    environment.prepare(os.environ)
    config = parse("sft", argv)
    check_inputs(config, "sft")
    interruption = Interruption().install()
    with interruption.translating():
        doctor.refuse_if_affected(config, engines=config.sft.eval_every > 0 and bool(config.data.eval_path))
        from megatron_rlspec import loop

        loop.warm_start(config, interruption)


def answer(argv: list[str]) -> None:
    """Run `rlspec answer`. Prints at its end what the file holds."""
    config = parse("answer", argv)
    hf_config = check_model(config.model.path, "serve", drafter=False, longest=config.model.max_length)
    data.check_prompts(config.data.path, config.data)
    hf_config = with_drafter(config, hf_config)
    if DRAFTER not in hf_config and not hf_config.get("num_nextn_predict_layers"):
        config = config.model_copy(update={"spec": config.spec.model_copy(update={"mode": "off"})})
    with Interruption().install().translating():
        from megatron_rlspec import answer

        print(answer.answer(config, hf_config))


def replay(argv: list[str]) -> None:
    """Run `rlspec replay`."""
    environment.prepare(os.environ)
    config = parse("replay", argv)
    draws = config.replay.policy_step >= 0
    check_inputs(config, "replay")
    interruption = Interruption().install()
    with interruption.translating():
        doctor.refuse_if_affected(config, engines=draws)
        from megatron_rlspec import loop

        loop.replay(config, interruption)


def dry_run(argv: list[str]) -> None:
    """Print what each rank of `--ranks N` would hold, and start nothing. Needs config.json, but no weights or GPU."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--ranks", type=int, default=environment.ranks_started(os.environ) or 1)
    parser.add_argument("--gpu-gib", type=float)
    options, rest = parser.parse_known_args(argv)
    if not 1 <= options.ranks <= MOST_RANKS:
        raise ConfigError(f"--ranks {options.ranks}: expected a number from 1 to {MOST_RANKS}")
    if options.gpu_gib is not None and not options.gpu_gib > 0:
        raise ConfigError(f"--gpu-gib {options.gpu_gib:g}: expected a number above 0")
    config = parse("train", rest, options.ranks)
    longest = config.model.max_length
    hf_config = check_model(config.model.path, "train", drafter=False, weights=False, tokenizer=False, longest=longest)
    hf_config = with_drafter(config, hf_config, weights=False)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # layers are described, not run: no GPU is touched
    from megatron_rlspec.train import dry_run

    for line in dry_run.report(config, hf_config, options.ranks, options.gpu_gib):
        print(line)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(command: Command | Literal["answer"], argv: list[str], ranks: int | None = None) -> Config:
    """Return the configuration of a command line, for `ranks` or as many as torchrun started. Raises ConfigError."""
    parser = _Parser(
        prog=f"rlspec {command}",
        usage=f"rlspec {command} {'RUN ' if command == 'replay' else ''}[--config FILE] [--section.key value ...]",
        description=COMMANDS[command][1],
        epilog=REPLAY_NOTES if command == "replay" else TRAIN_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if command == "replay":
        parser.add_argument("run", metavar="RUN", help="run directory of `rlspec train --train.record true`")
    parser.add_argument("--config", metavar="FILE", help="TOML file, one table per section")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options():
        section = option.name.partition(".")[0]
        group = groups.setdefault(section, parser.add_argument_group(f"[{section}]"))
        text = f"{option.help} (default {option.shown})" if option.shown else option.help
        group.add_argument(
            f"--{option.name}", metavar=option.metavar, default=argparse.SUPPRESS, help=text.replace("%", "%%")
        )
    known, unknown = parser.parse_known_args(list(_joined(argv)))
    overrides = {name: value for name, value in vars(known).items() if name not in ("config", "run")}
    if unknown:
        raise ConfigError(unknown_option(unknown[0].removeprefix("--").partition("=")[0]))
    config = load_replay(known.run, known.config, overrides) if command == "replay" else load(known.config, overrides)
    if command == "answer":
        config.check_answer()
    elif ranks:
        config.check_run(command, ranks, f"--ranks is {ranks}")
    elif started := environment.ranks_started(os.environ):
        config.check_run(command, started, f"torchrun started {started}")
    else:
        config.check_run(command, 1, "this is one process, which torchrun did not start")
    return config


def _joined(argv: Sequence[str]) -> Iterator[str]:
    """Write `--name -1e-4` as `--name=-1e-4`, because argparse takes a word with a minus sign for an option."""
    waiting = ""
    for part in argv:
        if waiting and part.startswith("-") and not part.startswith("--"):
            yield f"{waiting}={part}"
            waiting = ""
            continue
        if waiting:
            yield waiting
        waiting = part if part.startswith("--") and "=" not in part else ""
        if not waiting:
            yield part
    if waiting:
        yield waiting


def _complain(message: str, code: int, every_rank: bool = False) -> int:
    """Print the message, on rank 0 alone unless it can concern one rank only. Returns `code`."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or not rank.isdigit():
        print(f"rlspec: {' '.join(message.split())}", file=sys.stderr, flush=True)
    elif every_rank:
        print(f"rlspec: rank {rank}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
