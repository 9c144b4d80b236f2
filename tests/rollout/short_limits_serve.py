"""`rlspec serve` whose limits in time are short: python short_limits_serve.py <its arguments>."""

import sys

from megatron_rlspec.rollout.sglang import limits

limits.BODY_SILENT = 1.0
limits.BODY_SECONDS = 2.0
limits.UPDATE_SILENT = 3.0
limits.UPDATE_WAIT = 1.0

from megatron_rlspec.rollout.sglang.http import serve  # noqa: E402

if __name__ == "__main__":
    serve.main(sys.argv[1:])
