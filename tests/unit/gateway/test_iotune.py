"""blkdeviotune: libvirt's rules, both sides and the target together or none of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from plugin.gateway import domcheckpoints
from plugin.gateway.errors import Code, Refused
from plugin.gateway.events import TUNABLE
from plugin.gateway.handlers.blockjobs import PIVOT
from plugin.gateway.handlers.copying import TRANSIENT_JOB
from plugin.gateway.messages import (
    LLONG,
    STRING,
    ULLONG,
    Domain,
    TuneQuery,
    TypedParam,
    read_params,
)
from plugin.gateway.procs import Proc
from plugin.gateway.reconcile import Reconciler
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import translate
from pydataplane.domain.limiting import XATTR
from pydataplane.domain.limits import MAX, NAMES, Limits
from pydataplane.errors import RpcError
from tests.support.wait import listens
from tests.unit.gateway.fake_libvirtd import FakeDomain, Hang
from tests.unit.gateway.test_recovery import gateway_process
from tests.unit.gateway.world import UUID_1, ReplyError, TestClient, World, disk, play, until

LIVE, CONFIG = 1, 2
CONTROLLER = f"vm-{UUID_1}"
TUNE = "<iotune><total_iops_sec>100</total_iops_sec></iotune>"
SET = "virtlun_bdev_set_limits"


def noted(xml: str | None) -> dict[str, int]:
    """Returns the limits that one side's metadata has of sdb."""
    plan = translate.plan(xml or "")
    return plan.luns[0].limits.given if plan is not None and plan.luns else {}


def packed(dom: Domain, params: list[TypedParam], flags: int, path: str = "sdb") -> bytes:
    writer = dom.write(Writer()).string(path)
    return bytes(writer.array(params, lambda param: param.write(writer)).u32(flags))


async def tune(
    client: TestClient, dom: Domain, values: Mapping[str, int], flags: int = 0, path: str = "sdb"
) -> None:
    params = [TypedParam(name, ULLONG, value) for name, value in values.items()]
    await client.call(Proc.SET_BLOCK_IO_TUNE, packed(dom, params, flags, path))


async def asked(client: TestClient, dom: Domain, flags: int = 0, path: str = "sdb") -> Limits:
    """Returns what a client is told, as virsh asks."""
    none = Reader(await client.call(Proc.GET_BLOCK_IO_TUNE, TuneQuery(dom, None, 0, flags).pack()))
    assert none.array(lambda: None, 0) == []
    query = TuneQuery(dom, path, none.i32(), flags)
    told = read_params(await client.call(Proc.GET_BLOCK_IO_TUNE, query.pack()))
    assert tuple(told) == NAMES
    return Limits(**{name: int(value) for name, value in told.items()})


def has(world: World, alias: str = "lvs0/data") -> dict[str, int]:
    return world.target.volumes[alias].limits


async def attached(world: World, extra: str = TUNE, flags: int = LIVE | CONFIG) -> FakeDomain:
    dom = world.domain()
    await (await world.client()).attach(dom.ref, disk(extra=extra), flags)
    return dom


def test_a_disk_brings_them_and_takes_them_along(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = await attached(world)
        client = await world.client()
        assert has(world) == noted(dom.live) == noted(dom.config) == {"total_iops_sec": 100}
        for flags in (0, LIVE, CONFIG):
            assert await asked(client, dom.ref, flags) == Limits(total_iops_sec=100)
        shown = (await client.xml(dom.ref), await client.xml(dom.ref, 2))
        assert all(TUNE in xml for xml in shown)
        await client.detach(dom.ref, disk(), LIVE | CONFIG)  # as Nova does, without them
        assert has(world) == {}
        assert world.target.volumes["lvs0/data"].xattrs == {}

    play(tmp_path, body)


def test_an_attach_that_fails_leaves_none(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        world.target.refuse["vhost_scsi_controller_add_target"] = RpcError(-5, "I/O error")
        with pytest.raises(ReplyError, match="I/O error"):
            await client.attach(dom.ref, disk(extra=TUNE), LIVE | CONFIG)
        assert has(world) == noted(dom.live) == noted(dom.config) == {}
        assert world.target.volumes["lvs0/data"].xattrs == {}
        world.target.refuse.clear()
        world.target.refuse[SET] = RpcError(-32602, "no such limits")
        with pytest.raises(ReplyError, match="no such limits"):
            await client.attach(dom.ref, disk(extra=TUNE), LIVE)
        assert world.target.controllers[CONTROLLER] == {}

    play(tmp_path, body)


def test_a_domain_that_ended_while_nobody_looked_has_none_afterwards(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = await attached(world)
        dom.live = None
        await Reconciler(world.gateway.services).run()
        assert CONTROLLER not in world.target.controllers
        assert has(world) == {} and noted(dom.config) == {"total_iops_sec": 100}
        client = await world.client()
        await client.call(Proc.CREATE, bytes(dom.ref.write(Writer())))
        assert has(world) == {"total_iops_sec": 100}

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("flags", "live", "config"),
    [(0, 7, 100), (LIVE, 7, 100), (CONFIG, 100, 7), (LIVE | CONFIG, 7, 7)],
)
def test_flags_choose_the_side(tmp_path: Path, flags: int, live: int, config: int) -> None:
    async def body(world: World) -> None:
        dom = await attached(world)
        client = await world.client()
        await tune(client, dom.ref, {"total_iops_sec": 7}, flags)
        assert has(world) == noted(dom.live) == {"total_iops_sec": live}
        assert noted(dom.config) == {"total_iops_sec": config}
        assert await asked(client, dom.ref, LIVE) == Limits(total_iops_sec=live)
        assert await asked(client, dom.ref, CONFIG) == Limits(total_iops_sec=config)
        assert f"<total_iops_sec>{live}<" in await client.xml(dom.ref)
        assert f"<total_iops_sec>{config}<" in await client.xml(dom.ref, 2)
        assert not list((tmp_path / "notes").glob("*"))

    play(tmp_path, body)


def test_a_domain_that_is_shut_off_has_what_its_definition_says(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk(extra=TUNE))
        client = await world.client()
        assert await asked(client, dom.ref) == Limits(total_iops_sec=100)
        await tune(client, dom.ref, {"read_bytes_sec": 5})
        assert noted(dom.config) == {"read_bytes_sec": 5, "total_iops_sec": 100}
        assert has(world) == {}
        for call in (
            tune(client, dom.ref, {"read_iops_sec": 1}, LIVE),
            asked(client, dom.ref, LIVE),
        ):
            with pytest.raises(ReplyError, match="domain is not running") as caught:
                await call
            assert caught.value.code == Code.OPERATION_INVALID

    play(tmp_path, body)


def test_what_is_not_named_stays_as_libvirt_has_it_and_zeros_end_them(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = await attached(world, extra="")
        client = await world.client()
        await tune(client, dom.ref, {"read_iops_sec": 5, "write_iops_sec": 6, "size_iops_sec": 512})
        assert world.target.volumes["lvs0/data"].xattrs == {XATTR: CONTROLLER}
        await tune(client, dom.ref, {"read_iops_sec": 7, "read_iops_sec_max": 8})
        assert has(world) == {"read_iops_sec": 7, "read_iops_sec_max": 8, "size_iops_sec": 512}
        await tune(
            client, dom.ref, {"read_iops_sec": 0, "read_iops_sec_max": 0, "size_iops_sec": 0}
        )
        assert has(world) == noted(dom.live) == {}
        assert world.target.volumes["lvs0/data"].xattrs == {}
        assert "iotune" not in await client.xml(dom.ref)

    play(tmp_path, body)


def test_limits_by_hand_are_shown_and_a_call_goes_on_from_them(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = await attached(world, extra="")
        client = await world.client()
        world.target.volumes["lvs0/data"].limits = {"read_bytes_sec": 9}
        assert await asked(client, dom.ref) == Limits(read_bytes_sec=9)
        await tune(client, dom.ref, {"total_iops_sec": 3})
        assert has(world) == {"read_bytes_sec": 9, "total_iops_sec": 3}

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("values", "code", "says"),
    [
        (
            {"total_bytes_sec": 1, "read_bytes_sec": 1},
            Code.INVALID_ARG,
            "total and read/write of bytes_sec cannot be set at the same time",
        ),
        (
            {"read_iops_sec_max": 1},
            Code.CONFIG_UNSUPPORTED,
            "disk sdb: cannot reset 'read_iops_sec' when 'read_iops_sec_max' is set: set both",
        ),
        (
            {"total_iops_sec_max": 50},
            Code.CONFIG_UNSUPPORTED,
            "'total_iops_sec_max' cannot be smaller than 'total_iops_sec'",
        ),
        ({"size_iops_sec": 1, "read_iops_sec": 0}, Code.CONFIG_UNSUPPORTED, "size_iops_sec"),
        ({"total_iops_sec": MAX + 1}, Code.ARGUMENT_UNSUPPORTED, f"be no more than {MAX}"),
        ({"speed": 1}, Code.INVALID_ARG, "parameter 'speed' not supported"),
    ],
)
def test_what_contradicts_itself_changes_nothing(
    tmp_path: Path, values: dict[str, int], code: Code, says: str
) -> None:
    async def body(world: World) -> None:
        dom = await attached(world)
        client = await world.client()
        before = (has(world), noted(dom.live), noted(dom.config))
        for flags in (LIVE, CONFIG, LIVE | CONFIG):
            with pytest.raises(ReplyError, match=says) as caught:
                await tune(client, dom.ref, values, flags)
            assert caught.value.code == code
        assert (has(world), noted(dom.live), noted(dom.config)) == before

    play(tmp_path, body)


def test_a_burst_is_not_left_without_its_base(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = await attached(world)
        client = await world.client()
        await tune(client, dom.ref, {"total_iops_sec_max": 200})
        with pytest.raises(
            ReplyError, match=r"cannot reset 'total_iops_sec' when .*set both, or both to 0"
        ):
            await tune(client, dom.ref, {"total_iops_sec": 0})

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("params", "flags", "code", "says"),
    [
        (
            [TypedParam("group_name", STRING, "g")],
            0,
            Code.OPERATION_UNSUPPORTED,
            "group_name: each volume has limits of its own",
        ),
        (
            [TypedParam("total_iops_sec", LLONG, 1)],
            0,
            Code.INVALID_ARG,
            "invalid type of parameter 'total_iops_sec'",
        ),
        (
            [TypedParam("read_iops_sec", ULLONG, 1)] * 2,
            0,
            Code.INVALID_ARG,
            "'read_iops_sec' occurs multiple times",
        ),
        ([], 8, Code.INVALID_ARG, "unsupported flags"),
    ],
)
def test_arguments_are_libvirts(
    tmp_path: Path, params: list[TypedParam], flags: int, code: Code, says: str
) -> None:
    async def body(world: World) -> None:
        dom = await attached(world)
        client = await world.client()
        with pytest.raises(ReplyError, match=says) as caught:
            await client.call(Proc.SET_BLOCK_IO_TUNE, packed(dom.ref, params, flags))
        assert caught.value.code == code
        assert has(world) == {"total_iops_sec": 100}

    play(tmp_path, body)


def test_a_disk_that_domains_share_has_no_limits_of_one_of_them(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = await attached(world, extra="<shareable/>")
        client = await world.client()
        with pytest.raises(ReplyError, match=r"share volume lvs0/data: .*virtlun volume limits"):
            await tune(client, dom.ref, {"total_iops_sec": 1})
        assert has(world) == {}
        # Nor does it take over what the volume has by hand.
        world.target.volume("lvs0/data").limits = {"total_iops_sec": 9, "read_bytes_sec": 8}
        with pytest.raises(ReplyError, match="share volume"):
            await tune(client, dom.ref, {"total_iops_sec": 0})
        assert has(world) == {"total_iops_sec": 9, "read_bytes_sec": 8}

    play(tmp_path, body)


def test_a_disk_on_one_side_is_not_changed_on_both(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = await attached(world, flags=LIVE)
        client = await world.client()
        with pytest.raises(ReplyError, match="in the running domain of one but not in its persis"):
            await tune(client, dom.ref, {"total_iops_sec": 1}, LIVE | CONFIG)
        assert has(world) == {"total_iops_sec": 100}

    play(tmp_path, body)


def test_other_disks_are_libvirtds(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = await attached(world)
        bare = world.libvirtd.add(
            "two", live="<domain id='2'><uuid>" + "2" * 32 + "</uuid></domain>"
        )
        client = await world.client()
        for at in (dom.ref, bare.ref):
            with pytest.raises(ReplyError, match="unknown procedure: 252"):
                await tune(client, at, {"total_iops_sec": 1}, path="vda")
            with pytest.raises(ReplyError, match="disk was not found in the domain config"):
                await asked(client, at, path="vda")
        (carrier,) = [
            dev
            for dev in ("ubda", "vdzzzz", "xvda")
            if f"dev='{dev}'" in (dom.live or "").replace('"', "'")
        ] or ["?"]
        with pytest.raises(ReplyError, match=f"invalid path {carrier} not assigned"):
            await tune(client, dom.ref, {"total_iops_sec": 1}, path=carrier)

    play(tmp_path, body)


def test_who_may_not_is_told_by_libvirtd(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = await attached(world)
        read_only = await world.client(read_only=True)
        assert await asked(read_only, dom.ref) == Limits(total_iops_sec=100)
        with pytest.raises(ReplyError):
            await tune(read_only, dom.ref, {"total_iops_sec": 1})
        client = await world.client()
        world.libvirtd.refuse[Proc.SET_METADATA] = Refused(Code.ACCESS_DENIED, "access denied")
        with pytest.raises(ReplyError, match="access denied"):
            await tune(client, dom.ref, {"total_iops_sec": 1})
        world.libvirtd.refuse[Proc.GET_BLOCK_IO_TUNE] = Refused(Code.ACCESS_DENIED, "hidden")
        with pytest.raises(ReplyError, match="hidden"):
            await asked(client, dom.ref)
        assert has(world) == {"total_iops_sec": 100}

    play(tmp_path, body)


def test_clients_are_told_of_new_limits(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = await attached(world)
        client = await world.client()
        args = Writer().i32(TUNABLE)
        await client.call(Proc.CALLBACK_REGISTER_ANY, bytes(args.optional(None, lambda _: None)))
        await tune(client, dom.ref, {"total_iops_sec": 5}, CONFIG)  # of which nobody is told
        await tune(client, dom.ref, {"total_iops_sec": 0, "read_bytes_sec": 6})
        proc, payload = await client.event()
        assert proc == Proc.CALLBACK_TUNABLE
        reader = Reader(payload)
        assert (reader.i32(), Domain.read(reader).name) == (7, "one")
        assert read_params(payload[reader.offset :]) == {
            "blkdeviotune.disk": "sdb",
            "blkdeviotune.total_iops_sec": 0,
            "blkdeviotune.read_bytes_sec": 6,
        }

    play(tmp_path, body)


def test_what_the_target_refuses_changes_neither_side(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = await attached(world)
        client = await world.client()
        world.target.fail[SET] = RpcError(-5, "I/O error")
        with pytest.raises(ReplyError, match="I/O error"):
            await tune(client, dom.ref, {"total_iops_sec": 1}, LIVE | CONFIG)
        assert has(world) == noted(dom.live) == noted(dom.config) == {"total_iops_sec": 100}
        assert not list((tmp_path / "notes").glob("*"))
        world.target.stop()
        with pytest.raises(ReplyError, match="no target answers"):
            await tune(client, dom.ref, {"total_iops_sec": 1}, LIVE | CONFIG)
        assert noted(dom.live) == noted(dom.config) == {"total_iops_sec": 100}

    play(tmp_path, body)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("done", [False, True])
def test_a_libvirtd_that_dies_at_any_step(tmp_path: Path, nth: int, done: bool) -> None:
    """SET_METADATA asks for permission, then changes the persistent and the running side."""

    async def body(world: World) -> None:
        world.target.add_volume("lvs0/boot")
        dom = world.domain(disks=disk("lvs0/boot", "sda"))
        client = await world.client()
        await client.attach(dom.ref, disk(extra=TUNE), LIVE | CONFIG)
        hang = world.libvirtd.hang = Hang(Proc.SET_METADATA, nth, done)
        values = [TypedParam("total_iops_sec", ULLONG, 1)]
        await client.send(Proc.SET_BLOCK_IO_TUNE, packed(dom.ref, values, LIVE | CONFIG))
        async with asyncio.timeout(50):
            await hang.reached.wait()
        await world.libvirtd.stop()
        world.libvirtd.hang = None
        await world.libvirtd.start()
        await until(lambda: not list((tmp_path / "notes").glob("*")))
        plans = [translate.plan(xml or "") for xml in (dom.live, dom.config)]
        found = [lun.limits.given for p in plans if p for lun in p.luns if lun.dev == "sdb"]
        assert [*found, has(world)] == [{"total_iops_sec": 100}] * 3

    play(tmp_path, body, reconcile=True)


def test_a_gateway_killed_before_the_target_has_them(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = await attached(world)
        ours, world.path = world.path, world.path.with_name("gw2")
        gate = threading.Event()
        with gateway_process(world) as process:
            await until(lambda: listens(world.path))
            world.target.gate[SET] = gate
            client = await world.client()
            values = [TypedParam("total_iops_sec", ULLONG, 1)]
            before = world.target.calls.count(SET)
            await client.send(Proc.SET_BLOCK_IO_TUNE, packed(dom.ref, values, LIVE | CONFIG))
            await until(lambda: world.target.calls.count(SET) > before)
            assert noted(dom.live) == noted(dom.config) == {"total_iops_sec": 1}
            process.kill()
            await asyncio.to_thread(process.wait)
        world.target.gate.clear()
        gate.set()
        world.path.unlink()
        world.path.with_name("gw2-ro").unlink()
        with gateway_process(world):
            await until(lambda: noted(dom.live) == {"total_iops_sec": 100})
            await until(lambda: not list((tmp_path / "notes").glob("*")))
            world.path = ours
        assert has(world) == noted(dom.config) == {"total_iops_sec": 100}

    play(tmp_path, body)


def test_a_pivot_takes_them_to_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*_: object) -> list[object]:
        return []

    monkeypatch.setattr(domcheckpoints, "of_domain", none)

    async def body(world: World) -> None:
        dom = await attached(world)
        for proc in (Proc.BLOCK_COPY, Proc.BLOCK_JOB_ABORT):
            world.libvirtd.refuse[proc] = Refused(Code.INVALID_ARG, "disk 'sdb' not found")
        world.libvirtd.answers[Proc.SNAPSHOT_NUM] = lambda _: bytes(Writer().i32(0))
        client = await world.client()
        to = "<disk type='file'><source file='/dev/virtlun/lvs0/new'/></disk>"
        args = dom.ref.write(Writer()).string("sdb").string(to)
        await client.call(Proc.BLOCK_COPY, bytes(args.array([], lambda _: None).u32(TRANSIENT_JOB)))
        world.target.copies[CONTROLLER, 0]["state"] = "ready"
        pivot = dom.ref.write(Writer()).string("sdb").u32(PIVOT)
        await client.call(Proc.BLOCK_JOB_ABORT, bytes(pivot))
        assert has(world, "lvs0/new") == noted(dom.live) == {"total_iops_sec": 100}
        assert has(world) == {} and world.target.volumes["lvs0/data"].xattrs == {}
        assert await asked(client, dom.ref) == Limits(total_iops_sec=100)

    play(tmp_path, body)
