"""Python environments with parts of OpenStack, each installed once from hashes."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.cache import CACHE


def environment(name: str, lock: Path) -> Path:
    """Returns the Python that has what `lock` lists; `name` it is called by in the cache."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    known = hashlib.sha256(lock.read_bytes() + version.encode()).hexdigest()[:16]
    folder = CACHE / f"{name}-{known}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=CACHE))
        subprocess.run([sys.executable, "-m", "venv", str(new)], check=True)
        words = ("install", "-q", "--require-hashes", "--disable-pip-version-check", "-r")
        subprocess.run([new / "bin/python", "-m", "pip", *words, str(lock)], check=True)
        with contextlib.suppress(OSError):  # another run was first
            new.rename(folder)
        shutil.rmtree(new, ignore_errors=True)
    return folder / "bin/python"
