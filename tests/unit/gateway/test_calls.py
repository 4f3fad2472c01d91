"""Define, create, start, dumpxml, block calls, statistics and reconcile."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from plugin.gateway import domstats
from plugin.gateway.domstats import NONE, DomainStats, Numbers
from plugin.gateway.errors import Code, NoAnswer, Refused
from plugin.gateway.messages import (
    STRING,
    UINT,
    ULLONG,
    Domain,
    DomainCall,
    TypedParam,
    XmlCall,
)
from plugin.gateway.procs import Proc
from plugin.gateway.reconcile import Reconciler
from plugin.gateway.targets import Targets
from plugin.gateway.usage import CONTROLLERS_MAX, Unit, Usage
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import translate
from pydataplane.domain.errors import Refusal
from pydataplane.errors import RpcError
from tests.support.fake_socket import SocketTarget
from tests.support.fake_target import MIB
from tests.unit.gateway.decoded import StatsRecord
from tests.unit.gateway.world import (
    UUID_1,
    UUID_2,
    ReplyError,
    TestClient,
    World,
    disk,
    plain,
    play,
    until,
)

CONTROLLER = f"vm-{UUID_1}"
BYTES, CAPACITY, EXTEND = 1, 2, 4


async def define(client: TestClient, xml: str) -> Domain:
    return Domain.read(Reader(await client.call(Proc.DEFINE_XML, XmlCall(xml, None).pack())))


def path_call(dom: Domain, path: str) -> bytes:
    return DomainCall(dom, path).pack(text=True, flags=True)


async def resize(client: TestClient, dom: Domain, size: int, flags: int = BYTES) -> None:
    args = dom.write(Writer()).string("sdb").u64(size).u32(flags)
    await client.call(Proc.BLOCK_RESIZE, bytes(args))


def test_a_definition_comes_back_as_it_was_given(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        dom = await define(client, plain(devices=disk(extra="<serial>S1</serial>")))
        stored = world.libvirtd.domains[dom.uuid].config
        assert stored is not None and "vhost-user-scsi-pci" in stored
        plan = translate.plan(stored)
        assert plan is not None
        assert plan.luns[0].uuid == world.target.volumes["lvs0/data"].uuid
        shown = await client.xml(dom)
        assert "<serial>S1</serial>" in shown and "/dev/virtlun/lvs0/data" in shown
        assert "vhost" not in shown and "virtlun:disks" not in shown
        again = await define(client, shown)
        assert again.uuid == dom.uuid
        assert translate.plan(world.libvirtd.domains[dom.uuid].config or "") == plan

    play(tmp_path, body)


def test_a_definition_needs_no_target(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        world.target.stop()
        client = await world.client()
        dom = await define(client, plain(devices=disk()))
        assert "/dev/virtlun/lvs0/data" in await client.xml(dom)

    play(tmp_path, body)


def test_a_contradiction_in_the_definition_is_one_sentence(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        world.target.add_volume("lvs0/second")
        client = await world.client()
        twice = disk() + disk("lvs0/second")
        with pytest.raises(ReplyError, match="sdb"):
            await define(client, plain(devices=twice))
        assert world.libvirtd.domains == {}

    play(tmp_path, body)


def test_create_makes_controller_and_luns_first(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        seen = {}
        original = world.libvirtd._define

        def define(xml: str, *, live: bool) -> bytes:
            seen.update(world.target.controllers[CONTROLLER])
            return original(xml, live=live)

        world.libvirtd._define = define  # type: ignore[method-assign]
        await client.call(Proc.CREATE_XML, XmlCall(plain(devices=disk()), 0).pack())
        assert seen == {0: world.target.volumes["lvs0/data"].uuid}
        assert not world.target.delayed

    play(tmp_path, body)


def test_a_create_that_fails_leaves_no_controller(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        world.libvirtd.refuse[Proc.CREATE_XML] = Refused(Code.INTERNAL_ERROR, "no QEMU")
        client = await world.client()
        with pytest.raises(ReplyError, match="no QEMU"):
            await client.call(Proc.CREATE_XML, XmlCall(plain(devices=disk()), 0).pack())
        assert world.target.controllers == {}

    play(tmp_path, body)


@pytest.mark.parametrize("proc", [Proc.CREATE, Proc.CREATE_WITH_FLAGS])
def test_start_puts_the_controller_right(tmp_path: Path, proc: Proc) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        stale = world.target.add_volume("lvs0/stale")
        world.target.controllers[CONTROLLER] = {0: stale, 5: stale}
        client = await world.client()
        args = dom.ref.write(Writer())
        await client.call(proc, bytes(args if proc == Proc.CREATE else args.u32(0)))
        assert world.target.controllers[CONTROLLER] == {0: world.target.volumes["lvs0/data"].uuid}
        assert dom.live is not None

    play(tmp_path, body)


def test_start_without_a_target_is_refused(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(running=False, disks=disk())
        world.target.stop()
        client = await world.client()
        with pytest.raises(ReplyError, match="no target answers"):
            await client.call(Proc.CREATE, bytes(dom.ref.write(Writer())))
        assert dom.live is None

    play(tmp_path, body)


def test_start_with_a_volume_in_use_names_the_holder(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        world.domain("other", UUID_2, disks=disk())
        dom = world.domain(running=False, disks=disk())
        client = await world.client()
        with pytest.raises(ReplyError, match="in use by domain other"):
            await client.call(Proc.CREATE, bytes(dom.ref.write(Writer())))
        assert CONTROLLER not in world.target.controllers

    play(tmp_path, body)


def test_block_info_of_ours_and_of_others(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client()
        for path in ("sdb", "/dev/virtlun/lvs0/data"):
            reader = Reader(await client.call(Proc.GET_BLOCK_INFO, path_call(dom.ref, path)))
            assert [reader.u64() for _ in range(3)] == [3 * MIB, 64 * MIB, 3 * MIB]
        reader = Reader(await client.call(Proc.GET_BLOCK_INFO, path_call(dom.ref, "vda")))
        assert [reader.u64() for _ in range(3)] == [1, 2, 3]

    play(tmp_path, body)


def test_block_stats(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client()
        plain_call = DomainCall(dom.ref, "sdb").pack(text=True)
        reader = Reader(await client.call(Proc.BLOCK_STATS, plain_call))
        assert [reader.i64() for _ in range(5)] == [10, 40960, 20, 81920, -1]
        count = bytes(dom.ref.write(Writer()).string("sdb").i32(0).u32(0))
        reader = Reader(await client.call(Proc.BLOCK_STATS_FLAGS, count))
        assert (reader.u32(), reader.i32()) == (0, 8)
        some = bytes(dom.ref.write(Writer()).string("sdb").i32(8).u32(4))
        reader = Reader(await client.call(Proc.BLOCK_STATS_FLAGS, some))
        params = {p.field: p.value for p in reader.array(lambda: TypedParam.read(reader), 16)}
        assert params["rd_operations"] == 10 and params["wr_bytes"] == 81920
        assert params["rd_total_times"] == 1_000_000, "1000 ticks of a microsecond"

    play(tmp_path, body)


def test_block_stats_of_all_disks_are_summed_with_libvirtds(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        theirs = Writer()
        for value in (1, 2, 3, 4, -1):
            theirs.i64(value)
        world.libvirtd.answers[Proc.BLOCK_STATS] = lambda payload: bytes(theirs)
        client = await world.client()
        reader = Reader(
            await client.call(Proc.BLOCK_STATS, DomainCall(dom.ref, "").pack(text=True))
        )
        assert [reader.i64() for _ in range(5)] == [11, 40962, 23, 81924, -1]
        # With no disk of its own libvirtd counts 0 parameters; ours still count.
        world.libvirtd.answers[Proc.BLOCK_STATS_FLAGS] = lambda payload: bytes(8)
        for wanted, expected in ((0, 0), (8, 8)):
            args = bytes(dom.ref.write(Writer()).string("").i32(wanted).u32(0))
            reader = Reader(await client.call(Proc.BLOCK_STATS_FLAGS, args))
            assert len(reader.array(lambda: TypedParam.read(reader), 16)) == expected  # noqa: B023
            assert reader.i32() == 8

    play(tmp_path, body)


def test_resize_grows_in_whole_clusters(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client()
        await resize(client, dom.ref, 100 * MIB + 1)
        assert world.target.volumes["lvs0/data"].mib == 101
        await resize(client, dom.ref, 128 * 1024, flags=0)
        assert world.target.volumes["lvs0/data"].mib == 128
        await resize(client, dom.ref, 128 * MIB)
        await resize(client, dom.ref, 128 * MIB - 5)
        await resize(client, dom.ref, 0, flags=CAPACITY)
        assert world.target.volumes["lvs0/data"].mib == 128

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("size", "flags", "code", "words"),
    [
        (32 * MIB, BYTES, Code.INVALID_ARG, "cut off"),
        (0, BYTES, Code.INVALID_ARG, "greater than zero"),
        (2000 * MIB, BYTES, Code.INVALID_ARG, "1073741824 bytes left"),
        (2**63, 0, Code.OVERFLOW, "size must be less"),
        (1, CAPACITY, Code.INVALID_ARG, "must be zero"),
        (128 * MIB, 0x40, Code.INVALID_ARG, "unsupported flags"),
    ],
)
def test_a_wrong_size_is_one_sentence_and_changes_nothing(
    tmp_path: Path, size: int, flags: int, code: Code, words: str
) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client()
        with pytest.raises(ReplyError, match=words) as error:
            await resize(client, dom.ref, size, flags)
        assert error.value.code == code
        assert world.target.volumes["lvs0/data"].mib == 64

    play(tmp_path, body)


def test_a_shrink_needs_the_configuration_and_never_with_extend(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client()
        with pytest.raises(ReplyError, match="cut off"):
            await resize(client, dom.ref, 32 * MIB, BYTES | EXTEND)
        await resize(client, dom.ref, 32 * MIB)
        assert world.target.volumes["lvs0/data"].mib == 32

    play(tmp_path, body, allow_shrink=True)


def test_libvirtd_judges_a_resize_first(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        stopped = world.domain(running=False, disks=disk())
        client = await world.client()
        with pytest.raises(ReplyError, match="not running"):
            await resize(client, stopped.ref, 128 * MIB)
        running = world.domain(disks=disk())
        read_only = await world.client(read_only=True)
        with pytest.raises(ReplyError, match="read only"):
            await resize(read_only, running.ref, 128 * MIB)
        world.libvirtd.refuse[Proc.BLOCK_RESIZE] = Refused(Code.ACCESS_DENIED, "denied")
        with pytest.raises(ReplyError, match="denied"):
            await resize(client, running.ref, 128 * MIB)
        assert not any(method == "bdev_lvol_resize" for method, _ in world.target.requests)

    play(tmp_path, body)


def test_what_is_not_supported_says_so(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client()
        peek = bytes(dom.ref.write(Writer()).string("sdb").u64(0).u32(512).u32(0))
        with pytest.raises(ReplyError, match="sdb") as error:
            await client.call(Proc.BLOCK_PEEK, peek)
        assert error.value.code == Code.OPERATION_UNSUPPORTED

    play(tmp_path, body)


def stats_of(dom: Domain, *names: str) -> StatsRecord:
    params = [TypedParam("state.state", 1, 1), TypedParam("block.count", UINT, len(names))]
    for number, name in enumerate(names):
        params.append(TypedParam(f"block.{number}.name", STRING, name))
        params.append(TypedParam(f"block.{number}.rd.reqs", ULLONG, 7))
    return StatsRecord(dom, params)


def test_all_domain_stats_show_our_disks_and_hide_the_carrier(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        bare = world.libvirtd.add("two", config=plain("two", UUID_2))
        records = [stats_of(dom.ref, "vda", "ubda", "vdb"), stats_of(bare.ref, "vda")]
        world.libvirtd.answers[Proc.GET_ALL_DOMAIN_STATS] = lambda _: StatsRecord.pack_all(records)
        client = await world.client()
        reply = await client.call(Proc.GET_ALL_DOMAIN_STATS, bytes(12))
        ours, theirs = StatsRecord.read_all(reply)
        assert theirs == records[1]
        values = {param.field: param.value for param in ours.params}
        assert values["block.count"] == 3
        assert [values[f"block.{n}.name"] for n in range(3)] == ["vda", "vdb", "sdb"]
        assert values["block.2.path"] == "/dev/virtlun/lvs0/data"
        assert values["block.2.wr.bytes"] == 81920
        assert values["block.2.capacity"] == 64 * MIB
        world.target.stop()
        reply = await client.call(Proc.GET_ALL_DOMAIN_STATS, bytes(12))
        values = {param.field: param.value for param in StatsRecord.read_all(reply)[0].params}
        assert values["block.2.name"] == "sdb" and "block.2.wr.bytes" not in values

    play(tmp_path, body)


def test_statistics_of_many_domains_ask_the_target_once(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        records = []
        for number in range(12):
            world.target.add_volume(f"lvs0/v{number}")
            uuid = f"{number:08d}-1111-4111-8111-111111111111"
            dom = world.domain(f"d{number}", uuid, disks=disk(f"lvs0/v{number}"))
            records.append(StatsRecord(dom.ref, [TypedParam("block.count", UINT, 0)]))
        world.libvirtd.answers[Proc.GET_ALL_DOMAIN_STATS] = lambda _: StatsRecord.pack_all(records)
        client = await world.client()
        for exchanges in (3, 2):  # statistics, sizes, and limits, which stay as they are
            world.target.exchanges = 0
            result = StatsRecord.read_all(await client.call(Proc.GET_ALL_DOMAIN_STATS))
            for number, record in enumerate(result):
                values = {param.field: param.value for param in record.params}
                assert values["block.count"] == 1
                assert values["block.0.path"] == f"/dev/virtlun/lvs0/v{number}"
                assert values["block.0.rd.reqs"] == 10 and values["block.0.capacity"] == 64 << 20
                assert values["block.0.limits.discard_alignment"] == MIB
            assert world.target.exchanges == exchanges

    play(tmp_path, body)


def _given(payload: bytes, _: bytes) -> bytes:
    return payload


def test_statistics_without_a_domain_of_ours_pass_without_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = 0
    translated = DomainStats.translated

    async def counted(self: DomainStats, payload: bytes, *_: object) -> bytes:
        nonlocal changed
        changed += 1
        return await translated(self, payload)

    async def body(world: World) -> None:
        ours = world.domain(disks=disk())
        bare = world.libvirtd.add("two", config=plain("two", UUID_2))
        client = await world.client()
        named = bytes(bare.ref.write(Writer().u32(1)).u32(0).u32(0))
        for records, tasks in (
            ([stats_of(bare.ref, "vda")], 1),  # what it has is not known yet
            ([stats_of(bare.ref, "vda")], 0),
            ([stats_of(bare.ref, "vda"), stats_of(ours.ref, "ubda")], 1),
            ([StatsRecord(ours.ref, [TypedParam("state.state", 1, 1)])], 0),
        ):
            payload = StatsRecord.pack_all(records)
            world.libvirtd.answers[Proc.GET_ALL_DOMAIN_STATS] = partial(_given, payload)
            before = changed
            reply = await client.call(Proc.GET_ALL_DOMAIN_STATS, named)
            assert changed - before == tasks
            assert (reply == payload) is (records[-1].dom != ours.ref or len(records) == 1)

    monkeypatch.setattr(DomainStats, "translated", counted)
    play(tmp_path, body)


def test_who_polls_does_not_wait_for_one_time_out_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that hangs: all who ask for long statistics wait at the same time."""
    monkeypatch.setattr(domstats, "LONG_BYTES", 0)
    waiting = 0
    answered = asyncio.Event()

    async def hangs(_: Targets, names: list[str]) -> dict[str, Usage]:
        nonlocal waiting
        waiting += 1
        await answered.wait()
        raise NoAnswer(Refusal.TIMEOUT, "no answer")

    monkeypatch.setattr(Targets, "usage", hangs)

    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        payload = StatsRecord.pack_all([stats_of(dom.ref, "ubda")])
        world.libvirtd.answers[Proc.GET_ALL_DOMAIN_STATS] = partial(_given, payload)
        clients = [await world.client() for _ in range(3)]
        polls = [
            asyncio.create_task(client.call(Proc.GET_ALL_DOMAIN_STATS, bytes(12)))
            for client in clients
        ]
        await until(lambda: waiting == len(clients), 10.0)
        answered.set()
        for reply in await asyncio.gather(*polls):
            values = {param.field: param.value for param in StatsRecord.read_all(reply)[0].params}
            assert values["block.0.name"] == "sdb"

    play(tmp_path, body)


def test_the_target_is_asked_about_all_domains_while_libvirtd_answers(tmp_path: Path) -> None:
    def asked(world: World) -> list[str]:
        """Returns the volumes whose sizes were asked for."""
        sizes = (a["names"] for m, a in world.target.requests if m == "virtlun_lvol_get_sizes")
        return [name for names in sizes for name in names]

    async def body(world: World) -> None:
        first = world.domain(disks=disk())
        world.target.add_volume("lvs0/late")
        late = world.domain("two", UUID_2, disks=disk("lvs0/late"))
        records = [stats_of(first.ref, "ubda"), stats_of(late.ref, "ubda")]
        client = await world.client()
        early: list[str] = []

        def answer(_: bytes) -> bytes:
            early[:] = asked(world)
            return StatsRecord.pack_all(records)

        def came(count: int) -> bool:
            return len(asked(world)) >= count

        world.libvirtd.answers[Proc.GET_ALL_DOMAIN_STATS] = answer
        for known, args, before, after in (
            (0, (0, 0), 0, 2),
            (2, (0, 0), 2, 2),
            (1, (32, 0), 1, 2),
            (2, (32, 1), 2, 2),  # of those that run
            (2, (1, 0), 0, 2),  # libvirtd gives more than was asked for
            (2, (0, 2), 0, 2),
        ):
            services = world.gateway.services
            services.domain_cache.forget()
            for dom in (first, late)[:known]:
                await services.domain_cache.current(dom.ref)
            world.target.requests.clear()
            gate = world.libvirtd.gate[Proc.GET_ALL_DOMAIN_STATS] = asyncio.Event()
            call = bytes(Writer().u32(0).u32(args[0]).u32(args[1]))
            reply = asyncio.create_task(client.call(Proc.GET_ALL_DOMAIN_STATS, call))
            await until(partial(came, before))
            if not before:
                await asyncio.sleep(0.05)  # in which a wrong question would come
            gate.set()
            for record in StatsRecord.read_all(await reply):
                values = {param.field: param.value for param in record.params}
                assert values["block.0.capacity"] == 64 * MIB
            assert (len(early), len(asked(world))) == (before, after)

    play(tmp_path, body)


@pytest.mark.usefixtures("as_nobody")
@pytest.mark.parametrize("judges", [False, True])
def test_nothing_is_asked_ahead_where_libvirtd_judges_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judges: bool
) -> None:
    conf = tmp_path / "libvirtd.conf"
    conf.write_text(f'access_drivers = ["{"polkit" if judges else "none"}"]\n')
    asked: list[bool] = []

    async def ahead(_: DomainStats, *, running: bool) -> Numbers:
        asked.append(running)
        return NONE

    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        payload = StatsRecord.pack_all([stats_of(dom.ref, "ubda")])
        world.libvirtd.answers[Proc.GET_ALL_DOMAIN_STATS] = partial(_given, payload)
        client = await world.client()
        (record,) = StatsRecord.read_all(await client.call(Proc.GET_ALL_DOMAIN_STATS, bytes(12)))
        values = {param.field: param.value for param in record.params}
        assert values["block.0.capacity"] == 64 * MIB
        assert asked == ([] if judges else [False])

    monkeypatch.setattr(DomainStats, "ahead", ahead)
    play(tmp_path, body, libvirtd_conf=conf)


def test_libvirtd_has_a_few_calls_about_all_domains_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait in order, but not for ever for those that hang."""
    proc, empty = Proc.GET_ALL_DOMAIN_STATS, StatsRecord.pack_all([])

    async def body(world: World) -> None:
        gate = world.libvirtd.gate[proc] = asyncio.Event()
        world.libvirtd.answers[proc] = partial(_given, empty)

        def there() -> int:
            return sum(called == proc for c in world.libvirtd.connections for called, _ in c.calls)

        async def ask() -> asyncio.Task[bytes]:
            return asyncio.create_task((await world.client()).call(proc, bytes(12)))

        calls = [await ask() for _ in range(domstats.ROUNDS + 2)]
        await until(lambda: there() == domstats.ROUNDS)
        await asyncio.sleep(0.1)
        assert there() == domstats.ROUNDS
        monkeypatch.setattr(domstats, "ROUND_WAIT_S", 0.1)
        calls.append(await ask())
        await until(lambda: there() > domstats.ROUNDS)
        gate.set()
        assert [await call for call in calls] == [empty] * len(calls)

    play(tmp_path, body)


def test_what_is_kept_of_a_domain_that_does_not_run_is_never_old(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        doms = []
        for number in range(40):
            world.target.add_volume(f"lvs0/v{number}")
            uuid = f"{number:08d}-1111-4111-8111-111111111111"
            running = number == 0
            doms.append(
                world.domain(f"d{number}", uuid, disks=disk(f"lvs0/v{number}"), running=running)
            )
        client = await world.client()
        stats = world.gateway.services.domain_stats

        async def sizes(*names: str) -> list[object]:
            records = [stats_of(dom.ref, *names) for dom in doms]
            payload = StatsRecord.pack_all(records)
            world.libvirtd.answers[Proc.GET_ALL_DOMAIN_STATS] = partial(_given, payload)
            reply = StatsRecord.read_all(await client.call(Proc.GET_ALL_DOMAIN_STATS, bytes(12)))
            values = [{p.field: p.value for p in record.params} for record in reply]
            first = len(names) - names.count("ubda")
            return [each.get(f"block.{first}.capacity") for each in values]

        assert await sizes("ubda") == [64 * MIB] * 40
        assert len(stats._last) == 39, "one that runs counts on"
        world.target.volumes["lvs0/v7"].mib = 96  # resized
        assert await sizes("ubda") == [64 * MIB] * 7 + [96 * MIB] + [64 * MIB] * 32
        assert await sizes("vda", "ubda") == [64 * MIB] * 7 + [96 * MIB] + [64 * MIB] * 32
        del world.target.volumes["lvs0/v7"]
        assert (await sizes("ubda"))[6:9] == [64 * MIB, None, 64 * MIB]
        for turn in range(1, 5):  # others come and go
            world.gateway.services.domain_cache.forget()
            for number in range(1, 40):
                uuid = f"{turn:04d}{number:04d}-1111-4111-8111-111111111111"
                doms[number] = world.domain(
                    f"d{turn}-{number}", uuid, disks=disk("lvs0/v1"), running=False
                )
            assert await sizes("ubda") == [64 * MIB] * 40
        assert len(stats._last) <= 2 * 39 + 16, "what is kept is bounded by what there is"

    play(tmp_path, body)


def test_statistics_that_cannot_be_read_are_an_error_of_the_call(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        spoiled = StatsRecord.pack_all([stats_of(dom.ref, "vda")])[:-2]
        world.libvirtd.answers[Proc.GET_ALL_DOMAIN_STATS] = lambda _: spoiled
        client = await world.client()
        for _ in range(2):
            with pytest.raises(ReplyError, match="bytes") as error:
                await client.call(Proc.GET_ALL_DOMAIN_STATS, bytes(12))
            assert error.value.code == Code.RPC
        assert "sdb" in await client.xml(dom.ref), "the connection goes on"

    play(tmp_path, body)


def test_volumes_are_found_by_name_in_few_calls_and_never_in_two_targets(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        names = [f"lvs0/v{number}" for number in range(20)]
        made = {name: world.target.add_volume(name) for name in names}
        folder = world.target.path.parent / "gold"
        folder.mkdir()
        gold = SocketTarget(folder / world.target.path.name)
        gold.start()
        targets = world.gateway.services.target
        world.target.exchanges = 0
        assert await targets.uuids([*names, "lvs0/none"]) == made
        assert world.target.exchanges == 1
        assert set(world.target.calls) == {"bdev_get_bdevs"}, "no lvstore is asked"
        gold.add_volume("lvs0/v7")
        assert await targets.uuids(names) == {n: u for n, u in made.items() if n != "lvs0/v7"}
        gold.stop()
        assert await targets.uuids(names) == made
        world.target.stop()
        assert await targets.uuids(names) == {}

    play(tmp_path, body)


def test_usages_add_up() -> None:
    one = Usage(1, 2, 3, 4, 5, 6, 7, 8)
    assert one + one == Usage(2, 4, 6, 8, 10, 12, 14, 16)
    assert replace(one, reads=0) + one == Usage(1, 4, 6, 8, 10, 12, 14, 16)


def test_reconcile_puts_running_domains_right_at_start(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        stopped = world.domain("two", UUID_2, running=False)
        world.target.controllers = {f"vm-{UUID_2}": {}}
        await Reconciler(world.gateway.services).run()
        uuid = world.target.volumes["lvs0/data"].uuid
        assert world.target.controllers[f"vm-{dom.ref.uuid_text}"] == {0: uuid}
        assert f"vm-{stopped.ref.uuid_text}" not in world.target.controllers
        # One that cannot be put right does not keep the others from it.
        world.target.controllers = {}
        world.target.refuse["vhost_scsi_controller_add_target"] = RpcError(-12, "No memory")
        await Reconciler(world.gateway.services).run()
        assert world.target.controllers == {CONTROLLER: {}}, "without whole, what works stays"

    play(tmp_path, body)


def test_statistics_of_one_disk_ask_for_that_one_on_a_connection_that_stays(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        for n in range(20):
            world.target.add_volume(f"lvs0/other-{n}")
        dom = world.domain(disks=disk())
        client = await world.client()
        args = DomainCall(dom.ref, "sdb").pack(text=True)
        await client.call(Proc.BLOCK_STATS, args)
        world.target.requests.clear()
        for _ in range(3):
            await client.call(Proc.BLOCK_STATS, args)
        of_one = {"name": CONTROLLER, "scsi_target_num": 0}
        assert world.target.requests == [("virtlun_vhost_get_stats", of_one)] * 3
        assert len(world.target.connections) == 1

    play(tmp_path, body)


def test_a_target_that_is_not_configured_any_more_keeps_no_thread_and_no_connection(
    tmp_path: Path,
) -> None:
    async def body(world: World) -> None:
        folder = world.target.path.parent / "gold"
        folder.mkdir()
        gold = SocketTarget(folder / world.target.path.name)
        gold.add_volume("gold0/v")
        gold.controllers = {"vm-9": {0: gold.volumes["gold0/v"].uuid}}
        gold.gate["virtlun_vhost_get_stats"] = threading.Event()
        gold.start()

        def threads() -> int:
            return sum(str(gold.path) in each.name for each in threading.enumerate())

        targets = world.gateway.services.target
        assert set(await targets.sizes(["gold0/v"])) == {"gold0/v"}
        unit = Unit("vm-9", 0)
        under_way = asyncio.create_task(targets.usage([unit]))
        await until(lambda: "virtlun_vhost_get_stats" in dict(gold.requests))
        assert threads() > 0
        gold.path.unlink()
        assert set(await targets.sizes(["lvs0/data", "gold0/v"])) == {"lvs0/data"}
        gold.gate["virtlun_vhost_get_stats"].set()
        assert set(await under_way) == {unit}
        await until(lambda: threads() == 0)
        await until(lambda: gold.open == 0)
        gold.stop()

    play(tmp_path, body)


def test_a_volume_that_is_gone_hides_no_other_ones_statistics(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        uuid = world.target.volumes["lvs0/data"].uuid
        world.target.controllers = {f"vm-{n}": {0: uuid, 3: uuid} for n in range(CONTROLLERS_MAX)}
        target = world.gateway.services.target
        gone = [Unit("vm-none", 0), Unit("vm-0", 1)]
        for there in ([Unit("vm-0", 3)], [Unit(name, 3) for name in world.target.controllers]):
            found = await target.usage([*gone, *there])  # of few by name; of all at once
            assert set(found) == set(there)
        for one in gone:
            assert await target.usage([one]) == {}
        assert set(await target.sizes(["lvs0/data", "lvs0/gone"])) == {"lvs0/data"}

    play(tmp_path, body)


def test_a_round_of_reconcile_over_domains_that_are_right_asks_each_side_once(
    tmp_path: Path,
) -> None:
    async def body(world: World) -> None:
        for n in range(10):
            world.target.add_volume(f"lvs0/v{n}")
            uuid = f"{n:08d}-1111-4111-8111-111111111111"
            world.domain(f"d{n}", uuid, disks=disk(f"lvs0/v{n}"), running=n < 5)
        reconciler = Reconciler(world.gateway.services)
        for _ in range(2):  # the first writes the volumes' UUIDs into the metadata
            await reconciler.run()
        calls, asked = Counter(world.libvirtd.calls()), len(world.target.requests)
        await reconciler.run()
        assert Counter(world.libvirtd.calls()) - calls == {Proc.LIST_ALL_DOMAINS: 1}
        assert [method for method, _ in world.target.requests[asked:]] == ["vhost_get_controllers"]
        # A LUN that is missing is found, and so is a controller of one that does not run.
        lost = f"vm-{3:08d}-1111-4111-8111-111111111111"
        left = f"vm-{7:08d}-1111-4111-8111-111111111111"
        luns = dict(world.target.controllers[lost])
        world.target.controllers[lost].clear()
        world.target.controllers[left] = {}
        await reconciler.run()
        assert world.target.controllers[lost] == {0: luns[0]}
        assert left not in world.target.controllers

    play(tmp_path, body)


def test_no_block_copy_goes_to_a_volume_of_ours(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client()
        ours = "/dev/virtlun/lvs0/data"
        xml = f"<disk type='block'><source dev='{ours}'/></disk>"
        copy = bytes(dom.ref.write(Writer()).string("vda").string(xml).u32(0).u32(0))
        words = "cannot copy a disk to virtlun volume lvs0/data.*copy in the guest"
        with pytest.raises(ReplyError, match=words):
            await client.call(Proc.BLOCK_COPY, copy)
        rebase = dom.ref.write(Writer()).string("vda")
        rebase.optional(ours, rebase.string)
        with pytest.raises(ReplyError, match=words):
            await client.call(Proc.BLOCK_REBASE, bytes(rebase.u64(0).u32(8)))
        assert Proc.BLOCK_COPY not in world.libvirtd.calls()
        assert Proc.BLOCK_REBASE not in world.libvirtd.calls()

    play(tmp_path, body)


def test_long_results_are_changed_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: list[int] = [0, 0]  # now, and the most
    expected: list[int] = []

    async def changed(_: DomainStats, payload: bytes, *__: object) -> bytes:
        at_once[0] += 1
        at_once[1] = max(at_once)
        await until(lambda: at_once[1] >= expected[0])
        await asyncio.sleep(0.02)  # in which more would come
        at_once[0] -= 1
        return payload

    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        records = [stats_of(dom.ref, "vda", "ubda")]
        world.libvirtd.answers[Proc.GET_ALL_DOMAIN_STATS] = lambda _: StatsRecord.pack_all(records)
        clients = [await world.client() for _ in range(4)]
        for limit, most in ((0, 1), (65_536, 4)):
            monkeypatch.setattr("plugin.gateway.domstats.LONG_BYTES", limit)
            at_once[:], expected[:] = [0, 0], [most]
            calls = (client.call(Proc.GET_ALL_DOMAIN_STATS, bytes(12)) for client in clients)
            await asyncio.gather(*calls)
            assert at_once == [0, most]

    monkeypatch.setattr(DomainStats, "_merged", changed)
    play(tmp_path, body)
