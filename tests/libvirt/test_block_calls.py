"""Each block call that virsh, virt-manager and their likes make, on a disk of ours."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import libvirt
import pytest

from tests.support.examples import ROOT, used
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.wait import until
from tests.support.watcher import Watcher

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "calls"
MIB = 1 << 20
SIZE = 16 * MIB
PATH = "/dev/virtlun/lvs0/calls"


@pytest.fixture(scope="module")
def running(host: Host) -> Iterator[Host]:
    """A running domain with one thin volume."""
    host.volumes.create("lvs0/calls", SIZE, thin=True)
    disk = f"<disk type='file'><source file='{PATH}'/><target dev='sda' bus='scsi'/></disk>"
    host.define(NAME, devices=disk)
    host.virsh("start", NAME)
    agent = host.agent(NAME)
    agent.wait_for("[ -b /dev/sda ]")
    agent.run("dd if=/dev/zero of=/dev/sda bs=1M count=2 oflag=direct", 60)
    agent.close()
    yield host
    host.virsh("destroy", NAME)


@pytest.fixture
def domain(running: Host) -> Iterator[Any]:
    """libvirt-python's own object of the domain."""
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    connection = libvirt.open(running.uri)
    yield connection.lookupByName(NAME)
    connection.close()


@pytest.mark.parametrize("disk", ["sda", PATH])
def test_virsh_says_size_and_statistics(running: Host, disk: str) -> None:
    info = running.virsh("domblkinfo", NAME, disk)
    assert re.search(rf"Capacity:\s+{SIZE}\n", info)
    assert re.search(rf"Allocation:\s+{2 * MIB}\n", info)
    assert re.search(r"wr_bytes 2097152", running.virsh("domblkstat", NAME, disk))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("domblklist calls", f"sda {PATH}"),
        ("domblklist calls --details", f"file disk sda {PATH}"),
        ("domblklist calls --inactive", f"sda {PATH}"),
        ("domblkinfo calls --all", f"sda {SIZE} {2 * MIB} {2 * MIB}"),
        ("domblkerror calls", "No errors found"),
        ("domiflist calls", ""),
        ("blockjob calls sda", ""),
    ],
)
def test_what_virsh_shows(running: Host, words: str, says: str) -> None:
    assert " ".join(running.virsh(*words.split()).split()) == says


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("blkdeviotune calls sda --group-name g", "group_name: each volume has limits of its own"),
        ("domblkthreshold calls sda[7] 1M", "sda[7]: a virtlun volume is one image: name it sda"),
        ("domblkthreshold calls sdq 1M", "failed to find disk 'sdq'"),
        (
            "blockcopy calls sda /var/tmp/none --transient-job",
            "copied to another volume of its target alone",
        ),
        ("blockcopy calls vda /dev/virtlun/lvs0/calls", "copy a disk to virtlun volume lvs0/calls"),
        ("blockpull calls sda --base other", "leave the base out"),
        ("blockcommit calls sda --active", "calls has no snapshot of its own below it: take one"),
        ("blockjob calls sda --abort", "sda does not have an active block job"),
        ("blockjob calls sda --bandwidth 9", "sda does not have an active block job"),
        ("blockresize calls sda 1M", "would cut off data"),
        ("domblkinfo calls sdq", "sdq"),
        ("domblkstat calls sdq", "sdq"),
        ("change-media calls sda --eject", "sda"),
    ],
)
def test_what_is_not_possible_is_one_sentence(running: Host, words: str, says: str) -> None:
    with pytest.raises(VirshError) as caught:
        running.virsh(*words.split())
    said = str(caught.value)
    assert says in said
    assert "sda" in said or "sdq" in said or "volume lvs0/calls" in said
    assert "not found in domain" not in said
    assert "vdzz" not in said


def test_memory_statistics_are_libvirts_own(running: Host) -> None:
    assert "rss " in running.virsh("dommemstat", NAME)


def test_the_pattern_of_virt_manager(domain: Any) -> None:
    """virt-manager polls blockStats and blockInfo of every disk in the XML."""
    assert domain.blockStats("sda")[3] == 2 * MIB
    assert domain.blockStats("")[3] == 2 * MIB, "all disks together"
    assert domain.blockInfo("sda") == domain.blockInfo(PATH) == [SIZE, 2 * MIB, 2 * MIB]
    assert domain.blockJobInfo("sda") == {}
    assert domain.diskErrors() == {}


def test_the_pattern_of_collectors(running: Host, domain: Any) -> None:
    """collectd, telegraf and Prometheus' exporter take all statistics at once."""
    connection = domain.connect()
    flags = libvirt.VIR_DOMAIN_STATS_BLOCK
    whole = connection.getAllDomainStats(flags, 0)
    listed = connection.domainListGetStats([domain], flags, 0)
    for found in (whole, listed):
        ((_, stats),) = [item for item in found if item[0].name() == NAME]
        assert stats["block.count"] == 1
        assert stats["block.0.name"] == "sda"
        assert stats["block.0.path"] == PATH
        assert stats["block.0.wr.bytes"] == 2 * MIB
        assert stats["block.0.capacity"] == SIZE
        limits = {name: value for name, value in stats.items() if ".limits." in name}
        assert limits == {
            "block.0.limits.request_alignment": 512,
            "block.0.limits.discard_alignment": running.volumes.lvstore("lvs0").cluster_size,
        }
    assert set(domain.blockIoTune("sda").values()) == {0}, "as many as the volume can"
    params = domain.blockStatsFlags("sda")
    assert params["wr_bytes"] == 2 * MIB
    assert set(params) == {
        *("rd_bytes", "rd_operations", "rd_total_times"),
        *("wr_bytes", "wr_operations", "wr_total_times"),
        *("flush_operations", "flush_total_times"),
    }
    assert domain.blockStatsFlags("")["wr_bytes"] == 2 * MIB


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda d: d.blockPeek("sda", 0, 512), "block peek is not supported"),
        (lambda d: d.blockRebase("sda", "base", 0), "leave the base out"),
    ],
)
def test_what_python_is_told(domain: Any, call: Any, says: str) -> None:
    with pytest.raises(libvirt.libvirtError, match=says) as caught:
        call(domain)
    assert caught.value.get_error_code() == libvirt.VIR_ERR_OPERATION_UNSUPPORTED


def test_metadata_of_ours_is_hidden_and_kept(domain: Any) -> None:
    uri = "https://virtlun.dev/xmlns/domain/1"
    kind = libvirt.VIR_DOMAIN_METADATA_ELEMENT
    with pytest.raises(libvirt.libvirtError) as caught:
        domain.metadata(kind, uri)
    assert caught.value.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN_METADATA
    with pytest.raises(libvirt.libvirtError, match="virtlun's own"):
        domain.setMetadata(kind, None, "virtlun", uri)
    domain.setMetadata(kind, "<note/>", "n", "https://example.org/n")
    assert domain.metadata(kind, "https://example.org/n") == "<note/>"
    assert "sda" in domain.XMLDesc()


def test_the_carrier_is_nobodys_to_detach(running: Host, domain: Any) -> None:
    inside = running.virsh_direct("dumpxml", NAME)
    target = ElementTree.fromstring(inside).find("devices/disk[@type='vhostuser']/target")
    assert target is not None
    dev = target.get("dev")
    xml = f"<disk type='vhostuser' device='disk'><target dev='{dev}' bus='virtio'/></disk>"
    with pytest.raises(libvirt.libvirtError, match="carries the virtlun disks"):
        domain.detachDeviceFlags(xml, libvirt.VIR_DOMAIN_AFFECT_LIVE)
    with pytest.raises(libvirt.libvirtError, match="carries the virtlun disks"):
        domain.detachDeviceAlias("ua-virtlun-scsi0", libvirt.VIR_DOMAIN_AFFECT_LIVE)
    assert running.virsh_direct("dumpxml", NAME) == inside


def test_an_ordinary_disk_cannot_take_the_place_of_ours(running: Host, domain: Any) -> None:
    image = running.scratch / "ordinary.img"
    image.write_bytes(b"\0" * MIB)
    image.chmod(0o666)
    xml = (
        f"<disk type='file' device='disk'><source file='{image}'/>"
        "<target dev='sda' bus='scsi'/></disk>"
    )
    for flags in (libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG):
        with pytest.raises(libvirt.libvirtError, match="target sda already exists"):
            domain.attachDeviceFlags(xml, flags)
    assert running.virsh("domblklist", NAME).split() == ["sda", PATH]


def test_what_carries_the_disks_is_no_disk_to_a_client(running: Host) -> None:
    inside = ElementTree.fromstring(running.virsh_direct("dumpxml", NAME))
    (carrier,) = [
        target.get("dev", "")
        for target in inside.iterfind("devices/disk[@type='vhostuser']/target")
    ]
    for words in (("domblkinfo",), ("domblkstat",), ("blockresize", "16M"), ("blkdeviotune",)):
        command, *size = words
        with pytest.raises(VirshError, match=f"invalid path {carrier} not assigned to domain"):
            running.virsh(command, NAME, carrier, *size)


def test_a_pull_gives_a_volume_all_that_it_has_of_snapshots(running: Host) -> None:
    """virsh waits for the job's event."""
    running.virsh("blockpull", NAME, "sda", "--wait", "--verbose")
    (snapshot,) = running.volumes.snapshot(["lvs0/calls"], "below")
    assert running.volumes.volume("lvs0/calls").parent == "calls@below"
    running.virsh("blockpull", NAME, "sda", "--wait")
    assert running.volumes.volume("lvs0/calls").parent is None
    running.volumes.delete(snapshot.path)


@pytest.fixture
def thin(running: Host) -> Iterator[Host]:
    """The domain with a thin volume more, as sdb."""
    running.volumes.create("lvs0/thin", SIZE, thin=True)
    running.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/thin", "sdb")
    yield running
    running.virsh("detach-disk", NAME, "sdb")
    running.volumes.delete("lvs0/thin")


def threshold(domain: Any) -> int:
    """What `domstats` has of sdb, in bytes; 0: none."""
    flags = libvirt.VIR_DOMAIN_STATS_BLOCK
    ((_, stats),) = domain.connect().domainListGetStats([domain], flags, 0)
    return int(stats.get("block.1.threshold", 0))


def test_who_listens_is_told_once_that_a_thin_volume_grows(
    thin: Host, domain: Any, tmp_path: Path
) -> None:
    agent = thin.agent(NAME)
    watcher = Watcher(thin.uri, tmp_path / "virsh")
    log = tmp_path / "python"
    write = "dd if=/dev/zero of=/dev/sdb bs=1M oflag=direct count="
    source = "sdb(/dev/virtlun/lvs0/thin)"
    try:
        until(lambda: watcher.hears(thin, NAME), "virsh listens")
        thin.virsh("domblkthreshold", NAME, "sdb", "2M")
        assert f"block.1.threshold={2 * MIB}" in thin.virsh("domstats", NAME, "--block")
        agent.wait_for("[ -b /dev/sdb ]")
        agent.run(f"{write}3", 60)
        line = watcher.line("'block-threshold'")
        told, _, excess = line.rpartition(" ")
        assert told.endswith(f"for domain '{NAME}': dev: {source} {2 * MIB}")
        assert 0 < int(excess) <= MIB
        assert threshold(domain) == 0
        # The next one, in libvirt's other form, was exceeded before it was set.
        thin.virsh("domblkthreshold", NAME, "sdb[1]", "1M")
        watcher.line(f"dev: {source.replace('sdb', 'sdb[1]', 1)} {MIB} {2 * MIB}")
        assert watcher.text.count("'block-threshold'") == 2

        program = used(ROOT / "examples/libvirt/thresholds.py")
        with log.open("wb") as out:
            words = [sys.executable, str(program), thin.uri, NAME, "1"]
            listener = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
        try:
            until(lambda: f"sdb has {3 * MIB} bytes" in log.read_text(), log.read_text)
            assert threshold(domain) == 4 * MIB
            agent.run(f"{write}3 seek=3", 60)
            until(lambda: "sdb (/dev/virtlun/lvs0/thin) has" in log.read_text(), log.read_text)
            until(lambda: threshold(domain) > 5 * MIB, log.read_text)
        finally:
            listener.kill()
            listener.wait()
    finally:
        watcher.close()
        agent.close()


def test_a_thick_volume_has_no_threshold(running: Host, domain: Any) -> None:
    thick = running.volumes.create("lvs0/thick", SIZE)
    running.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/thick", "sdb")
    try:
        with pytest.raises(libvirt.libvirtError, match="volume lvs0/thick is thick") as caught:
            domain.setBlockThreshold("sdb", MIB)
        assert caught.value.get_error_code() == libvirt.VIR_ERR_OPERATION_UNSUPPORTED
    finally:
        running.virsh("detach-disk", NAME, "sdb")
        running.volumes.delete(thick.uuid)


@pytest.fixture(params=["with a disk of ours", "without one"])
def drive(request: pytest.FixtureRequest, host: Host) -> Iterator[Host]:
    """A running domain `drive` with an empty CD-ROM of libvirt's own, and nothing to boot."""
    disk = ""
    if request.param == "with a disk of ours":
        host.volumes.create("lvs0/drive", SIZE)
        disk = "<disk type='file'><source file='/dev/virtlun/lvs0/drive'/><target dev='sda' "
        disk += "bus='scsi'/></disk>"
    path = host.scratch / "drive.xml"
    path.write_text(
        "<domain type='qemu'><name>drive</name><memory unit='MiB'>64</memory><os>"
        f"<type arch='x86_64' machine='q35'>hvm</type></os><devices>{disk}"
        "<disk type='file' device='cdrom'><target dev='sdz' bus='sata'/><readonly/></disk>"
        "</devices></domain>"
    )
    host.virsh("define", str(path))
    host.virsh("start", "drive", "--paused")
    yield host
    host.virsh("destroy", "drive")
    host.virsh("undefine", "drive")
    if disk:
        host.volumes.delete("lvs0/drive")


def media(host: Host) -> list[str]:
    """What the CD-ROM has, in the running domain and in the persistent one."""
    listed = (host.virsh("domblklist", "drive", *side) for side in ((), ("--inactive",)))
    return [dict(line.split(maxsplit=1) for line in text.splitlines())["sdz"] for text in listed]


NO_MEDIUM = (
    "disk 'sdz' (volume lvs0/medium) cannot be a cdrom, nor its medium: attach the volume as a disk"
    " (device='disk'), or give the cdrom a file"
)


def test_a_volume_is_no_medium_of_a_cdrom(drive: Host) -> None:
    drive.volumes.create("lvs0/medium", SIZE)
    file = drive.scratch / "medium.iso"
    file.write_bytes(bytes(MIB))
    file.chmod(0o666)

    def refused(*how: str) -> None:
        with pytest.raises(VirshError) as caught:
            drive.virsh("change-media", "drive", "sdz", "/dev/virtlun/lvs0/medium", *how)
        assert NO_MEDIUM in str(caught.value)

    of_pool = drive.scratch / "medium.xml"
    of_pool.write_text(
        "<disk type='volume' device='cdrom'><source pool='virtlun-lvs0' volume='medium'/>"
        "<target dev='sdz' bus='sata'/><readonly/></disk>"
    )
    for sides in (["--live"], ["--config"], ["--live", "--config"]):
        refused("--insert", *sides)
        refused("--insert", "--block", *sides)
        with pytest.raises(VirshError, match=re.escape(NO_MEDIUM)):
            drive.virsh("update-device", "drive", str(of_pool), *sides)
    # As Cockpit does it, whose dialog lists our pools.
    words = ["--disk", "source.pool=virtlun-lvs0,source.volume=medium,type=volume", "--update"]
    inserts = subprocess.run(
        ["virt-xml", "--connect", drive.uri, "drive", "--edit", "target.dev=sdz", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert inserts.returncode != 0
    assert NO_MEDIUM in inserts.stderr
    assert media(drive) == ["-", "-"]
    drive.virsh("change-media", "drive", "sdz", str(file), "--insert", "--live", "--config")
    refused("--update", "--live", "--config")
    assert media(drive) == [str(file), str(file)]
    drive.virsh("change-media", "drive", "sdz", "--eject", "--live", "--config")
    assert media(drive) == ["-", "-"]
    drive.volumes.delete("lvs0/medium")  # nobody has it
