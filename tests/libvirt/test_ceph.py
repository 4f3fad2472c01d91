"""The main job on a pool of a real Ceph: real libvirtd, virsh, QEMU and guest."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent import Agent
from tests.support.ceph import POOL, Ceph, cluster, lacks
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.wait import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.vm,
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.timeout(300),
]

NAME = "ceph-vm"
MIB = 1 << 20
SIZE = "/sys/block/sda/size"


@pytest.fixture(scope="module")
def ceph() -> Iterator[Ceph]:
    """A cluster."""
    with cluster() as made:
        yield made


@pytest.fixture(scope="module")
def host(ceph: Ceph) -> Iterator[Host]:
    """A host whose target has the pool as `ceph0`."""
    with Host(keep=True, target_options=["--rbd"]) as made:
        made.volumes.add_pool("ceph0", POOL, conf=ceph.conf)
        yield made


@pytest.fixture
def guest(host: Host) -> Iterator[Agent]:
    """A running guest."""
    host.define(NAME)
    host.virsh("start", NAME)
    agent = host.agent(NAME)
    yield agent
    agent.close()
    host.virsh("destroy", NAME)
    host.virsh("undefine", NAME)


@pytest.mark.nightly
def test_a_disk_of_a_pool_is_attached_written_grown_and_detached(
    host: Host, guest: Agent, ceph: Ceph
) -> None:
    def locks() -> int:
        return len(json.loads(ceph.rbd("lock", "ls", "--format", "json", f"{POOL}/data")))

    host.volumes.create("ceph0/data", 32 * MIB)
    host.virsh("attach-disk", NAME, "/dev/virtlun/ceph0/data", "sdb", "--live", "--config")
    guest.wait_for(f"[ $(cat {SIZE}) = {32 * MIB // 512} ]")
    assert locks() == 1
    guest.run("echo written by the guest > /dev/sda && sync")
    # By Ceph's own command, on any host.
    ceph.rbd("resize", "--no-progress", "--size", "48M", f"{POOL}/data")
    guest.wait_for(f"[ $(cat {SIZE}) = {48 * MIB // 512} ]")
    host.virsh("blockresize", NAME, "sdb", "64M")
    guest.wait_for(f"[ $(cat {SIZE}) = {64 * MIB // 512} ]")
    assert "/dev/virtlun/ceph0/data" in host.virsh("domblklist", NAME)
    shown = host.virsh("domstats", NAME, "--block")
    for field, seen in (
        ("request_alignment", "logical_block_size"),
        ("discard_alignment", "discard_granularity"),
        ("transfer_optimal", "optimal_io_size"),
    ):
        value = guest.run(f"cat /sys/block/sda/queue/{seen}").strip()
        assert f".limits.{field}={value}\n" in f"{shown}\n"
    assert f".limits.transfer_optimal={4 * MIB}" in shown
    host.volumes.snapshot(["ceph0/data"], "then")
    guest.run("echo written afterwards > /dev/sda && sync")
    host.virsh("detach-disk", NAME, "sdb", "--live", "--config")
    guest.wait_for("[ ! -e /sys/block/sda ]")
    assert locks() == 0
    assert ceph.content("data").startswith(b"written afterwards")
    assert ceph.content("data@then").startswith(b"written by the guest")
    # Another disk of the snapshot, as it was.
    host.volumes.clone("ceph0/data@then", "copy")
    host.virsh("attach-disk", NAME, "/dev/virtlun/ceph0/copy", "sdc", "--live", "--config")
    guest.wait_for("[ -b /dev/sda ]")
    assert guest.run("head -n 1 /dev/sda") == "written by the guest\n"
    host.virsh("detach-disk", NAME, "sdc", "--live", "--config")


@pytest.mark.nightly
def test_a_pool_of_ceph_is_a_pool_of_libvirts(host: Host, ceph: Ceph) -> None:
    pool, data, back = "virtlun-ceph0", host.scratch / "up", host.scratch / "down"
    host.virsh("vol-create-as", pool, "v", "16M", "--allocation", "0")
    assert "/dev/virtlun/ceph0/v" in host.virsh("vol-list", pool)
    data.write_bytes(b"c" * MIB + b"rest")
    host.virsh("vol-upload", "v", str(data), "--pool", pool)
    assert ceph.content("v").startswith(data.read_bytes())
    host.virsh("vol-clone", "v", "w", "--pool", pool)
    host.virsh("vol-resize", "v", "32M", "--pool", pool)
    host.virsh("vol-wipe", "v", "--pool", pool)
    for name, content in (("v", bytes(MIB)), ("w", b"c" * MIB)):
        host.virsh("vol-download", name, str(back), "--pool", pool, "--length", str(MIB))
        assert back.read_bytes() == content
    with pytest.raises(VirshError, match="has snapshots, or deleted ones whose clones are left"):
        host.virsh("vol-delete", "v", "--pool", pool)
    host.virsh("vol-delete", "w", "--pool", pool)
    host.virsh("vol-delete", "v", "--pool", pool)
    assert host.virsh("vol-list", pool).strip() == ""


@pytest.mark.nightly
def test_a_snapshot_by_virsh_is_one_of_the_image(host: Host, guest: Agent, ceph: Ceph) -> None:
    host.volumes.create("ceph0/kept", 16 * MIB)
    host.virsh("attach-disk", NAME, "/dev/virtlun/ceph0/kept", "sdb", "--live", "--config")
    guest.wait_for("[ -b /dev/sda ]")
    guest.run("echo first > /dev/sda && sync")
    host.virsh("snapshot-create-as", NAME, "first", "--disk-only")
    guest.run("echo second > /dev/sda && sync")
    (taken,) = json.loads(ceph.rbd("snap", "ls", "--format", "json", f"{POOL}/kept"))
    assert ceph.content(f"kept@{taken['name']}").startswith(b"first")
    assert guest.run("head -n 1 /dev/sda") == "second\n"
    assert "first" in host.virsh("snapshot-list", NAME)
    host.virsh("snapshot-delete", NAME, "first")
    assert json.loads(ceph.rbd("snap", "ls", "--format", "json", f"{POOL}/kept")) == []
    assert guest.run("head -n 1 /dev/sda") == "second\n"
    host.virsh("detach-disk", NAME, "sdb", "--live", "--config")


def raw(path: Path) -> bytes:
    """Returns what an image file holds."""
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        subprocess.run(["qemu-img", "convert", "-O", "raw", path, file.name], check=True)
        return Path(file.name).read_bytes()


def backup(host: Host, file: Path, checkpoint: str, since: str = "") -> None:
    """Makes a file of the disk sdb, with a checkpoint of the same instant."""
    disk = f"<disk name='sdb' type='file'><driver type='qcow2'/><target file='{file}'/></disk>"
    head = f"<incremental>{since}</incremental>" if since else ""
    path, made = host.scratch / "backup.xml", host.scratch / "checkpoint.xml"
    path.write_text(f"<domainbackup>{head}<disks>{disk}</disks></domainbackup>")
    made.write_text(f"<domaincheckpoint><name>{checkpoint}</name></domaincheckpoint>")
    host.virsh("backup-begin", NAME, str(path), str(made))
    until(
        lambda: "Completed" in host.virsh("domjobinfo", NAME, "--completed"),
        "the end of the backup",
    )


@pytest.mark.nightly
def test_a_backup_has_what_changed_in_an_image(host: Host, guest: Agent, ceph: Ceph) -> None:
    host.scratch.chmod(0o777)  # QEMU's user makes the files
    host.volumes.create("ceph0/backed", 16 * MIB)
    host.virsh("attach-disk", NAME, "/dev/virtlun/ceph0/backed", "sdb", "--live", "--config")
    guest.wait_for("[ -b /dev/sda ]")
    guest.run("echo first > /dev/sda && sync")
    full, since = host.scratch / "full", host.scratch / "since"
    backup(host, full, "c1")
    assert raw(full).startswith(b"first\n")
    guest.run("echo second | dd of=/dev/sda bs=1M seek=9 conv=notrunc && sync")
    backup(host, since, "c2", since="c1")
    told = subprocess.run(
        ["qemu-img", "map", "--output=json", since], check=True, capture_output=True
    )
    parts = [each for each in json.loads(told.stdout) if each["present"]]
    # The object that has changed, whole.
    assert sum(each["length"] for each in parts) == 4 * MIB
    assert {each["start"] // (4 * MIB) for each in parts} == {2}
    rebase = ["qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b"]
    subprocess.run([*rebase, full, since], check=True)
    assert raw(since) == ceph.content("backed@checkpoint-c2")
    host.virsh("checkpoint-delete", NAME, "c1", "--children")
    assert json.loads(ceph.rbd("snap", "ls", "--format", "json", f"{POOL}/backed")) == []
    host.virsh("detach-disk", NAME, "sdb", "--live", "--config")
