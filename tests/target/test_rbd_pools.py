"""Pools of a real Ceph whose images are volumes: the unmodified client, locks, snapshots, hangs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from click.testing import CliRunner

from plugin.cli.main import main
from pydataplane.errors import RpcError
from pydataplane.volumes import Volumes
from tests.support.ceph import POOL, Ceph, cluster, lacks
from tests.support.encryption import KEY, KEY2
from tests.support.frozen import frozen
from tests.support.initiator import Initiator, connected
from tests.support.night import at_night
from tests.support.target import Target
from tests.support.together import (
    GO_BACK,
    TAKE,
    back,
    begin_rollback,
    cut_off_rollback,
    wanted,
)
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_cli import done
from tests.target.test_moves import digest, fill

pytestmark = [
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.timeout(300),
]

MIB = 1 << 20
BLOCK = 512
OBJECT = 4 * MIB
NOENT, BUSY, EXIST, NODEV, INVAL, NODATA, NOTSUP = -2, -16, -17, -19, -22, -61, -95
TIMEDOUT = -110


@pytest.fixture(scope="module")
def ceph() -> Iterator[Ceph]:
    """A cluster."""
    with cluster() as made:
        yield made


@pytest.fixture
def target(make_target: MakeTarget, ceph: Ceph) -> Target:
    """A target with the pool as `ceph0`."""
    return with_pool(make_target, ceph)


def with_pool(make_target: MakeTarget, ceph: Ceph) -> Target:
    """Starts a target with the pool as `ceph0`."""
    made = make_target("--rbd").start()
    made.rpc("bdev_rbd_register_cluster", name="c0", config_file=str(ceph.conf))
    made.rpc("virtlun_rbd_pool_create", name="ceph0", cluster_name="c0", pool_name=POOL)
    return made


def create(target: Target, name: str, mib: int = 8, **given: Any) -> str:
    """Makes a volume; returns its UUID."""
    asked = {"lvs_name": "ceph0", "size_in_mib": mib, "thin_provision": True, **given}
    uuid: str = target.rpc("bdev_lvol_create", lvol_name=name, **asked)
    return uuid


def info(target: Target, name: str) -> dict[str, Any]:
    """Returns what bdev_get_bdevs says of a bdev."""
    (found,) = target.rpc("bdev_get_bdevs", name=name)
    return dict(found)


def names(target: Target) -> set[str]:
    """Returns the names of all volumes of the pool."""
    return {lvol["name"] for lvol in target.rpc("bdev_lvol_get_lvols", lvs_name="ceph0")}


def owners(ceph: Ceph, image: str) -> int:
    """Returns how many clients have an image locked."""
    return len(json.loads(ceph.rbd("lock", "ls", "--format", "json", f"{POOL}/{image}")))


def guest_of(target: Target, volume: str, ctrlr: str = "vm-1", **options: Any) -> Initiator:
    """A guest whose one disk is a volume."""
    target.rpc("vhost_create_scsi_controller", ctrlr=ctrlr)
    add(target, volume, ctrlr, **options)
    guest = Initiator(target.vhost_dir / ctrlr)
    guest.send("connect")
    guest.ready()
    return guest


def add(target: Target, volume: str, ctrlr: str = "vm-1", **options: Any) -> None:
    """Gives a controller a volume as its target 0."""
    target.rpc(
        "vhost_scsi_controller_add_target",
        ctrlr=ctrlr,
        scsi_target_num=0,
        bdev_name=volume,
        **options,
    )


def refused(target: Target, code: int, words: str, method: str, **params: Any) -> None:
    """Calls a method that has to fail with that code and those words."""
    with pytest.raises(RpcError) as error:
        target.rpc(method, **params)
    assert (error.value.code, words in error.value.message) == (code, True), error.value


def test_the_unmodified_client_makes_lists_resizes_and_deletes_volumes(
    target: Target, ceph: Ceph
) -> None:
    def call(*words: str) -> Any:
        done = target.spdk_rpc(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        try:
            return json.loads(done.stdout)
        except json.JSONDecodeError:
            return done.stdout.strip()

    (store,) = call("bdev_lvol_get_lvstores")
    assert store.items() >= {"name": "ceph0", "kind": "rbd", "cluster_size": OBJECT}.items()
    assert call("bdev_lvol_get_lvstores", "-u", store["uuid"])[0]["name"] == "ceph0"
    # A size is rounded up to whole objects.
    uuid = call("bdev_lvol_create", "-l", "ceph0", "-t", "data", "13")
    (lvol,) = [each for each in call("bdev_lvol_get_lvols") if each["uuid"] == uuid]
    assert (lvol["alias"], lvol["size"], lvol["num_allocated_clusters"]) == (
        "ceph0/data",
        16 * MIB,
        0,
    )
    bdev = info(target, "ceph0/data")
    assert (bdev["name"], bdev["aliases"], bdev["num_blocks"]) == (uuid, ["ceph0/data"], 32768)
    assert bdev["driver_specific"]["lvol"]["lvol_store_uuid"] == store["uuid"]
    assert bdev == info(target, uuid)
    assert bdev in call("bdev_get_bdevs")
    call("bdev_lvol_resize", "ceph0/data", "32")
    assert json.loads(ceph.rbd("info", "--format", "json", f"{POOL}/data"))["size"] == 32 * MIB
    call("bdev_lvol_rename", uuid, "other")
    assert info(target, uuid)["aliases"] == ["ceph0/other"]
    call("bdev_lvol_delete", "ceph0/other")
    assert "other" not in ceph.rbd("ls", POOL).split()
    refused(target, NODEV, "does not exist", "bdev_lvol_delete", name="ceph0/other")


def test_images_of_others_are_volumes_as_they_are(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    ceph.image("foreign", 10, "--image-feature", "layering,exclusive-lock")
    here, there = info(target, "ceph0/foreign"), with_pool(make_target, ceph)
    assert here["num_blocks"] == 10 * MIB // BLOCK
    assert "foreign" in names(there)
    assert info(there, here["uuid"])["aliases"] == ["ceph0/foreign"]
    # One that is bdev of its own has the same identity.
    there.rpc("virtlun_rbd_pool_delete", name="ceph0")
    there.rpc(
        "bdev_rbd_create",
        name="f",
        pool_name=POOL,
        rbd_name="foreign",
        block_size=BLOCK,
        cluster_name="c0",
    )
    assert info(there, "f")["uuid"] == here["uuid"]


def test_a_volume_is_locked_as_long_as_somebody_uses_it(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    uuid = create(target, "moves")
    other = with_pool(make_target, ceph)
    assert info(other, "ceph0/moves")["uuid"] == uuid
    assert owners(ceph, "moves") == 0, "it was listed, no more"
    with guest_of(target, "ceph0/moves") as guest:
        guest.write(3, bytes([3]) * BLOCK)
        assert owners(ceph, "moves") == 1
        assert info(target, uuid)["claimed_by"] == ["target 0 of controller vm-1"]
        other.rpc("vhost_create_scsi_controller", ctrlr="vm-2")
        with pytest.raises(RpcError) as busy:
            add(other, uuid, "vm-2")
        assert (busy.value.code, "is locked by the client at" in busy.value.message) == (BUSY, True)
        refused(target, BUSY, "in use by", "bdev_lvol_delete", name=uuid)
        refused(target, BUSY, "its volume moves", "virtlun_rbd_pool_delete", name="ceph0")
        # From the other host, by way of this one.
        other.rpc("bdev_lvol_resize", name=uuid, size_in_mib=16)
        until(lambda: info(target, uuid)["num_blocks"] == 16 * MIB // BLOCK, "the new size")
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
    assert owners(ceph, "moves") == 0
    assert info(target, uuid)["claimed"] is False
    add(other, "ceph0/moves", "vm-2")
    with connected(other, "vm-2") as guest:
        assert guest.read(3, 1) == bytes([3]) * BLOCK
    with pytest.raises(RpcError):
        add(target, uuid)
    assert uuid not in json.dumps(target.configuration())


def test_several_hosts_write_to_a_volume_only_where_each_asks_for_it(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    create(target, "shared")
    other = with_pool(make_target, ceph)
    with (
        guest_of(target, "ceph0/shared", shareable=True) as here,
        guest_of(other, "ceph0/shared", shareable=True) as there,
    ):
        here.write(1, bytes([1]) * BLOCK)
        assert there.read(1, 1) == bytes([1]) * BLOCK
        there.write(2, bytes([2]) * BLOCK)
        assert here.read(2, 1) == bytes([2]) * BLOCK
        # Nobody takes it for locked who shares it.
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-2")
        with pytest.raises(RpcError) as unlocked:
            add(target, "ceph0/shared", "vm-2")
        assert "shared with other hosts, so it cannot be locked" in unlocked.value.message
    for each in (target, other):
        each.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
    export = {"method": "virtlun_export_create", "bdev_name": "ceph0/shared"}
    target.rpc(**export, shareable=True)
    refused(target, BUSY, "so it cannot be locked", **export)
    target.rpc("virtlun_export_delete", bdev_name="ceph0/shared")
    add(target, "ceph0/shared")
    assert owners(ceph, "shared") == 1
    refused(target, BUSY, "so it cannot be shared", **export, shareable=True)


def test_a_restarted_target_has_its_pools_and_volumes_again(target: Target, ceph: Ceph) -> None:
    uuid = create(target, "stays")
    target.make_lvstore()
    target.rpc("virtlun_bdev_set_limits", name="ceph0/stays", total_iops_sec=100_000)
    with guest_of(target, "ceph0/stays") as guest:
        guest.write(1, bytes([1]) * BLOCK)
        target.kill9()
    target.start()
    with connected(target, "vm-1") as guest:
        assert guest.read(1, 1) == bytes([1]) * BLOCK
    target.upgrade()
    assert info(target, uuid)["claimed"] is True
    assert info(target, uuid)["assigned_rate_limits"]["rw_ios_per_sec"] == 100_000
    target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    assert owners(ceph, "stays") == 0
    # It starts without the cluster, knows its pool, and does not wait for it.
    with frozen(ceph.pid("osd.0")), frozen(ceph.pid("mon.a")):
        target.stop()
        target.start()
        stores = target.rpc("bdev_lvol_get_lvstores")
        assert {store["name"] for store in stores} == {"ceph0", "lvs0"}
        lvs0 = target.rpc("bdev_lvol_create", lvs_name="lvs0", lvol_name="v", size_in_mib=1)
        assert lvs0 in {bdev["name"] for bdev in target.rpc("bdev_get_bdevs")}
    until(lambda: "stays" in {each["name"] for each in target.rpc("bdev_lvol_get_lvols")})


def test_a_pool_that_hangs_delays_no_other(target: Target, ceph: Ceph) -> None:
    uuid = create(target, "known")
    target.make_lvstore()
    before = names(target)
    with frozen(ceph.pid("osd.0")):
        # What was known is told.
        every = target.rpc("bdev_lvol_get_lvols")
        assert {each["name"] for each in every} == before
        target.rpc("bdev_lvol_create", lvs_name="lvs0", lvol_name="v0", size_in_mib=1)
        assert {"lvs0/v0", "ceph0/known"} <= {
            each["alias"] for each in target.rpc("bdev_lvol_get_lvols")
        }
        assert set(target.rpc("virtlun_lvol_get_sizes", names=["lvs0/v0", uuid])) == {
            "lvs0/v0",
            uuid,
        }
    assert info(target, uuid)["aliases"] == ["ceph0/known"]


@pytest.mark.nightly(reason="a call about a pool that hangs waits for 15 s")
def test_a_call_about_a_pool_that_hangs_ends(target: Target, ceph: Ceph) -> None:
    names(target)
    with frozen(ceph.pid("osd.0")):
        refused(target, TIMEDOUT, "not answered", "bdev_lvol_get_lvols", lvs_name="ceph0")


def test_what_a_pool_does_not_do_is_refused_in_a_sentence(target: Target, ceph: Ceph) -> None:
    create(target, "v")
    ceph.image("without-lock", 8, "--image-feature", "layering")
    target.rpc("accel_crypto_key_create", cipher="AES_XTS", key=KEY, key2=KEY2, name="key")
    new = {"lvs_name": "ceph0", "lvol_name": "w", "size_in_mib": 8}
    for code, words, method, params in (
        (NOTSUP, "ask for a thin one", "bdev_lvol_create", new),
        (
            NOTSUP,
            "not encrypted by the target",
            "bdev_lvol_create",
            {**new, "thin_provision": True, "key_name": "key"},
        ),
        (
            EXIST,
            "File exists",
            "bdev_lvol_create",
            {**new, "lvol_name": "v", "thin_provision": True},
        ),
        (
            INVAL,
            "has an @",
            "bdev_lvol_create",
            {**new, "lvol_name": "v@w", "thin_provision": True},
        ),
        (NOTSUP, "take a snapshot", "bdev_lvol_set_read_only", {"name": "ceph0/v"}),
        (
            NOTSUP,
            "make a clone",
            "bdev_lvol_set_parent",
            {"lvol_name": "ceph0/v", "parent_name": "x"},
        ),
        (NOTSUP, "virtlun_rbd_pool_delete", "bdev_lvol_delete_lvstore", {"lvs_name": "ceph0"}),
        (NOTSUP, "not an lvstore", "bdev_lvol_grow_lvstore", {"lvs_name": "ceph0"}),
        (NODEV, "does not exist", "bdev_lvol_resize", {"name": "ceph0/no", "size_in_mib": 8}),
        (NODEV, "there is no pool", "virtlun_rbd_pool_delete", {"name": "no"}),
        (BUSY, "the pool ceph0", "bdev_rbd_unregister_cluster", {"name": "c0"}),
        (
            EXIST,
            "with the volumes of rbd",
            "virtlun_rbd_pool_create",
            {"name": "ceph1", "cluster_name": "c0", "pool_name": POOL},
        ),
        (
            NODEV,
            "ceph osd lspools",
            "virtlun_rbd_pool_create",
            {"name": "ceph1", "cluster_name": "c0", "pool_name": "none"},
        ),
    ):
        refused(target, code, words, method, **params)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    with pytest.raises(RpcError) as unlocked:
        add(target, "ceph0/without-lock")
    assert "rbd feature enable" in unlocked.value.message


def test_snapshots_clones_and_a_way_back(target: Target, ceph: Ceph) -> None:
    create(target, "base", 16)
    volumes = Volumes(target.client)
    with guest_of(target, "ceph0/base") as guest:
        guest.write(0, bytes([1]) * BLOCK)
        (taken,) = volumes.snapshot(["ceph0/base"], "one")
        assert (taken.path, taken.snapshot, taken.parent) == ("ceph0/base@one", True, None)
        guest.write(0, bytes([2]) * BLOCK)
        guest.write(8 * MIB // BLOCK, bytes([2]) * BLOCK)
        assert volumes.volume("ceph0/base").parent == "base@one"
        # Of whole objects.
        changed = [
            list(page) for page in volumes.ranges(volumes.volume("ceph0/base").uuid, taken.uuid)
        ]
        assert changed == [[(0, OBJECT), (8 * MIB, OBJECT)]]
        assert list(volumes.ranges(taken.uuid)) == [[(0, OBJECT)]]
        pages = list(volumes.ranges(volumes.volume("ceph0/base").uuid, taken.uuid, most=1))
        assert pages == [[(0, OBJECT)], [(8 * MIB, OBJECT)]]
        refused(
            target,
            BUSY,
            "in use by target 0",
            "virtlun_lvol_roll_back",
            lvol_name="ceph0/base",
            snapshot_name=taken.uuid,
        )
    assert sum(size.allocated for size in volumes.sizes(["ceph0/base"]).values()) == 2 * OBJECT
    clone = volumes.clone("ceph0/base@one", "copy")
    assert (clone.parent, volumes.clones(taken.uuid)) == ("base@one", ["base", "copy"])
    with guest_of(target, clone.path, "vm-2") as guest:
        assert guest.read(0, 1) == bytes([1]) * BLOCK
    target.rpc("vhost_delete_controller", ctrlr="vm-2", force=True)
    with guest_of(target, taken.path, "vm-3") as guest:
        assert guest.read(0, 1) == bytes([1]) * BLOCK
        write = bytes([0x2A, *bytes(7), 1, 0])
        assert guest.cdb(write, data_out=bytes(BLOCK))["sense"][2] & 15 == 7, "DATA PROTECT"
    target.rpc("vhost_delete_controller", ctrlr="vm-3", force=True)
    # Its clone needs the snapshot still, and is flattened.
    assert volumes.inflate(clone.uuid).parent is None
    target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    volumes.roll_back("ceph0/base", "one")
    assert ceph.content("base")[: 2 * BLOCK] == bytes([1]) * BLOCK + bytes(BLOCK)
    refused(target, BUSY, "has snapshots", "bdev_lvol_delete", name="ceph0/base")
    volumes.clone("ceph0/base@one", "later")
    volumes.delete(taken.uuid)
    assert names(target) >= {"base", "copy", "later"}
    refused(target, BUSY, "is not deleted", "bdev_lvol_delete", name="ceph0/base")
    assert ceph.content("later")[:BLOCK] == bytes([1]) * BLOCK
    volumes.delete("ceph0/later")
    volumes.delete("ceph0/base")
    assert names(target).isdisjoint({"base", "base@one"})


def test_several_images_are_taken_and_go_back_together(target: Target, ceph: Ceph) -> None:
    images = ("one", "two")
    for image in images:
        create(target, image)

    def write(text: bytes) -> None:
        for image in images:
            with guest_of(target, f"ceph0/{image}") as guest:
                guest.write(0, text * BLOCK)
            target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)

    def contents() -> list[bytes]:
        return [ceph.content(image)[:1] for image in images]

    write(b"1")
    assert len(target.rpc(TAKE, **wanted("s", *images))) == len(images)
    refused(target, EXIST, "cannot be taken", TAKE, **wanted("s", *images))
    refused(target, INVAL, "named twice", TAKE, **wanted("x", "one", "one"))
    write(b"2")
    target.rpc(GO_BACK, **back("s", *images))
    assert contents() == [b"1", b"1"]
    # What a host has begun that ended is noticed, and done by the next call for one of them.
    write(b"3")
    begin_rollback(ceph, "s", *images, decided=True, token="t")
    with pytest.raises(RpcError, match="is half of each"):
        guest_of(target, "ceph0/two")
    target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    target.rpc("virtlun_lvol_roll_back", lvol_name="ceph0/two", snapshot_name="ceph0/two@s")
    assert contents() == [b"1", b"1"]
    for name in ("one@s", "two@s", *images):
        target.rpc("bdev_lvol_delete", name=f"ceph0/{name}")


def test_a_rollback_that_was_cut_off_passes_over_no_object(target: Target, ceph: Ceph) -> None:
    create(target, "one")
    create(target, "two")
    ceph.image("three", 8, "--image-feature", "layering,exclusive-lock")
    images = ("one", "two", "three")

    def contents() -> list[bytes]:
        return [ceph.content(image)[:1] for image in images]

    def begin(token: str) -> None:
        """Leaves what a host leaves that ends before librbd has rolled back an object."""
        for image in images:
            with guest_of(target, f"ceph0/{image}") as guest:
                guest.write(0, b"1" * BLOCK)
            target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
            until(lambda image=image: not owners(ceph, image), "its end")  # type: ignore[misc]
        assert contents() == [b"1"] * 3
        cut_off_rollback(ceph, "one", "s")
        cut_off_rollback(ceph, "two", "s")
        begin_rollback(ceph, "s", *images, decided=True, token=token)

    # No image has an object yet.
    target.rpc(TAKE, **wanted("s", *images))
    begin("t1")
    target.rpc("virtlun_lvol_roll_back", lvol_name="ceph0/two", snapshot_name="ceph0/two@s")
    assert contents() == [b"\0"] * 3
    begin("t2")
    target.kill9()
    target.start()
    # The first one's mark goes last.
    until(
        lambda: "virtlun.rollback" not in ceph.rbd("image-meta", "ls", f"{POOL}/one"),
        "what was begun to be done",
    )
    assert contents() == [b"\0"] * 3
    for image in images:
        checked = ceph.tried("rbd", "object-map", "check", f"{POOL}/{image}")
        assert image == "three" or checked.returncode == 0, checked.stderr
        assert "invalid" not in ceph.rbd("info", f"{POOL}/{image}")
    for name in (*(f"{image}@s" for image in images), *images):
        target.rpc("bdev_lvol_delete", name=f"ceph0/{name}")


def test_a_client_of_the_process_before_is_fenced_and_keeps_no_rollback_waiting(
    target: Target, ceph: Ceph
) -> None:
    create(target, "left")
    target.rpc("bdev_lvol_snapshot", lvol_name="ceph0/left", snapshot_name="left@s")
    with guest_of(target, "ceph0/left") as guest:
        guest.write(0, b"1" * BLOCK)
    target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    until(lambda: not owners(ceph, "left"), "its end")
    go_back = {"lvol_name": "ceph0/left", "snapshot_name": "ceph0/left@s"}
    # In place of one that was killed, which an OSD may take for alive for good.
    with ceph.opened("left"):
        refused(target, BUSY, "a client has it open", "virtlun_lvol_roll_back", **go_back)
        told = json.loads(ceph.rbd("status", "--format", "json", f"{POOL}/left"))
        (address,) = (each["address"] for each in told["watchers"])
        target.kill9()
        with (target.state_dir / "rbd-clients").open("a") as clients:
            clients.write(f"{address}\n")
        target.start()
        target.rpc("virtlun_lvol_roll_back", **go_back)
        assert address in ceph.run("ceph", "osd", "blocklist", "ls")
    assert ceph.content("left")[:1] == b"\0"
    target.rpc("bdev_lvol_delete", name="ceph0/left@s")
    target.rpc("bdev_lvol_delete", name="ceph0/left")


def test_what_is_noted_at_a_volume_is_noted_in_the_cluster(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    given = "6f0f8a2e-6f5c-4a8e-9a51-0d5a9b6c0e11"
    assert create(target, "noted", xattrs={"owner": "vm-1"}, lvol_uuid=given) == given
    other = with_pool(make_target, ceph)
    xattrs = Volumes(other.client)
    assert xattrs.xattrs(given) == {"owner": "vm-1"}
    xattrs.set_xattr("ceph0/noted", "what", "größer")
    target.rpc(
        "bdev_lvol_snapshot",
        lvol_name=given,
        snapshot_name="noted@then",
        xattrs={"of": "snapshot"},
    )
    assert xattrs.xattrs("ceph0/noted@then") == {"of": "snapshot"}
    # A clone has none of its parent's, nor its identity.
    clone = xattrs.clone("ceph0/noted@then", "copy2")
    assert (xattrs.xattrs(clone.uuid), clone.uuid != given) == ({}, True)
    assert xattrs.xattrs(given) == {"owner": "vm-1", "what": "größer"}
    xattrs.remove_xattr(given, "owner")
    assert xattrs.xattrs("ceph0/noted") == {"what": "größer"}
    refused(
        target,
        NODATA,
        "has no xattr owner",
        "virtlun_lvol_remove_xattr",
        name=given,
        xattr_name="owner",
    )
    xattrs.delete(clone.uuid)
    xattrs.delete("ceph0/noted@then")
    assert "then" not in ceph.rbd("image-meta", "ls", f"{POOL}/noted")


@pytest.mark.nightly
def test_the_command_adds_a_pool_and_makes_volumes_in_it(
    make_target: MakeTarget, ceph: Ceph
) -> None:
    target = make_target("--rbd").start()
    target.make_lvstore()

    def run(*words: str) -> Any:
        done = CliRunner().invoke(main, ["--socket", str(target.rpc_socket), *words])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout) if "--json" in words else done.stdout

    ceph.rbd("namespace", "create", f"{POOL}/tenant")
    where = ("--rbd", POOL, "--conf", str(ceph.conf), "--user", "admin")
    own = ("--keyring", str(ceph.keyring), "--namespace", "tenant")
    for _ in range(2):
        run("pool", "add", "ceph0", *where, *own)
    (lvs0, pool) = sorted(run("pool", "list", "--json"), key=lambda each: each["kind"])
    assert (lvs0["name"], pool["name"], pool["on"]) == ("lvs0", "ceph0", f"{POOL}/tenant")
    assert [each["name"] for each in run("lvstore", "list", "--json")] == ["lvs0"]
    # Nobody asked for a thin one, which it is nevertheless.
    (made,) = run("volume", "create", "ceph0/data", "10M", "--json")
    assert (made["path"], made["thin"], made["size"]) == ("ceph0/data", True, 12 * MIB)
    run("volume", "resize", "ceph0/data", "16M")
    run("volume", "snapshot", "ceph0/data", "then")
    run("volume", "clone", "ceph0/data@then", "copy")
    assert ceph.rbd("ls", f"{POOL}/tenant").split() == ["copy", "data"]
    paths = [each["path"] for each in run("volume", "list", "ceph0", "--json")]
    assert paths == ["ceph0/copy", "ceph0/data", "ceph0/data@then"]
    run("volume", "inflate", "ceph0/copy")
    run("volume", "rollback", "ceph0/data", "then", "--yes")
    for name in ("ceph0/copy", "ceph0/data@then", "ceph0/data"):
        run("volume", "delete", name, "--yes")
    socket = ["--socket", str(target.rpc_socket)]
    # No manager tells it.
    said = CliRunner().invoke(main, [*socket, "doctor"]).stdout
    assert "lvs0 with 62 MiB free, ceph0, whose room is not known" in said
    done = CliRunner().invoke(main, [*socket, "lvstore", "delete", "ceph0", "--yes"])
    assert (done.exit_code, "`virtlun pool remove` lets go of it" in done.output) == (1, True)
    run("pool", "remove", "ceph0")
    assert [each["name"] for each in run("pool", "list", "--json")] == ["lvs0"]
    refused(target, NOENT, "no cluster is registered", "bdev_rbd_get_clusters_info")


def test_a_deletion_that_was_cut_off_is_completed_and_nothing_of_others(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    uuid, used = create(target, "cut"), create(target, "used")
    for name in ("named", "at-start"):
        create(target, name)
    ceph.image("theirs")
    ceph.rbd("trash", "mv", f"{POOL}/theirs")
    other = with_pool(make_target, ceph)
    with guest_of(other, "ceph0/used", shareable=True) as guest:
        for name in ("cut", "named", "used"):
            ceph.cut_off_deletion(name)
        refused(target, BUSY, "has it open", "bdev_lvol_delete", name=used)
        guest.write(1, bytes([1]) * BLOCK)
    other.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    assert ceph.trash() == {"cut", "named", "used", "theirs"}
    for name in (uuid, used, "ceph0/named"):
        target.rpc("bdev_lvol_delete", name=name)
        refused(target, NODEV, "does not exist", "bdev_lvol_delete", name=name)
    refused(target, NODEV, "does not exist", "bdev_lvol_delete", name="ceph0/theirs")
    assert ceph.trash() == {"theirs"}
    # One of the same identity was made meanwhile: neither is left.
    create(target, "twice", lvol_uuid=uuid)
    ceph.cut_off_deletion("twice")
    create(target, "twice", lvol_uuid=uuid)
    target.rpc("bdev_lvol_delete", name=uuid)
    assert ("twice" in names(target), ceph.trash()) == (False, {"theirs"})
    ceph.cut_off_deletion("at-start")
    target.crash()
    until(lambda: ceph.trash() == {"theirs"}, "the end of the deletion")
    ceph.rbd("trash", "purge", "--no-progress", POOL)


def test_a_volume_that_another_host_has_open_is_not_moved_to_the_trash(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    uuid = create(target, "theirs")
    other = with_pool(make_target, ceph)
    with guest_of(other, "ceph0/theirs", shareable=True) as guest:
        identity = json.loads(ceph.rbd("info", "--format", "json", f"{POOL}/theirs"))["id"]
        refused(target, BUSY, "has it open", "bdev_lvol_delete", name=uuid)
        assert "theirs" in ceph.rbd("ls", POOL).split()
        # It was not even tried.
        assert f"virtlun.deleted.{identity}" not in ceph.rbd("image-meta", "ls", f"{POOL}/theirs")
        guest.write(1, bytes([1]) * BLOCK)
    other.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    target.rpc("bdev_lvol_delete", name=uuid)
    assert (ceph.trash(), "theirs" in names(target)) == (set(), False)


def test_a_fenced_client_is_replaced_by_itself(target: Target, ceph: Ceph) -> None:
    create(target, "fenced")
    with guest_of(target, "ceph0/fenced") as guest:
        guest.write(1, bytes([1]) * BLOCK)
        [lock] = json.loads(ceph.rbd("lock", "ls", "--format", "json", f"{POOL}/fenced"))
        ceph.run("ceph", "osd", "blocklist", "add", lock["address"])
        write = bytes([0x2A, *bytes(7), 1, 0])
        until(lambda: guest.cdb(write, data_out=bytes(BLOCK))["status"] != 0, "the fence")
        # Others have a new client at once; this one stays fenced until it is opened again.
        until(lambda: _succeeds(target, "bdev_lvol_get_lvols", lvs_name="ceph0"), "a new client")
        create(target, "other")
        add_other = {"ctrlr": "vm-2", "bdev_name": "ceph0/other", "scsi_target_num": 0}
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-2")
        target.rpc("vhost_scsi_controller_add_target", **add_other)
        assert guest.cdb(write, data_out=bytes(BLOCK))["status"] != 0
    target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    with guest_of(target, "ceph0/fenced") as guest:
        assert guest.read(1, 1) == bytes([1]) * BLOCK
        guest.write(1, bytes([2]) * BLOCK)
    target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    target.rpc("vhost_delete_controller", ctrlr="vm-2", force=True)
    for name in ("fenced", "other"):
        target.rpc("bdev_lvol_delete", name=f"ceph0/{name}")


def _succeeds(target: Target, method: str, **params: Any) -> bool:
    with suppress(RpcError):
        target.rpc(method, **params)
        return True
    return False


@pytest.mark.nightly
def test_many_images_are_listed_without_a_lock(target: Target, ceph: Ceph) -> None:
    made = {f"many{n}" for n in range(40)}
    for name in made:
        create(target, name, 4)
    assert made <= names(target)
    assert not target.client.call("bdev_lvol_get_lvols", lvs_name="ceph0")[0]["is_degraded"]
    assert owners(ceph, "many7") == 0


def come(target: Target, volume: str) -> None:
    """Makes a controller with a volume whose guest another host has, and which is to come."""
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-2")
    add(target, volume, "vm-2", incoming=True)


def shown(target: Target, volume: str) -> dict[str, Any]:
    """Returns what a target says of an image."""
    return dict(info(target, volume)["driver_specific"]["rbd"])


def test_a_guest_that_comes_reads_what_its_other_host_wrote_last(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    create(target, "comes")
    other = with_pool(make_target, ceph)
    with guest_of(target, "ceph0/comes") as here, ThreadPoolExecutor() as pool:
        here.write(1, bytes([1]) * BLOCK)
        come(other, "ceph0/comes")
        with connected(other, "vm-2") as there:
            reads = pool.submit(there.read, 1, 1)
            here.write(1, bytes([2]) * BLOCK)
            assert shown(other, "ceph0/comes")["locked"] is False
            target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
            assert reads.result() == bytes([2]) * BLOCK
            assert shown(other, "ceph0/comes")["locked"] is True
            there.write(1, bytes([3]) * BLOCK)
    # From now on it is as any other of that host.
    assert "incoming" not in json.dumps(other.configuration())
    other.crash()
    assert shown(other, "ceph0/comes")["locked"] is True
    with connected(other, "vm-2") as there:
        assert there.read(1, 1) == bytes([3]) * BLOCK
    # Another host has it while this one is away.
    assert other.stop() == 0
    add(target, "ceph0/comes")
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
    other.start()
    assert shown(other, "ceph0/comes")["fenced"] is True
    assert owners(ceph, "comes") == 0
    with connected(other, "vm-2") as there, pytest.raises(AssertionError):
        there.write(1, bytes([4]) * BLOCK)


def test_a_guest_that_comes_too_late_is_refused_its_disk_for_good(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    create(target, "late")
    other = with_pool(make_target, ceph)
    # Who waits takes nothing by himself while anybody has it open.
    with ceph.opened("late"):
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
        add(target, "ceph0/late")
        come(other, "ceph0/late")
        for _ in range(2):  # the second time it is another guest's
            target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
            assert owners(ceph, "late") == 0
            add(target, "ceph0/late")
        target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
        with connected(other, "vm-2") as guest:
            until(lambda: shown(other, "ceph0/late")["fenced"], "the disk to be refused")
            for _ in range(2):
                with pytest.raises(AssertionError):
                    guest.write(1, bytes([1]) * BLOCK)
        assert owners(ceph, "late") == 0
        assert ceph.content("late") == bytes(8 * MIB)
        told = "image rbd/late was locked by another host since its guest"
        until(lambda: other.words().count(told) == 1, other.words)


@pytest.mark.nightly
def test_a_guest_that_comes_paused_has_its_disk_when_the_other_host_has_it_no_more(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    create(target, "paused")
    other = with_pool(make_target, ceph)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    add(target, "ceph0/paused")
    come(other, "ceph0/paused")
    # It is the same guest's still.
    target.crash()
    assert shown(target, "ceph0/paused")["locked"] is True
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
    until(lambda: shown(other, "ceph0/paused")["locked"], "the disk to be locked")
    with pytest.raises(RpcError, match="is locked by the client at"):
        add(target, "ceph0/paused")


def test_a_guest_that_comes_is_refused_an_image_that_cannot_be_locked(
    target: Target, ceph: Ceph
) -> None:
    ceph.image("loose", 8, "--image-feature", "layering")
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-2")
    with pytest.raises(RpcError, match="lacks the feature exclusive-lock"):
        add(target, "ceph0/loose", "vm-2", incoming=True)


@pytest.mark.nightly
@pytest.mark.root
def test_a_volume_moves_to_a_pool_and_back(target: Target, ceph: Ceph) -> None:
    target.make_lvstore("lvs0", 128 * MIB)
    target.make_thin("moves", 24)
    fill(target, "lvs0/moves", 3)
    data = digest(target, "lvs0/moves")
    done(target, "volume", "move", "lvs0/moves", "ceph0/there")
    assert {"lvs0/moves"}.isdisjoint(each.path for each in Volumes(target.client).volumes())
    assert digest(target, "ceph0/there") == data
    assert "there" in ceph.rbd("ls", POOL).split()
    done(target, "volume", "move", "ceph0/there", "lvs0/back")
    assert digest(target, "lvs0/back") == data
    assert not {"there", "there.move"} & set(ceph.rbd("ls", POOL).split())


def copy_begun(target: Target, to: str, **given: Any) -> dict[str, Any]:
    """The disk of vm-1 begins to be copied; returns what names it."""
    of = {"ctrlr": "vm-1", "scsi_target_num": 0}
    target.rpc("virtlun_lun_copy_start", **of, dst_bdev_name=to, **given)
    return of


def copy_state(target: Target) -> str:
    """Returns how far the only copy is."""
    (copy,) = target.rpc("virtlun_lun_copy_check")
    return str(copy["state"])


def test_a_disk_that_is_used_is_copied_to_an_image_and_back(target: Target, ceph: Ceph) -> None:
    target.make_lvstore("lvs0", 128 * MIB)
    target.make_thin("copied", 8)
    create(target, "of-used")
    with guest_of(target, "lvs0/copied") as guest:
        for number, (to, locked) in enumerate((("ceph0/of-used", 1), ("lvs0/copied", 0)), 1):
            guest.write(number, bytes([number]) * BLOCK)
            of = copy_begun(target, to)
            until(lambda: copy_state(target) == "ready", "the copy")
            guest.write(2 + number, bytes([2 + number]) * BLOCK)
            target.rpc("virtlun_lun_copy_pivot", **of)
            assert owners(ceph, "of-used") == locked
            guest.ready()  # which is told that INQUIRY says something else of it
            guest.write(4 + number, bytes([4 + number]) * BLOCK)
        written = b"".join(bytes([number]) * BLOCK for number in (0, 1, 2, 3, 4, 5, 6))
        assert guest.read(0, 7) == written
        assert ceph.content("of-used")[: 7 * BLOCK] == b"".join(
            bytes([number]) * BLOCK for number in (0, 1, 2, 3, 4, 5, 0)
        )


@pytest.mark.parametrize(
    "end",
    ["aborted", at_night("its disk removed", id="removed"), at_night("killed", id="killed")],
)
def test_an_image_that_is_copied_to_is_closed_when_that_is_given_up(
    target: Target, ceph: Ceph, end: str
) -> None:
    target.make_lvstore("lvs0", 128 * MIB)
    target.make_thin("copied", 8)
    name = f"given-up-{end.split(maxsplit=1)[0]}"
    uuid = create(target, name)
    with guest_of(target, "lvs0/copied") as guest:
        guest.write(1, bytes([1]) * BLOCK)
        of = copy_begun(target, f"ceph0/{name}", bytes_per_second=BLOCK)
        assert owners(ceph, name) == 1
        # Whatever changes meanwhile has the open image recorded.
        target.rpc("virtlun_bdev_set_limits", name="lvs0/copied", total_iops_sec=100_000)
        assert uuid in json.dumps(target.configuration())
        if end == "aborted":
            target.rpc("virtlun_lun_copy_abort", **of)
        elif end == "killed":
            target.kill9()
            target.start()
        else:
            target.rpc("vhost_scsi_controller_remove_target", **of)
        until(lambda: owners(ceph, name) == 0, "the image is closed")
        # The next start opens it no more.
        until(lambda: uuid not in json.dumps(target.configuration()), "that is recorded")
        target.rpc("bdev_lvol_delete", name=f"ceph0/{name}")
    assert name not in ceph.rbd("ls", POOL).split()


def writes(target: Target, name: str) -> int:
    """Returns how many writes a bdev has had."""
    (bdev,) = target.rpc("bdev_get_iostat", name=name)["bdevs"]
    return int(bdev["num_write_ops"])


@pytest.mark.nightly(reason="an abort waits for 15 s")
def test_an_image_that_did_not_answer_an_abort_is_closed_when_it_does(
    target: Target, ceph: Ceph
) -> None:
    target.make_lvstore("lvs0", 128 * MIB)
    target.make_thin("copied", 8)
    uuid = create(target, "silent")
    with guest_of(target, "lvs0/copied") as guest, ThreadPoolExecutor() as pool:
        of = copy_begun(target, "ceph0/silent")
        until(lambda: copy_state(target) == "ready", "the copy")
        target.rpc("virtlun_bdev_set_limits", name="lvs0/copied", total_iops_sec=100_000)
        with frozen(ceph.pid("osd.0")):
            written = pool.submit(guest.write, 1, bytes([1]) * BLOCK)
            until(lambda: writes(target, "lvs0/copied") == 1, "the write on the source")
            refused(target, BUSY, "stays in use until", "virtlun_lun_copy_abort", **of)
            assert uuid in json.dumps(target.configuration())
        written.result()
        until(lambda: owners(ceph, "silent") == 0, "the image is closed")
        until(lambda: uuid not in json.dumps(target.configuration()), "that is recorded")
        assert target.rpc("virtlun_lun_copy_check") == []
        assert guest.read(1, 1) == bytes([1]) * BLOCK
