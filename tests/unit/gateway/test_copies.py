"""A disk's volume is copied to another: what clients, libvirtd and the target hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from plugin.gateway import copies, domcheckpoints
from plugin.gateway.errors import Code, Refused
from plugin.gateway.handlers.blockjobs import INFO_BYTES, PIVOT
from plugin.gateway.handlers.copying import REUSE_EXT, SHALLOW, TRANSIENT_JOB
from plugin.gateway.messages import ULLONG, Domain, TypedParam
from plugin.gateway.procs import Proc
from plugin.gateway.reconcile import reconcile_domain
from plugin.gateway.recovery import recover_all
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import translate
from pydataplane.errors import RpcError, TargetTimeout
from tests.unit.gateway.fake_libvirtd import FakeDomain
from tests.unit.gateway.world import UUID_1, ReplyError, TestClient, World, disk, play, until

CONTROLLER = f"vm-{UUID_1}"
KEY = (CONTROLLER, 0)
MIB = 1 << 20
DEST = "<disk type='file'><source file='/dev/virtlun/{}'/></disk>"
BLOCK_JOB_2 = 16


class Scene:
    """A domain with the disk sdb, and a client."""

    def __init__(self, world: World, client: TestClient, dom: FakeDomain) -> None:
        self.world, self.client, self.dom = world, client, dom
        self.target = world.target

    async def begin(
        self,
        to: str = "lvs0/new",
        flags: int = TRANSIENT_JOB,
        *,
        dest: str = DEST,
        bandwidth: int | None = None,
    ) -> None:
        writer = self.dom.ref.write(Writer()).string("sdb").string(dest.format(to))
        params = [] if bandwidth is None else [TypedParam("bandwidth", ULLONG, bandwidth)]
        writer.array(params, lambda param: param.write(writer))
        await self.client.call(Proc.BLOCK_COPY, bytes(writer.u32(flags)))

    async def rebase(self, to: str, bandwidth: int, flags: int) -> None:
        writer = self.dom.ref.write(Writer()).string("sdb")
        writer.optional(f"/dev/virtlun/{to}", writer.string)
        await self.client.call(Proc.BLOCK_REBASE, bytes(writer.u64(bandwidth).u32(flags)))

    async def info(self, flags: int = 0) -> tuple[int, int, int, int, int]:
        args = self.dom.ref.write(Writer()).string("sdb").u32(flags)
        reader = Reader(await self.client.call(Proc.GET_BLOCK_JOB_INFO, bytes(args)))
        return reader.i32(), reader.i32(), reader.u64(), reader.u64(), reader.u64()

    async def end(self, flags: int) -> None:
        args = self.dom.ref.write(Writer()).string("sdb").u32(flags)
        await self.client.call(Proc.BLOCK_JOB_ABORT, bytes(args))

    async def speed(self, bandwidth: int, flags: int = 0) -> None:
        args = self.dom.ref.write(Writer()).string("sdb").u64(bandwidth).u32(flags)
        await self.client.call(Proc.BLOCK_JOB_SET_SPEED, bytes(args))

    async def event(self) -> tuple[str, int, int]:
        proc, payload = await self.client.event(20)
        assert proc == Proc.EVENT_BLOCK_JOB_2
        reader = Reader(payload)
        reader.i32()
        type(self.dom.ref).read(reader)
        return reader.string(), reader.i32(), reader.i32()

    def ready(self) -> None:
        self.target.copies[KEY]["state"] = "ready"

    def sources(self) -> list[str]:
        """The volume of each side."""
        plans = [translate.plan(xml or "") for xml in (self.dom.live, self.dom.config)]
        return [lun.volume.alias for plan in plans if plan is not None for lun in plan.luns]

    def notes(self) -> list[Path]:
        return list((self.world.path.parent / "notes").glob("*"))


def act(folder: Path, body: Callable[[Scene], Awaitable[None]], **made: Any) -> None:
    async def with_world(world: World) -> None:
        dom = world.domain(disks=disk(), **made)
        answers = world.libvirtd.refuse
        for proc in (
            Proc.BLOCK_COPY,
            Proc.BLOCK_REBASE,
            Proc.BLOCK_JOB_ABORT,
            Proc.BLOCK_JOB_SET_SPEED,
        ):
            answers[proc] = Refused(Code.INVALID_ARG, "disk 'sdb' not found in domain")
        world.libvirtd.answers[Proc.SNAPSHOT_NUM] = lambda _: bytes(Writer().i32(0))
        client = await world.client()
        args = Writer().i32(BLOCK_JOB_2)
        args.optional(None, lambda _: None)
        await client.call(Proc.CALLBACK_REGISTER_ANY, bytes(args))
        await body(Scene(world, client, dom))

    play(folder, with_world)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*_: object) -> list[object]:
        return []

    monkeypatch.setattr(copies, "PERIOD_S", 0.02)
    monkeypatch.setattr(domcheckpoints, "of_domain", none)


def test_a_copy_from_its_begin_to_its_pivot(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.begin(bandwidth=3 * MIB)
        copy = scene.target.copies[KEY]
        made = scene.target.volume("lvs0/new")
        assert (copy["dst_bdev_name"], copy["bytes_per_second"]) == (made.uuid, 3 * MIB)
        assert (made.mib, made.thin) == (64, True)
        copy["copied_bytes"] = copy["total_bytes"]
        # All of it is only done when it is ready.
        assert await scene.info() == (1, 2, 3, 64 * MIB - 1, 64 * MIB)
        assert (await scene.info(INFO_BYTES))[2] == 3 * MIB
        with pytest.raises(ReplyError, match="not ready for pivot yet") as caught:
            await scene.end(PIVOT)
        assert caught.value.code == Code.BLOCK_COPY_ACTIVE
        await scene.speed(7)
        assert copy["bytes_per_second"] == 7 * MIB
        await scene.speed(0, 1)
        assert copy["bytes_per_second"] == 0
        scene.ready()
        assert await scene.event() == ("sdb", 2, 3)
        assert await scene.info() == (1, 2, 0, 64 * MIB, 64 * MIB)
        await scene.end(PIVOT)
        assert await scene.event() == ("sdb", 2, 0)
        assert scene.sources() == ["lvs0/new", "lvs0/new"]
        assert scene.target.controllers[CONTROLLER] == {0: made.uuid}
        assert (await scene.info())[0] == 0
        await until(lambda: not scene.notes())
        shown = await scene.client.xml(scene.dom.ref)
        assert "<source file='/dev/virtlun/lvs0/new'/>" in shown.replace('"', "'")
        assert "type='file'" in shown.replace('"', "'")

    act(tmp_path, body)


def test_a_copy_that_is_given_up(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.begin()
        await scene.end(0)
        assert await scene.event() == ("sdb", 2, 2)
        assert scene.target.copies == {}
        assert scene.sources() == ["lvs0/data", "lvs0/data"]
        await until(lambda: not scene.notes())
        # What was made stays, as a file of libvirt's does.
        with pytest.raises(ReplyError, match="volume lvs0/new exists already: name another"):
            await scene.begin()
        await scene.begin(flags=TRANSIENT_JOB | REUSE_EXT)

    act(tmp_path, body)


def test_the_older_call(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.rebase("lvs0/new", 5, 8)
        assert scene.target.copies[KEY]["bytes_per_second"] == 5 * MIB
        await scene.end(0)
        await scene.rebase("lvs0/other", 5, 8 | 64 | 32)
        assert scene.target.copies[KEY]["bytes_per_second"] == 5
        (note,) = scene.notes()
        assert "dev='/dev/virtlun/lvs0/other'" in note.read_text()

    act(tmp_path, body, persistent=False)


def test_a_copy_that_fails_is_told(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.begin()
        scene.target.copies[KEY] |= {"state": "failed", "error": "the medium could not be read"}
        assert await scene.event() == ("sdb", 2, 1)
        assert scene.target.copies == {}
        assert (await scene.info())[0] == 0
        assert scene.sources() == ["lvs0/data", "lvs0/data"]

    act(tmp_path, body)


def test_a_copy_that_the_target_lost_is_told(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.begin()
        scene.target.copies.clear()
        assert await scene.event() == ("sdb", 2, 1)
        assert scene.sources() == ["lvs0/data", "lvs0/data"]
        await until(lambda: not scene.notes())

    act(tmp_path, body)


def test_a_domain_that_stops_has_no_job_any_more(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.begin()
        scene.dom.live = None
        scene.target.copies.clear()
        scene.target.controllers.clear()
        await until(lambda: not scene.notes())
        assert scene.client.messages == []

    act(tmp_path, body)


async def next_gateway(scene: Scene, *, recovers: bool = True) -> None:
    """Has the journal be that of a gateway that was killed, and found."""
    services = scene.world.gateway.services
    await services.block_jobs.close()
    services.block_jobs._jobs.clear()
    (note,) = scene.notes()
    note.rename(note.with_name("1-1-1.json"))
    if recovers:
        await recover_all(services)


@pytest.mark.parametrize("became", ["goes on", "pivoted", "lost", "stopped", "pivoted and stopped"])
def test_the_next_gateway_finds_out_what_became_of_it(tmp_path: Path, became: str) -> None:
    async def body(scene: Scene) -> None:
        await scene.begin()
        made = scene.target.volume("lvs0/new").uuid
        if "stopped" in became:
            scene.dom.live = None
        if "pivoted" in became:
            scene.ready()
            scene.target.virtlun_lun_copy_pivot(*KEY)
        if became == "lost":
            scene.target.copies.clear()
        await next_gateway(scene)
        if became == "goes on":
            scene.ready()
            assert await scene.event() == ("sdb", 2, 3)
            await scene.end(PIVOT)
            assert await scene.event() == ("sdb", 2, 0)
        elif became == "pivoted":
            assert await scene.event() == ("sdb", 2, 0)
        elif became == "lost":
            assert await scene.event() == ("sdb", 2, 1)
        await until(lambda: not scene.notes())
        moved = became == "goes on" or "pivoted" in became
        sides = 1 if "stopped" in became else 2
        assert scene.sources() == ["lvs0/new" if moved else "lvs0/data"] * sides
        assert (scene.target.controllers[CONTROLLER][0] == made) == moved

    act(tmp_path, body)


@pytest.mark.parametrize("ends", ["comes back", "is defined otherwise"])
def test_a_stopped_domain_whose_copy_cannot_be_shown_waits_for_it(
    tmp_path: Path, ends: str
) -> None:
    """What its guest wrote last is there alone, so it starts on nothing else."""

    async def body(scene: Scene) -> None:
        await scene.begin()
        target, services = scene.target, scene.world.gateway.services
        made = target.volume("lvs0/new").uuid
        scene.dom.live = None
        scene.ready()
        target.virtlun_lun_copy_pivot(*KEY)
        away = target.volumes.pop("lvs0/new")
        target.hidden[KEY] = target.controllers[CONTROLLER].pop(0)
        target.problems = [f"target 0 of controller {CONTROLLER} is not restored: no bdev {made}"]
        await next_gateway(scene)
        assert len(scene.notes()) == 1
        dom = Domain("first", scene.dom.ref.uuid, -1)
        await reconcile_domain(services, dom)
        assert target.hidden == {KEY: made}, "what is recorded stays"
        start = bytes(scene.dom.ref.write(Writer()))
        with pytest.raises(ReplyError, match="nobody knows yet whether disk sdb is on"):
            await scene.client.call(Proc.CREATE, start)
        if ends == "comes back":
            target.volumes["lvs0/new"] = away
            target.controllers[CONTROLLER][0] = target.hidden.pop(KEY)
        else:
            target.add_volume("lvs0/else")
            assert scene.dom.config is not None
            scene.dom.config = scene.dom.config.replace("lvs0/data", "lvs0/else")
            scene.dom.config = scene.dom.config.replace('"data"', '"else"')
        await recover_all(services)
        assert scene.notes() == []
        await scene.client.call(Proc.CREATE, start)
        name = "lvs0/new" if ends == "comes back" else "lvs0/else"
        assert scene.sources() == [name, name]
        assert target.users(target.volume(name).uuid) == [CONTROLLER]

    act(tmp_path, body)


def test_a_copy_that_an_earlier_run_left_does_not_end_that_of_this_one(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.begin()
        (note,) = scene.notes()
        services = scene.world.gateway.services
        (job,) = (job for job, _ in services.block_jobs.copies())
        assert job.copy is not None
        left = note.with_name("1-1-1.json")
        left.write_text(note.read_text())
        await recover_all(services)
        assert scene.notes() == [note]
        assert services.block_jobs.runs(job)

    act(tmp_path, body)


def test_a_target_that_does_not_answer_resolves_nothing(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.begin()
        scene.dom.live = None
        scene.target.refuse["bdev_get_bdevs"] = TargetTimeout("no answer")
        await next_gateway(scene)
        assert len(scene.notes()) == 1
        scene.target.refuse.clear()
        await recover_all(scene.world.gateway.services)
        assert scene.notes() == []

    act(tmp_path, body)


def test_a_pivot_whose_answer_was_lost_is_found_out(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.begin()
        scene.ready()
        assert await scene.event() == ("sdb", 2, 3)
        pivot = scene.target.virtlun_lun_copy_pivot

        def dies(ctrlr: str, scsi_target_num: int) -> bool:
            pivot(ctrlr, scsi_target_num)
            raise RpcError(-5, "Input/output error")

        scene.target.virtlun_lun_copy_pivot = dies  # type: ignore[method-assign]
        with pytest.raises(ReplyError, match="Input/output error"):
            await scene.end(PIVOT)
        assert await scene.event() == ("sdb", 2, 0)
        assert scene.sources() == ["lvs0/new", "lvs0/new"]

    act(tmp_path, body)


def test_a_pivot_that_is_not_completed_is_not_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guest writes to the copy: so its domain follows, whoever asks for the contrary."""

    async def body(scene: Scene) -> None:
        await scene.begin()
        scene.ready()
        failed = Refused(Code.OPERATION_FAILED, "libvirtd is busy")
        scene.world.libvirtd.refuse[Proc.SET_METADATA] = failed
        for flags in (PIVOT, 0):
            with pytest.raises(ReplyError, match="libvirtd is busy"):
                await scene.end(flags)
        assert len(scene.notes()) == 1
        del scene.world.libvirtd.refuse[Proc.SET_METADATA]
        with pytest.raises(ReplyError, match="disk sdb is on its copy"):
            await scene.end(0)
        assert await scene.event() == ("sdb", 2, 0)
        assert scene.sources() == ["lvs0/new", "lvs0/new"]
        assert scene.notes() == []

    monkeypatch.setattr(copies, "PERIOD_S", 3600)  # the client is first
    act(tmp_path, body)


def test_the_persistent_side_stays_where_it_has_another_volume(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        scene.target.add_volume("lvs0/else")
        assert scene.dom.config is not None
        scene.dom.config = scene.dom.config.replace("lvs0/data", "lvs0/else")
        scene.dom.config = scene.dom.config.replace('"data"', '"else"')
        await scene.begin()
        scene.ready()
        await scene.end(PIVOT)
        assert scene.sources() == ["lvs0/new", "lvs0/else"]

    act(tmp_path, body)


@pytest.mark.parametrize(
    ("to", "flags", "dest", "code", "says"),
    [
        ("lvs0/new", 0, DEST, Code.OPERATION_INVALID, "domain is not transient"),
        ("lvs0/new", TRANSIENT_JOB | 64, DEST, Code.INVALID_ARG, r"unsupported flags \(0x40\)"),
        ("lvs0/none", TRANSIENT_JOB | REUSE_EXT, DEST, None, "no volume lvs0/none"),
        ("lvs0/small", TRANSIENT_JOB | REUSE_EXT, DEST, None, "67108864 are needed: resize it"),
        ("lvs0/data", TRANSIENT_JOB | REUSE_EXT, DEST, None, "cannot be copied to itself"),
        ("lvs9/new", TRANSIENT_JOB, DEST, None, "lvs9"),
        (
            "x",
            TRANSIENT_JOB,
            "<disk type='file'><source file='/var/tmp/x'/></disk>",
            Code.OPERATION_UNSUPPORTED,
            "to another volume of its target alone",
        ),
        (
            "lvs0/new",
            TRANSIENT_JOB,
            DEST.replace("<source", "<driver type='qcow2'/><source"),
            Code.CONFIG_UNSUPPORTED,
            "what is on a virtlun volume is raw",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, to: str, flags: int, dest: str, code: Code | None, says: str
) -> None:
    async def body(scene: Scene) -> None:
        scene.target.add_volume("lvs0/small", 63)
        with pytest.raises(ReplyError, match=says) as caught:
            await scene.begin(to, flags, dest=dest)
        assert code in (None, caught.value.code)
        assert scene.target.copies == {}
        assert scene.notes() == []

    act(tmp_path, body)


def test_a_shallow_copy_is_of_what_has_nothing_below(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.begin(flags=TRANSIENT_JOB | SHALLOW)
        assert KEY in scene.target.copies

    act(tmp_path, body)


def test_a_domain_with_snapshots_keeps_its_volumes(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        scene.world.libvirtd.answers[Proc.SNAPSHOT_NUM] = lambda _: bytes(Writer().i32(2))
        with pytest.raises(ReplyError, match="has 2 snapshots, which stay"):
            await scene.begin()

    act(tmp_path, body)


def test_what_the_target_refuses_leaves_nothing(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        scene.target.fail["virtlun_lun_copy_start"] = RpcError(-16, "bdev x is in use by y")
        with pytest.raises(ReplyError, match="is in use by y"):
            await scene.begin()
        assert "lvs0/new" not in scene.target.volumes
        assert scene.notes() == []
        assert (await scene.info())[0] == 0

    act(tmp_path, body)


def test_what_a_copy_is_in_the_way_of(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.begin()
        with pytest.raises(ReplyError, match="disk 'sdb' already in active block job"):
            await scene.begin("lvs0/more")
        with pytest.raises(ReplyError, match="already in active block job"):
            await scene.client.detach(scene.dom.ref, disk(), 1)
        args = scene.dom.ref.write(Writer()).string("sdb").u64(128 * MIB).u32(1)
        with pytest.raises(ReplyError, match="already in active block job"):
            await scene.client.call(Proc.BLOCK_RESIZE, bytes(args))
        dom = bytes(scene.dom.ref.write(Writer()))
        for proc, rest in (
            (Proc.SAVE, Writer().string("/tmp/image")),
            (Proc.MANAGED_SAVE, Writer().u32(0)),
            (Proc.MIGRATE_BEGIN3_PARAMS, Writer().u32(0).u32(1)),
        ):
            with pytest.raises(ReplyError, match="domain has active block job"):
                await scene.client.call(proc, dom + bytes(rest))

    act(tmp_path, body)


def test_who_may_not_is_told_by_libvirtd_and_nothing_is_done(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        scene.world.libvirtd.refuse[Proc.BLOCK_COPY] = Refused(Code.ACCESS_DENIED, "access denied")
        with pytest.raises(ReplyError, match="access denied"):
            await scene.begin()
        assert "lvs0/new" not in scene.target.volumes
        scene.world.libvirtd.refuse[Proc.BLOCK_COPY] = Refused(Code.INVALID_ARG, "not found")
        await scene.begin()
        for proc in (Proc.BLOCK_JOB_ABORT, Proc.BLOCK_JOB_SET_SPEED):
            scene.world.libvirtd.refuse[proc] = Refused(Code.ACCESS_DENIED, "access denied")
        with pytest.raises(ReplyError, match="access denied"):
            await scene.end(0)
        with pytest.raises(ReplyError, match="access denied"):
            await scene.speed(1)
        assert scene.target.copies[KEY]["bytes_per_second"] == 0

    act(tmp_path, body)


def test_there_is_no_job_to_change(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        for work in (scene.speed(1), scene.end(PIVOT)):
            with pytest.raises(ReplyError, match="does not have an active block job") as caught:
                await work
            assert caught.value.code == Code.OPERATION_INVALID
        await asyncio.sleep(0)

    act(tmp_path, body)
