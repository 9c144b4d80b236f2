"""Push policy and drafter, held on this GPU, into one engine on the same GPU, by each transport in turn."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch.distributed as dist

from gpu import serving
from gpu.figures import Figures
from gpu.plan import Plan
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.push.push import Pusher
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.transport import GroupBroadcast, Handles, Http


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    found = read_hf(serving.directory(plan, folder))[1]
    tensors = {name: found[name].to(plan.device) for name in found}
    size = sum(tensor.nbytes for tensor in tensors.values())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    arguments = [*serving.options(plan, 4, 4096, 0.6), "--spec", "fixed", "--num-steps", "1"]
    ways = {"group over gloo": GroupBroadcast(backend="gloo"), "http": Http()}
    if plan.on_gpu:
        ways["handles"] = Handles()
    with serving.launched(plan, folder, figures, "engine", arguments) as process:
        version = 0
        for name, way in ways.items():
            with figures.attempt(name):
                engine = SGLangEngine.of(process, timeout=240, transport=way)
                reports = []
                for _ in range(plan.push_rounds):
                    version += 1
                    reports.append(Pusher({"engine": engine}).push(version, lambda scope: tensors.items()))
                    if reports[-1].failed:
                        raise RuntimeError(reports[-1].failed["engine"])
                seconds = statistics.median(report.seconds for report in reports)
                note = f"{size / 1e9:.2f} GB, fingerprints and comparison included"
                figures.say(name, size / seconds / 1e9, "GB/s", note)
                figures.say(f"{name}: a push", seconds, "s")
                checks = statistics.median(report.verify_seconds for report in reports)
                figures.say(f"{name}: comparison in the engine", checks, "s")
    if plan.on_gpu:
        figures.without("group over NCCL", "not on one card", "NCCL refuses two ranks on one GPU; docs/gpu.md has it")
