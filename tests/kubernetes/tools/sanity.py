"""csi-sanity alone, for tests of the driver that need no cluster: half a minute to build, once."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from tests.kubernetes.tools import CSI_SANITY, ToolsError, cache, key

BUILD_DEADLINE_S = 280.0


def csi_sanity() -> Path:
    """Returns the program, of the cluster's tools if they are there, else built by itself."""
    whole = cache() / key()
    if (whole / "complete").exists():
        return whole / "csi-sanity"
    directory = cache() / CSI_SANITY.rsplit("/", 1)[1]
    program = directory / "csi-sanity"
    if program.exists():
        return program
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        environment = {"GOBIN": scratch, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": ""}
        try:
            subprocess.run(
                ["go", "install", "-ldflags=-s -w", CSI_SANITY],
                cwd=scratch,
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=BUILD_DEADLINE_S,
                check=True,
            )
        except FileNotFoundError as error:
            raise ToolsError("go is not installed: Go 1.26 or newer is needed") from error
        except subprocess.CalledProcessError as error:
            raise ToolsError(f"csi-sanity does not build:\n{error.stderr[-2000:]}") from error
        (Path(scratch) / "csi-sanity").rename(program)
    return program
