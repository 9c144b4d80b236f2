"""`rlspec serve` whose CPU engine does what SGLang does on GPUs only: python emulating_serve.py <its arguments>."""

from __future__ import annotations

import sys
from unittest import mock

import emulation

from megatron_rlspec.rollout.sglang.http import serve

if __name__ == "__main__":
    fork = serve._fork_children

    def then_emulate() -> None:
        fork()
        emulation.install(emulation.asked())

    with mock.patch.object(serve, "_fork_children", then_emulate):
        serve.main(sys.argv[1:])
