"""Several images of a real Ceph at once: snapshots of one instant, and ways back, all or none."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from pydataplane.errors import RpcError, TargetUnavailable
from tests.support.ceph import POOL, Ceph, cluster, lacks
from tests.support.target import Target
from tests.support.together import GO_BACK, TAKE, back, begin_rollback, identity, wanted
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_rbd_pools import (
    BLOCK,
    BUSY,
    EXIST,
    INVAL,
    NOTSUP,
    create,
    guest_of,
    names,
    refused,
    with_pool,
)

pytestmark = [
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.timeout(300),
    pytest.mark.nightly(reason="by day test_rbd_pools.py has several images in one call"),
]


@pytest.fixture(scope="module")
def ceph() -> Iterator[Ceph]:
    """A cluster."""
    with cluster() as made:
        yield made


@pytest.fixture
def target(make_target: MakeTarget, ceph: Ceph) -> Target:
    """A target with the pool as `ceph0`."""
    return with_pool(make_target, ceph)


def marks(ceph: Ceph, *images: str) -> int:
    """Returns how much metadata of calls that are not over there is."""
    listed = (ceph.rbd("image-meta", "ls", f"{POOL}/{image}") for image in images)
    return sum(text.count("virtlun.together") + text.count("virtlun.rollback") for text in listed)


def remove(target: Target, *names: str) -> None:
    """Deletes volumes."""
    for name in names:
        target.rpc("bdev_lvol_delete", name=f"ceph0/{name}")


def test_snapshots_of_several_images_are_of_one_instant(target: Target, ceph: Ceph) -> None:
    images = ("data", "log", "idle")
    for image in images:
        create(target, image)
    stop, written = threading.Event(), [0]
    with ExitStack() as stack:
        data, log = (
            stack.enter_context(guest_of(target, f"ceph0/{image}", f"vm-{image}"))
            for image in images[:2]
        )

        def count() -> None:
            """Writes a number to the one, then to the other, and so on."""
            while not stop.is_set():
                written[0] += 1
                for guest in (data, log):
                    guest.write(0, written[0].to_bytes(8, "little") * (BLOCK // 8))

        with ThreadPoolExecutor() as pool:
            counting = pool.submit(count)
            for number in range(2):
                seen = written[0]
                until(lambda seen=seen: written[0] > seen + 3 or counting.done(), "writes")  # type: ignore[misc]
                # The one that is written first is taken first, and last.
                order = images if number % 2 else images[::-1]
                uuids = target.rpc(TAKE, **wanted(f"s{number}", *order))
                assert [
                    target.rpc("bdev_get_bdevs", name=each)[0]["aliases"] for each in uuids
                ] == [[f"ceph0/{image}@s{number}"] for image in order]
            stop.set()
            counting.result()
    for number in range(2):
        first, second = (
            int.from_bytes(ceph.content(f"{image}@s{number}")[:8], "little") for image in images[:2]
        )
        assert first > 0 and first - second in (0, 1), (number, first, second)
    assert marks(ceph, *images) == 0
    refused(target, EXIST, "cannot be taken", TAKE, **wanted("s1", "data", "idle"))
    refused(target, EXIST, "cannot be taken", TAKE, **wanted("s1", "idle", "data"))
    refused(target, INVAL, "named twice", TAKE, **wanted("x", "data", "data"))
    refused(target, BUSY, "in use by", GO_BACK, **back("s1", "idle", "data"))
    for image in images[:2]:
        target.rpc("vhost_delete_controller", ctrlr=f"vm-{image}", force=True)
    before = ceph.content("data@s0")[:BLOCK]
    assert ceph.content("data")[:BLOCK] != before
    target.rpc(GO_BACK, **back("s0", *images))
    assert ceph.content("data")[:BLOCK] == before
    assert ceph.content("log")[:BLOCK] == ceph.content("log@s0")[:BLOCK]
    assert marks(ceph, *images) == 0
    remove(target, *(f"{image}@s{number}" for image in images for number in range(2)), *images)


def test_what_another_host_may_write_to_is_no_part_of_it(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    for image in ("ours", "theirs", "all"):
        create(target, image)
    target.make_lvstore()
    target.rpc("bdev_lvol_create", lvs_name="lvs0", lvol_name="v", size_in_mib=1)
    other = with_pool(make_target, ceph)
    with (
        guest_of(target, "ceph0/ours"),
        guest_of(other, "ceph0/theirs"),
        guest_of(target, "ceph0/all", "vm-2", shareable=True),
    ):
        refused(target, BUSY, "is locked by the client at", TAKE, **wanted("s", "ours", "theirs"))
        refused(target, NOTSUP, "shared with other hosts", TAKE, **wanted("s", "ours", "all"))
        refused(target, BUSY, "has it open", GO_BACK, **back_of_none(other, "theirs", target))
        mixed = wanted("s", "ours")["snapshots"] + [{"lvol_name": "lvs0/v", "snapshot_name": "v@s"}]
        refused(target, INVAL, "is not of the pool ceph0", TAKE, snapshots=mixed)
        assert not any(name.endswith("@s") for name in names(target))
        # Where they both are.
        target.rpc("vhost_delete_controller", ctrlr="vm-2", force=True)
        target.rpc(TAKE, **wanted("s", "ours", "all"))
    for each in (target, other):
        each.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    remove(target, "ours@s", "all@s", "theirs@then", "ours", "theirs", "all")


def back_of_none(other: Target, image: str, target: Target) -> dict[str, Any]:
    """Takes a snapshot by the host that has an image; returns how another would go back to it."""
    other.rpc("bdev_lvol_snapshot", lvol_name=f"ceph0/{image}", snapshot_name=f"{image}@then")
    assert f"{image}@then" in names(target)
    return back("then", image)


def test_snapshots_that_a_host_has_not_all_taken_are_none(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    images = ("a", "b", "c")
    for image in images:
        create(target, image)
    ids = {image: identity(ceph, image) for image in images}

    def begin(*taken: str, token: str = "t1") -> None:
        """Leaves what a host leaves that ends when it has taken these."""
        for image in images:
            mark = {
                "token": token,
                "image": ids["c"],
                "snapshot": "s",
                "client": "10.0.0.1:0/1",
                "others": [[ids["a"], "s"], ["gone", "s"], [ids["b"], "s"]] if image == "c" else [],
            }
            key = f"virtlun.together.{ids[image]}@s"
            ceph.rbd("image-meta", "set", f"{POOL}/{image}", key, json.dumps(mark))
        for image in taken:
            ceph.rbd("snap", "create", "--no-progress", f"{POOL}/{image}@s")

    begin("a", "b")
    assert names(target) >= set(images) and not any("@" in name for name in names(target))
    # The same call, and a snapshot of one alone, find nothing in their way.
    target.rpc("bdev_lvol_snapshot", lvol_name="ceph0/a", snapshot_name="a@s")
    remove(target, "a@s")
    target.rpc(TAKE, **wanted("s", *images))
    assert {name for name in names(target) if "@" in name} == {f"{image}@s" for image in images}
    remove(target, *(f"{image}@s" for image in images))
    # The last one was taken, and so all.
    begin("a", "b", "c", token="t2")
    assert {name for name in names(target) if "@" in name} == {f"{image}@s" for image in images}
    remove(target, "c@s")
    assert {name for name in names(target) if "@" in name} == {"a@s", "b@s"}
    assert marks(ceph, *images) == 0
    remove(target, "a@s", "b@s")
    # An image is deleted with what nobody sees of it, and a target that starts sees to the others.
    begin("a", "b", token="t3")
    remove(target, "a")
    with_pool(make_target, ceph)
    until(lambda: marks(ceph, "b") == 0, "the end of what was begun")
    assert "s" not in ceph.rbd("snap", "ls", f"{POOL}/b").split()
    remove(target, "b", "c")


def test_a_rollback_that_was_cut_off_is_noticed_and_finished(
    target: Target, make_target: MakeTarget, ceph: Ceph
) -> None:
    images = ("one", "two")
    for number, image in enumerate(images, 1):
        create(target, image)
        with guest_of(target, f"ceph0/{image}") as guest:
            guest.write(0, bytes([number]) * BLOCK)
            target.rpc("bdev_lvol_snapshot", lvol_name=f"ceph0/{image}", snapshot_name=f"{image}@s")
            guest.write(0, bytes([9]) * BLOCK)
        target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)

    def begin(*, decided: bool, token: str) -> None:
        begin_rollback(ceph, "s", *images, decided=decided, token=token)

    def contents() -> list[int]:
        return [ceph.content(image)[0] for image in images]

    begin(decided=False, token="t1")
    with pytest.raises(RpcError) as half:
        guest_of(target, "ceph0/two")
    assert (half.value.code, "is half of each" in half.value.message) == (BUSY, True)
    refused(target, BUSY, "is half of each", TAKE, **wanted("x", *images))
    # It had not been decided that they go back.
    with_pool(make_target, ceph)
    until(lambda: marks(ceph, *images) == 0, "the end of what was begun")
    assert contents() == [9, 9]
    begin(decided=True, token="t2")
    target.kill9()
    target.start()
    until(lambda: marks(ceph, *images) == 0, "the end of what was begun")
    assert contents() == [1, 2]
    # By a call for one of them.
    for image in images:
        with guest_of(target, f"ceph0/{image}", "vm-3") as guest:
            guest.write(0, bytes([8]) * BLOCK)
        target.rpc("vhost_delete_controller", ctrlr="vm-3", force=True)
    begin(decided=True, token="t3")
    target.rpc("virtlun_lvol_roll_back", lvol_name="ceph0/two", snapshot_name="ceph0/two@s")
    assert (contents(), marks(ceph, *images)) == ([1, 2], 0)
    # A snapshot goes when what needs it is done.
    for image in images:
        with guest_of(target, f"ceph0/{image}", "vm-4") as guest:
            guest.write(0, bytes([7]) * BLOCK)
        target.rpc("vhost_delete_controller", ctrlr="vm-4", force=True)
    begin(decided=True, token="t4")
    remove(target, "two@s")
    assert (contents(), marks(ceph, *images)) == ([1, 2], 0)
    refused(target, INVAL, "is not a snapshot of", GO_BACK, **crossed())
    with suppress(RpcError):
        target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    remove(target, "one@s", *images)


def crossed() -> dict[str, Any]:
    """Returns the parameters of GO_BACK to another image's snapshot."""
    return {"rollbacks": [{"lvol_name": "ceph0/two", "snapshot_name": "ceph0/one@s"}]}


@pytest.mark.parametrize("method", [TAKE, GO_BACK])
def test_a_target_that_is_killed_at_any_time_leaves_all_or_none(
    target: Target, ceph: Ceph, method: str
) -> None:
    images = tuple(f"{'take' if method == TAKE else 'back'}{number}" for number in range(4))
    for image in images:
        create(target, image)
        ceph.rbd("snap", "create", "--no-progress", f"{POOL}/{image}@base")

    def change() -> None:
        for image in images:
            with guest_of(target, f"ceph0/{image}", "vm-k") as guest:
                guest.write(0, bytes([7]) * BLOCK)
            target.rpc("vhost_delete_controller", ctrlr="vm-k", force=True)

    def call() -> None:
        params = wanted("s", *images) if method == TAKE else back("base", *images)
        with suppress(TargetUnavailable, RpcError):
            target.rpc(method, **params)

    def state() -> set[bool]:
        if method == TAKE:
            there = names(target)
            return {f"{image}@s" in there for image in images}
        return {ceph.content(image)[0] == 0 for image in images}

    change()
    begun = time.monotonic()
    call()
    took_s = time.monotonic() - begun
    assert state() == {True}
    found = set()
    for step in range(5):
        if method == TAKE:
            remove(target, *(f"{image}@s" for image in images if f"{image}@s" in names(target)))
        else:
            change()
        with ThreadPoolExecutor() as pool:
            calling = pool.submit(call)
            threading.Event().wait(took_s * (step + 0.5) / 5)
            target.kill9()
            calling.result()
        target.start()
        until(lambda: marks(ceph, *images) == 0, "what was begun to be over")
        left = state()
        assert len(left) == 1, (step, left)
        found |= left
        if method == GO_BACK or left == {False}:
            # Also where the cluster takes the killed one for alive still.
            target.rpc(
                method, **(wanted("s", *images) if method == TAKE else back("base", *images))
            )
        assert state() == {True}
    # The images stay: an OSD may take a killed client for alive, and librbd deletes none then.
    assert False in found, "the first kill came before it was decided"
