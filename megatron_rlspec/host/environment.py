"""Environment variables of train ranks: what CUDA, NCCL and Transformer Engine need, and what the launcher set.

Imports no torch: CUDA and NCCL read their variables once, so `prepare` runs before torch is imported. For a run
`commands/training.py` calls these functions, for slime `integrations/slime/launch.py`, and `client/transport.py` asks
for `disagreement`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec

from megatron_rlspec.config import ConfigError

# Variables of train ranks. A value that is set already stays. `integrations/slime/launch.py` reads the names, too.
RANK_DEFAULTS = {
    # Kernels then start in the order of their calls. Megatron's tensor and context parallelism rely on it, and its
    # argument check (megatron/training/arguments.py, validate_args) ends a job without it on GPUs before Blackwell.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # SGLang's engines have 0 by default (entrypoints/engine.py, _set_envs_and_config), and the members of a group that
    # weights travel through must have the same.
    "NCCL_CUMEM_ENABLE": "0",
}
# The variable that ranks and engines must agree on. An engine reports its value in `describe`, as `nccl_cumem_enable`
# (`rollout/sglang/scheduler/control.py`).
MUST_AGREE = "NCCL_CUMEM_ENABLE"


def of_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that train ranks need. A value that `environment` has already is kept."""
    return {name: environment.get(name, value) for name, value in RANK_DEFAULTS.items()}


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set the variables that a train rank needs, where they are not set. Call it before torch is imported.

    environment  changed in place: `os.environ` of the rank itself
    """
    environment.update(of_ranks(environment))
    if cudnn := _cudnn_of_torch():
        environment.setdefault("CUDNN_HOME", cudnn)


def _cudnn_of_torch() -> str:
    """Return the directory of the cuDNN that torch's wheel brings; "" if it brings none.

    Transformer Engine prefers a cuDNN beside the CUDA toolkit. If torch has loaded another one, Transformer Engine's
    attention ends with CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED.
    """
    # The parent first: to find a submodule of a missing package raises an error.
    package = find_spec("nvidia") and find_spec("nvidia.cudnn")
    places = list(package.submodule_search_locations or ()) if package else []
    return places[0] if places else ""


def disagreement(engine_value: str, environment: Mapping[str, str]) -> str:
    """Return why NCCL cannot join this rank and an engine; "" if it can.

    engine_value  the engine's value of the variable MUST_AGREE; "": not known
    environment   of this rank
    """
    ours = of_ranks(environment)[MUST_AGREE]
    if engine_value in ("", ours):
        return ""
    return (
        f"{MUST_AGREE} is {ours} for this rank and {engine_value} for the engine; "
        "start both with the same value"
    )


def ranks_started(environment: Mapping[str, str]) -> int:
    """Return WORLD_SIZE, the number of ranks that a launcher started; 0 if it is not set.

    Raises ConfigError if the launcher's variables are incomplete or not numbers in their range.
    """
    size = environment.get("WORLD_SIZE", "")
    if "RANK" not in environment:
        if size not in ("", "0", "1"):
            raise ConfigError(
                f"environment variable WORLD_SIZE={size} is set, but RANK is not; start the run by torchrun"
            )
        return int(size or 0)
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise ConfigError(
                f"environment variable RANK is set, but {name} is not; start the run by torchrun"
            )
    # Each is a number below its limit. WORLD_SIZE comes first, so that it is a number where it is the limit of RANK and
    # LOCAL_RANK. An absent LOCAL_RANK passes as 0.
    limits = {"WORLD_SIZE": "1000000", "RANK": size, "LOCAL_RANK": size, "MASTER_PORT": "65536"}
    for name, limit in limits.items():
        text = environment.get(name, "0")
        if not text.isdecimal() or int(text) >= int(limit):
            raise ConfigError(
                f"environment variable {name}={text!r}: expected a number below {limit}"
            )
    return int(size)
