"""Namespaces of an NVMe/TCP target that come, go and change, and its paths."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pydataplane.errors import BUSY, RpcError
from tests.support.nvme_target import Namespace, NvmeTarget
from tests.support.target import Target
from tests.target.conftest import MakeTarget
from tests.target.test_nvme import attach_controller


@pytest.fixture
def target(make_target: MakeTarget) -> Target:
    """A target that may make network connections."""
    return make_target("--network").start()


def names(target: Target) -> list[str]:
    """The bdevs that there are."""
    return sorted(bdev["name"] for bdev in target.rpc("bdev_get_bdevs"))


def test_a_controller_is_detached_as_a_whole_or_not(target: Target) -> None:
    spaces = {1: Namespace(2048), 7: Namespace(2048, uuid=b"namespace-uuid-7")}
    with NvmeTarget(spaces) as model:
        assert attach_controller(target, model) == ["NVME0n1", "NVME0n7"]
        target.rpc("virtlun_export_create", bdev_name="NVME0n7")
        error = target.fails("bdev_nvme_detach_controller", name="NVME0")
        assert isinstance(error, RpcError) and error.code == BUSY, error
        assert names(target) == ["NVME0n1", "NVME0n7"]


def test_paths_that_are_detached_at_the_same_time_leave_none_on_record(target: Target) -> None:
    with NvmeTarget(ports=4) as model:
        for port in range(4):
            attach_controller(target, model, port)

        def detach(port: int) -> None:
            where = {"traddr": "127.0.0.1", "trsvcid": model.port(port), "trtype": "tcp"}
            assert target.rpc("bdev_nvme_detach_controller", name="NVME0", **where) is True

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(detach, [0, 1, 3]))
        recorded = {call["method"]: call["params"] for call in target.configuration()["bdev"]}
        left = recorded["bdev_nvme_attach_controller"]
        assert left["trsvcid"] == model.port(2) and "paths" not in left
        detach(2)
        assert names(target) == []
