"""What unmodified Nova does with snapshots of disks of ours, through the gateway.

Nova's libvirt driver is the release of PyPI, in an environment of its own; libvirtd, gateway,
target and guest are real. Only Cinder, Glance, Neutron and Nova's database are mocks; see
tests/openstack/nova_driver.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.support.agent import Agent
from tests.support.cache import CACHE, ROOT
from tests.support.host import Host, is_root
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm, pytest.mark.nightly, pytest.mark.timeout(900)]

NAME = "instance-00000001"
MIB = 1 << 20
FOLDER = Path(__file__).parent
PROPERTIES = {
    "hw_disk_bus": "scsi",
    "hw_scsi_model": "virtio-scsi",
    "hw_qemu_guest_agent": "yes",
}
CHANNEL = "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>"
#: What stands for QEMU's agent in the guest: it freezes and thaws the file system on /mnt.
SCRIPT = r"""
exec 4<>"/dev/$1"
while :; do
    read -r line <&4 || { sleep 0.1; continue; } # nobody has the host's end open
    n=1
    case $line in
        *guest-sync*) n=$(echo "$line" | grep -o '"id": *[0-9]*' | grep -o '[0-9]*$') ;;
        *fsfreeze-freeze*) fsfreeze -f /mnt; echo frozen >>/tmp/did ;;
        *fsfreeze-thaw*) fsfreeze -u /mnt; echo thawed >>/tmp/did ;;
    esac
    printf '{"return":%s}\n' "$n" >&4
done
"""


def environment() -> Path:
    """Returns the Python that has Nova, which is installed once."""
    lock = FOLDER / "requirements.lock"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    known = hashlib.sha256(lock.read_bytes() + version.encode()).hexdigest()[:16]
    folder = CACHE / f"nova-{known}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix="nova-", dir=CACHE))
        subprocess.run([sys.executable, "-m", "venv", str(new)], check=True)
        words = ("install", "-q", "--require-hashes", "--disable-pip-version-check", "-r")
        subprocess.run([new / "bin/python", "-m", "pip", *words, str(lock)], check=True)
        with contextlib.suppress(OSError):  # another run was first
            new.rename(folder)
        shutil.rmtree(new, ignore_errors=True)
    return folder / "bin/python"


class Nova:
    """The driver's process."""

    def __init__(self, host: Host) -> None:
        text = (ROOT / "examples/openstack/nova.conf").read_text()
        text = text.replace("/run/virtlun/libvirt-sock", str(host.gateway_socket))
        state = host.scratch / "nova"
        path = host.scratch / "nova.conf"
        path.write_text(
            text.replace("virt_type = kvm", "virt_type = qemu")
            + f"[DEFAULT]\nstate_path = {state}\n[oslo_concurrency]\nlock_path = {state}\n"
        )
        program = (environment(), "-P", FOLDER / "nova_driver.py")
        self._process = subprocess.Popen(
            [*program, path, host.virsh("domuuid", NAME).strip(), json.dumps(PROPERTIES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(host.scratch / "nova.err").open("wb"),
            text=True,
            env={"PATH": os.environ["PATH"]},
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def __call__(self, call: str, *words: object) -> dict[str, Any]:
        """Returns what became of a call of the driver."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": call, "words": words}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def does(self, call: str, *words: object) -> list[str]:
        """Has the driver do what is to work; returns the statuses that Cinder was told."""
        answer = self(call, *words)
        assert answer["raised"] is None, answer
        statuses: list[str] = answer["cinder"]
        return statuses

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A host whose instance runs, without a volume."""
    if not is_root():
        pytest.fail("tests/openstack need root: they run a libvirtd in a mount namespace")
    with Host(keep=True) as running:
        running.define(NAME, devices=CHANNEL)
        running.virsh("start", NAME)
        yield running


@pytest.fixture(scope="module")
def guest(host: Host) -> Iterator[Agent]:
    agent = host.agent(NAME)
    yield agent
    agent.close()


@pytest.fixture(scope="module")
def nova(host: Host) -> Iterator[Nova]:
    running = Nova(host)
    yield running
    running.close()


class Attached:
    """A volume that Nova has attached as sda."""

    def __init__(self, host: Host, kind: str) -> None:
        self.host, self.kind, self.id = host, kind, str(uuid4())
        self.name = f"v-{self.id}"
        host.volumes.create(f"lvs0/{self.name}", 16 * MIB, thin=True)
        self.connection = self.connected(self.id, self.name)

    def connected(self, volume: str, name: str) -> dict[str, Any]:
        """Returns what Cinder says of a volume's connection."""
        data: dict[str, Any] = {"device_path": f"/dev/virtlun/lvs0/{name}"}
        if self.kind == "rbd":
            data = {"name": f"virtlun/lvs0/{name}", "auth_enabled": False, "discard": True}
            data |= {"hosts": [], "ports": []}
        return {"driver_volume_type": self.kind, "serial": volume, "data": data}

    @property
    def parent(self) -> str | None:
        """The snapshot below the volume."""
        return self.host.volumes.volume(f"lvs0/{self.name}").parent

    def check_unharmed(self, guest: Agent) -> None:
        """It is in both definitions of the instance, which runs, and the guest can write it."""
        for side in ((), ("--inactive",)):
            dev, source = self.host.virsh("domblklist", NAME, *side).split()
            assert dev == "sda" and source.endswith(f"virtlun/lvs0/{self.name}")
        assert self.host.virsh("domstate", NAME) == "running"
        assert "<serial>" + self.id in self.host.virsh("dumpxml", NAME, "--inactive")
        guest.run("dd if=/dev/urandom of=/dev/sda bs=1M seek=8 count=1 oflag=direct", 60)


@pytest.fixture(params=["rbd", "local"])
def disk(
    host: Host, guest: Agent, nova: Nova, request: pytest.FixtureRequest
) -> Iterator[Attached]:
    """Attached, and detached, by Nova."""
    volume = Attached(host, request.param)
    nova.does("attach", volume.connection, "sda", "scsi")
    guest.wait_for("[ -b /dev/sda ]")
    yield volume
    nova.does("detach", volume.connection, "sda")
    guest.wait_for("[ ! -e /sys/block/sda ]")
    assert host.virsh("domblklist", NAME) == host.virsh("domblklist", NAME, "--inactive") == ""


def test_a_snapshot_for_cinder_into_a_file_is_refused(
    guest: Agent, nova: Nova, disk: Attached
) -> None:
    answer = nova("volume_snapshot_create", disk.id, "snapshot.qcow2")
    if disk.kind == "rbd":  # Nova itself takes none of what has no path
        raised, words = "InternalError", "Found no disk to snapshot"
    else:
        raised, words = "libvirtError", "disk sda: a virtlun volume holds its snapshots itself"
    assert answer["raised"] == raised and words in answer["said"]
    assert answer["cinder"] == ["error"]
    assert disk.parent is None
    disk.check_unharmed(guest)


@pytest.mark.parametrize("into", [None, "base.qcow2"])
def test_a_files_merge_for_cinder_is_refused(
    guest: Agent, nova: Nova, disk: Attached, into: str | None
) -> None:
    answer = nova("volume_snapshot_delete", disk.id, "snapshot.qcow2", into)
    if disk.kind == "rbd":
        raised, words = "InternalError", "no match found for"
    elif into is None:
        raised, words = "libvirtError", "leave the base out"
    else:
        raised, words = "libvirtError", "snapshot.qcow2 is not in the chain of"
    assert answer["raised"] == raised and words in answer["said"]
    assert answer["cinder"] == ["error_deleting"]
    disk.check_unharmed(guest)


def test_a_merge_of_all_into_the_disk_is_a_pull(
    host: Host, guest: Agent, nova: Nova, disk: Attached
) -> None:
    guest.run("echo kept | dd of=/dev/sda conv=sync,fsync")
    host.volumes.snapshot([f"lvs0/{disk.name}"], "s")
    assert disk.parent == f"{disk.name}@s"
    assert nova.does("volume_snapshot_delete", disk.id, None, None) == ["deleting"]
    assert disk.parent is None
    assert guest.run("echo 3 >/proc/sys/vm/drop_caches; head -c 4 /dev/sda") == "kept"
    disk.check_unharmed(guest)


def test_a_swap_of_volumes_is_refused_and_the_disk_stays(
    host: Host, guest: Agent, nova: Nova, disk: Attached
) -> None:
    other = f"other-{disk.kind}"
    host.volumes.create(f"lvs0/{other}", 16 * MIB, thin=True)
    new = disk.connected(str(uuid4()), other)
    answer = nova("swap", disk.connection, new, "sda")
    assert answer["raised"] == "VolumeRebaseFailed"
    assert f"QEMU cannot copy a disk to virtlun volume lvs0/{other}" in answer["said"]
    disk.check_unharmed(guest)


def test_what_nova_does_while_there_are_snapshots(
    host: Host, guest: Agent, nova: Nova, disk: Attached
) -> None:
    """The volume grows and its snapshot is merged; the fixture detaches it with another one."""
    take = ("snapshot-create-as", NAME, "--disk-only", "--no-metadata", "--name")
    host.virsh(*take, "first")
    answer = nova("extend", disk.connection, 32 * MIB)
    if disk.kind == "rbd":
        assert answer["raised"] is None, answer
        guest.wait_for(f"[ $(cat /sys/block/sda/size) -eq {32 * MIB // 512} ]")
    else:  # Nova's driver of local volumes
        assert answer["raised"] == "ExtendVolumeNotSupported"
    host.virsh("blockcommit", NAME, "sda", "--active", "--pivot")
    assert disk.parent is None
    host.virsh(*take, "second")
    disk.check_unharmed(guest)


@pytest.mark.parametrize("disk", ["rbd"], indirect=True)
def test_file_systems_are_frozen_for_cinders_snapshots(
    host: Host, guest: Agent, nova: Nova, disk: Attached
) -> None:
    """Without an agent it is what Nova goes on after, and with one it is done."""
    answer = nova("quiesce")
    assert answer["raised"] == "InstanceQuiesceFailed"
    assert "QEMU guest agent is not connected" in answer["said"]
    guest.run("mkfs.ext4 -q /dev/sda && mount /dev/sda /mnt && echo kept >/mnt/file", 120)
    guest.run(f"cat >/tmp/agent <<'EOF'\n{SCRIPT}\nEOF")
    port = guest.wait_for("basename $(dirname $(grep -l org.qemu /sys/class/virtio-ports/*/name))")
    guest.run(f"setsid sh /tmp/agent {port.strip()} >/tmp/agent.log 2>&1 </dev/null &")
    until(lambda: nova("quiesce")["raised"] is None, "the agent answers")
    host.volumes.snapshot([f"lvs0/{disk.name}"], "cinder")
    nova.does("unquiesce")
    assert guest.run("cat /tmp/did").split() == ["frozen", "thawed"]
    guest.run("echo on >/mnt/file && sync && umount /mnt")
    disk.check_unharmed(guest)
