"""Namespaces of a model of an NVMe/TCP target as volumes: listed, opened while they are used."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

import pytest

from plugin.cli.doctor import arrays as doctors
from pydataplane.client import Client
from pydataplane.errors import BUSY, EXISTS, INVALID, NO_DEVICE, RpcError
from tests.support.array_pools import info, known, listed, not_had, virtlun
from tests.support.initiator import connected
from tests.support.nvme_target import NON_OPTIMIZED, NQN, WRITE, Answer, Command
from tests.support.nvme_target import Namespace as Space
from tests.support.nvme_target import NvmeTarget as Model
from tests.support.ports import free_port
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_nvme import PARAM_CHANGE, hurry, write_ten
from tests.target.test_upgrade import upgrade_ends

#: What is driven here, and cannot be without a target.
VERBS = {"virtlun_nvme_pool_create", "virtlun_nvme_pool_delete"}
MIB = 1 << 20
BLOCK = 512
IO, NOTSUP = -5, -95
ONE, SEVEN, OTHER = b"namespace-uuid-1", b"namespace-uuid-7", b"namespace-uuid-X"
HOST = "nqn.2026-11.org.virtlun:host"


def called(uuid: bytes) -> str:
    """The volume of a namespace."""
    return f"uuid.{UUID(bytes=uuid)}"


def identity(uuid: bytes, subnqn: str = NQN) -> str:
    """The UUID of that volume: no other subsystem's namespace has it, whatever it says."""
    return str(uuid5(NAMESPACE_OID, f"{subnqn}\0{called(uuid)}"))


def spaces() -> dict[int, Space]:
    """Two namespaces, one of 4096 bytes a block."""
    return {1: Space(16384, uuid=ONE), 7: Space(2048, 4096, uuid=SEVEN)}


@pytest.fixture
def target(make_target: MakeTarget) -> Target:
    """A target that may make network connections."""
    made = make_target("--network").start()
    hurry(made)
    return made


def add(target: Target, model: Model, **more: Any) -> str:
    """Adds the model as pool `nv0`, by its first port alone where no others are given; its UUID."""
    paths = [{"traddr": "127.0.0.1", "trsvcid": model.port()}]
    asked = {"name": "nv0", "paths": paths, "subnqn": NQN, **more}
    uuid: str = target.rpc("virtlun_nvme_pool_create", **asked)
    return uuid


def findings(target: Target, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, str]]:
    """What the doctor says of NVMe."""
    monkeypatch.setattr(doctors, "client", Client)
    found = doctors.namespaces(target.rpc_socket)
    return {each.what: (each.state, each.found) for each in found}


def problems(target: Target) -> str:
    """What is not restored, in one text."""
    return "; ".join(target.rpc("virtlun_get_status")["restore_problems"])


def test_namespaces_are_volumes_that_are_open_while_somebody_uses_them(target: Target) -> None:
    with Model(spaces()) as model:
        uuid = add(target, model)
        (store,) = target.rpc("bdev_lvol_get_lvstores")
        place = f"127.0.0.1:{model.port()}/{NQN}"
        assert (store["name"], store["kind"], store["base_bdev"]) == ("nv0", "nvme", place)
        assert store["uuid"] == uuid
        rows = listed(target, "nv0")
        assert list(rows) == [called(ONE), called(SEVEN)]
        assert [row["size"] for row in rows.values()] == [8 * MIB, 8 * MIB]
        assert [row["block_size"] for row in rows.values()] == [512, 4096]
        assert [row["uuid"] for row in rows.values()] == [identity(ONE), identity(SEVEN)]
        assert all(row["pool"] == uuid and not row["problem"] for row in rows.values())
        until(lambda: not model.connections, "it was listed, no more")
        closed = info(target, f"nv0/{called(SEVEN)}")["driver_specific"]["nvme"]
        assert [each["ns_data"]["id"] for each in closed] == [7]
        # One that is made there is seen by the next listing.
        model.add(3, Space(2048, uuid=OTHER))
        assert set(listed(target, "nv0")) == {called(ONE), called(SEVEN), called(OTHER)}
        target.attach("vm-1", f"nv0/{called(SEVEN)}")
        there = info(target, rows[called(SEVEN)]["uuid"])
        assert (there["aliases"], there["claimed"]) == ([f"nv0/{called(SEVEN)}"], True)
        assert there["driver_specific"]["lvol"]["lvol_store_uuid"] == uuid
        with connected(target, "vm-1") as guest:
            guest.write(2, b"x" * 4096, block_size=4096)
        assert model.namespaces[7].content[8192:12288] == b"x" * 4096
        busy = target.fails("virtlun_nvme_pool_delete", name="nv0")
        assert isinstance(busy, RpcError) and busy.code == BUSY
        assert f"its volume {called(SEVEN)} is in use" in str(busy)
        wrong = target.fails("virtlun_iscsi_pool_delete", name="nv0")
        assert "virtlun_nvme_pool_delete lets go of it" in str(wrong)
        for again in (target.kill9, target.upgrade):
            again()
            if again == target.kill9:
                target.start()
            target.restored()
            assert info(target, there["uuid"])["claimed"] is True
            assert len(listed(target, "nv0")) == 3
            with connected(target, "vm-1") as guest:
                assert guest.read(2, 1, block_size=4096) == b"x" * 4096
        target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
        until(lambda: not model.connections, "it is closed again")
        assert there["uuid"] not in json.dumps(target.configuration())
        virtlun(target, "pool", "remove", "nv0")
        assert target.rpc("bdev_lvol_get_lvstores") == []


def test_what_the_array_does_is_refused_in_a_sentence(target: Target) -> None:
    with Model(spaces()) as model:
        add(target, model)
        one = f"nv0/{called(ONE)}"
        for words, why in (
            (("create", "nv0/new", "1G"), "whose array makes namespaces"),
            (("delete", one, "--yes"), "whose array deletes namespaces"),
            (("resize", one, "1G"), "whose array gives namespaces another size"),
            (("snapshot", one, "s"), "whose array takes snapshots"),
            (("clone", one, "c"), "whose array makes clones"),
            (("rename", one, "c"), "whose array gives namespaces their identifications"),
            (("inflate", one), "whose array knows what its namespaces share"),
        ):
            said = virtlun(target, "volume", *words, code=1)
            assert why in said, said
            assert "of the pool nv0 of namespaces of an NVMe subsystem" in said, said
        for method, params in (
            ("bdev_lvol_set_read_only", {"name": one}),
            ("virtlun_lvol_set_xattr", {"name": one, "xattr_name": "a", "xattr_value": "b"}),
            ("virtlun_lvol_get_allocated_ranges", {"name": one}),
            ("bdev_lvol_grow_lvstore", {"lvs_name": "nv0"}),
        ):
            error = target.fails(method, **params)
            assert isinstance(error, RpcError) and error.code == NOTSUP, error
        missing = target.fails("bdev_get_bdevs", name=f"nv0/{called(OTHER)}")
        assert isinstance(missing, RpcError) and missing.code == NO_DEVICE
        assert listed(target, "nv0").keys() == {called(ONE), called(SEVEN)}


def test_a_number_that_another_namespace_has_now_is_not_the_volume(target: Target) -> None:
    with Model(spaces()) as model:
        add(target, model)
        target.attach("vm-1", f"nv0/{called(ONE)}")
        assert target.stop() == 0
        # The array gave the number to another one.
        model.add(1, Space(16384, uuid=OTHER))
        target.start()
        wanted = f"does not show this host the namespace of the volume {identity(ONE)}"
        until(lambda: wanted in problems(target), lambda: problems(target))
        assert set(listed(target, "nv0")) == {called(OTHER), called(SEVEN)}
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-2")
        assert not_had(target, f"nv0/{called(ONE)}", "vm-2").code == NO_DEVICE
        assert not model.seen(WRITE)
        # Nor is it another volume because its own is there by another number.
        model.add(9, Space(16384, uuid=ONE, content=bytearray(b"n" * BLOCK)))
        target.restored()
        with connected(target, "vm-1") as guest:
            assert guest.read(0, 1) == b"n" * BLOCK
            guest.write(0, b"m" * BLOCK)
        assert {each.nsid for each in model.seen(WRITE)} == {9}
        recorded = json.dumps(target.configuration())
        assert '"nsid": 9' in recorded and '"nsid": 1,' not in recorded


def path_of(target: Target) -> dict[str, Any]:
    """The one path of the volume of the first namespace."""
    (path,) = info(target, identity(ONE))["driver_specific"]["nvme"]
    return dict(path)


@pytest.mark.parametrize(
    ("nsid", "uuid", "why"),
    [(1, OTHER, "does not show this host the namespace"), (4, ONE, "its number is 4 now")],
)
def test_a_namespace_that_is_replaced_while_it_is_used_is_not_written_to(
    target: Target, nsid: int, uuid: bytes, why: str
) -> None:
    with Model(spaces()) as model:
        add(target, model)
        target.attach("vm-1", f"nv0/{called(ONE)}")
        with connected(target, "vm-1") as guest:
            guest.write(0, b"a" * BLOCK)
            model.vanish()
            kept, model.namespaces = model.namespaces, {nsid: Space(16384, uuid=uuid)}
            model.listen()
            until(lambda: why in path_of(target).get("problem", ""), lambda: path_of(target))
            guest.send("submit", cdb=write_ten(5), data_out=b"b" * BLOCK)
            time.sleep(2)
            assert len(model.seen(WRITE)) == 1
            assert not any(model.namespaces[nsid].content)
            model.namespaces = kept
            until(lambda: path_of(target)["connected"], "it is connected to anew")
            until(lambda: len(model.seen(WRITE)) == 2, "what waited is written")
            assert guest.read(0, 1) == b"a" * BLOCK


def test_what_no_volume_can_be_is_said(
    target: Target, monkeypatch: pytest.MonkeyPatch, make_target: MakeTarget
) -> None:
    with Model(spaces()) as model:
        add(target, model)
        assert findings(target, monkeypatch) == {
            "pool nv0": ("ok", f"2 namespaces at 127.0.0.1:{model.port()}/{NQN}"),
            "NVMe namespaces": ("ok", "none is used"),
        }
        model.add(2, Space(2048, uuid=OTHER, metadata=8))
        model.add(3, Space(2048, uuid=bytes(16)))
        model.add(4, Space(2048, uuid=SEVEN))
        rows = listed(target, "nv0")
        assert set(rows) == {called(ONE), called(OTHER), "nsid.3", "nsid.4", "nsid.7"}
        said = {name: row["problem"] or "" for name, row in rows.items()}
        assert "metadata of 8 bytes" in said[called(OTHER)]
        assert "neither UUID nor NGUID nor EUI-64" in said["nsid.3"]
        assert "the same identification as nsid.7" in said["nsid.4"]
        assert "the same identification as nsid.4" in said["nsid.7"]
        assert not said[called(ONE)]
        assert len({row["uuid"] for row in rows.values()}) == 5
        assert "metadata" in virtlun(target, "volume", "list", "nv0")
        state, found = findings(target, monkeypatch)["NVMe namespaces"]
        assert (state, "nv0/nsid.3: " in found) == ("warning", True)
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
        for name in (called(OTHER), "nsid.3", "nsid.7"):
            assert str(said[name]) in str(not_had(target, f"nv0/{name}"))
        assert not_had(target, f"nv0/{called(SEVEN)}").code == NO_DEVICE
        # A namespace that is a bdev by itself is not had a second time, nor the other way.
        del model.namespaces[2], model.namespaces[3], model.namespaces[4]
        target.rpc("bdev_nvme_attach_controller", name="NVME0", **model.params())
        assert not_had(target, f"nv0/{called(ONE)}").code == EXISTS
        target.rpc("bdev_nvme_detach_controller", name="NVME0")
        target.add_lun("vm-1", f"nv0/{called(ONE)}")
        made = target.rpc("bdev_nvme_attach_controller", name="NVME0", **model.params())
        assert made == ["NVME0n7"]
        # What is asked for must be.
        nobody = {"paths": [{"traddr": "127.0.0.1", "trsvcid": str(free_port())}]}
        path = {"traddr": "127.0.0.1", "trsvcid": model.port()}
        for wrong, code in (
            ({"subnqn": "iqn.x"}, INVALID),
            ({"hostnqn": "me"}, INVALID),
            ({"paths": []}, INVALID),
            ({"paths": [path] * 2}, INVALID),
            ({"paths": [path] * 9}, INVALID),
            ({"paths": [{"traddr": "storage"}]}, INVALID),
            (nobody, IO),
            ({"subnqn": "nqn.2026-11.org.virtlun:nobody"}, IO),
            ({"name": "other", "subnqn": NQN}, EXISTS),
        ):
            asked = {"name": "x", "subnqn": "nqn.2026-11.x:y", "paths": [path], **wrong}
            error = target.fails("virtlun_nvme_pool_create", **asked)
            assert isinstance(error, RpcError) and error.code == code, error
            assert "controller" not in str(error).split(":")[0], error
        # Nor is a volume made by hand of what is none.
        its = identity(SEVEN)
        one = {"uuid": its, "nsid": 7, "block_size": 4096}
        for name, pool in (("x", "nv0"), (its, "san")):
            asked = {"name": name, "pool": pool, "namespaces": [one], **model.params()}
            error = target.fails("bdev_nvme_attach_controller", **asked)
            assert isinstance(error, RpcError) and error.code == INVALID, error
        other = make_target().start()
        error = other.fails("virtlun_nvme_pool_create", name="x", subnqn=NQN, paths=[path])
        assert isinstance(error, RpcError) and error.code == NOTSUP, error
        assert "start it with --network" in str(error)
        # The list goes by what was known, and what is asked of the pool alone fails.
        model.vanish()
        assert called(ONE) in listed(target, "nv0")
        state, found = findings(target, monkeypatch)["pool nv0"]
        assert (state, "Connection refused" in found) == ("failed", True)


def test_a_pool_is_added_once_by_several_paths_and_io_goes_on_by_another(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Model(spaces(), ports=2, ana=True) as model:
        model.states[0] = NON_OPTIMIZED
        paths = [
            word for port in (0, 1) for word in ("--nvme-tcp", f"127.0.0.1:{model.port(port)}")
        ]
        words = ["pool", "add", "nv0", *paths, "--subnqn", NQN, "--hostnqn", HOST]
        for _ in range(2):  # it is safe to repeat
            assert "nvme" in virtlun(target, *words)
        assert "one of --rbd, --iscsi and --nvme-tcp" in virtlun(
            target, *words, "--rbd", "a", code=2
        )
        assert "--user of both" in virtlun(target, *words, "--user", "me", code=2)
        nameless = ["pool", "add", "x", "--nvme-tcp", "storage", "--subnqn", NQN]
        assert "is an IP address" in virtlun(target, *nameless, code=2)
        assert "give --subnqn" in virtlun(target, *nameless[:-2], code=2)
        assert "is there already" in virtlun(target, *words[:5], *words[7:], code=1)
        target.attach("vm-1", f"nv0/{called(ONE)}")
        (its,) = target.rpc("bdev_nvme_get_controllers")
        assert [each["host"]["nqn"] for each in its["ctrlrs"]] == [HOST] * 2
        until(
            lambda: all(each["state"] == "enabled" for each in its_paths(target)),
            "both are connected",
        )
        with connected(target, "vm-1") as guest:
            guest.write(0, b"a" * BLOCK)
            assert {each.port for each in model.seen(WRITE)} == {1}
            model.vanish(1)
            guest.write(1, b"b" * BLOCK)
            assert {each.port for each in model.seen(WRITE)} == {0, 1}
            state, found = findings(target, monkeypatch)["NVMe namespaces"]
            assert (state, model.port(1) in found) == ("warning", True)
            assert known(target)[0]["problem"] is None
            # The list goes by the other, too.
            assert len(listed(target, "nv0")) == 2
            target.crash()
            target.restored()
        with connected(target, "vm-1") as guest:
            assert guest.read(0, 2) == b"a" * BLOCK + b"b" * BLOCK


def its_paths(target: Target) -> list[dict[str, Any]]:
    """The paths of the one controller."""
    (its,) = target.rpc("bdev_nvme_get_controllers")
    return list(its["ctrlrs"])


def test_a_volume_grows_at_the_array_and_its_guest_is_told(target: Target) -> None:
    with Model(spaces()) as model:
        add(target, model)
        target.attach("vm-1", f"nv0/{called(ONE)}")
        with connected(target, "vm-1") as guest:
            guest.send("events")
            model.resize(32768)
            (event,) = guest.send("events", timeout_ms=60_000)["events"]
            assert (event["event"], event["reason"]) == (PARAM_CHANGE, 0x2A | 9 << 8)
            guest.ready()
            assert guest.send("capacity")["blocks"] == 32768
        assert listed(target, "nv0")[called(ONE)]["size"] == 16 * MIB


def test_an_array_that_is_away_keeps_its_volumes_waiting_and_nothing_else(target: Target) -> None:
    with Model(spaces()) as model:
        add(target, model)
        target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
        target.attach("vm-1", "m0", f"nv0/{called(ONE)}")
        with connected(target, "vm-1") as guest:
            guest.ready(target=1)
            guest.write(0, b"s" * BLOCK, target=1)
        assert target.stop() == 0
        model.vanish()
        target.start()
        assert "Connection refused" in problems(target)
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-2")
        # One that was not opened yet is not had, in one sentence.
        refused = str(not_had(target, f"nv0/{called(SEVEN)}", "vm-2"))
        assert "pool nv0: " in refused and "Connection refused" in refused, refused
        with connected(target, "vm-1") as guest:
            assert guest.read(0, 8) == bytes(4096)
            model.listen()
            target.restored()
            guest.ready(target=1)
            assert guest.read(0, 1, target=1) == b"s" * BLOCK
        # Its blocks are others now.
        assert target.stop() == 0
        model.namespaces[1] = Space(2048, 4096, uuid=ONE)
        target.start()
        until(lambda: "are 4096 bytes now, not 512" in problems(target), lambda: problems(target))


def test_what_a_volume_holds_is_not_looked_at(target: Target) -> None:
    with Model({1: Space(65536, uuid=ONE)}) as model:
        target.rpc("bdev_nvme_attach_controller", name="NVME0", **model.params())
        target.rpc("bdev_lvol_create_lvstore", bdev_name="NVME0n1", lvs_name="lvs0", cluster_sz=MIB)
        target.make_thin("v", 8)
        target.rpc("bdev_nvme_detach_controller", name="NVME0")
        add(target, model)
        target.attach("vm-1", f"nv0/{called(ONE)}")

        def stores() -> list[str]:
            return [store["name"] for store in target.rpc("bdev_lvol_get_lvstores")]

        assert stores() == ["nv0"]
        for again in (target.crash, target.upgrade, lambda: upgrade_ends(target, "held: end")):
            again()
            target.restored()
            assert stores() == ["nv0"]
            assert info(target, identity(ONE))["claimed"] is True


def test_a_pool_that_is_removed_while_a_volume_is_opened_leaves_none(target: Target) -> None:
    opens, goes_on = threading.Event(), threading.Event()

    def administering(command: Command, usual: Callable[[Command], Answer | None]) -> Answer | None:
        # Who asks for events is the one that opens it.
        if command.opcode == 0x09:
            opens.set()
            assert goes_on.wait(60)
        return usual(command)

    with Model(spaces()) as model, ThreadPoolExecutor(1) as pool:
        add(target, model)
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
        model.administering = administering
        opened = pool.submit(not_had, target, f"nv0/{called(ONE)}")
        assert opens.wait(60)
        Client(target.rpc_socket).call("virtlun_nvme_pool_delete", name="nv0")
        goes_on.set()
        assert "pool nv0 is there no more" in str(opened.result())
        assert "bdev_nvme_attach_controller" not in json.dumps(target.configuration())
        until(lambda: not model.connections, "its connections are closed")


def test_a_namespace_that_says_what_another_arrays_says_is_not_taken_for_it(
    target: Target,
) -> None:
    nqn = "nqn.2026-11.org.virtlun:other"
    with Model({4: Space(16384, uuid=ONE)}, subnqn=nqn) as other, Model(spaces()) as model:
        add(target, other, name="nv1", subnqn=nqn)
        add(target, model)
        # The gateway has them by their UUIDs.
        volume, its = f"nv0/{called(ONE)}", identity(ONE)
        assert info(target, volume)["name"] == its
        assert info(target, f"nv1/{called(ONE)}")["name"] == identity(ONE, nqn)
        target.attach("vm-1", its)
        target.attach("vm-2", identity(ONE, nqn))
        for name, array in (("vm-1", model), ("vm-2", other)):
            with connected(target, name) as guest:
                guest.write(0, name.encode().ljust(BLOCK))
            assert [each.data[:4] for each in array.seen(WRITE)] == [name.encode()]
        # Nor while its own array is silent.
        assert target.stop() == 0
        model.vanish()
        target.start()
        until(lambda: "Connection refused" in problems(target), lambda: problems(target))
        assert isinstance(target.fails("bdev_get_bdevs", name=its), RpcError)
        assert info(target, identity(ONE, nqn))["aliases"] == [f"nv1/{called(ONE)}"]
        model.listen()
        target.restored()
        assert info(target, its)["aliases"] == [volume]


def test_a_namespace_that_says_what_stands_for_a_volume_is_not_taken_for_it(
    target: Target,
) -> None:
    nqn = "nqn.2026-11.org.virtlun:other"
    volume, its = f"nv0/{called(ONE)}", identity(ONE)
    hostile = Space(16384, uuid=UUID(its).bytes)
    with Model({4: hostile}, subnqn=nqn) as other, Model(spaces()) as model:
        add(target, model)
        target.rpc("bdev_nvme_attach_controller", name="NVME0", **other.params())
        own = info(target, "NVME0n4")["uuid"]
        assert own == str(uuid5(NAMESPACE_OID, f"{nqn}\0bdev.uuid.{its}"))
        # Whoever knows the volume by its UUID has the volume: the gateway, and the CSI driver.
        assert info(target, its)["aliases"] == [volume]
        assert info(target, volume)["name"] == its
        target.attach("vm-1", its)
        with connected(target, "vm-1") as guest:
            guest.write(0, b"a" * BLOCK)
        # Nor is it had in place of the volume while its array is silent.
        model.vanish()
        for again in (target.restart, target.crash):
            again()
            until(lambda: "Connection refused" in problems(target), lambda: problems(target))
            assert info(target, own)["name"] == "NVME0n4"
            assert isinstance(target.fails("bdev_get_bdevs", name=its), RpcError)
        model.listen()
        target.restored()
        with connected(target, "vm-1") as guest:
            assert guest.read(0, 1) == b"a" * BLOCK
        assert not other.seen(WRITE) and not any(hostile.content)
        # One that an earlier release has attached stays what it was; then the volume is refused.
        target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
        assert target.stop() == 0
        record = target.state_dir / "config.json"
        assert record.read_text().count(own) == 1
        record.write_text(record.read_text().replace(own, its))
        target.start().restored()
        assert info(target, "NVME0n4")["uuid"] == its
        refused = target.fails("bdev_get_bdevs", name=volume)
        assert isinstance(refused, RpcError) and refused.code == EXISTS, refused
        assert volume in str(refused) and "NVME0n4" in str(refused), refused
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
        assert not_had(target, volume).code == EXISTS
        target.rpc("bdev_nvme_detach_controller", name="NVME0")
        target.add_lun("vm-1", its)
