"""Disks that are slow to open: an upgrade opens them before it has guests wait."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.held_opens import HeldOpens
from tests.support.target import Target
from tests.target.test_upgrade import Load

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="holding an open(2) needs root")

ROUNDS = 3
"""Of a guest while a disk is opened."""
STANDSTILL_S = 30.0
"""A guest that does nothing for so long is held."""


def test_guests_are_served_while_the_new_program_opens_their_disks(
    target: Target, scratch: Path
) -> None:
    files = [scratch / "store", scratch / "plain", scratch / "read-only"]
    for path in files:
        path.touch()
        os.truncate(path, 64 << 20)
    target.rpc("bdev_uring_create", filename=str(files[0]), name="base", block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="base", lvs_name="lvs")
    target.rpc("bdev_lvol_create", lvol_name="v", size_in_mib=8, lvs_name="lvs")
    target.rpc("bdev_aio_create", filename=str(files[1]), name="plain", block_size=512)
    target.rpc("bdev_aio_create", filename=str(files[2]), name="ro", readonly=True)
    for name, bdev in (("a", "lvs/v"), ("b", "plain")):
        target.attach(name, bdev)
    opened: list[int] = []
    waited_in_vain: list[int] = []
    with Load(target, "a") as a, Load(target, "b") as b:

        def served(process: int) -> None:
            """Waits until both guests have done something."""
            opened.append(process)
            wanted = a.rounds + ROUNDS, b.rounds + ROUNDS
            end = time.monotonic() + STANDSTILL_S
            while a.rounds < wanted[0] or b.rounds < wanted[1]:
                if time.monotonic() > end:
                    waited_in_vain.append(process)
                    return
                time.sleep(0.002)

        with HeldOpens(files, served):
            for _ in range(2):
                opened.clear()
                target.upgrade()
                assert opened.count(target.pid) >= len(files), "the new program opens them"
                assert not waited_in_vain, "an open had the guests wait"
        a.wait()
        b.wait()
        a.check()
        b.check()
    bdevs = {b["name"]: b for b in target.rpc("bdev_get_bdevs")}
    assert bdevs["ro"]["driver_specific"]["aio"]["readonly"] is True
    assert not target.rpc("virtlun_get_status")["restore_problems"]


def test_a_file_that_was_replaced_meanwhile_is_not_taken_for_the_guests(
    target: Target, scratch: Path
) -> None:
    """The guest's data stays where the old program wrote it, whatever its path names then."""
    path, other = scratch / "disk", scratch / "other"
    for name in (path, other):
        name.touch()
        os.truncate(name, 16 << 20)
    target.rpc("bdev_aio_create", filename=str(path), name="d", block_size=512)
    target.attach("c", "d")
    replaced: list[int] = []
    with Load(target, "c") as load:
        load.wait()

        def replace(process: int) -> None:
            """Puts another file in its place, once it is about to be opened."""
            if not replaced:
                other.rename(path)
            replaced.append(process)

        with HeldOpens([path], replace):
            target.upgrade()
        assert replaced == [target.pid]
        load.wait()
        load.check()
