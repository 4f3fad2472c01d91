"""What hostile peers can take of the target leaves enough for a VM that comes after them."""

from __future__ import annotations

import contextlib

from tests.support.initiator import Initiator, Refused
from tests.support.target import Target

TIB, GIB = 1 << 40, 1 << 30
HOSTILE = 10


def attach(target: Target, name: str) -> None:
    """Makes a controller with a disk."""
    target.rpc("bdev_null_create", name=f"n-{name}", num_blocks=8, block_size=512)
    target.attach(name, f"n-{name}")


def take_all(guest: Initiator) -> int:
    """Adds sparse regions, as large as they are taken, and returns their bytes in all."""
    at, size = 1 << 41, 8 * TIB
    while size >= GIB:
        try:
            guest.send("add_region", gpa=at, bytes=size)
            at += size
        except Refused:
            # The initiator has it, and the target does not.
            with contextlib.suppress(Refused):
                guest.send("remove_region", gpa=at)
            size //= 2
    return at - (1 << 41)


def test_a_vm_finds_room_beside_peers_that_take_all_they_get(target: Target) -> None:
    names = [f"h{number}" for number in range(HOSTILE)] + ["honest"]
    for name in names:
        attach(target, name)
    with contextlib.ExitStack() as stack:
        for name in names[:-1]:
            guest = stack.enter_context(Initiator(target.vhost_dir / name))
            guest.send("connect", mem_slots=True)
            assert take_all(guest) >= 64 * GIB
        guest = stack.enter_context(Initiator(target.vhost_dir / "honest"))
        guest.send("connect", mem_slots=True)
        guest.send("add_region", gpa=1 << 41, bytes=64 * GIB)
        guest.ready()
        guest.read(0, 1)
