"""What SPDK's own target refuses, and how the client, the hook, the gateway and the CLI take it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner, Result

from plugin.cli import main
from plugin.gateway import domaindisks
from plugin.gateway.usage import Unit, ask
from plugin.hook.rpc import Connection
from plugin.metrics.sample import sample
from pydataplane.client import Client
from pydataplane.domain.errors import ReconcileError
from pydataplane.domain.limiting import found, put
from pydataplane.domain.limits import NONE, Limits
from pydataplane.domain.model import DiskAddress, LunPlan, Plan, VolumeRef
from pydataplane.domain.reconcile import ensure, release_domain
from pydataplane.errors import (
    AGAIN,
    BAD_PARAMETERS,
    EXISTS,
    METHOD_NOT_FOUND,
    NO_DEVICE,
    RpcError,
)
from pydataplane.lvols import Lvol
from pydataplane.methods import Rpc
from pydataplane.volumes import MIB, Volumes
from tests.support.fake_spdk import FakeSpdk

A = "vm-aaaaaaaa-0000-4000-8000-000000000000"
VOLUME, OTHER = (str(UUID(int=number, version=4)) for number in (10, 11))
FAST, SLOW = Limits(total_iops_sec=3000), Limits(total_iops_sec=2000)


@pytest.fixture
def spdk(tmp_path: Path) -> Iterator[FakeSpdk]:
    target = FakeSpdk(tmp_path / "s", {"lvs0/a": VOLUME, "lvs0/b": OTHER})
    with target.serve():
        yield target


@pytest.fixture
def client(spdk: FakeSpdk) -> Client:
    return Client(spdk.path)


def lun(limits: Limits = NONE, *, target: int = 0, serial: str | None = None) -> LunPlan:
    return LunPlan(target, "sda", VolumeRef("lvs0", "a"), VOLUME, limits=limits, serial=serial)


def plan(*luns: LunPlan) -> Plan:
    return Plan("d", A, f"/run/virtlun/vhost/{A}", 1, luns)


CLIENTS: list[Callable[[Path], Rpc]] = [Client, lambda path: Connection(str(path), 20)]


@pytest.mark.parametrize("connect", CLIENTS, ids=["client", "hook"])
@pytest.mark.parametrize(
    ("method", "params", "code", "says"),
    [
        (
            "virtlun_lvol_roll_back",
            {"lvol_name": "a", "snapshot_name": "b"},
            METHOD_NOT_FOUND,
            "not possible with the target on {}: its program does not have the method "
            "virtlun_lvol_roll_back, as it is SPDK's, or an older one",
        ),
        (
            "bdev_lvol_create",
            {"lvs_name": "lvs0", "lvol_name": "c", "size_in_mib": 1, "lvol_uuid": "u"},
            BAD_PARAMETERS,
            "not possible with the target on {}: its program, SPDK's, does not know all of the "
            "parameters of bdev_lvol_create that this needs",
        ),
        (
            "bdev_lvol_create",
            {"lvs_name": "lvs0", "lvol_name": "a", "size_in_mib": 1},
            EXISTS,
            "File exists",
        ),
        ("vhost_delete_controller", {"ctrlr": "none"}, NO_DEVICE, "No such device"),
        (
            "vhost_delete_controller",
            {"ctrlr": "none", "force": False},
            BAD_PARAMETERS,
            "Invalid argument",
        ),
    ],
)
def test_an_error_has_our_targets_code_and_says_what_lacks(
    spdk: FakeSpdk,
    connect: Callable[[Path], Rpc],
    method: str,
    params: dict[str, Any],
    code: int,
    says: str,
) -> None:
    with pytest.raises(RpcError) as caught:
        connect(spdk.path).call_raw(method, **params)
    assert (caught.value.code, str(caught.value)) == (code, says.format(spdk.path))


def virtlun(spdk: FakeSpdk, *words: str) -> Result:
    return CliRunner().invoke(main, ["--socket", str(spdk.path), *words])


def test_a_command_that_it_cannot_do_says_so(spdk: FakeSpdk) -> None:
    for words, method in (
        (("volume", "rollback", "lvs0/a", "lvs0/b", "--yes"), "virtlun_lvol_roll_back"),
        (("target", "status"), "virtlun_get_status"),
        (("lvstore", "check", "lvs0"), "virtlun_lvstore_check"),
    ):
        done = virtlun(spdk, *words)
        assert done.exit_code == 1
        assert done.stderr == (
            f"Error: not possible with the target on {spdk.path}: its program does not have the "
            f"method {method}, as it is SPDK's, or an older one\n"
        )


def test_an_export_that_it_cannot_do_leaves_nothing(spdk: FakeSpdk, tmp_path: Path) -> None:
    done = virtlun(spdk, "volume", "export", "lvs0/a", str(tmp_path / "image.raw"))
    assert "its program does not have the method virtlun_export_create" in done.stderr
    assert "bdev_lvol_snapshot" in spdk.calls
    assert spdk.volumes.keys() == {"lvs0/a", "lvs0/b"}
    assert not list(tmp_path.glob("image*"))


def test_an_lvstore_is_made_on_a_file(client: Client, spdk: FakeSpdk, tmp_path: Path) -> None:
    made = Volumes(client).create_lvstore("lvs1", tmp_path / "file", 64 * MIB)
    assert made.name == "lvs1"
    created = [given for method, given in spdk.requests if method == "bdev_uring_create"]
    assert [given.get("block_size") for given in created] == [None, 512]
    assert spdk.calls.index("bdev_wait_for_examine") < spdk.calls.index("bdev_lvol_create_lvstore")


def test_a_disk_that_is_attached_twice_is_there(client: Client) -> None:
    ensure(client, plan(), whole=True)
    volume = Lvol("lvs0", "a", VOLUME, 64 * MIB, True, 512)
    assert domaindisks.add(client, plan(), lun(), volume)
    assert not domaindisks.add(client, plan(), lun(), volume)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (
            lun(serial="S"),
            "Invalid argument; SPDK's target cannot show a disk with serial: leave that out",
        ),
        (lun(target=8), "target 8: Invalid argument; SPDK's target has 0 to 7 of a VM's"),
    ],
)
def test_a_disk_that_it_cannot_show_is_refused_with_the_reason(
    client: Client, spdk: FakeSpdk, wanted: LunPlan, says: str
) -> None:
    with pytest.raises(ReconcileError, match=says):
        ensure(client, plan(wanted), whole=True)
    assert spdk.controllers == {}


def test_limits_that_are_there_are_not_set_again(client: Client, spdk: FakeSpdk) -> None:
    """The gateway sets them and then the hook does, and SPDK does so once until a VM has come."""
    for _ in range(2):
        ensure(client, plan(lun(SLOW)), whole=True)
    assert found(client, VOLUME) == SLOW
    with pytest.raises(ReconcileError, match=r"only while a VM uses it: start the VM without"):
        ensure(client, plan(lun(FAST)), whole=True)


def test_a_detach_takes_limits_before_the_disk(client: Client, spdk: FakeSpdk) -> None:
    ensure(client, plan(lun(SLOW)), whole=True)
    spdk.connected.add(A)
    domaindisks.remove(client, DiskAddress(A, 0), VOLUME)
    assert spdk.controllers == {A: {}}
    assert found(client, VOLUME) == NONE


def test_a_vm_that_has_ended_leaves_its_limits(client: Client, spdk: FakeSpdk) -> None:
    ensure(client, plan(lun(SLOW)), whole=True)
    assert release_domain(client, A) == "released"
    assert (spdk.controllers, found(client, VOLUME)) == ({}, SLOW)
    with pytest.raises(RpcError, match="only while a VM uses it") as caught:
        put(client, VOLUME, NONE)
    assert caught.value.code == AGAIN


def test_what_was_done_with_a_bdev_stands_for_what_its_guest_did(client: Client) -> None:
    ensure(client, plan(lun()), whole=True)
    (told,) = ask(client, [Unit(A, 0)]).values()
    assert (told.reads, told.read_bytes, told.read_ns) == (10, 40960, 1_000_000)
    assert (told.writes, told.written_bytes, told.write_ns) == (20, 81920, 2_000_000)
    assert ask(client, [Unit(A, 1), Unit("vm-none", 0)]) == {}


def test_top_and_doctor_go_by_what_it_tells(client: Client, spdk: FakeSpdk) -> None:
    (reactor,) = sample(client).reactors
    assert (reactor["cpu"], reactor["busy_ns"], reactor["idle_ns"]) == (1, 10, 30)
    done = virtlun(spdk, "doctor")
    assert re.search(r"^ok +target: runs: SPDK v26\.09", done.stdout, re.MULTILINE), done.stdout
