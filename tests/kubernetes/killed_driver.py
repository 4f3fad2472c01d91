"""A driver that ends by SIGKILL at a step that a test names (tests/support/killed.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tests.kubernetes.driver
from tests.kubernetes.driver import Deployment
from tests.support.wait import until

CSI = "virtlun-csi"


@pytest.fixture(scope="module")
def fuse(deployment: Deployment) -> Iterator[Path]:
    """The file that says where the driver is to end; it is such a driver for the whole module."""
    file = deployment.node.folder / "kill-at"
    program = [sys.executable, "-m", "tests.support.killed", file]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tests.kubernetes.driver, "driver_program", lambda: program)
        deployment.restart_driver()
        yield file
    deployment.restart_driver()


@contextmanager
def killed(deployment: Deployment, fuse: Path, point: str) -> Iterator[None]:
    """The driver dies at this point of what the block begins, and starts again."""
    part = deployment.parts[CSI]
    restarts = part.restarts
    fuse.write_text(point)
    yield
    until(lambda: not fuse.exists(), f"the driver to die {point}")
    until(lambda: part.restarts > restarts, "its restart", deadline_s=90)
