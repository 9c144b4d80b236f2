"""Apply patches to a checkout, all or none: apply_patches.py DIRECTORY CHECKOUT --check | --apply | --reverse"""

import sys

from megatron_rlspec.compat.patches import main

sys.exit(main())
