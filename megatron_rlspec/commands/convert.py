"""`rlspec convert`: its options and messages.

`conversion/convert.py` converts models, and `conversion/drafter_files.py` makes EAGLE-3 drafters.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from megatron_rlspec import arguments, files
from megatron_rlspec.config import ConfigError
from megatron_rlspec.conversion.convert import Conversion, convert, plan
from megatron_rlspec.conversion.drafter_files import MOST_WORDS, make_drafter
from megatron_rlspec.conversion.run_checkpoint import is_run_checkpoint
from megatron_rlspec.models import hub
from megatron_rlspec.models.hf_files import CheckpointError
from megatron_rlspec.run import identity, state_file

TOLD_EVERY = 10.0  # seconds between lines about progress


def parser() -> arguments.Parser:
    """Return the parser of the command line. --add-eagle3 makes another kind of output, without other options."""
    p = arguments.Parser(
        prog="rlspec convert",
        description="Hugging Face <-> Megatron (torch_dist) checkpoints, MTP layer included; a run's checkpoint -> "
        "Hugging Face. Any TP/PP/EP may have written a Megatron checkpoint, and any may read it.",
        example="rlspec convert Qwen2.5-1.5B qwen-with-drafter --add-mtp --to hf",
        first=("--to", "--add-mtp", "--add-eagle3"),
        epilog="examples: rlspec convert MiMo-7B-RL mimo-megatron | rlspec convert mimo-megatron mimo-hf | "
        "rlspec convert Qwen2.5-1.5B qwen-with-drafter --add-mtp --to hf",
    )
    p.add_argument(
        "source",
        help="Hugging Face or Megatron directory (with its tracker file, or one step), or RUN/checkpoints/step-N",
    )
    p.add_argument("target", help="directory to write; it must not exist")
    p.add_argument(
        "--to", choices=("hf", "megatron"), help="default: the other kind than the source"
    )
    p.add_argument(
        "--hf",
        metavar="DIR",
        help="config.json and tokenizer for a Megatron source without its own, or a run's model.path that has moved",
    )
    p.add_argument(
        "--add-mtp",
        action="store_true",
        help="give the model a fresh drafter, made from its first layer",
    )
    p.add_argument(
        "--add-eagle3",
        action="store_true",
        help="write a fresh EAGLE-3 drafter of the Hugging Face model SOURCE to TARGET, a directory of its own",
    )
    p.add_argument(
        "--draft-vocabulary",
        type=arguments.integer(1, 2**24),
        default=0,
        metavar="N",
        help=f"words of lowest ids that a drafter of --add-eagle3 drafts from (default: all, at most {MOST_WORDS})",
    )
    p.add_argument(
        "--spec",
        choices=("te", "local"),
        default="te",
        help="layer specs that will read it (default te)",
    )
    p.needs("--add-eagle3", "--draft-vocabulary")
    p.excludes("--add-eagle3", "--to --hf --add-mtp --spec")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Convert. Raises ConfigError for wrong options and for files that do not fit, and OSError for a full disk."""
    options = parser().parse_args(argv)
    try:
        options.source = hub.local(str(options.source))
        if options.add_eagle3:
            _add_eagle3(options)
        else:
            _convert(options)
    except ValueError as error:
        # checks of models raise ValueError or a subclass; a ConfigError is shown in one line
        raise ConfigError(str(error)) from None
    except OSError as error:
        error.filename = error.filename or options.target  # a write to a full disk names no file
        raise
    return 0


def _convert(options: argparse.Namespace) -> None:
    """Convert a model between Hugging Face and Megatron, or a run's checkpoint to Hugging Face."""
    work = plan(
        options.source,
        options.target,
        to=options.to,
        hf=options.hf,
        add_mtp=options.add_mtp,
        spec=options.spec,
    )
    if is_run_checkpoint(work.source):
        _check_model(work)
    _convert_visibly(work)
    form = "Hugging Face" if work.to == "hf" else "Megatron torch_dist"
    fresh = " with a fresh drafter" if options.add_mtp else ""
    print(f"written: {work.target}, {work.family.name}{fresh}, a {form} checkpoint")
    if work.eagle3 is not None:
        print(f"written: {work.eagle3.target}, its EAGLE-3 drafter")


def _check_model(work: Conversion) -> None:
    """Raise CheckpointError unless config.json and tokenizer come from the model that the run began with.

    The run wrote the digest of its `model.path` to the state beside the checkpoint (`run/state_file.py`). Without that
    file, which stays behind if only the checkpoint is moved, nothing is checked.
    """
    file = state_file.of(work.source.resolve())
    if not file.exists():
        return
    if state_file.read(file).values["identity"]["model.path"] != identity.of_model(
        work.small_files
    ):
        raise CheckpointError(
            f"{work.small_files}: another content of model.path than the run began with, which wrote {work.source}; "
            "expected --hf DIR, that model"
        )


def _add_eagle3(options: argparse.Namespace) -> None:
    """Write a fresh EAGLE-3 drafter."""
    config = make_drafter(options.source, options.target, options.draft_vocabulary)
    outputs = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    print(
        f"written: {options.target}, a fresh EAGLE-3 drafter of {options.source}, which drafts from "
        f"{config['draft_vocab_size']:,} words and reads the outputs of layers {', '.join(map(str, outputs))}"
    )


def _convert_visibly(work: Conversion) -> None:
    """Convert. At most every `TOLD_EVERY` seconds a line on stderr says how many parts are done.

    `conversion.convert` calls `advance` once for each of `work.groups`.
    """
    done = 0
    last_line = time.monotonic()

    def advance(label: str) -> None:
        nonlocal done, last_line
        done += 1
        if time.monotonic() - last_line > TOLD_EVERY:
            last_line = time.monotonic()
            files.tell(f"{label}: {done} of {len(work.groups)} parts", sys.stderr)

    convert(work, advance)
