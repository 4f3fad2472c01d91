"""Domains that are paused because a disk of ours cannot go on, as their clients see it."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from plugin.gateway.errors import Code, Refused
from plugin.gateway.events import IO_ERROR, IO_ERROR_REASON
from plugin.gateway.messages import INT, ULLONG, Domain, DomainCall, TypedParam, TypedValue
from plugin.gateway.procs import Proc
from plugin.gateway.xdr import Reader, Writer
from tests.unit.gateway.decoded import StatsRecord
from tests.unit.gateway.fake_libvirtd import Hang
from tests.unit.gateway.world import UUID_1, UUID_2, TestClient, World, disk, play, until

RUNNING, PAUSED, BY_USER, BY_IO_ERROR = 1, 3, 1, 5
DEFINED, UNDEFINED, SUSPENDED, RESUMED = 0, 1, 3, 4


class Machine:
    """A running domain whose disk sdb waits, and what libvirtd was asked about it."""

    def __init__(self, world: World, state: tuple[int, int] = (RUNNING, 1)) -> None:
        self.world, self.state, self.suspends = world, state, 0
        self.dom: Domain = world.domain(disks=disk()).ref
        world.libvirtd.answers |= {
            Proc.GET_STATE: lambda _: bytes(Writer().i32(self.state[0]).i32(self.state[1])),
            Proc.SUSPEND: self._suspend,
            Proc.GET_DISK_ERRORS: lambda _: bytes(Writer().u32(0).i32(1)),
        }

    def _suspend(self, _: bytes) -> bytes:
        self.suspends += 1
        self.state = (PAUSED, BY_USER)
        return b""

    def fails(self, since: float, error: str = "no_space") -> None:
        """The target tells that it keeps a request."""
        told = {"scsi_target_num": 0, "bdev_name": "b", "error": error, "since": since}
        self.world.target.suspended = [{"ctrlr": f"vm-{UUID_1}", **told}]

    async def look(self) -> None:
        """The gateway asks the target."""
        await self.world.gateway.io_errors.look()

    async def seen(self, client: TestClient) -> tuple[int, int]:
        """State and reason as a client is told."""
        args = DomainCall(self.dom).pack(flags=True)
        reader = Reader(await client.call(Proc.GET_STATE, args))
        return reader.i32(), reader.i32()

    async def errors(self, client: TestClient, most: int) -> tuple[list[tuple[str, int]], int]:
        """GET_DISK_ERRORS."""
        args = bytes(self.dom.write(Writer()).u32(most).u32(0))
        reader = Reader(await client.call(Proc.GET_DISK_ERRORS, args))
        return reader.array(lambda: (reader.string(), reader.i32()), 16), reader.i32()

    async def counted(self, client: TestClient) -> list[TypedValue]:
        """The numbers in GET_ALL_DOMAIN_STATS of it and of another domain."""
        one, other = (
            [TypedParam("state.state", INT, state), TypedParam("state.reason", INT, reason)]
            for state, reason in (self.state, (PAUSED, BY_USER))
        )
        given = [
            StatsRecord(self.dom, [*one, TypedParam("cpu.time", ULLONG, 7)]),
            StatsRecord(Domain("two", UUID(UUID_2).bytes, 2), other),
        ]
        self.world.libvirtd.answers[Proc.GET_ALL_DOMAIN_STATS] = lambda _: StatsRecord.pack_all(
            given
        )
        told = StatsRecord.read_all(await client.call(Proc.GET_ALL_DOMAIN_STATS, bytes(12)))
        return [param.value for record in told for param in record.params]

    async def lifecycle(self, event: int, detail: int) -> None:
        """libvirtd tells of the domain."""
        body = self.dom.write(Writer().i32(7)).i32(event).i32(detail)
        await self.world.libvirtd.event(Proc.CALLBACK_LIFECYCLE, bytes(body))


async def register(client: TestClient, event: int) -> None:
    """Registers for an event of all domains."""
    await client.call(Proc.CALLBACK_REGISTER_ANY, bytes(Writer().i32(event).u32(0)))


def test_a_domain_that_cannot_go_on_is_paused_once_and_clients_see_why(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        machine = Machine(world)
        client = await world.client()
        await register(client, IO_ERROR_REASON)
        await machine.look()
        assert (machine.suspends, await machine.seen(client)) == (0, (RUNNING, 1))
        machine.fails(1.0)
        await machine.look()
        await machine.look()
        assert machine.suspends == 1
        procedure, payload = await client.event()
        reader = Reader(payload)
        assert (procedure, reader.i32(), Domain.read(reader)) == (324, 7, machine.dom)
        told = (reader.string(), reader.string(), reader.i32(), reader.string())
        assert told == ("/dev/virtlun/lvs0/data", "virtlun-disk-sdb", 1, "enospc")
        assert await machine.seen(client) == (PAUSED, BY_IO_ERROR)
        assert await machine.errors(client, 8) == ([("sdb", 2)], 1)
        assert await machine.errors(client, 0) == ([], 2)
        assert await machine.counted(client) == [PAUSED, BY_IO_ERROR, 7, PAUSED, BY_USER]
        await machine.lifecycle(SUSPENDED, 0)
        _, payload = await client.event()
        assert payload[-8:] == bytes(Writer().i32(SUSPENDED).i32(2))

        # Whoever resumes it, through us or not.
        machine.state = (RUNNING, 1)
        await machine.lifecycle(RESUMED, 0)
        await until(lambda: not world.gateway.services.paused)
        machine.state = (PAUSED, BY_USER)
        assert await machine.seen(client) == (PAUSED, BY_USER), "this time it was a client"
        assert await machine.counted(client) == [PAUSED, BY_USER, 7, PAUSED, BY_USER]
        # The same failure is dealt with, another one is not.
        machine.state = (RUNNING, 1)
        await machine.look()
        assert machine.suspends == 1
        machine.fails(2.0, "write_medium")
        await machine.look()
        assert machine.suspends == 2
        assert await machine.errors(client, 8) == ([("sdb", 1)], 1)

    play(tmp_path, body)


def test_one_that_was_paused_before_the_gateway_came_is_known(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        machine = Machine(world, (PAUSED, BY_USER))
        client = await world.client()
        machine.fails(1.0)
        await machine.look()
        assert machine.suspends == 0
        assert await machine.seen(client) == (PAUSED, BY_IO_ERROR)
        # A target that was killed meanwhile has forgotten it.
        world.target.suspended = []
        await machine.look()
        assert await machine.seen(client) == (PAUSED, BY_IO_ERROR)
        # Without an event, as while libvirtd was away.
        machine.state = (RUNNING, 1)
        await machine.look()
        machine.state = (PAUSED, BY_USER)
        assert await machine.seen(client) == (PAUSED, BY_USER)

    play(tmp_path, body)


def test_a_definition_that_changes_does_not_end_the_pause(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        machine = Machine(world)
        client = await world.client()
        machine.fails(1.0)
        await machine.look()
        await register(client, 0)
        for event in (DEFINED, UNDEFINED):
            await machine.lifecycle(event, 1)
            await client.event()
            assert await machine.seen(client) == (PAUSED, BY_IO_ERROR)
        assert await machine.errors(client, 8) == ([("sdb", 2)], 1)

    play(tmp_path, body)


@pytest.mark.parametrize("controller", ["vm-x", "own", "vm-00000000-0000-4000-8000-000000000000"])
def test_what_is_of_no_domain_here_is_left_alone(tmp_path: Path, controller: str) -> None:
    async def body(world: World) -> None:
        machine = Machine(world)
        machine.fails(1.0)
        world.target.suspended[0]["ctrlr"] = controller
        await machine.look()
        assert machine.suspends == 0 and not world.gateway.services.paused

    play(tmp_path, body)


def test_events_without_reason_are_for_who_asked_for_them(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        machine = Machine(world)
        client = await world.client()
        await register(client, IO_ERROR)
        machine.fails(1.0)
        await machine.look()
        procedure, payload = await client.event()
        assert procedure == 322 and payload[-4:] == bytes(Writer().i32(1))

    play(tmp_path, body)


def test_a_domain_that_does_not_let_itself_be_paused_keeps_no_other_waiting(tmp_path: Path) -> None:
    """libvirtd waits for its QEMU, or refuses; clients are told once of what failed."""

    async def body(world: World) -> None:
        machine = Machine(world)
        client = await world.client()
        await register(client, IO_ERROR_REASON)
        world.domain("two", UUID_2, disks=disk())
        machine.fails(1.0)
        world.libvirtd.refuse[Proc.SUSPEND] = refused = Refused(Code.OPERATION_FAILED, "not now")
        for _ in range(3):
            await machine.look()
        await client.event()
        assert not world.gateway.services.paused
        hang = world.libvirtd.hang = Hang(Proc.SUSPEND, 1, done=False)
        await machine.look()
        assert hang.reached.is_set()
        (told,) = world.target.suspended
        world.target.suspended.append({**told, "ctrlr": f"vm-{UUID_2}"})
        assert world.libvirtd.refuse.pop(Proc.SUSPEND) is refused
        await machine.look()
        assert machine.suspends == 1
        _, payload = await client.event()
        reader = Reader(payload)
        reader.i32()
        assert Domain.read(reader).name == "two", "of the other one it was said before"

    play(tmp_path, body)
