"""Write docs/configuration.md from the options in the package: python tools/configuration_page.py"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_rlspec.config import options, upstream
from megatron_rlspec.config.load import Option

PAGE = Path(__file__).parent.parent / "docs/configuration.md"
HEAD = """\
# Configuration

A run is configured by a TOML file, by options on the command line, or by both; the command line wins.

    rlspec train --config run.toml --optimizer.lr 1e-5

In the file an option `section.key` stands as `key` in the table `[section]`:

    [optimizer]
    lr = 1e-5

    [spec]
    candidate_steps = [0, 1, 2, 3]

Everything is checked before anything starts: names, types and bounds of all options, then the model directory
(config.json, names and shapes of the tensors, tokenizer files), the first 20,000 rows of the data, the cost table, and
whether the reward can be imported and called. A mistake is told in one line, with exit code 2.
So is an option that has no effect beside the others, unless the command line switches off what the file sets up.

The last column has the names that Megatron, slime, verl and SGLang give to an option. They are not accepted, but the
message says which option is meant:

    rlspec: unknown option rollout_batch_size; here it is rollout.prompts_per_step

## A reward of one's own

`reward.kind = "module:function"` names a function that is found from the working directory. It is called with four
keyword arguments and returns a finite number:

    def score(*, prompt: str, response: str, label: str, metadata: dict) -> float:
        return float(label in response)

An http(s) address gets the same four as a JSON object by POST, and answers a number or `{"reward": number}`.
"""


def page() -> str:
    """Render the page."""
    lines = [HEAD]
    section = ""
    theirs: dict[str, list[str]] = {}
    for name, ours in upstream.OURS.items():
        theirs.setdefault(ours, []).append(f"`{name}`")
    for option in options():
        if option.name.partition(".")[0] != section:
            section = option.name.partition(".")[0]
            lines += [
                "",
                f"## [{section}]",
                "",
                "| option, default | meaning | accepts | elsewhere |",
                "|---|---|---|---|",
            ]
        lines.append(row(option, theirs.get(option.name, [])))
    return "\n".join(lines) + "\n"


def row(option: Option, theirs: list[str]) -> str:
    """Render one row of the table."""
    cells = (
        f"`{option.name}`" + (f"<br>{option.shown}" if option.shown else ""),
        option.help,
        option.expected,
        ", ".join(theirs),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())
