"""A cloud of one host: real Nova and real Cinder over a gateway and a target, and its servers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

from lxml import etree

from tests.guest.bootdisk import boot_disk
from tests.openstack.cinder_process import Cinder
from tests.openstack.nova_process import PROPERTIES
from tests.openstack.nova_services import Services
from tests.openstack.rest import Refused
from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.ports import free_port
from tests.support.wait import until

GIB, MIB = 1 << 30, 1 << 20
LVSTORE = "cinder0"
MARK_AT = 512 * MIB
"""Where a test writes to a volume that boots: behind what boots."""
CHANGE_S = 240.0
"""The longest time that Nova takes for a change of a server."""


class Cloud:
    """It, with the test guest as an image and with two flavors."""

    def __init__(self, host: Host) -> None:
        """Starts its services."""
        self.host = host
        host.volumes.create_lvstore(LVSTORE, host.scratch / "cinder0.img", 16 * GIB)
        folders = [host.scratch / name for name in ("cinder", "nova")]
        for folder in folders:
            folder.mkdir()
        port = free_port()
        url = f"http://127.0.0.1:{port}/v2.1"
        self.cinder = Cinder(
            *(folders[0], host.paths.rpc_socket, LVSTORE),
            nova=url,
            within=host.libvirtd.command(),
        )
        try:
            self.services = Services(
                folders[1], host.gateway_socket, port, self.cinder.url, self.cinder.images
            )
        except BaseException:
            self.cinder.close()
            raise
        self.api = self.services.api
        self.image = _image(self.cinder.images)
        self.flavor, self.larger = (self._flavor(memory) for memory in (256, 320))

    def _flavor(self, memory: int) -> str:
        """Makes a flavor with `memory` MiB and returns its ID."""
        body = {"name": f"memory-{memory}", "ram": memory, "vcpus": 1, "disk": 0}
        made: str = self.api.post("flavors", {"flavor": body})["flavor"]["id"]
        # The second one is the guest's command channel.
        specs = {"hw:serial_port_count": "2"}
        self.api.post(f"flavors/{made}/os-extra_specs", {"extra_specs": specs})
        return made

    def boot_volume(self) -> str:
        """Makes a volume of the image, which boots, and returns its ID."""
        return self.cinder.volume(imageRef=self.image)

    def boot(self, volume: str, *, bus: str | None = None, ends: bool = False) -> Server:
        """Makes a server that boots from a volume.

        `bus` is the disk's, by default the image's; `ends`: the volume is deleted with it.
        """
        device = {
            "boot_index": 0,
            "uuid": volume,
            "source_type": "volume",
            "destination_type": "volume",
            "delete_on_termination": ends,
        } | ({} if bus is None else {"disk_bus": bus})
        body = {"name": "guest", "flavorRef": self.flavor, "networks": "none"}
        made = self.api.post("servers", {"server": body | {"block_device_mapping_v2": [device]}})
        server = Server(self, made["server"]["id"], volume)
        server.wait("ACTIVE")
        return server

    def allocated(self, server: str) -> dict[str, int]:
        """Returns what placement has of a server's resources."""
        found: dict[str, int] = {}
        for each in self.services.placement.get(f"allocations/{server}")["allocations"].values():
            found |= each["resources"]
        return found

    def lvols(self) -> set[str]:
        """Returns the names of all volumes that Cinder could have made."""
        return {each.name for each in self.host.volumes.volumes(LVSTORE)}

    def close(self) -> None:
        """Ends its services."""
        self.services.close()
        self.cinder.close()


class Server:
    """A server of a cloud that boots from a volume."""

    def __init__(self, cloud: Cloud, uuid: str, volume: str) -> None:
        """`volume` is the ID of its first disk."""
        self.cloud, self.uuid, self.volume = cloud, uuid, volume

    def get(self) -> dict[str, Any]:
        """Returns what Nova's API tells of it."""
        found: dict[str, Any] = self.cloud.api.get(f"servers/{self.uuid}")["server"]
        return found

    def wait(self, status: str) -> None:
        """Waits until it has a status and nothing is being done with it."""

        def there() -> bool:
            found = self.get()
            if found["status"] == "ERROR" and status != "ERROR":
                raise AssertionError(f"{found['fault']}\n{self.cloud.services.errors()}")
            return found["status"] == status and found["OS-EXT-STS:task_state"] is None

        until(there, lambda: f"{status}: {self.get()}\n{self.cloud.services.errors()}", CHANGE_S)

    def act(self, action: str, status: str, words: object = None) -> None:
        """Has Nova do something with it, and waits for its status."""
        self.cloud.api.post(f"servers/{self.uuid}/action", {action: words})
        self.wait(status)

    @property
    def domain(self) -> str:
        """Its domain's name."""
        name: str = self.get()["OS-EXT-SRV-ATTR:instance_name"]
        return name

    def xml(self, *words: str) -> Any:
        """Returns the root of its domain's definition, as clients see it."""
        return etree.fromstring(self.cloud.host.virsh("dumpxml", self.domain, *words).encode())

    def disks(self, *words: str) -> dict[str, str]:
        """Returns the source of each of its disks by its serial, which is the volume's ID."""
        return {
            disk.findtext("serial", ""): next(iter(disk.find("source").attrib.values()))
            if disk.find("source").get("name") is None
            else disk.find("source").get("name")
            for disk in self.xml(*words).iter("disk")
        }

    def guest(self) -> Agent:
        """Returns the command channel into it, once it has booted."""
        port = self.xml().find("devices/serial[2]/source").get("service")
        agent = Agent(("127.0.0.1", int(port)), qemu=self.cloud.host.libvirtd.qemu_pid(self.domain))
        agent.wait_ready()
        return agent

    def attach(self, volume: str) -> None:
        """Has Nova attach a volume, and waits until Cinder has it in use."""
        body = {"volumeAttachment": {"volumeId": volume}}
        self.cloud.api.post(f"servers/{self.uuid}/os-volume_attachments", body)
        self.cloud.cinder.wait(f"volumes/{volume}", "in-use")

    def detach(self, volume: str) -> None:
        """Has Nova detach a volume, and waits until Cinder has it free."""
        self.cloud.api.call("DELETE", f"servers/{self.uuid}/os-volume_attachments/{volume}")
        self.cloud.cinder.wait(f"volumes/{volume}")

    def delete(self) -> None:
        """Deletes it, and waits until it is gone."""
        self.cloud.api.call("DELETE", f"servers/{self.uuid}")

        def gone() -> bool:
            try:
                found = self.get()
            except Refused as error:
                return str(error).startswith("404")
            if found["status"] == "ERROR":
                raise AssertionError(f"{found}\n{self.cloud.services.errors()}")
            return False

        until(gone, f"{self.uuid} to be gone", CHANGE_S)


def disk_of(guest: Agent, volume: str) -> str:
    """Returns what a guest calls the disk that has a volume's ID for its serial.

    virtio-blk's has no more than 20 characters.
    """
    files = "/sys/block/sd*/device/vpd_pg80 /sys/block/vd*/serial"
    found = guest.wait_for(f"{{ grep -ls {volume[:20]} {files} || :; }} | grep .")
    return re.sub(r"^/sys/block/(\w+)/.*$", r"/dev/\1", found.split()[0])


def _image(images: Path) -> str:
    """Has the test guest's disk be an image; returns its ID."""
    identifier, disk = str(uuid4()), boot_disk()
    shutil.copy(disk, images / identifier)
    known: dict[str, Any] = {"id": identifier, "name": "guest", "status": "active"}
    known |= {"disk_format": "raw", "container_format": "bare", "min_disk": 0, "min_ram": 0}
    known |= {"size": disk.stat().st_size, "checksum": "none", "properties": PROPERTIES}
    (images / f"{identifier}.json").write_text(json.dumps(known))
    return identifier
