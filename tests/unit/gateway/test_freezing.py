"""What becomes of a guest whose file systems were frozen, by what its agent and libvirtd say."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from plugin.gateway import freezing, snapshotsteps
from plugin.gateway.errors import Code, GatewayError, Refused
from plugin.gateway.freezing import NotFrozen, NotThawed
from plugin.gateway.journal import SnapshotEntry
from plugin.gateway.messages import Domain
from plugin.gateway.procs import Proc
from plugin.gateway.recovery import recover, recover_all
from tests.unit.gateway.fake_libvirtd import Hang
from tests.unit.gateway.world import World, disk, play

AWAY = Refused(Code.AGENT_UNRESPONSIVE, "QEMU guest agent is not connected")
SILENT = Refused(Code.AGENT_UNRESPONSIVE, "Guest agent disappeared while executing command")


def frozen(dom: Domain, run: int | None = None) -> SnapshotEntry:
    """Returns the entry of a checkpoint that was under way."""
    return SnapshotEntry(
        "checkpoint",
        dom.uuid_text,
        dom.name,
        "c",
        (),
        thaw=True,
        run=dom.id if run is None else run,
    )


def thaws(world: World) -> int:
    return world.libvirtd.calls().count(Proc.FSTHAW)


def test_an_agent_that_does_not_answer_is_asked_until_it_has_thawed(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk()).ref
        journal = world.gateway.services.journal
        world.libvirtd.answers[Proc.FSTHAW] = lambda _: b"\0\0\0\1"
        world.libvirtd.refuse[Proc.FSTHAW] = AWAY
        await recover(world.gateway.services, journal.append(frozen(dom)))
        (stored,) = journal.pending
        assert stored.path.exists() and stored.entry.operation == "thaw"
        await recover_all(world.gateway.services)
        assert len(journal.pending) == 1
        world.libvirtd.refuse.pop(Proc.FSTHAW, None)
        await recover_all(world.gateway.services)
        assert not journal.pending and not stored.path.exists()
        assert thaws(world) == 3

    play(tmp_path, body)


@pytest.mark.parametrize("why", ["it has ended", "it was started anew"])
def test_a_domain_that_has_ended_is_not_asked_for_ever(tmp_path: Path, why: str) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk()).ref
        world.libvirtd.refuse[Proc.FSTHAW] = Refused(Code.OPERATION_INVALID, "not running")
        run = dom.id + 1 if why == "it was started anew" else None
        journal = world.gateway.services.journal
        await recover(world.gateway.services, journal.append(frozen(dom, run)))
        assert not journal.pending and not list((tmp_path / "notes").iterdir())
        assert thaws(world) == (why == "it has ended")

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("said", "certain"),
    [
        (AWAY, True),
        (Refused(Code.ARGUMENT_UNSUPPORTED, "QEMU guest agent is not configured"), True),
        (Refused(Code.OPERATION_INVALID, "domain is not running"), True),
        (SILENT, False),
        (Refused(Code.INTERNAL_ERROR, "unable to execute QEMU agent command"), False),
    ],
)
def test_what_was_never_frozen_is_not_thawed(tmp_path: Path, said: Refused, certain: bool) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk()).ref
        services = world.gateway.services
        world.libvirtd.refuse[Proc.FSFREEZE] = said
        world.libvirtd.answers[Proc.FSTHAW] = lambda _: b"\0\0\0\0"
        stored = services.journal.append(frozen(dom))
        with pytest.raises(GatewayError) as caught:
            await snapshotsteps.hold_still(services, frozen(dom), dom)
        assert isinstance(caught.value, NotFrozen) == certain
        await recover(services, snapshotsteps.unfrozen(services, stored, caught.value))
        assert thaws(world) == (not certain)
        assert not services.journal.pending and not list((tmp_path / "notes").iterdir())

    play(tmp_path, body)


def test_a_domain_that_is_paused_meanwhile_is_not_waited_for(tmp_path: Path) -> None:
    """Its agent cannot answer; what it is asked to freeze it may freeze when the domain goes on."""

    async def body(world: World) -> None:
        dom = world.domain(disks=disk()).ref
        services = world.gateway.services
        hang = world.libvirtd.hang = Hang(Proc.FSFREEZE, 1, done=False)
        work = asyncio.create_task(freezing.freeze(services, dom))
        await hang.reached.wait()
        services.paused[dom.uuid] = {"sdb": "no_space"}
        with pytest.raises(Refused, match="'one' is paused because of I/O errors"):
            await work
        with pytest.raises(NotThawed):
            await freezing.thaw(services, dom)
        assert thaws(world) == 0

    play(tmp_path, body)
