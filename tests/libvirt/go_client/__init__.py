"""A client of libvirt in Go (main.go), built from source into the cache, and its process."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.kubernetes.tools import Report, cache, go, once

MODULE = Path(__file__).parent


class RefusedByGo(Exception):
    """A call was refused; the text is what the client was told."""


def build() -> Path:
    """Returns the program, building it first where it is not there yet: some seconds.

    Raises:
        ToolsError: there is no Go, or it failed.
    """
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum", "main.go"):
        digest.update((MODULE / name).read_bytes())
    directory = cache().parent / "go-client" / digest.hexdigest()[:16]
    once(directory, "a client of libvirt in Go", _build)
    return directory / "go_client"


def _build(directory: Path, say: Report) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        words = ["-mod=readonly", "-ldflags", "-s -w", "-o", f"{scratch}/", "."]
        go(["build", "-v", *words], say, "a client of libvirt in Go", module=MODULE)
        (Path(scratch) / "go_client").rename(directory / "go_client")


class GoClient:
    """One that is connected."""

    def __init__(self, socket: Path) -> None:
        """Connects it to the libvirt at a UNIX socket."""
        self._process = subprocess.Popen(
            [build(), socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, call: str, *words: object) -> Any:
        """Returns what a call made; RefusedByGo if it was refused."""
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"call": call, "words": [str(word) for word in words]}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if answer["refused"]:
            raise RefusedByGo(answer["refused"])
        return answer["made"]

    def close(self) -> int:
        """Has it disconnect; returns its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(60)
