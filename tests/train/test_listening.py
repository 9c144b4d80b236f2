"""A run that torchrun did not start listens on the loopback address only."""

import subprocess
import sys

PROGRAM = """
import os
import psutil
from megatron_rlspec.config import ParallelConfig
from megatron_rlspec.train import runtime

runtime.launch_env()
runtime.init_distributed(ParallelConfig())
listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
print([place.ip for place in listening if place.port == int(os.environ["MASTER_PORT"])])
"""


def test_the_store_of_a_single_process_listens_on_loopback_only():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240)
    assert ended.stdout.splitlines()[-1:] == ["['127.0.0.1']"], ended.stdout + ended.stderr
