"""Write the prompts of examples/smollm2.sh: `Ask one question about a garden.`, one thing a prompt.

`python examples/smollm2/make_task.py --out DIR` writes DIR/rl.jsonl (training prompts) and DIR/eval.jsonl (held-out
ones, other things). SmolLM2-135M-Instruct answers such a prompt with one question in a third of the cases.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from megatron_rlspec import files

THINGS = """
airport anchor apple apron attic autumn baker balloon banana bank barn basket beach bear bee bell bench bicycle bird
boat book bottle bowl box bread bridge broom brush bucket bus butter button cabin cake camel camera candle canoe carpet
carrot castle cat cave chair cheese cherry chicken church circus clock cloud coat coffee coin compass cook corn cottage
cow crab crown cup curtain dancer deer dentist desert desk diamond doctor dog doll dolphin donkey door dragon drum duck
eagle egg elephant engine factory fan farm farmer feather fence ferry festival fiddle field fire fish flag flower flute
fog forest fork fountain fox frog fruit garden gate ghost giraffe glass glove goat gold goose grape grass guitar hammer
harbor hat hawk hen hill honey horse hospital hotel house ice insect island jacket jar jewel juice jungle kettle key
kitchen kite knife ladder lake lamp leaf lemon letter library lighthouse lion lizard lobster lock machine magnet map
market meadow medal melon milk mill mirror monkey moon mosquito motor mountain mouse museum mushroom music nail needle
nest net night notebook nurse oak oasis ocean office olive onion orange orchard oven owl paint palace panda paper park
parrot peach pear pearl pencil penguin pepper piano picture pig pigeon pillow pilot pine pirate planet plant plate poem
pond pony potato prince puppet pyramid rabbit radio rain rainbow raven rice ring river road robot rocket roof rope rose
ruler sailor salad salt sand saw school scissors sea seal seed shadow shark sheep shell ship shirt shoe shop shovel
silver singer snail snake snow soap sock soup spider spoon squirrel stable stamp star station statue stone storm stove
street sugar sun swan table tailor tea teacher temple tent theater thread thunder ticket tiger toast tomato tower toy
train tree truck trumpet tunnel turtle umbrella valley vase village violin volcano wagon wall watch water wave whale
wheat wheel whistle wind window winter wolf wood wool worm yard zebra
"""
HELD_OUT = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    things = THINGS.split()
    random.Random(0).shuffle(things)
    for name, chosen in (("eval", things[:HELD_OUT]), ("rl", things[HELD_OUT:])):
        rows = []
        for thing in chosen:
            article = "an" if thing[0] in "aeiou" else "a"
            rows.append(json.dumps({"prompt": f"Ask one question about {article} {thing}.", "label": thing}))
        files.write(out / f"{name}.jsonl", "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
