"""What is to be true of a server whenever Nova is through with it."""

from __future__ import annotations

from tests.openstack.nova_cloud import MARK_AT, Server, disk_of
from tests.support.agent import Agent

MARK = "the volume that it began with"


def source(volume: str) -> str:
    """Returns what a disk's source is to be."""
    return f"virtlun/cinder0/volume-{volume}"


def seek() -> str:
    """Returns dd's words for the place of the mark."""
    return f"bs=4096 seek={MARK_AT // 4096} count=1"


def check_definitions(server: Server, *more: str) -> None:
    """Its disks are its volumes, in both definitions, and Cinder has them in use."""
    volumes = {server.volume, *more}
    expected = {volume: source(volume) for volume in volumes}
    assert server.disks() == server.disks("--inactive") == expected
    for volume in volumes:
        assert server.cloud.cinder.get(f"volumes/{volume}")["volume"]["status"] == "in-use"


def check_disks(server: Server, *more: str) -> None:
    """As `check_definitions`, and there is no other volume."""
    check_definitions(server, *more)
    assert server.cloud.lvols() == {f"volume-{volume}" for volume in (server.volume, *more)}


def write(guest: Agent, volume: str, text: str) -> None:
    """The guest writes a line to a disk, and it is durable."""
    guest.run(f"echo '{text}' | dd of={disk_of(guest, volume)} conv=sync,fsync")


def read(guest: Agent, volume: str) -> str:
    """The line that the guest reads from a disk, past its cache."""
    words = "bs=4096 count=1 iflag=direct 2>/dev/null | head -n 1"
    return guest.run(f"dd if={disk_of(guest, volume)} {words}").rstrip("\n")


def check_mark(server: Server, guest: Agent) -> None:
    """The guest reads from its first disk what it wrote, past its cache."""
    words = seek().replace("seek", "skip")
    read = f"dd if={disk_of(guest, server.volume)} {words} iflag=direct 2>/dev/null"
    assert guest.run(f"{read} | head -n 1") == f"{MARK}\n"


def check(server: Server, *more: str) -> Agent:
    """As `check_disks`, and the guest has them all; returns its command channel."""
    check_disks(server, *more)
    guest = server.guest()
    check_mark(server, guest)
    for volume in more:
        disk_of(guest, volume)
    return guest
