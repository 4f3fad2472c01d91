"""The gateway process after thousands of calls and many clients is what it was before."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import libvirt
import pytest

from tests.support.host import Host
from tests.support.wait import until

pytestmark = [pytest.mark.root]

KEPT = 2
MANY = (2_000, 60)
"""Calls, and clients after them."""
MORE = (10_000, 300)
GROWTH_MAX_KIB = 8 << 10
DOMAIN = (
    "<domain type='qemu'><name>{}</name><memory unit='MiB'>64</memory>"
    "<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>"
    "<disk type='file'><source file='/dev/virtlun/lvs0/leaks'/><target dev='sda' bus='scsi'/>"
    "</disk></devices></domain>"
)
OTHER = "<disk type='file'><source file='/dev/virtlun/lvs0/none'/><target dev='sdb'/></disk>"


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def memory_kib(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def some(connection: Any, domain: Any, calls: int) -> None:
    """Makes calls of every kind: answered here, changed on their way, refused, passed on."""
    for _ in range(calls // 10):
        for _ in range(3):
            assert "sda" in domain.XMLDesc()
            assert domain.blockInfo("sda")[0] == 8 << 20
        connection.getAllDomainStats(libvirt.VIR_DOMAIN_STATS_BLOCK)
        for flags, xml in ((2, OTHER), (2, "<disk"), (99, OTHER)):
            with pytest.raises(libvirt.libvirtError):
                domain.attachDeviceFlags(xml, flags)


@pytest.mark.parametrize(
    ("calls", "clients"), [MANY, pytest.param(*MORE, marks=pytest.mark.nightly)]
)
def test_calls_and_clients_leave_nothing_behind(host: Host, calls: int, clients: int) -> None:
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    host.volumes.create("lvs0/leaks", 8 << 20)
    connection = libvirt.open(host.uri)
    domain = connection.defineXML(DOMAIN.format("leaks"))
    some(connection, domain, 1000)
    pid = host.gateway_pid
    # A connection to the target that is kept may be opened later.
    files, memory = open_files(pid) + KEPT, memory_kib(pid)
    some(connection, domain, calls)
    until(lambda: open_files(pid) <= files, lambda: f"{open_files(pid)} files become {files}")
    assert memory_kib(pid) - memory < GROWTH_MAX_KIB
    for _ in range(clients):
        passing = libvirt.open(host.uri)
        assert passing.lookupByName("leaks").isActive() == 0
        passing.close()
    until(
        lambda: open_files(pid) <= files,
        lambda: f"{open_files(pid)} files become {files}",
        90.0,
        0.1,
    )
    assert memory_kib(pid) - memory < GROWTH_MAX_KIB
    domain.undefine()
    connection.close()
    host.volumes.delete(host.volumes.volume("lvs0/leaks").uuid)
