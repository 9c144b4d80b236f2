"""Write arithmetic word problems in GSM8K's format: `python make_arithmetic.py --out train.jsonl`.

    {"question": "Mia has 7 apples. ...", "answer": "After ... <<7+5=12>>12 apples.\\n#### 12"}

A problem has two to six steps. Every intermediate count is a whole number from 1 to 999. The configuration
../gsm8k/gsm8k.toml reads these files and the real GSM8K alike.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path

NAMES = "Mia Omar Lena Tariq Ines Jonas Aiko Pablo Zoe Ravi Nora Kofi".split()
THINGS = "apples marbles stamps books shells stickers coins pencils".split()
MOST = 999


def step(rng: random.Random, count: int, name: str, things: str) -> tuple[str, str, int] | None:
    """Draw (what happens, its calculation, the new count). Return None if the count cannot be divided."""
    kind = rng.choice("+-*/")
    if kind == "+":
        n = rng.randint(2, 60)
        return f"{name} buys {n} more {things}.", f"{count}+{n}", count + n
    if kind == "-":
        n = rng.randint(2, 60)
        return f"{name} gives away {n} {things}.", f"{count}-{n}", count - n
    n = rng.randint(2, 5)
    if kind == "*":
        return f"A friend brings so many that {name} has {n} times as many {things}.", f"{count}*{n}", count * n
    if count % n:
        return None
    return f"{name} keeps one of {n} equal shares of the {things}.", f"{count}/{n}", count // n


def problem(rng: random.Random) -> dict[str, str]:
    """Draw one problem, with GSM8K's keys."""
    name = rng.choice(NAMES)
    things = rng.choice(THINGS)
    count = rng.randint(3, 60)
    question = [f"{name} has {count} {things}."]
    answer = []
    steps = rng.randint(2, 6)
    while len(answer) < steps:
        drawn = step(rng, count, name, things)
        if drawn is None or not 1 <= drawn[2] <= MOST:
            continue
        sentence, calculation, count = drawn
        question.append(sentence)
        answer.append(f"Then {name} has {calculation}=<<{calculation}={count}>>{count} {things}.")
    question.append(f"How many {things} does {name} have in the end?")
    return {"question": " ".join(question), "answer": "\n".join([*answer, f"#### {count}"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write, .jsonl")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    partial = args.out.with_name(f".{args.out.name}.partial")
    partial.write_text("".join(json.dumps(problem(rng)) + "\n" for _ in range(args.rows)))
    os.replace(partial, args.out)
    print(f"{args.out}: {args.rows} problems")


if __name__ == "__main__":
    main()
