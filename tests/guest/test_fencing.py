"""Two machines share a volume, and one fences the other by persistent reservations (SPC-4 5.13).

As Pacemaker's fence_scsi and Windows' clusters do it: both are registered, one holds a reservation
of "write exclusive, registrants only", and who survives preempts the key of who does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest.conftest import MIB
from tests.guest.image import Image
from tests.support.qemu import Guest
from tests.support.target import Target

pytestmark = pytest.mark.vm

KEYS = {"a": "0xa", "b": "0xb"}
DISK = "/dev/sda"
#: Writes one block after the other until one fails; how many went well is in /tmp/count.
WRITES = (
    f"(i=0; while dd if=/tmp/block of={DISK} bs=4096 count=1 oflag=direct conv=notrunc"
    " 2> /tmp/said; do i=$((i+1)); echo $i > /tmp/next; mv /tmp/next /tmp/count; done;"
    " touch /tmp/fenced) > /dev/null 2>&1 &"
)


@pytest.fixture
def machines(scratch: Path, image: Image) -> Iterator[dict[str, Guest]]:
    """Machines a and b, each with the volume as its only disk."""
    target = Target(scratch).start()
    target.make_lvstore(size=64 * MIB)
    volume = target.make_thin("shared", 32)
    guests: dict[str, Guest] = {}
    for name in KEYS:
        target.attach(f"vm-{name}", volume, shareable=True)
        controllers = (target.vhost_dir / f"vm-{name}",)
        guests[name] = Guest(image, scratch / name, controllers=controllers)
        guests[name].agent.wait_for(f"ls {DISK}")
        guests[name].run(f"head -c 4096 /dev/zero | tr '\\0' {name} > /tmp/block")
    yield guests
    for guest in guests.values():
        guest.stop()
    assert target.stop() == 0


def persist(guest: Guest, options: str) -> str:
    """`sg_persist --out`; returns its words and its status."""
    return guest.run(f"sg_persist --no-inquiry --out {options} {DISK} 2>&1; echo status $?")


def first_block(guest: Guest) -> str:
    return guest.run(f"dd if={DISK} bs=4096 count=1 iflag=direct 2> /dev/null | md5sum")


@pytest.mark.nightly
def test_who_is_preempted_writes_no_more(machines: dict[str, Guest]) -> None:
    a, b = machines["a"], machines["b"]
    for name, guest in machines.items():
        said = persist(guest, f"--register --param-sark={KEYS[name]}")
        assert said.endswith("status 0\n"), said
    said = persist(a, f"--reserve --param-rk={KEYS['a']} --prout-type=5")
    assert said.endswith("status 0\n"), said
    # Both are registered, so both write.
    b.run(f"dd if=/tmp/block of={DISK} bs=4096 seek=1 count=1 oflag=direct conv=notrunc")
    a.run(WRITES)
    a.agent.wait_for("cat /tmp/count")
    said = persist(
        b, f"--preempt-abort --param-rk={KEYS['b']} --param-sark={KEYS['a']} --prout-type=5"
    )
    assert said.endswith("status 0\n"), said
    # From here on nothing of a's reaches the disk, whatever it had under way.
    b.run(f"dd if=/tmp/block of={DISK} bs=4096 count=1 oflag=direct conv=notrunc")
    mine = first_block(b)
    assert mine == b.run("md5sum < /tmp/block")
    a.agent.wait_for("ls /tmp/fenced")
    assert "reservation conflict" in a.run("dmesg")
    again = a.run(
        f"dd if=/tmp/block of={DISK} bs=4096 count=1 oflag=direct conv=notrunc; echo $?",
        check=False,
    )
    assert again.strip() != "0"
    assert first_block(b) == mine
    # It reads still, and sees that it is registered no more.
    assert first_block(a) == mine
    keys = a.run(f"sg_persist --no-inquiry --in --read-keys {DISK}")
    assert "0xb" in keys
    assert "0xa" not in keys
    held = b.run(f"sg_persist --no-inquiry --in --read-reservation {DISK}")
    assert "Key=0xb" in held
    assert "Write Exclusive, registrants only" in held
    # Who registers again takes part again.
    said = persist(a, f"--register --param-sark={KEYS['a']}")
    assert said.endswith("status 0\n"), said
    a.run(f"dd if=/tmp/block of={DISK} bs=4096 count=1 oflag=direct conv=notrunc")
    assert first_block(b) == a.run("md5sum < /tmp/block")
