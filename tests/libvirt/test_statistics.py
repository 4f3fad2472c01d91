"""The statistics of a disk of ours begin and go on with its VM, as those of libvirt's own do."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pydataplane import supervise
from pydataplane.errors import NO_DATA, RpcError
from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "counts"
MIB = 1 << 20
OURS = "/dev/virtlun/lvs0/counts"
SHARED = "/dev/virtlun/lvs0/both"
DISKS = (
    f"<disk type='file'><source file='{OURS}'/><target dev='sda' bus='scsi'/></disk>"
    f"<disk type='file'><source file='{SHARED}'/><target dev='sdb' bus='scsi'/><shareable/></disk>"
)
OWN = (
    "<disk type='file'><driver name='qemu' type='raw'/><source file='{file}'/>"
    "<target dev='vda' bus='virtio'/></disk>"
)
FIELDS = ("rd_req", "rd_bytes", "wr_req", "wr_bytes", "flush_operations")
WRITES = "dd if=/dev/zero of=/dev/{0} bs=64k count={1} oflag=direct conv=fsync"


def counted(host: Host, dev: str, name: str = NAME) -> dict[str, int]:
    """Returns what domblkstat says of a disk."""
    found = dict(re.findall(rf"^{dev} (\w+) (-?\d+)$", host.virsh("domblkstat", name, dev), re.M))
    return {field: int(found[field]) for field in FIELDS}


def in_domstats(host: Host, dev: str) -> dict[str, int]:
    """Returns the same as domstats says it."""
    said = host.virsh("domstats", "--block", NAME)
    (number,) = re.findall(rf"^ *block\.(\d+)\.name={dev}$", said, re.M)
    found = dict(re.findall(rf"^ *block\.{number}\.([a-z.]+)=(\d+)$", said, re.M))
    names = ("rd.reqs", "rd.bytes", "wr.reqs", "wr.bytes", "fl.reqs")
    return {field: int(found[name]) for field, name in zip(FIELDS, names, strict=True)}


@pytest.fixture(scope="module")
def running(host: Host) -> Iterator[Host]:
    """A running domain with one volume, one that it may share, and a file of libvirt's own."""
    for path in (OURS, SHARED):
        host.volumes.create(path.removeprefix("/dev/virtlun/"), 8 * MIB)
    file = host.scratch / "own.img"
    file.write_bytes(bytes(8 * MIB))
    file.chmod(0o666)
    host.define(NAME, devices=DISKS + OWN.format(file=file))
    host.virsh("start", NAME)
    yield host
    host.virsh("destroy", NAME, check=False)


def work(host: Host) -> None:
    """Has the guest write 1 MiB to each disk."""
    agent = host.agent(NAME)
    for dev in ("sda", "sdb", "vda"):
        agent.wait_for(f"[ -b /dev/{dev} ]")
        agent.run(WRITES.format(dev, 16), 60)
    agent.close()


@pytest.mark.nightly
@pytest.mark.parametrize("gateway", ["there", "away"])
def test_they_begin_again_when_the_vm_is_started_again(running: Host, gateway: str) -> None:
    work(running)
    for dev in ("sda", "sdb", "vda"):
        was = counted(running, dev)
        assert was["wr_bytes"] == MIB and was["rd_req"] > 0 and was["flush_operations"] > 0
        assert in_domstats(running, dev) == was
    if gateway == "away":  # nobody has released the controller when it comes again
        running.stop_gateway()
    running.virsh_direct("destroy", NAME)
    if gateway == "away":
        running.start_gateway()
    running.virsh("start", NAME, "--paused")
    for dev in ("sda", "sdb", "vda"):
        assert set(counted(running, dev).values()) == {0}, dev
        assert set(in_domstats(running, dev).values()) == {0}, dev
    running.virsh("resume", NAME)


def test_each_vm_has_its_own_of_a_shared_volume(running: Host) -> None:
    work(running)
    was = counted(running, "sdb")
    assert was["wr_bytes"] >= MIB
    disks = DISKS[DISKS.index("</disk>") + len("</disk>") :]
    running.define("other", devices=disks)
    running.virsh("start", "other", "--paused")
    assert set(counted(running, "sdb", "other").values()) == {0}
    assert counted(running, "sdb") == was
    running.virsh("destroy", "other")
    running.virsh("undefine", "other")


def test_they_begin_again_when_the_disk_is_attached_again(running: Host) -> None:
    work(running)
    assert counted(running, "sda")["wr_bytes"] >= MIB
    running.virsh("detach-disk", NAME, "sda", "--live")
    running.virsh("attach-disk", NAME, OURS, "sda", "--live")
    assert counted(running, "sda")["wr_bytes"] == 0


@pytest.mark.nightly
def test_they_go_on_over_an_upgrade_of_the_target(running: Host) -> None:
    work(running)
    was = counted(running, "sdb")
    supervise.upgrade(running.paths.rpc_socket)
    assert counted(running, "sdb") == was
    work(running)
    assert counted(running, "sdb")["wr_bytes"] == was["wr_bytes"] + MIB


def bins(host: Host, dev: str) -> dict[str, list[tuple[int, int]]]:
    """Returns the start and the value of each bin, by operation, as domstats says them."""
    said = host.virsh("domstats", "--block", NAME)
    (number,) = re.findall(rf"^ *block\.(\d+)\.name={dev}$", said, re.M)
    head = rf"^ *block\.{number}\.latency_histogram\.(\w+)\.bin\."
    counts = {operation: int(n) for operation, n in re.findall(rf"{head}count=(\d+)$", said, re.M)}
    numbers = {
        (operation, int(nth), of): int(value)
        for operation, nth, of, value in re.findall(
            rf"{head}(\d+)\.(start|value)=(\d+)$", said, re.M
        )
    }
    found = {
        operation: [
            (numbers.pop((operation, nth, "start")), numbers.pop((operation, nth, "value")))
            for nth in range(count)
        ]
        for operation, count in counts.items()
    }
    assert not numbers
    return found


def test_how_long_operations_took_is_in_the_bins_of_its_xml(running: Host) -> None:
    far = 1 << 62

    def disk(histogram: str) -> str:
        made = running.scratch / "counted.xml"
        made.write_text(
            f"<disk type='file'><driver name='qemu'>{histogram}</driver>"
            f"<source file='{OURS}'/><target dev='sda' bus='scsi'/></disk>"
        )
        return str(made)

    wanted = (
        "<statistics><latency-histogram type='write'><bin start='0'/><bin start='1'/>"
        f"<bin start='{far}'/></latency-histogram></statistics>"
    )
    assert bins(running, "sda") == {}
    running.virsh("update-device", NAME, disk(wanted), "--live")
    assert "<latency-histogram type='write'>" in running.virsh("dumpxml", NAME)
    assert bins(running, "sda") == {"write": [(0, 0), (1, 0), (far, 0)]}
    before = counted(running, "sda")["wr_req"]
    work(running)
    written = counted(running, "sda")["wr_req"] - before
    assert written > 0
    assert bins(running, "sda") == {"write": [(0, 0), (1, written), (far, 0)]}
    running.virsh("update-device", NAME, disk(wanted), "--live")  # anew
    assert bins(running, "sda")["write"][1] == (1, 0)
    running.virsh("detach-disk", NAME, "sda", "--live")
    uuid = running.volumes.lvol("lvs0/counts").uuid
    with pytest.raises(RpcError) as refused:
        running.client.call("bdev_get_histogram", name=uuid)
    assert refused.value.code == NO_DATA
    running.virsh("attach-device", NAME, disk(wanted), "--live")
    assert bins(running, "sda") == {"write": [(0, 0), (1, 0), (far, 0)]}
    running.virsh("update-device", NAME, disk(""), "--live")
    assert bins(running, "sda") == {}
