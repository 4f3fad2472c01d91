"""A VM's disks on Ceph change over from QEMU's own librbd to the target, and back, as it says.

Real libvirtd, virsh, QEMU with Debian's qemu-block-extra, guest, and Ceph with keys. The host
serves disks of those domains alone that ask for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pydataplane.domain.names import NETWORK_NAMESPACE
from tests.support import cloud as clouds
from tests.support.agent import Agent, GuestError
from tests.support.ceph import lacks
from tests.support.cloud import Cloud
from tests.support.libvirtd import VirshError
from tests.support.wait import until

BLOCK_RBD = list(Path("/usr/lib").glob("*/qemu/block-rbd.so"))
"""QEMU's librbd, of the package qemu-block-extra."""
MISSING = [*lacks(), *([] if BLOCK_RBD else ["qemu-block-extra"])]

pytestmark = [
    pytest.mark.root,
    pytest.mark.vm,
    pytest.mark.nightly,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.timeout(900),
]

NAME = "mover"
CONFIG = """
[disks]
serve_network_on_request = ["rbd"]
"""
SERIALS = {"vda": "5a1c7b52-8f0f-4f5e-9c6e-0f7f54a0a001", "sda": "volume-two"}
WWN = "5000c50015ea71ad"
SCSI = "<controller type='scsi' model='virtio-scsi'/>"
"""As Nova has it; QEMU's own disks are at it."""


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    """The cluster and the host of the module's tests."""
    with clouds.cloud(CONFIG) as made:
        made.ceph.image("root", 64)
        made.ceph.image("data", 32)
        yield made


def names(agent: Agent) -> dict[str, str]:
    """Returns what udev makes the names in /dev/disk/by-id of, by kind; and the serial."""
    page = bytes.fromhex(agent.run("od -An -v -tx1 /sys/block/sda/device/vpd_pg83"))
    at, naa = 4, ""
    while at + 4 <= len(page):
        kind, length = page[at + 1], page[at + 3]
        if kind & 0x3F == 3:  # NAA, of the logical unit
            naa = page[at + 4 : at + 4 + length].hex()
            break
        at += 4 + length
    unit = bytes.fromhex(agent.run("od -An -v -tx1 /sys/block/sda/device/vpd_pg80"))
    return {
        "virtio-": agent.run("cat /sys/block/vda/serial"),
        "scsi-3": naa,
        "wwn-0x": naa,
        "unit serial number": unit[4:].decode().strip(),
    }


NAMES = {
    "virtio-": SERIALS["vda"][:20],
    "scsi-3": WWN,
    "wwn-0x": WWN,
    "unit serial number": SERIALS["sda"],
}


def started(cloud: Cloud, *, served: bool) -> Agent:
    """Starts it, and returns the command channel into its guest; its disks are whose they are."""
    cloud.host.virsh("start", NAME)
    assert cloud.theirs("rbd", name=NAME) == (0 if served else 2)
    assert cloud.images == (["data", "root"] if served else [])
    agent = cloud.host.agent(NAME)
    agent.wait_for("[ -b /dev/vda ] && [ -b /dev/sda ]")
    assert names(agent) == NAMES
    return agent


def stopped(cloud: Cloud, agent: Agent, *, released: bool = True) -> str:
    """Has the guest shut itself down; returns its definition but for its metadata.

    With `released` nobody has its images any more.
    """
    with pytest.raises(GuestError):
        agent.run("sync; poweroff -f", deadline_s=60)
    agent.close()
    until(lambda: cloud.host.virsh("domstate", NAME).strip() == "shut off", "the guest's end")
    if released:
        for image in ("root", "data"):
            until(lambda image=image: cloud.locks(image) == 0, "nobody to have it locked")  # type: ignore[misc]
        assert cloud.images == []
    shown = cloud.host.virsh("dumpxml", NAME, "--inactive")
    return re.sub(r"\s*<metadata>.*</metadata>", "", shown, flags=re.DOTALL)


def written(agent: Agent, step: str) -> None:
    """Writes to both disks: a file in the file system of one, and bytes of the other."""
    agent.run(
        f"mount /dev/vda /mnt && head -c 3000000 /dev/urandom > /mnt/{step}"
        f" && md5sum < /mnt/{step} > /mnt/{step}.sum && umount /mnt"
    )
    agent.run(f"echo {step} | dd of=/dev/sda bs=512 seek={len(step) * 1000} conv=fsync,sync")


def check(agent: Agent, *steps: str) -> None:
    """Checks that both disks have what was written."""
    for step in steps:
        agent.run(
            f"mount -o ro /dev/vda /mnt && md5sum < /mnt/{step} | cmp - /mnt/{step}.sum;"
            " status=$?; umount /mnt; exit $status"
        )
        read = f"dd if=/dev/sda bs=512 skip={len(step) * 1000} count=1 2>/dev/null"
        assert agent.run(f"{read} | tr -d '\\0'") == f"{step}\n"


def test_a_vm_changes_over_and_back(cloud: Cloud) -> None:
    serials = {dev: f"<serial>{serial}</serial>" for dev, serial in SERIALS.items()}
    devices = (
        SCSI
        + cloud.disk("root", "vda", serials["vda"])
        + cloud.disk("data", "sda", serials["sda"] + f"<wwn>{WWN}</wwn>")
    )
    cloud.host.define(NAME, devices=devices)
    agent = started(cloud, served=False)
    agent.run("mkdir -p /mnt && mkfs.ext4 -q /dev/vda")
    written(agent, "q")
    before = stopped(cloud, agent)
    cloud.serve("rbd", "--config", name=NAME)
    agent = started(cloud, served=True)
    agent.run("mkdir -p /mnt")
    check(agent, "q")
    written(agent, "ours")
    # A restart of the gateway, and of the target, leaves them what they are.
    cloud.host.stop_gateway()
    cloud.host.kill_target()
    cloud.host.start_target()
    cloud.host.start_gateway()
    agent.run("echo 3 > /proc/sys/vm/drop_caches")
    check(agent, "q", "ours")
    assert stopped(cloud, agent, released=False) == before
    cloud.serve("", "--config", name=NAME)  # and at once, as a user does
    agent = started(cloud, served=False)
    agent.run("mkdir -p /mnt")
    check(agent, "q", "ours")
    written(agent, "again")
    check(agent, "q", "ours", "again")
    assert stopped(cloud, agent) == before
    assert cloud.ceph.content("data")[4000 * 512 :].startswith(b"ours\n")
    cloud.host.virsh("undefine", NAME)


def test_what_its_host_does_not_allow_is_said_and_the_vm_stays_as_it_is(cloud: Cloud) -> None:
    host, name = cloud.host, "bounded"
    path = host.scratch / f"{name}.xml"
    xml = (
        f"<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><os>"
        "<type arch='x86_64' machine='q35'>hvm</type></os><devices>"
        f"{cloud.disk('root', 'vda')}</devices></domain>"
    )
    path.write_text(xml)
    host.virsh("define", str(path))
    before, shown = host.virsh_direct("dumpxml", name), host.virsh("dumpxml", name)
    with host.configured("serve_network_on_request", "own_keyring = false # "):
        with pytest.raises(VirshError) as refused:
            cloud.serve("rbd", "--config", name=name)
        assert f"domain '{name}' asks in its metadata" in str(refused.value)
        assert "add rbd to serve_network_on_request in virtlun.toml" in str(refused.value)
        assert host.virsh_direct("dumpxml", name) == before
    cloud.serve("rbd", "--config", name=name)
    assert cloud.theirs("rbd", name=name) == 0
    assert NETWORK_NAMESPACE in host.virsh("dumpxml", name)
    cloud.serve(None, "--config", name=name)
    assert cloud.theirs("rbd", name=name) == 1
    assert host.virsh("dumpxml", name) == shown
    host.virsh("undefine", name)
