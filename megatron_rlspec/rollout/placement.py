"""Which GPUs of a node have trainer ranks and engines, and what share of its memory an engine gets.

Everything here is arithmetic. A layout that does not fit raises ConfigError, with the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rlspec.config import Config, ConfigError

GIB = 1 << 30
# Of one process on one GPU: CUDA's context, its libraries' kernels and NCCL's buffers. An estimate.
PROCESS_BYTES = 2 * GIB
SPARE = 0.05  # share of the memory that nothing is given: fragments, and what estimates leave out

Mode = Literal["none", "apart", "together"]


@dataclass(frozen=True)
class Layout:
    """Names of GPUs, as in CUDA_VISIBLE_DEVICES.

    train         of the trainer ranks, by local rank
    engines       of each engine, by its tensor-parallel rank; empty where nothing is placed
    second        of the engines of a second fleet, which shares devices with the first
    together      whether engines share the ranks' GPUs, so that they release memory while training
    mem_fraction  share of a GPU's memory for an engine's weights and KV cache; 0: `rollout.mem_fraction`
    """

    mode: Mode = "none"
    train: tuple[str, ...] = ()
    engines: tuple[tuple[str, ...], ...] = ()
    mem_fraction: float = 0.0
    second: tuple[tuple[str, ...], ...] = ()
    need: Need | None = None  # what `mem_fraction` was computed for

    @property
    def together(self) -> bool:
        return self.mode == "together"

    def environment(self, engine: int) -> dict[str, str]:
        """Return the variables of the engine's process. Those of the second fleet count after all others."""
        return {"CUDA_VISIBLE_DEVICES": ",".join((*self.engines, *self.second)[engine])} if self.engines else {}


@dataclass(frozen=True)
class Need:
    """Bytes that a layout has to hold.

    gpu      of one GPU
    train    of a trainer rank while engines draw: weights, gradients, optimizer
    weights  of an engine, target and drafter, over all its GPUs
    token    of one token's KV cache, over all GPUs of an engine
    longest  tokens of one sample
    """

    gpu: int
    train: int
    weights: int
    token: int
    longest: int

    @classmethod
    def of(
        cls, config: Config, hf_config: Mapping[str, Any], gpu: int, parameters: int, itemsize: int, world: int
    ) -> Need:
        """Reckon what a run needs, from the number of its parameters, drafter included, and of its ranks."""
        train = train_bytes(config, parameters, itemsize, world)
        token = cache_bytes(hf_config, config.spec.mode != "off", itemsize)
        return cls(gpu, train, parameters * itemsize, token, config.model.max_length)


def devices(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """Return the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or `count` by number."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in given.split(",")] if given else [str(i) for i in range(count)]
    return tuple(names[:count])


def place(
    gpus: Sequence[str],
    ranks: int,
    engines: int,
    tensor: int,
    mode: Literal["auto", "apart", "together"],
    lane: int = 0,
    second: int = 0,
) -> Layout:
    """Give every GPU to trainer ranks, to an engine, or to both. Raises ConfigError if that does not come out even.

    lane    GPUs of one more engine, the last of `Layout.engines`
    second  GPUs of an engine of the second fleet; 0: there is none
    """
    if not gpus:
        return Layout()
    if mode == "auto":
        mode = "apart" if ranks < len(gpus) else "together"
    wanted = engines * tensor + lane
    sizes = f"rollout.engines={engines} x placement.tensor={tensor}" + (f" + tail.lane={lane}" if lane else "")
    if ranks > len(gpus):
        raise ConfigError(
            f"torchrun started {ranks} ranks on this node, but it has {len(gpus)} GPUs, one for each rank"
        )
    if mode == "apart":
        left = len(gpus) - ranks
        if wanted != left:
            more = "more than there are" if wanted > left else f"and {left - wanted} would stay idle"
            ways = _filling(left - lane, engines, tensor)
            if wanted < len(gpus):
                ways.append(f"torchrun --nproc-per-node {len(gpus) - wanted}")
            if wanted < left:
                ways.append(f"CUDA_VISIBLE_DEVICES={','.join(gpus[: ranks + wanted])}, which leaves the others free")
            raise ConfigError(
                f"placement.mode=apart: {len(gpus)} GPUs less {ranks} trainer ranks leave {left}, "
                f"but {sizes} needs {wanted}, {more}; expected {' or '.join(ways) or 'fewer ranks'}"
            )
        free = iter(gpus[ranks:])
    else:
        if lane:
            raise ConfigError(f"tail.lane={lane} needs GPUs of its own, but the trainer ranks have all {len(gpus)}")
        if second:
            raise ConfigError(
                f"tail.tp={tensor},{second}: two fleets need GPUs without trainer ranks, and those have all {len(gpus)}"
            )
        if not ranks == wanted == len(gpus):
            free_others = ""
            if ranks < len(gpus):
                free_others = f"; CUDA_VISIBLE_DEVICES={','.join(gpus[:ranks])} leaves the other GPUs free"
            raise ConfigError(
                f"placement.mode=together: expected as many trainer ranks and GPUs of engines as there are GPUs, "
                f"{len(gpus)}; torchrun started {ranks} ranks, and {sizes} needs {wanted}{free_others}"
            )
        free = iter(gpus)
    ranks_of = [tensor] * engines + ([lane] if lane else [])
    of_engines = tuple(tuple(next(free) for _ in range(count)) for count in ranks_of)
    shared = [gpu for group in of_engines[:engines] for gpu in group] if second else []
    of_second = tuple(tuple(shared[i : i + second]) for i in range(0, len(shared), second or 1))
    return Layout(mode, tuple(gpus[:ranks]), of_engines, second=of_second)


def _filling(count: int, engines: int, tensor: int) -> list[str]:
    """Return the options with which engines have `count` GPUs, one of two numbers changed."""
    ways = []
    if count and count % tensor == 0:
        ways.append(f"rollout.engines={count // tensor}")
    if count and count % engines == 0:
        ways.append(f"placement.tensor={count // engines}")
    return ways


def check_heads(hf_config: Mapping[str, Any], tensor: int, option: str = "placement.tensor") -> None:
    """Raise ConfigError unless `tensor` GPUs can share the model's attention heads as SGLang shares them."""
    heads = int(hf_config.get("num_attention_heads", tensor))
    kv_heads = int(hf_config.get("num_key_value_heads") or heads)
    if heads % tensor:
        raise ConfigError(f"{option}={tensor} does not divide the model's {heads} attention heads")
    if kv_heads % tensor and tensor % kv_heads:
        raise ConfigError(
            f"{option}={tensor} neither divides nor is a multiple of the model's {kv_heads} key and value heads"
        )


def share(layout: Layout, need: Need) -> float:
    """Return the share of a GPU's memory for an engine. Raises ConfigError if weights and one sample do not fit.

    Together, the trainer keeps weights, gradients and optimizer while engines draw; its activations are gone by then.
    """
    tensor = len(layout.engines[0])
    taken = PROCESS_BYTES * (2 if layout.second else 1) + (need.train + PROCESS_BYTES if layout.together else 0)
    free = int(need.gpu * (1 - SPARE)) - taken
    engine = (need.weights + need.token * need.longest) / tensor
    if engine > free:
        trainer = f", of which a trainer rank keeps {need.train / GIB:.1f}" if layout.together else ""
        raise ConfigError(
            f"an engine does not fit: weights and one sample of {need.longest} tokens need {engine / GIB:.1f} GiB "
            f"on each of its {tensor} GPUs, and {max(free, 0) / GIB:.1f} of {need.gpu / GIB:.1f} GiB are free{trainer}"
        )
    return int(1000 * free / need.gpu) / 1000


def cache_bytes(hf_config: Mapping[str, Any], drafter_layers: int, itemsize: int) -> int:
    """Return the bytes of one token's KV cache, of target and drafter. Latent attention stores its latents."""
    layers = int(hf_config["num_hidden_layers"]) + drafter_layers
    if rank := hf_config.get("kv_lora_rank"):
        return layers * (int(rank) + int(hf_config.get("qk_rope_head_dim", 0))) * itemsize
    heads = int(hf_config["num_attention_heads"])
    width = int(hf_config.get("head_dim") or hf_config["hidden_size"] // heads)
    return 2 * layers * int(hf_config.get("num_key_value_heads") or heads) * width * itemsize


def train_bytes(config: Config, parameters: int, itemsize: int, world: int) -> int:
    """Return what a trainer rank keeps between steps: weights, gradients and optimizer state, shared evenly."""
    shards = config.parallel.tensor * config.parallel.pipeline
    exact = max(itemsize, 4)
    state = 2 * exact + (4 if itemsize < 4 else 0)  # two moments, and a float32 copy of 16-bit weights
    owners = world // shards if config.optimizer.distributed else 1
    return parameters // shards * (itemsize + exact) + parameters // shards // max(1, owners) * state


def check_together(config: Config) -> None:
    """Raise ConfigError for options that need engines while training, or two processes of NCCL on one GPU."""
    if config.rollout.staleness:
        raise ConfigError("rollout.staleness=1 draws samples while training, but engines on the ranks' GPUs sleep then")
    if config.drafter.overlap:
        raise ConfigError(
            "drafter.overlap=true trains while engines draw, but engines on the ranks' GPUs need the memory"
        )
    if config.push.transport == "group":
        raise ConfigError(
            "push.transport=group: NCCL refuses two processes on one GPU, and engines share the ranks' GPUs; "
            "expected http or files"
        )
