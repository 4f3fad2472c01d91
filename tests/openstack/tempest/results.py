"""Reads Tempest's subunit from stdin; run by a Python that has Tempest.

    python results.py <SUBUNIT >JSON

It prints an object: of each test, or set-up of a class, its status and what it said.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import subunit
import testtools


class Results:
    """What came of each test."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}

    def note(self, test: dict[str, Any]) -> None:
        """Takes one that has ended, or never did."""
        said = "\n".join(
            detail.as_text()
            for name, detail in sorted(test["details"].items())
            if name.startswith(("reason", "traceback"))
        )
        self.found[test["id"]] = (test["status"], said)


def main() -> None:
    """Prints them."""
    results = Results()
    stream = testtools.StreamToDict(results.note)
    stream.startTestRun()
    subunit.ByteStreamToStreamResult(sys.stdin.buffer, non_subunit_name="stdout").run(stream)
    stream.stopTestRun()
    json.dump(results.found, sys.stdout)


if __name__ == "__main__":
    main()
