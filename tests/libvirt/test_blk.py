"""Disks with bus='virtio': virtio-blk devices of QEMU's, with plain virsh."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.guest.test_boot_order import boot_sector
from tests.libvirt.test_restarted_target import STOCK
from tests.libvirt.test_ways import has
from tests.support.agent import Agent
from tests.support.examples import EXAMPLES, used
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.night import by_day
from tests.support.verified_io import VerifiedIo
from tests.support.wait import until
from tests.support.watcher import Watcher

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "blk"
MIB = 1 << 20
DEADLINE_S = 120.0
SIDES = ((), ("--inactive",))

ROOT = (
    "<disk type='network' device='disk'><driver name='qemu' type='raw' discard='unmap'/>"
    "<source protocol='lvol' name='lvs0/root'/><target dev='vda' bus='virtio'/>"
    "<serial>root-of-blk</serial></disk>"
)


@pytest.fixture
def without_scsi(host: Host) -> Path:
    """A QEMU without vhost-user-scsi, as the RHEL family builds it: the machine's own, but that."""
    folder = host.scratch / "without"
    (folder / "bin").mkdir(parents=True)
    for name in ("lib", "share"):  # it looks for modules and firmware beside itself
        (folder / name).symlink_to(f"/usr/{name}")
    program = folder / "bin" / STOCK.name
    device = b"vhost-user-scsi-pci"
    program.write_bytes(STOCK.read_bytes().replace(device, b"x" * len(device)))
    program.chmod(0o755)
    return program


@pytest.fixture(scope="module")
def guest(host: Host) -> Iterator[Agent]:
    """A running guest with lvs0/root as its vda, and the volume lvs0/more."""
    host.volumes.create("lvs0/root", 16 * MIB, thin=True)
    for name in ("more", "third"):
        host.volumes.create(f"lvs0/{name}", 8 * MIB)
    host.define(NAME, devices=ROOT)
    host.virsh("start", NAME)
    agent = host.agent(NAME)
    yield agent
    agent.close()
    host.virsh("destroy", NAME)
    assert controllers(host) == set()


def shown(host: Host, dev: str, *words: str) -> ElementTree.Element | None:
    """Returns the <disk> of this target dev that a client sees."""
    xml = ElementTree.fromstring(host.virsh("dumpxml", NAME, *words))
    found = [d for d in xml.findall("devices/disk") if d.find("target").get("dev") == dev]  # type: ignore[union-attr]
    assert len(found) <= 1
    return found[0] if found else None


def controllers(host: Host) -> set[str]:
    """Returns the names of the target's controllers behind the domain's UUID."""
    found = host.client.call("vhost_get_controllers")
    return {str(item["ctrlr"])[len("vm-") + 36 :] for item in found}


def told(host: Host, *words: str) -> str:
    """Returns what virtlun says."""
    program = [host.program("virtlun"), "--config", str(host.config)]
    return subprocess.run(
        [*program, *words], capture_output=True, text=True, check=True, timeout=90
    ).stdout


def attribute(guest: Agent, name: str, dev: str = "vda") -> str:
    """Returns what the guest's kernel says of a disk."""
    return guest.run(f"cat /sys/block/{dev}/{name}").strip()


def test_a_defined_disk_is_a_virtio_blk_device(host: Host, guest: Agent) -> None:
    assert attribute(guest, "size") == str(16 * MIB // 512)
    assert attribute(guest, "serial") == "root-of-blk"
    assert int(attribute(guest, "queue/discard_max_bytes")) > 0
    assert "/virtio" in guest.run("readlink -f /sys/block/vda")
    given = ElementTree.fromstring(ROOT)
    for side in SIDES:
        disk = shown(host, "vda", *side)
        assert disk is not None
        assert has(disk, given), ElementTree.tostring(disk)
        # libvirt's own, as of any disk that it plugs.
        assert disk.find("address").get("type") == "pci"  # type: ignore[union-attr]
    live = shown(host, "vda")
    assert live is not None
    assert live.find("alias").get("name") == "virtio-disk0"  # type: ignore[union-attr]
    # No device but the disk's own: it survives a restart of the target with any QEMU.
    assert controllers(host) == {".0"}
    assert "vhostuser" not in host.virsh("dumpxml", NAME)
    guest.run("(yes blk || true) | dd of=/dev/vda bs=4096 count=256 iflag=fullblock oflag=direct")
    assert guest.run("head -c 3 /dev/vda") == "blk"


def test_what_is_shown_can_be_defined_again(host: Host, guest: Agent) -> None:
    before = host.virsh("dumpxml", NAME, "--inactive")
    path = host.scratch / "again.xml"
    path.write_text(before)
    host.virsh("define", str(path))
    assert host.virsh("dumpxml", NAME, "--inactive") == before
    direct = host.virsh_direct("dumpxml", NAME, "--inactive")
    assert direct.count("type='vhostuser'") == 1


@pytest.mark.parametrize("words", [["--live", "--config"], ["--live"]], ids=" ".join)
def test_attach_and_detach_with_plain_virsh(host: Host, guest: Agent, words: list[str]) -> None:
    sides = [side for side in SIDES if not side or "--config" in words]
    host.virsh(
        "attach-disk", NAME, "/dev/virtlun/lvs0/more", "vdb", "--targetbus", "virtio", *words
    )
    guest.wait_for(f"[ $(cat /sys/block/vdb/size) = {8 * MIB // 512} ]")
    for side in sides:
        disk = shown(host, "vdb", *side)
        assert disk is not None
        assert disk.find("source").get("file") == "/dev/virtlun/lvs0/more"  # type: ignore[union-attr]
    assert controllers(host) == {".0", ".1"}
    with pytest.raises(VirshError, match="target vdb already exists"):
        host.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/third", "vdb", *words)
    guest.run("(yes hot || true) | dd of=/dev/vdb bs=4096 count=256 iflag=fullblock oflag=direct")
    host.virsh("detach-disk", NAME, "vdb", *words)
    guest.wait_for("[ ! -e /sys/block/vdb ]")
    # libvirtd hears of it from QEMU, and may have waited for the guest in vain before.
    until(lambda: all(shown(host, "vdb", *side) is None for side in SIDES), "nobody has it")
    until(lambda: controllers(host) == {".0"}, lambda: str(controllers(host)))


def test_attach_device_and_detach_by_alias(host: Host, guest: Agent, tmp_path: Path) -> None:
    """As Nova does it: a serial, an alias, and the alias to detach by; read-only, too."""
    path = host.scratch / "device.xml"
    path.write_text(
        "<disk type='network' device='disk'><driver name='qemu' type='raw' cache='none'/>"
        "<source protocol='rbd' name='virtlun/lvs0/more'/><target dev='vdc' bus='virtio'/>"
        "<readonly/><serial>0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9</serial>"
        "<alias name='ua-0a1b2c3d'/></disk>"
    )
    watcher = Watcher(host.uri, tmp_path / "events")
    until(lambda: watcher.hears(host, NAME), "virsh listens")
    host.virsh("attach-device", NAME, str(path), "--live", "--config")
    guest.wait_for("[ -b /dev/vdb ]")
    assert attribute(guest, "serial", "vdb") == "0a1b2c3d-4e5f-6071-8"
    assert attribute(guest, "ro", "vdb") == "1"
    host.virsh("detach-device-alias", NAME, "ua-0a1b2c3d", "--live", "--config")
    guest.wait_for("[ ! -e /sys/block/vdb ]")
    until(lambda: all(shown(host, "vdc", *side) is None for side in SIDES), "nobody has it")
    for word in ("added", "removed"):
        watcher.line(f"event 'device-{word}' for domain '{NAME}': ua-0a1b2c3d")
    watcher.close()


def test_queues_and_blocks_are_as_its_client_chose(host: Host, guest: Agent) -> None:
    chosen = (
        "<disk type='block' device='disk'>"
        "<driver name='qemu' type='raw' event_idx='off' queues='3' queue_size='256'/>"
        "<source dev='/dev/virtlun/lvs0/more'/><blockio physical_block_size='16384'/>"
        "<target dev='vdc' bus='virtio'/></disk>"
    )
    path = host.scratch / "chosen.xml"
    path.write_text(chosen)
    host.virsh("attach-device", NAME, str(path), "--live", "--config")
    guest.wait_for("[ -b /dev/vdb ]")
    for side in SIDES:
        disk = shown(host, "vdc", *side)
        assert disk is not None
        assert has(disk, ElementTree.fromstring(chosen)), ElementTree.tostring(disk)
    (device,) = re.findall(r"<driver [^>]*event_idx[^>]*>", host.virsh_direct("dumpxml", NAME))[-1:]
    assert "queues='3'" in device and "queue_size='256'" in device, device
    assert attribute(guest, "queue/physical_block_size", "vdb") == "16384"
    assert attribute(guest, "queue/minimum_io_size", "vdb") == "16384"
    assert attribute(guest, "mq/0/nr_tags", "vdb") == "256"
    features = attribute(guest, "device/features", "vdb")
    assert (features[28], features[29]) == ("1", "0"), "indirect descriptors, no event index"
    guest.run("(yes few || true) | dd of=/dev/vdb bs=16384 count=64 iflag=fullblock oflag=direct")
    assert guest.run("head -c 3 /dev/vdb") == "few"
    path.write_text(chosen.replace("queue_size='256'", "queue_size='100'"))
    with pytest.raises(
        VirshError, match="queue_size='100' of <driver> is not possible; use a power"
    ):
        host.virsh("attach-device", NAME, str(path), "--live")
    host.virsh("detach-disk", NAME, "vdc", "--live", "--config")
    guest.wait_for("[ ! -e /sys/block/vdb ]")
    until(lambda: controllers(host) == {".0"}, lambda: str(controllers(host)))


def test_the_example_attaches_as_it_stands(host: Host, guest: Agent) -> None:
    host.volumes.create("lvs0/fast", 8 * MIB)
    example = str(used(EXAMPLES / "libvirt/disk-virtio.xml"))
    host.virsh("attach-device", NAME, example)
    guest.wait_for("[ -b /dev/vdb ]")
    assert attribute(guest, "serial", "vdb") == "fast-1"
    host.virsh("detach-device", NAME, example)
    guest.wait_for("[ ! -e /sys/block/vdb ]")
    told(host, "volume", "delete", "lvs0/fast", "--yes")


def test_resize_statistics_and_size(host: Host, guest: Agent) -> None:
    before = host.virsh("domblkstat", NAME, "vda")
    guest.run("(yes stat || true) | dd of=/dev/vda bs=64k count=16 iflag=fullblock oflag=direct")
    writes = {
        int(line.split()[2])
        for text in (before, host.virsh("domblkstat", NAME, "vda"))
        for line in text.splitlines()
        if "wr_req" in line
    }
    assert max(writes) - min(writes) == 16
    stats = host.virsh("domstats", NAME, "--block")
    assert "block.count=1" in stats, stats
    assert "block.0.name=vda" in stats
    assert "block.0.path=/dev/virtlun/lvs0/root" in stats
    assert f"block.0.capacity={16 * MIB}" in stats
    assert f"Capacity:       {16 * MIB}" in host.virsh("domblkinfo", NAME, "vda")
    host.virsh("blockresize", NAME, "vda", "24M")
    guest.wait_for(f"grep -x {24 * MIB // 512} /sys/block/vda/size")
    with pytest.raises(VirshError, match="would cut off data"):
        host.virsh("blockresize", NAME, "vda", "8M")
    assert "vda" in host.virsh("domblklist", NAME)


@pytest.mark.nightly
def test_its_volume_moves_while_it_is_written(host: Host, guest: Agent) -> None:
    """blockcopy of a disk that QEMU has as a device of its own."""
    host.volumes.create("lvs0/moving", 8 * MIB, thin=True)
    host.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/moving", "vdb", "--persistent")
    guest.wait_for("[ -b /dev/vdb ]")
    serial = attribute(guest, "serial", "vdb")
    load = VerifiedIo(guest, "vdb", seed=11, threads=1, depth=4)
    host.virsh("blkdeviotune", NAME, "vdb", "--total-iops-sec", "100000", "--live", "--config")
    moved = "/dev/virtlun/lvs0/moved"
    words = ("blockcopy", NAME, "vdb", "--dest", moved, "--transient-job")
    host.virsh(*words, "--bandwidth", "1")
    host.virsh("blockjob", NAME, "vdb", "--abort")
    host.virsh(*words, "--reuse-external", "--wait", "--pivot")
    for side in SIDES:
        disk = shown(host, "vdb", *side)
        assert disk is not None
        assert disk.find("source").get("file") == moved  # type: ignore[union-attr]
    load.goes_on(load.status().requests, DEADLINE_S)
    assert "total_iops_sec  100000" in told(host, "volume", "limits", "lvs0/moved")
    assert told(host, "volume", "limits", "lvs0/moving") == ""
    told(host, "volume", "delete", "lvs0/moving", "--yes")
    # The gateway finds nothing to put right, and the guest nothing new.
    assert told(host, "domain", "list", "--connect", host.uri, "--json").count("lvs0/moved") == 1
    assert attribute(guest, "serial", "vdb") == serial
    load.finish()
    host.virsh("detach-disk", NAME, "vdb", "--persistent")
    guest.wait_for("[ ! -e /sys/block/vdb ]")
    until(
        lambda: told(host, "volume", "limits", "lvs0/moved") == "", "the limit goes with the disk"
    )
    told(host, "volume", "delete", "lvs0/moved", "--yes")


def test_a_threshold_is_set_and_taken_back(host: Host, guest: Agent) -> None:
    for said, shown in (("1G", f"threshold={1 << 30}"), ("0", "")):
        host.virsh("domblkthreshold", NAME, "vda", said)
        found = re.findall(r"block\.0\.(threshold=\d+)", host.virsh("domstats", NAME, "--block"))
        assert found == [shown] * bool(shown)


def test_what_it_cannot_is_said(host: Host, guest: Agent) -> None:
    with pytest.raises(VirshError, match=r"use bus='virtio' \(a target like vdb\)"):
        host.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/more", "sda", "--live")
    with pytest.raises(VirshError, match="cannot modify field 'readonly'"):
        path = host.scratch / "device.xml"
        path.write_text(ROOT.replace("<serial", "<readonly/><serial"))
        host.virsh("update-device", NAME, str(path), "--live")


def test_without_a_free_slot_it_is_said_what_to_do(host: Host, guest: Agent) -> None:
    host.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/more", "vdb", "--live")
    with pytest.raises(VirshError, match=r"one more <controller type='pci' .* or attach .* sda"):
        host.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/third", "vdc", "--live")
    assert controllers(host) == {".0", ".1"}
    host.virsh("detach-disk", NAME, "vdb", "--live")
    guest.wait_for("[ ! -e /sys/block/vdb ]")
    until(lambda: controllers(host) == {".0"}, lambda: str(controllers(host)))


def test_after_a_restart_of_libvirtd_it_works_or_is_said_what_does(
    host: Host, guest: Agent
) -> None:
    """libvirt 9.0 then plugs no vhost-user device into a domain without a NUMA cell; 11.3 does."""
    host.libvirtd.restart()
    until(lambda: host.virsh("domstate", NAME, check=False) == "running", "libvirtd is back")
    attach = ("attach-disk", NAME, "/dev/virtlun/lvs0/more", "vdb", "--live")
    if "daemon: 9.0." in host.virsh("version", "--daemon"):
        with pytest.raises(VirshError, match="libvirtd was restarted while blk ran, and plugs no"):
            host.virsh(*attach)
    else:
        host.virsh(*attach)
        guest.wait_for("[ -e /sys/block/vdb ]")
        host.virsh("detach-disk", NAME, "vdb", "--live")
        guest.wait_for("[ ! -e /sys/block/vdb ]")
    until(lambda: controllers(host) == {".0"}, lambda: str(controllers(host)))
    until(lambda: shown(host, "vdb") is None, "nobody has it")


def test_a_lun_beside_it(host: Host, guest: Agent) -> None:
    """With the next start the controller is there, and the virtio-blk disk stays what it is."""
    host.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/more", "sda", "--config")
    host.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/third", "vdb", "--config")
    listed = host.virsh("domblklist", NAME, "--inactive").split()
    assert [word for word in listed if word in ("sda", "vda", "vdb")] == ["vda", "vdb", "sda"]
    host.virsh("detach-disk", NAME, "vdb", "--config")
    host.virsh("detach-disk", NAME, "sda", "--config")
    direct = host.virsh_direct("dumpxml", NAME, "--inactive")
    assert "vhost-user-scsi-pci" not in direct


@pytest.mark.nightly
def test_a_qemu_without_vhost_user_scsi_has_virtio_blk_disks(
    host: Host, without_scsi: Path
) -> None:
    """Whatever the bus; and a client sees what it gave."""
    host.volumes.create("lvs0/rhel", 8 * MIB)
    disk = (
        "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/rhel'/>"
        "<target dev='sda' bus='scsi'/><serial>of-rhel</serial></disk>"
    )
    host.define("rhel", devices=disk, emulator=without_scsi)
    host.virsh("start", "rhel")
    agent = host.agent("rhel")
    agent.wait_for("[ -b /dev/vda ]")
    assert agent.run("cat /sys/block/vda/serial") == "of-rhel"
    xml = host.virsh("dumpxml", "rhel")
    assert "<target dev='sda' bus='scsi'/>" in xml and "vhostuser" not in xml
    listed = told(host, "domain", "list", "--connect", host.uri)
    row = next(line.split() for line in listed.splitlines() if line.startswith("rhel "))
    assert row == ["rhel", "running", "sda", "lvs0/rhel", "0", "virtio-blk", "yes"], listed
    agent.close()
    # A domain without a disk of ours has no controller, and takes a disk while it runs.
    host.define("bare", devices="", emulator=without_scsi)
    host.virsh("start", "bare")
    assert "vhost-user" not in host.virsh_direct("dumpxml", "bare")
    assert "memoryBacking" not in host.virsh("dumpxml", "bare")
    said = told(host, "domain", "prepare", "bare", "--connect", host.uri)
    assert "QEMU has no vhost-user-scsi" in said and "virtio-blk disks can be attached" in said
    agent = host.agent("bare")
    host.volumes.create("lvs0/first", 8 * MIB)
    host.virsh("attach-disk", "bare", "/dev/virtlun/lvs0/first", "vda", "--live")
    agent.wait_for("[ -b /dev/vda ]")
    agent.close()
    for name in ("rhel", "bare"):
        host.virsh("destroy", name)
        host.virsh("undefine", name)


BOOTS = """\
<domain type='qemu'>
  <name>boots</name>
  <memory unit='MiB'>64</memory>
  <os><type arch='x86_64' machine='q35'>hvm</type>{os}</os>
  <devices>
    {disks}
    <serial type='file'><source path='{log}'/><target port='0'/></serial>
  </devices>
</domain>
"""


@by_day("LUN first")
@pytest.mark.parametrize(
    ("os", "vda", "sda", "booted"),
    [
        ("<boot dev='hd'/>", "", "", "vda"),
        ("", "<boot order='1'/>", "<boot order='2'/>", "vda"),
        ("", "<boot order='2'/>", "<boot order='1'/>", "sda"),
    ],
    ids=["first disk", "virtio-blk first", "LUN first"],
)
def test_the_firmware_boots_the_disk_asked_for(
    host: Host, tmp_path: Path, os: str, vda: str, sda: str, booted: str
) -> None:
    disks = ""
    for dev, boot in (("vda", vda), ("sda", sda)):
        image = tmp_path / dev
        image.write_bytes(boot_sector(dev.encode()).ljust(MIB, b"\0"))
        words = ["--config", str(host.config), "volume", "import", str(image), f"lvs0/boot-{dev}"]
        subprocess.run(host.libvirtd.command(host.program("virtlun"), *words), check=True)
        disks += (
            f"<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/boot-{dev}'/>"
            f"<target dev='{dev}'/>{boot}</disk>"
        )
    log = host.scratch / "boots.log"
    path = tmp_path / "boots.xml"
    path.write_text(BOOTS.format(os=os, disks=disks, log=log))
    host.virsh("define", str(path))
    host.virsh("start", "boots")
    try:
        until(lambda: booted in log.read_text(errors="replace"), log.read_text)
    finally:
        host.virsh("destroy", "boots")
        host.virsh("undefine", "boots")
        for dev in ("vda", "sda"):
            host.volumes.delete(f"lvs0/boot-{dev}")
        log.unlink(missing_ok=True)
