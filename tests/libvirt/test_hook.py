"""The hook with a real libvirtd: domains that are started behind the gateway's back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "hooked"
DISK = (
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/hooked'/>"
    "<blockio logical_block_size='4096'/><target dev='sda' bus='scsi'/></disk>"
)
MIB = 1 << 20
RECONNECT_DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def hooked(host: Host) -> Host:
    """A domain with a volume, defined through the gateway, which then ends."""
    host.volumes.create("lvs0/hooked", 32 * MIB)
    host.define(NAME, devices=DISK)
    host.stop_gateway()
    return host


def controllers(host: Host) -> list[Any]:
    """Returns the target's controllers with their LUNs and the sizes of their blocks."""
    return [
        (
            item["ctrlr"],
            [
                (entry["scsi_dev_num"], entry["luns"][0]["block_size"])
                for entry in item["backend_specific"]["scsi"]
            ],
        )
        for item in host.client.call("vhost_get_controllers")
    ]


def test_prepare_makes_the_controller_and_the_guest_has_its_disk(hooked: Host) -> None:
    assert controllers(hooked) == []
    hooked.virsh_direct("start", NAME)
    uuid = hooked.virsh_direct("domuuid", NAME)
    assert controllers(hooked) == [(f"vm-{uuid}", [(0, 4096)])]
    agent = hooked.agent(NAME)
    assert agent.wait_for("cat /sys/block/sda/size").strip() == str(32 * MIB // 512)
    assert agent.run("cat /sys/block/sda/queue/logical_block_size").strip() == "4096"
    agent.run("dd if=/dev/zero of=/dev/sda bs=1M count=4 conv=fsync")
    agent.close()


def test_reconnect_puts_right_what_is_missing(hooked: Host) -> None:
    before = controllers(hooked)
    hooked.client.call("vhost_scsi_controller_remove_target", ctrlr=before[0][0], scsi_target_num=0)
    assert controllers(hooked) != before
    hooked.libvirtd.restart()
    assert hooked.virsh_direct("domstate", NAME) == "running"
    # libvirtd takes up its domains in threads of their own, after its socket is there.
    until(
        lambda: controllers(hooked) == before,
        lambda: f"{before}, not {controllers(hooked)}",
        RECONNECT_DEADLINE_S,
    )


def test_release_takes_the_controller_away(hooked: Host) -> None:
    hooked.virsh_direct("destroy", NAME)
    assert controllers(hooked) == []


def test_without_a_target_the_start_fails_in_one_sentence(hooked: Host) -> None:
    hooked.stop_target()
    try:
        with pytest.raises(VirshError, match="target"):
            hooked.virsh_direct("start", NAME)
        assert hooked.virsh_direct("domstate", NAME) == "shut off"
    finally:
        hooked.start_target()


@pytest.mark.nightly
def test_after_the_hosts_boot_the_domain_starts_again(hooked: Host) -> None:
    hooked.kill_target()
    hooked.libvirtd.restart()
    hooked.start_target()
    hooked.virsh_direct("start", NAME)
    agent = hooked.agent(NAME)
    agent.wait_for("[ -b /dev/sda ] && dd if=/dev/sda of=/dev/null bs=1M count=4")
    agent.close()
    hooked.virsh_direct("destroy", NAME)
    assert controllers(hooked) == []
