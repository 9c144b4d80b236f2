"""Compare coupled drafts with argmax drafts: accept lengths of drafters on one policy, in pairs.

    python benchmarks/drafts.py --policy runs/quickstart/rl/hf --prompts runs/quickstart/task/eval.jsonl \\
        co-trained=runs/quickstart/rl/hf frozen=runs/quickstart/warm/hf control=runs/quickstart/control/hf

Every row is one drafter, temperature and number of drafts: tokens per verify round with argmax drafts, with drafts that
take the verifier's noise, and the difference on the same prompts, with 95 % intervals. Texts must be equal in all rows
of a temperature. The last columns are tokens per CPU second of the embedded engine. float32, one thread.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from megatron_rlspec.checkpoint.drafter_files import read_model, weights_of
from megatron_rlspec.commands.compare import draw, estimate, rounds_of
from megatron_rlspec.config import Config
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.model import is_drafter
from megatron_rlspec.tasks import data
from megatron_rlspec.types import Drafts, Sampling, SpecConfig, SpecSchedule


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("drafters", nargs="+", metavar="NAME=DIR")
    p.add_argument("--policy", required=True)
    p.add_argument("--prompts", required=True, type=Path)
    p.add_argument("--count", type=int, default=256)
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperatures", default="1.0,0.7,1.5")
    p.add_argument("--steps", default="1,3,5")
    options = p.parse_args()
    torch.set_num_threads(1)

    hf_config, policy = read_model(options.policy, "")
    weights = dict(weights_of(policy))
    longest = min(hf_config["max_position_embeddings"], 4096)
    config = Config.model_validate({"model": {"max_length": longest}, "rollout": {"max_new_tokens": 1}})
    tokenizer = data.load_tokenizer(options.policy)
    prompts, _ = data.read_prompts(options.prompts, config.data, tokenizer, longest - options.max_new_tokens)
    prompts = prompts[: options.count]
    print(f"{len(prompts)} prompts of {options.prompts}, up to {options.max_new_tokens} tokens, embedded, float32")
    print(f"{'drafter':>12} {'T':>4} {'k':>2} {'argmax':>8} {'coupled':>8} {'difference':>24} {'tok/CPU s':>16}")
    for temperature in map(float, options.temperatures.split(",")):
        sampling = Sampling(temperature, max_new_tokens=options.max_new_tokens)
        texts = set()
        for named in options.drafters:
            name, directory = named.split("=", 1)
            own = dict(weights_of(read_model(directory, "")[1]))
            tensors = weights | {key: tensor for key, tensor in own.items() if is_drafter(key)}
            for steps in map(int, options.steps.split(",")):
                found = {}
                for drafts in ("argmax", "coupled"):
                    found[drafts] = generate(hf_config, tensors, longest, drafts, steps, prompts, sampling)
                    texts.add(found[drafts][1])
                (plain, _, slow), (coupled, _, fast) = found["argmax"], found["coupled"]
                gain = estimate(coupled, plain)
                print(
                    f"{name:>12} {temperature:4} {steps:2} {estimate(plain).value:8.3f} {estimate(coupled).value:8.3f} "
                    f"{gain.value:+8.3f} [{gain.low:+.3f}, {gain.high:+.3f}] {slow:7.0f} {fast:8.0f}",
                    flush=True,
                )
        print(f"T = {temperature}: {'all texts equal' if len(texts) == 1 else 'TEXTS DIFFER'}")


def generate(hf_config, tensors, longest: int, drafts: Drafts, steps: int, prompts, sampling: Sampling):
    """Return the rounds [prompts, 2] of `rounds_of`, the texts, and tokens per CPU second."""
    engine = EmbeddedEngine(
        hf_config,
        tensors.items(),
        max_length=longest,
        max_running_requests=64,
        max_total_tokens=max(65536, longest + 64),
        schedule=SpecSchedule.fixed(SpecConfig(steps)),
        drafts=drafts,
    )
    begun = time.process_time()
    samples = draw(engine, prompts, sampling, "sample")
    seconds = time.process_time() - begun
    texts = tuple(tuple(sample.response.tolist()) for sample in samples)
    return np.array([rounds_of(sample) for sample in samples]), texts, sum(map(len, texts)) / seconds


if __name__ == "__main__":
    main()
