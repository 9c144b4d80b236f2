"""`rlspec`, which writes the options that a command reads, once its command line was checked, to the file $READ.

SGLang's engines are laid out for a machine of two GPUs, and their command lines are made, but none is started.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from megatron_rlspec import cli
from megatron_rlspec.commands import training
from megatron_rlspec.config import Config
from megatron_rlspec.config.base import Section

SECTIONS = {type(field.default): name for name, field in Config.model_fields.items()}
CHECKS = {"commands.training", "commands.doctor", "run.inputs", "extensions.migration.checks", "custom"}
GPUS = {"is_available": lambda: True, "device_count": lambda: 2, "get_device_capability": lambda index: (9, 0)}
GPUS |= {"get_device_properties": lambda index: mock.Mock(total_memory=80 << 30)}
found: set[str] = set()


def reader() -> str:
    """Return the module that reads an option, perhaps by a property of its section."""
    frame = sys._getframe(2)
    while str(frame.f_globals.get("__name__")).startswith("megatron_rlspec.config"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).removeprefix("megatron_rlspec.")


def read(section: Section, name: str) -> object:
    kind = type(section)
    if kind in SECTIONS and name in kind.model_fields and reader() not in CHECKS:
        found.add(f"{SECTIONS[kind]}.{name}")
    return object.__getattribute__(section, name)


def tracing(parse: Callable[..., Config]) -> Callable[..., Config]:
    def parsed(*arguments: object) -> Config:
        config = parse(*arguments)
        Section.__getattribute__ = read
        if config.rollout.engine == "sglang" and sys.argv[1] != "sft":
            served(config)
            sys.exit(0)
        return config

    return parsed


def served(config: Config) -> None:
    """Compute what a run that generates with SGLang's engines computes before it starts them."""
    from megatron_rlspec.conversion.drafter_files import read_model
    from megatron_rlspec.rollout.placement import GpuLayout
    from megatron_rlspec.run import loading

    hf_config, tensors = read_model(config.model.path)
    extensions = training.extensions(config)
    layout = GpuLayout()
    if sys.argv[1] != "answer":
        with mock.patch.multiple(torch.cuda, **GPUS):
            layout = loading.place(config, hf_config, tensors)
    engines = extensions.kind("sglang").start(config, Path(config.train.run_dir), layout)
    with mock.patch.multiple(torch.cuda, **GPUS):
        for index, name in enumerate(engines.sizes):
            engines._command(name, index)
    engines._connected(mock.Mock(url="http://127.0.0.1:1"))
    if extensions.migration is not None:
        extensions.migration(hf_config, engines)


training.parse = tracing(training.parse)
try:
    cli.main()
finally:
    Path(os.environ["READ"]).write_text(json.dumps(sorted(found)))
