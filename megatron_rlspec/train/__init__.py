"""Training with megatron-core. An optional package of it that is installed and does not load counts as absent."""

import importlib
import importlib.util
import os
import sys


def _leave_out(package: str, part: str) -> str:
    """Make later imports of a package fail as if it were absent, if its part fails. Returns the error's first line."""
    if package in sys.modules or importlib.util.find_spec(package) is None:
        return ""
    try:
        importlib.import_module(part)
    except (
        Exception
    ) as error:  # of a library's symbols, or of the package's own checks of what is installed
        sys.modules[package] = None  # type: ignore[assignment]
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


# megatron-core tries to import them and takes an ImportError only for an answer. FlashMLA comes with SGLang, has no use
# here, and does not load without a driver, as on a login node.
_leave_out("flash_mla", "flash_mla")
_problem = _leave_out("transformer_engine", "transformer_engine.pytorch")
if _problem and os.environ.get("RANK", "0") == "0":
    print(
        f"Transformer Engine is installed but does not load, so layers are plain torch: {_problem}",
        file=sys.stderr,
    )
