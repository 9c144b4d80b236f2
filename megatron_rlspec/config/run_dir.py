"""Look at what a run directory holds before a run starts in it. Standard library only; writes nothing."""

from __future__ import annotations

from pathlib import Path


def taken_by(run_dir: Path, resume: bool) -> str:
    """Return why no run can start in `run_dir`, or with `resume` continue there; "" if it can."""
    if (run_dir / "hf").exists():
        return "holds hf/, the result of a finished run; expected another directory, or move hf/ away to go on"
    checkpoints = run_dir / "checkpoints"
    if checkpoints.exists() and not checkpoints.is_dir():
        return "checkpoints is a file; expected a directory"
    if resume:
        return ""
    records = run_dir / "metrics.jsonl"
    found = sorted(path.name for path in checkpoints.glob("step-*/"))
    if not found and not (records.exists() and records.stat().st_size):
        return ""
    newest = f"checkpoint {found[-1]}" if found else "metrics.jsonl"
    return f"holds a run already ({newest}); add --train.resume true to continue it, or take another train.run_dir"
