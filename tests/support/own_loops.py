"""Runs a program of the driver as on a node of its own, beside another node's on one machine.

    python -m tests.support.own_loops FOLDER MODULE [ARGUMENTS]

It sees the loop devices over files of FOLDER only, its target's. Volumes of a pool of Ceph have the
same UUID on all nodes, and so have their loop devices, which are the machine's.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from csi.hostdevice import loopctl


def main() -> None:
    """Runs the module."""
    folder = Path(sys.argv[1])
    every = loopctl.file_path

    def own(loop: str) -> Path | None:
        path = every(loop)
        return path if path is not None and folder in path.parents else None

    loopctl.file_path = own
    module = sys.argv[2]
    sys.argv[:] = sys.argv[2:]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
