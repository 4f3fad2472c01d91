"""A domain on images of a real Ceph and a volume: one instant, the way back, and backups."""

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
    pytest.mark.nightly(reason="by day tests/target/test_rbd_together.py, without a guest"),
]

NAME = "together"
MIB = 1 << 20
VOLUMES = {"sda": "ceph0/data", "sdb": "ceph0/log", "sdc": "lvs0/own"}
SIZES = {"sda": 16 * MIB, "sdb": 20 * MIB, "sdc": 24 * MIB}
"""By which the guest's disks are told, as it numbers them as it finds them."""
DISKS = "".join(
    f"<disk type='file' device='disk'><source file='/dev/virtlun/{volume}'/>"
    f"<target dev='{dev}' bus='scsi'/></disk>"
    for dev, volume in VOLUMES.items()
)


@pytest.fixture(scope="module")
def ceph() -> Iterator[Ceph]:
    """A cluster."""
    with cluster() as made:
        yield made


@pytest.fixture(scope="module")
def host(ceph: Ceph) -> Iterator[Host]:
    """A host whose target has the pool as `ceph0`, with a running domain on it."""
    with Host(keep=True, target_options=["--rbd"]) as made:
        made.scratch.chmod(0o777)  # QEMU's user makes the files of backups
        made.volumes.add_pool("ceph0", POOL, conf=ceph.conf)
        for dev, volume in VOLUMES.items():
            made.volumes.create(volume, SIZES[dev], thin=True)
        made.define(NAME, devices=DISKS)
        made.virsh("start", NAME)
        yield made
        made.virsh("destroy", NAME, check=False)


@pytest.fixture(scope="module")
def agent(host: Host) -> Iterator[Agent]:
    """The guest's shell."""
    made = host.agent(NAME)
    made.wait_for("[ -b /dev/sda ] && [ -b /dev/sdb ] && [ -b /dev/sdc ]")
    yield made
    made.close()


def in_guest(agent: Agent, dev: str) -> str:
    """Returns the device that a disk is in the guest."""
    found = agent.run(f"grep -lx {SIZES[dev] // 512} /sys/block/sd*/size")
    return "/dev/" + found.split("/")[3]


def write(agent: Agent, text: str, *devs: str) -> None:
    """Writes a line to disks, durably."""
    for dev in devs:
        agent.run(f"echo {text} > {in_guest(agent, dev)} && sync")


def snapshots(ceph: Ceph, image: str) -> list[str]:
    """Returns the names of an image's snapshots."""
    listed = json.loads(ceph.rbd("snap", "ls", "--format", "json", f"{POOL}/{image}"))
    return [each["name"] for each in listed]


def raw(path: Path) -> bytes:
    """Returns what an image file holds."""
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        subprocess.run(["qemu-img", "convert", "-O", "raw", path, file.name], check=True)
        return Path(file.name).read_bytes()


def backup(host: Host, checkpoint: str, files: dict[str, Path], since: str = "") -> None:
    """Makes files of disks, with a checkpoint of the same instant; waits for the end."""
    rest = "".join(f"<disk name='{dev}' backup='no'/>" for dev in VOLUMES if dev not in files)
    disks = rest + "".join(
        f"<disk name='{dev}' type='file'><driver type='qcow2'/><target file='{file}'/></disk>"
        for dev, file in files.items()
    )
    head = f"<incremental>{since}</incremental>" if since else ""
    path, made = host.scratch / "backup.xml", host.scratch / "checkpoint.xml"
    path.write_text(f"<domainbackup>{head}<disks>{disks}</disks></domainbackup>")
    made.write_text(f"<domaincheckpoint><name>{checkpoint}</name></domaincheckpoint>")
    host.virsh("backup-begin", NAME, str(path), str(made))
    until(lambda: "None" in host.virsh("domjobinfo", NAME), "the end of the backup")
    ended = host.virsh("domjobinfo", NAME, "--completed")
    assert "Completed" in ended, ended


def test_a_backup_has_what_changed_in_images_since_a_checkpoint(
    host: Host, agent: Agent, ceph: Ceph
) -> None:
    write(agent, "first", "sda", "sdb")
    full = {dev: host.scratch / f"{dev}.full" for dev in ("sda", "sdb")}
    backup(host, "c1", full)
    assert [raw(file)[:6] for file in full.values()] == [b"first\n"] * 2
    write(agent, "second", "sdb")
    agent.run(f"echo elsewhere | dd of={in_guest(agent, 'sdb')} bs=1M seek=9 conv=notrunc && sync")
    since = {dev: host.scratch / f"{dev}.since" for dev in ("sda", "sdb")}
    backup(host, "c2", since, since="c1")
    assert snapshots(ceph, "log") == ["checkpoint-c1", "checkpoint-c2"]
    for dev, image in (("sda", "data"), ("sdb", "log")):
        mapped = subprocess.run(
            ["qemu-img", "map", "--output=json", since[dev]], check=True, capture_output=True
        )
        there = sum(each["length"] for each in json.loads(mapped.stdout) if each["data"])
        # Whole objects of 4 MiB, of 20 MiB in all.
        assert there == (0 if dev == "sda" else 8 * MIB)
        rebase = ["qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b"]
        subprocess.run([*rebase, full[dev], since[dev]], check=True)
        assert raw(since[dev]) == ceph.content(f"{image}@checkpoint-c2")
    host.virsh("checkpoint-delete", NAME, "c1", "--children")
    assert snapshots(ceph, "log") == snapshots(ceph, "data") == []


def test_images_and_a_volume_are_taken_at_one_instant_and_go_back(
    host: Host, agent: Agent, ceph: Ceph
) -> None:
    write(agent, "before", "sda", "sdb", "sdc")
    host.virsh("snapshot-create-as", NAME, "images", "--disk-only", "--diskspec", "sdc,snapshot=no")
    host.virsh("snapshot-create-as", NAME, "all", "--disk-only")
    assert snapshots(ceph, "data") == snapshots(ceph, "log") == ["images", "all"]
    assert "own@all" in {volume.name for volume in host.volumes.volumes("lvs0")}
    # One after the other, until it ends: the first is never behind, the second never ahead.
    disks = " ".join(in_guest(agent, dev) for dev in VOLUMES)
    agent.run(
        f"(n=0; while [ ! -e /tmp/stop ]; do n=$((n+1)); for d in {disks}; do printf '%08d' $n |"
        " dd of=$d bs=512 conv=sync oflag=direct 2>/dev/null; done; echo $n > /tmp/n; done;"
        " touch /tmp/over) >/dev/null 2>&1 &"
    )
    agent.wait_for("[ -s /tmp/n ] && [ $(cat /tmp/n) -gt 2 ]")
    host.virsh("snapshot-create-as", NAME, "busy", "--disk-only")
    host.virsh("snapshot-create-as", NAME, "pair", "--disk-only", "--diskspec", "sdc,snapshot=no")
    agent.run("touch /tmp/stop")
    agent.wait_for("[ -e /tmp/over ]")
    for snapshot in ("busy", "pair"):
        data, log = (int(ceph.content(f"{image}@{snapshot}")[:8]) for image in ("data", "log"))
        assert data > 2 and data - log in (0, 1), (snapshot, data, log)
    host.virsh("snapshot-revert", NAME, "all", "--running")
    agent.close()
    again = host.agent(NAME)
    again.wait_for("[ -b /dev/sda ] && [ -b /dev/sdb ] && [ -b /dev/sdc ]")
    assert [again.run(f"head -c 7 /dev/sd{dev}") for dev in "abc"] == ["before\n"] * 3
    again.close()
    host.virsh("destroy", NAME)
    for snapshot in ("pair", "busy", "all", "images"):
        host.virsh("snapshot-delete", NAME, snapshot)
    assert snapshots(ceph, "data") == snapshots(ceph, "log") == []


def test_a_guest_that_another_host_has_is_not_reverted(host: Host, ceph: Ceph) -> None:
    host.virsh("destroy", NAME, check=False)
    host.virsh("snapshot-create-as", NAME, "off", "--disk-only")
    held = subprocess.Popen(
        ["rbd", "bench", "--io-type", "write", "--io-total", "1T", f"{POOL}/log"],
        env=ceph.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: "watcher=" in ceph.rbd("status", f"{POOL}/log"), "the other client")
        with pytest.raises(VirshError, match="has it open"):
            host.virsh("snapshot-revert", NAME, "off")
    finally:
        held.kill()
        held.wait()
