"""Keystone's API, or Glance's, as a server; run by a Python that has it, and Waitress.

    python keystone_service.py MODULE PORT

It serves `application` of a module on a port of 127.0.0.1, until it is killed; one call after the
other, as a database of SQLite has one writer.
"""

from __future__ import annotations

import importlib
import sys

import waitress

LARGEST = 1 << 40
"""Bytes of what is uploaded."""


def main() -> None:
    """Runs until it is killed."""
    module, port = sys.argv[1:]
    del sys.argv[1:]  # which the application reads, too
    application = importlib.import_module(module).application
    waitress.serve(
        application,
        host="127.0.0.1",
        port=int(port),
        threads=1,
        max_request_body_size=LARGEST,
    )


if __name__ == "__main__":
    main()
