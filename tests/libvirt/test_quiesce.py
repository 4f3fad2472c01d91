"""Quiesced snapshots with QEMU's own guest agent, in a guest that writes all the time.

A file system that was frozen has nothing in its journal, so that a clone mounts without replay.
However the snapshot ends, the guest writes on.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.guest.agent_image import build_with_agent
from tests.support.agent import Agent
from tests.support.domain import publish
from tests.support.guest_agent import CHANNEL, freeze_status, start_agent
from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU, VirshError
from tests.support.relay import Step
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm, pytest.mark.timeout(900)]

NAME = "quiet"
MIB = 1 << 20
SIZES = {"ext4": 320 * MIB, "xfs": 328 * MIB}
DEADLINE_S = 180.0
TAKE = "virtlun_lvol_snapshot_together"
DISKS = "".join(
    f"<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/{name}'/>"
    f"<target dev='{dev}' bus='scsi'/></disk>"
    for name, dev in (("ext4", "sda"), ("xfs", "sdb"))
)
WRITER = (
    "(i=0; while :; do i=$((i+1)); f=/run/{0}/file-$((i%50)); echo $i >$f.new; mv $f.new $f;"
    " sync $f; echo $i >/tmp/next-{0}; mv /tmp/next-{0} /tmp/{0};"
    " usleep 20000; done) >/dev/null 2>&1 &"
    " echo $! >/tmp/writer-{0}"
)
"""Makes, renames and flushes files all the time, and says in /tmp how many it has made."""


@pytest.fixture(scope="module")
def guest(host: Host) -> Iterator[Agent]:
    """A guest with the agent, that writes to an ext4 and an XFS all the time."""
    host.image = publish(build_with_agent(), host.scratch)
    for name, size in SIZES.items():
        host.volumes.create(f"lvs0/{name}", size, thin=True)
    host.define(NAME, devices=DISKS + CHANNEL, emulator=NEWER_QEMU, memory_mib=384)
    host.virsh("start", NAME)
    agent = host.agent(NAME)
    agent.wait_for("[ -b /dev/sda ] && [ -b /dev/sdb ]")
    agent.run("insmod /modules/libcrc32c.ko && insmod /modules/xfs.ko")
    agent.run("mkdir /run/clone")
    for name, size in SIZES.items():
        # The guest numbers disks as it finds them.
        disk = agent.run(f"grep -lx {size // 512} /sys/block/sd*/size").split("/")[3]
        agent.run(f"mkfs.{name} -q /dev/{disk} && mkdir /run/{name}", 240)
        agent.run(f"mount /dev/{disk} /run/{name}", 120)
        agent.run(WRITER.format(name))
    start_agent(host, NAME, agent)
    yield agent
    agent.close()
    host.virsh("destroy", NAME)


@pytest.fixture(autouse=True)
def writes_on(host: Host, guest: Agent) -> Iterator[None]:
    """After each test nothing is frozen, nothing under way, and both writers go on."""
    yield
    until(
        lambda: host.has_gateway and not list((host.scratch / "notes").glob("*")),
        "the journal is empty",
        DEADLINE_S,
    )
    assert freeze_status(host, NAME) == "thawed"
    before = made(guest)
    until(
        lambda: all(now > then + 2 for now, then in zip(made(guest), before, strict=True)),
        "both write",
        DEADLINE_S,
    )
    assert host.virsh("domstate", NAME) == "running"


def made(guest: Agent) -> tuple[int, int]:
    """Returns how many files each writer has made."""
    ext4, xfs = guest.wait_for("cat /tmp/ext4 /tmp/xfs", DEADLINE_S).split()
    return int(ext4), int(xfs)


def snapshot(host: Host, name: str, *, check: bool = True) -> str:
    return host.virsh(
        *("snapshot-create-as", NAME, name, "--disk-only", "--quiesce"),
        deadline_s=DEADLINE_S,
        check=check,
    )


def snapshots(host: Host) -> list[str]:
    """Returns what libvirtd lists, which is what the target has."""
    names = host.virsh("snapshot-list", NAME, "--name").split()
    found = {v.name for v in host.volumes.volumes("lvs0") if v.snapshot and "@check" not in v.name}
    assert found == {f"{volume}@{name}" for volume in ("ext4", "xfs") for name in names}
    return names


@contextmanager
def cloned(host: Host, guest: Agent, of: str) -> Iterator[None]:
    """A clone of a snapshot is the guest's sdc, for the length of a block."""
    volume = f"clone-{of.replace('@', '-')}"
    host.volumes.clone(f"lvs0/{of}", volume)
    host.virsh("attach-disk", NAME, f"/dev/virtlun/lvs0/{volume}", "sdc", "--live")
    guest.wait_for("[ -b /dev/sdc ]")
    guest.run("dmesg -c >/dev/null")
    try:
        yield
    finally:
        guest.run("umount /run/clone", check=False)
        host.virsh("detach-disk", NAME, "sdc", "--live")
        guest.wait_for("[ ! -e /dev/sdc ]")
        host.volumes.delete(f"lvs0/{volume}")


def last_file(guest: Agent, options: str) -> int:
    """Mounts sdc; returns the number of the last file in it, each of which is whole."""
    guest.run(f"mount -o {options} /dev/sdc /run/clone", 120)
    numbers = [int(word) for word in guest.run("cat /run/clone/file-*[0-9]").split()]
    guest.run("umount /run/clone")
    assert sorted(numbers) == list(range(max(numbers) - len(numbers) + 1, max(numbers) + 1))
    return max(numbers)


@pytest.mark.nightly
def test_a_clone_of_a_quiesced_snapshot_mounts_without_replay(host: Host, guest: Agent) -> None:
    until(lambda: min(made(guest)) > 60, "all files are there", DEADLINE_S)
    host.virsh("snapshot-create-as", NAME, "running", "--disk-only")
    before = made(guest)
    snapshot(host, "still")
    with cloned(host, guest, "ext4@running"):
        assert "needs_recovery" in guest.run("dumpe2fs -h /dev/sdc")
        guest.run("mount /dev/sdc /run/clone && umount /run/clone", 120)
        assert "recovery complete" in guest.run("dmesg")
    with cloned(host, guest, "ext4@still"):
        shown = guest.run("dumpe2fs -h /dev/sdc")
        assert "needs_recovery" not in shown
        assert re.search(r"Filesystem state: +clean", shown)
        assert last_file(guest, "rw") >= before[0]
        said = guest.run("dmesg")
        assert "mounted filesystem" in said and "recovery" not in said
    # XFS has a frozen log hold copies of its superblock alone, and says of that, too, that it
    # recovers it.
    with cloned(host, guest, "xfs@still"):
        log = guest.run("xfs_logprint -t /dev/sdc")
        assert "SUPER Block" in log and "INODE" not in log and "INO:" not in log, log
        assert last_file(guest, "ro,norecovery,nouuid") >= before[1]
        last_file(guest, "rw,nouuid")
    with cloned(host, guest, "xfs@running"):
        assert "INO:" in guest.run("xfs_logprint -t /dev/sdc")
    for name in ("running", "still"):
        host.virsh("snapshot-delete", NAME, name)
    assert snapshots(host) == []


def header(file: Path) -> str:
    """Returns what the superblock of an ext4 in a file of the host says."""
    words = ["dumpe2fs", "-h", str(file)]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def backed_up(host: Host, file: Path) -> Path:
    """Returns the ext4's backup, a raw file."""
    description = host.scratch / "backup.xml"
    description.write_text(
        "<domainbackup><disks><disk name='sdb' backup='no'/><disk name='sda' type='file'>"
        f"<driver type='raw'/><target file='{file}'/></disk></disks></domainbackup>"
    )
    host.virsh("backup-begin", NAME, str(description))
    until(lambda: "Backup" in host.virsh("domjobinfo", NAME, "--completed"), "its end", DEADLINE_S)
    return file


@pytest.mark.nightly
def test_a_backup_of_what_was_frozen(host: Host, guest: Agent) -> None:
    host.scratch.chmod(0o777)  # QEMU's user writes there
    assert "needs_recovery" in header(backed_up(host, host.scratch / "running.raw"))
    host.virsh("domfsfreeze", NAME)
    assert freeze_status(host, NAME) == "frozen"
    before = made(guest)
    shown = header(backed_up(host, host.scratch / "frozen.raw"))
    assert made(guest) == before
    host.virsh("domfsthaw", NAME)
    assert "needs_recovery" not in shown


@pytest.mark.nightly
def test_a_quiesced_checkpoint(host: Host, guest: Agent) -> None:
    host.virsh("checkpoint-create-as", NAME, "c", "--quiesce")
    assert freeze_status(host, NAME) == "thawed"
    with cloned(host, guest, "ext4@checkpoint-c"):
        assert "needs_recovery" not in guest.run("dumpe2fs -h /dev/sdc")
    host.virsh("checkpoint-delete", NAME, "c")


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["unanswered", "before", "answered"])
def test_a_gateway_killed_while_all_is_frozen(host: Host, guest: Agent, when: str) -> None:
    with host.relayed() as relay:
        relay.end_at(step(when), lambda: host.stop_gateway(signal.SIGKILL))
        snapshot(host, "killed", check=False)
        assert relay.hit() and freeze_status(host, NAME) == "frozen"
        host.start_gateway()
        until(lambda: freeze_status(host, NAME) == "thawed", "it is thawed", DEADLINE_S)
    until(lambda: not list((host.scratch / "notes").glob("*")), "the journal is empty", DEADLINE_S)
    assert snapshots(host) == []


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["before", "answered"])
def test_a_target_killed_while_all_is_frozen(host: Host, guest: Agent, when: str) -> None:
    with host.relayed() as relay:
        relay.end_at(step(when))
        with pytest.raises(VirshError):
            snapshot(host, "killed")
        assert relay.hit()
        host.start_target()
        until(lambda: freeze_status(host, NAME) == "thawed", "it is thawed", DEADLINE_S)
    until(lambda: not list((host.scratch / "notes").glob("*")), "the journal is empty", DEADLINE_S)
    for name in snapshots(host):  # taken before the target died, and known to libvirtd
        host.virsh("snapshot-delete", NAME, name)


def step(when: str) -> Step:
    """Returns a moment at which the target takes the lvol snapshots."""
    return {
        "before": Step("before", TAKE),
        "unanswered": Step("unanswered", TAKE),
        "answered": Step("answered", TAKE),
    }[when]


def agent_process(guest: Agent) -> int:
    return int(guest.run("pidof qemu-ga"))


@pytest.mark.nightly
def test_an_agent_that_dies_while_all_is_frozen(host: Host, guest: Agent) -> None:
    """As under an init that starts it again: it knows by its state that all is frozen."""

    def kill() -> None:
        guest.run(f"kill -9 {agent_process(guest)}")

    with host.relayed() as relay:
        relay.end_at(step("before"), kill)
        with pytest.raises(VirshError, match="'quiet' are not thawed yet, which is tried again"):
            snapshot(host, "dies")
        assert relay.hit()
        assert snapshots(host) == ["dies"]
        before = made(guest)
        start_agent(host, NAME, guest)
        until(lambda: made(guest) > before, "it is thawed", DEADLINE_S)
    host.virsh("snapshot-delete", NAME, "dies")


@pytest.mark.nightly
def test_without_its_agent_nothing_is_done(host: Host, guest: Agent) -> None:
    guest.run(f"kill -9 {agent_process(guest)}")
    until(
        lambda: "not connected" in host.virsh("domfsfreeze", NAME, check=False),
        "it is disconnected",
    )
    with pytest.raises(VirshError, match="QEMU guest agent is not connected"):
        snapshot(host, "without")
    assert not list((host.scratch / "notes").glob("*")), "nothing was frozen, nothing is to thaw"
    assert snapshots(host) == []
    start_agent(host, NAME, guest)


@pytest.mark.nightly
def test_a_freeze_that_finds_no_room_is_refused_and_thawed_when_there_is(
    host: Host, guest: Agent
) -> None:
    # Nothing else takes of the little room, and nothing writes to the disk before it has to.
    guest.run("kill -STOP $(cat /tmp/writer-ext4 /tmp/writer-xfs) && sync")
    settings = "dirty_ratio=90 dirty_background_ratio=80 dirty_writeback_centisecs=0"
    for name, value in (each.split("=") for each in settings.split()):
        guest.run(f"echo {value} >/proc/sys/vm/{name}")
    host.volumes.create("lvs0/filler", host.volumes.lvstore("lvs0").free - 4 * MIB)
    # It is in the guest's memory, until the file system is frozen.
    guest.run("dd if=/dev/urandom of=/run/ext4/big bs=1M count=32 2>/dev/null", 120)
    with pytest.raises(
        VirshError, match="'quiet' is paused because of I/O errors, so its file sys"
    ):
        snapshot(host, "full")
    assert host.virsh("domstate", NAME, "--reason") == "paused (I/O error)"
    host.volumes.delete("lvs0/filler")
    until(lambda: host.virsh("domstate", NAME) == "running", "it is resumed")
    guest.run("kill -CONT $(cat /tmp/writer-ext4 /tmp/writer-xfs)", 120)
    assert snapshots(host) == []
