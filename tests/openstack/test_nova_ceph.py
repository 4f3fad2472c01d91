"""Unmodified Nova's volumes of Ceph, by Cinder's own connections, are served by the target."""

from __future__ import annotations

from uuid import uuid4

import pytest

from tests.openstack.nova_process import Nova
from tests.support import cloud as clouds
from tests.support.ceph import POOL, lacks
from tests.support.cloud import MIB, NAME, USER

pytestmark = [
    pytest.mark.root,
    pytest.mark.vm,
    pytest.mark.nightly,
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.timeout(900),
]


def test_a_volume_of_cinders_rbd_driver() -> None:
    with clouds.cloud() as cloud:
        host, volume = cloud.host, str(uuid4())
        image = cloud.ceph.image(f"volume-{volume}", 16)
        host.define(NAME)
        host.virsh("start", NAME)
        guest, nova = host.agent(NAME), Nova(host, host.virsh("domuuid", NAME))
        connection = {
            "driver_volume_type": "rbd",
            "serial": volume,
            "data": {
                "name": f"{POOL}/{image}",
                "hosts": ["127.0.0.1"],
                "ports": [cloud.port],
                "cluster_name": "ceph",
                "auth_enabled": True,
                "auth_username": USER,
                "secret_type": "ceph",
                "secret_uuid": cloud.secret,
                "volume_id": volume,
                "discard": True,
                "qos_specs": {"total_iops_sec": "500"},
            },
        }
        try:
            nova.does("attach", connection, "sda", "scsi")
            guest.wait_for("[ -b /dev/sda ]")
            assert cloud.images == [image]
            assert "<total_iops_sec>500</total_iops_sec>" in host.virsh("dumpxml", NAME)
            (bdev,) = (
                b for b in host.client.call("bdev_get_bdevs") if "rbd" in b["driver_specific"]
            )
            limits = host.client.call("virtlun_bdev_get_limits", name=bdev["name"])
            assert limits["total_iops_sec"] == 500
            guest.run("echo of a cloud > /dev/sda && sync")
            # Cinder has made it larger.
            cloud.ceph.rbd("resize", "--no-progress", "--size", "32M", f"{POOL}/{image}")
            nova.does("extend", connection, 32 * MIB)
            guest.wait_for(f"[ $(cat /sys/block/sda/size) = {32 * MIB // 512} ]")
            nova.does("detach", connection, "sda")
            guest.wait_for("[ ! -e /sys/block/sda ]")
        finally:
            nova.close()
            guest.close()
        assert cloud.images == []
        assert cloud.ceph.content(image).startswith(b"of a cloud")
        host.virsh("destroy", NAME)
