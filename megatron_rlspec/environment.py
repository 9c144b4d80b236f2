"""Check what torchrun, or another launcher, says about ranks in the environment. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rlspec.config import ConfigError

_LEAST = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}


def ranks_started(environment: Mapping[str, str]) -> int:
    """Return how many ranks the launcher started; 0 if no launcher did. Raises ConfigError."""
    numbers: dict[str, int] = {}
    for name, least in _LEAST.items():
        text = environment.get(name)
        if text is None:
            continue
        if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < least:
            raise ConfigError(f"environment variable {name}={text!r}: expected a whole number of at least {least}")
        numbers[name] = int(text)
    if numbers.get("MASTER_PORT", 1) > 65535:
        raise ConfigError(f"environment variable MASTER_PORT={numbers['MASTER_PORT']}: expected a port up to 65535")
    if "RANK" not in numbers:
        return numbers.get("WORLD_SIZE", 0)
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise ConfigError(f"environment variable RANK is set, but {name} is not; start the run by torchrun")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in numbers and numbers[rank] >= numbers.get(size, numbers[rank] + 1):
            raise ConfigError(f"environment variable {rank}={numbers[rank]}: expected less than {size}={numbers[size]}")
    return numbers["WORLD_SIZE"]
