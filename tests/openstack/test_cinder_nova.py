"""A volume from real Cinder to a guest of real Nova and back, and all that either does meanwhile.

Cinder's services and Nova's libvirt driver are the releases of PyPI, each in a Python environment
of its own; libvirtd, gateway, target and guest are real. What Nova's own services would do between
the two the test does: it takes the connection from Cinder's REST API and hands it to the driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.openstack.cinder_process import Cinder, connector
from tests.openstack.nova_process import Nova
from tests.support.agent import Agent
from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.vm, pytest.mark.nightly, pytest.mark.timeout(900)]

NAME = "instance-00000001"
GIB = 1 << 30


@contextmanager
def attached(
    cinder: Cinder, nova: Nova, guest: Agent, volume: str, server: str
) -> Iterator[dict[str, Any]]:
    """Has a guest have a volume as sda, for the duration of a block; its connection."""
    body = {"attachment": {"volume_uuid": volume, "instance_uuid": server}}
    made = cinder.post("attachments", body)["attachment"]["id"]
    told = {"attachment": {"connector": connector(mountpoint="/dev/sda")}}
    data = cinder.call("PUT", f"attachments/{made}", told)["attachment"]["connection_info"]
    kind = data["driver_volume_type"]
    connection = {"driver_volume_type": kind, "serial": volume, "data": data}
    nova.does("attach", connection, "sda", "scsi")
    cinder.post(f"attachments/{made}/action", {"os-complete": {}})
    guest.wait_for("[ -b /dev/sda ]")
    yield connection
    nova.does("detach", connection, "sda")
    guest.wait_for("[ ! -e /sys/block/sda ]")
    cinder.call("DELETE", f"attachments/{made}")
    cinder.wait(f"volumes/{volume}")


def test_a_volume_goes_from_cinder_to_a_guest_and_back() -> None:
    with Host() as host:
        host.volumes.create_lvstore("cinder0", host.scratch / "cinder0.img", 8 * GIB)
        host.define(NAME)
        host.virsh("start", NAME)
        server = host.virsh("domuuid", NAME)
        (folder := host.scratch / "cinder").mkdir()
        cinder = Cinder(folder, host.paths.rpc_socket, lvstore="cinder0")
        guest, nova = host.agent(NAME), Nova(host, server)
        try:
            volume = cinder.volume()
            with attached(cinder, nova, guest, volume, server) as connection:
                guest.run("echo first > /dev/sda && sync")
                snapshot = cinder.snapshot(volume)
                guest.run("echo second > /dev/sda && sync")
                cinder.post(f"volumes/{volume}/action", {"os-extend": {"new_size": 2}})
                cinder.wait(f"volumes/{volume}", "in-use")
                nova.does("extend", connection, 2 * GIB)
                guest.wait_for(f"[ $(cat /sys/block/sda/size) = {2 * GIB // 512} ]")
                assert "second" in guest.run("head -n 1 /dev/sda")
            clone = cinder.volume(snapshot_id=snapshot)
            with attached(cinder, nova, guest, clone, server):
                assert "first" in guest.run("head -n 1 /dev/sda")
            cinder.delete(f"snapshots/{snapshot}")
            for each in (volume, clone):
                cinder.delete(f"volumes/{each}")
            assert host.volumes.volumes("cinder0") == []
        finally:
            cinder.close()
            nova.close()
            guest.close()
        host.virsh("destroy", NAME)
