"""Images of a real Ceph that one host has alone, beside those that several share: who comes second.

What is the other kind is refused, and who was there first goes on.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pydataplane.errors import RpcError
from tests.support.ceph import POOL, Ceph, cluster, lacks
from tests.support.frozen import frozen
from tests.support.initiator import Initiator, connected
from tests.support.night import at_night
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_rbd_pools import add, create, guest_of, names, owners, shown, with_pool

pytestmark = [
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.timeout(300),
]

BLOCK = 512
BUSY = -16
WATCH_TIMEOUT_S = 5
"""After how long a client that is gone is given up."""
ALONE = "is in use by the client at 127.0.0.1:0/{} alone, so it cannot be shared"
SHARED = "is shared with other hosts by the client at 127.0.0.1:0/{}, so it cannot be had by this"


@pytest.fixture(scope="module")
def ceph() -> Iterator[Ceph]:
    """A cluster."""
    with cluster(watch_timeout_s=WATCH_TIMEOUT_S) as made:
        yield made


@pytest.fixture
def target(make_target: MakeTarget, ceph: Ceph) -> Target:
    """A target with the pool as `ceph0`."""
    return with_pool(make_target, ceph)


@pytest.fixture
def other(make_target: MakeTarget, ceph: Ceph) -> Target:
    """That of another host, with a controller."""
    made = with_pool(make_target, ceph)
    made.rpc("vhost_create_scsi_controller", ctrlr="vm-2")
    return made


def address(target: Target) -> str:
    """Returns what the address of the target's newest client ends with."""
    return (target.state_dir / "rbd-clients").read_text().split()[-1].rpartition("/")[2]


def refused(other: Target, volume: str, words: str, **way: Any) -> None:
    """Has a target refuse a volume to a guest, in a sentence with those words, and forget it."""
    with pytest.raises(RpcError) as error:
        add(other, volume, "vm-2", **way)
    assert (error.value.code, words in error.value.message) == (BUSY, True), error.value.message
    assert "\n" not in error.value.message
    image = volume.partition("/")[2]
    assert f'"rbd_name": "{image}"' not in json.dumps(other.configuration())


def goes_on(guest: Initiator, number: int) -> None:
    """What a guest writes is there."""
    guest.write(number, bytes([number]) * BLOCK)
    assert guest.read(number, 1) == bytes([number]) * BLOCK


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        pytest.param({"shareable": True}, {}, SHARED, id="alone-beside-shared"),
        at_night({"shareable": True}, {"incoming": True}, SHARED, id="comes-beside-shared"),
        pytest.param({}, {"shareable": True}, ALONE, id="shared-beside-alone"),
    ],
)
def test_who_comes_second_and_is_of_the_other_kind_is_refused(
    target: Target,
    other: Target,
    ceph: Ceph,
    first: dict[str, Any],
    second: dict[str, Any],
    words: str,
) -> None:
    image = f"kinds-{''.join((*first, '-', *second))}"
    create(target, image)
    volume, kind = f"ceph0/{image}", "shared" if first else "alone"
    with guest_of(target, volume, **first) as guest:
        goes_on(guest, 1)
        before = ceph.users(image)
        assert (before[0], len(before[1])) == (kind, 1)
        locked = ceph.rbd("lock", "ls", f"{POOL}/{image}")
        for number in range(2, 4):
            refused(other, volume, words.format(address(target)), **second)
            # Nothing of it reached the first one: the lock of librbd is where it was.
            assert ceph.rbd("lock", "ls", f"{POOL}/{image}") == locked
            goes_on(guest, number)
        # Nor where its target was killed, or upgraded, which leaves nothing.
        for again in (target.crash, target.upgrade):
            again()
            assert ceph.users(image)[0] == kind and len(ceph.users(image)[1]) == 1
            refused(other, volume, words.format(address(target)), **second)
    with connected(target, "vm-1") as guest:
        goes_on(guest, 4)
        target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
    assert ceph.users(image) == (kind, [])
    add(other, volume, "vm-2", **second)
    assert len(ceph.users(image)[1]) == 1
    other.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-2", scsi_target_num=0)


def test_guests_disks_of_both_kinds_are_refused_without_a_pool(
    target: Target, other: Target, ceph: Ceph
) -> None:
    """As those of a cloud are asked for, and also on one host."""
    image = ceph.image("of-a-cloud", 8)
    asked = {"pool_name": POOL, "rbd_name": image, "block_size": BLOCK, "cluster_name": "c0"}
    target.rpc("bdev_rbd_create", name="first", shared=True, **asked)
    for each in (target, other):
        with pytest.raises(RpcError, match="is shared with other hosts by the client at"):
            each.rpc("bdev_rbd_create", name="second", guest_disk=True, **asked)
    other.rpc("bdev_rbd_create", name="reader", read_only=True, **asked)
    other.rpc("bdev_rbd_delete", name="reader")
    other.rpc("bdev_rbd_create", name="sharer", shared=True, **asked)
    assert len(ceph.users(image)[1]) == 2
    target.rpc("bdev_rbd_delete", name="first")
    with pytest.raises(RpcError, match="is shared with other hosts by the client at"):
        target.rpc("bdev_rbd_create", name="second", **asked)
    other.rpc("bdev_rbd_delete", name="sharer")
    target.rpc("bdev_rbd_create", name="second", **asked)
    with pytest.raises(RpcError, match="alone, so it cannot be shared"):
        target.rpc("bdev_rbd_create", name="first", shared=True, **asked)


def test_what_a_killed_target_left_keeps_its_own_host_from_nothing(
    target: Target, ceph: Ceph
) -> None:
    create(target, "left")
    shared, alone = {"shareable": True}, dict[str, Any]()
    for first, second in ((shared, alone), (alone, shared)):
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
        add(target, "ceph0/left", **first)
        target.kill9()
        # Its guest has ended meanwhile.
        (target.state_dir / "config.json").unlink()
        target.start()
        target.rpc("bdev_rbd_register_cluster", name="c0", config_file=str(ceph.conf))
        target.rpc("virtlun_rbd_pool_create", name="ceph0", cluster_name="c0", pool_name=POOL)
        start = time.monotonic()
        with guest_of(target, "ceph0/left", **second) as guest:
            assert time.monotonic() - start < WATCH_TIMEOUT_S, "it waited for the cluster"
            goes_on(guest, 1)
        assert len(ceph.users("left")[1]) == 1
        target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)


def comes(other: Target, volume: str, **way: Any) -> bool:
    """Gives a guest a volume that may be in use; whether that is done."""
    try:
        add(other, volume, "vm-2", **way)
    except RpcError as error:
        assert error.code == BUSY, error
        return False
    return True


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"shareable": True}, {}, id="alone-after-shared"),
        pytest.param({}, {"shareable": True}, id="shared-after-alone"),
    ],
)
def test_a_host_that_died_is_in_nobodys_way_once_the_cluster_has_given_it_up(
    target: Target, other: Target, ceph: Ceph, first: dict[str, Any], second: dict[str, Any]
) -> None:
    image = f"died-{len(first)}"
    create(target, image)
    with guest_of(target, f"ceph0/{image}", **first) as guest:
        goes_on(guest, 1)
        target.kill9()

    volume = f"ceph0/{image}"
    assert not comes(other, volume, **second), "while it may live"
    until(lambda: comes(other, volume, **second), "the cluster to give it up")
    assert len(ceph.users(image)[1]) == 1
    with connected(other, "vm-2") as guest:
        assert guest.read(1, 1) == bytes([1]) * BLOCK
        goes_on(guest, 2)
    # It was silent only, and what its guest knows of the disk is out of date, if it had it alone.
    target.start()
    with Initiator(target.vhost_dir / "vm-1") as late:
        late.send("connect")
        write = bytes([0x2A, *bytes(4), 3, 0, 0, 1, 0])
        answer = late.cdb(write, data_out=bytes([3]) * BLOCK)
        assert (answer["response"], answer["status"]) != (0, 0), answer
    with connected(other, "vm-2") as guest:
        goes_on(guest, 4)
    other.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-2", scsi_target_num=0)
    if first:
        # By itself.
        target.restored()
        with connected(target, "vm-1") as guest:
            assert guest.read(4, 1) == bytes([4]) * BLOCK
    else:
        target.restart()
        assert shown(target, f"ceph0/{image}")["fenced"] is True
        assert (owners(ceph, image), ceph.users(image)[1]) == (0, []), "it is in nobody's way"
    assert ceph.content(image)[3 * BLOCK : 4 * BLOCK] == bytes(BLOCK)


def test_a_host_that_shared_and_was_silent_cannot_write_after_another_has_had_it_alone(
    target: Target, other: Target, ceph: Ceph
) -> None:
    """Neither while that has the lock of librbd, nor when it has let it go."""
    create(target, "silent")
    removed = {"ctrlr": "vm-2", "scsi_target_num": 0}
    with guest_of(target, "ceph0/silent", shareable=True) as guest:
        # The last one that writes is another, so that the lock of librbd does not tell of this one.
        add(other, "ceph0/silent", "vm-2", shareable=True)
        with connected(other, "vm-2") as there:
            goes_on(there, 1)
        other.rpc("vhost_scsi_controller_remove_target", **removed)
        silent = f"127.0.0.1:0/{address(target)}"
        with frozen(target.pid):
            until(lambda: comes(other, "ceph0/silent"), "the cluster to give it up")
            assert silent in ceph.run("ceph", "osd", "blocklist", "ls")
            with connected(other, "vm-2") as there:
                goes_on(there, 2)
            other.rpc("vhost_scsi_controller_remove_target", **removed)
        assert owners(ceph, "silent") == 0
        write = bytes([0x2A, *bytes(4), 3, 0, 0, 1, 0])
        assert guest.cdb(write, data_out=bytes([3]) * BLOCK)["status"] != 0
        until(lambda: shown(target, "ceph0/silent")["fenced"], "it is told")
    assert ceph.content("silent")[3 * BLOCK : 4 * BLOCK] == bytes(BLOCK)


@pytest.mark.parametrize(
    "recorded",
    [pytest.param(None, id="newer"), at_night(r"\1", id="older-target")],
)
def test_a_host_that_shares_beside_an_older_target_is_found_out_when_that_is_updated(
    target: Target, other: Target, ceph: Ceph, recorded: str | None
) -> None:
    """An older one leaves no lock, so the other came, and left no note as it cannot write."""
    image = "unnoted" if recorded is None else "unnoted-older"
    create(target, image)
    volume = f"ceph0/{image}"
    with guest_of(target, volume) as guest:
        goes_on(guest, 1)
        ceph.forget_user(image)
        add(other, volume, "vm-2", shareable=True)
        goes_on(guest, 2)
        assert target.stop() == 0, target.words()
    record = target.state_dir / "config.json"
    if recorded:
        text, of = record.read_text(), r'(?<="generation": ")([0-9a-f-]{36})[.][.][0-9a-f]{8}(?=")'
        text, count = re.subn(of, recorded, text)
        assert count == 1, text
        record.write_text(text)
    target.start()
    if recorded:
        # That had it whoever came.
        assert (shown(target, volume)["locked"], shown(target, volume)["fenced"]) == (True, False)
        with connected(target, "vm-1") as guest:
            goes_on(guest, 3)
    else:
        assert shown(target, volume)["fenced"] is True
        assert "is shared with other hosts by the client at" in target.words()
        with connected(target, "vm-1") as guest, pytest.raises(AssertionError):
            guest.write(3, bytes([3]) * BLOCK)
        with connected(other, "vm-2") as there:
            goes_on(there, 4)
    other.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-2", scsi_target_num=0)


def test_what_is_done_to_a_volume_takes_nothing_from_hosts_that_share_it(
    target: Target, other: Target, ceph: Ceph
) -> None:
    """Snapshots of several at one instant, which lock what they are taken of."""
    for image in ("mine", "shared"):
        create(target, image)
    with guest_of(other, "ceph0/shared", "vm-3", shareable=True) as guest:
        goes_on(guest, 1)
        wanted = [
            {"lvol_name": f"ceph0/{each}", "snapshot_name": f"{each}@s"}
            for each in ("mine", "shared")
        ]
        for _ in range(2):
            with pytest.raises(RpcError, match="is shared with other hosts by the client at"):
                target.rpc("virtlun_lvol_snapshot_together", snapshots=wanted)
            goes_on(guest, 2)
        assert not any(name.endswith("@s") for name in names(target))
        target.rpc("bdev_lvol_snapshot", lvol_name="ceph0/shared", snapshot_name="one")
        goes_on(guest, 3)
