"""Domains without a disk of ours start, and have a controller where that is wanted and possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin.gateway.errors import Code, Refused
from plugin.gateway.messages import STRING, DomainCall, TypedParam, XmlCall, pack_string
from plugin.gateway.procs import Proc
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import translate
from pydataplane.errors import RpcError
from tests.unit.gateway.fake_libvirtd import FakeDomain
from tests.unit.gateway.world import UUID_1, ReplyError, World, disk, plain, play

CONTROLLER = f"vm-{UUID_1}"


async def start(world: World, dom: FakeDomain, flags: int | None = None) -> bytes:
    """Starts a domain as a client does; returns the result."""
    client = await world.client()
    if flags is None:
        return await client.call(Proc.CREATE, bytes(dom.ref.write(Writer())))
    args = DomainCall(dom.ref, flags=flags).pack(flags=True)
    return await client.call(Proc.CREATE_WITH_FLAGS, args)


def test_it_runs_with_a_controller_that_its_definition_has_not(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False)
        before = dom.config
        assert before == plain()
        assert await start(world, dom) == b""
        assert dom.config == before and dom.live is not None
        assert translate.has_controller(dom.live)
        assert world.target.controllers[CONTROLLER] == {}
        assert Proc.CREATE not in world.libvirtd.calls()

    play(tmp_path, body)


def test_the_flags_of_a_start_are_kept_and_its_result_is_a_starts(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        seen: list[int | None] = []

        def create(payload: bytes) -> bytes:
            given = XmlCall.read(payload, flags=True)
            seen.append(given.flags)
            return world.libvirtd._define(given.xml, live=True)

        dom = world.domain(running=False)
        world.libvirtd.answers[Proc.CREATE_XML] = create
        assert await start(world, dom, 1 | 2 | 4 | 32) == bytes(dom.ref.write(Writer()))
        assert seen == [1 | 2 | 32], "BYPASS_CACHE is about a saved state, and there is none"

    play(tmp_path, body)


@pytest.mark.parametrize("flags", [8, 16])
def test_what_only_a_start_can_do_is_a_start(tmp_path: Path, flags: int) -> None:
    """To throw away a saved state, and flags that are not known here."""

    async def body(world: World) -> None:
        world.libvirtd.answers[Proc.HAS_MANAGED_SAVE_IMAGE] = lambda _: bytes(Writer().i32(1))
        dom = world.domain(running=False)
        await start(world, dom, flags)
        assert Proc.CREATE_XML not in world.libvirtd.calls()
        assert dom.live is not None and not translate.has_controller(dom.live)

    play(tmp_path, body)


def no_target(world: World) -> None:
    world.target.stop()


def no_socket(world: World) -> None:
    world.target.refuse["vhost_create_scsi_controller"] = RpcError(-13, "Permission denied")


def no_room(world: World) -> None:
    refusal = Refused(Code.XML_ERROR, "No more available PCI slots")
    world.libvirtd.refuse[Proc.CREATE_XML] = refusal


def private_memory(world: World) -> None:
    (dom,) = world.libvirtd.domains.values()
    private = "<memoryBacking><access mode='private'/></memoryBacking><vcpu>"
    dom.config = (dom.config or "").replace("<vcpu>", private)


@pytest.mark.parametrize("lack", [no_target, no_socket, no_room, private_memory])
def test_whatever_keeps_it_from_having_one_it_starts(tmp_path: Path, lack: object) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False)
        lack(world)  # type: ignore[operator]
        await start(world, dom)
        assert dom.live is not None and not translate.has_controller(dom.live)
        assert world.target.controllers == {}

    play(tmp_path, body)


def test_a_target_that_hangs_costs_a_start_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading  # noqa: PLC0415

    monkeypatch.setattr("plugin.gateway.emptycontrollers.MAKE_S", 0.05)

    async def body(world: World) -> None:
        dom = world.domain(running=False)
        gate = world.target.gate["vhost_get_controllers"] = threading.Event()
        await start(world, dom)
        assert dom.live is not None and not translate.has_controller(dom.live)
        gate.set()

    play(tmp_path, body)


def test_what_fails_without_a_controller_too_is_libvirtds_word(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False)
        world.libvirtd.refuse[Proc.CREATE_XML] = Refused(Code.XML_ERROR, "as we asked")
        world.libvirtd.refuse[Proc.CREATE] = Refused(Code.XML_ERROR, "as the client asked")
        with pytest.raises(ReplyError, match="as the client asked"):
            await start(world, dom)
        assert world.target.controllers == {}

    play(tmp_path, body)


@pytest.mark.parametrize("marked", [False, True])
def test_where_needed_only_the_mark_counts(tmp_path: Path, marked: bool) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False)
        client = await world.client()
        if marked:
            args = dom.ref.write(Writer()).i32(2)
            args.optional(translate.mark(UUID_1), args.string).optional("virtlun", args.string)
            await client.call(
                Proc.SET_METADATA, bytes(args.optional(translate.NAMESPACE, args.string).u32(2))
            )
        await start(world, dom)
        assert translate.has_controller(dom.live or "") == marked

    play(tmp_path, body, controllers="needed")


def test_the_mark_takes_no_disks_away_and_nothing_else_can_be_set(tmp_path: Path) -> None:
    from tests.unit.gateway.world import UUID_2  # noqa: PLC0415

    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        before = dom.config
        client = await world.client()

        async def mark(uuid: str, flags: int) -> None:
            args = dom.ref.write(Writer()).i32(2)
            args.optional(translate.mark(uuid), args.string).optional("virtlun", args.string)
            args.optional(translate.NAMESPACE, args.string).u32(flags)
            await client.call(Proc.SET_METADATA, bytes(args))

        await mark(UUID_1, 2)
        assert dom.config == before
        with pytest.raises(ReplyError, match="virtlun's own"):
            await mark(UUID_2, 2)
        with pytest.raises(ReplyError, match="persistent definition"):
            await mark(UUID_1, 1)

    play(tmp_path, body)


def image(world: World, xml: str) -> list[str]:
    """Gives libvirtd a managed save image of a domain; returns what it is said to be after that."""
    told: list[str] = []
    world.libvirtd.answers[Proc.MANAGED_SAVE_GET_XML_DESC] = lambda _: pack_string(xml)

    def define(payload: bytes) -> bytes:
        reader = Reader(payload)
        from plugin.gateway.messages import Domain  # noqa: PLC0415

        Domain.read(reader)
        told.append(reader.optional(reader.string) or "")
        return b""

    world.libvirtd.answers[Proc.MANAGED_SAVE_DEFINE_XML] = define
    return told


@pytest.mark.parametrize("target", [True, False])
@pytest.mark.parametrize("stands_in", [True, False])
def test_a_saved_guest_gets_what_there_is(tmp_path: Path, target: bool, stands_in: bool) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=True)
        saved = dom.live or ""
        alone = translate.without_target(saved)
        assert alone is not None
        told = image(world, alone if stands_in else saved)
        dom.live = None
        world.target.controllers.clear()
        if not target:
            world.target.stop()
        await start(world, dom)
        if target == stands_in:
            assert [plan.controller for xml in told if (plan := translate.plan(xml))] == (
                [CONTROLLER] if target else []
            )
            assert len(told) == 1
        else:
            assert told == [], "it is right as it is"
        assert (CONTROLLER in world.target.controllers) == target

    play(tmp_path, body)


@pytest.mark.parametrize("disks", [True, False])
@pytest.mark.parametrize("proc", [Proc.SAVE, Proc.SAVE_FLAGS, Proc.SAVE_PARAMS, Proc.MANAGED_SAVE])
def test_a_guest_is_saved_so_that_libvirtd_alone_can_restore_it(
    tmp_path: Path, proc: Proc, disks: bool
) -> None:
    """But for one with disks of ours: those nobody else has."""

    async def body(world: World) -> None:
        dom = world.domain(running=True, disks=disk() if disks else "")
        saved = dom.live or ""
        told = image(world, saved)
        world.libvirtd.answers[Proc.SAVE_IMAGE_GET_XML_DESC] = lambda _: pack_string(saved)

        def define(payload: bytes) -> bytes:
            reader = Reader(payload)
            assert reader.string() == "/image"
            told.append(reader.string())
            return b""

        world.libvirtd.answers[Proc.SAVE_IMAGE_DEFINE_XML] = define
        seen: list[bytes] = []

        def save(payload: bytes) -> bytes:
            seen.append(payload)
            return b""

        world.libvirtd.answers[proc] = save
        args = dom.ref.write(Writer())
        if proc == Proc.SAVE_PARAMS:
            file = [TypedParam("file", STRING, "/image")]
            args.array(file, lambda item: item.write(args)).u32(4)
        elif proc == Proc.MANAGED_SAVE:
            args.u32(4)
        else:
            args.string("/image")
            if proc == Proc.SAVE_FLAGS:
                args.optional(None, args.string).u32(4)
        await (await world.client()).call(proc, bytes(args))
        assert seen == [bytes(args)], "libvirtd saves what the client asked for"
        assert told == ([] if disks else [translate.without_target(saved)])

    play(tmp_path, body)


def test_a_save_is_one_where_its_image_cannot_be_changed(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=True)
        image(world, dom.live or "")
        world.libvirtd.refuse[Proc.MANAGED_SAVE_DEFINE_XML] = Refused(
            Code.OPERATION_FAILED, "new xml too large to fit in file"
        )
        world.libvirtd.answers[Proc.MANAGED_SAVE] = lambda _: b""
        args = bytes(dom.ref.write(Writer()).u32(0))
        assert await (await world.client()).call(Proc.MANAGED_SAVE, args) == b""

    play(tmp_path, body)


@pytest.mark.parametrize("proc", [Proc.SAVE_IMAGE_DEFINE_XML, Proc.MANAGED_SAVE_DEFINE_XML])
def test_an_edited_image_stays_one_that_libvirtd_alone_can_restore(
    tmp_path: Path, proc: Proc
) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=True)
        alone = translate.without_target(dom.live or "")
        assert alone is not None
        told = image(world, alone)
        world.libvirtd.answers[Proc.SAVE_IMAGE_GET_XML_DESC] = lambda _: pack_string(alone)

        def define(payload: bytes) -> bytes:
            reader = Reader(payload)
            reader.string()
            told.append(reader.string())
            return b""

        world.libvirtd.answers[Proc.SAVE_IMAGE_DEFINE_XML] = define
        given = translate.present(alone, live=False)
        assert "virtlun" not in given
        writer = dom.ref.write(Writer())
        if proc == Proc.SAVE_IMAGE_DEFINE_XML:
            args = Writer().string("/image").string(given).u32(0)
        else:
            args = writer.optional(given, writer.string).u32(0)
        await (await world.client()).call(proc, bytes(args))
        (xml,) = told
        assert translate.has_controller(xml) and translate.without_target(xml) is None

    play(tmp_path, body)
