"""What `virsh domblkinfo` says that each kind of volume takes: clusters of its own."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.encryption import KEY, KEY2
from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "room"
MIB = 1 << 20
CLUSTER = 64 << 10
"""Of an lvstore of 1 GiB."""
SIZE = 8 * MIB
VOLUMES = ("thin", "thick", "secret")


@pytest.fixture(scope="module")
def domain(host: Host) -> Iterator[Host]:
    """A domain that is off, with volumes of which nothing was written, and a clone."""
    host.client.call("accel_crypto_key_create", cipher="AES_XTS", key=KEY, key2=KEY2, name="k")
    host.volumes.create("lvs0/thin", SIZE, thin=True)
    host.volumes.create("lvs0/thick", SIZE)
    host.volumes.create("lvs0/secret", SIZE, thin=True, key="k")
    host.volumes.create("lvs0/golden", SIZE, thin=True)
    write(host, "golden", at=0, clusters=40)
    host.volumes.snapshot(["lvs0/golden"], "s")
    host.volumes.clone("lvs0/golden@s", "clone")
    disks = "".join(
        f"<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/{name}'/>"
        f"<target dev='sd{letter}' bus='scsi'/></disk>"
        for name, letter in zip((*VOLUMES, "clone"), "abcd", strict=True)
    )
    path = host.scratch / "room.xml"
    path.write_text(
        f"<domain type='qemu'><name>{NAME}</name><memory unit='MiB'>64</memory><os>"
        f"<type arch='x86_64' machine='q35'>hvm</type></os><devices>{disks}</devices></domain>"
    )
    host.virsh("define", str(path))
    yield host
    host.virsh("destroy", NAME, check=False)
    host.virsh("undefine", NAME)


def write(host: Host, volume: str, *, at: int, clusters: int) -> None:
    """Writes clusters of a volume that nobody uses, through its file, which the gateway sees."""
    uuid = host.volumes.volume(f"lvs0/{volume}").uuid
    file = host.volumes.export(uuid)
    try:
        words = (f"of={file}", f"bs={CLUSTER}", f"seek={at}", f"count={clusters}", "conv=notrunc")
        command = host.libvirtd.command("dd", "if=/dev/urandom", *words, "oflag=direct")
        subprocess.run(command, check=True, timeout=60, stderr=subprocess.DEVNULL)
    finally:
        host.volumes.end_export(uuid)


def allocated(host: Host) -> dict[str, int]:
    """Returns the clusters that domblkinfo says each disk has, by its dev."""
    found = {}
    for dev in ("sda", "sdb", "sdc", "sdd"):
        said = host.virsh("domblkinfo", NAME, dev)
        values = {key: int(value) for key, value in re.findall(r"^(\w+):\s+(\d+)$", said, re.M)}
        assert values["Capacity"] == SIZE and values["Physical"] == values["Allocation"]
        assert values["Allocation"] % CLUSTER == 0
        found[dev] = values["Allocation"] // CLUSTER
    return found


@pytest.mark.nightly
def test_what_each_kind_of_volume_takes(domain: Host) -> None:
    whole = SIZE // CLUSTER
    assert allocated(domain) == {"sda": 0, "sdb": whole, "sdc": 0, "sdd": 0}
    for number, name in enumerate(("thin", "thick", "secret", "clone"), 1):
        write(domain, name, at=3, clusters=number)
    expected = {"sda": 1, "sdb": whole, "sdc": 3, "sdd": 4}
    assert allocated(domain) == expected
    domain.virsh("start", NAME)
    assert allocated(domain) == expected
    shown = domain.virsh("domstats", NAME, "--block")
    assert [int(n) // CLUSTER for n in re.findall(r"block\.\d+\.allocation=(\d+)", shown)] == list(
        expected.values()
    )
    # What a snapshot keeps is no more the volume's own.
    domain.virsh("snapshot-create-as", NAME, "s", "--disk-only")
    assert allocated(domain) == {"sda": 0, "sdb": 0, "sdc": 0, "sdd": 0}
    domain.virsh("destroy", NAME)
    write(domain, "thick", at=0, clusters=2)
    write(domain, "secret", at=0, clusters=1)
    assert allocated(domain) == {"sda": 0, "sdb": 2, "sdc": 1, "sdd": 0}
    domain.virsh("snapshot-delete", NAME, "s")
    assert allocated(domain) == {"sda": 1, "sdb": whole, "sdc": 4, "sdd": 4}
    domain.volumes.inflate("lvs0/clone")
    assert allocated(domain)["sdd"] == whole


def test_a_disk_that_waits_for_its_key_tells_what_it_has(domain: Host) -> None:
    before = allocated(domain)
    domain.stop_target()
    domain.start_target()
    assert allocated(domain) == before
    domain.client.call("accel_crypto_key_create", cipher="AES_XTS", key=KEY, key2=KEY2, name="k")
    assert allocated(domain) == before
