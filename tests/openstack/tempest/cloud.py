"""A cloud of real Keystone, Glance and Cinder over a target."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pydataplane.client import Client
from pydataplane.volumes import Volumes
from tests.openstack.cinder_process import Cinder
from tests.openstack.keystone_process import Glance, Keystone
from tests.support.target import Target

GIB = 1 << 30
SIZE = 16 * GIB
BACKENDS = """
[DEFAULT]
enabled_backends = virtlun,second

[second]
volume_driver = plugin.openstack.driver.VirtlunDriver
volume_backend_name = second
virtlun_lvstore = second
virtlun_rpc_socket = {socket}
backup_use_temp_snapshot = true
"""
"""Two of one target, which migrate volumes to each other."""


class Cloud:
    """Target, Keystone, Glance and Cinder."""

    def __init__(self, folder: Path) -> None:
        """Starts them; what they keep is in `folder`."""
        self.folder = folder
        with contextlib.ExitStack() as started:
            self.target = Target(folder)
            started.callback(self.target.end_holder)
            started.callback(self.target.stop)
            self.volumes = Volumes(Client(self.target.start().rpc_socket))
            for name in ("lvs0", "second"):
                self.volumes.create_lvstore(name, folder / f"{name}.img", SIZE)
            self.keystone = started.enter_context(contextlib.closing(Keystone(folder)))
            glance = Glance(folder, self.keystone)
            self.glance = started.enter_context(contextlib.closing(glance))
            cinder = Cinder(
                folder,
                self.target.rpc_socket,
                more=BACKENDS.format(socket=self.target.rpc_socket),
                keystone=self.keystone,
                glance=self.glance,
            )
            self.cinder = started.enter_context(contextlib.closing(cinder))
            url = f"http://127.0.0.1:{self.cinder.port}/v3/$(project_id)s"
            self.keystone.add_service("cinder", "block-storage", url)
            self._started = started.pop_all()

    def close(self) -> None:
        """Ends all."""
        self._started.close()
