"""Write docs/configuration.md from the options in the package: python tools/configuration_page.py"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megatron_rlspec.config import Config, options
from megatron_rlspec.config.load import Option
from megatron_rlspec.config.other_names import OPTIONS, SENTENCES

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

The command line takes a list as in the file, in quotation marks for the shell, or its values with commas between them:
`--spec.candidate_steps 0,1,2,3`, `--rollout.stop '["\\n\\n", ","]'`.

Everything is checked before anything starts: names, types and bounds of all options, then the model directory
(config.json, names and shapes of the tensors, tokenizer files), the first 20,000 rows of the data, and
whether the reward can be imported and called. A mistake is told in one line, with exit code 2.
So is an option that has no effect beside the others, unless the command line switches off what the file sets up.

## Names of other projects

They are not accepted, but answered in one line with the name here:

OTHER_NAMES

A reward of your own is [a function](extending.md#a-reward).
"""


def page() -> str:
    """Render the page."""
    names = ["| TRL, verl, slime, SkyRL, Megatron or SGLang | here |", "|---|---|"]
    for answer, others in (OPTIONS | SENTENCES).items():
        names.append(f"| {', '.join(f'`{name}`' for name in others)} | {answer} |")
    lines = [HEAD.replace("OTHER_NAMES", "\n".join(names))]
    section = ""
    for option in options():
        if option.name.partition(".")[0] != section:
            section = option.name.partition(".")[0]
            lines += [
                "",
                f"## [{section}]",
                "",
                "| option, default | meaning | accepts |",
                "|---|---|---|",
            ]
        lines.append(row(option))
    return "\n".join(lines) + "\n"


def row(option: Option) -> str:
    """Render one row of the table."""
    name = f"`{option.name}`" + (f"<br>{option.shown}" if option.shown else "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (name, option.help, accepts(option.name))) + " |"


def accepts(name: str) -> str:
    """Return what an option accepts, in words: `an integer from 1 to 64`."""
    section, _, key = name.partition(".")
    schema = type(getattr(Config(), section)).model_json_schema()["properties"][key]
    if "anyOf" in schema:
        return f"auto, or {words_of(schema['anyOf'][0])}"
    return words_of(schema)


def words_of(schema: dict[str, Any]) -> str:
    """Return what a JSON schema accepts, in words."""
    if "enum" in schema:
        *first, last = (str(value).lower() if isinstance(value, bool) else repr(value) for value in schema["enum"])
        return f"{', '.join(first)} or {last}"
    kinds = {"integer": "an integer", "number": "a number", "string": "text", "boolean": "true or false"}
    kinds["object"] = "a table, JSON, or NAME=VALUE,..."
    kind = kinds.get(schema["type"]) or f"a list of {schema['items']['type'].replace('string', 'text')}s"
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    bounds = [f"{word} {schema[bound]}" for bound, word in words.items() if bound in schema]
    return f"{kind} {' and '.join(bounds)}".rstrip()


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())
