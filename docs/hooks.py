"""Puts files of the repository that pages link to into the site, each as a page of its own.

So guides, examples and schemas are written once, where people find them in a checkout: a link from
a page to `../../examples/libvirt/vm.xml` leads to the page `files/examples/libvirt/vm.xml.md`,
which shows that file. A Markdown file is a page as it is, and its own links are followed in turn. A
folder is a list of its files, but for that of a crate whose rustdoc is in the site.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import ConfigurationError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/pages"
FILES = "files"
"""Folder of the site for what is not in `PAGES`."""
CRATES = ROOT / "pydataplane/crates"
RUSTDOC = ROOT / "build/rustdoc/doc"
"""What `make docs` has cargo write first."""

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_LANGUAGES = {
    ".rs": "rust",
    ".py": "python",
    ".yaml": "yaml",
    ".xml": "xml",
    ".rng": "xml",
    ".toml": "toml",
    ".json": "json",
}


def on_config(config: MkDocsConfig) -> None:
    """Checks that a warning ends the build, and that there is rustdoc.

    Raises:
        ConfigurationError: MkDocs was told not to, or to log none, and it counts what it logs; or
            cargo has written none.
    """
    if not (config.strict and logging.getLogger("mkdocs").isEnabledFor(logging.WARNING)):
        raise ConfigurationError("a warning must end the build: leave out --quiet and --no-strict")
    if not RUSTDOC.is_dir():
        raise ConfigurationError(f"there is no {RUSTDOC}: build the site by `make docs`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file of the repository that the navigation names or a page links to.

    A page that was added counts, too.
    """
    pages = [PAGES / page.src_uri for page in files.documentation_pages()]
    named = {
        ROOT / uri.removeprefix(f"{FILES}/") for uri in _uris(config.nav) if uri.startswith(FILES)
    }
    added = {path for path in named if path.is_file()}  # MkDocs warns of what is not there
    waiting = [*pages, *added]
    while waiting:
        text = waiting.pop()
        if text.suffix != ".md":
            continue
        for link in _LINK.findall(text.read_text()):
            path = Path(os.path.normpath(text.parent / link))
            if path in added or PAGES in path.parents or not path.exists() or _rustdoc(path):
                continue
            added.add(path)
            waiting.append(path)
    for path in sorted(added):
        level = InclusionLevel.INCLUDED if path in named else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, _uri(path), content=_content(path), inclusion=level))
    for path in RUSTDOC.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            uri = f"rustdoc/{path.relative_to(RUSTDOC).as_posix()}"
            level = InclusionLevel.NOT_IN_NAV  # a font's licence is Markdown
            files.append(File.generated(config, uri, abs_src_path=str(path), inclusion=level))
    return files


def _rustdoc(path: Path) -> str | None:
    """Returns the page of the site with a crate's rustdoc; None for another path."""
    if path.parent != CRATES or not (RUSTDOC / path.name / "index.html").is_file():
        return None
    return f"rustdoc/{path.name}/index.html"


def _uris(nav: Any) -> Iterator[str]:
    """Yields the pages that a navigation, or a part of it, names."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _uris(part)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links to files of the repository links to their pages."""
    uri = page.file.src_uri
    if uri.startswith(f"{FILES}/"):
        plain = uri.removeprefix(f"{FILES}/")
        source = ROOT / plain if (ROOT / plain).is_file() else ROOT / plain.removesuffix(".md")
        if source.suffix != ".md":
            return markdown
    else:
        source = PAGES / uri
    return _LINK.sub(_to_page(source, Path(uri).parent), markdown)


def _to_page(source: Path, folder: Path) -> Callable[[re.Match[str]], str]:
    def replaced(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(source.parent / link[1]))
        if not path.exists():
            return link[1]
        if PAGES in path.parents:
            inside = path.relative_to(PAGES).as_posix()
        else:
            inside = _rustdoc(path) or _uri(path)
        return os.path.relpath(inside, folder)

    return replaced


def _uri(path: Path) -> str:
    """Returns the page of a file of the repository."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"{FILES}/{name}/index.md"
    return f"{FILES}/{name}" if path.suffix == ".md" else f"{FILES}/{name}.md"


def _content(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        listed = sorted(each.relative_to(path).as_posix() for each in path.rglob("*"))
        return f"# {name}\n\n" + "".join(f"- `{each}`\n" for each in listed)
    if path.suffix == ".md":
        return path.read_text()
    language = _LANGUAGES.get(path.suffix, "text")
    return f"# {name}\n\n````{language}\n{path.read_text()}\n````\n"
