"""A volume from real Cinder to a guest of real Nova and back, and all that either does meanwhile.

Cinder's services and Nova's libvirt driver are the releases of PyPI, each in a Python environment
of its own; libvirtd, gateway, target and guest are real. What Nova's own services would do between
the two the test does: it takes the connection from Cinder's REST API and hands it to the driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.openstack.cinder_process import Cinder, connector
from tests.openstack.nova_process import Nova
from tests.openstack.rest import Refused
from tests.support.agent import Agent
from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.vm, pytest.mark.nightly, pytest.mark.timeout(900)]

NAME = "instance-00000001"
GIB = 1 << 30


@dataclass(frozen=True)
class Both:
    """Cinder and Nova on a host, whose one guest is a server."""

    host: Host
    cinder: Cinder
    nova: Nova
    guest: Agent
    server: str

    @contextmanager
    def attached(self, volume: str) -> Iterator[dict[str, Any]]:
        """Has the guest have a volume as sda, for the duration of a block; its connection."""
        cinder, nova = self.cinder, self.nova
        body = {"attachment": {"volume_uuid": volume, "instance_uuid": self.server}}
        made = cinder.post("attachments", body)["attachment"]["id"]
        told = {"attachment": {"connector": connector(mountpoint="/dev/sda")}}
        data = cinder.call("PUT", f"attachments/{made}", told)["attachment"]["connection_info"]
        kind = data["driver_volume_type"]
        connection = {"driver_volume_type": kind, "serial": volume, "data": data}
        nova.does("attach", connection, "sda", "scsi")
        cinder.post(f"attachments/{made}/action", {"os-complete": {}})
        self.guest.wait_for("[ -b /dev/sda ]")
        yield connection
        nova.does("detach", connection, "sda")
        self.guest.wait_for("[ ! -e /sys/block/sda ]")
        cinder.call("DELETE", f"attachments/{made}")
        cinder.wait(f"volumes/{volume}")

    def limits(self, volume: str) -> dict[str, int]:
        """Returns what the target limits a volume to, where it does."""
        name = f"cinder0/volume-{volume}"
        found: dict[str, Any] = dict(self.host.client.call("virtlun_bdev_get_limits", name=name))
        return {name: value for name, value in found.items() if value}

    def volume_type(self, name: str, limits: dict[str, str]) -> str:
        """Makes a volume type, with front-end QoS specs if there are limits; returns its ID."""
        body = {"volume_type": {"name": name, "extra_specs": {}}}
        made = str(self.cinder.post("types", body)["volume_type"]["id"])
        if limits:
            specs = {"name": name, "consumer": "front-end", **limits}
            qos = self.cinder.post("qos-specs", {"qos_specs": specs})["qos_specs"]["id"]
            self.cinder.get(f"qos-specs/{qos}/associate?vol_type_id={made}")
        return made


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with Host() as host:
        host.volumes.create_lvstore("cinder0", host.scratch / "cinder0.img", 8 * GIB)
        host.define(NAME)
        host.virsh("start", NAME)
        server = host.virsh("domuuid", NAME)
        (folder := host.scratch / "cinder").mkdir()
        cinder = Cinder(folder, host.paths.rpc_socket, lvstore="cinder0")
        guest, nova = host.agent(NAME), Nova(host, server)
        try:
            yield Both(host, cinder, nova, guest, server)
        finally:
            cinder.close()
            nova.close()
            guest.close()
        host.virsh("destroy", NAME)


def test_a_volume_goes_from_cinder_to_a_guest_and_back(both: Both) -> None:
    cinder, nova, guest = both.cinder, both.nova, both.guest
    volume = cinder.volume()
    with both.attached(volume) as connection:
        guest.run("echo first > /dev/sda && sync")
        snapshot = cinder.snapshot(volume)
        guest.run("echo second > /dev/sda && sync")
        cinder.post(f"volumes/{volume}/action", {"os-extend": {"new_size": 2}})
        cinder.wait(f"volumes/{volume}", "in-use")
        nova.does("extend", connection, 2 * GIB)
        guest.wait_for(f"[ $(cat /sys/block/sda/size) = {2 * GIB // 512} ]")
        assert "second" in guest.run("head -n 1 /dev/sda")
    clone = cinder.volume(snapshot_id=snapshot)
    with both.attached(clone):
        assert "first" in guest.run("head -n 1 /dev/sda")
    cinder.delete(f"snapshots/{snapshot}")
    for each in (volume, clone):
        cinder.delete(f"volumes/{each}")
    assert both.host.volumes.volumes("cinder0") == []


def test_after_a_retype_the_next_attachment_has_the_limits_of_the_new_type(both: Both) -> None:
    cinder = both.cinder
    plain = both.volume_type("plain", {})
    slow = both.volume_type("slow", {"total_iops_sec": "500"})
    slower = both.volume_type("slower", {"total_iops_sec": "100", "write_bytes_sec": "1048576"})
    alike = both.volume_type("alike", {})
    volume = cinder.volume(volume_type=plain)
    with both.attached(volume):
        assert both.limits(volume) == {}
    for of, limits in (
        (slow, {"total_iops_sec": 500}),
        (slower, {"total_iops_sec": 100, "write_bytes_sec": 1 << 20}),
        (plain, {}),
    ):
        body = {"new_type": of, "migration_policy": "never"}
        cinder.post(f"volumes/{volume}/action", {"os-retype": body})
        cinder.wait(f"volumes/{volume}")
        with both.attached(volume):
            assert both.limits(volume) == limits
            # Of one in use Cinder itself refuses it, whatever the policy.
            for other in {plain, slow, slower} - {of}:
                for policy in ("never", "on-demand"):
                    body = {"new_type": other, "migration_policy": policy}
                    with pytest.raises(Refused) as refused:
                        cinder.post(f"volumes/{volume}/action", {"os-retype": body})
                    assert "front-end qos specs cannot change" in str(refused.value)
            assert both.limits(volume) == limits
    # Where there are none before and after, one in use has its new type at once.
    with both.attached(volume):
        body = {"new_type": alike, "migration_policy": "never"}
        cinder.post(f"volumes/{volume}/action", {"os-retype": body})
        assert cinder.wait(f"volumes/{volume}", "in-use")["volume_type"] == "alike"
    cinder.delete(f"volumes/{volume}")
