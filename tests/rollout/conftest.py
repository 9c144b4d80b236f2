"""Import SGLang in this process, with stand-ins for its compiled packages while a file's tests run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def sglang_models() -> Iterator[ModuleType]:
    """Return the module `sglang_models.py`, which imports SGLang's model classes."""
    from megatron_rlspec.rollout.sglang.cpu import stand_ins

    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "concurrent")  # otherwise SGLang imports its 250 models
    before = sys.meta_path[:]
    names = stand_ins.install()
    import sglang_models

    yield sglang_models
    sys.meta_path[:] = before
    for module in [module for module in sys.modules if module.partition(".")[0] in names]:
        del sys.modules[module]
