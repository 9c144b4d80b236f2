"""Write docs/metrics.md from the table of keys in the package: python tools/metrics_page.py"""

from __future__ import annotations

from pathlib import Path

from megatron_rlspec.records.metric_names import METRICS, Metric

PAGE = Path(__file__).parent.parent / "docs/metrics.md"
HEAD = """\
# Metrics

`metrics.jsonl` in the run directory has one JSON object a step, with these keys. TensorBoard shows the same, and
`rlspec report` draws the first to look at. `<d>` is the depth of a draft, from 1; `<config>` is a configuration such as
`k3` (three drafts) or `off`. A key that does not apply is absent. Inside slime, `spec/NAME` is `rollout/spec_NAME`.
When a run goes wrong: [troubleshooting](troubleshooting.md). `python tools/metrics_page.py` writes this page.
"""
SECTIONS = {
    "rollout": "Rollout",
    "policy": "The policy",
    "drift": "The policy's distance from its start",
    "drafter": "The drafter",
    "spec": "Speculation",
    "predict": "Acceptance predicted one step ahead",
    "push": "Pushes",
    "health": "Checks of the engines",
    "engine": "Engines",
    "seconds": "Where the time goes",
    "": "The record",
}


def page() -> str:
    """Render the page. A key without a section is a KeyError."""
    rows: dict[str, list[Metric]] = {name: [] for name in SECTIONS}
    for metric in METRICS:
        name = "seconds" if metric.key.startswith("seconds_") else metric.key.rpartition("/")[0]
        rows[name].append(metric)
    lines = [HEAD]
    for name, title in SECTIONS.items():
        lines += ["", f"## {title}", "", "| key, unit | meaning | normal | otherwise |", "|---|---|---|---|"]
        for metric in rows[name]:
            words = (metric.meaning, metric.normal, metric.act)
            cells = [cell.replace("|", "\\|").replace("<", "&lt;") for cell in words]
            unit = f"<br>{metric.unit}" if metric.unit else ""
            lines.append("| " + " | ".join([f"`{metric.key}`{unit}", *cells]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
