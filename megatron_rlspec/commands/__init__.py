"""The commands of `rlspec`, and the module of each.

No module of a command is imported here, so that `rlspec --help` needs no torch. `cli.py` imports the module of the
command that is given.
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """One command.

    run      module:function, without the leading "megatron_rlspec."; `cli.named` imports it. The function gets the
             other words of the command line as a list, and returns the exit code or None
    text     one line of `rlspec --help`, at most 67 characters: `cli.overview` promises 80 columns. For `train`, `sft`,
             `replay` and `answer` also the description in their own help (`commands/training.py`)
    example  a short command line that is shown with `text`, at most 74 characters
    """

    run: str
    text: str
    example: str


# The name that a user types -> the command, in the order of `rlspec --help`. A command whose process trains or
# generates with a model, and should keep freed memory for its next tensors, also belongs in `cli.COMPUTING`.
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
        "train a drafter, or policy and drafter, on written answers",
        "rlspec sft --config run.toml --sft.path answers.jsonl",
    ),
    "compare": Command(
        "commands.compare:main",
        "accept lengths of several drafters on one policy",
        "rlspec compare POLICY old=DIR new=DIR --prompts held-out.jsonl",
    ),
    "serve": Command(
        "rollout.sglang.http.serve:main",
        "one SGLang engine: lossless adaptive drafts, weight pushes",
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
