"""What a start makes, what it records, and that nothing is done for those who may not start."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from plugin.gateway.errors import Code, Refused
from plugin.gateway.libvirtdconf import judges_calls
from plugin.gateway.messages import DomainCall, XmlCall
from plugin.gateway.procs import Proc
from plugin.gateway.reconcile import Reconciler, move_socket
from plugin.gateway.xdr import Writer
from pydataplane.domain import records, translate
from tests.unit.gateway.fake_libvirtd import FakeDomain
from tests.unit.gateway.world import (
    NOBODY,
    UUID_1,
    UUID_2,
    ReplyError,
    World,
    disk,
    judged,
    nothing_done,
    plain,
    play,
    until,
)

CONTROLLER = f"vm-{UUID_1}"
NEW = disk("lvs0/new")


async def start(world: World, dom: FakeDomain) -> None:
    """Starts a domain as a client does."""
    client = await world.client()
    await client.call(Proc.CREATE, bytes(dom.ref.write(Writer())))


def recorded(xml: str | None) -> list[str | None]:
    """Returns the UUIDs in a domain's metadata."""
    plan = translate.plan(xml or "")
    return [lun.uuid for lun in plan.luns] if plan is not None else []


def make_missing(world: World, mib: int = 64) -> None:
    """Configures that a start makes what is not there."""
    hook = world.gateway.services.hook
    world.gateway.services.hook = hook.model_copy(update={"create_missing_mib": mib})


def test_a_volume_that_never_was_is_made_if_configured_and_recorded(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        make_missing(world)
        dom = world.domain(running=False, disks=NEW)
        await start(world, dom)
        made = world.target.volumes["lvs0/new"]
        assert made.mib == 64
        assert world.target.controllers[CONTROLLER] == {0: made.uuid}
        assert recorded(dom.config) == [made.uuid]
        assert dom.live is not None

    play(tmp_path, body)


def test_the_controller_is_kept_for_who_starts_after_this(tmp_path: Path) -> None:
    """As by the hook, which need not be there."""

    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        await start(world, dom)
        assert world.target.owners == {CONTROLLER: (None, True)}
        # It runs: nobody is disconnected.
        world.target.owners.clear()
        world.target.controllers[CONTROLLER].clear()
        await Reconciler(world.gateway.services).run()
        assert world.target.controllers[CONTROLLER] and world.target.owners == {}

    play(tmp_path, body)


def test_the_volume_of_a_transient_domain_is_in_what_libvirtd_gets(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        make_missing(world)
        client = await world.client()
        await client.call(Proc.CREATE_XML, XmlCall(plain(devices=NEW), 0).pack())
        (dom,) = world.libvirtd.domains.values()
        assert recorded(dom.live) == [world.target.volumes["lvs0/new"].uuid]

    play(tmp_path, body)


def test_none_is_made_unasked_and_the_command_that_makes_it_is_said(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=NEW)
        said = "sdb: there is no volume lvs0/new; .*`virtlun volume create lvs0/new SIZE`$"
        with pytest.raises(ReplyError, match=said):
            await start(world, dom)
        assert dom.live is None and world.target.controllers == {}
        assert "lvs0/new" not in world.target.volumes

    play(tmp_path, body)


@pytest.mark.parametrize("namesake", [False, True])
@pytest.mark.parametrize("by_hook", [False, True])
def test_a_lost_volume_fails_the_start(tmp_path: Path, namesake: bool, by_hook: bool) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        old = "99999999-0000-4000-8000-000000000000"
        if by_hook:
            records.write(str(tmp_path / "hook"), CONTROLLER, {"lvs0/data": old})
        else:
            element = 'lvol="data" uuid="' + old + '"'
            dom.config = (dom.config or "").replace('lvol="data"', element)
            assert recorded(dom.config) == [old]
        if not namesake:
            del world.target.volumes["lvs0/data"]
        before = dict(world.target.volumes)
        with pytest.raises(ReplyError) as error:
            await start(world, dom)
        assert f"volume lvs0/data (UUID {old}) is lost" in str(error.value)
        assert ("another one has its name" in str(error.value)) == namesake
        assert error.value.code == Code.NO_STORAGE_VOL
        assert dom.live is None and world.target.controllers == {}
        assert world.target.volumes == before

    play(tmp_path, body)


def test_a_store_that_is_not_loaded_fails_the_start(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk("elsewhere/new"))
        with pytest.raises(ReplyError, match=r"lvstore elsewhere with volume .* is not loaded"):
            await start(world, dom)
        assert set(world.target.volumes) == {"lvs0/data"}

    play(tmp_path, body)


def test_before_one_is_made_all_are_looked_at(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        both = NEW + disk("elsewhere/gone", "sdc")
        dom = world.domain(running=False, disks=both)
        with pytest.raises(ReplyError, match="not loaded"):
            await start(world, dom)
        assert set(world.target.volumes) == {"lvs0/data"}

    play(tmp_path, body)


@pytest.mark.parametrize("persistent_only", [True, False])
def test_a_start_has_qemu_connect_again_as_it_can_now(
    tmp_path: Path, persistent_only: bool
) -> None:
    """The definition is of another QEMU's time, or of a configuration's before."""

    async def body(world: World) -> None:
        services = world.gateway.services
        dom = world.domain(running=not persistent_only, disks=disk())
        before = dom.config
        assert before is not None and "<reconnect" not in before
        asked: list[tuple[str | None, str | None]] = []

        def newer(path: str | None, arch: str | None) -> bool:
            asked.append((path, arch))
            assert threading.current_thread() is not threading.main_thread(), "it may take long"
            return True

        services.settings = replace(services.settings, reconnect_s=None, qemu_reconnects=newer)
        await start(world, dom)
        if not persistent_only:  # it runs, and libvirtd says so
            assert dom.config == before
            return
        again = "<reconnect enabled='yes' timeout='1'/>"
        assert again in (dom.config or "")
        assert recorded(dom.config) == [world.target.volumes["lvs0/data"].uuid]
        assert asked == [("/usr/bin/qemu-system-x86_64", "x86_64")]
        assert world.libvirtd.calls().count(Proc.DEFINE_XML) == 1

    play(tmp_path, body)


def test_what_a_client_defines_connects_again_as_its_qemu_can(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        services = world.gateway.services

        def newer(path: str | None, _: str | None) -> bool:
            assert threading.current_thread() is not threading.main_thread(), "it may take long"
            return path == "/opt/qemu"

        services.settings = replace(services.settings, reconnect_s=None, qemu_reconnects=newer)
        client = await world.client()
        for emulator, expected in (("/usr/bin/qemu-system-x86_64", 0), ("/opt/qemu", 1)):
            xml = plain(devices=disk()).replace("/usr/bin/qemu-system-x86_64", emulator)
            await client.call(Proc.DEFINE_XML, XmlCall(xml, None).pack())
            (dom,) = world.libvirtd.domains.values()
            assert (dom.config or "").count("<reconnect ") == expected

    play(tmp_path, body)


def test_what_the_hook_recorded_is_taken_over(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        records.write(str(tmp_path / "hook"), CONTROLLER, {"lvs0/data": "of-old"})
        await Reconciler(world.gateway.services).run()
        assert recorded(dom.config) == ["of-old"], "not that of the namesake there is now"
        assert records.read(str(tmp_path / "hook"), CONTROLLER) == {}

    play(tmp_path, body)


def test_a_definition_keeps_what_the_hook_recorded(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        records.write(str(tmp_path / "hook"), CONTROLLER, {"lvs0/data": "of-old"})
        client = await world.client()
        await client.call(Proc.DEFINE_XML, XmlCall(plain(devices=disk()), None).pack())
        assert recorded(dom.config) == ["of-old"]

    play(tmp_path, body)


def test_a_new_domain_has_no_past(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        records.write(str(tmp_path / "hook"), CONTROLLER, {"lvs0/data": "of-old"})
        client = await world.client()
        await client.call(Proc.DEFINE_XML, XmlCall(plain(devices=disk()), None).pack())
        (dom,) = world.libvirtd.domains.values()
        assert recorded(dom.config) == [world.target.volumes["lvs0/data"].uuid]
        assert records.read(str(tmp_path / "hook"), CONTROLLER) == {}

    play(tmp_path, body)


@pytest.mark.usefixtures("as_nobody")
@pytest.mark.parametrize("proc", [Proc.CREATE, Proc.CREATE_XML])
@pytest.mark.parametrize("allowed", ["", "start", "write", "write start"])
def test_nothing_is_done_for_whoever_may_not_start(
    tmp_path: Path, proc: Proc, allowed: str
) -> None:
    async def body(world: World) -> None:
        may = "start" in allowed and (proc == Proc.CREATE or "write" in allowed)
        if not may:
            world.libvirtd.refuse[proc] = Refused(Code.ACCESS_DENIED, "libvirtd's own words")
        make_missing(world)
        world.target.requests.clear()
        client = await world.client()
        if proc == Proc.CREATE:
            dom = world.domain(running=False, disks=NEW)
            work = client.call(proc, bytes(dom.ref.write(Writer())))
        else:
            work = client.call(proc, XmlCall(plain(devices=NEW), 0).pack())
        if may:
            await work
            assert world.target.controllers[CONTROLLER]
        else:
            with pytest.raises(ReplyError, match="libvirtd's own words"):
                await work
            assert nothing_done(world)
        asked = (tmp_path / "asked").read_text()
        assert f"--process {NOBODY.pid},{NOBODY.start_time},{NOBODY.uid} " in asked
        assert f"--detail domain_name one --detail domain_uuid {UUID_1}" in asked

    play(tmp_path, body, **judged(tmp_path, allowed))


@pytest.mark.usefixtures("as_nobody")
def test_the_name_that_a_client_gives_does_not_count(tmp_path: Path) -> None:
    """libvirtd finds the domain by UUID and asks polkit about its real name."""

    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        client = await world.client()
        forged = Writer().string("mine").fixed(dom.ref.uuid).i32(-1)
        await client.call(Proc.CREATE, bytes(forged))
        asked = (tmp_path / "asked").read_text()
        assert "domain_name one " in asked
        assert "mine" not in asked

    play(tmp_path, body, **judged(tmp_path, "start"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('access_drivers = [ "polkit" ]', True),
        ("access_drivers=['polkit']", True),
        ('access_drivers = [\n  "none",\n  "polkit",\n]\n', True),
        ('#access_drivers = [ "polkit" ]', False),
        ('access_drivers = [ ] # not "polkit"', False),
        ('access_drivers = [\n# "polkit"\n]', False),
        ('access_drivers = [ "polkit" ]\naccess_drivers = [ ]', False),
        ('auth_unix_rw = "polkit"', False),
        ("", False),
    ],
)
def test_whether_libvirtd_judges_calls(tmp_path: Path, text: str, expected: bool) -> None:
    conf = tmp_path / "libvirtd.conf"
    assert judges_calls(conf) is False
    conf.write_text(f"# comment\n{text}\n")
    assert judges_calls(conf) is expected
    conf.write_bytes(b"\xff\xfe")
    assert judges_calls(conf) is True


SHARED = disk(extra="<shareable/>")


def test_two_that_share_a_volume_may_start_together(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        first = world.domain("one", UUID_1, running=False, disks=SHARED)
        second = world.domain("two", UUID_2, running=False, disks=SHARED)
        world.libvirtd.delay_s[Proc.CREATE] = 0.5
        beginning = asyncio.create_task(start(world, first))
        await until(lambda: f"vm-{UUID_1}" in world.target.controllers)
        await start(world, second)
        await beginning
        assert {name: len(luns) for name, luns in world.target.controllers.items()} == {
            f"vm-{UUID_1}": 1,
            f"vm-{UUID_2}": 1,
        }
        assert "vhost_delete_controller" not in [method for method, _ in world.target.requests]

    play(tmp_path, body)


def test_one_that_starts_keeps_its_volume_from_another(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        first = world.domain("one", UUID_1, running=False, disks=disk())
        second = world.domain("two", UUID_2, running=False, disks=disk())
        world.libvirtd.delay_s[Proc.CREATE] = 0.5
        beginning = asyncio.create_task(start(world, first))
        await until(lambda: f"vm-{UUID_1}" in world.target.controllers)
        with pytest.raises(ReplyError, match="is in use by domain one"):
            await start(world, second)
        await beginning
        assert set(world.target.controllers) == {f"vm-{UUID_1}"}

    play(tmp_path, body)


def test_what_nobody_knows_to_have_failed_is_not_taken_away(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        client = await world.client()
        world.libvirtd.refuse[Proc.CREATE] = Refused(Code.OPERATION_FAILED, "no")
        asked = 0

        def silent_after_the_first(_: bytes) -> bytes:
            nonlocal asked
            asked += 1
            if asked > 1:
                raise Refused(Code.INTERNAL_ERROR, "libvirtd is not well")
            return bytes(Writer().i32(0))

        world.libvirtd.answers[Proc.IS_ACTIVE] = silent_after_the_first
        with pytest.raises(ReplyError, match="no"):
            await client.call(Proc.CREATE, DomainCall(dom.ref).pack())
        assert set(world.target.controllers) == {f"vm-{UUID_1}"}

    play(tmp_path, body)


def test_the_definition_is_read_once_nobody_changes_it(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        uuid = world.target.add_volume("lvs0/more")
        after = world.domain(running=False, disks=disk() + disk("lvs0/more", "sdc")).config
        dom = world.domain(running=False, disks=disk())
        services = world.gateway.services
        async with services.domain_lock(dom.uuid):
            starting = asyncio.create_task(start(world, dom))
            await until(lambda: services.locks._users[f"domain:{dom.uuid.hex()}"] == 2)
            dom.config = after
        await starting
        luns = world.target.controllers[f"vm-{UUID_1}"]
        assert uuid in luns.values()

    play(tmp_path, body)


def test_a_copy_made_at_libvirtd_does_not_touch_the_original(tmp_path: Path) -> None:
    """Its metadata names the original's controller."""

    async def body(world: World) -> None:
        original = world.domain(disks=disk())
        assert original.config is not None
        text = original.config.replace(UUID_1, UUID_2, 1).replace("<name>one", "<name>two")
        assert f"vm-{UUID_1}" in text
        copy = world.libvirtd.add("two", config=text)
        client = await world.client()
        call = DomainCall(copy.ref).pack()
        with pytest.raises(ReplyError, match=f"is a copy .* vm-{UUID_1}; define it again"):
            await client.call(Proc.CREATE, call)
        world.target.add_volume("lvs0/more")
        copy.live = text.replace("<domain ", "<domain id='2' ", 1)
        with pytest.raises(ReplyError, match="is a copy"):
            await client.attach(copy.ref, disk("lvs0/more", "sdd"), 1)
        copy.live = None
        assert len(world.target.controllers[f"vm-{UUID_1}"]) == 1
        await Reconciler(world.gateway.services).run()
        assert len(world.target.controllers[f"vm-{UUID_1}"]) == 1
        await move_socket(world.gateway.services, copy.ref)
        assert f"vm-{UUID_1}" not in (copy.config or "")
        assert f"vm-{UUID_2}" in (copy.config or "")

    play(tmp_path, body)
