"""List flags that slime's own parsers do not know. slime ignores unknown ones, so a parse that succeeds proves nothing.

Reads a JSON list of flags. Prints as JSON those that neither slime's and Megatron's parser nor SGLang's has.
"""

import argparse
import json
import sys

flags = json.loads(sys.argv[1])
known = set()
original = argparse.ArgumentParser.parse_known_args


def record(parser, *args, **kwargs):
    known.update(parser._option_string_actions)
    return original(parser, *args, **kwargs)


argparse.ArgumentParser.parse_known_args = record
sys.argv = ["train.py", "--debug-train-only", "--rollout-batch-size", "1"]

from megatron.training.arguments import parse_args  # noqa: E402
from slime.backends.sglang_utils.arguments import sglang_parse_args  # noqa: E402
from slime.utils.arguments import get_slime_extra_args_provider  # noqa: E402

parse_args(extra_args_provider=get_slime_extra_args_provider(None), ignore_unknown_args=True)
sglang_parse_args()
print("\n" + json.dumps(sorted(set(flags) - known)))
