"""What one rank of the tensor-parallel tests does."""

from __future__ import annotations

from typing import Any

import embedded_oracle as oracle
import numpy as np
import torch.distributed as dist
from test_lossless_equality import SWITCHING, wanted

from megatron_rlspec.types import Sampling, SpecConfig


def answers(meeting: str) -> dict[str, Any]:
    """Texts, fingerprints and shard sizes of an engine over all ranks, which meet in the file `meeting`."""
    oracle.meet(meeting)
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
    return answer
