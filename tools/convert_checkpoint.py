"""Run `rlspec convert` as a script: python tools/convert_checkpoint.py --help"""

import sys

from megatron_rlspec.commands.convert import main

if __name__ == "__main__":
    sys.exit(main())
