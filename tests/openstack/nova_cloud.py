"""A cloud: real Nova and real Cinder over each host's gateway and target, and its servers."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lxml import etree

from tests.guest.bootdisk import boot_disk
from tests.openstack.cinder_process import Cinder
from tests.openstack.keystone_process import Glance
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


def with_lvstore(host: Host, more: str = "") -> Callable[..., Cinder]:
    """Makes an lvstore on a host; returns what starts a Cinder of it.

    `more` is for cinder.conf.
    """
    host.volumes.create_lvstore(LVSTORE, host.scratch / "cinder0.img", 16 * GIB)
    return functools.partial(
        Cinder,
        rpc_socket=host.paths.rpc_socket,
        lvstore=LVSTORE,
        within=host.libvirtd.command(),
        more=more,
    )


class Cloud:
    """It, with the test guest as an image and with two flavors."""

    def __init__(self, hosts: Mapping[str, Host], start_cinder: Callable[..., Cinder]) -> None:
        """Starts its services; `hosts` by what their nova-compute is called."""
        self.hosts = hosts
        self.host = next(iter(hosts.values()))
        folder = self.host.scratch
        for name in ("cinder", "nova"):
            (folder / name).mkdir()
        port = free_port()
        sockets = {name: host.gateway_socket for name, host in hosts.items()}
        with contextlib.ExitStack() as started:
            self.glance = started.enter_context(contextlib.closing(Glance(folder)))
            nova = f"http://127.0.0.1:{port}/v2.1"
            cinder = start_cinder(folder / "cinder", nova=nova, glance=self.glance)
            self.cinder = started.enter_context(contextlib.closing(cinder))
            services = Services(folder / "nova", sockets, port, cinder.url, self.glance.url)
            self.services = started.enter_context(contextlib.closing(services))
            self.api = services.api
            self.image = self.add_image("guest")
            self.flavor, self.larger = (self._flavor(memory) for memory in (256, 320))
            self._started = started.pop_all()

    def _flavor(self, memory: int) -> str:
        """Makes a flavor with `memory` MiB and returns its ID."""
        body = {"name": f"memory-{memory}", "ram": memory, "vcpus": 1, "disk": 0}
        made: str = self.api.post("flavors", {"flavor": body})["flavor"]["id"]
        # The second one is the guest's command channel.
        specs = {"hw:serial_port_count": "2"}
        self.api.post(f"flavors/{made}/os-extra_specs", {"extra_specs": specs})
        return made

    def add_image(
        self,
        name: str,
        words: str = "",
        beside: str = "",
        properties: Mapping[str, str] = PROPERTIES,
    ) -> str:
        """Has the test guest's disk be an image; returns its ID.

        See `boot_disk` for `words` and `beside`.
        """
        data = boot_disk(words, beside).read_bytes()
        return self.glance.add(name, data, "raw", **properties)

    def boot_volume(self, image: str | None = None) -> str:
        """Makes a volume of an image that boots, and returns its ID."""
        return self.cinder.volume(imageRef=image or self.image)

    def boot(self, volume: str, *, on: str | None = None, ends: bool = False) -> Server:
        """Makes a server that boots from a volume.

        `on` is the host, by default any; `ends`: the volume is deleted with it.
        """
        device = {
            "boot_index": 0,
            "uuid": volume,
            "source_type": "volume",
            "destination_type": "volume",
            "delete_on_termination": ends,
        }
        where = {} if on is None else {"host": on}
        return self._boot(where | {"block_device_mapping_v2": [device]})

    def boot_image(self, image: str) -> Server:
        """Makes a server of an image that is of a server's volumes."""
        return self._boot({"imageRef": image})

    def _boot(self, of: dict[str, Any]) -> Server:
        body = of | {"name": "guest", "flavorRef": self.flavor, "networks": "none"}
        made = self.api.post("servers", {"server": body})
        server = Server(self, made["server"]["id"])
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
        self._started.close()


class Server:
    """A server of a cloud that boots from a volume."""

    def __init__(self, cloud: Cloud, uuid: str) -> None:
        self.cloud, self.uuid = cloud, uuid

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

    @functools.cached_property
    def volume(self) -> str:
        """The ID of the volume that it boots from."""
        return self.volumes()[0]

    def volumes(self) -> list[str]:
        """Returns the IDs of its volumes, as Nova has them: the one that it boots from is first."""
        path = f"servers/{self.uuid}/os-volume_attachments"
        found = self.cloud.api.get(path)["volumeAttachments"]
        return [each["volumeId"] for each in sorted(found, key=lambda each: str(each["device"]))]

    def act(self, action: str, status: str, words: object = None) -> None:
        """Has Nova do something with it, and waits for its status."""
        self.cloud.api.post(f"servers/{self.uuid}/action", {action: words})
        self.wait(status)

    def last_action(self) -> tuple[str, str | None]:
        """Returns what Nova was last asked to do with it, and "Error" if that failed."""
        last = self.cloud.api.get(f"servers/{self.uuid}/os-instance-actions")["instanceActions"][0]
        return last["action"], last["message"]

    @property
    def host(self) -> Host:
        """The host that Nova has it on."""
        return self.cloud.hosts[self.get()["OS-EXT-SRV-ATTR:host"]]

    @property
    def domain(self) -> str:
        """Its domain's name."""
        name: str = self.get()["OS-EXT-SRV-ATTR:instance_name"]
        return name

    def xml(self, *words: str) -> Any:
        """Returns the root of its domain's definition, as clients see it."""
        return etree.fromstring(self.host.virsh("dumpxml", self.domain, *words).encode())

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
        agent = Agent(("127.0.0.1", int(port)), qemu=self.host.libvirtd.qemu_pid(self.domain))
        agent.wait_ready()
        return agent

    def ask_attach(self, volume: str, **words: str) -> None:
        """Has Nova begin to attach a volume; `words` are more of the call's, such as its tag."""
        body = {"volumeAttachment": {"volumeId": volume} | words}
        self.cloud.api.post(f"servers/{self.uuid}/os-volume_attachments", body)

    def attach(self, volume: str, **words: str) -> None:
        """As `ask_attach`, and waits until Cinder has it in use."""
        self.ask_attach(volume, **words)
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


@contextlib.contextmanager
def each_bus(cloud: Cloud) -> Iterator[dict[str, Server]]:
    """A server of each bus that its disks can have, by its name; their volumes end with them.

    At the end of the block no volume is left, and no domain.
    """
    properties = {"scsi": PROPERTIES, "virtio": {"hw_disk_bus": "virtio"}}
    made = {}
    for bus, each in properties.items():
        image = cloud.add_image(bus, properties=each)
        made[bus] = cloud.boot(cloud.boot_volume(image), ends=True)
    yield made
    for server in made.values():
        server.delete()
    until(lambda: cloud.lvols() == set(), "the servers' volumes to be gone")
    assert cloud.host.virsh("list", "--all", "--name") == ""


def disk_of(guest: Agent, volume: str) -> str:
    """Returns what a guest calls the disk that has a volume's ID for its serial.

    virtio-blk's has no more than 20 characters.
    """
    files = "/sys/block/sd*/device/vpd_pg80 /sys/block/vd*/serial"
    found = guest.wait_for(f"{{ grep -ls {volume[:20]} {files} || :; }} | grep .")
    return re.sub(r"^/sys/block/(\w+)/.*$", r"/dev/\1", found.split()[0])
