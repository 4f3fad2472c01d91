"""Protection information: who boots gets what is configured, and who goes on keeps what it has."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from plugin.gateway import snapshotsteps
from plugin.gateway.domsnapshots import Snapshot
from plugin.gateway.handlers import reverting, snapshotowners
from plugin.gateway.messages import XmlCall, pack_string
from plugin.gateway.procs import Proc
from plugin.gateway.target import Target
from plugin.gateway.xdr import Writer
from pydataplane.domain import translate
from pydataplane.domain.translate.snapshotxml import DiskSnapshot, with_note
from tests.unit.gateway.test_empty_controllers import image, start
from tests.unit.gateway.test_moving import CONTROLLER, Seen, begin, prepare
from tests.unit.gateway.world import ReplyError, World, disk, plain, play

LACKS = "has a virtlun controller with protection information, which takes .* t10_pi"
UNSERVED = "without which it cannot go on, and no target of this host has made it"
WITHOUT = "a domain starts without protection information"


def configure(world: World, *, protection: bool, qemu: bool | None = True) -> None:
    """Has guests carry it, or not; with a QEMU that lets them, or not, or that nobody knows."""

    def protects(path: str | None, arch: str | None) -> bool | None:
        assert (path, arch) == ("/usr/bin/qemu-system-x86_64", "x86_64")
        assert threading.current_thread() is not threading.main_thread(), "it may take long"
        return qemu

    services = world.gateway.services
    services.settings = replace(services.settings, protection=protection, qemu_protects=protects)


def offered(xml: str | None) -> bool:
    text = (xml or "").replace('"', "'")  # the fake's, where it has written it anew
    return "name='t10_pi' type='bool' value='true'" in text


def with_it(xml: str | None) -> str:
    """Returns libvirtd's domain as a gateway makes it where guests carry it."""
    queues = "<qemu:property name='num_queues' type='unsigned' value='1'/>"
    assert xml is not None and xml.count(queues) == 1
    return xml.replace(queues, f"{queues}<qemu:property name='t10_pi' type='bool' value='true'/>")


async def define(world: World) -> None:
    client = await world.client()
    await client.call(Proc.DEFINE_XML, XmlCall(plain(devices=disk()), None).pack())


async def create(world: World) -> None:
    client = await world.client()
    await client.call(Proc.CREATE_XML, XmlCall(plain(devices=disk()), 0).pack())


async def boot(world: World) -> None:
    """Starts a domain that was defined before."""
    await start(world, world.domain(running=False, disks=disk()))


async def boot_with_it(world: World) -> None:
    dom = world.domain(running=False, disks=disk())
    dom.config = with_it(dom.config)
    await start(world, dom)


async def boot_empty(world: World) -> None:
    await start(world, world.domain(running=False))


WAYS = [define, create, boot, boot_with_it, boot_empty]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("protection", [True, False])
@pytest.mark.parametrize("qemu", [True, False, None])
def test_a_domain_gets_what_is_configured_and_its_qemu_has(
    tmp_path: Path, way: Callable[[World], Awaitable[None]], protection: bool, qemu: bool | None
) -> None:
    async def body(world: World) -> None:
        configure(world, protection=protection, qemu=qemu)
        with capture_logs() as said:
            await way(world)
        (dom,) = world.libvirtd.domains.values()
        expected = protection and qemu is True
        assert offered(dom.live or dom.config) == expected
        if way in (boot, boot_with_it):
            assert offered(dom.config) == expected
        told = [each["domain"] for each in said if each["event"].startswith(WITHOUT)]
        assert told == (["one"] if protection and not expected and way is not define else [])

    play(tmp_path, body)


def test_a_guest_that_runs_keeps_it_whatever_is_defined(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        configure(world, protection=False)
        dom = world.domain(disks=disk())
        dom.config, dom.live = with_it(dom.config), with_it(dom.live)
        before = dom.live
        await define(world)
        assert not offered(dom.config) and dom.live == before
        client = await world.client()
        world.target.add_volume("lvs0/more")
        await client.attach(dom.ref, disk("lvs0/more", "sdc"), 1)
        assert offered(dom.live), "only the metadata changes"

    play(tmp_path, body)


def restore_call() -> bytes:
    return bytes(Writer().string("/image"))


@pytest.mark.parametrize("disks", [disk(), ""])
@pytest.mark.parametrize("way", ["restore", "managed", "migrate"])
@pytest.mark.parametrize("lacks", ["nothing", "property", "target"])
def test_a_guest_that_goes_on_has_it_or_is_refused(
    tmp_path: Path, disks: str, way: str, lacks: str
) -> None:
    """Whatever is configured here: it was offered it."""

    async def body(world: World) -> None:
        dom = world.domain(disks=disks)
        saved = with_it(dom.live)
        dom.live, dom.config = None, dom.config if way == "managed" else None
        world.target.controllers.clear()
        configure(world, protection=False, qemu=lacks != "property")
        world.libvirtd.answers[Proc.SAVE_IMAGE_GET_XML_DESC] = lambda _: pack_string(saved)
        told = image(world, saved)
        if way != "managed":
            del world.libvirtd.answers[Proc.MANAGED_SAVE_GET_XML_DESC]
        proc = {"restore": Proc.RESTORE, "migrate": Proc.MIGRATE_PREPARE3}.get(way, Proc.CREATE)
        seen = Seen(world, proc)
        if lacks == "target":
            world.target.stop()
        client = await world.client()

        async def go_on() -> None:
            if way == "managed":
                await start(world, dom)
            elif way == "restore":
                await client.call(proc, restore_call())
            else:
                await client.call(proc, prepare(world, proc, saved))

        if lacks != "nothing":
            silent = "no target answers" if disks else UNSERVED
            with pytest.raises(ReplyError, match=LACKS if lacks == "property" else silent):
                await go_on()
            assert seen.payload == b"" and world.target.controllers == {}
            return
        await go_on()
        assert seen.payload, "libvirtd goes on with it"
        assert CONTROLLER in world.target.controllers
        assert told == [], "the image is right as it is"
        if way == "migrate":
            assert offered(seen.payload.decode(errors="replace"))

    play(tmp_path, body)


def test_one_without_a_disk_is_saved_and_sent_with_its_controller(tmp_path: Path) -> None:
    """Nothing can stand in for it."""

    async def body(world: World) -> None:
        dom = world.domain()
        dom.live = with_it(dom.live)
        client = await world.client()
        told = image(world, dom.live)
        world.libvirtd.answers[Proc.MANAGED_SAVE] = lambda _: b""
        await client.call(Proc.MANAGED_SAVE, bytes(dom.ref.write(Writer()).u32(0)))
        assert told == []
        seen = Seen(world, Proc.MIGRATE_BEGIN3)
        writer = dom.ref.write(Writer())
        bare = writer.optional(None, writer.string).u64(1).optional(None, writer.string).u64(0)
        await client.call(Proc.MIGRATE_BEGIN3, bytes(bare))
        assert seen.payload == bytes(bare), "libvirtd sends its own XML"
        shown = await client.xml(dom.ref)
        assert "t10_pi" not in shown
        await client.call(Proc.MIGRATE_BEGIN3, begin(dom.ref, shown))
        sent = seen.payload.decode(errors="replace")
        assert offered(sent) and "value='vhost-user-scsi-pci'" in sent

    play(tmp_path, body)


def test_who_was_never_offered_it_is_not_when_it_goes_on(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        configure(world, protection=True)
        dom = world.domain()
        alone = translate.without_target(dom.live or "")
        assert alone is not None
        seen = Seen(world, Proc.MIGRATE_PREPARE3)
        client = await world.client()
        world.libvirtd.domains.clear()
        await client.call(Proc.MIGRATE_PREPARE3, prepare(world, Proc.MIGRATE_PREPARE3, alone))
        sent = seen.payload.decode(errors="replace")
        assert "value='vhost-user-scsi-pci'" in sent and not offered(sent)

    play(tmp_path, body)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("qemu", [True, False])
def test_a_revert_to_memory_is_refused_while_its_guest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool, qemu: bool
) -> None:
    """Of a snapshot with a disk of ours, and of one that libvirtd reverts to alone."""
    done: list[str] = []

    async def nothing(*_: object) -> None:
        return None

    async def reverted(*_: object) -> None:
        done.append("reverted")

    def forwarded(_: bytes) -> bytes:
        done.append("reverted")
        return b""

    monkeypatch.setattr(reverting, "_judged", nothing)
    monkeypatch.setattr(snapshotsteps, "revert", reverted)
    monkeypatch.setattr(Target, "missing_snapshots", nothing)
    monkeypatch.setattr(snapshotowners, "check", nothing)
    monkeypatch.setattr(snapshotowners, "check_unused", nothing)

    async def body(world: World) -> None:
        configure(world, protection=False, qemu=qemu)
        held = DiskSnapshot("sdb", world.target.volumes["lvs0/data"].uuid, "lvs0", "data@s", "u")
        dom = world.domain(disks=disk() if ours else "")
        then = with_it(dom.live)
        xml = (
            "<domainsnapshot><name>s</name><state>running</state>"
            f"<memory snapshot='external' file='/m'/><disks/>{then}</domainsnapshot>"
        )
        shown = with_note(xml, [held]) if ours else xml
        answers = world.libvirtd.answers
        answers[Proc.SNAPSHOT_GET_XML_DESC] = lambda _: pack_string(shown)
        answers[Proc.SAVE_IMAGE_GET_XML_DESC] = lambda _: pack_string(then)
        answers[Proc.REVERT_TO_SNAPSHOT] = forwarded
        client = await world.client()
        revert = bytes(Snapshot("s", dom.ref).write(Writer()).u32(0))
        if qemu:
            await client.call(Proc.REVERT_TO_SNAPSHOT, revert)
            assert done == ["reverted"]
            return
        with pytest.raises(ReplyError, match=LACKS):
            await client.call(Proc.REVERT_TO_SNAPSHOT, revert)
        assert done == []

    play(tmp_path, body)
