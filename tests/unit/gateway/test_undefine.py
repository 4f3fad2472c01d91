"""What libvirtd is asked, and what is done, where a domain with checkpoints is undefined."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin.gateway import domcheckpoints, polkit, snapshotsteps
from plugin.gateway.caller import Caller
from plugin.gateway.errors import Code, GatewayError, NoAnswer, Refused
from plugin.gateway.handlers.undefine import CHECKPOINTS_METADATA, SNAPSHOTS_METADATA
from plugin.gateway.lvolcheckpoints import Checkpoint
from plugin.gateway.messages import Domain, DomainCall
from plugin.gateway.procs import Proc
from plugin.gateway.recovery import recover_all
from plugin.gateway.services import Services
from plugin.gateway.xdr import Writer
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate.snapshotxml import DiskSnapshot
from tests.unit.gateway.world import ReplyError, World, disk, play

HELD = DiskSnapshot("sdb", "V", "lvs0", "data@checkpoint-c", "S")
AWAY = NoAnswer(Refusal.NO_TARGET, "no target answers")


class Scene:
    """A domain that is off, with a checkpoint and no snapshot, and what is done to it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.known: list[Checkpoint] | GatewayError = [
            Checkpoint("c", "11111111-1111-4111-8111-111111111111", 1, None, (HELD,))
        ]
        self.forgets: GatewayError | None = None
        self.forgotten: list[tuple[DiskSnapshot, ...]] = []
        self.asked: list[tuple[str, ...]] = []
        self.allowed = True
        self.snapshots = 0
        patch.setattr(domcheckpoints, "of_domain", self._of_domain)
        patch.setattr(snapshotsteps, "forget_checkpoints", self._forget)
        patch.setattr(Caller, "may", self._may)

    async def _of_domain(self, _services: Services, _dom: Domain) -> list[Checkpoint]:
        if isinstance(self.known, GatewayError):
            raise self.known
        return self.known

    async def _forget(self, _services: Services, held: tuple[DiskSnapshot, ...]) -> None:
        if self.forgets is not None:
            raise self.forgets
        self.forgotten.append(held)

    async def _may(self, actions: tuple[str, ...], _name: str, _uuid: str) -> bool:
        self.asked.append(actions)
        return self.allowed

    async def undefine(self, world: World, flags: int | None, *, running: bool = False) -> bool:
        """Returns whether libvirtd was asked; it lets the domain go unless it is to refuse."""
        dom = world.domain(running=running, disks=disk())
        there = world.libvirtd.domains

        def gone(_: bytes) -> bytes:
            there.pop(dom.uuid)
            return b""

        proc = Proc.UNDEFINE if flags is None else Proc.UNDEFINE_FLAGS
        world.libvirtd.answers[proc] = gone
        world.libvirtd.answers[Proc.SNAPSHOT_NUM] = lambda _: bytes(Writer().i32(self.snapshots))
        client = await world.client()
        args = DomainCall(dom.ref, flags=flags or 0).pack(flags=flags is not None)
        try:
            await client.call(proc, args)
        finally:
            asked = proc in world.libvirtd.calls()
        return asked


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """One for a test."""
    return Scene(monkeypatch)


@pytest.mark.parametrize("flags", [None, 0, 1, SNAPSHOTS_METADATA])
def test_without_the_flag_it_is_refused(tmp_path: Path, scene: Scene, flags: int | None) -> None:
    async def body(world: World) -> None:
        with pytest.raises(ReplyError, match="inactive domain with 1 checkpoints") as caught:
            await scene.undefine(world, flags)
        assert caught.value.code == Code.OPERATION_INVALID
        assert world.libvirtd.domains
        assert scene.asked == [(polkit.DELETE,)]

    play(tmp_path, body)


@pytest.mark.parametrize("why", ["denied", "snapshots", "running", "none", "away"])
def test_what_is_libvirtds_to_say_it_is_asked(tmp_path: Path, scene: Scene, why: str) -> None:
    scene.allowed = why != "denied"
    scene.snapshots = int(why == "snapshots")
    if why in ("none", "away"):
        scene.known = AWAY if why == "away" else []

    async def body(world: World) -> None:
        assert await scene.undefine(world, 0, running=why == "running")
        assert scene.forgotten == []

    play(tmp_path, body)


def test_with_the_flag_they_go_when_libvirtd_has_undefined_it(tmp_path: Path, scene: Scene) -> None:
    async def body(world: World) -> None:
        assert await scene.undefine(world, CHECKPOINTS_METADATA)
        assert scene.forgotten == [(HELD,)]
        assert list((tmp_path / "notes").iterdir()) == []

    play(tmp_path, body)


def test_with_the_flag_they_stay_where_libvirtd_refuses(tmp_path: Path, scene: Scene) -> None:
    async def body(world: World) -> None:
        world.libvirtd.refuse[Proc.UNDEFINE_FLAGS] = Refused(Code.OPERATION_INVALID, "saved image")
        with pytest.raises(ReplyError, match="saved image"):
            await scene.undefine(world, CHECKPOINTS_METADATA)
        assert scene.forgotten == []
        assert list((tmp_path / "notes").iterdir()) == []

    play(tmp_path, body)


def test_with_the_flag_somebody_has_to_tell_which_there_are(tmp_path: Path, scene: Scene) -> None:
    scene.known = AWAY

    async def body(world: World) -> None:
        with pytest.raises(ReplyError, match="no target answers"):
            await scene.undefine(world, CHECKPOINTS_METADATA)
        assert world.libvirtd.domains

    play(tmp_path, body)


def test_a_target_that_goes_away_meanwhile_is_told_later(tmp_path: Path, scene: Scene) -> None:
    scene.forgets = AWAY

    async def body(world: World) -> None:
        assert await scene.undefine(world, CHECKPOINTS_METADATA)
        (stored,) = world.gateway.services.journal.pending
        assert stored.path.exists()
        scene.forgets = None
        await recover_all(world.gateway.services)
        assert not stored.path.exists()
        assert scene.forgotten == [(HELD,)]

    play(tmp_path, body)
