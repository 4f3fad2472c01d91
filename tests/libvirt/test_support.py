"""What the tests' own libvirtd says when it dies under a test."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator

import pytest

from tests.support.host import is_root, scratch_directory
from tests.support.libvirtd import CORE_PATTERN, Libvirtd, LibvirtdDiedError, virsh

pytestmark = pytest.mark.root


@pytest.fixture
def libvirtd() -> Iterator[Libvirtd]:
    if not is_root():
        pytest.fail("tests/libvirt need root: they run a libvirtd in a mount namespace")
    scratch = scratch_directory()
    try:
        with Libvirtd(scratch / "l") as running:
            yield running
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGKILL])
def test_a_libvirtd_that_dies_is_not_taken_for_an_error_of_ours(
    libvirtd: Libvirtd, how: signal.Signals
) -> None:
    assert virsh(libvirtd.uri(), "list", "--all", "--name") == ""
    os.kill(libvirtd.pid, how)
    with pytest.raises(LibvirtdDiedError) as died:
        while True:  # its threads answer until the kernel has stopped each of them
            virsh(libvirtd.uri(), "list", check=False)
    assert f"(pid {libvirtd.pid}) died by {how.name}" in str(died.value)
    assert "libvirtd.log: " in str(died.value)
    # With another pattern the core is elsewhere, or the kernel hands it to a program.
    if how == signal.SIGSEGV and CORE_PATTERN.read_text().strip() == "core":
        assert f"{libvirtd.scratch}/core" in str(died.value)
        if shutil.which("gdb"):
            # Of the first thread, whether it waits for a client or answers one.
            assert "virNetDaemonRun" in str(died.value)
    with pytest.raises(LibvirtdDiedError, match=how.name):
        libvirtd.restart()
    libvirtd.start()
    assert virsh(libvirtd.uri(), "list", "--all", "--name") == ""


def test_a_libvirtd_that_a_test_ends_has_not_died(libvirtd: Libvirtd) -> None:
    libvirtd.kill(signal.SIGKILL)
    libvirtd.check()
    libvirtd.start()
    libvirtd.restart()
    libvirtd.check()
