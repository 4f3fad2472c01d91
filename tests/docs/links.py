"""Links between the Markdown files of this repository, to files and to parts of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r"^#+ (.+)$", re.MULTILINE)


def texts() -> list[Path]:
    """Returns the files whose links are checked."""
    folders = ("docs/pages", "examples", "schemas")
    below = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.md"))]
    return [*sorted(ROOT.glob("*.md")), *below]


def anchors(path: Path) -> set[str]:
    """Returns what a link to a part of a Markdown file can name, as GitHub makes it."""
    titles = _TITLE.findall(re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def wrong(text: Path) -> Iterator[str]:
    """Yields a sentence for each link of a file that leads nowhere; others' sites are not asked."""
    for link in _LINK.findall(_CODE.sub("", text.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = text.parent / path if path else text
        where = text.relative_to(ROOT)
        if not target.exists():
            yield f"{where}: there is no {path}"
        elif anchor and anchor not in anchors(target):
            yield f"{where}: {path or 'it'} has no part #{anchor}"
