"""A domain stops about the pivot of its disk: what its guest wrote last is on one volume alone.

Nothing is to end what the target has recorded of the disk before the definition names that volume.
"""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from plugin.gateway import copies, domcheckpoints, domsnapshots, snapshotsteps
from plugin.gateway.errors import Code, Refused
from plugin.gateway.handlers.blockjobs import PIVOT
from plugin.gateway.journal import SnapshotEntry
from plugin.gateway.messages import XmlCall
from plugin.gateway.procs import Proc
from plugin.gateway.reconcile import Reconciler, reconcile_domain
from plugin.gateway.recovery import recover_all
from plugin.gateway.xdr import Writer
from pydataplane.errors import TargetTimeout
from tests.support.fake_target import Volume
from tests.unit.gateway.test_copies import CONTROLLER, KEY, Scene, act, next_gateway
from tests.unit.gateway.world import UUID_1, UUID_2, ReplyError, disk, plain, until

STOPPED = 5
UNKNOWN = "nobody knows yet whether disk sdb is on"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*_: object) -> list[object]:
        return []

    monkeypatch.setattr(copies, "PERIOD_S", 0.02)
    monkeypatch.setattr(domcheckpoints, "of_domain", none)


def stopped(scene: Scene) -> None:
    """Has the domain stop, and libvirtd say so."""
    scene.dom.live = None
    payload = scene.dom.ref.write(Writer().i32(1)).i32(STOPPED).i32(0)
    scene.world.gateway.loop.lifecycle_event(bytes(payload))


async def pivoted(scene: Scene) -> str:
    """Has the target pivot a disk to its copy, and the gateway hear nothing of it; the copy."""
    await scene.begin()
    scene.ready()
    assert await scene.event() == ("sdb", 2, 3)
    answer = scene.target.virtlun_lun_copy_pivot

    def dies(ctrlr: str, scsi_target_num: int) -> bool:
        answer(ctrlr, scsi_target_num)
        scene.target.refuse["bdev_get_bdevs"] = TargetTimeout("no answer")
        raise TargetTimeout("no answer")

    scene.target.virtlun_lun_copy_pivot = dies  # type: ignore[method-assign]
    with pytest.raises(ReplyError):
        await scene.end(PIVOT)
    return scene.target.controllers[CONTROLLER][0]


async def start(scene: Scene) -> None:
    await scene.client.call(Proc.CREATE, bytes(scene.dom.ref.write(Writer())))


def test_a_start_that_comes_before_recovery_is_of_the_new_volume(tmp_path: Path) -> None:
    """Clients wait in the socket while no gateway runs."""

    async def body(scene: Scene) -> None:
        made = await pivoted(scene)
        scene.target.refuse.clear()
        scene.dom.live = None
        await next_gateway(scene, recovers=False)
        await start(scene)
        assert scene.sources() == ["lvs0/new", "lvs0/new"]
        assert scene.target.controllers[CONTROLLER] == {0: made}
        assert scene.notes() == []
        await recover_all(scene.world.gateway.services)

    act(tmp_path, body)


def test_a_start_before_recovery_waits_for_what_cannot_be_shown(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        made, target = await pivoted(scene), scene.target
        target.refuse.clear()
        scene.dom.live = None
        away = target.volumes.pop("lvs0/new")
        target.hidden[KEY] = target.controllers[CONTROLLER].pop(0)
        target.problems = [f"target 0 of controller {CONTROLLER} is not restored: no bdev {made}"]
        await next_gateway(scene, recovers=False)
        await reconcile_domain(scene.world.gateway.services, scene.dom.ref)
        with pytest.raises(ReplyError, match=UNKNOWN):
            await start(scene)
        assert target.hidden == {KEY: made}
        target.volumes["lvs0/new"] = away
        target.controllers[CONTROLLER][0] = target.hidden.pop(KEY)
        await start(scene)
        assert scene.sources() == ["lvs0/new", "lvs0/new"]

    act(tmp_path, body)


def test_the_target_ends_in_the_pivot_and_the_domain_is_destroyed(tmp_path: Path) -> None:
    """The gateway lives; the target comes back before the lvstore of the copy."""

    async def body(scene: Scene) -> None:
        made, target, world = await pivoted(scene), scene.target, scene.world
        stopped(scene)
        await world.gateway.loop._release_stopped()
        with pytest.raises(ReplyError, match=UNKNOWN):
            await start(scene)
        target.refuse.clear()
        away = target.volumes.pop("lvs0/new")
        target.hidden[KEY] = target.controllers[CONTROLLER].pop(0)
        target.problems = [f"target 0 of controller {CONTROLLER} is not restored: no bdev {made}"]
        stopped(scene)
        await world.gateway.loop._release_stopped()
        await recover_all(world.gateway.services)
        assert target.hidden == {KEY: made}, "what is recorded stays"
        with pytest.raises(ReplyError, match=UNKNOWN):
            await start(scene)
        target.volumes["lvs0/new"] = away
        target.controllers[CONTROLLER][0] = target.hidden.pop(KEY)
        await recover_all(world.gateway.services)
        assert scene.dom.config is not None and "lvs0/new" in scene.dom.config
        stopped(scene)
        await world.gateway.loop._release_stopped()
        assert CONTROLLER not in target.controllers
        await start(scene)
        assert scene.sources() == ["lvs0/new", "lvs0/new"]

    act(tmp_path, body)


@pytest.mark.parametrize("first", ["round", "follower", "gone"])
def test_the_domain_stops_while_libvirtd_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Of which it tells nobody when it is back."""

    async def body(scene: Scene) -> None:
        made, services = await pivoted(scene), scene.world.gateway.services
        if first == "round":
            monkeypatch.setattr(copies, "look", late)
            # The follower's look that began before has ended, and found no answer.
            async with services.domain_lock(scene.dom.ref.uuid):
                pass
        scene.dom.live = None
        if first == "gone":
            scene.target.controllers.clear()
        scene.target.refuse.clear()
        if first == "round":
            await Reconciler(services).run()
            assert scene.target.controllers[CONTROLLER] == {0: made}, "it is not looked at yet"
            await copies.leave_stopped(services)
            await recover_all(services)
            await Reconciler(services).run()
            assert CONTROLLER not in scene.target.controllers
        elif first == "follower":
            await until(lambda: not scene.notes())
        else:
            await until(lambda: bool(services.journal.pending))
            await asyncio.sleep(0.05)
            assert len(scene.notes()) == 1
            with pytest.raises(ReplyError, match=UNKNOWN):
                await start(scene)
            return
        await start(scene)
        assert scene.sources() == ["lvs0/new", "lvs0/new"]

    async def late(*_: object) -> None:
        raise Refused(Code.OPERATION_FAILED, "not looked at yet")

    act(tmp_path, body)


@pytest.mark.parametrize("asked", [True, False, None])
def test_a_controller_that_is_gone_says_nothing_of_a_pivot_that_was_asked_for(
    tmp_path: Path, asked: bool | None
) -> None:
    """Who has taken it away may have been the first. An earlier gateway has noted neither."""

    async def body(scene: Scene) -> None:
        if asked:
            await pivoted(scene)
            scene.target.refuse.clear()
        else:
            await scene.begin()
            scene.target.copies.clear()
        scene.target.controllers.clear()
        scene.dom.live = None
        if asked is None:
            (note,) = scene.notes()
            values = json.loads(note.read_text())
            assert values.pop("asked") is False
            note.write_text(json.dumps(values))
        await next_gateway(scene)
        assert len(scene.notes()) == bool(asked)
        if asked:
            with pytest.raises(ReplyError, match=UNKNOWN):
                await start(scene)
            # The definition is said to be right.
            config = scene.dom.config
            await scene.client.detach(scene.dom.ref, disk(), 2)
            await recover_all(scene.world.gateway.services)
            scene.dom.config = config
        assert scene.notes() == []
        await start(scene)
        assert scene.sources() == ["lvs0/data", "lvs0/data"]

    act(tmp_path, body)


async def unresolved(scene: Scene, *others: str) -> tuple[str, Volume]:
    """Stops the domain, which has other disks, too, with its copy on a volume that is away.

    Returns that volume, and its UUID before.
    """
    made, target = await pivoted(scene), scene.target
    target.refuse.clear()
    for number, name in enumerate(others, 1):
        target.controllers[CONTROLLER][number] = target.add_volume(name)
        target.options[CONTROLLER, number] = {}
    target.hidden[KEY] = target.controllers[CONTROLLER].pop(0)
    target.problems = [f"target 0 of controller {CONTROLLER} is not restored: no bdev {made}"]
    away = target.volumes.pop("lvs0/new")
    scene.dom.live = None
    await next_gateway(scene)
    return made, away


def test_another_domains_start_takes_away_nothing_that_is_not_resolved(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        made, away = await unresolved(scene, "lvs0/other")
        target = scene.target
        second = scene.world.domain("two", UUID_2, running=False, disks=disk("lvs0/other"))
        starts = bytes(second.ref.write(Writer()))
        with pytest.raises(ReplyError, match="volume lvs0/other is in use by domain one"):
            await scene.client.call(Proc.CREATE, starts)
        assert target.hidden == {KEY: made}
        target.volumes["lvs0/new"] = away
        target.controllers[CONTROLLER][0] = target.hidden.pop(KEY)
        await scene.client.call(Proc.CREATE, starts)
        assert scene.dom.config is not None and "lvs0/new" in scene.dom.config

    act(tmp_path, body)


def test_a_revert_takes_away_nothing_that_is_not_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a snapshot that was taken since."""

    async def xml_of(*_: object) -> str:
        return f"<domainsnapshot><name>s</name>{plain()}</domainsnapshot>"

    async def body(scene: Scene) -> None:
        made, away = await unresolved(scene)
        entry = SnapshotEntry("revert", UUID_1, "one", "s", ())
        with pytest.raises(Refused, match=UNKNOWN):
            await snapshotsteps.revert(scene.world.gateway.services, entry, scene.dom.ref)
        assert scene.target.hidden == {KEY: made}
        scene.target.volumes["lvs0/new"] = away
        scene.target.controllers[CONTROLLER][0] = scene.target.hidden.pop(KEY)
        await snapshotsteps._released(scene.world.gateway.services, scene.dom.ref)
        assert scene.notes() == [] and CONTROLLER not in scene.target.controllers
        assert scene.dom.config is not None and "lvs0/new" in scene.dom.config

    monkeypatch.setattr(domsnapshots, "xml_of", xml_of)
    act(tmp_path, body)


def test_a_job_that_has_ended_is_not_pivoted(tmp_path: Path) -> None:
    """What its journal's entry says then is of the past."""

    async def body(scene: Scene) -> None:
        await scene.begin()
        services = scene.world.gateway.services
        (job,) = (job for job, _ in services.block_jobs.copies())
        stopped(scene)
        scene.ready()
        with pytest.raises(Exception, match="the block job of disk sdb has ended"):
            await copies.pivot(services, job)
        assert KEY in scene.target.copies

    act(tmp_path, body)


def test_a_pivot_that_cannot_be_noted_is_not_asked_for(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.begin()
        scene.ready()
        assert await scene.event() == ("sdb", 2, 3)
        (note,) = scene.notes()
        in_the_way = note.with_suffix(".new")
        in_the_way.mkdir()
        with pytest.raises(ReplyError, match="copy of disk sdb: "):
            await scene.end(PIVOT)
        assert "virtlun_lun_copy_pivot" not in scene.target.calls
        assert (await scene.info())[:2] == (1, 2), "the copy goes on"
        in_the_way.rmdir()
        await scene.end(PIVOT)
        assert await scene.event() == ("sdb", 2, 0)
        assert scene.sources() == ["lvs0/new", "lvs0/new"]

    act(tmp_path, body)


def test_a_domain_that_stops_in_the_pivot_is_not_created_anew_before_it_is_resolved(
    tmp_path: Path,
) -> None:
    async def body(scene: Scene) -> None:
        await scene.begin()
        scene.ready()
        assert await scene.event() == ("sdb", 2, 3)
        answer, loop = scene.target.virtlun_lun_copy_pivot, asyncio.get_running_loop()

        def stops(ctrlr: str, scsi_target_num: int) -> bool:
            answer(ctrlr, scsi_target_num)
            told = threading.Event()

            def tell() -> None:
                stopped(scene)
                told.set()

            loop.call_soon_threadsafe(tell)
            assert told.wait(20)
            scene.target.refuse["bdev_get_bdevs"] = TargetTimeout("no answer")
            raise TargetTimeout("no answer")

        scene.target.virtlun_lun_copy_pivot = stops  # type: ignore[method-assign]
        with pytest.raises(ReplyError):
            await scene.end(PIVOT)
        create = XmlCall(plain(devices=disk(), uuid=UUID_1), 0).pack()
        with pytest.raises(ReplyError, match=UNKNOWN):
            await scene.client.call(Proc.CREATE_XML, create)
        assert Proc.CREATE_XML not in scene.world.libvirtd.calls()
        scene.target.refuse.clear()
        await recover_all(scene.world.gateway.services)
        assert scene.dom.config is not None and "lvs0/new" in scene.dom.config

    act(tmp_path, body)
