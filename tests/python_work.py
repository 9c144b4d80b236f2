"""Count the work that Python does, in bytecodes: the same on every machine, where times are not.

    with PythonWork() as work:
        gap.close(batch, 4)
    assert work.bytecodes < 5000

Code outside this repository, C and operators of torch and numpy count as the one bytecode that calls them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = str(Path(__file__).parents[1])


class PythonWork:
    """Counts the bytecodes of this repository's functions that are called inside the block, tests' own left out."""

    def __init__(self) -> None:
        self.bytecodes = 0

    def __enter__(self) -> PythonWork:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(f"{ROOT}/megatron_rlspec/"):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.bytecodes += event == "opcode"
        return self._step
