"""Write the quickstart's task: keyed running sums, `python make_task.py --out DIR`.

The default task, `--task days`, is a list of stays. A letter names a stay, and the digit is its number of nights. A
stay of n nights takes n + 1 days. The response keeps the running number of days modulo 10, and ends with it:

    prompt     k3l9m4=
    response   k3=4,l9=4,m4=9,#9

The demonstrations follow two conventions: at `--nights` of the stays their writers counted nights, the others counted
days. A model that imitates them mixes both. The label counts days. So RL has to change what the policy says most of the
time.

`--task slips` adds the digits themselves, and the demonstrations are right but for slips: with probability `--slip` a
total is off by one, and the rest of the answer follows from it. RL removes the slips, and most answers stay as they
were.

`--task writers` is `days`, but each demonstration follows one convention throughout, and `--nights` of them count
nights. A model that imitates them chooses a convention once, at the first item where they differ. RL chooses for it.

Keys run through the alphabet from a random letter, so they are predictable and the totals are not. The number of items
is log-normal, so a few answers are several times as long as most. One wrong total makes every later one wrong.

Written: train.jsonl (prompt, response), rl.jsonl and eval.jsonl (prompt, label, metadata), no prompt twice, and a
tokenizer with one token per character.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

PAD = "<pad>"
EOS = "<eos>"
UNKNOWN = "<unk>"
KEYS = (string.ascii_lowercase + string.ascii_uppercase)[:48]
VOCABULARY = [PAD, EOS, UNKNOWN, *"=,#", *string.digits, *KEYS]
MOST_ITEMS = len(KEYS)


class Task(NamedTuple):
    """A kind of task, with its defaults.

    each    added to the true total for every item, beside its digit
    wrong   the errors of a demonstrated total; one of them is drawn
    share   of demonstrated totals with an error; if `whole`, of demonstrations whose every total has it
    median, sigma  of the number of items: the median, and the spread of the logarithm
    """

    each: int
    wrong: tuple[int, ...]
    share: float
    median: float
    sigma: float
    whole: bool = False


TASKS = {
    "days": Task(each=1, wrong=(-1,), share=0.55, median=3.0, sigma=0.6),
    "writers": Task(each=1, wrong=(-1,), share=0.55, median=3.0, sigma=0.6, whole=True),
    "slips": Task(each=0, wrong=(-1, 1), share=0.05, median=5.0, sigma=0.9),
}


def answer(keys: str, digits: list[int], added: list[int]) -> tuple[str, str]:
    """Render prompt and response; `added[i]` is added to the i-th running total."""
    prompt = "".join(f"{key}{digit}" for key, digit in zip(keys, digits, strict=True)) + "="
    response = ""
    total = 0
    for key, digit, more in zip(keys, digits, added, strict=True):
        total = (total + more) % 10
        response += f"{key}{digit}={total},"
    return prompt, f"{response}#{total}"


def draw(rng: random.Random, task: Task) -> tuple[str, str, str, int]:
    """Draw one item list: prompt, demonstrated response, label, number of items."""
    items = min(MOST_ITEMS, max(2, round(rng.lognormvariate(math.log(task.median), task.sigma))))
    first = rng.randrange(len(KEYS))
    keys = (KEYS * 2)[first : first + items]
    digits = [rng.randrange(10) for _ in range(items)]
    true = [digit + task.each for digit in digits]
    # One convention for the whole answer is drawn once; otherwise each total draws its own.
    shares = [float(rng.random() < task.share)] * items if task.whole else [task.share] * items
    written = [
        more + rng.choice(task.wrong) if rng.random() < share else more
        for share, more in zip(shares, true, strict=True)
    ]
    return *answer(keys, digits, written), str(sum(true) % 10), items


def distinct(rng: random.Random, task: Task) -> Iterator[tuple[str, str, str, int]]:
    """Yield tasks without end, each prompt once, so that no two splits share a prompt."""
    seen = set()
    while True:
        drawn = draw(rng, task)
        if drawn[0] not in seen:
            seen.add(drawn[0])
            yield drawn


def write_lines(path: Path, rows: Iterator[dict]) -> None:
    """Write the whole file or nothing."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(partial, path)


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: one token per character, and the special ones."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--task", choices=TASKS, default="days")
    parser.add_argument("--train", type=int, default=20000, help="demonstrations")
    parser.add_argument("--rl", type=int, default=4000, help="RL prompts")
    parser.add_argument("--eval", type=int, default=512, help="held-out prompts")
    parser.add_argument("--median", type=float, help="items of the median prompt; default: 3, slips: 5")
    parser.add_argument("--sigma", type=float, help="spread of the logarithm of their number; default: 0.6, slips: 0.9")
    parser.add_argument(
        "--nights", type=float, help="days: share of stays, writers: of demonstrations, in nights; default: 0.55"
    )
    parser.add_argument("--slip", type=float, help="slips: share of demonstrated totals off by one; default: 0.05")
    args = parser.parse_args()
    share, other = ("slip", "nights") if args.task == "slips" else ("nights", "slip")
    if getattr(args, other) is not None:
        parser.error(f"--{other} is not an option of --task {args.task}; expected --{share}")
    given = {"median": args.median, "sigma": args.sigma, "share": getattr(args, share)}
    task = TASKS[args.task]._replace(**{name: value for name, value in given.items() if value is not None})
    if not (task.median > 0 and task.sigma >= 0 and 0 <= task.share <= 1):
        parser.error(
            f"expected median > 0, sigma >= 0 and {share} in [0, 1]; got {task.median}, {task.sigma}, {task.share}"
        )

    args.out.mkdir(parents=True, exist_ok=True)
    tasks = distinct(random.Random(args.seed), task)

    def prompts(count: int) -> Iterator[dict]:
        for _ in range(count):
            prompt, _, label, items = next(tasks)
            yield {"prompt": prompt, "label": label, "metadata": {"items": items}}

    def demonstrations(count: int) -> Iterator[dict]:
        for _ in range(count):
            prompt, response, _, _ = next(tasks)
            yield {"prompt": prompt, "response": response}

    write_lines(args.out / "eval.jsonl", prompts(args.eval))
    write_lines(args.out / "rl.jsonl", prompts(args.rl))
    write_lines(args.out / "train.jsonl", demonstrations(args.train))
    write_tokenizer(args.out)
    print(f"{args.out}: {args.train} demonstrations, {args.rl} RL prompts, {args.eval} held-out prompts")


if __name__ == "__main__":
    main()
