"""`rlspec doctor`: known defects of the installed megatron-core, SGLang and slime, and the settings that they affect.

"present" and "absent" are results of upstream's own code, run now (`train/probes.py`, `integrations/slime/probes.py`,
`rollout/sglang/http/probes.py`). Each package runs in a process of its own without a GPU, so a running job is not
disturbed. Names and signatures are read from the source instead (`contracts.py`). Defects without a probe, found by
reading, are listed as "read". If a GPU is visible, or with `--gpu`, it prints what the machine lacks (`machine.py`).
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_rlspec import arguments, files
from megatron_rlspec.checkpoint.eagle3 import check_drafter
from megatron_rlspec.compat import contracts, machine, patches
from megatron_rlspec.config import Config, ConfigError, load
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.rollout.sglang.scheduler import versions as sglang

State = Literal["present", "absent", "unknown", "read", "not installed"]
WORKER_SECONDS = 300


def _never(config: Config) -> None:
    return None


def _always(config: Config) -> str | None:
    return "every configuration"


def _sglang(config: Config) -> str | None:
    launched = config.rollout.engine == "sglang" and not config.rollout.urls
    return 'rollout.engine="sglang"' if launched else None


@dataclass(frozen=True)
class Defect:
    """One known defect of an upstream package.

    harm     what goes wrong
    remedy   what to do if our own loop is affected; otherwise why our loop and `rlspec slime` are not affected
    reached  returns the settings of our own loop that are affected, or None
    """

    name: str
    package: str
    harm: str
    remedy: str
    reached: Callable[[Config], str | None] = _never


@dataclass(frozen=True)
class ProbeResult:
    """The state of one defect here.

    seen  what the probe saw, or why it could not decide
    hits  the settings of a given configuration that are affected
    """

    name: str
    package: str
    state: State
    seen: str = ""
    hits: str = ""


MODULES = {
    "megatron-core": "megatron_rlspec.train.probes",
    "sglang": "megatron_rlspec.rollout.sglang.http.probes",
    "slime": "megatron_rlspec.integrations.slime.probes",
}
# A package may have several supported versions; the newest comes first.
CONTRACTS = {
    "mcore-contract": {"0.16.1 to 0.19.2": contracts.MEGATRON},
    "sglang-contract": sglang.CONTRACTS,
    "slime-contract": {"624b824a8": contracts.SLIME},
}
INSTALLED_AS = {"megatron-core": "megatron.core", "sglang": "sglang", "slime": "slime"}
INSTALL = {
    "megatron-core": "pip install 'megatron_rlspec[train]'",
    "sglang": "pip install 'megatron_rlspec[sglang]', or set rollout.engine=\"embedded\" or rollout.urls",
}
DEFECTS = (
    Defect(
        "mcore-contract",
        "megatron-core",
        "names that training calls are gone or take other arguments",
        "install megatron-core 0.16.1 to 0.19.2, or adapt train/ to this version",
        _always,
    ),
    Defect(
        "mcore-roll-unpadded",
        "megatron-core",
        "MTP reads and predicts wrong tokens where sequences are padded",
        "batches are rolled before they are split and padded (packing/shift.py)",
    ),
    Defect(
        "mcore-mtp-no-clamp",
        "megatron-core",
        "NaN in every gradient on a rank without a response token",
        "our losses are sums divided by global counts, never local means",
    ),
    Defect(
        "mcore-mtp-moves-policy",
        "megatron-core",
        "the MTP loss trains the policy's head, embedding and layers",
        "the drafter is a module of its own on detached inputs",
    ),
    Defect(
        "mcore-mtp-labels-none",
        "megatron-core",
        "no log-probabilities from a model with MTP",
        "the policy has no MTP inside",
    ),
    Defect(
        "mcore-mtp-recompute-packed",
        "megatron-core",
        "full recomputation of a packed batch crashes with MTP",
        "the drafter recomputes by torch's non-reentrant checkpoint",
    ),
    Defect(
        "mcore-cp-local-count",
        "megatron-core",
        "MTP gradients depend on how tokens are split over context-parallel ranks",
        "denominators are global and known before the first backward",
    ),
    Defect(
        "mcore-shared-step",
        "megatron-core",
        "wrong Adam bias correction after a resume, with no error",
        "our own resume files keep every parameter's count (train/checkpoint.py)",
    ),
    Defect(
        "sglang-contract",
        "sglang",
        "names that our plugin replaces or calls are gone",
        'install sglang 0.5.23 or 0.5.15.post1, or set rollout.engine="embedded" with spec.mode="fixed"',
        _sglang,
    ),
    Defect(
        "sglang-nccl-stale-drafter",
        "sglang",
        "a weight push over NCCL leaves the drafter as it was",
        "our pushes do not use this path; inside slime our plugin also loads the tensors into the drafter",
    ),
    Defect(
        "sglang-adaptive-silently-off",
        "sglang",
        "adaptive speculation is dropped with one warning in a log",
        "`rlspec serve` refuses to start if its controller is not active; `rlspec slime` checks the flags",
    ),
    Defect(
        "sglang-accept-rate-width",
        "sglang",
        "the accept rate is wrong as soon as steps change at run time",
        "acceptance is computed from the histogram, as a ratio of sums",
    ),
    Defect(
        "sglang-cpu-greedy",
        "sglang",
        "on a CPU, sampling requests are verified greedily",
        "our CPU operators include a sampling verifier",
    ),
    Defect(
        "slime-contract",
        "slime",
        "names that our hooks replace or call are gone",
        "use slime 624b824a8, or adapt integrations/ to this version",
    ),
    Defect(
        "slime-mask-shift",
        "slime",
        "MTP is trained on the last prompt token and never on the last response token",
        "`rlspec slime` replaces the MTP loss",
    ),
    Defect(
        "slime-dead-accept-rate",
        "slime",
        "rollout/spec_accept_rate is always 0",
        "`rlspec slime` reads the histogram",
    ),
    Defect(
        "slime-qwen3-next-swap",
        "slime",
        "Megatron trains a Qwen3-Next drafter with swapped inputs",
        "apply patches/slime before training a Qwen3-Next drafter",
    ),
    Defect(
        "slime-per-token-cp",
        "slime",
        "with --calculate-per-token-loss the MTP loss shrinks by the CP size",
        "the drafter's loss has its own denominator",
    ),
    Defect(
        "slime-allgather-roll",
        "slime",
        "under --allgather-cp the MTP roll assumes the zigzag layout",
        "our rolls use the layout of the batch",
    ),
    Defect(
        "slime-r3-mtp",
        "slime",
        "routing replay stops at an assertion where the MTP layer is a mixture of experts",
        "`rlspec slime` refuses the combination",
    ),
)


def examine(names: Iterable[str] | None = None, path: Sequence[str] = ()) -> list[ProbeResult]:
    """Run the named probes (all of them by default) and return one result per defect, in the catalogue's order.

    `path`: directories to look in first, for checkouts that are not installed (slime's, and its Megatron's).
    """
    wanted = [d for d in DEFECTS if names is None or d.name in set(names)]
    found = {d.name: _compare(d, path) for d in wanted if d.name in CONTRACTS}
    probed: dict[str, list[str]] = {}
    for d in wanted:
        if d.name not in CONTRACTS:
            probed.setdefault(d.package, []).append(d.name)
    with ThreadPoolExecutor(len(probed) or 1) as threads:
        for answer in threads.map(lambda package: _ask(package, probed[package], path), probed):
            found |= {result.name: result for result in answer}
    return [found[d.name] for d in wanted]


def affected(results: Iterable[ProbeResult], config: Config) -> list[ProbeResult]:
    """Fill in `hits` of the defects that are present and that this configuration runs into."""
    by_name = {d.name: d for d in DEFECTS}
    return [replace(f, hits=(by_name[f.name].reached(config) or "") if f.state == "present" else "") for f in results]


def refuse_if_affected(config: Config, *, engines: bool) -> None:
    """Raise ConfigError, in one line, if a defect that this configuration runs into is present here.

    `engines`: whether the run starts any. Only probes of defects that the configuration can run into are run. Whether a
    package is installed and keeps its contract is read from its source within 0.2 s, without importing it.
    """
    reached = [d.name for d in DEFECTS if d.reached(config) and (engines or d.package != "sglang")]
    for result in affected(examine(reached), config):
        defect = next(d for d in DEFECTS if d.name == result.name)
        if result.state == "not installed":
            raise ConfigError(
                f"{defect.package} is not installed, but {defect.reached(config)} needs it; {INSTALL[defect.package]}"
            )
        if result.hits:
            raise ConfigError(
                f"{result.hits} is not safe here ({result.name}): {defect.harm} ({result.seen}); {defect.remedy}"
            )


def _compare(defect: Defect, path: Sequence[str]) -> ProbeResult:
    read = contracts.installed(path)
    if read(f"{INSTALLED_AS[defect.package]}.__init__") is None:
        return ProbeResult(defect.name, defect.package, "not installed")
    by_version = CONTRACTS[defect.name]
    seen = None if contracts.kept(by_version, read) else contracts.broken(next(iter(by_version.values())), read)
    return ProbeResult(defect.name, defect.package, "present" if seen else "absent", seen or "")


def _ask(package: str, names: list[str], path: Sequence[str]) -> list[ProbeResult]:
    """Probe one package in a worker process that sees neither a GPU nor the variables of a job."""
    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in job and not k.startswith(("TORCHELASTIC", "GROUP_"))}
    here = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join([*path, here, *filter(None, [env.get("PYTHONPATH")])])
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "megatron_rlspec.commands.doctor",
            "--worker",
            package,
            "--answer",
            str(answer),
            *names,
        ]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WORKER_SECONDS)
        except subprocess.TimeoutExpired:
            return [ProbeResult(n, package, "unknown", f"no answer within {WORKER_SECONDS} s") for n in names]
        if answer.exists():
            return [ProbeResult(**entry) for entry in json.loads(answer.read_text())]
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        reason = f"the probe process ended with {done.returncode}: {last}"
        return [ProbeResult(n, package, "unknown", reason) for n in names]


def _work(package: str, names: Sequence[str], answer: str) -> None:
    """Run the probes (in the worker process) and write their results."""
    results: list[ProbeResult] = []
    if not _importable(INSTALLED_AS[package]):
        results = [ProbeResult(name, package, "not installed") for name in names]
    else:
        probes = importlib.import_module(MODULES[package])
        probes.prepare()
        results = [_probe(name, package, probes.PROBES.get(name)) for name in names]
    Path(answer).write_text(json.dumps([asdict(f) for f in results]))


def _probe(name: str, package: str, probe: Callable[[], str | None] | None) -> ProbeResult:
    if probe is None:
        return ProbeResult(name, package, "read", "found by reading upstream's source; nothing was run")
    try:
        seen = probe()
    except Exception as error:  # any error of upstream's means only that this probe cannot decide
        return ProbeResult(name, package, "unknown", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return ProbeResult(name, package, "present" if seen else "absent", seen or "")


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def versions() -> dict[str, str]:
    """Look up the versions of the installed wheels."""
    found = {}
    for name in INSTALLED_AS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "no wheel installed"
    return found


def parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="rlspec doctor",
        description="Run the known defects of the installed megatron-core, SGLang and slime, and say which are there.",
        example="rlspec doctor --gpu",
        first=("--config", "--gpu"),
        epilog="Exit status: 0; 1 if the configuration given by --config would run into a defect, or if --gpu finds "
        "that training or serving on GPUs cannot start; 2 for a mistake.",
    )
    p.add_argument("names", nargs="*", metavar="DEFECT", help="only these; all by default")
    p.add_argument("--config", metavar="FILE", help="say whether this configuration of our own loop is affected")
    p.add_argument(
        "--gpu", action="store_true", help="check the packages for GPUs also where none is visible (image builds)"
    )
    p.add_argument("--path", action="append", default=[], metavar="DIR", help="look here first (checkouts)")
    p.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    p.add_argument("--worker", choices=MODULES, help=argparse.SUPPRESS)
    p.add_argument("--answer", help=argparse.SUPPRESS)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report.

    Exit status: 1 if the given configuration is affected, or if `--gpu` finds a lack that stops training or serving;
    2 for a mistake; else 0.
    """
    own = parser()
    options = own.parse_args(argv)
    if unknown := set(options.names) - {d.name for d in DEFECTS}:
        near = difflib.get_close_matches(min(unknown), [d.name for d in DEFECTS], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        own.error(f"no defect is called {min(unknown)[:60]!r}; {hint}known: {', '.join(d.name for d in DEFECTS)}")
    if options.worker:
        _work(options.worker, options.names, options.answer)
        return 0
    if options.json and options.json != "-":
        files.check_outputs({"--json": options.json}, {"--config": options.config})
    config = load(options.config) if options.config else None
    if config is not None and config.drafter.kind == "eagle3":  # wrong layers of the target would only cost acceptance
        target = check_model(config.model.path, "train", drafter=False)
        check_drafter(config.drafter.path, target, config.model.path)
    results = examine(options.names or None, options.path)
    wanted = options.gpu or (machine.visible_gpus() > 0 and not options.names)
    lacking = machine.lacks(machine.gather(options.path)) if wanted else None
    if config is not None:
        results = affected(results, config)
    of_machine = [ProbeResult(lack.name, "GPU machine", "present", lack.text) for lack in lacking or ()]
    text = json.dumps([asdict(f) for f in [*results, *of_machine]], indent=2)
    if options.json == "-":
        print(text)
    else:
        _show(results, config, patches.found(options.path), lacking)
        if options.json:
            files.write_output(options.json, text + "\n")
    return int(any(f.hits for f in results) or (options.gpu and any(lack.stops for lack in lacking or ())))


def _show(
    results: Sequence[ProbeResult],
    config: Config | None,
    patched: Mapping[str, str],
    lacking: Sequence[machine.Lack] | None = None,
) -> None:
    """Print one paragraph per defect. Its first line is never wrapped, so the name can be copied as an argument."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    style = {"present": "bold red", "absent": "green", "unknown": "yellow", "read": "yellow", "not installed": "dim"}
    by_name = {d.name: d for d in DEFECTS}
    console = Console(highlight=False)
    for name, version in versions().items():
        console.print(Text(f"{name} {version}"))
    for f in results:
        remedy = by_name[f.name].remedy
        console.print()
        console.print(Text.assemble((f.name, "bold"), "  ", (f.state, style[f.state])), no_wrap=True, overflow="ignore")
        rows = [("harm", by_name[f.name].harm), ("seen", f.seen), ("hits", f.hits), ("here", remedy)]
        for title, text in rows:
            if text:
                shown = Text(f"{title}: {text}", "bold red" if title == "hits" else "")
                console.print(Padding(shown, (0, 0, 0, 2), expand=False))
    console.print()
    for name, now in patched.items():
        console.print(Text(f"patches/{name}: {now}"), soft_wrap=True)
    for lack in lacking or ():
        console.print(Text(f"GPU machine: {lack.text}", "bold red" if lack.stops else "yellow"), soft_wrap=True)
    if lacking is not None and not lacking:
        console.print(Text("GPU machine: nothing is missing"))
    if config is not None:
        hit = ", ".join(f.name for f in results if f.hits)
        console.print(Text(f"this configuration is {f'affected by {hit}' if hit else 'not affected'}"), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
