"""Two hosts of a cloud over one cluster of Ceph, and Cinder with its own driver for that.

Each host has its libvirtd, target and gateway, and the gateways have the disks over the network
served by the targets. Hosts are told apart by names: all are on this machine.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.openstack.cinder_process import Cinder
from tests.openstack.nova_cloud import Cloud
from tests.support.ceph import POOL, cluster
from tests.support.ceph_pair import IDS
from tests.support.cloud import CONFIG, USER
from tests.support.cloud import Cloud as User
from tests.support.host import Host

FIRST, SECOND = "compute1", "compute2"
WATCH_TIMEOUT_S = 5
"""When the cluster gives a host up."""
CINDER = """
[DEFAULT]
enabled_backends = ceph

[ceph]
volume_driver = cinder.volume.drivers.rbd.RBDDriver
volume_backend_name = ceph
rbd_pool = {pool}
rbd_user = {user}
rbd_ceph_conf = {conf}
rbd_secret_uuid = {secret}
"""
BINDINGS = Path("/usr/lib/python3/dist-packages")
"""Where Debian has Ceph's modules for Python."""


@dataclass
class Hosts:
    """The cloud, and its cluster as a user of it."""

    cloud: Cloud
    user: User


@contextlib.contextmanager
def hosts() -> Iterator[Hosts]:
    """They, for the duration of a block."""
    options = ["--rbd", "--hold-sessions"]
    with contextlib.ExitStack() as started:
        ceph = started.enter_context(cluster(key=True, watch_timeout_s=WATCH_TIMEOUT_S))
        made = {
            name: started.enter_context(
                Host(
                    keep=True,
                    host_uuid=uuid,
                    hostname=name,
                    target_options=options,
                    more_config=CONFIG,
                )
            )
            for name, uuid in zip((FIRST, SECOND), IDS, strict=True)
        }
        user = User(ceph, made[FIRST])
        User(ceph, made[SECOND], user.secret)
        with ceph.keyring.open("a") as file:
            file.write(f"[client.{USER}]\nkey = {user.key}\n")
        start = functools.partial(
            Cinder,
            rpc_socket=made[FIRST].paths.rpc_socket,
            more=CINDER.format(pool=POOL, user=USER, conf=ceph.conf, secret=user.secret),
            modules=_bindings(made[FIRST].scratch),
        )
        cloud = Cloud(made, start)
        started.callback(cloud.close)
        yield Hosts(cloud, user)


def _bindings(folder: Path) -> Path:
    """Returns a folder that has Ceph's modules for Python and no others of the system's."""
    modules = folder / "modules"
    modules.mkdir()
    for name in ("rados", "rbd"):
        (found,) = BINDINGS.glob(f"{name}.cpython-*.so")
        (modules / found.name).symlink_to(found)
    return modules
