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
        (tail.rebalance != "off", f"tail.rebalance={tail.rebalance}", _of_moves(config, ranks)),
        (tail.tp != (1,), sizes, _of_sizes(config, ranks, because)),
        (tail.lane, f"tail.lane={tail.lane}", _of_lane(config)),
        (tail.cost_table, f"tail.cost_table={tail.cost_table}", _of_costs(config)),
    ):
        for wrong, message in problems if on else ():
            if wrong:
                raise ConfigError(f"{option}{message}")


def _of_moves(config: Config, ranks: int | None) -> Iterator[Problem]:
    yield from _of_continued_samples(config)
    yield config.rollout.function, " does not move the conversations of rollout.function; expected off"
    yield (
        config.rollout.engine == "embedded" and ranks == 1,
        " moves samples between engines, and rollout.engine=embedded runs one on each rank; expected several ranks, "
        "or off",
    )


def _of_sizes(config: Config, ranks: int | None, because: str) -> Iterator[Problem]:
    tail = config.tail
    sizes = ",".join(map(str, tail.tp))
    embedded = config.rollout.engine == "embedded"
    if embedded:
        yield tail.tp[0] != 1, ": expected 1 and then multiples of the size before, such as 1,2,4"
        yield tail.lane, f" and tail.lane={tail.lane}: expected one of the two"
    else:
        yield from _of_second_fleet(config)
    yield from _of_continued_samples(config)
    options = f"--engine embedded --tp {sizes}" if embedded else f"--tp {sizes}"
    yield not tail.cost_table, f" needs tail.cost_table; rlspec profile {options} writes it"
    if embedded and ranks:
        yield ranks % tail.tp[-1], f" needs a multiple of {tail.tp[-1]} ranks, but {because or ranks}"


def _of_second_fleet(config: Config) -> Iterator[Problem]:
    tail = config.tail
    tensor = config.placement.tensor
    devices = config.rollout.engines * tensor
    yield config.rollout.urls, ": a second fleet needs engines that the run starts; expected no rollout.urls"
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
    yield _without_makespan(config), f": a second fleet{_NEEDS_MAKESPAN}{_moves(config)}"
    yield (
        config.placement.mode == "together",
        ": the two fleets take turns while the trainer's memory stays; expected placement.mode=apart",
    )
    yield (
        config.push.transport == "group",
        ": NCCL refuses two processes on one GPU, and the two fleets share theirs; expected push.transport=ipc or http",
    )


def _of_lane(config: Config) -> Iterator[Problem]:
    tail = config.tail
    tensor = config.placement.tensor
    yield config.rollout.engine != "sglang", " is one more SGLang engine; expected rollout.engine=sglang, or tail.tp"
    yield _without_makespan(config), f"{_NEEDS_MAKESPAN}{_moves(config)}"
    yield tail.lane <= tensor, f": expected a larger size than placement.tensor={tensor}"
    yield config.placement.mode == "together", " needs GPUs of its own, but placement.mode=together; expected apart"
    yield not tail.cost_table, f" needs tail.cost_table; rlspec profile --tp {tensor},{tail.lane} writes it"


def _of_costs(config: Config) -> Iterator[Problem]:
    yield len(config.sizes) == 1, " is for sizes in tail.tp, which has none but 1, and tail.lane"


def _of_continued_samples(config: Config) -> Iterator[Problem]:
    wrong = config.spec.mode != "off" and config.spec.verifier != "position_keyed"
    yield wrong, " continues samples, which needs spec.verifier=position_keyed"


_NEEDS_MAKESPAN = " needs moves by tail.rule=makespan, but "


def _without_makespan(config: Config) -> bool:
    return config.tail.rebalance == "off" or config.tail.rule != "makespan"


def _moves(config: Config) -> str:
    return f"tail.rebalance={config.tail.rebalance} and tail.rule={config.tail.rule}"
