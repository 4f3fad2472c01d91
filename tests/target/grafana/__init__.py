"""A reader of dashboards by Grafana's own structures (main.go), built from source into the cache.

They are of Grafana's SDK (Apache-2.0), which its programs for dashboards as code are made with.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from pathlib import Path

from tests.kubernetes.tools import Report, cache, go, once

MODULE = Path(__file__).parent


def build() -> Path:
    """Returns the program, building it first where it is not there yet: a minute.

    Raises:
        ToolsError: there is no Go, or it failed.
    """
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum", "main.go"):
        digest.update((MODULE / name).read_bytes())
    directory = cache().parent / "grafana" / digest.hexdigest()[:16]
    once(directory, "a reader of Grafana's dashboards", _build)
    return directory / "grafana"


def _build(directory: Path, say: Report) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        words = ["-mod=readonly", "-ldflags", "-s -w", "-o", f"{scratch}/", "."]
        go(["build", "-v", *words], say, "a reader of Grafana's dashboards", module=MODULE)
        (Path(scratch) / "grafana").rename(directory / "grafana")


def faults(dashboard: str) -> list[str]:
    """Returns a line for each thing in a dashboard, as JSON, that is none of Grafana's."""
    read = subprocess.run(
        [build()], input=dashboard, stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    return read.stdout.splitlines()
