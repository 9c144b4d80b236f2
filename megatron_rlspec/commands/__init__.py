"""The list of commands of `rlspec`, and the module of each. `cli.py` imports a module when its command is given."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """One command.

    run      module:function of this package. It gets the other words of the command line as a list, and returns the
             exit code or None
    text     what `rlspec --help` says of it
    example  a command line of a first day
    """

    run: str
    text: str
    example: str


COMMANDS = {
    "train": Command(
        "commands.training:train",
        "GRPO with a drafter that learns in the same step",
        "rlspec train --config run.toml --model.path MODEL --drafter.fresh true",
    ),
    "report": Command(
        "commands.report:main",
        "one HTML page of a run",
        "rlspec report runs/mine",
    ),
    "convert": Command(
        "commands.convert:main",
        "Hugging Face <-> Megatron checkpoints; gives a model a drafter",
        "rlspec convert MODEL DIR --add-mtp --to hf",
    ),
    "answer": Command(
        "commands.training:answer",
        "let a model write answers, from which a drafter learns before RL",
        "rlspec answer --model.path MODEL --data.path FILE --answer.path OUT.jsonl",
    ),
    "sft": Command(
        "commands.training:sft",
        "train a drafter on answers of `rlspec answer`, or a policy, too",
        "rlspec sft --config run.toml --sft.path answers.jsonl",
    ),
    "compare": Command(
        "commands.compare:main",
        "accept lengths of several drafters on one policy",
        "rlspec compare POLICY old=DIR new=DIR --prompts held-out.jsonl",
    ),
    "serve": Command(
        "rollout.sglang.http.serve:main",
        "one SGLang engine: lossless drafts, weight pushes, adaptive",
        "rlspec serve --model DIR",
    ),
    "slime": Command(
        "integrations.slime.launch:main",
        "run a slime command line with a drafter that is trained",
        "rlspec slime -- python train.py --sglang-speculative-algorithm NEXTN",
    ),
    "doctor": Command(
        "commands.doctor:main",
        "whether what is installed fits; what a GPU machine lacks",
        "rlspec doctor",
    ),
    "replay": Command(
        "commands.training:replay",
        "train a drafter again along a recorded run",
        "rlspec replay runs/mine --drafter.loss ce --train.run_dir runs/again",
    ),
}
