"""A change that is cut off between two of its steps: afterwards it has happened, or it has not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from plugin.gateway.journal import Entry, Journal, Operation
from plugin.gateway.messages import Domain, DomainCall
from plugin.gateway.peer import start_time
from plugin.gateway.procs import Proc
from plugin.gateway.reconcile import Reconciler
from plugin.gateway.recovery import recover
from plugin.gateway.wire import WireError
from plugin.gateway.xdr import Writer
from pydataplane.domain import translate
from pydataplane.errors import RpcError
from tests.support import warm
from tests.support.wait import listens
from tests.unit.gateway.fake_libvirtd import FakeDomain, Hang
from tests.unit.gateway.world import UUID_1, UUID_2, ReplyError, World, disk, plain, play, until

LIVE, CONFIG = 1, 2
CONTROLLER = f"vm-{UUID_1}"
ADD = "vhost_scsi_controller_add_target"
REMOVE = "vhost_scsi_controller_remove_target"


def devs(xml: str | None) -> set[str]:
    plan = translate.plan(xml or "")
    return {lun.dev for lun in plan.luns} if plan else set()


@dataclass(frozen=True)
class Cut:
    """Where a change is cut off: at libvirtd's `nth` call of `proc`, or at a call of the target."""

    text: str
    proc: int = 0
    nth: int = 0
    done: bool = False
    target: str = ""
    only: bool = False
    """The disk is the only one of ours, so the whole persistent side is defined anew: it boots."""


# An attach or detach makes SET_METADATA calls: the one that only asks for permission, the
# persistent side, the running one.
STEPS = [
    Cut("asking", Proc.SET_METADATA, 1, done=True),
    Cut("before the persistent side", Proc.SET_METADATA, 2),
    Cut("after the persistent side", Proc.SET_METADATA, 2, done=True),
    Cut("before the running side", Proc.SET_METADATA, 3),
    Cut("after the running side", Proc.SET_METADATA, 3, done=True),
    Cut("before the definition", Proc.DEFINE_XML, 1, only=True),
    Cut("after the definition", Proc.DEFINE_XML, 1, done=True, only=True),
    Cut("before the running side, defined", Proc.SET_METADATA, 2, only=True),
]
LUN = {Proc.ATTACH_DEVICE_FLAGS: ADD, Proc.DETACH_DEVICE_FLAGS: REMOVE}
CASES = [(proc, where) for proc in LUN for where in STEPS]


def name(item: object) -> str:
    """Returns a case's name for pytest."""
    if isinstance(item, Cut):
        return item.text
    return item.name.lower().removesuffix("_device_flags") if isinstance(item, Proc) else ""


def make_domain(world: World, proc: Proc, where: Cut) -> FakeDomain:
    """Returns a running domain before the change."""
    world.target.add_volume("lvs0/boot")
    disks = "" if where.only else disk("lvs0/boot", "sda")
    return world.domain(disks=disks if proc == Proc.ATTACH_DEVICE_FLAGS else disks + disk())


async def cut(world: World, dom: FakeDomain, proc: Proc, where: Cut) -> None:
    """Begins a change of both sides and returns when it has come to `where`."""
    client = await world.client()
    if where.target:
        world.target.gate[where.target] = threading.Event()
    else:
        world.libvirtd.hang = Hang(where.proc, where.nth, where.done)
    await client.send(proc, DomainCall(dom.ref, disk(), LIVE | CONFIG).pack(text=True, flags=True))
    if where.target:
        await until(lambda: any(method == where.target for method, _ in world.target.requests))
    else:
        assert world.libvirtd.hang is not None
        async with asyncio.timeout(90):
            await world.libvirtd.hang.reached.wait()


def whole(world: World, dom: FakeDomain) -> bool:
    """Whether all three agree."""
    return (
        devs(dom.live) == devs(dom.config)
        and len(world.target.controllers[CONTROLLER]) == len(devs(dom.live))
        and not list((world.path.parent / "notes").glob("*"))
    )


@contextmanager
def gateway_process(world: World) -> Iterator[subprocess.Popen[bytes]]:
    """A gateway that can be killed, in the place of the world's own."""
    config = world.path.parent / "virtlun.toml"
    section = world.config.gateway
    config.write_text(
        f'[target]\nrpc_socket = "{world.target.path}"\n[gateway]\nsocket_group = ""\n'
        f'upstream = "{section.upstream}"\nupstream_ro = "{section.upstream_ro}"\n'
        f'auth = "none"\nauth_ro = "none"\nstate_dir = "{section.state_dir}"\n'
        f'listen = "{section.listen}2"\nlisten_ro = "{section.listen}2-ro"\nreconcile_s = 1\n'
    )
    with (world.path.parent / "gateway.log").open("ab") as log:
        process = warm.begin(warm.GATEWAY, ["--config", str(config)], stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("proc", "where"),
    [*CASES, *((proc, Cut("before the LUN", target=call)) for proc, call in LUN.items())],
    ids=name,
)
def test_a_gateway_killed_at_any_step(tmp_path: Path, proc: Proc, where: Cut) -> None:
    async def body(world: World) -> None:
        dom = make_domain(world, proc, where)
        ours, world.path = world.path, world.path.with_name("gw2")
        with gateway_process(world) as process:
            await until(lambda: listens(world.path))
            await cut(world, dom, proc, where)
            process.kill()
            await asyncio.to_thread(process.wait)
        world.libvirtd.hang = None
        for gate in world.target.gate.values():
            gate.set()
        world.target.gate.clear()
        world.path.unlink()
        world.path.with_name("gw2-ro").unlink()
        with gateway_process(world):
            await until(lambda: whole(world, dom))
            world.path = ours

    play(tmp_path, body)


@pytest.mark.parametrize(("proc", "where"), CASES, ids=name)
def test_a_libvirtd_that_dies_at_any_step(tmp_path: Path, proc: Proc, where: Cut) -> None:
    async def body(world: World) -> None:
        dom = make_domain(world, proc, where)
        await cut(world, dom, proc, where)
        await world.libvirtd.stop()
        world.libvirtd.hang = None
        await world.libvirtd.start()
        await until(lambda: whole(world, dom))
        attached = proc == Proc.DETACH_DEVICE_FLAGS
        assert ("sdb" in devs(dom.live)) == attached, "a call that failed has done nothing"

    play(tmp_path, body, reconcile=True)


def test_a_target_that_answers_too_late_leaves_no_lun_behind(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        real = world.target.vhost_scsi_controller_add_target

        def late(**params: object) -> int:
            real(**params)  # type: ignore[arg-type]
            raise RpcError(-110, "Connection timed out")

        world.target.vhost_scsi_controller_add_target = late  # type: ignore[method-assign, assignment]
        with pytest.raises(ReplyError, match="timed out"):
            await client.attach(dom.ref, disk(), LIVE | CONFIG)
        assert whole(world, dom)
        assert devs(dom.live) == set()

    play(tmp_path, body)


@pytest.mark.parametrize("proc", LUN, ids=name)
def test_the_lun_of_an_interrupted_change_goes_when_the_target_is_back(
    tmp_path: Path, proc: Proc
) -> None:
    """Only its own: what else a running domain has is not taken from it."""

    async def body(world: World) -> None:
        dom = world.domain(disks=disk() if proc == Proc.DETACH_DEVICE_FLAGS else "")
        services = world.gateway.services
        data, more = world.target.volumes["lvs0/data"].uuid, world.target.add_volume("lvs0/more")
        world.target.controllers[CONTROLLER] = {0: data, 5: more}
        world.target.connected = {CONTROLLER}
        both = disk() if proc == Proc.ATTACH_DEVICE_FLAGS else ""
        live, config = (translate.element(side or "") for side in (dom.live, dom.config))
        if proc == Proc.DETACH_DEVICE_FLAGS:
            client = await world.client()
            real = world.target.vhost_scsi_controller_remove_target
            world.target.vhost_scsi_controller_remove_target = lambda **_: True  # type: ignore[method-assign]
            await client.detach(dom.ref, disk(), LIVE | CONFIG)
            world.target.vhost_scsi_controller_remove_target = real  # type: ignore[method-assign]
        assert not both or not devs(dom.live)
        operation: Operation = "attach" if both else "detach"
        entry = Entry(operation, UUID_1, "one", "sdb", 0, data, True, live, config, None)
        stored = services.journal.append(entry)
        world.target.stop()
        await recover(services, stored)
        (pending,) = services.journal.pending
        assert isinstance(pending.entry, Entry)
        assert (pending.entry.operation, pending.entry.live) == ("remove", None)
        assert [found.operation for found in written(world)] == ["remove"], "on disk as well"
        world.target.start()
        await recover(services, pending)
        assert world.target.controllers[CONTROLLER] == {5: more}
        assert not services.journal.pending and not written(world)

    play(tmp_path, body)


def written(world: World) -> list[Entry]:
    """Returns the entries on disk."""
    found = []
    for path in (world.path.parent / "notes").glob("*.json"):
        values = json.loads(path.read_text())
        del values["version"]
        found.append(Entry(**values))
    return found


def test_a_volume_that_came_under_the_same_number_meanwhile_stays(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        services = world.gateway.services
        data, more = world.target.volumes["lvs0/data"].uuid, world.target.add_volume("lvs0/more")
        entry = Entry("remove", UUID_1, "one", "sdb", 0, data, True, None, None, None)
        world.target.controllers[CONTROLLER] = {0: more}
        await recover(services, services.journal.append(entry))
        assert world.target.controllers[CONTROLLER] == {0: more}, "another one's"
        world.target.controllers[CONTROLLER] = {}
        client = await world.client()
        await client.attach(dom.ref, disk(), LIVE)
        await recover(services, services.journal.append(entry))
        assert world.target.controllers[CONTROLLER] == {0: data}, "the metadata has it"

    play(tmp_path, body)


def test_what_a_running_domain_has_and_nobody_detached_stays_and_is_logged_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        more = world.target.add_volume("lvs0/more")
        world.target.controllers[CONTROLLER][7] = more
        world.target.connected = {CONTROLLER}
        asked = len(world.target.requests)
        await until(lambda: len(world.target.requests) > asked + 20)  # some rounds
        assert world.target.controllers[CONTROLLER][7] == more
        # A disk that the target lost comes back all the same.
        del world.target.controllers[CONTROLLER][0]
        await until(lambda: len(world.target.controllers[CONTROLLER]) == 2)
        assert devs(dom.live) == {"sdb"}

    play(tmp_path, body, reconcile=True, reconcile_s=1)
    said = f"target 7 of controller {CONTROLLER} is kept"
    out = capsys.readouterr().out
    assert out.count(said) == 1
    (line,) = (line for line in out.splitlines() if said in line)
    assert "LUN kept on a running domain" in line
    assert "a stop and start of the domain puts it right" in line
    assert "not reconciled" not in out, "nothing has failed"


def test_a_detach_that_only_was_not_answered_is_not_taken_back(tmp_path: Path) -> None:
    """The guest has seen the disk go: it must not come back."""

    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        live, config = (translate.element(side or "") for side in (dom.live, dom.config))
        bdev = world.target.volumes["lvs0/data"].uuid
        client = await world.client()
        await client.detach(dom.ref, disk(), LIVE | CONFIG)
        services = world.gateway.services
        entry = Entry("detach", UUID_1, "one", "sdb", 0, bdev, True, live, config, None)
        stored = services.journal.append(entry)
        await recover(services, stored)
        assert whole(world, dom)
        assert devs(dom.live) == set()

    play(tmp_path, body)


def test_an_entry_that_cannot_be_written_refuses_the_call(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        (tmp_path / "file").touch()
        world.gateway.services.journal = Journal(tmp_path / "file/notes")
        with pytest.raises(ReplyError, match=r"gateway\.state_dir"):
            await client.attach(dom.ref, disk(), LIVE | CONFIG)
        assert devs(dom.live) == devs(dom.config) == set()

    play(tmp_path, body)


def test_the_journal_is_for_root_alone_and_strange_files_are_left_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a/notes")
    assert list(journal.orphans()) == []
    entry = Entry("attach", UUID_1, "one", "sdb", 0, "bdev", True, None, "<x/>", "<domain/>")
    stored = journal.append(entry)
    assert stored.path.parent.stat().st_mode & 0o777 == 0o700
    assert stored.path.stat().st_mode & 0o777 == 0o600
    assert list(journal.orphans()) == [], "of a process that runs"
    dead = stored.path.with_name("1-1-1.json")
    stored.path.rename(dead)
    for name, text in (("2-2-2.json", "{"), ("x.json", "{}"), ("3-3-3.json", "[]")):
        (tmp_path / "a/notes" / name).write_text(text)
    (found,) = journal.orphans()
    assert (found.entry, found.path) == (entry, dead)
    journal.remove(found)
    journal.remove(found)
    assert not dead.exists()


WRITES_AN_ENTRY_AND_IS_KILLED = """
import os, signal, sys
from pathlib import Path
from plugin.gateway.journal import Entry, Journal
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
entry = Entry("attach", sys.argv[2], "one", "sdb", 0, "bdev", True, None, "<x/>", "<domain/>")
Journal(Path(sys.argv[1])).append(entry)
"""


def test_what_a_gateway_was_writing_when_it_was_killed_is_removed_by_the_next(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "notes"
    program = (sys.executable, "-c", WRITES_AN_ENTRY_AND_IS_KILLED, str(folder), UUID_1)
    ended = subprocess.run(program, check=False)
    assert ended.returncode == -signal.SIGKILL
    (cut_off,) = folder.iterdir()
    assert cut_off.suffix == ".new"
    pid, since = cut_off.stem.split("-")[:2]
    running = f"{os.getpid()}-{start_time(os.getpid())}-7.new"
    replaced = f"{pid}-{since}-8"
    others = {running, f"{replaced}.new", f"{replaced}.json", f"{UUID_1}.new", "a-b-c.new"}
    # The second is one that another gateway may be putting in the third's place.
    for name in others:
        (folder / name).touch()

    async def body(world: World) -> None:
        await until(lambda: not cut_off.exists())
        assert not world.gateway.services.journal.pending

    play(tmp_path, body, reconcile=True)
    assert {path.name for path in folder.iterdir()} == others


def lifecycle(dom: Domain, event: int) -> bytes:
    """remote_domain_event_callback_lifecycle_msg."""
    return bytes(dom.write(Writer().i32(1)).i32(event).i32(0))


def test_a_domain_that_stops_loses_its_controller_once_its_qemu_has_let_go(
    tmp_path: Path,
) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        world.target.connected = {CONTROLLER}
        await until(lambda: world.gateway.admin.opened)
        dom.live = None
        world.gateway.loop.lifecycle_event(lifecycle(dom.ref, 5))
        await asyncio.sleep(0.5)
        assert CONTROLLER in world.target.controllers, "a QEMU is connected to it"
        world.target.connected = set()
        await until(lambda: CONTROLLER not in world.target.controllers)

    play(tmp_path, body, reconcile=True)


def test_a_domain_that_runs_again_without_virtlun_has_left_its_controller(tmp_path: Path) -> None:
    """Started before the gateway has looked at what stopped."""

    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        await until(lambda: world.gateway.admin.opened)
        dom.live = plain()
        world.target.connected = {CONTROLLER}
        world.gateway.loop.lifecycle_event(lifecycle(dom.ref, 5))
        await asyncio.sleep(0.2)
        assert CONTROLLER in world.target.controllers, "a QEMU is connected to it"
        world.target.connected = set()
        await until(lambda: CONTROLLER not in world.target.controllers)
        assert dom.live == plain()

    play(tmp_path, body, reconcile=True)


def test_libvirtds_own_event_arrives(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        await until(lambda: Proc.CALLBACK_REGISTER_ANY in world.libvirtd.calls())
        dom.live = None
        await world.libvirtd.event(Proc.CALLBACK_LIFECYCLE, lifecycle(dom.ref, 5))
        await until(lambda: CONTROLLER not in world.target.controllers)
        for garbage in (b"", b"\xff" * 40):
            await world.libvirtd.event(Proc.CALLBACK_LIFECYCLE, garbage)
        client = await world.client()
        assert await client.xml(dom.ref)

    play(tmp_path, body, reconcile=True)


def test_controllers_of_nobody_go_in_time_and_others_stay(tmp_path: Path) -> None:
    gone, busy = (f"vm-{digit * 8}-0000-4000-8000-000000000000" for digit in "89")
    others = ["pod-1234", "csi-1234", "by-hand", "vm-no-uuid"]

    async def body(world: World) -> None:
        dom = world.domain("two", UUID_2, disks=disk())
        uuid = world.target.add_volume("lvs0/more")
        world.target.controllers |= {gone: {0: uuid}, busy: {}}
        world.target.controllers |= {name: {} for name in others}
        world.target.connected = {busy}
        await until(lambda: gone not in world.target.controllers)
        assert set(world.target.controllers) == {busy, *others, f"vm-{UUID_2}"}
        assert devs(dom.live) == {"sdb"}

    play(tmp_path, body, reconcile=True, reconcile_s=1)


def test_a_controller_of_nobody_goes_when_two_rounds_have_seen_it(tmp_path: Path) -> None:
    """Another libvirtd of this host may just make it for a domain that starts."""
    gone = "vm-88888888-0000-4000-8000-000000000000"

    async def body(world: World) -> None:
        reconciler = Reconciler(world.gateway.services)
        for seen_before in (False, True):
            world.target.controllers[gone] = {}
            await reconciler.run()
            assert gone in world.target.controllers
            if not seen_before:  # a round that does not see it is between
                del world.target.controllers[gone]
                await reconciler.run()
        await reconciler.run()
        assert gone not in world.target.controllers

    play(tmp_path, body)


def test_without_an_answer_about_the_domain_nothing_is_removed(tmp_path: Path) -> None:
    gone = "vm-88888888-0000-4000-8000-000000000000"

    async def body(world: World) -> None:
        world.target.controllers[gone] = {}

        def broken(_: bytes) -> bytes:
            raise WireError("no")

        world.libvirtd.answers[Proc.LOOKUP_BY_UUID] = broken
        await until(lambda: world.libvirtd.calls().count(Proc.LOOKUP_BY_UUID) >= 2)
        assert gone in world.target.controllers

    play(tmp_path, body, reconcile=True, reconcile_s=1)


def test_what_the_target_lost_comes_back(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        await until(lambda: world.gateway.admin.opened)
        world.target.stop()
        world.target.controllers.clear()
        await asyncio.sleep(1.2)
        world.target.start()
        await until(lambda: len(world.target.controllers.get(CONTROLLER, {})) == 1)
        assert devs(dom.live) == {"sdb"}

    play(tmp_path, body, reconcile=True, reconcile_s=1)


def test_a_definition_from_another_host_gets_this_hosts_socket(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        assert dom.config is not None
        dom.config = dom.config.replace("/run/virtlun/vhost/", "/somewhere/else/")
        await until(lambda: world.gateway.admin.opened)
        await world.libvirtd.event(Proc.CALLBACK_LIFECYCLE, lifecycle(dom.ref, 0))
        await until(lambda: "/run/virtlun/vhost/" in (dom.config or ""))
        assert devs(dom.config) == {"sdb"} and "/somewhere/else/" not in dom.config
        defined = world.libvirtd.calls().count(Proc.DEFINE_XML)
        await world.libvirtd.event(Proc.CALLBACK_LIFECYCLE, lifecycle(dom.ref, 0))
        await asyncio.sleep(0.2)
        assert world.libvirtd.calls().count(Proc.DEFINE_XML) == defined == 1

    play(tmp_path, body, reconcile=True)
