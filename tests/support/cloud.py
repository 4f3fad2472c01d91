"""A cloud's host: a Ceph with keys, and a gateway that has disks over the network served."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.ceph import POOL, Ceph, cluster
from tests.support.host import Host
from tests.support.libvirtd import VirshError

NAME = "cloud-vm"
MIB = 1 << 20
USER = "cinder"
"""Of Ceph."""
CONFIG = """
[disks]
serve_network = ["rbd", "nbd"]
nbd_sockets = ["/tmp", "/var/tmp"]
"""


class Cloud:
    """A cluster, and a host whose libvirt has the key of one of its users."""

    def __init__(self, ceph: Ceph, host: Host) -> None:
        self.ceph, self.host = ceph, host
        caps = ("mon", "profile rbd", "osd", f"profile rbd pool={POOL}")
        ceph.run("ceph", "auth", "get-or-create", f"client.{USER}", *caps)
        self.key = ceph.run("ceph", "auth", "get-key", f"client.{USER}").strip()
        self.port = ceph.conf.read_text().split("mon host = v2:127.0.0.1:")[1].split()[0]
        self.secret = self.new_secret("right", self.key)

    def new_secret(self, usage: str, key: str, *, private: str = "no") -> str:
        """Makes a secret as a cloud's installer does; returns its UUID."""
        uuid, path = str(uuid4()), self.host.scratch / "secret.xml"
        path.write_text(
            f"<secret ephemeral='no' private='{private}'><uuid>{uuid}</uuid>"
            f"<usage type='ceph'><name>{usage}</name></usage></secret>"
        )
        self.host.virsh("secret-define", str(path))
        self.host.virsh("secret-set-value", uuid, "--base64", key)
        return uuid

    def disk(
        self, image: str, dev: str, more: str = "", *, secret: str = "", port: str = ""
    ) -> str:
        """Returns a <disk> as Nova's LibvirtNetVolumeDriver writes it."""
        bus = "scsi" if dev.startswith("sd") else "virtio"
        return (
            f'<disk type="network" device="disk"><driver name="qemu" type="raw" cache="none"/>'
            f'<source protocol="rbd" name="{POOL}/{image}">'
            f'<host name="127.0.0.1" port="{port or self.port}"/></source>'
            f'<auth username="{USER}"><secret type="ceph" uuid="{secret or self.secret}"/></auth>'
            f'<target bus="{bus}" dev="{dev}"/>{more}</disk>'
        )

    def attach(self, xml: str, *words: str) -> None:
        """Attaches a disk to the running guest."""
        self._device("attach-device", xml, *words)

    def detach(self, xml: str, *words: str) -> None:
        """Detaches it."""
        self._device("detach-device", xml, *words)

    def refusal(self, xml: str) -> str:
        """Returns why a disk cannot be attached."""
        with pytest.raises(VirshError) as refused:
            self.attach(xml)
        return str(refused.value)

    def _device(self, what: str, xml: str, *words: str) -> None:
        path = self.host.scratch / "device.xml"
        path.write_text(xml)
        self.host.virsh(what, NAME, str(path), "--live", *words)

    @property
    def images(self) -> list[str]:
        """What the target has open of other hosts."""
        found = self.host.client.call("bdev_get_bdevs")
        kinds = [each["driver_specific"] for each in found]
        rbd = [each["rbd"]["rbd_name"] for each in kinds if "rbd" in each]
        return sorted(rbd) + sorted(each["nbd"]["uri"] for each in kinds if "nbd" in each)

    def locks(self, image: str) -> int:
        """How many clients have an image locked."""
        return len(json.loads(self.ceph.rbd("lock", "ls", "--format", "json", f"{POOL}/{image}")))

    def places_of_the_key(self) -> list[Path]:
        """Returns the files, command lines and documents of the host in which the key is."""
        scratch, word = self.host.scratch, self.key.encode()
        files = [path for path in scratch.rglob("*") if path.is_file()]
        # libvirtd's own store of secrets, and what this test wrote.
        files = [path for path in files if "secrets" not in path.parts]
        files += list(Path("/proc").glob("[0-9]*/cmdline"))
        found = []
        for path in files:
            try:
                if path.stat().st_size < 64 * MIB and word in path.read_bytes():
                    found.append(path)
            except OSError:  # a process that has ended
                continue
        shown = self.host.virsh_direct("dumpxml", NAME, "--security-info")
        assert self.key not in shown
        return found


@contextlib.contextmanager
def cloud() -> Iterator[Cloud]:
    """A cluster and a host for the duration of a block."""
    options = ["--rbd", "--hold-sessions"]
    with (
        cluster(key=True) as ceph,
        Host(keep=True, target_options=options, more_config=CONFIG) as host,
    ):
        yield Cloud(ceph, host)
