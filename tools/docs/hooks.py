"""Hooks of MkDocs.

Files of the repository that a page links to are pages of the site, too, below `source/`. No page loads anything from a
network.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent.parent
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")  # a relative link, without its anchor
WORKER = (Path(__file__).parent / "worker.js").read_text()
GUIDES = "getting-started install drafter slime runs serve configuration metrics troubleshooting glossary"
FIRST_FOUND = {f"{name}.md" for name in GUIDES.split()}  # pages that a search shows first
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json", ".yml": "yaml", ".patch": "diff"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each linked file and folder outside docs/, and for those that these link to."""
    waiting = [path for file in files.documentation_pages() for path in _outside(file.src_uri, file.content_string)]
    known: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in known:
            continue
        known.add(path)
        text = _page(path)
        uri = _uri(path)
        files.append(File.generated(config, uri, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
        waiting += _outside(uri, text)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files outside docs/ at their pages, and say how the search ranks this page."""
    here = page.file.src_uri
    if here in FIRST_FOUND:
        page.meta["search"] = {"boost": 3}
    elif here.startswith("source/"):
        page.meta["search"] = {"exclude": True}

    def moved(match: re.Match[str]) -> str:
        return posixpath.relpath(_uri(_target(here, match.group())), posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Put our worker.js in place of the script that the theme loads from a network, for a search without a server."""
    return output.replace('<script src="https://unpkg.com/iframe-worker/shim">', "<script>" + WORKER)


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same in the page that servers show for a missing one."""
    return on_post_page(output_content)


def _outside(uri: str, markdown: str) -> list[str]:
    targets = [_target(uri, link) for link in LINK.findall(markdown)]
    return [target for target in targets if not target.startswith("docs/") and (ROOT / target).exists()]


def _target(uri: str, link: str) -> str:
    """Return the path in the repository that a link of the page means."""
    inside = uri.removeprefix("source/")
    page = inside if inside != uri else f"docs/{uri}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _uri(path: str) -> str:
    """Return the page of a path in the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".md"):
        return f"source/{path}"
    return f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}.md"


def _page(path: str) -> str:
    there = ROOT / path
    if there.is_dir():
        names = sorted(child.name for child in there.iterdir() if not child.name.startswith(("_", ".")))
        return f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    text = there.read_text()
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{LANGUAGES.get(there.suffix, 'text')}\n{text}\n````\n"
