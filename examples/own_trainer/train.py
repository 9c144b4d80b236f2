"""GRPO by hand on a plain megatron-core model, with a drafter that learns beside it: `CoTrainer` in a whole trainer.

    rlspec serve --model MODEL --port 30000 --dtype float32 --candidate-steps 0,1,3
    python train.py MODEL --engine http://127.0.0.1:30000

MODEL is a directory of MiMo's shape: a Qwen2 decoder with an MTP layer (examples/quickstart/make_model.py makes one).
The task needs no data: the reward is the share of a response's tokens that have an even id. docs/own-trainer.md walks
through this file.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rlspec import CoTrainer
from megatron_rlspec.config import DrafterConfig, ParallelConfig
from megatron_rlspec.cotrainer.fields import Sequences
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.speculation.acceptance import accept_length, pooled
from megatron_rlspec.train import runtime, shards
from megatron_rlspec.types import Prompt, Request, Sample, Sampling

SAMPLES = 8  # of a prompt
SAMPLING = Sampling(temperature=1.0, max_new_tokens=24, ignore_eos=True)
CLIP = 0.2


def build_policy(config: Mapping[str, Any]) -> GPTModel:
    """Build the model that config.json describes: Megatron's own, without MTP layers."""
    shape = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        layernorm_epsilon=config["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available(),
        masked_softmax_fusion=False,
    )
    return GPTModel(
        shape,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=config["vocab_size"],
        max_sequence_length=config["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=config["rope_theta"],
    )


def load_policy(model: str) -> GPTModel:
    """Build the policy and load its weights from a Hugging Face directory."""
    config, tensors = read_hf(model)
    policy = build_policy(config).to(runtime.device())
    shards.load(shards.family(config), [policy], policy.config, tensors)
    return policy


def sequences_of(samples: Sequence[Sample]) -> Sequences:
    """Describe a micro-batch to the drafter: whole sequences, in rows of one length."""
    longest = max(len(sample.tokens) for sample in samples)
    return Sequences(
        tokens=[torch.as_tensor(sample.tokens) for sample in samples],
        masks=[torch.as_tensor(sample.loss_mask) for sample in samples],
        starts=torch.arange(len(samples) + 1) * longest,
        seeds=[sample.seed for sample in samples],
    )


def policy_loss(
    policy: GPTModel, batch: Sequences, samples: Sequence[Sample], advantages: torch.Tensor
) -> torch.Tensor:
    """Return the sum of PPO's clipped loss over the response tokens of a micro-batch; `advantages [b]`."""
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad(batch.tokens, batch_first=True)
    mask = pad(batch.masks, batch_first=True)[:, 1:]
    old = pad([torch.as_tensor(s.behaviour_logprobs) for s in samples], batch_first=True)[:, 1:]
    rows, length = tokens.shape
    positions = torch.arange(length).expand(rows, length)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    logits = policy(tokens, positions, later)  # here the drafter learns, too
    logprobs = F.log_softmax(logits[:, :-1].float() / SAMPLING.temperature, -1)
    ratio = (logprobs.gather(-1, tokens[:, 1:, None])[..., 0] - old).exp()
    gain = torch.minimum(
        ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None]
    )
    return -(gain * mask).sum()


def train_policy(
    policy: GPTModel,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Sequences],
    samples: Sequence[Sequence[Sample]],
) -> float:
    """Take one GRPO step; each micro-batch holds whole groups. Returns the mean reward."""
    rewards = torch.tensor([[reward(s) for s in group] for part in samples for group in in_groups(part)])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    trained = sum(float(sample.loss_mask[1:].sum()) for part in samples for sample in part)
    optimizer.zero_grad()
    of_batches = advantages.flatten().split([len(part) for part in samples])
    for batch, part, values in zip(batches, samples, of_batches, strict=True):
        (policy_loss(policy, batch, part, values) / trained).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return float(rewards.mean())


def in_groups(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    return [samples[i : i + SAMPLES] for i in range(0, len(samples), SAMPLES)]


def reward(sample: Sample) -> float:
    return float(np.mean(np.asarray(sample.response) % 2 == 0))


def run(model: str, engine: str, steps: int, learns: bool = True, lr: float = 3e-3) -> dict[str, Any]:
    """Train; `learns`: the drafter, too. Returns the parts, the rollouts and the mean rewards."""
    runtime.init_distributed(ParallelConfig())  # your trainer makes Megatron's groups by itself
    policy = load_policy(model)
    optimizer = torch.optim.Adam(policy.parameters(), lr)
    ids = np.random.default_rng(0).integers(3, policy.vocab_size, (8, 6))
    prompts = [Prompt(row, tokens) for row, tokens in enumerate(ids)]
    drafter = DrafterConfig(train=learns, depth=3, lr=lr)
    cotrainer = CoTrainer(
        policy, model, [engine], sampling=SAMPLING, drafter=drafter, candidate_steps=(0, 1, 3), canary=prompts
    )
    cotrainer.push(1)
    rollouts, rewards = [], []
    for step in range(steps):
        requests = []
        for place in range(len(prompts) * SAMPLES):
            prompt = prompts[place // SAMPLES]
            requests.append(Request(f"{step:05d}-{place:05d}", prompt, seed=step * 1000 + place))
        samples = next(iter(cotrainer.engines.values())).generate(requests, SAMPLING)
        metrics = cotrainer.after_rollout(samples)
        half = len(samples) // 2
        parts = [samples[:half], samples[half:]]
        batches = [sequences_of(part) for part in parts]
        cotrainer.begin_step(batches)
        rewards.append(train_policy(policy, optimizer, batches, parts))
        metrics |= cotrainer.end_step()
        metrics |= cotrainer.push(step + 2)
        rollouts.append(parts)
        length = accept_length(pooled(sample.accepted for sample in samples))
        print(
            f"step {step + 1}: reward {rewards[-1]:.3f}, accept length {length:.2f}, "
            f"with 3 drafts {metrics['drafter_tokens_k3']:.2f} by the trainer's prediction",
            flush=True,
        )
    return {"policy": policy, "cotrainer": cotrainer, "rollouts": rollouts, "rewards": rewards}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", required=True, help="URL of `rlspec serve`")
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    run(given.model, given.engine, given.steps)
