"""Training with megatron-core. If one of its optional packages is installed and does not load, it counts as absent.

This must run before the first import of megatron, which tries to import these packages.
"""

import importlib
import importlib.util
import os
import sys


def _leave_out(package: str, part: str) -> str:
    """Make later imports of `package` fail as if it were absent, if its module `part` cannot be imported.

    Returns the first line of the error; "" if there is none.
    """
    if package in sys.modules or importlib.util.find_spec(package) is None:
        return ""
    try:
        importlib.import_module(part)
    # Any error: a missing symbol of a library, or one of the package's own checks of what is installed.
    except Exception as error:
        # With None there, Python raises an ImportError for the package.
        sys.modules[package] = None  # type: ignore[assignment]
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


# megatron-core tries to import both packages, and expects no other error than ImportError. FlashMLA comes with SGLang,
# has no use here, and does not load without a driver, as on a login node.
_leave_out("flash_mla", "flash_mla")
_problem = _leave_out("transformer_engine", "transformer_engine.pytorch")
if _problem and os.environ.get("RANK", "0") == "0":  # once a job
    print(
        f"Transformer Engine is installed but does not load, so layers are plain torch: {_problem}",
        file=sys.stderr,
    )
