"""I/O limits of our disks are libvirt's, call for call; the target keeps them.

A disk of libvirtd's own in the same domain is the measure: what it is told, ours are told, too.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.wait import until
from tests.support.watcher import Watcher

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "tuned"
VOLUMES = {"sda": "lun", "vda": "blk"}
"""Our disks, of both kinds."""
THEIRS = "sdz"
TUNE = (
    "<iotune><total_iops_sec>1000</total_iops_sec>"
    "<total_iops_sec_max>2000</total_iops_sec_max></iotune>"
)
GIVEN = {"total_iops_sec": 1000, "total_iops_sec_max": 2000}


def disk(dev: str, more: str = TUNE, name: str = "") -> str:
    bus = "virtio" if dev.startswith("vd") else "scsi"
    return (
        f"<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/{name or VOLUMES[dev]}'/>"
        f"<target dev='{dev}' bus='{bus}'/>{more}</disk>"
    )


def limits(host: Host, name: str) -> dict[str, int]:
    """Returns what the target limits of a volume."""
    found = host.client.call_raw("virtlun_bdev_get_limits", name=f"lvs0/{name}")
    return {key: value for key, value in found.items() if value}


def told(host: Host, dev: str, *side: str) -> dict[str, int]:
    """Returns what virsh shows of a disk's limits, but a group's name."""
    lines = host.virsh("blkdeviotune", NAME, dev, *side).splitlines()
    pairs = [line.split(":") for line in lines if ":" in line and "group_name" not in line]
    return {key.strip(): int(value) for key, value in pairs}


def shown(host: Host, dev: str, *side: str) -> dict[str, int]:
    """Returns what dumpxml has of them."""
    xml = ElementTree.fromstring(host.virsh("dumpxml", NAME, *side))
    (found,) = [d for d in xml.findall("devices/disk") if d.find("target").get("dev") == dev]  # type: ignore[union-attr]
    return {node.tag: int(node.text or "") for node in found.iterfind("iotune/*")}


def said(host: Host, dev: str, *words: str) -> str | None:
    """Returns what virsh says if it refuses other limits for a disk, without its name."""
    try:
        host.virsh("blkdeviotune", NAME, dev, *words)
    except VirshError as error:
        return str(error).replace(dev, "DEV")
    return None


@pytest.fixture(scope="module")
def running(host: Host) -> Iterator[Host]:
    """A running domain with a LUN and a virtio-blk disk, limited, and a disk of libvirtd's own."""
    for name in (*VOLUMES.values(), "more", "shared"):
        host.volumes.create(f"lvs0/{name}", 8 << 20, thin=True)
    image = host.scratch / "theirs.img"
    image.write_bytes(b"\0" * (1 << 20))
    image.chmod(0o666)
    theirs = (
        f"<disk type='file' device='disk'><source file='{image}'/>"
        f"<target dev='{THEIRS}' bus='scsi'/>{TUNE}</disk>"
    )
    path = host.scratch / "tuned.xml"
    ports = "<controller type='pci' model='pcie-root-port'/>" * 10
    path.write_text(
        f"<domain type='qemu'><name>{NAME}</name><memory unit='MiB'>64</memory>"
        "<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>"
        f"<controller type='pci' model='pcie-root'/>{ports}"
        f"<controller type='scsi' model='virtio-scsi'/>"
        f"{''.join(map(disk, VOLUMES))}{theirs}</devices></domain>"
    )
    host.virsh("define", str(path))
    host.virsh("start", NAME)
    yield host
    host.virsh("destroy", NAME)
    until(lambda: not any(limits(host, name) for name in VOLUMES.values()), "all limits are gone")
    host.virsh("undefine", NAME)


@pytest.fixture(params=["sda", pytest.param("vda", marks=pytest.mark.nightly)])
def dev(running: Host, request: pytest.FixtureRequest) -> Iterator[str]:
    """A disk of ours, which is limited as in the definition afterwards, and so is theirs."""
    yield request.param
    kinds = ("bytes-sec", "bytes-sec-max", "iops-sec", "iops-sec-max")
    names = [f"--{way}-{kind}" for kind in kinds for way in ("total", "read", "write")]
    zeros = [word for name in (*names, "--size-iops-sec") for word in (name, "0")]
    for each in (request.param, THEIRS):
        running.virsh("blkdeviotune", NAME, each, *zeros, *BOTH)
        given = ("--total-iops-sec", "1000", "--total-iops-sec-max", "2000")
        running.virsh("blkdeviotune", NAME, each, *given, *BOTH)


BOTH = ("--live", "--config")
SIDES = ((), ("--live",), ("--config",))


@pytest.mark.nightly
def test_a_domain_starts_with_the_limits_that_its_definition_has(running: Host, dev: str) -> None:
    assert limits(running, VOLUMES[dev]) == GIVEN
    assert shown(running, dev) == shown(running, dev, "--inactive") == GIVEN
    for side in SIDES:
        ours, theirs = told(running, dev, *side), told(running, THEIRS, *side)
        lengths = {name: 0 for name in ours if name.endswith("_length")}
        # QEMU shows the length that every burst has, also where there is none.
        assert {**ours, **lengths} == {**theirs, **lengths}
        assert {name: value for name, value in ours.items() if value} == GIVEN
        assert len(ours) == 19


CALLS = (
    ("--total-iops-sec", "1500"),
    ("--total-iops-sec", "0"),
    ("--total-iops-sec", "0", "--total-iops-sec-max", "0"),
    ("--read-bytes-sec", "1M", "--write-bytes-sec", "2M"),
    ("--total-bytes-sec", "5000000", "--read-iops-sec", "10"),
    ("--total-bytes-sec", "1", "--write-bytes-sec", "1"),
    ("--read-iops-sec", "1", "--total-iops-sec", "1"),
    ("--read-iops-sec", "10", "--read-iops-sec-max", "5"),
    ("--write-bytes-sec-max", "5"),
    ("--size-iops-sec", "4096"),
    ("--total-iops-sec", "7", "--total-iops-sec-max", "9", "--total-iops-sec-max-length", "3"),
    ("--total-iops-sec-max-length", "0"),
    ("--total-bytes-sec", "1000000000000001"),
)
"""One after the other, on what the one before has left."""


@pytest.mark.nightly
def test_each_call_does_with_ours_what_it_does_with_libvirts_own(running: Host, dev: str) -> None:
    for words in CALLS:
        ours, theirs = (said(running, each, *words, "--live") for each in (dev, THEIRS))
        assert (ours is None) == (theirs is None), (words, ours, theirs)
        if ours is not None and theirs is not None:
            first, second = (re.sub(r".*error: (disk DEV: )?", "", text) for text in (ours, theirs))
            assert set(first.split()) >= set(second.split()), (first, second)
        live = [
            {name: value for name, value in told(running, each).items() if "_length" not in name}
            for each in (dev, THEIRS)
        ]
        assert live[0] == live[1], words
        found = {name: value for name, value in told(running, dev).items() if value}
        assert limits(running, VOLUMES[dev]) == shown(running, dev) == found
    assert shown(running, dev, "--inactive") == GIVEN


def test_flags_choose_the_side(running: Host, dev: str) -> None:
    running.virsh("blkdeviotune", NAME, dev, "--read-bytes-sec", "5000", "--config")
    assert limits(running, VOLUMES[dev]) == shown(running, dev) == GIVEN
    assert shown(running, dev, "--inactive") == {"read_bytes_sec": 5000, **GIVEN}
    running.virsh("blkdeviotune", NAME, dev, "--read-bytes-sec", "6000", *BOTH)
    for found in (
        limits(running, VOLUMES[dev]),
        shown(running, dev),
        shown(running, dev, "--inactive"),
    ):
        assert found == {"read_bytes_sec": 6000, **GIVEN}
    assert "vhostuser" not in running.virsh("dumpxml", NAME)


def test_the_event_is_libvirts(running: Host, dev: str, tmp_path: Path) -> None:
    watcher = Watcher(running.uri, tmp_path / "log")
    try:
        until(lambda: watcher.hears(running, NAME), "virsh listens")
        lines = []
        for each in (THEIRS, dev):
            running.virsh("blkdeviotune", NAME, each, "--write-bytes-sec", "4096", "--live")
            watcher.line(f"blkdeviotune.disk: {each}")
            text = watcher.text
            lines.append(text[text.index("event 'tunable'") :].replace(each, "DEV"))
            running.virsh("blkdeviotune", NAME, each, "--write-bytes-sec", "0", "--live")
    finally:
        watcher.close()
    (theirs, ours) = (re.findall(r"blkdeviotune\.\w+: .*", text) for text in lines)
    assert (
        ours[-2:] == theirs[:2] == ["blkdeviotune.disk: DEV", "blkdeviotune.write_bytes_sec: 4096"]
    )


@pytest.mark.parametrize("at", ["sdb", "vdb"])
def test_an_attached_disk_brings_them_and_takes_them_along(
    running: Host, at: str, tmp_path: Path
) -> None:
    path = tmp_path / "disk.xml"
    path.write_text(disk(at, name="more"))
    running.virsh("attach-device", NAME, str(path), *BOTH)
    assert limits(running, "more") == shown(running, at) == GIVEN
    assert shown(running, at, "--inactive") == GIVEN
    path.write_text(disk(at, "", name="more"))  # as Nova writes it
    running.virsh("detach-device", NAME, str(path), "--config")
    if at == "sdb":  # without a guest nobody lets a PCI device go
        running.virsh("detach-device", NAME, str(path), "--live")
        assert limits(running, "more") == {}


def test_they_outlast_the_target(running: Host) -> None:
    running.kill_target()
    running.start_target()
    for name in VOLUMES.values():
        assert limits(running, name) == GIVEN


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("<iotune><group_name>g</group_name></iotune>", "each volume has limits of its own"),
        (
            "<iotune><total_bytes_sec>1</total_bytes_sec><read_bytes_sec>1</read_bytes_sec></iotune>",
            "total and read/write of bytes_sec cannot be set at the same time",
        ),
        (TUNE + "<shareable/>", "<iotune> is not possible with <shareable/>"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_nothing_changes(
    running: Host, tmp_path: Path, more: str, says: str
) -> None:
    path = tmp_path / "disk.xml"
    path.write_text(disk("sdc", more, name="shared"))
    before = running.virsh("dumpxml", NAME)
    with pytest.raises(VirshError, match=re.escape(says)):
        running.virsh("attach-device", NAME, str(path), *BOTH)
    assert running.virsh("dumpxml", NAME) == before
    assert limits(running, "shared") == {}


@pytest.mark.nightly
def test_by_hand_a_volume_is_limited_for_good(running: Host, tmp_path: Path) -> None:
    program = [running.program("virtlun"), "--config", str(running.config)]
    words = ("volume", "limits", "lvs0/shared")
    subprocess.run([*program, *words, "--total-bytes-sec", "64M"], check=True, capture_output=True)
    path = tmp_path / "disk.xml"
    path.write_text(disk("sdc", "<shareable/>", name="shared"))
    running.virsh("attach-device", NAME, str(path), "--live")
    assert told(running, "sdc")["total_bytes_sec"] == 64 << 20
    with pytest.raises(VirshError, match="virtlun volume limits lvs0/shared"):
        running.virsh("blkdeviotune", NAME, "sdc", "--total-iops-sec", "1", "--live")
    running.virsh("detach-device", NAME, str(path), "--live")
    assert limits(running, "shared") == {"total_bytes_sec": 64 << 20}
    subprocess.run([*program, *words, "--none"], check=True, capture_output=True)
    assert limits(running, "shared") == {}
