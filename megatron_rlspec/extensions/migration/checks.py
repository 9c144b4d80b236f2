"""Checks of the options in [tail] beside those of other sections."""

from __future__ import annotations

from megatron_rlspec.config import Config, ConfigError


def check(config: Config, ranks: int, because: str = "") -> None:
    """Raise ConfigError if a run of `ranks` ranks cannot have these options in [tail].

    because  where the number of ranks comes from, for the message
    """
    tail = config.tail
    if tail.rebalance:
        option = "tail.rebalance=true"
        _check_continued_samples(config, option)
        if config.rollout.function:
            raise ConfigError(
                f"{option} does not move the conversations of rollout.function; expected false"
            )
        if config.rollout.engine == "embedded" and ranks == 1:
            raise ConfigError(
                f"{option} moves samples between engines, and rollout.engine=embedded runs one on each rank; "
                "expected several ranks, or false"
            )
    if tail.tp != (1,):
        sizes = ",".join(map(str, tail.tp))
        option = f"tail.tp={sizes}"
        _check_continued_samples(config, option)
        if not tail.cost_table:
            raise ConfigError(
                f"{option} needs tail.cost_table; rlspec profile --engine embedded --tp {sizes} writes it"
            )
        if ranks % tail.tp[-1]:
            raise ConfigError(
                f"{option} needs a multiple of {tail.tp[-1]} ranks, but {because or ranks}"
            )


def _check_continued_samples(config: Config, option: str) -> None:
    if config.spec.mode != "off" and config.spec.verifier != "position_keyed":
        raise ConfigError(f"{option} continues samples, which needs spec.verifier=position_keyed")
