"""Debian's Prometheus, unpacked into the cache: two programs that need nothing beside them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from tests.support.cache import CACHE

FOLDER = CACHE / "prometheus"
PROGRAMS = FOLDER / "usr/bin"


def programs() -> Path:
    """Returns the folder of `prometheus` and `promtool`, after fetching their package once.

    Raises:
        subprocess.CalledProcessError: apt does not have it.
    """
    if not (PROGRAMS / "promtool").exists():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as work:
            subprocess.run(
                ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", "prometheus"],
                cwd=work,
                check=True,
                capture_output=True,
            )
            (package,) = Path(work).glob("*.deb")
            subprocess.run(["dpkg", "-x", package, f"{work}/unpacked"], check=True)
            Path(work, "unpacked").rename(FOLDER)
    return PROGRAMS


def version() -> str | None:
    """Returns the server's version; None before it is fetched."""
    if not (PROGRAMS / "promtool").exists():
        return None
    told = subprocess.run(
        [PROGRAMS / "prometheus", "--version"], capture_output=True, text=True, check=True
    )
    found = re.match(r"prometheus, version ([\d.]+)", told.stdout + told.stderr)
    assert found is not None, told
    return found[1]
