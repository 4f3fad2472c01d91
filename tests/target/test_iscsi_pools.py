"""LUNs of a real iSCSI target as volumes: listed, opened while they are used, all else refused."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plugin.cli.doctor import arrays as doctors
from plugin.config import Config
from pydataplane import initiator
from pydataplane.client import Client
from pydataplane.errors import BUSY, EXISTS, INVALID, NO_DEVICE, RpcError
from tests.support import fake_iscsi
from tests.support.array_pools import info, known, listed, not_had, virtlun
from tests.support.fake_iscsi import Answer, Command, FakeIscsi, Lose
from tests.support.initiator import connected
from tests.support.ports import free_port
from tests.support.target import Target
from tests.support.tgt import IQN, Tgt, lacks
from tests.support.wait import until
from tests.target.conftest import MakeTarget

pytestmark = pytest.mark.skipif(bool(lacks()), reason=f"not installed: {lacks()}")

#: What is driven here, and cannot be without a target.
VERBS = {"virtlun_iscsi_pool_create", "virtlun_iscsi_pool_delete"}
INITIATOR = "iqn.2026-11.org.virtlun:host"
MIB = 1 << 20
BLOCK = 512
IO, NOTSUP = -5, -95


@pytest.fixture
def tgt(scratch: Path) -> Iterator[Tgt]:
    """An iSCSI target with two disks, one of 4096 bytes a block."""
    with Tgt(scratch) as made:
        made.disk(1)
        made.disk(300, size=16 * MIB, blocksize="4096")
        yield made


@pytest.fixture
def target(make_target: MakeTarget, tgt: Tgt) -> Target:
    """A target with those as pool `san`."""
    made = make_target("--iscsi").start()
    add(made, tgt)
    return made


def add(target: Target, tgt: Tgt, name: str = "san", **more: Any) -> str:
    """Adds the pool; returns its UUID."""
    portal = f"127.0.0.1:{tgt.port}"
    asked = {"portal": portal, "target_iqn": IQN, "initiator_iqn": INITIATOR, **more}
    uuid: str = target.rpc("virtlun_iscsi_pool_create", name=name, **asked)
    return uuid


def use(target: Target, volume: str, ctrlr: str = "vm-1") -> None:
    """Gives a new controller a volume."""
    target.attach(ctrlr, volume)


def test_luns_are_volumes_that_are_open_while_somebody_uses_them(target: Target, tgt: Tgt) -> None:
    (store,) = target.rpc("bdev_lvol_get_lvstores")
    place = f"127.0.0.1:{tgt.port}/{IQN}"
    assert (store["name"], store["kind"], store["base_bdev"]) == ("san", "iscsi", place)
    rows = listed(target, "san")
    assert list(rows) == ["lun-1", "lun-300"]
    assert [row["size"] for row in rows.values()] == [8 * MIB, 16 * MIB]
    assert [row["block_size"] for row in rows.values()] == [512, 4096]
    assert all(row["pool"] == store["uuid"] and not row["problem"] for row in rows.values())
    until(lambda: tgt.sessions() == 0, "it was listed, no more")
    # One that is made there is seen by the next listing.
    tgt.disk(5, size=4 * MIB)
    assert set(listed(target, "san")) == {"lun-1", "lun-5", "lun-300"}
    uuid = rows["lun-300"]["uuid"]
    assert info(target, "san/lun-300")["driver_specific"]["iscsi"]["url"] == tgt.url(300)
    use(target, "san/lun-300")
    there = info(target, uuid)
    assert (there["aliases"], there["claimed"]) == (["san/lun-300"], True)
    assert there["driver_specific"]["lvol"]["lvol_store_uuid"] == store["uuid"]
    assert tgt.sessions() == 1
    with connected(target, "vm-1") as guest:
        guest.write(2, b"x" * 4096, block_size=4096)
    assert tgt.luns[300][0].read_bytes()[8192:12288] == b"x" * 4096
    busy = target.fails("virtlun_iscsi_pool_delete", name="san")
    assert isinstance(busy, RpcError) and busy.code == BUSY
    assert "its volume lun-300 is in use" in str(busy)
    for again in (target.kill9, target.upgrade):
        again()
        if again == target.kill9:
            target.start()
        assert info(target, "san/lun-300")["uuid"] == uuid
        assert info(target, uuid)["claimed"] is True
        assert set(listed(target, "san")) == {"lun-1", "lun-5", "lun-300"}
    target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    until(lambda: tgt.sessions() == 0, "it is closed again")
    assert uuid not in json.dumps(target.configuration())
    virtlun(target, "pool", "remove", "san")
    assert target.rpc("bdev_lvol_get_lvstores") == []
    assert tgt.luns[300][0].exists()


def test_what_the_array_does_is_refused_in_a_sentence(target: Target, tgt: Tgt) -> None:
    for words, why in (
        (("create", "san/new", "1G"), "whose array makes LUNs"),
        (("delete", "san/lun-1", "--yes"), "whose array deletes LUNs"),
        (("resize", "san/lun-1", "1G"), "whose array gives LUNs another size"),
        (("snapshot", "san/lun-1", "s"), "whose array takes snapshots"),
        (("clone", "san/lun-1", "c"), "whose array makes clones"),
        (("rename", "san/lun-1", "c"), "whose array gives LUNs their numbers"),
        (("inflate", "san/lun-1"), "whose array knows what its LUNs share"),
    ):
        said = virtlun(target, "volume", *words, code=1)
        assert why in said and "of the pool san of LUNs of an iSCSI target" in said, said
    for method, params in (
        ("bdev_lvol_set_read_only", {"name": "san/lun-1"}),
        ("virtlun_lvol_set_xattr", {"name": "san/lun-1", "xattr_name": "a", "xattr_value": "b"}),
        ("virtlun_lvol_get_allocated_ranges", {"name": "san/lun-1"}),
        ("bdev_lvol_grow_lvstore", {"lvs_name": "san"}),
    ):
        error = target.fails(method, **params)
        assert isinstance(error, RpcError) and error.code == NOTSUP, error
    assert target.rpc("virtlun_lvol_get_xattrs", name="san/lun-1") == {}
    missing = target.fails("bdev_get_bdevs", name="san/lun-9")
    assert isinstance(missing, RpcError) and missing.code == NO_DEVICE
    assert listed(target, "san").keys() == {"lun-1", "lun-300"}
    assert tgt.luns[1][0].stat().st_size == 8 * MIB


def test_a_pool_is_added_once_with_a_password_that_nobody_sees(
    make_target: MakeTarget, tgt: Tgt
) -> None:
    secret, user = "open?sesame@/12", "ali"
    tgt.require(user, secret)
    target = make_target("--iscsi").start()
    words = ["pool", "add", "san", "--iscsi", f"127.0.0.1:{tgt.port},{IQN}"]
    said = virtlun(target, *words, code=1)
    assert "pool san: " in said and "cannot be logged in to" in said
    login = ["--user", user, "--password-file", "-"]
    said = virtlun(target, *words, *login, code=1, given="wrong-one-12\n")
    assert "Authentication failure" in said and "wrong-one" not in said
    assert "give --user and --password-file together" in virtlun(
        target, *words, "--user", user, code=2
    )
    assert "one of --rbd, --iscsi and --nvme-tcp" in virtlun(target, *words, "--rbd", "a", code=2)
    for _ in range(2):  # it is safe to repeat
        said = virtlun(target, *words, *login, given=f"{secret}\n")
        assert "iscsi" in said and secret not in said
    error = target.fails(
        "virtlun_iscsi_pool_create",
        name="other",
        portal="localhost",
        target_iqn=IQN,
        initiator_iqn=INITIATOR,
    )
    assert isinstance(error, RpcError) and error.code == EXISTS, error
    use(target, "san/lun-1")
    uuid = info(target, "san/lun-1")["uuid"]
    saved = target.spdk_rpc("save_config").stdout
    files = [path for path in target.directory.rglob("*") if path.is_file()]
    having = [path for path in files if secret.encode() in path.read_bytes()]
    assert [path.name for path in having] == ["config.json"]
    assert having[0].read_text().count(json.dumps(secret)) == 1
    assert not stat.S_IMODE(having[0].stat().st_mode) & 0o077
    for text in (saved, str(target.rpc("bdev_get_bdevs")), target.words()):
        assert secret not in text
    assert f"Initiator: {initiator.own_name()} " in tgt.admin("target", "show")
    target.crash()
    assert info(target, uuid)["claimed"] is True
    assert secret not in target.words()


def test_what_no_volume_can_be_is_said(
    target: Target, tgt: Tgt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctors, "client", Client)

    def doctor() -> dict[str, tuple[str, str]]:
        found = doctors.luns(target.rpc_socket, Config())
        return {each.what: (each.state, each.found) for each in found}

    assert doctor()["pool san"] == ("ok", f"2 LUNs at 127.0.0.1:{tgt.port}/{IQN}")
    tgt.disk(6, blocksize="1024")
    said = "a block is 512 or 4096 bytes, not 1024"
    rows = listed(target, "san")
    assert said in rows["lun-6"]["problem"] and rows["lun-6"]["size"] == 0
    assert said in virtlun(target, "volume", "list", "san")
    state, found = doctor()["LUNs of iSCSI targets"]
    assert (state, "san/lun-6: " in found) == ("warning", True)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    error = target.fails(
        "vhost_scsi_controller_add_target", ctrlr="vm-1", scsi_target_num=0, bdev_name="san/lun-6"
    )
    assert isinstance(error, RpcError) and said in str(error), error
    # One LUN under two names is not written to twice.
    url = {"url": tgt.url(1), "initiator_iqn": INITIATOR}
    target.rpc("bdev_iscsi_create", name="i0", **url)
    error = target.fails(
        "vhost_scsi_controller_add_target", ctrlr="vm-1", scsi_target_num=0, bdev_name="san/lun-1"
    )
    assert isinstance(error, RpcError) and "is written to as bdev i0" in str(error), error
    for wrong in (
        {"portal": "a b"},
        {"initiator_iqn": ""},
        {"user": "ali"},
        {"target_iqn": ""},
    ):
        asked = {"portal": "h", "target_iqn": "t", "initiator_iqn": "i", **wrong}
        error = target.fails("virtlun_iscsi_pool_create", name="x", **asked)
        assert isinstance(error, RpcError) and error.code == INVALID, error
    nobody = {"portal": f"127.0.0.1:{free_port()}", "target_iqn": "t", "initiator_iqn": "i"}
    error = target.fails("virtlun_iscsi_pool_create", name="x", **nobody)
    assert isinstance(error, RpcError) and error.code == IO, error
    target.rpc("bdev_iscsi_delete", name="i0")
    # Nor is what a guest writes looked at for an lvstore.
    use(target, "san/lun-1", "vm-2")
    error = target.fails("bdev_iscsi_create", name="i0", **url)
    assert isinstance(error, RpcError) and error.code == BUSY, error
    assert "by a guest, and what a guest writes is not looked at" in str(error)
    # Those that share it have one source.
    error = target.fails("bdev_iscsi_create", name="i0", guest_disk=True, shared=True, **url)
    assert isinstance(error, RpcError) and "is written to as bdev" in str(error), error
    asked = {"name": "i0", "pool": "san", **url}
    error = target.fails("bdev_iscsi_create", **asked)
    assert isinstance(error, RpcError) and error.code == INVALID, error
    # The list goes by what was known, and what is asked of the pool alone fails.
    tgt.kill9()
    assert "lun-300" in listed(target, "san")
    state, found = doctor()["pool san"]
    assert (state, "Connection refused" in found) == ("failed", True)


def fake_pool(target: Target, fake: FakeIscsi) -> dict[str, str]:
    """Has the fake's LUNs as the pool `san`; returns their UUIDs."""
    asked = {"portal": fake.portal, "target_iqn": fake_iscsi.IQN}
    target.rpc("virtlun_iscsi_pool_create", name="san", initiator_iqn=INITIATOR, **asked)
    return {row["name"]: row["uuid"] for row in known(target)}


def test_luns_that_cannot_be_told_from_each_other_are_nobodys(make_target: MakeTarget) -> None:
    target = make_target("--iscsi").start()
    with FakeIscsi(luns=(1, 3, 5)) as fake:
        before = fake_pool(target, fake)
        fake.answering = lambda command, usual: usual(
            replace(command, lun=1) if command.lun == 5 else command
        )
        rows = {row["name"]: row for row in known(target)}
        for name, other in (("lun-1", "lun-5"), ("lun-5", "lun-1")):
            assert f"the same identification as {other}" in rows[name]["problem"]
        assert not rows["lun-3"]["problem"]
        assert len({row["uuid"] for row in rows.values()}) == 3
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
        for name in ("san/lun-5", "san/lun-1", rows["lun-5"]["uuid"]):
            assert "the same identification" in str(not_had(target, name))
        assert not_had(target, before["lun-1"]).code == NO_DEVICE
        assert not fake.opcodes(0x8A, 0x88)


def test_a_number_that_another_lun_has_now_is_not_the_volume(make_target: MakeTarget) -> None:
    target = make_target("--iscsi").start()
    with FakeIscsi() as fake:
        before = fake_pool(target, fake)
        fake.identity = b"\x60another"
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
        assert not_had(target, before["lun-1"]).code == NO_DEVICE
        assert known(target)[0]["uuid"] != before["lun-1"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_lun_that_hangs_or_ends_the_session_is_the_only_one_that_is_not_had(
    make_target: MakeTarget, ends: bool
) -> None:
    target = make_target("--iscsi").start()

    def answering(command: Command, usual: Callable[[Command], Answer]) -> Answer | bytes:
        if command.lun != 2:
            return usual(command)
        if ends:
            raise Lose
        return b""

    with FakeIscsi(luns=(1, 2, 3)) as fake:
        fake.answering = answering
        asked = {"portal": fake.portal, "target_iqn": fake_iscsi.IQN}
        target.rpc("virtlun_iscsi_pool_create", name="san", initiator_iqn=INITIATOR, **asked)
        problems = {row["name"]: row["problem"] for row in known(target)}
        assert problems["lun-1"] is None and problems["lun-3"] is None
        said = "the connection to the target is lost" if ends else "has not answered"
        assert said in problems["lun-2"]
        # One that is opened is the only one that is asked.
        fake.log.clear()
        use(target, "san/lun-3")
        assert {command.lun for command in fake.log} == {3}
        target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)


def test_a_volume_stays_itself_while_its_lun_does_not_say_what_it_is(
    make_target: MakeTarget,
) -> None:
    target = make_target("--iscsi").start()
    with FakeIscsi(luns=(1, 3)) as fake:
        asked = {"portal": fake.portal, "target_iqn": fake_iscsi.IQN}
        target.rpc("virtlun_iscsi_pool_create", name="san", initiator_iqn=INITIATOR, **asked)
        before = {row["name"]: row["uuid"] for row in known(target)}
        use(target, "san/lun-3")
        fake.luns = (1,)  # it is unmapped, or not told for now
        (there,) = [each for each in known(target) if each["uuid"] == before["lun-3"]]
        assert (there["name"], there["lvstore"]) == ("lun-3", "san")
        fake.luns = (1, 3)
        fake.answering = lambda command, usual: (
            Answer() if command.lun == 1 and command.opcode == 0x9E else usual(command)
        )
        row = {each["name"]: each for each in known(target)}["lun-1"]
        assert (row["uuid"], row["problem"]) == (before["lun-1"], "it tells no capacity")
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-2")
        error = target.fails(
            "vhost_scsi_controller_add_target",
            ctrlr="vm-2",
            scsi_target_num=0,
            bdev_name=before["lun-1"],
        )
        assert isinstance(error, RpcError) and "it tells no capacity" in str(error), error
        target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)


def test_a_pool_that_is_removed_while_a_volume_is_opened_leaves_none(
    make_target: MakeTarget,
) -> None:
    target = make_target("--iscsi").start()
    opens, goes_on = threading.Event(), threading.Event()

    def answering(command: Command, usual: Callable[[Command], Answer]) -> Answer:
        # The second that asks is the one that opens it.
        if command.opcode == 0 and len({each.isid for each in fake.log}) == 2:
            opens.set()
            assert goes_on.wait(60)
        return usual(command)

    with FakeIscsi() as fake, ThreadPoolExecutor(1) as pool:
        asked = {"portal": fake.portal, "target_iqn": fake_iscsi.IQN}
        target.rpc("virtlun_iscsi_pool_create", name="san", initiator_iqn=INITIATOR, **asked)
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
        fake.log.clear()
        fake.answering = answering
        lun = {"ctrlr": "vm-1", "scsi_target_num": 0, "bdev_name": "san/lun-1"}
        opened = pool.submit(target.fails, "vhost_scsi_controller_add_target", **lun)
        assert opens.wait(60)
        Client(target.rpc_socket).call("virtlun_iscsi_pool_delete", name="san")
        goes_on.set()
        error = opened.result()
        assert isinstance(error, RpcError) and "pool san is there no more" in str(error), error
        assert "bdev_iscsi_create" not in json.dumps(target.configuration())
