"""Where a target's JSON-RPC socket is, and the command that starts the target behind it.

Standard library only, and without pathlib, which is slow to import: the hook uses it.
"""

from __future__ import annotations

import os

RUN_DIR = "/run/virtlun"
FILE = "target.sock"
DEFAULT = f"{RUN_DIR}/{FILE}"
"""Of the target without a name; those with one have theirs in a folder of that name beside it."""


def name_of(socket: str | os.PathLike[str]) -> str | None:
    """Returns the name of a target by its packaged JSON-RPC socket; None: it has none."""
    folder, _, file = os.fspath(socket).rpartition("/")
    parent, _, name = folder.rpartition("/")
    return name if (parent, file) == (RUN_DIR, FILE) else None


def start_command(socket: str | os.PathLike[str]) -> str:
    """Returns the command that starts the target which is to listen on `socket`."""
    name = name_of(socket)
    return f"virtlun --target {name} target start" if name else "virtlun target start"
