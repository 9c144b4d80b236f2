"""What a cost table alone cannot answer about a cluster: the part of `rlspec plan` that simulates rollouts.

How many engines, of which tensor-parallel size, on the trainer's GPUs or on GPUs of their own, one step ahead or not,
and at which caps on the response length speculation pays. Rollouts are simulated with the live policies
(`extensions/simulator/`); a training step is a number of seconds, which shrinks with the number of GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from megatron_rlspec.commands import simulate
from megatron_rlspec.commands.simulate import Ratio, SimulationConfig
from megatron_rlspec.extensions.simulator.cluster import Policies
from megatron_rlspec.speculation.cost_table import CostTable

POLICY = "adaptive+in_flight"
WORTH = 1.5  # a doubling of the GPUs that shortens the rollout by less is not called worth it
PAYS = 1.02  # speculation pays where the whole interval of its speedup is above
SIZES = (1, 2, 4, 8)  # tensor-parallel sizes that are tried with a data sheet; a table has its own


@dataclass
class Rollouts:
    """Simulated rollouts of one workload on several clusters, each simulated once.

    extrapolated  the largest share of cost lookups that no measurement is near to, over all of them
    """

    config: SimulationConfig
    seeds: int
    extrapolated: float = 0.0
    known: dict[tuple[int, int, int, str], tuple[np.ndarray, float]] = field(default_factory=dict)

    def seconds(self, engines: int, tp: int, *, cap: int = 0, policy: str = POLICY) -> np.ndarray:
        """Return the seconds of a rollout, one for each seed. Raises CostTableError."""
        return self._run(engines, tp, cap, policy)[0]

    def rate(self, engines: int, tp: int) -> float:
        """Return tokens per second, the mean over seeds."""
        return self._run(engines, tp, 0, POLICY)[1]

    def sizes(self) -> tuple[int, ...]:
        """Return the tensor-parallel sizes that the GPUs of the file divide into, and whose costs are known."""
        cluster = self.config.cluster
        known = CostTable.load(cluster.table).tps if cluster.table else SIZES
        return tuple(tp for tp in known if cluster.engines * cluster.tp % tp == 0)

    def _run(self, engines: int, tp: int, cap: int, policy: str) -> tuple[np.ndarray, float]:
        key = (engines, tp, cap or self.config.workload.cap, policy)
        if key not in self.known:
            cluster = self.config.cluster
            room = cluster.max_tokens * tp // cluster.tp
            given = self.config.model_copy(
                update={
                    # only rollouts: --train-seconds stands for the rest of a step
                    "training": None,
                    "cluster": cluster.model_copy(
                        update={"engines": engines, "tp": tp, "sizes": (tp,), "max_tokens": room}
                    ),
                    "workload": self.config.workload.model_copy(update={"cap": key[2]}),
                }
            )
            runs = simulate.compare(given, {policy: Policies.of(policy)}, self.seeds)[policy]
            self.extrapolated = max(
                self.extrapolated, *(run.traces[0].extrapolated for run in runs)
            )
            seconds = np.array([run.seconds for run in runs])
            self.known[key] = (seconds, float(np.mean([run.tokens_per_second for run in runs])))
        return self.known[key]


def answers(rollouts: Rollouts, train_seconds: float, wake_seconds: float) -> Iterator[str]:
    """Yield the lines of the answers, each part when its rollouts are simulated.

    train_seconds  of a training step on all GPUs of the file, push included; 0: not known, no answer about placement
    wake_seconds   for engines on the trainer's GPUs to release their memory and take it back
    """
    cluster, work = rollouts.config.cluster, rollouts.config.workload
    source = (
        cluster.table
        or f"data sheet of {cluster.hardware}, {cluster.parameters / 1e9:.3g} B parameters"
    )
    yield f"simulated, {rollouts.seeds} rollouts each with the policy {POLICY}; costs: {source}"
    yield f"{work.prompts} x {work.samples} samples, cap {work.cap}; 95 % intervals over seeds"
    yield ""
    yield from _engines(rollouts)
    yield ""
    yield from _sizes(rollouts)
    yield ""
    if train_seconds:
        yield from _placements(rollouts, train_seconds, wake_seconds)
    else:
        yield "colocated or apart, staleness 0 or 1: give --train-seconds, the time of a training step on these GPUs"
    yield ""
    yield from _caps(rollouts)
    yield ""
    yield f"up to {rollouts.extrapolated:.0%} of the cost lookups of a rollout lie outside the costs' points"


def _engines(rollouts: Rollouts) -> Iterator[str]:
    cluster = rollouts.config.cluster
    counts = sorted({max(1, int(cluster.engines * factor)) for factor in (0.25, 0.5, 1, 2, 4)})
    yield f"how many engines of tp={cluster.tp}:"
    yield f"{'engines':>10} {'seconds':>9} {'tokens/s':>10} {'per GPU':>9} {'against one row up':>22}"
    before = None
    worth = counts[0]
    for count in counts:
        seconds = rollouts.seconds(count, cluster.tp)
        gain = str(_ratio(before, seconds)) if before is not None else ""
        if before is not None and (before / seconds).mean() >= WORTH and worth * 2 >= count:
            worth = count
        rate = rollouts.rate(count, cluster.tp)
        yield f"{count:10} {seconds.mean():9.1f} {rate:10.0f} {rate / count / cluster.tp:9.0f} {gain:>22}"
        before = seconds
    until = f"up to {worth} engines a doubling" if worth > counts[0] else "no doubling"
    yield f"  {until} shortens the rollout at least {WORTH} times"


def _sizes(rollouts: Rollouts) -> Iterator[str]:
    cluster = rollouts.config.cluster
    gpus = cluster.engines * cluster.tp
    sizes = rollouts.sizes()
    found = {tp: rollouts.seconds(gpus // tp, tp) for tp in sizes}
    best = min(found, key=lambda tp: float(found[tp].mean()))
    yield f"which tensor-parallel size, with {gpus} GPUs:"
    yield f"{'tp':>10} {'seconds':>9} {'against the best':>22}"
    for tp, seconds in found.items():
        yield f"{tp:10} {seconds.mean():9.1f} {_ratio(found[best], seconds)!s:>22}"
    equal = [str(tp) for tp in sizes if tp != best and _ratio(found[best], found[tp]).high >= 1]
    yield (
        f"  tp={best}"
        + (f"; not shown to be worse: {', '.join(equal)}" if equal else "")
        + ("; other sizes need a table that holds them" if len(sizes) == 1 else "")
    )


def _placements(rollouts: Rollouts, train_seconds: float, wake_seconds: float) -> Iterator[str]:
    cluster = rollouts.config.cluster
    gpus = cluster.engines * cluster.tp
    found = {
        "colocated, staleness 0": rollouts.seconds(cluster.engines, cluster.tp)
        + train_seconds
        + wake_seconds
    }
    splits = sorted(
        {round(cluster.engines * share) for share in (0.25, 0.5, 0.75)} - {0, cluster.engines}
    )
    for engines in splits:
        draw = rollouts.seconds(engines, cluster.tp)
        train = train_seconds * gpus / (gpus - engines * cluster.tp)
        where = f"apart, {engines * cluster.tp} GPUs draw, {gpus - engines * cluster.tp} train, staleness"
        found[f"{where} 0"] = draw + train
        found[f"{where} 1"] = np.maximum(draw, train)
    yield f"colocated or apart, with {gpus} GPUs and {train_seconds:g} s of training on all of them:"
    yield f"{'':>48} {'s a step':>9} {'colocated / this':>22}"
    for name, seconds in found.items():
        yield f"{name:>48} {seconds.mean():9.1f} {_ratio(next(iter(found.values())), seconds)!s:>22}"
    best = {
        ahead: min((n for n in found if n.endswith(ahead)), key=lambda n: found[n].mean())
        for ahead in "01"[: 1 + bool(splits)]
    }
    for name in best.values():
        yield f"  {name}: {found[name].mean():.1f} s, the shortest with this staleness"


def _caps(rollouts: Rollouts) -> Iterator[str]:
    cluster, work = rollouts.config.cluster, rollouts.config.workload
    caps = [
        cap for factor in (0.0625, 0.125, 0.25, 0.5, 1, 2) if (cap := int(work.cap * factor)) >= 16
    ]
    pays: dict[int, bool] = {}
    yield "at which caps on the response length speculation pays:"
    yield f"{'cap':>10} {'plain s':>9} {'adaptive s':>11} {'plain / adaptive':>22}"
    for cap in caps:
        plain = rollouts.seconds(cluster.engines, cluster.tp, cap=cap, policy="off+in_flight")
        ours = rollouts.seconds(cluster.engines, cluster.tp, cap=cap)
        pays[cap] = _ratio(plain, ours).low > PAYS
        yield f"{cap:10} {plain.mean():9.1f} {ours.mean():11.1f} {_ratio(plain, ours)!s:>22}"
    yes = [str(cap) for cap, good in pays.items() if good]
    no = [str(cap) for cap, good in pays.items() if not good]
    yield f"  pays at {', '.join(yes) or 'none'}" + (
        f"; not shown to pay at {', '.join(no)}" if no else ""
    )


def _ratio(base: np.ndarray, other: np.ndarray) -> Ratio:
    return Ratio.of((base / other).tolist())
