"""Virtio-blk disks of a guest that moves to another host, is saved, and goes back to a snapshot.

In the newer QEMU, as in test_migration, where the reason stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.libvirt.test_migration import NAME, UUID, Pair, controllers
from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

MIB = 1 << 20
DISK = (
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/moving'/>"
    "<target dev='vda' bus='virtio'/></disk>"
)
BEAT = (
    "(while true; do dd if=/dev/vda of=/dev/null bs=1M count=4 iflag=direct 2>/dev/null;"
    ' echo "beat read=$? errors=$(dmesg | grep -c I/O.error)" >/dev/ttyS0; sleep 0.2; done)'
    " >/dev/null 2>&1 &"
)
"""The guest says on its console, which both QEMUs log, that it reads its disk."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two hosts with the same volume; the guest runs on the first."""
    ids = [f"c0ffee00-0000-4000-8000-0000000000b{n}" for n in (2, 3)]
    with Host(keep=True, host_uuid=ids[0]) as first, Host(keep=True, host_uuid=ids[1]) as second:
        for host in (first, second):
            host.volumes.create("lvs0/moving", 16 * MIB, uuid=UUID)
        first.define(NAME, devices=DISK, emulator=NEWER_QEMU)
        first.virsh("start", NAME)
        agent = first.agent(NAME)
        agent.wait_for("[ -b /dev/vda ]")
        agent.run(BEAT)
        agent.close()
        yield Pair(first, second, first)
        for host in (first, second):
            host.virsh("destroy", NAME, check=False)


def check(pair: Pair) -> None:
    """Checks that the guest reads its disk where it is now, and left nothing where it was."""
    here, there = pair.source, pair.destination
    until(lambda: controllers(there) == [], lambda: str(controllers(there)))
    (name,) = controllers(here)
    assert name == f"vm-{here.virsh('domuuid', NAME)}.0"
    assert f"{here.paths.vhost_dir}/{name}" in here.virsh_direct("dumpxml", NAME)
    shown = here.virsh("dumpxml", NAME)
    assert "vhostuser" not in shown and "/dev/virtlun/lvs0/moving" in shown
    log = pair.home.scratch / f"{NAME}-console.log"
    seen = log.stat().st_size

    def beats() -> list[str]:
        said = log.read_bytes()[seen:].decode(errors="replace")
        return re.findall(r"beat read=(\d+ errors=\d+)\r?\n", said)[1:]

    until(lambda: len(beats()) > 1, lambda: log.read_text(errors="replace")[-500:])
    assert set(beats()) == {"0 errors=0"}


@pytest.mark.nightly
def test_live_there_and_back(pair: Pair) -> None:
    check(pair)
    pair.migrate()
    check(pair)
    assert "vda" in pair.source.virsh("domblklist", NAME)
    pair.source.virsh("blockresize", NAME, "vda", "24M")
    pair.destination.volumes.resize("lvs0/moving", 24 * MIB)
    pair.migrate()
    check(pair)


@pytest.mark.nightly
def test_saved_to_a_file_and_restored(pair: Pair) -> None:
    host, file = pair.source, pair.source.scratch / "saved"
    host.virsh("save", NAME, str(file))
    assert controllers(host) == []
    assert "vhostuser" not in host.virsh("save-image-dumpxml", str(file))
    host.virsh("restore", str(file))
    check(pair)


@pytest.mark.nightly
def test_snapshots(pair: Pair) -> None:
    """With memory while it runs, and of its disks alone; back to both."""
    host = pair.source
    file = host.scratch / "memory"
    host.virsh("snapshot-create-as", NAME, "running", "--memspec", f"file={file}")
    check(pair)
    host.virsh("snapshot-create-as", NAME, "disks", "--disk-only")
    shown = host.virsh("snapshot-dumpxml", NAME, "disks")
    assert "<disk name='vda' snapshot='internal'/>" in shown, shown
    assert "vhostuser" not in shown
    assert host.volumes.volume("lvs0/moving@disks").uuid
    host.virsh("snapshot-revert", NAME, "disks", "--running")
    assert host.virsh("domstate", NAME) == "running"
    host.virsh("snapshot-revert", NAME, "running")
    check(pair)
    for name in ("running", "disks"):
        host.virsh("snapshot-delete", NAME, name)
    assert [each.path for each in host.volumes.volumes("lvs0")] == ["lvs0/moving"]
