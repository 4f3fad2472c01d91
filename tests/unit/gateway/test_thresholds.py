"""Thresholds of what thin volumes have allocated: set, told of once, and when one is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from plugin.gateway import domcheckpoints
from plugin.gateway.errors import Code, Refused
from plugin.gateway.events import BLOCK_THRESHOLD
from plugin.gateway.handlers.blockjobs import PIVOT
from plugin.gateway.handlers.copying import TRANSIENT_JOB
from plugin.gateway.messages import STRING, UINT, Domain, TypedParam
from plugin.gateway.procs import Proc
from plugin.gateway.thresholds import Threshold, Thresholds
from plugin.gateway.xdr import Reader, Writer
from tests.support.wait import listens
from tests.unit.gateway import test_images
from tests.unit.gateway.decoded import StatsRecord
from tests.unit.gateway.fake_libvirtd import FakeDomain
from tests.unit.gateway.test_recovery import gateway_process
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

MIB = 1 << 20
LIVE, CONFIG = 1, 2
PATH = "/dev/virtlun/lvs0/data"
STOPPED = 5

Told = tuple[str, str, str | None, int, int]


class Scene:
    """A domain that runs with the disk sdb, and a client that hears of thresholds."""

    def __init__(self, world: World, client: TestClient, dom: FakeDomain) -> None:
        self.world, self.client, self.dom = world, client, dom
        self.volume = world.target.volumes["lvs0/data"]

    @property
    def notes(self) -> list[Path]:
        """What a gateway that comes after this one will find."""
        return list((self.world.path.parent / "notes").glob("*.thresholds"))

    async def hear(self) -> None:
        """Registers for the event of all domains."""
        args = bytes(Writer().i32(BLOCK_THRESHOLD).u32(0))
        await self.client.call(Proc.CALLBACK_REGISTER_ANY, args)

    async def set(self, mib: int, name: str = "sdb", *, flags: int = 0) -> None:
        """SET_BLOCK_THRESHOLD."""
        args = self.dom.ref.write(Writer()).string(name).u64(mib * MIB).u32(flags)
        await self.client.call(Proc.SET_BLOCK_THRESHOLD, bytes(args))

    async def look(self) -> None:
        """The gateway asks the target, as it does each second."""
        await self.world.gateway.thresholds.look()

    async def told(self) -> Told:
        """The next event: domain, disk, path, threshold and excess."""
        procedure, payload = await self.client.event()
        reader = Reader(payload)
        assert (procedure, reader.i32()) == (385, 7)
        dom = Domain.read(reader)
        said = dom.name, reader.string(), reader.optional(reader.string), reader.u64(), reader.u64()
        reader.end()
        return said

    async def shown(self) -> object:
        """What GET_ALL_DOMAIN_STATS has as the disk's threshold, None if there is none."""
        given = [StatsRecord(self.dom.ref, [TypedParam("block.count", UINT, 0)])]
        answer = StatsRecord.pack_all(given)
        self.world.libvirtd.answers[Proc.GET_ALL_DOMAIN_STATS] = lambda _: answer
        reply = await self.client.call(Proc.GET_ALL_DOMAIN_STATS, bytes(12))
        (record,) = StatsRecord.read_all(reply)
        assert TypedParam("block.0.name", STRING, "sdb") in record.params
        found = {param.field: param.value for param in record.params}
        return found.get("block.0.threshold")

    async def is_none(self) -> None:
        """Asserts that nothing is told, whatever is written."""
        self.volume.taken_mib = 60
        await self.look()
        assert await self.shown() is None
        assert 385 not in [procedure for procedure, _ in self.client.messages]
        assert not self.notes


def act(folder: Path, body: Callable[[Scene], Awaitable[None]], **options: object) -> None:
    async def with_world(world: World) -> None:
        scene = Scene(world, await world.client(), world.domain(disks=disk()))
        await scene.hear()
        await body(scene)

    play(folder, with_world, **options)


@pytest.mark.parametrize("name", ["sdb", "sdb[0]", "sdb[1]"])
def test_what_exceeds_it_is_told_once(tmp_path: Path, name: str) -> None:
    async def body(scene: Scene) -> None:
        assert await scene.shown() is None
        await scene.set(4, name)
        assert await scene.shown() == 4 * MIB
        scene.volume.taken_mib = 4
        await scene.look()
        assert await scene.shown() == 4 * MIB
        scene.volume.taken_mib = 7
        assert await scene.told() == ("one", name, PATH, 4 * MIB, 3 * MIB)
        await scene.is_none()

    act(tmp_path, body)


def test_nothing_is_asked_while_there_is_none(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        requests = scene.world.target.requests
        await scene.look()
        assert "virtlun_lvol_get_sizes" not in [method for method, _ in requests]
        await scene.set(4)
        await scene.look()
        assert "virtlun_lvol_get_sizes" in [method for method, _ in requests]
        await scene.set(0)
        await scene.look()
        assert not scene.world.gateway.services.thresholds.any.is_set()

    act(tmp_path, body)


def test_what_is_exceeded_already_is_told_without_a_write(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.set(1)
        assert await scene.told() == ("one", "sdb", PATH, MIB, 2 * MIB)

    act(tmp_path, body)


def test_another_takes_its_place_and_0_takes_it_back(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.set(4)
        await scene.set(9)
        scene.volume.taken_mib = 5
        await scene.look()
        assert await scene.shown() == 9 * MIB
        await scene.set(0)
        await scene.set(0)
        await scene.is_none()

    act(tmp_path, body)


def test_only_who_asked_for_the_domain_hears(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        other = scene.world.domain("two", UUID_2)
        deaf = await scene.world.client()
        args = Writer().i32(BLOCK_THRESHOLD)
        args.optional(other.ref, lambda dom: dom.write(args))
        await deaf.call(Proc.CALLBACK_REGISTER_ANY, bytes(args))
        await scene.set(1)
        await scene.told()
        await deaf.xml(scene.dom.ref)
        assert deaf.messages == []

    act(tmp_path, body)


def test_libvirtds_own_events_and_disks_stay_its(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        asked: list[bytes] = []

        def answer(payload: bytes) -> bytes:
            asked.append(payload)
            return b""

        scene.world.libvirtd.answers[Proc.SET_BLOCK_THRESHOLD] = answer
        for name in ("vda", "vda[3]", "sdb[", "sdb[x]"):
            await scene.set(1, name)
        assert len(asked) == 4
        event = scene.dom.ref.write(Writer().i32(7)).string("vda").u32(0).u64(1).u64(2)
        await scene.world.libvirtd.event(Proc.EVENT_BLOCK_THRESHOLD, bytes(event))
        assert await scene.told() == ("one", "vda", None, 1, 2)

    act(tmp_path, body)


def test_what_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        refusals = (
            ("sdb[2]", 0, r"sdb\[2\]: a virtlun volume is one image: name it sdb, or sdb\[1\]"),
            ("sdb", 1, "unsupported flags"),
        )
        for name, flags, says in refusals:
            with pytest.raises(ReplyError, match=says) as caught:
                await scene.set(4, name, flags=flags)
            assert caught.value.code == Code.INVALID_ARG
        scene.volume.thin = False
        with pytest.raises(ReplyError, match="volume lvs0/data is thick") as caught:
            await scene.set(4)
        assert caught.value.code == Code.OPERATION_UNSUPPORTED
        await scene.set(0)
        scene.volume.thin = True
        scene.dom.live = None
        scene.world.gateway.services.domain_cache.forget()
        with pytest.raises(ReplyError, match="not running"):
            await scene.set(4)
        await scene.is_none()

    act(tmp_path, body)


def test_an_image_of_a_server_has_none(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        await client.attach(dom.ref, test_images.disk(), LIVE)
        args = bytes(dom.ref.write(Writer()).string("sdb").u64(MIB).u32(0))
        with pytest.raises(ReplyError, match="its server alone knows") as caught:
            await client.call(Proc.SET_BLOCK_THRESHOLD, args)
        assert caught.value.code == Code.OPERATION_UNSUPPORTED

    test_images.played(tmp_path, body)


def test_it_needs_the_right_to_change_the_domain(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        scene.world.libvirtd.refuse[Proc.SET_METADATA] = Refused(Code.ACCESS_DENIED, "denied")
        with pytest.raises(ReplyError, match="denied"):
            await scene.set(4)
        scene.client = await scene.world.client(read_only=True)
        with pytest.raises(ReplyError, match="read only"):
            await scene.set(4)
        scene.world.libvirtd.refuse.clear()
        await scene.is_none()

    act(tmp_path, body)


def test_it_ends_with_the_run(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.set(4)
        body = scene.dom.ref.write(Writer().i32(7)).i32(STOPPED).i32(0)
        await scene.world.libvirtd.event(Proc.CALLBACK_LIFECYCLE, bytes(body))
        await until(lambda: not scene.world.gateway.services.thresholds.runs)
        await scene.is_none()

    act(tmp_path, body)


@pytest.mark.parametrize("there", [True, False])
def test_it_ends_with_a_run_whose_end_nobody_told(tmp_path: Path, there: bool) -> None:
    """libvirtd was away, and has the domain started anew since, or not at all any more."""

    async def body(scene: Scene) -> None:
        await scene.set(4)
        scene.dom.run = 2
        if not there:
            del scene.world.libvirtd.domains[scene.dom.uuid]
        scene.world.gateway.services.domain_cache.forget()
        scene.world.gateway.thresholds.connection_lost()
        await scene.look()
        scene.world.libvirtd.domains[scene.dom.uuid] = scene.dom
        await scene.is_none()

    act(tmp_path, body)


def test_a_run_that_goes_on_keeps_it_when_libvirtd_was_away(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.set(4)
        scene.world.gateway.thresholds.connection_lost()
        await scene.look()
        assert await scene.shown() == 4 * MIB
        scene.volume.taken_mib = 5
        assert await scene.told() == ("one", "sdb", PATH, 4 * MIB, MIB)

    act(tmp_path, body)


@pytest.mark.parametrize("at_once", [True, False])
def test_it_ends_with_the_disk(tmp_path: Path, at_once: bool) -> None:
    async def body(scene: Scene) -> None:
        await scene.set(4)
        await scene.client.detach(scene.dom.ref, disk(), LIVE | CONFIG)
        if not at_once:
            await scene.look()
            assert not scene.notes
        await scene.client.attach(scene.dom.ref, disk(), LIVE | CONFIG)
        await scene.is_none()

    act(tmp_path, body)


def test_that_of_another_disk_stays(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        scene.world.target.add_volume("lvs0/other")
        await scene.client.attach(scene.dom.ref, disk("lvs0/other", "sdc"), LIVE)
        await scene.set(5, "sdc")
        await scene.set(4)
        await scene.client.detach(scene.dom.ref, disk(), LIVE | CONFIG)
        await scene.look()
        scene.world.target.volumes["lvs0/other"].taken_mib = 6
        told = ("one", "sdc", "/dev/virtlun/lvs0/other", 5 * MIB, MIB)
        assert await scene.told() == told

    act(tmp_path, body)


def test_a_disk_takes_it_along_to_another_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(*_: object) -> list[object]:
        return []

    monkeypatch.setattr(domcheckpoints, "of_domain", none)

    async def body(scene: Scene) -> None:
        for proc in (Proc.BLOCK_COPY, Proc.BLOCK_JOB_ABORT):
            refused = Refused(Code.INVALID_ARG, "disk 'sdb' not found")
            scene.world.libvirtd.refuse[proc] = refused
        scene.world.libvirtd.answers[Proc.SNAPSHOT_NUM] = lambda _: bytes(Writer().i32(0))
        await scene.set(4)
        copying = scene.dom.ref.write(Writer()).string("sdb")
        copying.string("<disk type='file'><source file='/dev/virtlun/lvs0/new'/></disk>").u32(0)
        await scene.client.call(Proc.BLOCK_COPY, bytes(copying.u32(TRANSIENT_JOB)))
        scene.world.target.copies[f"vm-{UUID_1}", 0]["state"] = "ready"
        pivot = bytes(scene.dom.ref.write(Writer()).string("sdb").u32(PIVOT))
        await scene.client.call(Proc.BLOCK_JOB_ABORT, pivot)
        assert await scene.shown() == 4 * MIB
        scene.world.target.volumes["lvs0/new"].taken_mib = 5
        assert await scene.told() == ("one", "sdb", "/dev/virtlun/lvs0/new", 4 * MIB, MIB)

    act(tmp_path, body)


def test_the_next_gateway_has_it(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        world, told = scene.world, ("one", "sdb", PATH, 4 * MIB, MIB)
        ours, world.path = world.path, world.path.with_name("gw2")
        with gateway_process(world) as process:
            await until(lambda: listens(world.path))
            scene.client = await world.client()
            await scene.set(4)
            process.kill()
            await asyncio.to_thread(process.wait)
        scene.volume.taken_mib = 5
        world.path.unlink()
        world.path.with_name("gw2-ro").unlink()
        with gateway_process(world):
            await until(lambda: listens(world.path))
            scene.client = await world.client()
            before = world.target.calls.count("virtlun_lvol_get_sizes")
            await until(lambda: world.target.calls.count("virtlun_lvol_get_sizes") > before + 1)
            assert await scene.shown() == 4 * MIB, "nobody has heard of it yet"
            await scene.hear()
            assert await scene.told() == told
            await scene.is_none()
        world.path = ours

    act(tmp_path, body)


def test_a_note_that_is_damaged_is_none(tmp_path: Path) -> None:
    dom = Domain("one", bytes(16), 1)
    Thresholds(tmp_path).set(dom, "sdb", Threshold(MIB, "sdb"))
    for nth, text in enumerate(("{", '{"name": "n", "id": 1, "disks": 7}', "[]", '{"name": "n"}')):
        (tmp_path / f"{bytes([nth + 1] * 16).hex()}.thresholds").write_text(text)
    (tmp_path / "x.thresholds").write_text("{}")
    assert list(Thresholds(tmp_path).runs) == [dom.uuid]


def test_what_cannot_be_noted_is_not_set(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        (tmp_path / "notes").write_text("a file where the folder is to be")
        with pytest.raises(ReplyError, match=r"cannot be written .* make gateway.state_dir"):
            await scene.set(4)
        (tmp_path / "notes").unlink()
        await scene.is_none()

    act(tmp_path, body)


def test_a_target_that_is_away_loses_none(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.set(4)
        scene.world.target.stop()
        await until(lambda: "all" in scene.world.gateway.thresholds._said)
        scene.volume.taken_mib = 5
        scene.world.target.start()
        assert await scene.told() == ("one", "sdb", PATH, 4 * MIB, MIB)

    act(tmp_path, body)
