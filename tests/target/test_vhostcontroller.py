"""The driver's controllers on the real target: repeated calls, and where their folders are."""

from __future__ import annotations

from typing import Any

import pytest

from csi.vhostcontroller import SOCKET, VhostControllers
from pydataplane.client import Client
from pydataplane.errors import TargetUnavailable
from tests.support.target import Target


class Counting(Client):
    """A client that notes the methods it calls."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.rpc_socket)
        self.called: list[str] = []

    def call_raw(self, method: str, **params: Any) -> Any:
        """Calls a method."""
        self.called.append(method)
        return super().call_raw(method, **params)


def test_each_call_may_be_repeated(target: Target) -> None:
    target.rpc("bdev_null_create", name="n0", num_blocks=8, block_size=512)
    controllers = VhostControllers(Client(target.rpc_socket))
    assert controllers.find("a") is None
    assert [controllers.create("a") for _ in range(2)] == [True, False]
    assert controllers.add("a", "n0", target=3) == 3
    found = controllers.find("a")
    assert found is not None
    assert [each["scsi_dev_num"] for each in found["backend_specific"]["scsi"]] == [3]
    assert controllers.all() == [found]
    assert (controllers.folder("a") / SOCKET).is_socket()
    for _ in range(2):
        controllers.delete("a")
    assert controllers.all() == []
    assert not controllers.folder("a").exists()


def test_each_run_of_the_target_is_asked_once_where_folders_are(target: Target) -> None:
    client = Counting(target)
    controllers = VhostControllers(client)
    first = target.vhost_dir
    for name in ("a", "b"):
        assert controllers.folder(name) == first / name
    assert client.called == ["virtlun_get_status"]
    target.stop()
    with pytest.raises(TargetUnavailable):
        controllers.folder("a")
    target.vhost_dir = first.with_name("other")
    target.start()
    client.called.clear()
    for name in ("a", "b"):
        assert controllers.folder(name) == target.vhost_dir / name
    assert client.called == ["virtlun_get_status"]
    target.kill9()
    target.vhost_dir = first
    target.start()
    assert controllers.folder("a") == first / "a"
