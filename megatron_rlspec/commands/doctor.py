"""`rlspec doctor`: whether the installed Megatron, SGLang and slime are versions that fit, and what is missing.

Nothing of them is imported. If a GPU is visible, or with `--gpu`, it prints what the machine lacks
(`compat/machine.py`). A running job is not disturbed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet

from megatron_rlspec import arguments, files
from megatron_rlspec.compat import machine, patches
from megatron_rlspec.compat.installed import locate, version
from megatron_rlspec.config import Config, ConfigError, load
from megatron_rlspec.conversion.eagle3 import check_drafter
from megatron_rlspec.models.directory import check_model


@dataclass(frozen=True)
class Upstream:
    """A project that this package calls.

    module    its package
    versions  those that fit, one of these ranges; a newer one than was tried may fit, too
    remedy    what to do about another version
    install   what to do if it is missing
    """

    module: str
    versions: tuple[str, ...]
    remedy: str
    install: str = ""


UPSTREAM = {
    "megatron-core": Upstream(
        "megatron.core",
        (">=0.16.1",),
        "install megatron-core 0.16.1 to 0.19.2",
        "pip install 'megatron_rlspec[train]'",
    ),
    "sglang": Upstream(
        "sglang",
        ("==0.5.15.*", ">=0.5.23"),
        'install sglang 0.5.23 or 0.5.15.post1, or set rollout.engine="embedded" with spec.mode="fixed"',
        "pip install 'megatron_rlspec[engine]', or set rollout.engine=\"embedded\" or rollout.urls",
    ),
    "slime": Upstream(
        "slime",
        (">=0",),
        "use slime 624b824a8, or adapt integrations/ to this version",
        "only `rlspec slime` needs it",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    name   an upstream project, or `gpu-` and what the machine lacks
    state  of a project: "fits", "differs" or "missing"; of the machine: "lacks", or "stops" if training or serving
           cannot start without it
    """

    name: str
    state: Literal["fits", "differs", "missing", "lacks", "stops"]
    text: str


def examine(names: Iterable[str] = tuple(UPSTREAM), path: Sequence[str] = ()) -> list[Finding]:
    """Compare the versions of the named projects with those that fit.

    `path`: directories to look in first. The version of a checkout, which has no wheel, is not compared.
    """
    findings = []
    for name in names:
        upstream = UPSTREAM[name]
        module = f"{upstream.module}.__init__"
        found = version(name)
        place = locate(module, path)
        if place is None:
            findings.append(Finding(name, "missing", "not installed"))
        elif place != locate(module):
            findings.append(Finding(name, "fits", "a checkout, whose version is not compared"))
        elif not found or any(
            SpecifierSet(one).contains(found, prereleases=True) for one in upstream.versions
        ):
            findings.append(Finding(name, "fits", "fits"))
        else:
            findings.append(Finding(name, "differs", f"{found} is installed; {upstream.remedy}"))
    return findings


def needed(config: Config, engines: bool = True) -> dict[str, str]:
    """Return the projects that a run of our own loop needs -> because of what. `engines`: whether it starts any."""
    reasons = {"megatron-core": "training"}
    if engines and config.rollout.engine == "sglang" and not config.rollout.urls:
        reasons["sglang"] = 'rollout.engine="sglang"'
    return reasons


def refuse_if_affected(config: Config, *, engines: bool) -> None:
    """Raise ConfigError if a project that the run needs is missing or does not fit. `engines`: as in `needed`."""
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
        description="Say whether the installed megatron-core, SGLang and slime fit, and what a GPU machine lacks.",
        example="rlspec doctor --gpu",
        first=("--config", "--gpu"),
        epilog="Exit status: 0; 1 if what is installed does not fit the configuration given by --config, or if --gpu "
        "finds that training or serving on GPUs cannot start; 2 for a mistake.",
    )
    p.add_argument(
        "--config", metavar="FILE", help="say whether what is installed fits this configuration"
    )
    p.add_argument(
        "--gpu",
        action="store_true",
        help="check the packages for GPUs also where none is visible (image builds)",
    )
    p.add_argument(
        "--path", action="append", default=[], metavar="DIR", help="look here first (checkouts)"
    )
    p.add_argument(
        "--json", metavar="FILE", help="write the findings as JSON; - for standard output"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings. Returns the exit status: 1 for a configuration that does not fit, and as `--gpu` says."""
    own = parser()
    options = own.parse_args(argv)
    for path in options.path:
        if not os.path.isdir(path):
            own.error(f"--path {path or repr(path)}: no such directory")
    if options.json and options.json != "-":
        files.check_outputs({"--json": options.json}, {"--config": options.config})
    config = load(options.config) if options.config else None
    # wrong layers of the target would only cost acceptance
    if config is not None and config.drafter.path:
        target = check_model(config.model.path, "train", drafter=False, tokenizer=False)
        check_drafter(config.drafter.path, target, config.model.path)
    findings = examine(path=options.path)
    unfit = [
        f.name
        for f in findings
        if f.state != "fits" and config is not None and f.name in needed(config)
    ]
    lacks = None
    if options.gpu or machine.visible_gpus():
        lacks = machine.lacks(machine.gather(options.path))
        findings += [
            Finding(lack.name, "stops" if lack.stops else "lacks", lack.text) for lack in lacks
        ]

    lines = []
    for f in findings:
        if f.state == "missing":
            lines.append(f"{f.name}: {f.text}; {UPSTREAM[f.name].install}")
        elif f.name in UPSTREAM:
            lines.append(f"{f.name} {version(f.name) or '(no wheel)'}: {f.text}")
    if shutil.which("git"):
        lines += [f"patches/{name}: {now}" for name, now in patches.found(options.path).items()]
    else:
        lines.append("patches: not compared, because git is not installed")
    lines += [f"GPU machine: {f.text}" for f in findings if f.name not in UPSTREAM]
    if lacks == []:
        lines.append("GPU machine: nothing is missing")
    if config is not None:
        lines.append(
            f"this configuration {f'needs another {unfit[0]}' if unfit else 'fits what is installed'}"
        )
    as_json = json.dumps([asdict(f) for f in findings], indent=2)
    print(as_json if options.json == "-" else "\n".join(lines))
    if options.json and options.json != "-":
        files.write_output(options.json, as_json + "\n")
    return int(bool(unfit) or (options.gpu and any(f.state == "stops" for f in findings)))
