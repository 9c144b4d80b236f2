"""GRPO by hand on a plain megatron-core model, with a drafter that learns beside it: `CoTrainer` in a whole trainer.

    rlspec serve --model MODEL --port 30000 --dtype float32 --candidate-steps 0,1,3
    python train.py MODEL http://127.0.0.1:30000

MODEL is a directory of MiMo's shape (examples/quickstart/make_model.py makes one). The reward is the share of a
response's tokens that have an even id. It runs on a CPU. docs/own-trainer.md walks through it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rlspec import CoTrainer, DrafterConfig, Prompt, Request, Sample, Sampling, Sequences
from megatron_rlspec.config import ParallelConfig
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.train import runtime, shards

SAMPLES = 8  # of a prompt
SAMPLING = Sampling(temperature=1.0, max_new_tokens=24, ignore_eos=True)
MICRO_BATCH = 4 * SAMPLES
CLIP = 0.2
LEARNING_RATE = 3e-3


def load_policy(model: str) -> GPTModel:
    """Build the model of a Hugging Face directory, Megatron's own, without MTP layers; load its weights."""
    config, tensors = read_hf(model)
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
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    sizes = (config["vocab_size"], config["max_position_embeddings"])
    policy = GPTModel(shape, layer, *sizes, position_embedding_type="rope", rotary_base=config["rope_theta"])
    shards.load(shards.job_name_table(config), [policy], shape, tensors)
    return policy


def sequences(samples: Sequence[Sample]) -> Sequences:
    """Describe a micro-batch to the drafter: whole sequences, in rows that are as long as the longest."""
    longest = max(len(sample.tokens) for sample in samples)
    return Sequences(
        tokens=[torch.as_tensor(sample.tokens) for sample in samples],
        masks=[torch.as_tensor(sample.loss_mask) for sample in samples],
        starts=torch.arange(len(samples) + 1) * longest,
        seeds=[sample.seed for sample in samples],
    )


def policy_loss(policy: GPTModel, samples: Sequence[Sample], advantages: torch.Tensor) -> torch.Tensor:
    """Return the sum of PPO's clipped loss over the response tokens of a micro-batch; `advantages [b]`."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    tokens = pad([torch.as_tensor(sample.tokens) for sample in samples])
    mask = pad([torch.as_tensor(sample.loss_mask) for sample in samples])[:, 1:]
    old = pad([torch.as_tensor(sample.behaviour_logprobs) for sample in samples])[:, 1:]
    rows, length = tokens.shape
    positions = torch.arange(length).expand(rows, length)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    logits = policy(tokens, positions, later)  # within this pass the drafter learns, too
    logprobs = F.log_softmax(logits[:, :-1] / SAMPLING.temperature, -1)
    ratio = (logprobs.gather(-1, tokens[:, 1:, None])[..., 0] - old).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    return -(gain * mask).sum()


def train_policy(policy: GPTModel, optimizer: torch.optim.Optimizer, samples: Sequence[Sample]) -> float:
    """Take one GRPO step on the samples of all prompts, in their order. Returns the mean reward."""
    rewards = torch.tensor([reward(sample) for sample in samples]).view(-1, SAMPLES)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    trained = sum(float(sample.loss_mask.sum()) for sample in samples)
    optimizer.zero_grad()
    for part, values in zip(parts(samples), parts(advantages), strict=True):
        (policy_loss(policy, part, values) / trained).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return float(rewards.mean())


def parts(rows: Any) -> list[Any]:
    """Cut a step into micro-batches."""
    return [rows[first : first + MICRO_BATCH] for first in range(0, len(rows), MICRO_BATCH)]


def reward(sample: Sample) -> float:
    return float(np.mean(np.asarray(sample.response) % 2 == 0))


def run(model: str, engine: str, steps: int, learns: bool = True) -> tuple[GPTModel, CoTrainer, list[list[Sample]]]:
    """Train for some steps. `learns`: the drafter, too. Returns the rollouts, with the policy and the class."""
    runtime.init_distributed(ParallelConfig())  # a trainer of your own makes Megatron's groups itself
    policy = load_policy(model)
    optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE)
    ids = np.random.default_rng(0).integers(3, policy.vocab_size, (8, 6))
    prompts = [Prompt(row, tokens) for row, tokens in enumerate(ids)]
    drafter = DrafterConfig(train=learns, lr=LEARNING_RATE)
    cotrainer = CoTrainer(
        policy, model, [engine], sampling=SAMPLING, drafter=drafter, candidate_steps=(0, 1, 3), canary=prompts
    )
    cotrainer.push(1)
    rollouts = []
    for step in range(steps):
        requests = []
        for place in range(len(prompts) * SAMPLES):
            prompt = prompts[place // SAMPLES]
            requests.append(Request(f"{step:05d}-{place:05d}", prompt, seed=step * 1000 + place))
        samples = next(iter(cotrainer.engines.values())).generate(requests, SAMPLING)
        metrics = cotrainer.after_rollout(samples)
        cotrainer.begin_step([sequences(part) for part in parts(samples)])
        mean_reward = train_policy(policy, optimizer, samples)
        metrics |= cotrainer.end_step()
        cotrainer.push(step + 2)
        rollouts.append(samples)
        length, expected = metrics["rollout/accept_length"], metrics["drafter_tokens_k3"]
        print(f"reward {mean_reward:.3f}, accept length {length:.2f}; {expected:.2f} with 3 drafts", flush=True)
    return policy, cotrainer, rollouts


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], steps=30)
