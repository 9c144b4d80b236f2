"""`rlspec doctor`: whether the installed Megatron, SGLang and slime are versions that fit, and what is missing.

The command imports none of them. If a GPU is visible, or with `--gpu`, it also prints what the machine lacks
(`compat/machine.py`). A running job is not disturbed. `rlspec train`, `sft` and `replay` check the versions, too,
before they begin (`check_versions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet

from megatron_rlspec import arguments
from megatron_rlspec.compat import machine
from megatron_rlspec.compat.installed import locate, version
from megatron_rlspec.config import ConfigError


@dataclass(frozen=True)
class Upstream:
    """A project that this package calls.

    module    name of its package, for an import
    versions  ranges of versions; a version in one of them fits. Ranges without an upper end also take versions that
              were not tried
    remedy    what to do about another version
    install   what to do if it is missing
    """

    module: str
    versions: tuple[str, ...]
    remedy: str
    install: str = ""


# name of the distribution -> project. A change also concerns the extras of `pyproject.toml`, and for SGLang
# `rollout/sglang/scheduler/versions.py`. The extra's range of megatron-core is wider on purpose: it leaves slime's
# 0.16.0rc0 in place, which does not fit `rlspec train`.
UPSTREAM = {
    "megatron-core": Upstream(
        "megatron.core",
        (">=0.16.1",),
        "install megatron-core 0.16.1 to 0.19.2",
        "pip install 'megatron_rlspec[train]'",
    ),
    "sglang": Upstream(
        "sglang",
        (">=0.5.15.post1,<0.5.20", ">=0.5.23"),
        'install sglang 0.5.15.post1 to 0.5.19 or 0.5.23, or set rollout.engine="embedded"',
        "pip install 'megatron_rlspec[engine]', or set rollout.engine=\"embedded\" or rollout.urls",
    ),
    "slime": Upstream(
        "slime",
        (">=0",),
        "",  # not shown: every release fits, and commits are not compared (examples/slime/README.md)
        "only `rlspec slime` needs it; 624b824a8 is the commit that was tried",
    ),
}


@dataclass(frozen=True)
class ProjectLine:
    """What `examine` says of an upstream project: its name in `UPSTREAM`, and a text for one line."""

    name: str
    state: Literal["fits", "differs", "missing"]
    text: str


def examine(names: Iterable[str] = tuple(UPSTREAM)) -> list[ProjectLine]:
    """Compare the installed versions of the named projects (keys of `UPSTREAM`) with those that fit.

    A project that is importable and has no version counts as fitting: a checkout on the path, as slime usually is.
    Nothing is imported: `locate` looks for the file `__init__.py` of the package.
    """
    findings = []
    for name in names:
        upstream = UPSTREAM[name]
        installed = version(name)
        if locate(f"{upstream.module}.__init__") is None:
            findings.append(ProjectLine(name, "missing", "not installed"))
        elif not installed or _is_among(installed, upstream.versions):
            findings.append(ProjectLine(name, "fits", "fits"))
        else:
            findings.append(
                ProjectLine(name, "differs", f"{installed} is installed; {upstream.remedy}")
            )
    return findings


def _is_among(installed: str, versions: Sequence[str]) -> bool:
    # with pre-releases, which images of upstream may have
    return any(SpecifierSet(text).contains(installed, prereleases=True) for text in versions)


def check_versions(*, starts_sglang: bool) -> None:
    """Raise ConfigError if a project that a run needs is missing or does not fit.

    starts_sglang  whether the run launches SGLang engines itself; else SGLang need not be installed here
    """
    reasons = {"megatron-core": "training"}
    if starts_sglang:
        reasons["sglang"] = 'rollout.engine="sglang"'
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
        epilog="Exit status: 0; 1 if --gpu finds that training or serving on GPUs cannot start; 2 for a mistake.",
    )
    p.add_argument(
        "--gpu",
        action="store_true",
        help="check the packages for GPUs also where none is visible (image builds)",
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings. Returns the exit status; versions do not change it, only what `--gpu` finds."""
    options = parser().parse_args(argv)
    for finding in examine():
        if finding.state == "missing":
            print(f"{finding.name}: {finding.text}; {UPSTREAM[finding.name].install}")
        else:
            print(f"{finding.name} {version(finding.name) or '(no wheel)'}: {finding.text}")
    if not (options.gpu or machine.visible_gpus()):
        return 0
    lacks = machine.lacks(machine.gather())
    for lack in lacks:
        print(f"GPU machine: {lack.text}")
    if not lacks:
        print("GPU machine: nothing is missing")
    return int(options.gpu and any(lack.stops for lack in lacks))
