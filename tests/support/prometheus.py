"""Debian's Prometheus, unpacked into the cache: two programs that need nothing beside them."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tests.support.cache import CACHE


def programs() -> Path:
    """Returns the folder of `prometheus` and `promtool`, after fetching their package once.

    Raises:
        subprocess.CalledProcessError: apt does not have it.
    """
    folder = CACHE / "prometheus"
    if not (folder / "usr/bin/promtool").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            subprocess.run(
                ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", "prometheus"],
                cwd=work,
                check=True,
                capture_output=True,
            )
            (package,) = Path(work).glob("*.deb")
            subprocess.run(["dpkg", "-x", package, f"{work}/unpacked"], check=True)
            Path(work, "unpacked").rename(folder)
    return folder / "usr/bin"
