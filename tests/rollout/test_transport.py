"""The same push by every transport into a real SGLang process, and a push whose engine has ended."""

import pytest
import torch.distributed as dist
from tiny_mimo import config, weights, write

from megatron_rlspec.push import push
from megatron_rlspec.push.push import Pusher
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.rollout.sglang.client.transport import GroupBroadcast, Http

pytestmark = pytest.mark.slow
OPTIONS = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096"]


@pytest.fixture(scope="module", autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def source_of(tensors):
    return lambda scope: ((n, t) for n, t in tensors.items() if scope == "all" or ".mtp" in n)


def test_every_transport_delivers_every_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(push, "bucket_bytes", lambda memory: 100_000)  # several buckets
    c = config(hidden=128, layers=2, heads=4, kv_heads=2, ffn=256, vocab=192)
    write(tmp_path / "model", c, weights(c))
    with launch(
        tmp_path / "model", tmp_path / "log", arguments=OPTIONS, environment={"OMP_NUM_THREADS": "1"}
    ) as process:
        process.wait()
        for number, transport in enumerate((Http(), GroupBroadcast())):
            pusher = Pusher({"e": SGLangEngine.of(process, timeout=60, transport=transport)})
            first = weights(c, seed=2 * number)
            second = weights(c, seed=2 * number + 1)
            assert not pusher.push(2 * number, source_of(first)).failed
            mixed = {name: second[name] if ".mtp" in name else tensor for name, tensor in first.items()}
            report = pusher.push(2 * number + 1, source_of(mixed), "drafter")
            assert not report.failed and report.scope == "drafter"

        # An engine that dies under a group that was joined.
        process.close()
        report = pusher.push(10, source_of(mixed))
        assert "ended with code" in report.failed["e"]
