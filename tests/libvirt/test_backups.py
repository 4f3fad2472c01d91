"""Checkpoints and backups by plain virsh of a domain whose disks are ours, with a real guest."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.ports import free_port
from tests.support.wait import listens, until
from tests.support.watcher import Watcher

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "kept"
MIB = 1 << 20
SIZES = {"sda": 32 * MIB, "vdb": 8 * MIB}
"""A LUN and a virtio-blk disk."""
DISKS = "".join(
    f"<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/{dev}'/>"
    f"<target dev='{dev}' bus='{'scsi' if dev.startswith('sd') else 'virtio'}'/></disk>"
    for dev in SIZES
)


@pytest.fixture(scope="module")
def domain(host: Host) -> Iterator[Host]:
    """A running guest with the thin volumes sda and vdb."""
    host.scratch.chmod(0o777)  # QEMU's user makes the files of backups
    for dev, size in SIZES.items():
        host.volumes.create(f"lvs0/{dev}", size, thin=True)
    host.define(NAME, devices=DISKS)
    host.virsh("start", NAME)
    yield host
    host.virsh("destroy", NAME, check=False)


@pytest.fixture(scope="module")
def agent(domain: Host) -> Iterator[Agent]:
    """The guest's shell."""
    agent = domain.agent(NAME)
    agent.wait_for("[ -b /dev/sda ] && [ -b /dev/vda ]")
    write(agent, "sda", at_mib=0, count=8)
    yield agent
    agent.close()


@pytest.fixture(autouse=True)
def _nothing_is_left(domain: Host, agent: Agent) -> Iterator[None]:
    """After each test no job, checkpoint, lvol snapshot, export or note of it is there."""
    yield
    domain.virsh("domjobabort", NAME, check=False)
    names = domain.virsh("checkpoint-list", NAME, "--name").split()
    if names:
        domain.virsh("checkpoint-delete", NAME, names[0], "--children")
    # An abort is answered before the gateway has let go of all that the backup had.
    until(lambda: nothing_is_left(domain), "the rest of the backup is ended")


def nothing_is_left(domain: Host) -> bool:
    return (
        {volume.name for volume in domain.volumes.volumes("lvs0")} == set(SIZES)
        and domain.client.call("virtlun_export_list") == []
        and not list((domain.scratch / "notes").iterdir())
        and not list(domain.scratch.glob("backup-*"))
    )


def in_guest(agent: Agent, dev: str) -> str:
    """Returns the device of a disk in the guest, which numbers them as it finds them."""
    of_size = f"grep -lx {SIZES[dev] // 512} /sys/block/{dev[:2]}*/size"
    return "/dev/" + agent.run(of_size).split("/")[3]


def write(agent: Agent, dev: str, *, at_mib: int, count: int = 1) -> None:
    agent.run(
        f"dd if=/dev/urandom of={in_guest(agent, dev)} bs=1M seek={at_mib} count={count}"
        " oflag=direct",
        120,
    )


def digest(agent: Agent, dev: str) -> str:
    return agent.run(
        f"dd if={in_guest(agent, dev)} bs=1M iflag=direct 2>/dev/null | md5sum", 120
    ).split()[0]


def digest_of(image: str) -> str:
    """Returns the sum of an image's contents; `image` is as qemu-img takes it."""
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as raw:
        run("qemu-img", "convert", "-O", "raw", image, raw.name)
        return run("md5sum", raw.name).split()[0]


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def backup(
    host: Host, disks: str, *words: str, head: str = "", mode: str = "push", checkpoint: str = ""
) -> None:
    """Begins a backup, with a checkpoint of that name if one is given."""
    path = host.scratch / "backup.xml"
    path.write_text(f"<domainbackup mode='{mode}'>{head}<disks>{disks}</disks></domainbackup>")
    more: list[str] = []
    if checkpoint:
        made = host.scratch / "checkpoint.xml"
        made.write_text(f"<domaincheckpoint><name>{checkpoint}</name></domaincheckpoint>")
        more = [str(made)]
    host.virsh("backup-begin", NAME, str(path), *more, *words)


def to_file(dev: str, file: Path, driver: str = "qcow2") -> str:
    return f"<disk name='{dev}' type='file'><driver type='{driver}'/><target file='{file}'/></disk>"


def completed(host: Host) -> dict[str, str]:
    """Waits for the end of a push, and returns what virsh says of it."""

    def look() -> dict[str, str]:
        said = host.virsh("domjobinfo", NAME, "--completed")
        return dict(re.findall(r"^(.+?): +(.*)$", said, re.M)) if "Completed" in said else {}

    return until(look, lambda: host.virsh("domjobinfo", NAME))


def refused(host: Host, *words: str) -> str:
    with pytest.raises(VirshError) as caught:
        host.virsh(*words)
    return str(caught.value)


def test_full_and_what_has_changed_since_make_the_disk_again(domain: Host, agent: Agent) -> None:
    full, one, two = (domain.scratch / name for name in ("full", "one", "two"))
    backup(domain, to_file("sda", full), checkpoint="c1")
    said = completed(domain)
    assert said["Operation"].strip() == "Backup"
    assert digest_of(str(full)) == digest(agent, "sda")
    assert int(run("stat", "-c", "%s", str(full))) < 10 * MIB, "what has nothing takes nothing"
    zeroed = in_guest(agent, "sda")
    agent.run(f"dd if=/dev/zero of={zeroed} bs=1M seek=1 count=1 oflag=direct")
    write(agent, "sda", at_mib=2)
    write(agent, "sda", at_mib=20)
    before = digest(agent, "sda")
    since = "<incremental>c1</incremental>"
    backup(domain, to_file("sda", one), head=since, checkpoint="c2")
    completed(domain)
    assert int(run("stat", "-c", "%s", str(one))) < 4 * MIB
    write(agent, "sda", at_mib=25)
    backup(domain, to_file("sda", two), head="<incremental>c2</incremental>")
    completed(domain)
    for below, file in ((full, one), (one, two)):
        run("qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", str(below), str(file))
    assert digest_of(str(one)) == before
    assert digest_of(str(two)) == digest(agent, "sda") != before
    assert domain.virsh("checkpoint-list", NAME, "--name").split() == ["c1", "c2"]
    assert domain.virsh("checkpoint-parent", NAME, "c2").strip() == "c1"


def digest_of_volume(host: Host, volume: str) -> str:
    """Returns the sum of all that a volume or a snapshot holds."""
    uuid = host.volumes.volume(volume).uuid
    path = host.volumes.export(uuid, read_only=True)
    try:
        return run(*host.libvirtd.command("md5sum", str(path))).split()[0]
    finally:
        host.volumes.end_export(uuid)


@pytest.mark.nightly
def test_a_backup_is_restored_to_a_new_volume(domain: Host, agent: Agent) -> None:
    full, since, flat = (domain.scratch / f"restored.{name}" for name in ("1", "2", "flat"))
    backup(domain, to_file("sda", full), checkpoint="c1")
    completed(domain)
    agent.run(f"dd if=/dev/zero of={in_guest(agent, 'sda')} bs=1M seek=5 count=1 oflag=direct")
    write(agent, "sda", at_mib=6)
    write(agent, "sda", at_mib=30)
    before = digest(agent, "sda")
    backup(domain, to_file("sda", since), head="<incremental>c1</incremental>", checkpoint="c2")
    write(agent, "sda", at_mib=6)  # after the instant, be it copied or not
    write(agent, "sda", at_mib=28)
    completed(domain)
    run("qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", str(full), str(since))
    run("qemu-img", "convert", "-O", "qcow2", str(since), str(flat))
    # Where exports are seen.
    command = [domain.program("virtlun"), "--socket", str(domain.paths.rpc_socket), "volume"]
    words = ["import", str(flat), "lvs0/restored", "--thin", "--verify"]
    run(*domain.libvirtd.command(*command, *words))
    try:
        assert digest_of_volume(domain, "lvs0/restored") == before
        assert digest_of_volume(domain, "lvs0/sda@checkpoint-c2") == before
        assert before not in (digest_of(str(full)), digest(agent, "sda"))
    finally:
        domain.volumes.delete("lvs0/restored")


def nbd(socket: Path, export: str, bitmap: str = "") -> str:
    """Returns what qemu-img calls an NBD export, of which a bitmap may be looked at."""
    where = f"driver=nbd,export={export},server.type=unix,server.path={socket}"
    return where + (f",x-dirty-bitmap=qemu:dirty-bitmap:{bitmap}" if bitmap else "")


def dirty(socket: Path, export: str, bitmap: str) -> list[tuple[int, int]]:
    """Returns what a dirty bitmap of an NBD export tells, in bytes: (offset, length)."""
    said = run("qemu-img", "map", "--output=json", "--image-opts", nbd(socket, export, bitmap))
    return [(each["start"], each["length"]) for each in json.loads(said) if not each["data"]]


def test_a_pull_serves_what_all_disks_had_at_one_instant(domain: Host, agent: Agent) -> None:
    socket = domain.scratch / "pull.sock"
    server = f"<server transport='unix' socket='{socket}'/>"
    domain.virsh("checkpoint-create-as", NAME, "c1", "before", "--diskspec", "sda")
    write(agent, "sda", at_mib=4, count=2)
    write(agent, "vdb", at_mib=0)
    sums = {dev: digest(agent, dev) for dev in SIZES}
    disks = (
        "<disk name='sda' backupmode='incremental' incremental='c1' exportbitmap='changed'/>"
        "<disk name='vdb' exportname='second'/>"
    )
    backup(domain, disks, mode="pull", head=server, checkpoint="c2")
    shown = domain.virsh("backup-dumpxml", NAME)
    assert f"<server transport='unix' socket='{socket}'/>" in shown
    assert "exportname='sda' exportbitmap='changed'" in shown and "exportname='second'" in shown
    for dev in SIZES:
        write(agent, dev, at_mib=1)
    assert dirty(socket, "sda", "changed") == [(4 * MIB, 2 * MIB)]
    for dev, export in (("sda", "sda"), ("vdb", "second")):
        copy = domain.scratch / f"{dev}.pulled"
        where = nbd(socket, export)
        run("qemu-img", "convert", "-O", "raw", "--image-opts", where, str(copy))
        assert run("md5sum", str(copy)).split()[0] == sums[dev]
    assert "already running" in refused(
        domain, "backup-begin", NAME, str(domain.scratch / "backup.xml")
    )
    assert "a backup reads" in refused(domain, "checkpoint-delete", NAME, "c2")
    assert "Operation:        Backup" in domain.virsh("domjobinfo", NAME)
    domain.virsh("domjobabort", NAME)
    assert not socket.exists()
    said = refused(domain, "backup-dumpxml", NAME)
    assert "no domain backup job present" in said
    assert "Cancelled" in domain.virsh("domjobinfo", NAME, "--completed")


@pytest.mark.nightly
def test_the_dirty_parts_of_a_pull_make_the_disk_of_a_full_copy(domain: Host, agent: Agent) -> None:
    socket = domain.scratch / "parts.sock"
    server = f"<server transport='unix' socket='{socket}'/>"
    copy = domain.scratch / "parts.raw"
    backup(domain, "<disk name='sda'/>", mode="pull", head=server, checkpoint="c1")
    run("qemu-img", "convert", "-O", "raw", "--image-opts", nbd(socket, "sda"), str(copy))
    domain.virsh("domjobabort", NAME)
    full = run("md5sum", str(copy)).split()[0]
    agent.run(f"dd if=/dev/zero of={in_guest(agent, 'sda')} bs=1M seek=3 count=1 oflag=direct")
    for at_mib in (7, 18, 31):
        write(agent, "sda", at_mib=at_mib)
    before = digest(agent, "sda")
    changed = "<disk name='sda' backupmode='incremental' incremental='c1' exportbitmap='changed'/>"
    backup(domain, changed, mode="pull", head=server, checkpoint="c2")
    write(agent, "sda", at_mib=18)
    write(agent, "sda", at_mib=24)
    parts = dirty(socket, "sda", "changed")
    assert parts == [(at_mib * MIB, MIB) for at_mib in (3, 7, 18, 31)]
    for offset, length in parts:
        part = f"driver=raw,offset={offset},size={length},file."
        source = part + nbd(socket, "sda").replace(",", ",file.")  # NBD below "raw"
        target = part + f"driver=file,file.filename={copy}"
        words = ["convert", "-n", "--image-opts", "--target-image-opts", source, target]
        run("qemu-img", *words)
    domain.virsh("domjobabort", NAME)
    assert run("md5sum", str(copy)).split()[0] == before
    assert digest_of_volume(domain, "lvs0/sda@checkpoint-c2") == before
    assert before not in (full, digest(agent, "sda"))


def test_a_pull_over_tcp(domain: Host, agent: Agent) -> None:
    port = free_port()
    server = f"<server name='127.0.0.1' port='{port}'/>"
    backup(domain, "<disk name='vdb'/>", mode="pull", head=server)
    copy = domain.scratch / "tcp.pulled"
    run("qemu-img", "convert", "-O", "raw", f"nbd://127.0.0.1:{port}/vdb", str(copy))
    assert run("md5sum", str(copy)).split()[0] == digest(agent, "vdb")
    domain.virsh("domjobabort", NAME)


def test_a_push_that_is_ended_leaves_nothing(domain: Host, agent: Agent) -> None:
    file = domain.scratch / "ended"
    # A file system in memory that is too small: the copy fails.
    full = domain.scratch / "full-fs"
    full.mkdir()
    run(*domain.libvirtd.command("mount", "-t", "tmpfs", "-o", "size=1m,mode=777", "t", str(full)))
    try:
        backup(domain, to_file("sda", full / "f", "raw"))
        until(lambda: "Failed" in domain.virsh("domjobinfo", NAME, "--completed", check=False))
        assert run(*domain.libvirtd.command("ls", str(full))) == ""
    finally:
        run(*domain.libvirtd.command("umount", "--lazy", str(full)))
    file.write_text("somebody's")
    path = domain.scratch / "backup.xml"
    path.write_text(f"<domainbackup><disks>{to_file('sda', file)}</disks></domainbackup>")
    assert f"store '{file}' for the backup exists" in refused(
        domain, "backup-begin", NAME, str(path)
    )
    assert file.read_text() == "somebody's"


def test_events_tell_of_the_end(domain: Host, agent: Agent) -> None:
    watcher = Watcher(domain.uri, domain.scratch / "events")
    try:
        until(lambda: watcher.hears(domain, NAME), "virsh listens")
        backup(domain, to_file("vdb", domain.scratch / "told"))
        watcher.line(f"event 'job-completed' for domain '{NAME}'")
        for told in ("success: 1", "operation: 9"):
            until(lambda told=told: told in watcher.text, lambda: watcher.text)  # type: ignore[misc]
    finally:
        watcher.close()


CHECKPOINTS = """\
<domaincheckpoint>
  <name>b</name>
  <description>of both</description>
  <parent>
    <name>a</name>
  </parent>
  <creationTime>0</creationTime>
  <disks>
    <disk name='sda' checkpoint='bitmap' bitmap='b'/>
    <disk name='vdb' checkpoint='bitmap' bitmap='b'/>
  </disks>
</domaincheckpoint>"""


def test_checkpoints_are_listed_shown_and_deleted(domain: Host, agent: Agent) -> None:
    domain.virsh("checkpoint-create-as", NAME, "a", "--diskspec", "sda")
    domain.virsh("checkpoint-create-as", NAME, "b", "of both")
    domain.virsh("checkpoint-create-as", NAME, "c")
    assert "already exists" in refused(domain, "checkpoint-create-as", NAME, "a")
    shown = domain.virsh("checkpoint-dumpxml", NAME, "b").strip()
    assert re.sub("<creationTime>[0-9]+<", "<creationTime>0<", shown) == CHECKPOINTS
    write(agent, "sda", at_mib=3)
    sizes = domain.virsh("checkpoint-dumpxml", NAME, "c", "--size")
    assert f"<disk name='sda' checkpoint='bitmap' bitmap='c' size='{MIB}'/>" in sizes

    def listed(*words: str) -> list[str]:
        return domain.virsh("checkpoint-list", NAME, "--name", *words).split()

    assert listed() == ["a", "b", "c"]
    assert listed("--roots") == ["a"]
    assert listed("--leaves") == ["c"]
    assert listed("--no-leaves") == ["a", "b"]
    assert listed("--from", "a") == ["b"]
    assert listed("--from", "a", "--descendants") == ["b", "c"]
    assert "has no parent" in refused(domain, "checkpoint-parent", NAME, "a")
    assert domain.virsh("checkpoint-info", NAME, "b").split("\n")[0].split() == ["Name:", "b"]
    domain.virsh("checkpoint-delete", NAME, "b")
    assert listed() == ["a", "c"]
    assert domain.virsh("checkpoint-parent", NAME, "c").strip() == "a"
    again = domain.scratch / "c.xml"
    again.write_text(domain.virsh("checkpoint-dumpxml", NAME, "c"))
    domain.virsh("checkpoint-delete", NAME, "c", "--metadata")
    assert listed() == ["a"]
    assert "lvs0/sda@checkpoint-c" in {v.path for v in domain.volumes.volumes("lvs0")}
    domain.virsh("checkpoint-create", NAME, str(again), "--redefine")
    assert listed() == ["a", "c"]
    assert domain.virsh("checkpoint-dumpxml", NAME, "c").strip() == again.read_text().strip()
    again.write_text(re.sub("<creationTime>[0-9]+<", "<creationTime>1<", again.read_text()))
    domain.virsh("checkpoint-delete", NAME, "c", "--metadata")
    domain.virsh("checkpoint-create", NAME, str(again), "--redefine")
    assert domain.virsh("checkpoint-parent", NAME, "c").strip() == "a"
    domain.virsh("checkpoint-delete", NAME, "a", "--children-only")
    assert listed() == ["a"]
    assert "not found" in refused(domain, "checkpoint-dumpxml", NAME, "c")


@pytest.mark.parametrize(
    ("disk", "head", "sentence"),
    [
        ("<disk name='sda'/>", "", "refusing to generate file name for disk 'sda'"),
        ("<disk name='sdz'/>", "", "no disk named 'sdz'"),
        ("<disk name='sda'><target file='b'/></disk>", "", "b must be an absolute path"),
        (to_file("sda", Path("/var/tmp/x"), "raw"), "<incremental>c</incremental>", "take qcow2"),
        (to_file("sda", Path("/var/tmp/x")), "<incremental>c</incremental>", "'c' for incremental"),
        (to_file("sda", Path("/var/tmp/x"), "vmdk"), "", "has the format qcow2 or raw, not vmdk"),
        (to_file("sda", Path("/root/x")), "", "user libvirt-qemu must be able to make"),
        ("", "<server name='h' port='1'/>", "requires pull mode"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    domain: Host, disk: str, head: str, sentence: str
) -> None:
    path = domain.scratch / "refused.xml"
    path.write_text(f"<domainbackup>{head}<disks>{disk}</disks></domainbackup>")
    assert sentence in refused(domain, "backup-begin", NAME, str(path))
    assert "None" in domain.virsh("domjobinfo", NAME)


def test_what_a_killed_gateway_left_is_taken_back(domain: Host, agent: Agent) -> None:
    socket = domain.scratch / "killed.sock"
    backup(
        domain,
        "<disk name='sda'/>",
        mode="pull",
        head=f"<server transport='unix' socket='{socket}'/>",
        checkpoint="kept",
    )
    assert [each.name for each in domain.volumes.volumes("lvs0")] != list(SIZES)
    domain.stop_gateway(signal.SIGKILL)
    domain.start_gateway()
    until(lambda: not list((domain.scratch / "notes").iterdir()), "the journal")
    assert domain.virsh("checkpoint-list", NAME, "--name").split() == ["kept"]
    assert "None" in domain.virsh("domjobinfo", NAME)
    assert domain.client.call("virtlun_export_list") == []
    file = domain.scratch / "after"
    backup(domain, to_file("sda", file), head="<incremental>kept</incremental>")
    completed(domain)


def test_a_backup_ends_with_its_domain(domain: Host, agent: Agent) -> None:
    domain.volumes.create("lvs0/gone", MIB, thin=True)
    disk = (
        "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/gone'/>"
        "<target dev='sda' bus='scsi'/></disk>"
    )
    domain.define("gone", devices=disk)
    path = domain.scratch / "gone-backup.xml"
    socket = domain.scratch / "gone.sock"
    path.write_text(
        f"<domainbackup mode='pull'><server transport='unix' socket='{socket}'/></domainbackup>"
    )
    domain.virsh("backup-begin", "gone", str(path))
    assert listens(socket)
    domain.virsh("undefine", "gone")
    until(lambda: not list((domain.scratch / "notes").iterdir()), "the journal")
    assert not socket.exists()
    domain.volumes.delete("lvs0/gone")
