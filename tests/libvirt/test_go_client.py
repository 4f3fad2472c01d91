"""Libvirt's protocol as go-libvirt speaks it, and XML as libvirtxml writes and reads it.

Both are unmodified; tests/libvirt/go_client is a program over them, as Terraform's provider is.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.libvirt.go_client import GoClient, RefusedByGo
from tests.libvirt.test_pools import MIB, OURS
from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.vm, pytest.mark.nightly]

NAME = "ready"


@pytest.fixture
def client(host: Host) -> Iterator[GoClient]:
    made = GoClient(host.gateway_socket)
    yield made
    assert made.close() == 0


def test_a_volume_is_made_attached_grown_and_detached(host: Host, client: GoClient) -> None:
    host.define(NAME)
    host.virsh("start", NAME)
    guest = host.agent(NAME)
    assert client("domains") == [NAME]
    assert client("pools")[OURS] == "zfs"
    key = client("create", OURS, "v", 16 * MIB)
    path = "/dev/virtlun/lvs0/v"
    assert host.virsh("vol-key", "v", "--pool", OURS) == key
    assert client("volumes", OURS) == {path: 16 * MIB}
    # As an image of Terraform's gets there.
    client("upload", OURS, "v", "by Go\n")
    assert client("read", OURS, "v", 6) == "by Go\n"
    assert client("attach", NAME, OURS, "v", "sda", "ua-go") == "ua-go"
    assert client("disks", NAME) == {"sda": f"{OURS}/v"}
    guest.wait_for("[ -b /dev/sda ]")
    assert guest.run("head -n 1 /dev/sda") == "by Go\n"
    guest.run("dd if=/dev/zero of=/dev/sda bs=64k count=2 oflag=direct")
    assert client("stats", NAME, "sda") == 128 << 10
    client("resize", NAME, "sda", 32 * MIB)
    guest.wait_for(f"[ $(cat /sys/block/sda/size) = {32 * MIB // 512} ]")
    assert client("volumes", OURS) == {path: 32 * MIB}
    with pytest.raises(RefusedByGo, match="disk sda has 33554432 bytes, and 8388608 would cut"):
        client("resize", NAME, "sda", 8 * MIB)
    with pytest.raises(RefusedByGo, match="is a disk of domain ready, which runs"):
        client("delete", OURS, "v")
    assert client("detach", NAME, OURS, "v", "sda", "ua-go") == "ua-go"
    guest.wait_for("[ ! -e /sys/block/sda ]")
    guest.close()
    assert client("disks", NAME) == {}
    assert host.virsh("domblklist", NAME, "--inactive") == ""
    with pytest.raises(RefusedByGo, match="missing"):
        client("attach", NAME, OURS, "missing", "sda", "ua-go")
    client("delete", OURS, "v")
    assert client("volumes", OURS) == {}
    host.virsh("destroy", NAME)
    host.virsh("undefine", NAME)
