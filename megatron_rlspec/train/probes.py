"""Probes for known defects of the installed megatron-core. Each runs upstream's own code on a tiny model.

A probe returns what it saw if the defect is present, None if it is absent, and raises if it cannot decide. All run on
the CPU; `cp_local_count` starts two processes. Run them in a process of their own, as `rlspec doctor` does: they join a
process group and, without a GPU, install the CPU replacements.
"""

from __future__ import annotations

import copy
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rlspec.config import ParallelConfig
from megatron_rlspec.host.ports import JOBS, free_port
from megatron_rlspec.train import runtime

VOCABULARY = 32
HIDDEN = 16
LENGTH = 8


def roll_unpadded() -> str | None:
    """Probe the packed roll: it uses `cu_seqlens_q`, but sequences are laid out by `cu_seqlens_q_padded`."""
    prepare()
    real = [0, 3, 8, 9]
    padded = [0, 4, 12, 14]
    tokens = torch.arange(1, padded[-1] + 1)[None]
    rolled = mtp.roll_tensor(tokens, shifts=-1, dims=-1, packed_seq_params=packed_params(real, padded))[0]
    pairs = []
    for start, begin, end in zip(padded, real, real[1:], strict=False):
        for t in range(start, start + end - begin - 1):
            pairs.append((t, t + 1))
    wrong = sum(int(rolled[0, t] != tokens[0, source]) for t, source in pairs)
    return f"{wrong} of {len(pairs)} real positions received a token other than their successor" if wrong else None


def no_clamp() -> str | None:
    """Probe a rank without a loss token: it divides 0 by 0."""
    gradients = _gradients(torch.zeros(1, LENGTH))
    bad = [name for name, g in gradients.items() if not bool(torch.isfinite(g).all())]
    return (
        f"without a loss token the gradients of {len(bad)} of {len(gradients)} tensors are not finite" if bad else None
    )


def moves_policy() -> str | None:
    """Probe whether the MTP loss gives gradients to head, embedding and decoder, even with the option against it."""
    switch: dict[str, Any] = (
        {"mtp_detach_heads": True} if "mtp_detach_heads" in TransformerConfig.__dataclass_fields__ else {}
    )
    norms = {name: float(g.norm()) for name, g in _gradients(torch.ones(1, LENGTH), **switch).items()}
    if not any(value for name, value in norms.items() if name.startswith("mtp.")):
        raise RuntimeError("the MTP loss gave no gradient to the MTP layer either")
    moved = {name: value for name, value in norms.items() if value and not name.startswith("mtp.")}
    head = ", ".join(
        f"{name.removesuffix('.weight')} {value:.3g}" for name, value in moved.items() if "layers" not in name
    )
    return f"gradient norms of the MTP loss alone: {head or 'decoder layers only'}" if moved else None


def labels_none() -> str | None:
    """Probe a forward without labels, which every RL loop needs: with MTP it crashes."""
    try:
        with torch.no_grad():
            tiny_model()(**inputs(), labels=None)
    except (AttributeError, TypeError) as error:
        return f"forward(labels=None): {error}"
    return None


def recompute_packed() -> str | None:
    """Probe full recomputation: it passes `PackedSeqParams` to a function that stores tensors only."""
    model = tiny_model(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    cu = [0, 5, LENGTH]
    tokens = inputs()
    try:
        model(**tokens, **mtp_labels(tokens["input_ids"]), packed_seq_params=packed_params(cu, cu)).sum().backward()
    except TypeError as error:
        return f"backward of a packed batch: {str(error).splitlines()[0]}"
    return None


def shared_step() -> str | None:
    """Probe a resume: all parameters share one `step` tensor, so torch's AdamW counts each parameter as a step."""
    prepare()
    model = tiny_model()
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model, disable_bucketing=True
    )
    options = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True, clip_grad=0.0)
    optimizer = get_megatron_optimizer(options, [ddp])
    tokens = inputs()
    ddp(**tokens, labels=tokens["input_ids"]).sum().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    steps = [
        entry["step"]
        for inner in getattr(optimizer, "chained_optimizers", [optimizer])
        for entry in inner.optimizer.state.values()
        if isinstance(entry.get("step"), torch.Tensor)
    ]
    distinct = len({step.data_ptr() for step in steps})
    return (
        f"after load_state_dict {len(steps)} parameters share {distinct} step tensors"
        if distinct < len(steps)
        else None
    )


def cp_local_count() -> str | None:
    """Probe context parallelism: each rank averages over its own loss tokens, so gradients depend on the split."""
    port = str(free_port(JOBS))
    command = [sys.executable, "-W", "ignore", "-m", __name__, "cp_local_count"]
    ranks = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    results = [process.communicate(timeout=120) for process in ranks]
    if any(process.returncode for process in ranks):
        tail = (results[0][1] or results[1][1]).strip().splitlines()
        raise RuntimeError(f"the two-rank run failed: {tail[-1] if tail else 'no message'}")
    error = float(results[0][0].split()[-1])
    return f"context parallel 2 changes the MTP gradient by {error:.0%}" if not error < 0.01 else None


def _cp_error() -> float:
    """Compute the relative change of the MTP projection's gradient from CP 1 to CP 2."""
    runtime.install()
    runtime.init_distributed(ParallelConfig(context=2))
    rank = dist.get_rank()
    cut = 2 * LENGTH // 4
    chunks = [(rank * cut, (rank + 1) * cut), ((3 - rank) * cut, (4 - rank) * cut)]
    tokens = torch.arange(1, 2 * LENGTH + 1)[None] % VOCABULARY
    mask = torch.zeros(1, 2 * LENGTH)
    mask[:, [1, 2, 3, 13, 14, 15]] = 1  # rank 0 holds the ends, rank 1 the middle
    mask[:, 6] = 1
    packed = packed_params([0, 2 * LENGTH], [0, 2 * LENGTH])

    def share(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, a:b] for a, b in chunks], dim=1)

    gradient = _projection(_gradients(share(mask), tokens=share(tokens), packed=packed, context_parallel_size=2))
    dist.all_reduce(gradient)
    gradient /= 2  # as data-parallel averaging over DP × CP
    # The same batch on one rank: a group of one; the attention of the probe's model does not read other positions.
    whole = _projection(_gradients(mask, tokens=tokens, packed=packed, alone=True))
    return float((gradient - whole).norm() / whole.norm())


PROBES: dict[str, Callable[[], str | None]] = {
    "mcore-roll-unpadded": roll_unpadded,
    "mcore-mtp-no-clamp": no_clamp,
    "mcore-mtp-moves-policy": moves_policy,
    "mcore-mtp-labels-none": labels_none,
    "mcore-mtp-recompute-packed": recompute_packed,
    "mcore-shared-step": shared_step,
    "mcore-cp-local-count": cp_local_count,
}


class _ValueAttention(torch.nn.Module):
    """Core attention in which every position attends to itself: packed, padded and split batches give one result."""

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__()
        self.repeat = config.num_attention_heads // config.num_query_groups

    def forward(self, query: Any, key: Any, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return value.repeat_interleave(self.repeat, dim=-2).flatten(-2)


def prepare() -> None:
    """Join a job of one rank; without a GPU, install the CPU replacements."""
    runtime.install()
    runtime.init_distributed(ParallelConfig())


def tiny_model(**options: Any) -> GPTModel:
    prepare()
    config = TransformerConfig(
        num_layers=1,
        mtp_num_layers=1,
        mtp_loss_scaling_factor=1.0,
        hidden_size=HIDDEN,
        ffn_hidden_size=HIDDEN,
        num_attention_heads=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **{**runtime.device_options(), **options},
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = _ValueAttention
    torch.manual_seed(0)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False),
        vocab_size=VOCABULARY,
        max_sequence_length=4 * LENGTH,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    )


def _gradients(
    mask: torch.Tensor,
    tokens: torch.Tensor | None = None,
    packed: PackedSeqParams | None = None,
    alone: bool = False,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Compute gradients of the MTP loss alone for all parameters, zeros where none. `mask` belongs to the labels."""
    model = tiny_model(**options)
    if alone:
        _leave_context_parallel(model)
    MTPLossAutoScaler.set_loss_scale(torch.ones(1))
    given = inputs(tokens)
    model(**given, **mtp_labels(given["input_ids"]), loss_mask=mask, packed_seq_params=packed).mul(0).sum().backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def _leave_context_parallel(model: GPTModel) -> None:
    """Put this rank into a context-parallel group of one; after 0.16, the MTP loss reads it from the collection."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for module in model.modules():
        if hasattr(module, "cp_group"):
            module.cp_group = group
        if hasattr(module, "pg_collection"):
            module.pg_collection = copy.copy(module.pg_collection)
            module.pg_collection.cp = group


def mtp_labels(tokens: torch.Tensor) -> dict[str, Any]:
    """Return the arguments that make a forward compute the MTP loss; slime's patched megatron-core has its own."""
    if "mtp_kwargs" in inspect.signature(GPTModel.forward).parameters:
        return {"labels": None, "mtp_kwargs": {"mtp_labels": tokens}}
    return {"labels": tokens}


def _projection(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(g for name, g in gradients.items() if name.endswith("eh_proj.weight"))


def inputs(tokens: torch.Tensor | None = None) -> dict[str, Any]:
    tokens = torch.arange(1, LENGTH + 1)[None] if tokens is None else tokens
    return {"input_ids": tokens, "position_ids": torch.arange(tokens.shape[1])[None], "attention_mask": None}


def packed_params(real: list[int], padded: list[int]) -> PackedSeqParams:
    cu = torch.tensor(real, dtype=torch.int32)
    cu_padded = torch.tensor(padded, dtype=torch.int32)
    longest = max(b - a for a, b in zip(padded, padded[1:], strict=False))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu_padded,
        cu_seqlens_kv_padded=cu_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


if __name__ == "__main__":
    print(_cp_error())
    if parallel_state.model_parallel_is_initialized():
        runtime.shut_down()
