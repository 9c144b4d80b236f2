"""Checks of the options in [tail] beside those of other sections."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rlspec.config import Config, ConfigError

Problem = tuple[object, str]  # whether it is there, and the line that says so


def check(config: Config, ranks: int | None = None, because: str = "") -> None:
    """Raise ConfigError if a run cannot have these options in [tail].

    ranks    how many train ranks there are; None: the command has none
    because  where their number comes from, for the message
    """
    tail = config.tail
    sizes = f"tail.tp={','.join(map(str, tail.tp))}"
    for on, option, problems in (
        (tail.rebalance, "tail.rebalance=true", _of_moves(config, ranks)),
        (tail.tp != (1,), sizes, _of_sizes(config, ranks, because)),
        (tail.cost_table, f"tail.cost_table={tail.cost_table}", _of_costs(config)),
    ):
        for wrong, message in problems if on else ():
            if wrong:
                raise ConfigError(f"{option}{message}")


def _of_moves(config: Config, ranks: int | None) -> Iterator[Problem]:
    yield from _of_continued_samples(config)
    yield (
        config.rollout.function,
        " does not move the conversations of rollout.function; expected false",
    )
    yield (
        config.rollout.engine == "embedded" and ranks == 1,
        " moves samples between engines, and rollout.engine=embedded runs one on each rank; expected several ranks, "
        "or false",
    )


def _of_sizes(config: Config, ranks: int | None, because: str) -> Iterator[Problem]:
    tail = config.tail
    sizes = ",".join(map(str, tail.tp))
    embedded = config.rollout.engine == "embedded"
    if embedded:
        yield tail.tp[0] != 1, ": expected 1 and then multiples of the size before, such as 1,2,4"
    else:
        yield from _of_second_fleet(config)
    yield from _of_continued_samples(config)
    options = f"--engine embedded --tp {sizes}" if embedded else f"--tp {sizes}"
    yield not tail.cost_table, f" needs tail.cost_table; rlspec profile {options} writes it"
    if embedded and ranks:
        yield (
            ranks % tail.tp[-1],
            f" needs a multiple of {tail.tp[-1]} ranks, but {because or ranks}",
        )


def _of_second_fleet(config: Config) -> Iterator[Problem]:
    tail = config.tail
    tensor = config.placement.tensor
    devices = config.rollout.engines * tensor
    yield (
        config.rollout.urls,
        ": a second fleet needs engines that the run starts; expected no rollout.urls",
    )
    yield (
        len(tail.tp) != 2 or tail.tp[0] != tensor,
        f": with SGLang engines, expected placement.tensor={tensor} and the size of a second fleet, such as "
        f"{tensor},{2 * tensor}",
    )
    yield (
        devices % tail.tp[-1],
        f": the second fleet has the devices of the first, rollout.engines={config.rollout.engines} x "
        f"placement.tensor={tensor}; expected a size that divides {devices}",
    )
    yield (
        not tail.rebalance,
        ": a second fleet takes over samples that move, but tail.rebalance=false; expected true",
    )
    yield (
        config.placement.mode == "together",
        ": the two fleets take turns while the trainer's memory stays; expected placement.mode=apart",
    )


def _of_costs(config: Config) -> Iterator[Problem]:
    yield len(config.tail.tp) == 1, " is for sizes in tail.tp, which has none but 1"


def _of_continued_samples(config: Config) -> Iterator[Problem]:
    wrong = config.spec.mode != "off" and config.spec.verifier != "position_keyed"
    yield wrong, " continues samples, which needs spec.verifier=position_keyed"
