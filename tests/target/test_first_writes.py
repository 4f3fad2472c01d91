"""The first write to a cluster of a thin volume where the file below has zeros already.

They are written nevertheless: the file has the room of the whole cluster with them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.initiator import connected
from tests.support.night import at_night
from tests.support.target import Target
from tests.support.wait import until

MIB = 1 << 20
CLUSTERS = 48
OLD, NEW = b"\xa5" * 4096, b"\x11" * 4096


def again(target: Target, volume: str, number: int) -> None:
    """Makes a thin volume the LUN of controller `vm-<number>`."""
    target.make_thin(volume, CLUSTERS)
    target.attach(f"vm-{number}", f"lvs0/{volume}")


@pytest.mark.parametrize("goes", [at_night(Target.restart), at_night(Target.upgrade), Target.crash])
def test_it_takes_the_room_of_its_cluster_and_shows_nobody_else_s_data(
    target: Target, goes: Callable[[Target], Target]
) -> None:
    file = target.make_lvstore(size=(2 * CLUSTERS + 20) * MIB)

    def room() -> int:
        return file.stat().st_blocks * 512

    def first_writes(number: int) -> None:
        with connected(target, f"vm-{number}") as vm:
            for cluster in range(CLUSTERS):
                vm.write(cluster * 2048 + 1000, NEW)
            for cluster in range(CLUSTERS):
                assert vm.read(cluster * 2048, 1000) == bytes(1000 * 512)
                assert vm.read(cluster * 2048 + 1000, 8) == NEW
                assert vm.read(cluster * 2048 + 1008, 1040) == bytes(1040 * 512)

    again(target, "former", 0)
    with connected(target) as vm:
        for cluster in range(CLUSTERS):
            vm.write(cluster * 2048, OLD * 256)
    target.rpc("vhost_delete_controller", ctrlr="vm-0", force=True)
    assert room() > CLUSTERS * MIB
    target.rpc("bdev_lvol_delete", name="lvs0/former")
    # A thick volume of all others takes what was never used, so that the next ones get what was.
    (store,) = target.rpc("bdev_lvol_get_lvstores")
    others = store["free_clusters"] - CLUSTERS
    target.rpc("bdev_lvol_create", lvs_name="lvs0", lvol_name="others", size_in_mib=others)
    before = room()
    again(target, "first", 1)
    first_writes(1)
    assert room() - before >= CLUSTERS * MIB
    target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    target.rpc("bdev_lvol_delete", name="lvs0/first")

    # The next target finds the holes, which are made after the answer.
    until(lambda: room() <= before + MIB, what="the room is given back")
    goes(target)
    before = room()
    again(target, "second", 2)
    first_writes(2)
    assert room() - before >= CLUSTERS * MIB
