"""Start the ranks of this machine, and end as they end: `python -m megatron_rlspec.host.launch`, torchrun's arguments.

torchrun itself does the work. The ranks print why they end, and torchrun's report of 40 lines would hide that line.
"""

from __future__ import annotations

import logging
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> int:
    """Return the largest exit code of a rank, 1 if a signal killed one; after a signal to this process, 128 + number.

    The largest one is the reason: ranks that end because another one ended have 1.
    """
    for name in [
        name
        for name in logging.root.manager.loggerDict
        if name.startswith("torch.distributed.elastic")
    ]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run.main()
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode < 0:
            print(
                f"rlspec: rank {rank} was ended by {signal.Signals(-first.exitcode).name}",
                file=sys.stderr,
            )
        return max(1, *(int(failure.exitcode) for failure in error.failures.values()))
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
