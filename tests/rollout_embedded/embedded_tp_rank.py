"""What one rank of the tensor-parallel tests does."""

from __future__ import annotations

import threading
import time
from typing import Any

import embedded_oracle as oracle
import numpy as np
import torch.distributed as dist
from test_lossless_equality import SWITCHING, wanted

from megatron_rlspec.types import OFF, Sampling, SpecConfig


def answers(meeting: str) -> dict[str, Any]:
    """Texts, fingerprints and shard sizes of an engine over all ranks, which meet in the file `meeting`."""
    rank, _ = oracle.meet(meeting)
    config, tensors = oracle.tiny(vocab=48, drafter="close", sharpness=2.0, seed=9)
    _, other = oracle.tiny(vocab=48, drafter="close", sharpness=2.0, seed=10)
    engine = oracle.engine_of(config, tensors, SpecConfig(3), group=dist.group.WORLD)
    answer = {"shards": [list(engine.model.tensors[n].view.shape) for n in ("lm_head.weight", "model.norm.weight")]}
    plain = Sampling(max_new_tokens=24, ignore_eos=True)
    requests = wanted(24)
    for name, spec in (("chain", SpecConfig(3)), ("switching", SWITCHING)):
        oracle.decide(engine, spec)
        answer[name] = {s.request_id: s.response.tolist() for s in engine.generate(requests, plain)}
    engine.set_config(SpecConfig(3))
    for name, words in (("few words", [1, 2, 3, 5, 8, 13, 47]), ("words of one rank", [1, 2, 3, 4])):
        engine.set_draft_vocabulary(np.array(words))
        engine.stats()
        answer[name] = {s.request_id: s.response.tolist() for s in engine.generate(requests, plain)}
        answer[f"accepted, {name}"] = [list(stat.accepted) for stat in engine.stats()]
    engine.update_weights(1, other.items())
    answer["fingerprints"] = {name: str(value) for name, value in engine.fingerprints().items()}
    answer["updated"] = {s.request_id: s.response.tolist() for s in engine.generate(requests, plain)}
    engine.set_config(OFF)
    if rank == 0:  # an abort on one rank ends the sample on both, after the same round
        done = []
        long = Sampling(max_new_tokens=220, ignore_eos=True)
        thread = threading.Thread(target=lambda: done.extend(engine.generate(requests[:2], long)), daemon=True)
        thread.start()
        while not any(len(run.response) > 10 for run in engine.running):
            time.sleep(0.001)
        engine.abort([requests[0].id])
        thread.join(60)
    else:
        done = engine.generate(requests[:2], Sampling(max_new_tokens=220, ignore_eos=True))
    answer["aborted"] = [[s.status, s.response.tolist()] for s in done]
    return answer
