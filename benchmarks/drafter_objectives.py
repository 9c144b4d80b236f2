"""Measure the accept length that each unrolling and each loss gives a fresh drafter, on the quickstart's policy.

    python benchmarks/drafter_objectives.py --run runs/quickstart [--quick] [--json FILE]

Every variant starts from the same random drafter and trains on the same demonstrations in the same order. The policy
(the warm start) does not change. The embedded engine measures the accept length: three drafts a round at temperature 1,
position-keyed, the same prompts and seeds. So the texts are the same, and only the drafts differ. "megatron" trains one
layer as megatron-core unrolls it: every depth attends to its own inputs, at unshifted positions. All runs use one seed:
differences within the interval are noise.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.progress import track
from scipy import stats

from megatron_rlspec.config import Config, DataConfig
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.tasks import data
from megatron_rlspec.train.attention import Chain
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Request, Sampling, SpecConfig

VARIANTS = {
    "depth 1, ce": {"depth": 1},
    "depth 3 megatron, ce": {"depth": 3},
    "depth 3 chain-exact, ce": {"depth": 3},
    "depth 3 chain-exact, forward_kl": {"depth": 3, "loss": "forward_kl"},
}


def trained(run: Path, name: str, steps: int) -> list[tuple[str, torch.Tensor]]:
    """Train the drafter of this variant for `steps` steps of 32 demonstrations."""
    options = {"lr": 3e-3, **VARIANTS[name]}
    settings = {"model": {"dtype": "float32", "max_length": 512}, "rollout": {"max_new_tokens": 384}}
    config = Config.model_validate({**settings, "drafter": options, "optimizer": {"decay_steps": steps}})
    shape, tensors = read_hf(run / "warm/hf")
    trainer = Trainer(config, shape)
    trainer.load_hf(tensors, fresh_drafter=True)
    tokenizer = data.load_tokenizer(run / "warm/hf")
    longest = config.model.max_length
    reading = data.Reading(config.data, tokenizer, longest, config.train.seed)
    rows = data.Demonstrations(run / "task/train.jsonl", reading, config.sft)
    unchained = mock.patch.object(Chain, "next", lambda chain: Chain())  # every depth attends to its own inputs
    with unchained if "megatron" in name else nullcontext():
        for _ in range(steps):
            batches = pack(rows.take(32), depth=config.drafter.depth, tokens_per_micro_batch=8192)
            trainer.train_step(batches, objective="sft", train_policy=False)
    return list(trainer.export("drafter"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"), help="a run of examples/quickstart.sh")
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    steps, count = (20, 32) if args.quick else (150, 128)
    torch.set_num_threads(2)
    shape, tensors = read_hf(args.run / "warm/hf")
    chain = SpecConfig(3)
    engine = EmbeddedEngine(shape, tensors.items(), config=chain, max_length=512, max_running_requests=128)
    tokenizer = data.load_tokenizer(args.run / "warm/hf")
    prompts = data.read_prompts(args.run / "task/eval.jsonl", DataConfig(), tokenizer, 512 - 384)[0]
    requests = [Request(f"p{i:05d}", prompt, seed=i) for i, prompt in enumerate(prompts[:count])]
    found: dict[str, Any] = {"steps": steps, "prompts": count, "accept_length": {}}
    for version, name in enumerate(track(VARIANTS, "drafters"), start=1):
        engine.update_weights(version, trained(args.run, name, steps), scope="drafter")
        samples = engine.generate(requests, Sampling(max_new_tokens=384))
        rounds = [sum(s.accepted) for s in samples]
        drafts = [sum(i * n for i, n in enumerate(s.accepted)) for s in samples]
        interval = stats.bootstrap(
            (rounds, drafts), lambda r, d, axis: 1 + d.sum(axis) / r.sum(axis), paired=True, rng=1, n_resamples=2000
        ).confidence_interval
        value = 1 + sum(drafts) / sum(rounds)
        found["accept_length"][name] = [value, float(interval.low), float(interval.high)]
    print(f"{steps} steps of 32 demonstrations, {count} held-out prompts, temperature 1, float32, CPU")
    for name, (value, low, high) in found["accept_length"].items():
        print(f"  {name:34} {value:.2f} [{low:.2f}, {high:.2f}]")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
