"""`rlspec COMMAND`: one line per command here; each command's own module parses what follows it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from megatron_rlspec.config import Config, ConfigError, load, options

COMMANDS = {
    "train": ("megatron_rlspec.cli:train", "GRPO with a co-trained drafter (start it under torchrun)"),
    "sft": ("megatron_rlspec.cli:sft", "supervised warm start of policy and drafter (under torchrun)"),
    "serve": ("megatron_rlspec.rollout.sglang.serve:main", "one SGLang engine with our verifier, pushes and policy"),
    "profile": ("megatron_rlspec.rollout.profile:main", "measure an engine's cost table"),
    "plan": ("megatron_rlspec.spec.plan:main", "the best speculative config per batch, from a cost table"),
    "convert": ("megatron_rlspec.weights.convert:main", "Hugging Face <-> Megatron checkpoints, MTP layer included"),
    "report": ("megatron_rlspec.report:main", "one HTML page of a run"),
    "slime": ("megatron_rlspec.integrations.slime:main", "run a slime command line with a drafter that learns"),
    "doctor": ("megatron_rlspec.doctor:main", "which known defects the installed engines have"),
}
TRAIN_NOTES = """\
Every option below can stand in the TOML file, as [section] key = value; the command line wins over the file.

  torchrun --standalone --nproc-per-node 2 -m megatron_rlspec.cli train \\
      --config examples/quickstart/quickstart.toml --optimizer.lr 1e-5 --train.run_dir runs/mine

The run directory holds metrics.jsonl, events.jsonl, config.json, samples/, tensorboard/, engine logs and, at the end,
hf/: the policy and its drafter as a Hugging Face checkpoint."""


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: rlspec COMMAND [options]      rlspec COMMAND --help tells more\n")
        for name, (_, text) in COMMANDS.items():
            print(f"  {name:9} {text}")
        sys.exit(0 if argv else 2)
    if argv[0] not in COMMANDS:
        sys.exit(_complain(f"unknown command {argv[0]!r}; one of: {', '.join(COMMANDS)}"))
    module, _, function = COMMANDS[argv[0]][0].partition(":")
    command: Callable[[list[str]], int | None] = getattr(importlib.import_module(module), function)
    try:
        sys.exit(command(argv[1:]) or 0)
    except ConfigError as error:
        sys.exit(_complain(str(error)))


def train(argv: list[str]) -> None:
    config = _config("train", argv)  # before the heavy imports: a mistake is told at once
    from megatron_rlspec import loop

    loop.train(config)


def sft(argv: list[str]) -> None:
    config = _config("sft", argv)
    from megatron_rlspec import loop

    loop.warm_start(config)


def _config(command: str, argv: list[str]) -> Config:
    parser = argparse.ArgumentParser(
        prog=f"rlspec {command}",
        usage=f"rlspec {command} [--config FILE] [--section.key value ...]",
        description=COMMANDS[command][1],
        epilog=TRAIN_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file, one table per section")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, _, default, text in options():
        section = name.partition(".")[0]
        group = groups.setdefault(section, parser.add_argument_group(f"[{section}]"))
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        help_text = f"{text} (default {shown!s})" if shown != "" else text
        group.add_argument(f"--{name}", metavar="…", default=argparse.SUPPRESS, help=help_text.replace("%", "%%"))
    known, unknown = parser.parse_known_args(argv)
    overrides = {name: value for name, value in vars(known).items() if name != "config"}
    if unknown:
        dotted = unknown[0].removeprefix("--").partition("=")[0]
        load(None, {dotted: ""})  # raises, and names the nearest option
        raise ConfigError(f"unknown argument {unknown[0]!r}")
    return load(known.config, overrides)


def _complain(message: str) -> int:
    print(f"rlspec: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
