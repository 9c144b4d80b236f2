"""The ranks of one machine meet at its loopback address: its own name may not resolve, as in many containers."""

import os
import subprocess
import sys

import pytest

from megatron_rlspec.commands.training import TORCHRUN

NAMELESS = """
import socket
socket.getfqdn = lambda *_: "no-such-host.invalid"
"""


@pytest.mark.slow
def test_the_host_s_name_need_not_resolve(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NAMELESS)
    program = tmp_path / "rank.py"
    # One write each: the ranks share the pipe, and `print` writes the line's end on its own.
    program.write_text("""import os; os.write(1, f"{os.environ['MASTER_ADDR']} {os.environ['RANK']}\\n".encode())""")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *TORCHRUN, "2", str(program)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert sorted(done.stdout.splitlines()) == ["127.0.0.1 0", "127.0.0.1 1"], done.stderr[-2000:]
