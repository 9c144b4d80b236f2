"""Apply patches to a checkout, all or none: python tools/apply_patches.py DIRECTORY CHECKOUT --check|--apply|--reverse"""

import sys

from megatron_rlspec.integrations.patches import main

sys.exit(main())
