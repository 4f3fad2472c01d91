"""A running guest moves between two hosts, each with a libvirtd, a target and a gateway of its own.

The hosts' folders differ, so the destination's gateway has to move the controller's socket. Volumes
are not carried over: both hosts have one of the same name and UUID, with the same content.

The guest runs in the newer QEMU: those before 9.0 damage the memory of a guest that they migrate
under TCG, with whatever devices (tests/guest/test_migration_many.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU, VirshError, virsh
from tests.support.ports import free_port
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "moving"
MIB = 1 << 20
UUID = "5e1f0000-1111-4222-8333-444455556666"
DISK = (
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/moving'/>"
    "<blockio logical_block_size='4096'/><target dev='sda' bus='scsi'/></disk>"
)


@dataclass
class Pair:
    """The two hosts, and which one has the guest."""

    source: Host
    destination: Host
    home: Host
    """Where it was defined."""

    def migrate(self, *words: str) -> str:
        """Migrates with plain virsh through both gateways; returns what it says."""
        port = free_port()
        said = self.source.virsh(
            *("migrate", NAME, self.destination.uri, "--live", "--migrateuri"),
            *(f"tcp://127.0.0.1:{port}", *words),
            deadline_s=240,
        )
        self.source, self.destination = self.destination, self.source
        return said


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Both hosts, with the same volume; the guest runs on the first."""
    ids = [f"c0ffee00-0000-4000-8000-00000000000{n}" for n in (2, 3)]
    with Host(keep=True, host_uuid=ids[0]) as first, Host(keep=True, host_uuid=ids[1]) as second:
        for host in (first, second):
            host.volumes.create("lvs0/moving", 16 * MIB, uuid=UUID)
        first.define(NAME, devices=DISK, emulator=NEWER_QEMU)
        first.virsh("start", NAME)
        agent = first.agent(NAME)
        agent.wait_for("[ -b /dev/sda ]")
        agent.run(
            "(while true; do dd if=/dev/sda of=/dev/null bs=1M count=4 iflag=direct 2>/dev/null;"
            " read=$?; disks=$(ls /sys/block | grep '^sd' | tr '\\n' ' ');"
            ' echo "beat [$disks] errors=$(dmesg | grep -c I/O.error) read=$read" > /dev/ttyS0;'
            " sleep 0.2; done) > /dev/null 2>&1 &"
        )
        agent.close()
        yield Pair(first, second, first)


def controllers(host: Host) -> list[str]:
    return [item["ctrlr"] for item in host.client.call("vhost_get_controllers")]


def beat(pair: Pair) -> tuple[set[str], int]:
    """Returns the disks and the count of I/O errors of the guest's next report.

    It writes them to its console's log, which both QEMUs append to: its other serial port ends
    with the QEMU that it began in.
    """
    log = pair.home.scratch / f"{NAME}-console.log"
    seen = log.stat().st_size

    def said() -> str:
        return log.read_bytes()[seen:].decode(errors="replace")

    def report() -> tuple[str, str] | None:
        found = re.findall(r"beat \[([^\]]*)\] errors=(\d+) read=0\b", said())
        return found[-1] if len(found) > 1 else None  # the first may be of before the call

    disks, errors = until(report, lambda: f"the guest's report:\n{said()[-1000:]}", every_s=0.1)
    return set(disks.split()), int(errors)


def check(pair: Pair) -> None:
    """Checks that the guest runs where it should, with its disk, and left nothing behind."""
    here, there = pair.source, pair.destination
    assert here.virsh("domstate", NAME) == "running"
    assert len(controllers(here)) == 1
    until(lambda: not controllers(there), "no controller where the guest was", 90.0)
    inside = here.virsh_direct("dumpxml", NAME)
    assert str(here.paths.vhost_dir) in inside, "the socket of this host"
    shown = here.virsh("dumpxml", NAME)
    assert not re.search("vhostuser|virtlun.dev", shown)
    assert "/dev/virtlun/lvs0/moving" in shown
    assert "logical_block_size='4096'" in shown
    (controller,) = here.client.call("vhost_get_controllers")
    assert controller["backend_specific"]["scsi"][0]["luns"][0]["block_size"] == 4096
    assert beat(pair) == ({"sda"}, 0)


def test_there_and_back_with_the_clients_own_xml(pair: Pair) -> None:
    check(pair)
    pair.migrate()
    check(pair)
    # As Nova does: XML from what dumpxml shows, with a change of its own.
    path = pair.home.scratch / "there.xml"
    xml = pair.source.virsh("dumpxml", "--migratable", NAME)
    path.write_text(xml.replace("<on_crash>destroy", "<on_crash>restart"))
    pair.migrate("--xml", str(path))
    check(pair)
    assert "<on_crash>restart" in pair.source.virsh("dumpxml", NAME)


def test_a_guest_whose_volume_is_missing_there_stays(pair: Pair) -> None:
    host = pair.source
    host.volumes.create("lvs0/late", 8 * MIB)
    host.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/late", "sdb", "--live")
    until(lambda: len(beat(pair)[0]) == 2, "the guest sees both disks")
    with pytest.raises(VirshError, match="lvs0/late"):
        pair.migrate()
    # What was made for a guest that does not come.
    until(lambda: controllers(pair.destination) == [], "no controller where it does not come")
    assert host.virsh("domstate", NAME) == "running"
    host.virsh("detach-disk", NAME, "sdb", "--live")
    until(lambda: len(beat(pair)[0]) == 1, "the guest sees one disk")
    check(pair)


@pytest.mark.nightly
def test_the_definition_goes_with_it(pair: Pair) -> None:
    pair.migrate("--persistent", "--undefinesource")
    check(pair)
    listed = pair.source.virsh("domblklist", NAME, "--inactive").split()
    assert listed == ["sda", "/dev/virtlun/lvs0/moving"]
    assert virsh(pair.destination.uri, "list", "--all", "--name") == ""
    host = pair.source
    until(
        lambda: str(host.paths.vhost_dir) in host.virsh_direct("dumpxml", NAME, "--inactive"),
        "this host's socket in the definition",
        90.0,
    )
    host.virsh("destroy", NAME)
    host.virsh("start", NAME)
    assert host.virsh("domstate", NAME) == "running"
    host.virsh("destroy", NAME)


@pytest.fixture
def bare(pair: Pair) -> Iterator[Host]:
    """A third host that has libvirtd alone: no target, no gateway and no hook."""
    with Host(keep=True, host_uuid="c0ffee00-0000-4000-8000-000000000004") as third:
        third.stop_gateway()
        third.stop_target()
        (third.libvirtd.hooks / "qemu.d/virtlun").unlink()
        third.libvirtd.restart()
        yield third


@pytest.mark.nightly
def test_a_guest_without_a_volume_goes_anywhere_and_comes_back(pair: Pair, bare: Host) -> None:
    """To a host with libvirtd alone, and from there to one that gives it a controller again."""
    host, name = pair.home, "roaming"
    host.define(name, emulator=NEWER_QEMU, memory_mib=128)
    host.virsh("start", name)
    agent = host.agent(name)
    agent.run(
        "(while true; do echo beat $(ls /sys/class/scsi_host) >/dev/ttyS0; sleep 0.2; done)"
        " >/dev/null 2>&1 &"
    )
    agent.close()
    assert "vhost-user-scsi-pci" in host.virsh_direct("dumpxml", name)
    for where, source, uri in (
        (bare, host.uri, bare.libvirtd.uri()),
        (host, bare.libvirtd.uri(), host.uri),
    ):
        port = free_port()
        way = ("--live", "--migrateuri", f"tcp://127.0.0.1:{port}")
        virsh(source, "migrate", name, uri, *way, deadline_s=240)
        inside = where.virsh_direct("dumpxml", name)
        assert ("vhost-user-scsi-pci" in inside) == (where is host)
        assert ("virtio-scsi-pci" in inside.replace("vhost-user-scsi-pci", "")) == (where is bare)
        log = host.scratch / f"{name}-console.log"
        seen = log.stat().st_size
        until(lambda: "beat host0" in log.read_bytes()[seen:].decode(errors="replace"), "a beat")  # noqa: B023
    # The controller is one to which disks can be attached.
    host.volumes.create("lvs0/roaming", 8 * MIB)
    host.virsh("attach-disk", name, "/dev/virtlun/lvs0/roaming", "sdb", "--live")
    until(lambda: "Attached SCSI disk" in host.console(name), "the guest sees the disk")
    host.virsh("destroy", name)
    host.virsh("undefine", name)
