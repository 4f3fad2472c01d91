"""The fake of the target refuses what schemas/rpc refuses, and answers what that says alone."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from pydataplane.client import Client
from pydataplane.errors import BAD_PARAMETERS, NO_DEVICE, RpcError
from tests.support.fake_socket import SocketTarget
from tests.support.fake_target import LVSTORE_UUID, FakeTarget
from tests.support.rpc_schemas import methods

ANSWERED = sorted(name for name in vars(FakeTarget) if name in methods())
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("bdev_get_bdev", {}),
    ("bdev_get_bdevs", {"nam": "x"}),
    ("bdev_get_bdevs", {"name": 1}),
    ("bdev_lvol_create", {"lvol_name": "x"}),
    ("vhost_scsi_controller_add_target", {"ctrlr": "a", "bdev_name": "b", "scsi_target_num": "0"}),
]


@pytest.fixture
def target() -> FakeTarget:
    """One that has something of each kind."""
    made = FakeTarget({"lvs0/a": "uuid-a", "lvs0/b": "uuid-b"})
    made.call_raw("vhost_create_scsi_controller", ctrlr="vm-1", delay=True)
    made.call_raw(
        "vhost_scsi_controller_add_target", ctrlr="vm-1", bdev_name="lvs0/a", scsi_target_num=0
    )
    made.connected.add("vm-1")
    made.exports.add("uuid-b")
    return made


@pytest.mark.parametrize("method", ANSWERED)
def test_it_takes_no_parameter_that_its_schema_has_not(method: str) -> None:
    signature = inspect.signature(getattr(FakeTarget, method))
    names = {
        name
        for name, each in signature.parameters.items()
        if name != "self" and each.kind is not inspect.Parameter.VAR_KEYWORD
    }
    assert names <= set(methods()[method]["params"].get("properties", {}))


@pytest.mark.parametrize(("method", "params"), WRONG)
def test_what_the_schema_refuses_is_refused(
    target: FakeTarget, tmp_path: Path, method: str, params: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError, match=method):
        target.call_raw(method, **params)
    socket = SocketTarget(tmp_path / "s")
    with socket.serve(), pytest.raises(RpcError, match=method) as refused:
        Client(socket.path).call_raw(method, **params)
    assert refused.value.code == BAD_PARAMETERS


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("bdev_get_bdevs", {}),
        ("bdev_get_iostat", {}),
        ("bdev_lvol_get_lvols", {"lvs_uuid": LVSTORE_UUID}),
        ("bdev_lvol_get_lvstores", {}),
        ("vhost_get_controllers", {}),
        ("virtlun_export_list", {}),
        ("virtlun_get_status", {}),
        ("virtlun_vhost_get_stats", {}),
        ("virtlun_lvol_get_sizes", {"names": ["lvs0/a", "none"]}),
    ],
)
def test_what_it_shows_is_what_the_schema_says(
    target: FakeTarget, method: str, params: dict[str, Any]
) -> None:
    assert target.call_raw(method, **params)


def test_an_answer_that_no_target_gives_is_found(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bdev, _) = target.bdev_get_bdevs()
    del bdev["num_blocks"]
    monkeypatch.setattr(target, "bdev_get_bdevs", lambda: [bdev])
    with pytest.raises(AssertionError, match="'num_blocks' is a required property"):
        target.call("bdev_get_bdevs")


def test_a_controller_goes_with_its_targets_unless_a_vm_is_connected(target: FakeTarget) -> None:
    with pytest.raises(RpcError, match="busy"):
        target.call("vhost_delete_controller", ctrlr="vm-1")
    target.connected.clear()
    target.call("vhost_delete_controller", ctrlr="vm-1")
    assert target.controllers == {} and target.options == {}


def test_many_calls_leave_out_what_is_not_there(target: FakeTarget) -> None:
    each = target.call_for_each("bdev_get_bdevs", ["lvs0/a", "none"], lambda name: {"name": name})
    assert list(each) == ["lvs0/a"]
    with pytest.raises(RpcError) as refused:
        target.call("bdev_get_bdevs", name="none")
    assert refused.value.code == NO_DEVICE
