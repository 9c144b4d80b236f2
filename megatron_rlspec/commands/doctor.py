"""`rlspec doctor`: whether the installed Megatron, SGLang and slime have what this package calls, and what is missing.

Names and signatures are read from their source, and nothing of it is imported (`compat/contracts.py`). If a GPU is
visible, or with `--gpu`, it prints what the machine lacks (`compat/machine.py`). A running job is not disturbed.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from megatron_rlspec import arguments, files
from megatron_rlspec.checkpoint.eagle3 import check_drafter
from megatron_rlspec.compat import contracts, machine, patches
from megatron_rlspec.config import Config, ConfigError, load
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.rollout.sglang.scheduler import versions


@dataclass(frozen=True)
class Upstream:
    """A project that this package calls.

    module     its package
    contracts  version -> the names and parameters that must be there; one of them suffices. The newest comes first
    remedy     what to do if none is kept
    install    what to do if it is missing
    """

    module: str
    contracts: Mapping[str, Mapping[str, Sequence[str]]]
    remedy: str
    install: str = ""


UPSTREAM = {
    "megatron-core": Upstream(
        "megatron.core",
        {"0.16.1 to 0.19.2": contracts.MEGATRON},
        "install megatron-core 0.16.1 to 0.19.2, or adapt train/ to this version",
        "pip install 'megatron_rlspec[train]'",
    ),
    "sglang": Upstream(
        "sglang",
        versions.CONTRACTS,
        'install sglang 0.5.23 or 0.5.15.post1, or set rollout.engine="embedded" with spec.mode="fixed"',
        "pip install 'megatron_rlspec[sglang]', or set rollout.engine=\"embedded\" or rollout.urls",
    ),
    "slime": Upstream(
        "slime", {"624b824a8": contracts.SLIME}, "use slime 624b824a8, or adapt integrations/ to this version"
    ),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    name   an upstream project, or `gpu-` and what the machine lacks
    state  of a project: "fits", or "differs" and `text` names what is gone; "missing": not installed.
           Of the machine: "lacks", or "stops" if training or serving cannot start without it
    """

    name: str
    state: Literal["fits", "differs", "missing", "lacks", "stops"]
    text: str


def examine(names: Iterable[str] = tuple(UPSTREAM), path: Sequence[str] = ()) -> list[Finding]:
    """Compare the named projects with what this package calls of them, within 0.2 s.

    `path`: directories to look in first, for checkouts that are not installed (slime's, and its Megatron's).
    """
    read = contracts.installed(path)
    findings = []
    for name in names:
        upstream = UPSTREAM[name]
        if read(f"{upstream.module}.__init__") is None:
            findings.append(Finding(name, "missing", "not installed"))
        elif version := contracts.kept(upstream.contracts, read):
            findings.append(Finding(name, "fits", f"has all that this package calls, as {version}"))
        else:
            gone = contracts.broken(next(iter(upstream.contracts.values())), read)
            findings.append(Finding(name, "differs", f"{gone}; {upstream.remedy}"))
    return findings


def needed(config: Config, engines: bool = True) -> dict[str, str]:
    """Return the projects that a run of our own loop needs -> because of what. `engines`: whether it starts any."""
    reasons = {"megatron-core": "training"}
    if engines and config.rollout.engine == "sglang" and not config.rollout.urls:
        reasons["sglang"] = 'rollout.engine="sglang"'
    return reasons


def refuse_if_affected(config: Config, *, engines: bool) -> None:
    """Raise ConfigError if a project that the run needs is missing or has other names. `engines`: as in `needed`."""
    reasons = needed(config, engines)
    for finding in examine(reasons):
        reason = reasons[finding.name]
        if finding.state == "missing":
            raise ConfigError(
                f"{finding.name} is not installed, but {reason} needs it; {UPSTREAM[finding.name].install}"
            )
        if finding.state == "differs":
            raise ConfigError(f"{reason} does not fit the installed {finding.name}: {finding.text}")


def parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="rlspec doctor",
        description="Say whether the installed megatron-core, SGLang and slime have what this package calls of them, "
        "and what the machine lacks for GPUs.",
        example="rlspec doctor --gpu",
        first=("--config", "--gpu"),
        epilog="Exit status: 0; 1 if a run of the configuration given by --config would be refused, or if --gpu finds "
        "that training or serving on GPUs cannot start; 2 for a mistake.",
    )
    p.add_argument("--config", metavar="FILE", help="say whether a run of this configuration would be refused")
    p.add_argument(
        "--gpu", action="store_true", help="check the packages for GPUs also where none is visible (image builds)"
    )
    p.add_argument("--path", action="append", default=[], metavar="DIR", help="look here first (checkouts)")
    p.add_argument("--json", metavar="FILE", help="write the findings as JSON; - for standard output")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings. Returns the exit status: 1 if the configuration or `--gpu` cannot start, else 0."""
    options = parser().parse_args(argv)
    if options.json and options.json != "-":
        files.check_outputs({"--json": options.json}, {"--config": options.config})
    config = load(options.config) if options.config else None
    if config is not None and config.drafter.kind == "eagle3":  # wrong layers of the target would only cost acceptance
        target = check_model(config.model.path, "train", drafter=False)
        check_drafter(config.drafter.path, target, config.model.path)
    findings = examine(path=options.path)
    unfit = [f.name for f in findings if f.state != "fits" and config is not None and f.name in needed(config)]
    lacks = None
    if options.gpu or machine.visible_gpus():
        lacks = machine.lacks(machine.gather(options.path))
        findings += [Finding(lack.name, "stops" if lack.stops else "lacks", lack.text) for lack in lacks]

    lines = [f"{f.name} {_version(f.name)}: {f.text}" for f in findings if f.name in UPSTREAM]
    lines += [f"patches/{name}: {now}" for name, now in patches.found(options.path).items()]
    lines += [f"GPU machine: {f.text}" for f in findings if f.name not in UPSTREAM]
    if lacks == []:
        lines.append("GPU machine: nothing is missing")
    if config is not None:
        lines.append(f"this configuration {f'needs another {unfit[0]}' if unfit else 'can start'}")
    as_json = json.dumps([asdict(f) for f in findings], indent=2)
    print(as_json if options.json == "-" else "\n".join(lines))
    if options.json and options.json != "-":
        files.write_output(options.json, as_json + "\n")
    return int(bool(unfit) or (options.gpu and any(f.state == "stops" for f in findings)))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(no wheel)"


if __name__ == "__main__":
    sys.exit(main())
