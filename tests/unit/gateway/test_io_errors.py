"""Domains that are paused because a disk of ours cannot go on, as their clients see it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from plugin.gateway.autoresume import AGAIN_MAX_S, AGAIN_S, CALM_S, AutoResume, WaitingDomain
from plugin.gateway.errors import Code, Refused
from plugin.gateway.events import IO_ERROR, IO_ERROR_REASON
from plugin.gateway.messages import INT, ULLONG, Domain, DomainCall, TypedParam, TypedValue
from plugin.gateway.procs import Proc
from plugin.gateway.target import Room, Suspended
from plugin.gateway.xdr import Reader, Writer
from tests.unit.gateway.decoded import StatsRecord
from tests.unit.gateway.fake_libvirtd import Hang
from tests.unit.gateway.world import (
    UUID_1,
    UUID_2,
    ReplyError,
    TestClient,
    World,
    disk,
    play,
    until,
)

RUNNING, PAUSED, BY_USER, BY_IO_ERROR = 1, 3, 1, 5
DEFINED, UNDEFINED, SUSPENDED, RESUMED = 0, 1, 3, 4


BLK = disk(dev="vdb").replace("bus='scsi'", "bus='virtio'")


class Machine:
    """A running domain whose disk sdb, or vdb, waits, and what libvirtd was asked about it."""

    def __init__(
        self, world: World, state: tuple[int, int] = (RUNNING, 1), *, blk: bool = False
    ) -> None:
        self.world, self.state, self.suspends, self.resumes = world, state, 0, 0
        there = world.domain(disks=BLK if blk else disk())
        self.dom: Domain = there.ref
        self.controller = f"vm-{UUID_1}"
        if blk:
            self.controller += ".0"
            target, alias = "<target dev='vdb' bus='virtio'/>", "<alias name='virtio-disk1'/>"
            assert there.live is not None and target in there.live
            before, _, after = there.live.rpartition(target)
            there.live = before + target + alias + after
        world.libvirtd.answers |= {
            Proc.GET_STATE: lambda _: bytes(Writer().i32(self.state[0]).i32(self.state[1])),
            Proc.SUSPEND: self._suspend,
            Proc.RESUME: self._resume,
            Proc.GET_DISK_ERRORS: lambda _: bytes(Writer().u32(0).i32(1)),
        }

    def _suspend(self, _: bytes) -> bytes:
        self.suspends += 1
        self.state = (PAUSED, BY_USER)
        return b""

    def _resume(self, _: bytes) -> bytes:
        self.resumes += 1
        self.state = (RUNNING, 1)
        # The guest goes on, and what it kept is tried again.
        self.world.target.suspended = []
        return b""

    def fails(self, since: float, error: str = "no_space") -> None:
        """The target tells that it keeps a request."""
        told: dict[str, object] = {"scsi_target_num": 0, "bdev_name": "b", "overtaken": False}
        told |= {"error": error, "since": since}
        self.world.target.suspended = [{"ctrlr": self.controller, **told}]

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


@pytest.mark.parametrize("blk", [False, True])
def test_a_domain_that_cannot_go_on_is_paused_once_and_clients_see_why(
    tmp_path: Path, blk: bool
) -> None:
    dev, alias = ("vdb", "virtio-disk1") if blk else ("sdb", "virtlun-disk-sdb")

    async def body(world: World) -> None:
        world.target.free_mib = 0
        machine = Machine(world, blk=blk)
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
        assert told == ("/dev/virtlun/lvs0/data", alias, 1, "enospc")
        assert await machine.seen(client) == (PAUSED, BY_IO_ERROR)
        assert await machine.errors(client, 8) == ([(dev, 2)], 1)
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
        assert await machine.errors(client, 8) == ([(dev, 1)], 1)

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


@pytest.mark.parametrize("blk", [False, True])
def test_what_was_paused_for_want_of_room_goes_on_when_there_is_some(
    tmp_path: Path, blk: bool
) -> None:
    async def body(world: World) -> None:
        world.target.free_mib = 0
        machine = Machine(world, blk=blk)
        machine.fails(1.0)
        for _ in range(3):
            await machine.look()
        assert (machine.suspends, machine.resumes) == (1, 0)
        (note,) = (tmp_path / "notes").glob("*.no-room")
        world.target.free_mib = 1
        await machine.look()
        assert machine.resumes == 1
        assert not note.exists()
        await machine.lifecycle(RESUMED, 0)
        await machine.look()
        assert (machine.suspends, machine.resumes) == (1, 1)

    play(tmp_path, body)


async def stays(machine: Machine) -> None:
    """Asserts that a domain that is paused stays so, though there is room."""
    machine.world.target.free_mib = 100
    for _ in range(3):
        await machine.look()
    assert machine.resumes == 0


@pytest.mark.parametrize("errors", [["write_medium"], ["no_space", "read_medium"]])
def test_what_was_paused_for_another_error_stays(tmp_path: Path, errors: list[str]) -> None:
    async def body(world: World) -> None:
        world.target.free_mib = 0
        machine = Machine(world)
        for since, error in enumerate(errors):
            machine.fails(float(since), error)
            await machine.look()
        assert machine.suspends == 1
        await stays(machine)

    play(tmp_path, body)


def test_what_an_administrator_paused_stays(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        world.target.free_mib = 0
        machine = Machine(world)
        client = await world.client()
        # Before: what it has failed with is known, but it was not we.
        machine.state = (PAUSED, BY_USER)
        machine.fails(1.0)
        await machine.look()
        assert await machine.seen(client) == (PAUSED, BY_IO_ERROR)
        await stays(machine)

        # After.
        world.target.free_mib = 0
        machine.state = (RUNNING, 1)
        await machine.lifecycle(RESUMED, 0)
        await until(lambda: not world.gateway.services.paused)
        machine.fails(2.0)
        await machine.look()
        assert machine.state == (PAUSED, BY_USER)
        await client.call(Proc.SUSPEND, bytes(machine.dom.write(Writer())))
        assert list((tmp_path / "notes").glob("*.no-room")) == []
        await stays(machine)

        # It was resumed, ran, and was paused, while nobody told us.
        world.target.free_mib = 0
        machine.state = (RUNNING, 1)
        machine.fails(3.0)
        await machine.look()
        assert machine.suspends == 3
        machine.fails(4.0)
        await stays(machine)

    play(tmp_path, body)


def test_what_is_to_stay_paused_stays(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        world.target.free_mib = 0
        machine = Machine(world)
        machine.fails(1.0)
        await machine.look()
        assert machine.suspends == 1
        await stays(machine)

    play(tmp_path, body, when_room_returns="stay")


@pytest.mark.parametrize("since", [1.0, 2.0])
def test_the_next_gateway_resumes_what_the_one_before_has_paused(
    tmp_path: Path, since: float
) -> None:
    """Unless the guest has run meanwhile, and what waits now is something else."""
    items = [Suspended(f"vm-{UUID_1}", 0, "no_space", 1.0)]
    AutoResume(tmp_path / "notes").paused(
        UUID(UUID_1).bytes, items, {"lvs0": Room(0, 1 << 20, None)}, 0.0
    )
    (tmp_path / "notes/x.no-room").write_text("{")

    async def body(world: World) -> None:
        world.target.free_mib = 0
        machine = Machine(world, (PAUSED, BY_USER))
        machine.fails(since)
        await machine.look()
        assert machine.resumes == 0
        world.target.free_mib = 9
        await machine.look()
        assert machine.resumes == (since == 1.0)

    play(tmp_path, body)


def test_a_libvirtd_that_refuses_is_asked_again(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        world.target.free_mib = 0
        machine = Machine(world)
        machine.fails(1.0)
        await machine.look()
        world.target.free_mib = 9
        world.libvirtd.refuse[Proc.RESUME] = Refused(Code.OPERATION_FAILED, "not now")
        await machine.look()
        del world.libvirtd.refuse[Proc.RESUME]
        returns = world.gateway.services.auto_resume
        ((uuid, note),) = returns.waiting.items()
        assert note.not_before > 0
        returns.waiting[uuid] = replace(note, not_before=0)
        await machine.look()
        assert machine.resumes == 1

    play(tmp_path, body)


@pytest.mark.parametrize(
    "proc",
    [Proc.SAVE, Proc.SAVE_FLAGS, Proc.MANAGED_SAVE, Proc.MIGRATE_BEGIN3, Proc.MIGRATE_PERFORM3],
    ids=lambda proc: proc.name,
)
def test_requests_that_would_be_lost_keep_a_domain_here(tmp_path: Path, proc: Proc) -> None:
    async def body(world: World) -> None:
        world.target.free_mib = 0
        machine = Machine(world, blk=True)
        client = await world.client()
        machine.fails(1.0)
        await machine.look()
        world.target.suspended[0]["overtaken"] = True
        await machine.look()
        assert machine.suspends == 1, "it is the same failure"
        asked = bytes(machine.dom.write(Writer()).u32(0).u32(0).u32(0).u32(0).u64(0))
        with pytest.raises(ReplyError, match="would be lost: make room"):
            await client.call(proc, asked)
        assert proc not in world.libvirtd.calls()
        # As soon as it has gone on, and where it is in the rings.
        world.target.suspended[0]["overtaken"] = False
        with suppress(ReplyError):
            await client.call(proc, asked)
        assert proc in world.libvirtd.calls()

    play(tmp_path, body)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("before", "now", "has_come"),
    [
        (Room(0, MIB, 0), Room(MIB - 1, MIB, 99 * MIB), False),
        (Room(0, MIB, None), Room(MIB, MIB, None), True),
        (Room(MIB, MIB, None), Room(MIB, MIB, None), False),
        (Room(MIB, MIB, None), Room(2 * MIB, MIB, None), True),
        (Room(5 * MIB, MIB, 4096), Room(5 * MIB, MIB, 8192), False),
        (Room(5 * MIB, MIB, 4096), Room(5 * MIB, MIB, 4096 + MIB), True),
        (Room(5 * MIB, MIB, None), Room(5 * MIB, MIB, 99 * MIB), False),
    ],
)
def test_room_has_come_where_there_is_a_cluster_more(
    before: Room, now: Room, has_come: bool
) -> None:
    assert now.has_come_since(before) is has_come


def test_one_that_fails_again_and_again_is_tried_less_and_less_often(tmp_path: Path) -> None:
    """As where the file system below the lvstore is full, and what is free there goes to others."""
    returns, uuid = AutoResume(tmp_path), bytes(16)
    there = {"lvs0": Room(5 * MIB, MIB, 0)}
    now = 1000.0

    def paused(rooms: dict[str, Room] = there) -> WaitingDomain:
        returns.paused(uuid, [Suspended("vm-x", 0, "no_space", now)], rooms, now)
        return returns.waiting[uuid]

    # There was room when it was looked for: perhaps it had come just before.
    note = paused()
    assert not note.may_go_on(there, now) and note.may_go_on(there, now + AGAIN_S)
    returns.resumed(uuid, now)
    pauses = []
    for _ in range(12):
        note = paused()
        assert not note.may_go_on(there, now + 10 * AGAIN_MAX_S), "there is no more than before"
        assert note.may_go_on({"lvs0": Room(5 * MIB, MIB, MIB)}, note.not_before)
        pauses.append(note.not_before - now)
        returns.resumed(uuid, now)
    assert pauses[:3] == [AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S]
    assert pauses[-1] == AGAIN_MAX_S
    # After it has run for a while it is as at first.
    now += 2 * CALM_S
    empty = {"lvs0": Room(0, MIB, None)}
    assert paused(empty).not_before == now
    assert not paused(empty).may_go_on({}, now), "its lvstore is not loaded"
