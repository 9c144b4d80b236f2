"""What the engine is measured against: a cacheless, unbatched decoder and drafter written from the definition.

Every call recomputes everything from the tokens with explicit loops over layers and heads; nothing is shared with the
engine but the Hugging Face names.
"""

from __future__ import annotations

import math
import os
import zlib
from datetime import timedelta

import numpy as np
import tiny_mimo
import torch
import torch.distributed as dist

from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.types import OFF, Prompt, Request, SpecConfig


def tiny(vocab=32, hidden=16, layers=2, heads=4, kv_heads=2, seed=0, sharpness=1.0, drafter="noisy", tied=False):
    """(config, tensors in float64) of a tiny MiMo. `sharpness` scales the logits.

    `drafter="noisy"`: all random. `"close"`: the target is nearly a bigram model and the drafter copies its embedding
    path, so that most of its drafts are accepted.
    """
    g = torch.Generator().manual_seed(seed)
    head_dim, inter = hidden // heads, 2 * hidden

    def r(*shape, std):
        return torch.randn(*shape, generator=g, dtype=torch.float64) * std

    quiet = 0.1 if drafter == "close" else 1.0
    tensors = {"model.embed_tokens.weight": r(vocab, hidden, std=1.0), "model.norm.weight": 1 + r(hidden, std=0.1)}
    if not tied:
        tensors["lm_head.weight"] = r(vocab, hidden, std=sharpness / math.sqrt(hidden) * 2)
    for prefix in [f"model.layers.{i}." for i in range(layers)] + ["model.mtp_layers.0."]:
        rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        for x, n in rows.items():
            tensors[f"{prefix}self_attn.{x}_proj.weight"] = r(n, hidden, std=1 / math.sqrt(hidden))
            tensors[f"{prefix}self_attn.{x}_proj.bias"] = r(n, std=0.3)
        tensors[prefix + "self_attn.o_proj.weight"] = r(hidden, heads * head_dim, std=quiet / math.sqrt(hidden))
        tensors[prefix + "mlp.gate_proj.weight"] = r(inter, hidden, std=1 / math.sqrt(hidden))
        tensors[prefix + "mlp.up_proj.weight"] = r(inter, hidden, std=1 / math.sqrt(hidden))
        tensors[prefix + "mlp.down_proj.weight"] = r(hidden, inter, std=quiet / math.sqrt(inter))
        tensors[prefix + "input_layernorm.weight"] = 1 + r(hidden, std=0.1)
        tensors[prefix + "post_attention_layernorm.weight"] = 1 + r(hidden, std=0.1)
    prefix = "model.mtp_layers.0."
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{prefix}{name}.weight"] = 1 + r(hidden, std=0.1)
    tensors[prefix + "input_proj.weight"] = r(hidden, 2 * hidden, std=1 / math.sqrt(hidden))
    if drafter == "close":
        eye = torch.eye(hidden, dtype=torch.float64)
        tensors[prefix + "input_proj.weight"] = torch.cat([0.05 * eye, eye], 1)
        tensors[prefix + "final_layernorm.weight"] = tensors["model.norm.weight"].clone()
    config = tiny_mimo.config(hidden, layers, heads, kv_heads, inter, vocab) | {"tie_word_embeddings": tied}
    config |= {"rope_theta": 10000.0, "max_position_embeddings": 2048, "eos_token_id": 0}
    return config, tensors


class Oracle:
    def __init__(self, config, tensors):
        self.c, self.w = config, tensors

    def rms(self, x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt() * self.w[name]

    def rotate(self, x, position):
        d = self.c["head_dim"]
        inv = (self.c["rope_theta"] ** -(torch.arange(0, d, 2, dtype=torch.float32) / d)).to(torch.float32)
        angle = (position * inv).repeat(2)
        half = torch.cat([-x[d // 2 :], x[: d // 2]])
        return x * angle.cos().to(x.dtype) + half * angle.sin().to(x.dtype)

    def layer(self, prefix, xs, positions, visible):
        """xs: list of [H]; visible[i]: indices that i attends to."""
        c, w, d = self.c, self.w, self.c["head_dim"]
        group = c["num_attention_heads"] // c["num_key_value_heads"]
        qs, ks, vs = [], [], []
        for x, p in zip(xs, positions, strict=True):
            n = self.rms(x, prefix + "input_layernorm.weight")
            q, k, v = (
                (w[f"{prefix}self_attn.{t}_proj.weight"] @ n + w[f"{prefix}self_attn.{t}_proj.bias"]).view(-1, d)
                for t in "qkv"
            )
            qs.append([self.rotate(h, p) for h in q])
            ks.append([self.rotate(h, p) for h in k])
            vs.append(v)
        out = []
        for i, x in enumerate(xs):
            heads = []
            for h in range(c["num_attention_heads"]):
                k = torch.stack([ks[j][h // group] for j in visible[i]])
                v = torch.stack([vs[j][h // group] for j in visible[i]])
                heads.append(torch.softmax(k @ qs[i][h] / math.sqrt(d), 0) @ v)
            x = x + w[prefix + "self_attn.o_proj.weight"] @ torch.cat(heads)
            n = self.rms(x, prefix + "post_attention_layernorm.weight")
            gate = w[prefix + "mlp.gate_proj.weight"] @ n
            up = w[prefix + "mlp.up_proj.weight"] @ n
            out.append(x + w[prefix + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
        return out

    def head(self, h):
        return self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"]) @ h

    def hidden(self, tokens):
        """[L, H] after the final norm."""
        xs = [self.w["model.embed_tokens.weight"][t] for t in tokens]
        visible = [list(range(i + 1)) for i in range(len(tokens))]
        for i in range(self.c["num_hidden_layers"]):
            xs = self.layer(f"model.layers.{i}.", xs, range(len(tokens)), visible)
        return torch.stack([self.rms(x, "model.norm.weight") for x in xs])

    def logits(self, tokens):
        """[L, V]: row t predicts token t + 1."""
        return torch.stack([self.head(h) for h in self.hidden(tokens)])

    def draft_logits(self, tokens, chain):
        """Logits [len(chain) + 1, V] of depths 1, 2, ... after `tokens`, the chain's tokens being drafted in between.

        Depth 1 runs over the pairs (h_s, x_{s+1}), s = 0 .. t; depth d > 1 sees those pairs and its own chain, at
        rotary position t + d - 1, its hidden input being the drafter's own previous output.
        """
        prefix = "model.mtp_layers.0."
        hidden = list(self.hidden(tokens)[:-1])
        inputs = [self.pair(h, x, s) for s, (h, x) in enumerate(zip(hidden, tokens[1:], strict=True))]
        logits = []
        for depth in range(len(chain) + 1):
            n = len(inputs)
            outs = self.layer(prefix, inputs, range(n), [list(range(i + 1)) for i in range(n)])
            last = self.rms(outs[-1], prefix + "final_layernorm.weight")
            logits.append(self.head(last))
            if depth < len(chain):
                inputs.append(self.pair(last, chain[depth], n))
        return torch.stack(logits)

    def pair(self, hidden, token, position):
        prefix = "model.mtp_layers.0."
        e = self.w["model.embed_tokens.weight"][token] * (position != 0)
        both = torch.cat(
            [self.rms(hidden, prefix + "hidden_layernorm.weight"), self.rms(e, prefix + "token_layernorm.weight")]
        )
        return self.w[prefix + "input_proj.weight"] @ both


class Switching:
    """Decides as a rule does: by batch and context alone, and from round to round for another configuration."""

    selection = None

    def __init__(self, *configs: SpecConfig) -> None:
        self.configs = configs

    def choose(self, batch, context, missed, apart):
        return self.configs[zlib.crc32(f"{batch} {context}".encode()) % len(self.configs)]

    def observe(self, *_):
        return ()

    def timed(self, *_, **__):
        pass


def decide(engine, spec: SpecConfig | Switching) -> None:
    """Let an engine run one configuration, or several in turns."""
    if isinstance(spec, SpecConfig):
        engine.set_config(spec)
    else:
        engine.choice.check(spec.configs)
        engine.choice.chosen = spec


def engine_of(config, tensors, spec: SpecConfig | Switching = OFF, kind=EmbeddedEngine, **options):
    options = {"dtype": torch.float64, "max_total_tokens": 4096, "max_length": 256} | options
    engine = kind(config, tensors.items(), **options)
    decide(engine, spec)
    return engine


def audit(cache) -> None:
    """Check that every slot of a cache is free, or held by exactly one row or prefix."""
    held = [prefix.slots for prefix in cache.prefixes.values()]
    for row, prefix in cache.prefix.items():
        held.append(cache.slots[row, len(prefix.tokens) : cache.slotted[row]])
    slots = np.concatenate([cache.free[: cache.left], *held])
    assert len(slots) == len(np.unique(slots)) == cache.total


def meet(meeting: str) -> tuple[int, int]:
    """Join the job of a test's ranks, which meet in the file `meeting`. Returns the rank, and how many there are."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(minutes=10)
    )
    return rank, size


def requests(prompts, seed=0, group=1) -> list[Request]:
    """`group` requests for each of the prompts, which are lists of token ids."""
    made = [Prompt(i, np.asarray(p, np.int64)) for i, p in enumerate(prompts)]
    return [Request(f"{p.id}-{j}.", p, seed + 1000 * p.id + j) for p in made for j in range(group)]
