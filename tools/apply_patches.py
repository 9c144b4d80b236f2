"""Apply patches to a checkout, all or none: apply_patches.py DIRECTORY CHECKOUT --check | --apply | --reverse"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rlspec.compat.patches import PatchError, change, state


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status: 0 for success; 1 if --check finds one not applied; 2 for another version."""
    parser = argparse.ArgumentParser(prog="apply_patches.py", description=__doc__)
    parser.add_argument("patches", type=Path, help="a folder such as patches/slime/624b824a8")
    parser.add_argument("root", type=Path, help="the project's checkout")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="say which are applied")
    action.add_argument("--apply", action="store_true")
    action.add_argument("--reverse", action="store_true")
    options = parser.parse_args(argv)
    patches = [patch.absolute() for patch in sorted(options.patches.glob("*.patch"))]
    if not patches:
        parser.error(f"no *.patch in {options.patches}")
    try:
        if options.check:
            states = {patch.name: state(options.root, patch) for patch in patches}
            print("\n".join(f"{name}: {'applied' if s == 'applied' else 'not applied'}" for name, s in states.items()))
            return int("clean" in states.values())
        done = change(options.root, patches, reverse=options.reverse)
    except PatchError as error:
        print(f"apply_patches: {error}")
        return 2
    print(
        "\n".join(f"{'reversed' if options.reverse else 'applied'} {patch.name}" for patch in done) or "nothing to do"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
