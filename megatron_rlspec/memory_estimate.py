"""Estimate what a run needs on its GPUs: the bytes of a trainer rank and of an SGLang engine.

`rlspec train --dry-run` prints these figures. A run gives its engines memory by them. The dry run and the run refuse
what does not fit. `memory_choices.py` chooses by these figures what the user left open.

Everything here is arithmetic: no GPU is asked. It is a file of its own because `train/` and `rollout/` use it, and
never import each other. A figure that is too low can let a run end out of memory; one that is too high refuses runs
that would fit.

All sizes are bytes unless a name says otherwise; `gpu` is the memory of one GPU. `hf_config` is the policy's
config.json, with an EAGLE-3 drafter's under `DRAFTER`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.speculation.graphs import graph_sizes

GIB = 1 << 30
MIB = 1 << 20
DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
# Of one process on one GPU: CUDA's context, its libraries' kernels and NCCL's buffers. An estimate.
PROCESS_BYTES = 2 * GIB
# Share of a GPU that stays unused where trainer and engine share it: for fragments, and what estimates leave out.
SPARE = 0.05
# What SGLang 0.5.23 leaves free when it is given no share (`arg_groups/memory_hook.py`).
BASE = 512 * MIB  # for its attention
# (least memory of a GPU, tokens that a prefill then has at most), the largest GPUs first
PREFILLS = (160 * GIB, 16384), (60 * GIB, 8192), (20 * GIB, 4096), (0, 2048)
PREFILL_TOKEN = 3 * MIB // 2  # for each token of a prefill
GRAPH_REQUEST = 2 * MIB  # for each request in a CUDA graph
PREFILL_GRAPHS = 512 * MIB, 1536 * MIB  # for graphs of prefills, without and with latent attention
FLOOR = 10 * GIB  # at least this in all, on a GPU of more than 60 GiB
# Estimates of what SGLang does not count.
LOGITS_ROWS = 4  # float32 copies of a verification's logits that exist at once
PREFILL_ROWS = 24  # activations of a prefilled token, in rows of the hidden size
# FlashInfer's workspace for these families. SGLang 0.5.23 takes FlashInfer on GPUs other than Hopper, and makes a
# workspace for the engine and one for every number of drafts (`EAGLEWorkerV2.build_adaptive_runtime_state`).
WORKSPACE = 512 * MIB
# What a token keeps in each layer of a trainer for the backward pass. All are estimates.
HIDDEN_ROWS = 13  # rows of the hidden size
MLP_ROWS = 3  # rows of the MLP's width
# of HIDDEN_ROWS, those that every tensor-parallel rank has whole without sequence parallelism
WHOLE_ROWS = 4
CONTEXT_ROWS = 4  # further rows of the hidden size for each context-parallel rank beyond the first
OUTPUT_CHUNKS = 2 * GIB  # most bytes of the output layer's logits: it computes them in chunks
# Page tables, [batch, context] int32, of one backend of FlashAttention 3 with drafts (`flashattention_backend.py`).
PAGE_TABLES = 4
# Size on one GPU of one CUDA graph of the target, and of the drafter, of a model of 7B parameters: estimates for all
# layers, buffers for activations included. Measured on an H100: 459 graphs of 8 of its layers took 2.9 GB.
TARGET_GRAPH_GIB = 0.02
DRAFTER_GRAPH_GIB = 0.005


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one trainer rank on its GPU. `train/dry_run.py` and `check_rank` read the fields by their names.

    weights      parameters
    gradients    released between steps
    optimizer    Adam's moments, and float32 copies of 16-bit weights
    activations  exist within a step only
    offloaded    whether the optimizer is in host memory between steps
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int = 0
    offloaded: bool = False

    @property
    def between_steps(self) -> int:
        """Return the bytes that the rank keeps while engines on its GPU generate: without gradients and activations."""
        return self.weights + (0 if self.offloaded else self.optimizer)

    @property
    def total(self) -> int:
        """Return the bytes that the rank needs at the peak of a step, when an offloaded optimizer is back."""
        return self.weights + self.optimizer + self.gradients + self.activations


@dataclass(frozen=True)
class EngineMemory:
    """What one engine needs: bytes, but for `tensor` and `longest`.

    tensor       number of its GPUs
    weights      of target and drafter, over all its GPUs together
    token        KV cache of one token, target and drafter, over all its GPUs together
    longest      number of tokens of the longest sample, prompt included
    cuda_graphs  on one GPU
    attention    on one GPU: page tables of FlashAttention 3, or workspaces of FlashInfer
    working      on one GPU, beside weights and KV cache: the two above, logits and prefills
    """

    tensor: int
    weights: int
    token: int
    longest: int
    cuda_graphs: int
    attention: int
    working: int

    @property
    def asleep(self) -> int:
        """Return the bytes that the engine keeps on one GPU while it sleeps: SGLang releases weights and KV cache."""
        return self.cuda_graphs + self.attention


@dataclass(frozen=True)
class EngineShare:
    """How much of its GPUs an engine gets.

    mem_fraction  share of the memory that the engine finds free when it starts, for its weights and KV cache; SGLang's
                  --mem-fraction-static
    kv_tokens     tokens that the KV cache then holds, over all GPUs of the engine
    """

    mem_fraction: float
    kv_tokens: int


def rank_memory(config: Config, world: int, dense: int, experts: int = 0) -> RankMemory:
    """Estimate a rank of a job of `world` ranks, without activations.

    optimizer.distributed and optimizer.offload count as off where they are still `auto` (None): decide them before
    (`memory_choices.py`).

    world    a multiple of parallel.tensor x pipeline x expert, as `Config.check_run` demands
    dense    number of parameters on this rank, without those of routed experts
    experts  number of parameters of routed experts on this rank
    """
    itemsize = DTYPE_BYTES[config.model.dtype]
    state_itemsize = max(
        itemsize, 4
    )  # gradients and moments are float32, or float64 with float64 weights
    moments = 2 * state_itemsize
    master_weight = 4 if itemsize < 4 else 0  # float32 copies of 16-bit weights
    replicas = world // (config.parallel.tensor * config.parallel.pipeline)
    # parameters for which this rank has the optimizer's state
    stepped = dense + experts
    if config.optimizer.distributed:
        expert_replicas = replicas // config.parallel.expert
        stepped = dense // replicas + experts // expert_replicas
    parameters = dense + experts
    return RankMemory(
        weights=itemsize * parameters,
        gradients=state_itemsize * parameters,
        optimizer=(moments + master_weight) * stepped,
        offloaded=bool(config.optimizer.offload),
    )


def activation_bytes(config: Config, hf_config: Mapping[str, Any], stage: int | None = None) -> int:
    """Estimate the bytes of a rank's activations at the peak of a step; parallel.recompute=auto counts as off.

    stage  pipeline stage of the rank, from 0; None: the stage with most
    """
    parallel = config.parallel
    if stage is None:
        return max(activation_bytes(config, hf_config, s) for s in range(parallel.pipeline))
    itemsize = DTYPE_BYTES[config.model.dtype]
    hidden = int(hf_config["hidden_size"])
    mlp = int(hf_config["intermediate_size"])
    tokens = config.train.tokens_per_micro_batch // parallel.context
    routed = int(hf_config.get("num_experts_per_tok") or 0)
    if routed:
        mlp = routed * int(hf_config.get("moe_intermediate_size") or mlp)
    rows = HIDDEN_ROWS + CONTEXT_ROWS * (parallel.context - 1)
    whole_rows = 0 if parallel.sequence else WHOLE_ROWS
    split_elements = (rows - whole_rows) * hidden + MLP_ROWS * mlp
    # Every tensor-parallel rank has a whole copy of a token for each of its experts.
    layer = tokens * itemsize * (split_elements // parallel.tensor + (whole_rows + routed) * hidden)
    # what stays of a layer until its backward pass: with recomputation its input only
    kept = tokens * itemsize * hidden if parallel.recompute else layer
    # A stage keeps a micro-batch for itself and for each stage behind it.
    layers = int(hf_config["num_hidden_layers"]) // parallel.pipeline
    kept *= layers * (parallel.pipeline - stage)
    # beside it, the one layer that is computed now
    if stage < parallel.pipeline - 1:
        return kept + layer
    # The last stage also has the drafter, whose layer runs once for each depth, and the output layer's float32 logits
    # with their gradient.
    drafter = config.drafter.depth * layer if config.drafter.train else 0
    logits = 4 * tokens * int(hf_config["vocab_size"]) // parallel.tensor
    return kept + drafter + max(layer, min(2 * logits, OUTPUT_CHUNKS))


def trainer_memory(
    config: Config, hf_config: Mapping[str, Any], parameters: int, experts: int, world: int
) -> RankMemory:
    """Estimate what a trainer rank needs. It has an equal share of the parameters; `--dry-run` counts them.

    parameters, experts  of the model, drafter included: all, and those of routed experts
    world                ranks of the job
    """
    shards = config.parallel.tensor * config.parallel.pipeline
    dense = (parameters - experts) // shards
    trainer = rank_memory(config, world, dense, experts // (shards * config.parallel.expert))
    return replace(trainer, activations=activation_bytes(config, hf_config))


def step_room(gpu: int, engine: EngineMemory | None = None) -> int:
    """Return the bytes that a trainer rank may take in a step.

    engine  sleeps on the same GPU meanwhile; None: the rank has the GPU alone
    """
    if engine is None:
        return gpu - PROCESS_BYTES
    return int(gpu * (1 - SPARE)) - 2 * PROCESS_BYTES - engine.asleep


def check_rank(rank: RankMemory, gpu: int, who: str) -> None:
    """Raise ConfigError unless a GPU of `gpu` bytes holds the rank. `who` begins the message."""
    if rank.total <= gpu:
        return
    parts = ("weights", "gradients", "optimizer", "activations")
    sizes = ", ".join(f"{part} {getattr(rank, part) / GIB:.1f}" for part in parts)
    raise ConfigError(
        f"{who} needs {rank.total / GIB:.1f} GiB ({sizes}), and there are {gpu / GIB:.1f}; use a larger "
        "parallel.tensor, more ranks, a smaller train.tokens_per_micro_batch, parallel.recompute or "
        "optimizer.distributed"
    )


def engine_memory(
    config: Config, hf_config: Mapping[str, Any], gpu: int, parameters: int, hopper: bool = True
) -> EngineMemory:
    """Estimate what an engine needs.

    gpu         bytes of one GPU
    parameters  of the model, drafter included
    hopper      whether the GPUs are of compute capability 9, for which SGLang takes FlashAttention 3
    """
    tensor = config.placement.tensor
    batch = config.rollout.max_running_requests
    itemsize = DTYPE_BYTES[config.model.dtype]
    drafting = sorted({steps for steps in config.spec.steps if steps})
    cuda_graphs = _graph_bytes(batch, drafting)
    attention = WORKSPACE * (1 + len(drafting))
    if hopper:
        attention = _page_table_bytes(batch, engine_context(config), drafting)

    prefill = next(tokens for least, tokens in PREFILLS if gpu >= least)
    prefill_graphs = PREFILL_GRAPHS[bool(hf_config.get("kv_lora_rank"))]
    sglang_leaves = BASE + prefill * PREFILL_TOKEN + batch * GRAPH_REQUEST
    # as SGLang, an eighth of a GiB for each GPU of the engine
    sglang_leaves += prefill_graphs + tensor * GIB // 8

    verified_rows = batch * (1 + max(config.spec.steps))
    logits = LOGITS_ROWS * verified_rows * int(hf_config["vocab_size"]) * 4
    prefill_activations = PREFILL_ROWS * prefill * int(hf_config["hidden_size"]) * itemsize
    counted = cuda_graphs + attention + logits + prefill_activations
    return EngineMemory(
        tensor=tensor,
        weights=parameters * itemsize,
        token=token_bytes(config, hf_config, tensor),
        longest=config.model.max_length,
        cuda_graphs=cuda_graphs,
        attention=attention,
        working=max(sglang_leaves, counted, FLOOR if gpu > 60 * GIB else 0),
    )


def _graph_bytes(batch: int, drafting: Sequence[int]) -> int:
    """Return the bytes of an engine's CUDA graphs on one GPU: an upper bound.

    It counts graphs of every number of drafts at every batch size. An engine leaves out those of no use
    (`speculation/graphs.py`).

    batch     most requests of a round
    drafting  numbers of drafts above 0
    """
    if not drafting:
        return batch * GRAPH_REQUEST
    steps = [0, *drafting]
    sizes = len(graph_sizes(batch))
    # for each number of drafts: one graph to verify; one to extend the drafter, and from two drafts on one to draft
    of_target = sizes * len(steps)
    of_drafter = sizes * sum(2 if k > 1 else 1 for k in steps)
    return int((TARGET_GRAPH_GIB * of_target + DRAFTER_GRAPH_GIB * of_drafter) * GIB)


def _page_table_bytes(batch: int, context: int, drafting: Sequence[int]) -> int:
    """Return the bytes of FlashAttention 3's page tables in an engine.

    Each number of drafts k has a backend to verify, one to extend the drafter, and k - 1 to draft: k + 1 in all, and 2
    for k = 0.

    batch     most requests of a round
    context   length of the context, tokens: `engine_context`
    drafting  numbers of drafts above 0
    """
    table = batch * context * 4
    if not drafting:
        return table
    backends = 2 + sum(steps + 1 for steps in drafting)
    return PAGE_TABLES * backends * table


def engine_context(config: Config) -> int:
    """Return the context length that `rollout/start.py` gives an engine, in tokens. It sizes the page tables."""
    return config.model.max_length + config.reserved_positions


def token_bytes(config: Config, hf_config: Mapping[str, Any], tensor: int = 1) -> int:
    """Return the bytes of one token in the KV caches of target and drafter, over the `tensor` GPUs of an engine.

    Latents are on every GPU, and so is a key and value head if there are more GPUs than heads.
    """
    itemsize = DTYPE_BYTES[config.model.dtype]
    layers = int(hf_config["num_hidden_layers"])
    # an EAGLE-3 drafter's config.json says its layers; an MTP drafter has one
    if config.spec.mode != "off":
        layers += int(hf_config.get(DRAFTER, {}).get("num_hidden_layers", 1))
    latent_rank = hf_config.get("kv_lora_rank")  # of latent attention (MLA)
    if latent_rank:
        latent = int(latent_rank) + int(hf_config.get("qk_rope_head_dim", 0))
        return layers * latent * itemsize * tensor
    heads = int(hf_config["num_attention_heads"])
    kv_heads = int(hf_config.get("num_key_value_heads") or heads)
    head_dim = int(hf_config.get("head_dim") or hf_config["hidden_size"] // heads)
    return 2 * layers * max(kv_heads, tensor) * head_dim * itemsize


def engine_share(engine: EngineMemory, gpu: int, trainer: int | None = None) -> EngineShare:
    """Return the memory that an engine gets on GPUs of `gpu` bytes. SGLang takes a share of what it finds free.

    trainer  bytes that a trainer rank on the same GPU keeps while the engine generates; None: no rank shares the GPU

    Raises ConfigError if weights and one sample of the longest length do not fit.
    """
    free = gpu - PROCESS_BYTES
    if trainer is not None:  # two processes on the GPU
        free = int(gpu * (1 - SPARE)) - 2 * PROCESS_BYTES - trainer
    room = free - engine.working
    needed = (engine.weights + engine.token * engine.longest) / engine.tensor
    if needed > room:
        kept = "" if trainer is None else f", of which a trainer rank keeps {trainer / GIB:.1f}"
        raise ConfigError(
            f"an engine does not fit: weights and one sample of {engine.longest} tokens need {needed / GIB:.1f} GiB "
            f"on each of its {engine.tensor} GPUs, CUDA graphs, page tables, logits and prefills "
            f"{engine.working / GIB:.1f}, and {max(free, 0) / GIB:.1f} of {gpu / GIB:.1f} GiB are free{kept}"
        )
    kv_tokens = int((room * engine.tensor - engine.weights) // engine.token)
    # rounded down, so that SGLang never takes more than `room`
    return EngineShare(int(1000 * room / free) / 1000, kv_tokens)


def needed_tokens(config: Config, engines: int) -> int:
    """Estimate the tokens of one engine's KV cache that its share of a step's samples takes at once.

    A sample counts as a quarter of the longest. The estimate assumes that it ends at half of that length, and that
    running samples are half done on average.
    """
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    # samples of one engine, rounded up, but no more than it decodes together
    at_once = min(config.rollout.max_running_requests, -(-samples // engines))
    return max(config.model.max_length, at_once * config.model.max_length // 4)


def cache_line(config: Config, kv_tokens: int) -> str:
    """Return how many samples the KV cache of an engine holds at once, with a warning if a step has many more."""
    longest = config.model.max_length
    samples = kv_tokens / longest
    line = f"KV cache of {kv_tokens:,} tokens an engine: {samples:.1f} samples of {longest:,} tokens at once"
    needed = needed_tokens(config, config.rollout.engines)
    if kv_tokens < needed:
        line += (
            f"; warning: a step's samples need about {needed:,} tokens, so some wait; more fit with a larger "
            "parallel.tensor or placement.tensor"
        )
    return line
