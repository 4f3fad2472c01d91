"""Directories for one test, with paths that are short enough for sockets."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def short_directory(prefix: str, folder: str = "/tmp") -> Iterator[Path]:
    """Makes a directory for the duration of a block.

    What still ends there, such as a holder that has nothing more to hold, may take its socket away
    while the directory is removed.
    """
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
    yield path
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
        if not path.exists():
            return
    raise AssertionError(f"{path} cannot be removed: something goes on making files in it")
