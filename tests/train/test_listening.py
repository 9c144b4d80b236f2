"""A run that torchrun did not start listens on the loopback address only."""

import forked

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


def test_the_store_of_a_single_process_listens_on_loopback_only(tmp_path):
    (tmp_path / "a_single_process.py").write_text(PROGRAM)
    ended = forked.run_module("a_single_process", [], folder=tmp_path)
    assert ended.stdout.splitlines()[-1:] == ["['127.0.0.1']"], ended.stdout + ended.stderr
