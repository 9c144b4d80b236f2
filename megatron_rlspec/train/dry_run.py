"""`rlspec train --dry-run`: print parameters and memory of a rank of each pipeline stage, in one process.

`stages.py` builds the model of each stage. `memory_estimate.py` computes the memory of ranks and engines, and
`memory_choices.py` what a run chooses by it. This module joins them into the lines that `commands/training.py` prints.
Nothing is trained or loaded. Memory is in bytes, but for `gpu_gib` and the printed lines. The process must be as
`stages._fake_rank` needs it: without a process group, and without a visible GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.memory_choices import Fit, Hardware, settled, with_distributed
from megatron_rlspec.memory_estimate import (
    GIB,
    RankMemory,
    cache_line,
    check_rank,
    engine_memory,
    engine_share,
    step_room,
)
from megatron_rlspec.train import stages
from megatron_rlspec.train.stages import Stage

# Attributes of `RankMemory`, and the names of the table's columns
_MEMORY_COLUMNS = ("weights", "gradients", "optimizer", "activations", "total")


def report(
    config: Config,
    hf_config: Mapping[str, Any],
    world: int,
    gpu_gib: float | None = None,
    engines_open: bool = False,
) -> Iterator[str]:
    """Yield the lines that `--dry-run` prints.

    world         trainer ranks of the job
    gpu_gib       memory of each GPU; None: unknown, so nothing is checked or chosen by it
    engines_open  whether the user said neither how many engines there are nor how large they are

    Raises ConfigError if this layout or model cannot be trained, or if a rank or an engine needs more than `gpu_gib`.
    """
    config = with_distributed(config, world)
    if gpu_gib is not None:
        config, lines = _settled(config, hf_config, world, int(gpu_gib * GIB), engines_open)
        yield from lines
    built = stages.build(config, hf_config, world)
    largest = max((stage.memory for stage in built), key=lambda memory: memory.total)
    # Before the table, so that a model that does not fit gets one line.
    if gpu_gib is not None:
        number = [stage.memory for stage in built].index(largest)  # the first of equal ones
        who = f"--gpu-gib {gpu_gib:g}: a rank of pipeline stage {number}"
        check_rank(largest, int(gpu_gib * GIB), who)

    policy, drafter = stages.parameters(built)
    yield f"{hf_config['architectures'][0]}: {policy:,} parameters, its drafter {drafter:,}"
    yield _layout_line(config, world)
    tokens = config.train.tokens_per_micro_batch
    yield (
        f"memory of a rank of each pipeline stage, in GiB; activations, estimated: of micro-batches of {tokens:,} "
        "tokens; workspaces and fragmentation come on top"
    )
    yield from _table_lines(built)
    if gpu_gib is None:
        return
    most = largest.total / GIB
    yield f"fits: a rank needs at most {most:.2f} of {gpu_gib:g} GiB, without an engine on the same GPU"
    if config.rollout.engine == "sglang" and not config.rollout.urls:
        gpu = int(gpu_gib * GIB)
        yield from _engine_lines(config, hf_config, world, gpu, policy + drafter, largest)


def _settled(
    config: Config, hf_config: Mapping[str, Any], world: int, gpu: int, engines_open: bool
) -> tuple[Config, list[str]]:
    """Return the configuration with what a run on `world` GPUs of one node chooses, and a line for each choice.

    gpu  bytes of one GPU
    """
    # The choices need the model's size, and can change its memory. So the caller builds the stages a second time.
    built = stages.build(config, hf_config, world)
    machine = Hardware(gpus=world, gpu=gpu, ranks=world, world=world)
    return settled(
        config,
        Fit(hf_config, sum(stages.parameters(built)), machine),
        built[-1].memory,  # the last stage has the drafter
        launches=config.rollout.engine == "sglang" and not config.rollout.urls,
        # With placement.mode=disaggregated engines have GPUs of their own, whose number is not known here.
        engines_open=engines_open and config.placement.mode != "disaggregated",
    )


def _layout_line(config: Config, world: int) -> str:
    """Return a line about how the ranks split the work."""
    parallel = config.parallel
    shards = parallel.tensor * parallel.context * parallel.pipeline
    line = (
        f"{world} ranks = tensor {parallel.tensor} x context {parallel.context} "
        f"x data {world // shards} x pipeline {parallel.pipeline}"
    )
    if parallel.sequence:
        line += ", sequence parallel"
    if parallel.expert > 1:
        line += f", experts split over {parallel.expert} of context x data"
    if config.optimizer.distributed:
        line += ", optimizer split over replicas"
    return line


def _table_lines(built: list[Stage]) -> Iterator[str]:
    """Yield a line of names, and a line for a rank of each pipeline stage."""
    # The cells below are in this order.
    widths = {"stage": 5, "layers": 7, "policy": 14, "drafter": 12}
    widths |= {part: max(9, len(part)) for part in _MEMORY_COLUMNS}
    yield " ".join(f"{name:>{width}}" for name, width in widths.items())
    for number, stage in enumerate(built):
        layers = f"{stage.layers.start}-{stage.layers.stop - 1}"
        cells = [str(number), layers, f"{stage.policy_of_rank:,}", f"{stage.drafter_of_rank:,}"]
        cells += [f"{getattr(stage.memory, part) / GIB:.2f}" for part in _MEMORY_COLUMNS]
        yield " ".join(
            f"{cell:>{width}}" for cell, width in zip(cells, widths.values(), strict=True)
        )


def _engine_lines(
    config: Config,
    hf_config: Mapping[str, Any],
    world: int,
    gpu: int,
    model_parameters: int,
    rank: RankMemory,
) -> Iterator[str]:
    """Yield what an engine gets on a Hopper GPU of `gpu` bytes, alone or beside the `rank` that needs most.

    model_parameters  number of parameters of policy and drafter

    With placement.mode=auto there is a line for the engine alone and, if the engines need as many GPUs as there are
    ranks, a second line for the engine beside a rank: which of the two a run takes depends on the number of its GPUs.
    There an engine that does not fit is a line, too; with another mode it raises ConfigError.
    """
    engine = engine_memory(config, hf_config, gpu, model_parameters)
    kept_by_rank = rank.between_steps
    mode = config.placement.mode
    yield (
        f"an engine: weights {engine.weights / GIB:.2f} GiB over its {engine.tensor} GPUs, KV cache {engine.token:,} "
        f"bytes a token; on each GPU CUDA graphs {engine.cuda_graphs / GIB:.2f} GiB, page tables "
        f"{engine.attention / GIB:.2f}, with logits and prefills {engine.working / GIB:.2f}"
    )
    colocated = world == config.rollout.engines * engine.tensor
    # For each line its beginning, and the bytes that a trainer rank keeps on the engine's GPU; None: no rank is there.
    placed: dict[str, int | None] = {}
    if mode != "colocated":
        placed["on GPUs of its own"] = None
    if mode == "colocated" or (mode == "auto" and colocated):
        placed[f"beside a trainer rank that keeps {kept_by_rank / GIB:.2f} GiB"] = kept_by_rank
    for where, kept in placed.items():
        try:
            if kept is not None:
                check_rank(rank, step_room(gpu, engine), "a rank beside a sleeping engine")
            tokens = engine_share(engine, gpu, kept).kv_tokens
        except ConfigError as error:
            if mode != "auto":  # with auto the run can still take the other placement
                raise
            yield f"{where}: {error}"
            continue
        yield f"{where}: {cache_line(config, tokens)}"
