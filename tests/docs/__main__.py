"""Writes the reference pages, or checks links: see the package."""

from __future__ import annotations

import sys

from tests.docs import links, manpages
from tests.docs.reference import PAGES, REFERENCE


def main() -> int:
    """Does what the first argument says; returns the exit status."""
    match sys.argv[1:]:
        case []:
            for name, content in PAGES.items():
                (REFERENCE / name).write_text(content())
            for name, page in manpages.pages().items():
                (manpages.FOLDER / name).write_text(page)
            return 0
        case ["links"]:
            wrong = [sentence for text in links.texts() for sentence in links.wrong(text)]
            print("\n".join(wrong), end="\n" * bool(wrong), file=sys.stderr)
            return bool(wrong)
        case _:
            print("usage: python -m tests.docs [links]", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
