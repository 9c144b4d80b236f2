"""`rlspec COMMAND`: run one of the commands, and print one line for an error of the user or of the machine.

This module imports neither torch nor the module of a command: `--help` and mistakes in a command's name are answered at
once. A bug of the package keeps its traceback.
"""

from __future__ import annotations

import errno
import functools
import importlib
import importlib.util
import logging
import os
import resource
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rlspec import __version__, files, texts
from megatron_rlspec.commands import COMMANDS
from megatron_rlspec.host import memory
from megatron_rlspec.host.interruption import Interrupted

# Packages that a bare `pip install` leaves out -> the extra that brings each (`pyproject.toml`).
EXTRAS = {
    "torch": "train",
    "megatron": "train",
    "transformers": "train",
    "matplotlib": "train",
    "pyarrow": "train",
    "math_verify": "train",
    "sglang": "engine",
}
# Begins warnings that Megatron prints at its import. They are dropped on a machine without a GPU, where the fallback is
# intended. On a GPU they stay, because training is slow there without these packages.
MEGATRON_FALLS_BACK = r"(Transformer Engine and )?Apex (is|are) not installed\. Falling back to "
# megatron-core's warning about its own default of cuda_graph_scope
MEGATRON_OWN_DEFAULT = "full scope is deprecated"
# Loggers of others, and what they log in every run: megatron-core 0.19 of its GPTModel, torch without a GPU.
FOREIGN = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}
# commands whose process trains or generates with a model, and keeps freed memory for its next tensors; `compare`
# generates, too, but does without
COMPUTING = ("train", "sft", "replay", "answer")
# a file of NVIDIA's driver: tells of a GPU without an import of torch
GPU_DEVICE = "/dev/nvidiactl"


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command, and exit with its code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        code = run(lambda: print(overview()))
        sys.exit(code if argv else 2)
    if argv[0] == "--version":
        sys.exit(run(lambda: print(__version__)))
    if argv[0] not in COMMANDS:
        names = ", ".join(COMMANDS)
        sys.exit(_complain(f"unknown command {argv[0]!r}; expected one of: {names}", 2))
    # The lines below come before the command is imported: Megatron warns at its import, and OpenMP reads its variable
    # once.
    if not os.path.exists(GPU_DEVICE):
        warnings.filterwarnings("ignore", MEGATRON_FALLS_BACK, UserWarning)
        # OpenMP's idle threads would spin. Where others use the cores, too, a step takes 40 times as long.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if argv[0] in COMPUTING:
            memory.keep_freed()
    warnings.filterwarnings("ignore", MEGATRON_OWN_DEFAULT, UserWarning)
    drop_foreign_lines()
    sys.exit(run(lambda: named(COMMANDS[argv[0]].run)(argv[1:])))


def drop_foreign_lines() -> None:
    """Drop the log lines of `FOREIGN`, which a user cannot act on."""
    for name, text in FOREIGN.items():
        logging.getLogger(name).addFilter(functools.partial(_lacks, text))


def _lacks(text: str, record: logging.LogRecord) -> bool:
    """Return whether a record lacks `text`: logging drops a record for which a filter returns False."""
    return text not in str(record.msg)


def named(name: str) -> Any:
    """Return what `module:function` of this package names (`commands.Command.run`); imports its module."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"megatron_rlspec.{module}"), function)


def overview() -> str:
    """Return the list of commands, each with an example.

    It is at most 80 columns wide as long as the texts keep the lengths of `commands.Command`.
    """
    lines = [f"rlspec {__version__}: RL post-training with speculative decoding", ""]
    for name, command in COMMANDS.items():
        lines += [f"  {name:10} {command.text}", f"      {command.example}"]
    lines += ["", "Most used options: `rlspec COMMAND --help`. Every option: `--help-all`."]
    return "\n".join(lines)


def run(act: Callable[[], object]) -> int:
    """Run a command and return its exit code: what `act` returns if that is an int, else 0.

    `act` must not return a bool, which is an int: True would be exit code 1.

    Prints one line for an error of which `exit_code` knows the code. Raises other errors, for their traceback.
    """
    # The output is flushed inside the outer `try`: a pipe whose reader has ended shows only then.
    try:
        try:
            result = act()
        except SystemExit:  # argparse ends so after a help text
            _flush()
            raise
        _flush()
    except BrokenPipeError:
        # Python flushes once more when it ends, and would print this error then
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1  # the program that read the output, such as `head`, has ended
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS or importlib.util.find_spec(package):
            raise  # no package of an extra, or one that is installed and lacks a module: a bug
        install = f"pip install 'megatron_rlspec[{EXTRAS[package]}]'"
        return _complain(f"this command needs {package}, which is not installed here: {install}", 2)
    except (KeyboardInterrupt, Interrupted) as error:
        return _complain(str(error) or "interrupted", getattr(error, "exit_code", 130))
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        # An error with `every_rank`, or an allocation that failed, can concern one rank alone, which must print it
        # itself. Most other errors happen on every rank alike, and rank 0 prints them.
        every_rank = getattr(error, "every_rank", False) or _out_of_memory(error)
        return _complain(_message(error), code, every_rank)
    return result if isinstance(result, int) else 0


def _flush() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def exit_code(error: Exception) -> int | None:
    """Return 2 for a mistake of the user, 1 for a run that failed, None for a bug, which needs its traceback.

    Our own classes of errors state their code.
    """
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    # The disk is full or read-only, or a path is of no use: no bug of ours. Libraries also raise OSErrors of their own,
    # without a number.
    of_machine = isinstance(error, OSError) and error.errno is not None
    if of_machine or _lost_rank(error) or _out_of_memory(error) or _unloadable(error):
        return 1
    return None


def _lost_rank(error: Exception) -> bool:
    """Return whether a collective call failed because another rank ended. That rank, or torchrun, prints the reason."""
    # by name, here and below: this module does not import torch
    of_nccl = any(kind.__name__ == "DistBackendError" for kind in type(error).__mro__)
    # gloo raises a plain RuntimeError that begins with the file of its own source
    return of_nccl or (isinstance(error, RuntimeError) and "gloo/" in str(error))


def _out_of_memory(error: Exception) -> bool:
    """Return whether an allocation failed: of numpy or Python, or of torch on a GPU or a CPU."""
    of_torch = isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)
    return isinstance(error, MemoryError) or of_torch or type(error).__name__ == "OutOfMemoryError"


def _unloadable(error: Exception) -> bool:
    """Return whether the system's loader refused a library of an installed package, such as torch's CUDA."""
    of_loader = "cannot open shared object file" in str(error) or "undefined symbol" in str(error)
    return isinstance(error, ImportError | OSError) and of_loader


def _message(error: Exception) -> str:
    """Return the line for an error that `exit_code` knows; with a hint where the error's own text has none."""
    if _out_of_memory(error):
        reason = next(iter(str(error).splitlines()), "")
        return f"out of memory: {reason}; `rlspec train --dry-run` counts what a rank holds"
    if _unloadable(error):
        return f"an installed package does not load: {error}; `rlspec doctor --gpu` compares what is installed"
    if isinstance(error, OSError) and error.strerror and error.errno != errno.EMFILE:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    # by its text, because gloo raises it as a RuntimeError; before the general line for errors of gloo
    if os.strerror(errno.EMFILE) in str(error):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{os.strerror(errno.EMFILE)}: this process may have {limit} (`ulimit -n`); expected a higher limit"
    if _lost_rank(error):
        return f"another rank ended or cannot be reached ({str(error)[:200]})"
    return str(error)


def _complain(message: str, code: int, every_rank: bool = False) -> int:
    """Print the message on one line of stderr, on rank 0 only unless `every_rank`. Returns `code`.

    every_rank  whether ranks other than 0 print it, too: the error can concern one of them alone
    """
    message = texts.printable(" ".join(message.split()))
    rank = os.environ.get("RANK", "0")
    # RANK is set by torchrun; anything but a number is no rank of ours
    if rank == "0" or not rank.isdigit():
        files.tell(f"rlspec: {message}", sys.stderr)
    elif every_rank:
        files.tell(f"rlspec: rank {rank}: {message}", sys.stderr)
    return code


if __name__ == "__main__":
    main()
