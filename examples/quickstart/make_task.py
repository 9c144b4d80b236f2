"""Write the quickstart's task: keyed running sums, `python make_task.py --out DIR`.

    prompt     k3l9m4=
    response   k3=3,l9=2,m4=6,#6

The response walks through the prompt item by item: it looks up the key's digit, adds it to the running total modulo 10,
and after the last item states the total, which is the label. One wrong step makes every later total wrong. Keys run
through the alphabet from a random letter, so they are predictable and the totals are not. The number of items is
log-normal, so a few answers are ten times as long as most.

The demonstrations contain slips: with probability `--slip` a total is off by one, and the rest of the answer follows
from it. A model that imitates them slips as often. Prompts and labels contain no slips, so RL can remove them.

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

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

PAD = "<pad>"
EOS = "<eos>"
UNKNOWN = "<unk>"
KEYS = (string.ascii_lowercase + string.ascii_uppercase)[:48]
VOCABULARY = [PAD, EOS, UNKNOWN, *"=,#", *string.digits, *KEYS]
MOST_ITEMS = len(KEYS)


def answer(keys: str, digits: list[int], slips: list[int]) -> tuple[str, str, str]:
    """Render (prompt, response, true total); `slips[i]` is added to the i-th running total."""
    prompt = "".join(f"{key}{digit}" for key, digit in zip(keys, digits, strict=True)) + "="
    response = ""
    total = 0
    for key, digit, slip in zip(keys, digits, slips, strict=True):
        total = (total + digit + slip) % 10
        response += f"{key}{digit}={total},"
    return prompt, f"{response}#{total}", str(sum(digits) % 10)


def draw(rng: random.Random, median: float, sigma: float, slip: float) -> tuple[str, str, str, int]:
    """Draw one task, with its number of items."""
    items = min(MOST_ITEMS, max(2, round(rng.lognormvariate(math.log(median), sigma))))
    first = rng.randrange(len(KEYS))
    keys = (KEYS * 2)[first : first + items]
    digits = [rng.randrange(10) for _ in range(items)]
    slips = [rng.choice((-1, 1)) if rng.random() < slip else 0 for _ in range(items)]
    return *answer(keys, digits, slips), items


def distinct(rng: random.Random, median: float, sigma: float, slip: float) -> Iterator[tuple[str, str, str, int]]:
    """Yield tasks without end, each prompt once, so that no two splits share a prompt."""
    seen = set()
    while True:
        task = draw(rng, median, sigma, slip)
        if task[0] not in seen:
            seen.add(task[0])
            yield task


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
    parser.add_argument("--train", type=int, default=12000, help="demonstrations")
    parser.add_argument("--rl", type=int, default=4000, help="RL prompts")
    parser.add_argument("--eval", type=int, default=512, help="held-out prompts")
    parser.add_argument("--median", type=float, default=5.0, help="items of the median prompt")
    parser.add_argument("--sigma", type=float, default=0.9, help="spread of the logarithm of the number of items")
    parser.add_argument("--slip", type=float, default=0.05, help="probability that a demonstrated total is off by one")
    args = parser.parse_args()
    if not (args.median > 0 and args.sigma >= 0 and 0 <= args.slip <= 1):
        parser.error(
            f"expected median > 0, sigma >= 0 and slip in [0, 1]; got {args.median}, {args.sigma}, {args.slip}"
        )

    args.out.mkdir(parents=True, exist_ok=True)
    tasks = distinct(random.Random(args.seed), args.median, args.sigma, args.slip)

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
