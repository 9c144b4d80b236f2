"""SGLang's process groups and sizes in a scheduler process."""

from __future__ import annotations

from typing import Any


def parallel() -> Any:
    """Return SGLang's groups. `tp_group` has `world_size`, `rank_in_group`, `broadcast` and `all_reduce`."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()
