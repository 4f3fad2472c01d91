"""Attach and detach of our disks: order, flags, roll-back, events."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path

import pytest

from plugin.gateway.errors import Code, Refused
from plugin.gateway.events import DeviceEvent
from plugin.gateway.messages import Domain, DomainCall
from plugin.gateway.procs import Proc
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import translate
from pydataplane.domain.xml.document import Document
from pydataplane.errors import RpcError
from tests.unit.gateway.world import UUID_1, UUID_2, ReplyError, World, disk, plain, play, until

LIVE, CONFIG = 1, 2
CONTROLLER = f"vm-{UUID_1}"


def luns(xml: str | None) -> dict[int, str]:
    plan = translate.plan(xml or "")
    return {lun.target: lun.dev for lun in plan.luns} if plan else {}


def event_of(payload: bytes) -> tuple[int, str, str]:
    reader = Reader(payload)
    callback = reader.i32()
    return callback, Domain.read(reader).name, reader.string()


def test_live_and_config_attach_sets_both_sides_and_the_lun(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        await client.register(DeviceEvent.ADDED)
        await client.attach(dom.ref, disk(), LIVE | CONFIG)
        uuid = world.target.volumes["lvs0/data"].uuid
        assert world.target.controllers[CONTROLLER] == {0: uuid}
        assert luns(dom.live) == luns(dom.config) == {0: "sdb"}
        proc, payload = await client.event()
        assert proc == Proc.CALLBACK_DEVICE_ADDED
        callback, name, alias = event_of(payload)
        assert (callback, name) == (7, "one")
        shown = await client.xml(dom.ref)
        assert f"<alias name='{alias}'/>" in shown
        assert "/dev/virtlun/lvs0/data" in shown and "vhostuser" not in shown

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        (LIVE, "in the running domain of one but not in its persistent definition"),
        (CONFIG, "in the persistent definition of one but not in its running domain"),
    ],
)
def test_a_disk_on_one_side_is_not_called_missing_but_said_where_it_is(
    tmp_path: Path, flag: int, says: str
) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        await client.attach(dom.ref, disk(), flag)
        before = (luns(dom.live), luns(dom.config), world.target.controllers[CONTROLLER])
        with pytest.raises(ReplyError, match=says):
            await client.detach(dom.ref, disk(), LIVE | CONFIG)
        assert (luns(dom.live), luns(dom.config), world.target.controllers[CONTROLLER]) == before
        await client.detach(dom.ref, disk(), flag)
        with pytest.raises(ReplyError, match="disk sdb not found"):
            await client.detach(dom.ref, disk(), LIVE | CONFIG)

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("flags", "running", "live", "config"),
    [
        (0, True, True, False),
        (0, False, False, True),
        (LIVE, True, True, False),
        (CONFIG, True, False, True),
        (CONFIG, False, False, True),
    ],
)
def test_flags_choose_the_side(
    tmp_path: Path, flags: int, running: bool, live: bool, config: bool
) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=running)
        client = await world.client()
        await client.attach(dom.ref, disk(), flags)
        assert bool(luns(dom.live)) == live
        assert bool(luns(dom.config)) == config
        assert bool(world.target.controllers.get(CONTROLLER)) == live
        await client.detach(dom.ref, disk(), flags)
        assert not luns(dom.live) and not luns(dom.config)
        assert not world.target.controllers.get(CONTROLLER)

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("persistent", "running", "flags"), [(True, False, LIVE), (False, True, CONFIG)]
)
def test_libvirtd_refuses_flags_that_do_not_fit(
    tmp_path: Path, persistent: bool, running: bool, flags: int
) -> None:
    async def body(world: World) -> None:
        dom = world.domain(persistent=persistent, running=running)
        client = await world.client()
        with pytest.raises(ReplyError) as error:
            await client.attach(dom.ref, disk(), flags)
        assert error.value.code == Code.OPERATION_INVALID
        assert all(method == "nothing" for method, _ in world.target.requests)

    play(tmp_path, body)


def test_unknown_volume_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        before = (dom.live, dom.config)
        client = await world.client()
        with pytest.raises(ReplyError, match="lvs0/none") as error:
            await client.attach(dom.ref, disk("lvs0/none"), LIVE | CONFIG)
        assert error.value.code == Code.NO_STORAGE_VOL
        assert luns(dom.live) == luns(before[0]) and luns(dom.config) == luns(before[1])

    play(tmp_path, body)


def test_without_a_target_the_attach_fails_with_one_sentence(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        world.target.stop()
        client = await world.client()
        with pytest.raises(ReplyError, match="no target answers") as error:
            await client.attach(dom.ref, disk(), LIVE)
        assert error.value.code == Code.OPERATION_FAILED
        assert luns(dom.live) == {}
        assert "sdb" not in await client.xml(dom.ref)

    play(tmp_path, body)


def test_a_lun_that_cannot_be_added_takes_the_metadata_back(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        world.target.add_volume("lvs0/first")
        dom = world.domain(disks=disk("lvs0/first", "sda"))
        world.target.refuse["vhost_scsi_controller_add_target"] = RpcError(-12, "No memory")
        client = await world.client()
        await client.register(DeviceEvent.ADDED)
        with pytest.raises(ReplyError, match="No memory"):
            await client.attach(dom.ref, disk(), LIVE | CONFIG)
        assert luns(dom.live) == luns(dom.config) == {0: "sda"}
        assert "/dev/virtlun/lvs0/first" in await client.xml(dom.ref)
        assert not client.messages

    play(tmp_path, body)


def test_metadata_that_cannot_be_set_takes_the_other_side_back(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        original = world.libvirtd._set_metadata

        def only_config(item: object, reader: Reader) -> bytes:
            start = reader.offset
            flags = int.from_bytes(reader._data[-4:], "big")
            reader.offset = start
            if flags == LIVE:
                raise Refused(Code.OPERATION_FAILED, "disk full")
            return original(item, reader)  # type: ignore[arg-type]

        world.libvirtd._set_metadata = only_config  # type: ignore[method-assign,assignment]
        with pytest.raises(ReplyError, match="disk full"):
            await client.attach(dom.ref, disk(), LIVE | CONFIG)
        assert luns(dom.live) == luns(dom.config) == {}
        assert world.target.controllers[CONTROLLER] == {}

    play(tmp_path, body)


def test_a_volume_of_another_running_domain_is_refused_by_name(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        world.domain("other", UUID_2, disks=disk())
        dom = world.domain()
        client = await world.client()
        with pytest.raises(ReplyError, match="in use by domain other") as error:
            await client.attach(dom.ref, disk(), LIVE)
        assert error.value.code == Code.RESOURCE_BUSY
        assert luns(dom.live) == {}

    play(tmp_path, body)


def test_attaches_that_each_want_the_others_volume_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds its own domain when it asks whether the other one has the volume."""
    monkeypatch.setattr("plugin.gateway.handlers.start.LEAVE_S", 0.01)

    async def body(world: World) -> None:
        world.target.add_volume("lvs0/more")
        volumes = {"lvs0/data": "one", "lvs0/more": "other"}
        doms = [
            world.domain(name, uuid, disks=disk(volume))
            for uuid, (volume, name) in zip((UUID_1, UUID_2), volumes.items(), strict=True)
        ]
        both = asyncio.Barrier(2)
        holders = world.gateway.services.target.holders

        async def asked(uuid: str, besides: str) -> list[str]:
            found = await holders(uuid, besides)
            await both.wait()
            return found

        monkeypatch.setattr(world.gateway.services.target, "holders", asked)
        clients = [await world.client() for _ in doms]
        said = await asyncio.gather(
            *(
                client.attach(dom.ref, disk(wanted, "sdc"), LIVE)
                for client, dom, wanted in zip(clients, doms, reversed(volumes), strict=True)
            ),
            return_exceptions=True,
        )
        for error, holder in zip(said, ("other", "one"), strict=True):
            assert isinstance(error, ReplyError) and f"in use by domain {holder}" in str(error)
        assert [luns(dom.live) for dom in doms] == [{0: "sdb"}] * 2

    play(tmp_path, body)


def test_shareable_in_both_domains_is_allowed(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        world.domain("other", UUID_2, disks=disk(extra="<shareable/>"))
        dom = world.domain()
        client = await world.client()
        await client.attach(dom.ref, disk(extra="<shareable/>"), LIVE)
        assert luns(dom.live) == {0: "sdb"}

    play(tmp_path, body)


def test_a_controller_left_by_a_stopped_domain_holds_nothing(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        other = world.domain("other", UUID_2, disks=disk())
        other.live = None
        dom = world.domain()
        client = await world.client()
        await client.attach(dom.ref, disk(), LIVE)
        assert f"vm-{UUID_2}" not in world.target.controllers

    play(tmp_path, body)


def test_a_domain_without_our_controller_is_told_what_to_do(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        bare = (
            f"<domain type='qemu' id='1'><name>one</name><uuid>{UUID_1}</uuid>"
            "<memory>1</memory><devices/></domain>"
        )
        dom = world.libvirtd.add("one", live=bare)
        client = await world.client()
        with pytest.raises(ReplyError) as error:
            await client.attach(dom.ref, disk(), LIVE)
        assert error.value.code == Code.OPERATION_INVALID
        assert "controller" in str(error.value) or "shared memory" in str(error.value)

    play(tmp_path, body)


def test_concurrent_attaches_get_targets_of_their_own(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        count = 8
        for number in range(count):
            world.target.add_volume(f"lvs0/v{number}")
        clients = [await world.client() for _ in range(count)]
        await asyncio.gather(
            *(
                client.attach(dom.ref, disk(f"lvs0/v{n}", f"sd{'abcdefgh'[n]}"), LIVE | CONFIG)
                for n, client in enumerate(clients)
            )
        )
        assert sorted(luns(dom.live)) == list(range(count))
        assert luns(dom.live) == luns(dom.config)
        assert sorted(world.target.controllers[CONTROLLER]) == list(range(count))

    play(tmp_path, body)


def test_a_client_killed_in_mid_call_leaves_the_operation_whole(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        gate = world.target.gate["vhost_scsi_controller_add_target"] = threading.Event()
        watcher = await world.client()
        await watcher.register(DeviceEvent.ADDED)
        victim = await world.client()
        args = DomainCall(dom.ref, disk(), LIVE | CONFIG).pack(text=True, flags=True)
        await victim.send(Proc.ATTACH_DEVICE_FLAGS, args)
        add = "vhost_scsi_controller_add_target"
        await until(lambda: any(method == add for method, _ in world.target.requests))
        victim.channel.close()
        await asyncio.sleep(0.05)
        gate.set()
        proc, _ = await watcher.event()
        assert proc == Proc.CALLBACK_DEVICE_ADDED
        assert luns(dom.live) == luns(dom.config) == {0: "sdb"}
        assert len(world.target.controllers[CONTROLLER]) == 1

    play(tmp_path, body)


def test_detach_removes_and_tells_every_registered_client(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        other = world.domain("other", UUID_2)
        everywhere, here, elsewhere = [await world.client() for _ in range(3)]
        await everywhere.register(DeviceEvent.REMOVED)
        await here.register(DeviceEvent.REMOVED, dom.ref)
        await elsewhere.register(DeviceEvent.REMOVED, other.ref)
        client = await world.client()
        minimal = "<disk type='block' device='disk'><target dev='sdb'/></disk>"
        await client.detach(dom.ref, minimal, LIVE | CONFIG)
        assert luns(dom.live) == luns(dom.config) == {}
        assert world.target.controllers[CONTROLLER] == {}
        for listener in (everywhere, here):
            proc, payload = await listener.event()
            assert proc == Proc.CALLBACK_DEVICE_REMOVED
            assert event_of(payload)[:2] == (7, "one")
        await elsewhere.xml(other.ref)
        assert not elsewhere.messages

    play(tmp_path, body)


def test_detach_on_one_side_only_is_refused_when_both_are_asked(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        await client.attach(dom.ref, disk(), LIVE)
        with pytest.raises(ReplyError) as error:
            await client.detach(dom.ref, disk(), LIVE | CONFIG)
        assert error.value.code == Code.DEVICE_MISSING
        assert luns(dom.live) == {0: "sdb"}

    play(tmp_path, body)


def test_detach_with_the_target_down_changes_nothing(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        world.target.stop()
        client = await world.client()
        with pytest.raises(ReplyError, match="no target answers"):
            await client.detach(dom.ref, disk(), LIVE | CONFIG)
        assert luns(dom.live) == luns(dom.config) == {0: "sdb"}

    play(tmp_path, body)


def test_detach_by_alias(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk(extra="<alias name='ua-mine'/>"))
        client = await world.client()
        args = DomainCall(dom.ref, "ua-mine", LIVE).pack(text=True, flags=True)
        await client.call(Proc.DETACH_DEVICE_ALIAS, args)
        assert luns(dom.live) == {}
        carrier = DomainCall(dom.ref, translate.CARRIER_ALIAS, LIVE).pack(text=True, flags=True)
        with pytest.raises(ReplyError) as error:
            await client.call(Proc.DETACH_DEVICE_ALIAS, carrier)
        assert error.value.code == Code.OPERATION_DENIED

    play(tmp_path, body)


def test_ordinary_disks_go_to_libvirtd_untouched(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        ordinary = "<disk type='file'><source file='/x'/><target dev='vdb'/></disk>"
        await client.attach(dom.ref, ordinary, LIVE)
        await client.detach(dom.ref, ordinary, LIVE)
        assert world.libvirtd.calls().count(Proc.ATTACH_DEVICE_FLAGS) == 1
        assert world.libvirtd.calls().count(Proc.DETACH_DEVICE_FLAGS) == 1
        assert world.target.requests == []

    play(tmp_path, body)


def test_attach_to_a_definition_without_controller_redefines_it(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        bare = (
            f"<domain type='qemu'><name>one</name><uuid>{UUID_1}</uuid><memory>1</memory>"
            "<vcpu>1</vcpu><os><type arch='x86_64' machine='q35'>hvm</type></os>"
            "<devices><emulator>/usr/bin/qemu-system-x86_64</emulator></devices></domain>"
        )
        dom = world.libvirtd.add("one", config=bare)
        client = await world.client()
        await client.attach(dom.ref, disk(), CONFIG)
        assert luns(dom.config) == {0: "sdb"}
        assert dom.config is not None and "vhost-user-scsi-pci" in dom.config

    play(tmp_path, body)


def test_own_calls_run_under_the_clients_identity(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        await client.attach(dom.ref, disk(), LIVE | CONFIG)
        for connection in world.libvirtd.connections:
            for proc, identity in connection.calls:
                if proc == Proc.SET_METADATA:
                    assert identity["process-id"] == os.getpid()
                    assert identity["unix-user-id"] == os.getuid()

    play(tmp_path, body)


def test_a_refused_permission_comes_back_verbatim_before_the_target_is_asked(
    tmp_path: Path,
) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        world.libvirtd.refuse[Proc.SET_METADATA] = Refused(
            Code.ACCESS_DENIED, "access denied: 'QEMU' denied access"
        )
        client = await world.client()
        with pytest.raises(ReplyError, match="'QEMU' denied access") as error:
            await client.attach(dom.ref, disk(), LIVE)
        assert error.value.code == Code.ACCESS_DENIED
        assert world.target.requests == []

    play(tmp_path, body)


def test_the_read_only_socket_leaves_refusing_to_libvirtd(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client(read_only=True)
        for proc in (Proc.ATTACH_DEVICE_FLAGS, Proc.DETACH_DEVICE_FLAGS):
            args = DomainCall(dom.ref, disk(), LIVE).pack(text=True, flags=True)
            with pytest.raises(ReplyError, match="read only") as error:
                await client.call(proc, args)
            assert error.value.code == Code.OPERATION_DENIED
        assert world.target.requests == []

    play(tmp_path, body)


def test_update_changes_what_the_guest_does_not_see(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk(extra="<serial>S1</serial>"))
        client = await world.client()

        async def update(xml: str, flags: int) -> None:
            args = DomainCall(dom.ref, xml, flags).pack(text=True, flags=True)
            await client.call(Proc.UPDATE_DEVICE_FLAGS, args)

        await update(disk(extra="<serial>S2</serial>"), CONFIG)
        assert "<serial>S2</serial>" in await client.xml(dom.ref, 2)
        assert "<serial>S1</serial>" in await client.xml(dom.ref)
        with pytest.raises(ReplyError) as error:
            await update(disk(extra="<serial>S2</serial>"), LIVE)
        assert error.value.code == Code.OPERATION_UNSUPPORTED
        assert "<serial>S1</serial>" in await client.xml(dom.ref)
        assert not any(method.startswith("vhost") for method, _ in world.target.requests)

    play(tmp_path, body)


def test_an_event_carries_the_domains_present_id(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        await client.register(DeviceEvent.ADDED)
        await client.attach(Domain("one", dom.uuid, -1), disk(), LIVE)
        _, payload = await client.event()
        reader = Reader(payload)
        reader.i32()
        assert Domain.read(reader).id == 1

    play(tmp_path, body)


def test_where_our_own_connection_fails_ordinary_disks_still_work(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        world.libvirtd.refuse[Proc.CONNECT_OPEN] = Refused(Code.AUTH_FAILED, "no")
        ordinary = "<disk type='file'><source file='/x'/><target dev='vdb'/></disk>"
        await client.attach(dom.ref, ordinary, LIVE)
        await client.detach(dom.ref, ordinary, LIVE)
        args = DomainCall(dom.ref, "vdb").pack(text=True, flags=True)
        await client.call(Proc.GET_BLOCK_INFO, args)
        await client.call(Proc.CREATE, bytes(dom.ref.write(Writer())))
        with pytest.raises(ReplyError, match="no"):
            await client.attach(dom.ref, disk(), LIVE)

    play(tmp_path, body)


def test_a_client_without_the_right_gets_nothing_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XML that is slow to parse costs the time of those alone who may change the domain."""
    parsed: list[int] = []
    parse = Document.__init__

    def counting(self: Document, text: str) -> None:
        parsed.append(len(text))
        parse(self, text)

    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client()
        world.libvirtd.refuse[Proc.SET_METADATA] = Refused(Code.ACCESS_DENIED, "access denied")
        hostile = disk("lvs0/data", "sdc", "<a/>" * 1000)
        for proc in (Proc.ATTACH_DEVICE_FLAGS, Proc.DETACH_DEVICE_FLAGS, Proc.UPDATE_DEVICE_FLAGS):
            args = DomainCall(dom.ref, hostile, 1).pack(text=True, flags=True)
            with pytest.raises(ReplyError, match="access denied"):
                await client.call(proc, args)
        assert not [size for size in parsed if size == len(hostile)]

    monkeypatch.setattr(Document, "__init__", counting)
    play(tmp_path, body)


def test_a_device_that_cannot_be_ours_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        dom = world.libvirtd.add("n", config=plain(), live=plain())
        client = await world.client()
        theirs = "<disk type='file'><source file='/a.img'/><target dev='sdc'/></disk>"
        await client.attach(dom.ref, theirs, 1)
        assert world.libvirtd.calls().count(Proc.ATTACH_DEVICE_FLAGS) == 1

    def never(*_: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr("pydataplane.domain.translate.recognise", never)
    monkeypatch.setattr("plugin.gateway.handlers.attach.disk_dev", never)
    play(tmp_path, body)


def test_the_calls_of_an_attach_and_a_detach(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        for name in ("lvs0/more", "lvs0/last"):
            world.target.add_volume(name)
        dom = world.domain(disks=disk())
        client = await world.client()
        for change in (client.attach, client.detach):  # connections are opened
            await change(dom.ref, disk("lvs0/more", "sdc"), 1)

        async def counted(what: Awaitable[None]) -> tuple[Counter[int], list[str]]:
            libvirtd, target = Counter(world.libvirtd.calls()), len(world.target.requests)
            await what
            said = [method for method, _ in world.target.requests[target:]]
            return Counter(world.libvirtd.calls()) - libvirtd, said

        text = disk("lvs0/last", "sdd")
        calls, asked = await counted(client.attach(dom.ref, text, 1))
        # The permission, both sides, the change.
        assert calls == {Proc.SET_METADATA: 2, Proc.GET_XML_DESC: 2}
        assert asked == [
            "bdev_get_bdevs",
            "vhost_get_controllers",
            "vhost_scsi_controller_add_target",
        ]
        calls, asked = await counted(client.detach(dom.ref, text, 1))
        # What is known of the domain, the permission, the side, the change.
        assert calls == {Proc.SET_METADATA: 2, Proc.GET_XML_DESC: 2}
        assert asked == ["vhost_get_controllers", "vhost_scsi_controller_remove_target"]

    play(tmp_path, body)
