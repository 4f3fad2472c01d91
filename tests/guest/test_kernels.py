"""The kernels that guests have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guest.emulator import newer
from tests.guest.image import Kernel, build
from tests.support.qemu import Guest

pytestmark = pytest.mark.vm


@pytest.mark.nightly
def test_the_backports_kernel_has_what_the_release_has_not(scratch: Path) -> None:
    """Linux 6.12 with ublk (ublk_drv makes its control device); 6.1 of Debian 12 has none."""
    with Guest(build(Kernel.BACKPORTS), scratch, emulator=newer()) as guest:
        major, minor = (int(part) for part in guest.run("uname -r").split(".")[:2])
        assert (major, minor) >= (6, 12)
        assert guest.run("test -c /dev/ublk-control && echo there").strip() == "there"
        assert "GUEST-NO-MODULE" not in guest.console.read_text(errors="replace")
