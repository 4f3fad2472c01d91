"""A running guest keeps each LUN until somebody detaches it, whoever looks at what it has."""

from __future__ import annotations

import subprocess

import pytest

from pydataplane.domain.translate import controller_name
from tests.support.host import Host
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "keeps"
MIB = 1 << 20
DISK = (
    "<disk type='block' device='disk'><source dev='/dev/virtlun/lvs0/{volume}'/>"
    "<target dev='{dev}' bus='scsi'/></disk>"
)


def luns(host: Host, uuid: str) -> dict[int, str]:
    """Returns the bdevs that the domain's controller shows, by target."""
    found = host.client.call("vhost_get_controllers")
    return {
        each["scsi_dev_num"]: each["luns"][0]["bdev_name"]
        for item in found
        if item["ctrlr"] == controller_name(uuid)
        for each in item["backend_specific"]["scsi"]
    }


@pytest.mark.nightly
def test_neither_the_gateways_rounds_nor_libvirtds_restart_take_a_lun(host: Host) -> None:
    for volume in ("data", "more"):
        host.volumes.create(f"lvs0/{volume}", 8 * MIB)
    host.define(NAME, devices=DISK.format(volume="data", dev="sda"))
    host.virsh("start", "--paused", NAME)
    uuid = host.virsh_direct("domuuid", NAME)
    more = host.volumes.volume("lvs0/more").uuid
    ctrlr = controller_name(uuid)
    host.client.call(
        "vhost_scsi_controller_add_target", ctrlr=ctrlr, scsi_target_num=7, bdev_name=more
    )
    before = luns(host, uuid)
    assert before.keys() == {0, 7}
    said = f"target 7 of controller {ctrlr} is kept"
    # The gateway makes a round when it starts.
    host.stop_gateway()
    host.start_gateway()
    log = host.scratch / "gateway.log"
    until(lambda: said in log.read_text(), "the gateway says that")
    assert "LUN kept on a running domain" in log.read_text()
    assert "not reconciled" not in log.read_text(), "nothing has failed"
    assert luns(host, uuid) == before
    # libvirtd's hook looks at each running domain when it starts.
    host.libvirtd.restart()
    until(lambda: host.virsh("domstate", NAME).strip() == "paused", "libvirtd is back")
    assert luns(host, uuid) == before
    shown = subprocess.check_output(
        [
            *(host.program("virtlun"), "--config", str(host.config), "domain", "list"),
            *("--connect", host.uri),
        ],
        text=True,
    )
    (row,) = [line for line in shown.splitlines() if "lvs0/more" in line]
    assert "sd" not in row and row.split() == [NAME, "running", "lvs0/more", "7", "LUN", "yes"]
    # A detach takes its own, and the domain's end takes all.
    path = host.scratch / "detached.xml"
    path.write_text(DISK.format(volume="data", dev="sda"))
    host.virsh("detach-device", NAME, str(path), "--live")
    assert luns(host, uuid) == {7: more}
    host.virsh("destroy", NAME)
    until(lambda: luns(host, uuid) == {}, "its controller is gone")
    host.virsh("start", "--paused", NAME)
    assert luns(host, uuid) == {0: before[0]}
    host.virsh("destroy", NAME)
