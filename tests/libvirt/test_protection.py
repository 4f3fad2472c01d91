"""LUNs that have protection information, by plain virsh, with a real libvirtd and Linux.

With type 3 it shows who made a block's tuple: Linux gives it the reference tag 0, and the target,
where the guest carries none, FFFFFFFFh.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest.test_protection import guard
from tests.libvirt.test_restarted_target import restarts
from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU, VirshError
from tests.support.night import by_day
from tests.support.ports import free_port
from tests.support.verified_io import VerifiedIo
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

MIB = 1 << 20
ON, OFF = "\n[disks]\nprotection = true\n", "\n[disks]\nprotection = false\n"
PROPERTY = "<qemu:property name='t10_pi' type='bool' value='true'/>"
TYPES = (1, 3)
MADE = {True: 0, False: 0xFFFFFFFF}
"""The reference tag with type 3, by whether the guest carries tuples."""


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A host whose guests carry it, with an lvstore for each type on a file that has it."""
    with Host(keep=True, more_config=ON) as running:
        for kind in TYPES:
            file = base(running, kind)
            file.write_bytes(b"")
            with file.open("r+b") as opened:
                opened.truncate(64 * MIB // 512 * 520)
            call = running.client.call_raw
            call("bdev_aio_create", name=f"pi{kind}", filename=str(file), dif_type=kind)
            call(
                "bdev_lvol_create_lvstore",
                bdev_name=f"pi{kind}",
                lvs_name=f"p{kind}",
                cluster_sz=MIB,
            )
        yield running


@pytest.fixture(autouse=True)
def whole(host: Host) -> Iterator[None]:
    """Each test leaves no domain."""
    yield
    for name in host.virsh_direct("list", "--all", "--name").split():
        host.virsh_direct("destroy", name, check=False)
        host.virsh_direct("undefine", name, "--managed-save", "--snapshots-metadata", check=False)


def base(host: Host, kind: int) -> Path:
    return host.scratch / f"pi{kind}.img"


def has_property(host: Host, name: str, *options: str) -> bool:
    """Whether the controller of libvirtd's domain has it; no client sees that."""
    assert "t10_pi" not in host.virsh("dumpxml", name, *options)
    return PROPERTY in host.virsh_direct("dumpxml", name, *options)


def write(agent: Agent, dev: str, mark: str, lba: int) -> list[bytes]:
    """Has the guest write 8 blocks, and read them again; returns them."""
    data = "".join(f"{mark} {number:07d};" for number in range(4096))[:4096]
    agent.run(f"printf '%s' '{data}' > /tmp/{mark}; [ $(wc -c < /tmp/{mark}) = 4096 ]")
    agent.run(
        f"dd if=/tmp/{mark} of=/dev/{dev} bs=4k count=1 seek={lba * 512} oflag=direct,seek_bytes"
    )
    agent.run(
        f"dd if=/dev/{dev} of=/tmp/back bs=4k count=1 skip={lba * 512} iflag=direct,skip_bytes"
    )
    agent.run(f"cmp /tmp/{mark} /tmp/back")
    return [data[at : at + 512].encode() for at in range(0, 4096, 512)]


def check_file(file: Path, blocks: list[bytes], kind: int, carried: bool) -> None:
    """Checks the tuples that lie behind blocks in the file, with their bits inverted."""
    content = file.read_bytes()
    for block in blocks:
        place = content.index(block)
        assert place % 520 == 0
        there = bytes(~byte & 0xFF for byte in content[place + 512 : place + 520])
        # With type 1 the target has made the volume's number the file's.
        tag = place // 520 if kind == 1 else MADE[carried]
        assert struct.unpack(">HHI", there) == (guard(block), 0, tag)


def integrity(agent: Agent, dev: str, field: str) -> str:
    return agent.run(f"cat /sys/block/{dev}/integrity/{field}").strip()


def check_carried(host: Host, agent: Agent, dev: str, kind: int, mark: str) -> None:
    """Checks that Linux makes and compares the tuples of a disk, and that they are in its file."""
    assert integrity(agent, dev, "format") == f"T10-DIF-TYPE{kind}-CRC"
    assert integrity(agent, dev, "device_is_integrity_capable") == "1"
    assert integrity(agent, dev, "read_verify") == integrity(agent, dev, "write_generate") == "1"
    check_file(base(host, kind), write(agent, dev, mark, 64), kind, carried=True)


def check_not_carried(host: Host, agent: Agent, dev: str, mark: str) -> None:
    """Checks that a guest with a disk of type 3 leaves the tuples to the target."""
    assert integrity(agent, dev, "device_is_integrity_capable") == "0"
    check_file(base(host, 3), write(agent, dev, mark, 64), 3, carried=False)


@by_day("3")
@pytest.mark.parametrize("kind", TYPES)
def test_a_disk_that_is_attached_to_a_running_guest_has_it(host: Host, kind: int) -> None:
    """Also the first one, for which the guest got its controller."""
    name, volume = f"hot{kind}", f"p{kind}/hot"
    host.volumes.create(volume, 8 * MIB, thin=True)
    host.define(name)
    host.virsh("start", name)
    agent = host.agent(name)
    host.virsh("attach-disk", name, f"/dev/virtlun/{volume}", "sda", "--live")
    agent.wait_for("[ -e /sys/block/sda/integrity/format ]")
    assert has_property(host, name)
    check_carried(host, agent, "sda", kind, f"hot{kind}")
    assert "I/O error" not in agent.run("dmesg")
    agent.close()


@pytest.mark.nightly
def test_disks_of_a_definition_have_it_and_what_is_damaged_is_an_error(host: Host) -> None:
    """Of both types, and one of a volume that has none; damage is told by the guest itself."""
    host.define("cold")
    for dev, volume in (("sda", "p1/cold"), ("sdb", "p3/cold"), ("sdc", "lvs0/cold")):
        host.volumes.create(volume, 8 * MIB, thin=True)
        host.virsh("attach-disk", "cold", f"/dev/virtlun/{volume}", dev, "--config")
    assert has_property(host, "cold", "--inactive")
    host.virsh("start", "cold")
    agent = host.agent("cold")
    agent.wait_for("[ -b /dev/sdc ]")
    check_carried(host, agent, "sda", 1, "cold1")
    check_carried(host, agent, "sdb", 3, "cold3")
    write(agent, "sdc", "plain", 64)
    agent.run("mkfs.ext4 -q /dev/sda && mount /dev/sda /mnt", 120)
    agent.run("dd if=/dev/urandom of=/mnt/file bs=1M count=2 conv=fsync && md5sum /mnt/file", 120)
    agent.run("umount /mnt")
    block = write(agent, "sdb", "bad", 128)[3]
    file = base(host, 3)
    place = file.read_bytes().index(block)
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(bytes([block[0] ^ 1]))
    where = f"skip={128 * 512} iflag=direct,skip_bytes"
    said = agent.run(f"dd if=/dev/sdb of=/tmp/x bs=4k count=1 {where}", check=False)
    assert "1+0 records out" not in said
    assert re.search("protection error, dev sdb, sector 12[89]|13[0-5]", agent.run("dmesg"))
    agent.close()


@pytest.mark.nightly
def test_a_guest_keeps_it_until_it_boots_again(host: Host) -> None:
    """Through another configuration, a restart of the gateway, a save and a snapshot's memory."""
    host.scratch.chmod(0o777)  # QEMU's user makes the file of the snapshot
    host.volumes.create("p3/kept", 8 * MIB, thin=True)
    disk = (
        "<disk type='file' device='disk'><source file='/dev/virtlun/p3/kept'/>"
        "<target dev='sda' bus='scsi'/></disk>"
    )
    host.define("kept", devices=disk)
    host.virsh("start", "kept")
    agent = host.agent("kept")
    agent.wait_for("[ -b /dev/sda ]")
    check_carried(host, agent, "sda", 3, "before")
    agent.close()
    text = host.config.read_text()
    try:
        configure(host, text.replace(ON, OFF))
        host.virsh("snapshot-create-as", "kept", "memory")
        host.virsh("managedsave", "kept")
        host.virsh("start", "kept")
        agent = host.agent("kept")
        assert has_property(host, "kept")
        check_carried(host, agent, "sda", 3, "saved")
        agent.close()
        host.virsh("snapshot-revert", "kept", "memory")
        agent = host.agent("kept")
        assert has_property(host, "kept")
        check_carried(host, agent, "sda", 3, "reverted")
        assert "I/O error" not in agent.run("dmesg")
        agent.close()
        host.virsh("snapshot-delete", "kept", "memory")
        host.virsh("destroy", "kept")
        host.virsh("start", "kept")
        assert not has_property(host, "kept") and not has_property(host, "kept", "--inactive")
        agent = host.agent("kept")
        agent.wait_for("[ -b /dev/sda ]")
        check_not_carried(host, agent, "sda", "off")
        agent.close()
        # What runs without it goes on without it.
        configure(host, text)
        host.virsh("managedsave", "kept")
        host.virsh("start", "kept")
        assert not has_property(host, "kept")
        agent = host.agent("kept")
        check_not_carried(host, agent, "sda", "still")
        agent.close()
    finally:
        configure(host, text)


def configure(host: Host, text: str) -> None:
    """Gives the gateway another configuration, with which it starts anew."""
    host.stop_gateway()
    host.config.write_text(text)
    host.start_gateway()


@pytest.mark.nightly
def test_one_without_a_disk_needs_a_target_where_it_goes_on(host: Host) -> None:
    """By gateway and hook: QEMU would wait for its controller, and nothing can stand in for it."""
    host.volumes.create("p3/empty", 8 * MIB, thin=True)
    host.define("empty")
    host.virsh("start", "empty")
    agent = host.agent("empty")
    agent.run("echo here > /tmp/mark")
    agent.close()
    for way in (host.virsh, host.virsh_direct):
        host.virsh("managedsave", "empty")
        assert PROPERTY in host.virsh_direct("managedsave-dumpxml", "empty")
        host.stop_target()
        try:
            with pytest.raises(VirshError, match="without which it cannot go on"):
                way("start", "empty")
        finally:
            host.start_target()
        assert host.virsh("domstate", "empty") == "shut off"
        way("start", "empty")
        assert has_property(host, "empty")
        agent = host.agent("empty")
        assert agent.run("cat /tmp/mark").strip() == "here", "it has not booted"
        host.virsh("attach-disk", "empty", "/dev/virtlun/p3/empty", "sda", "--live")
        agent.wait_for("[ -e /sys/block/sda/integrity/format ]")
        check_carried(host, agent, "sda", 3, way.__name__)
        host.virsh("detach-disk", "empty", "sda", "--live")
        agent.wait_for("[ ! -e /sys/block/sda ]")
        agent.close()


@pytest.mark.nightly
def test_a_killed_target_is_a_pause_for_who_carries_it(host: Host) -> None:
    """The next one goes on with what the guest and the last one have agreed on."""
    host.stop_target()
    host.target_options = ["--hold-sessions"]
    host.start_target()
    try:
        host.volumes.create("p3/again", 16 * MIB, thin=True)
        host.define("again", vcpus=2)
        host.virsh("start", "again")
        agent = host.agent("again")
        host.virsh("attach-disk", "again", "/dev/virtlun/p3/again", "sda", "--live")
        agent.wait_for("[ -e /sys/block/sda/integrity/format ]")
        restarts(host, VerifiedIo(agent, "sda", seed=35, threads=2, depth=4), agent, "again")
        check_carried(host, agent, "sda", 3, "again")
        agent.close()
    finally:
        host.virsh("destroy", "again", check=False)
        host.stop_target()
        host.target_options = []
        host.start_target()


LOOP = (
    "(while true; do n=$((n+1)); head -c 512 /dev/urandom > /tmp/b;"
    " dd if=/tmp/b of=/dev/sda bs=512 count=1 seek=9 oflag=direct 2>/dev/null; w=$?;"
    " sg_raw -r 520 -o /tmp/r /dev/sda 28 20 00 00 00 09 00 00 01 00 >/dev/null 2>&1;"
    " tag=$(tail -c 4 /tmp/r | hexdump -v -e '1/1 \"%02x\"');"
    ' echo "beat tag=$tag write=$w errors=$(dmesg | grep -c I/O.error)" > /dev/ttyS0;'
    " sleep 0.2; done) > /dev/null 2>&1 &"
)
"""Writes a block, which Linux gives its tuple, and tells the reference tag that it has then."""


@pytest.mark.nightly
def test_a_guest_takes_it_along_to_a_host_that_is_configured_otherwise() -> None:
    """And back. Both have a volume that keeps its tuples itself."""
    ids = [f"c0ffee00-0000-4000-8000-00000000001{n}" for n in (1, 2)]
    uuid, name = "5e1f0000-1111-4222-8333-4444555566aa", "moving"
    with (
        Host(keep=True, host_uuid=ids[0], more_config=ON) as first,
        Host(keep=True, host_uuid=ids[1]) as second,
    ):
        for each in (first, second):
            each.volumes.create("lvs0/moving", 8 * MIB, uuid=uuid, dif_type=3)
        disk = (
            "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/moving'/>"
            "<target dev='sda' bus='scsi'/></disk>"
        )
        first.define(name, devices=disk, emulator=NEWER_QEMU)
        first.virsh("start", name)
        agent = first.agent(name)
        agent.wait_for("[ -b /dev/sda ]")
        agent.run(LOOP)
        agent.close()
        log = first.scratch / f"{name}-console.log"
        beats(log)
        for here, there in ((first, second), (second, first)):
            way = ("--live", "--migrateuri", f"tcp://127.0.0.1:{free_port()}")
            here.virsh("migrate", name, there.uri, *way, deadline_s=240)
            assert has_property(there, name)
            beats(log)


def beats(log: Path) -> None:
    """Checks the guest's next words of its tuples."""
    seen = log.stat().st_size

    def said() -> str:
        return log.read_bytes()[seen:].decode(errors="replace")

    until(lambda: said().count("beat tag=") > 3, lambda: f"the guest's words:\n{said()}")
    whole = re.findall(r"beat tag=(\w*) write=(\d+) errors=(\d+)", said())[1:]
    assert whole and set(whole) == {("00000000", "0", "0")}, said()
