"""A cloud's host: a Ceph with keys, and a gateway that has disks over the network served."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from tests.support.ceph import POOL, Ceph, cluster
from tests.support.host import Host
from tests.support.netdisks import MIB, NAME, NetDisks

__all__ = ["CONFIG", "MIB", "NAME", "Cloud", "cloud"]

USER = "cinder"
"""Of Ceph."""
CONFIG = """
[disks]
serve_network = ["rbd", "nbd"]
nbd_sockets = ["/tmp", "/var/tmp"]
"""


class Cloud(NetDisks):
    """A cluster, and a host whose libvirt has the key of one of its users."""

    def __init__(self, ceph: Ceph, host: Host, secret: str = "") -> None:
        """`secret` is the UUID of libvirt's secret where other hosts have it, too."""
        super().__init__(host)
        self.ceph = ceph
        caps = ("mon", "profile rbd", "osd", f"profile rbd pool={POOL}")
        ceph.run("ceph", "auth", "get-or-create", f"client.{USER}", *caps)
        self.key = ceph.run("ceph", "auth", "get-key", f"client.{USER}").strip()
        self.port = ceph.conf.read_text().split("mon host = v2:127.0.0.1:")[1].split()[0]
        self.secret = self.new_secret("right", self.key, uuid=secret)

    def new_secret(self, usage: str, key: str, *, private: str = "no", uuid: str = "") -> str:
        """Makes a secret as a cloud's installer does; returns its UUID."""
        of = f"<usage type='ceph'><name>{usage}</name></usage>"
        return self.secret_of(of, key, private, uuid)

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

    def locks(self, image: str) -> int:
        """How many clients have an image locked."""
        return len(json.loads(self.ceph.rbd("lock", "ls", "--format", "json", f"{POOL}/{image}")))

    def places_of_the_key(self) -> list[Path]:
        """Returns the files, command lines and documents of the host in which the key is."""
        return self.places_of(self.key)


@contextlib.contextmanager
def cloud(config: str = CONFIG) -> Iterator[Cloud]:
    """A cluster and a host for the duration of a block; `config` is what it has served."""
    options = ["--rbd", "--hold-sessions"]
    with (
        cluster(key=True) as ceph,
        Host(keep=True, target_options=options, more_config=config) as host,
    ):
        yield Cloud(ceph, host)
