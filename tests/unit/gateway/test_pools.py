"""Our pools beside those of libvirtd: lists joined, rights kept, what is of others left alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plugin.gateway.answers import Member
from plugin.gateway.errors import Code, GatewayError, NoAnswer, Refused
from plugin.gateway.handlers.pools import (
    ACTIVE,
    AUTOSTART,
    INACTIVE,
    NO_AUTOSTART,
    PERSISTENT,
    TRANSIENT,
    ZFS,
)
from plugin.gateway.messages import XmlCall, pack_string, read_string
from plugin.gateway.procs import Proc
from plugin.gateway.storage.pools import Pool
from plugin.gateway.storage.refs import (
    StoragePool,
    StorageVol,
    pack_count,
    pack_names,
    read_names,
)
from plugin.gateway.target import Target
from plugin.gateway.targets import Loaded
from plugin.gateway.xdr import Reader, Writer
from plugin.targets import TargetAddress
from pydataplane.domain.errors import Refusal
from pydataplane.errors import RpcError
from pydataplane.watchedclient import WatchedClient
from tests.support.fake_target import LVSTORE_UUID, MIB
from tests.unit.gateway.world import ReplyError, TestClient, World, nothing_done, play

THEIRS = StoragePool("default", b"t" * 16)
OURS = StoragePool("virtlun-lvs0", uuid.UUID(LVSTORE_UUID).bytes)
DATA = StorageVol(OURS.name, "data", "/dev/virtlun/lvs0/data")
DIR = 64


def listing(pools: list[StoragePool], count: int) -> bytes:
    writer = Writer()
    return bytes(writer.array(pools, lambda pool: pool.write(writer)).u32(count))


def answers(value: bytes) -> Callable[[bytes], bytes]:
    return lambda _: value


async def listed(client: TestClient, flags: int = 0, need: int = 1) -> tuple[list[str], int]:
    args = bytes(Writer().i32(need).u32(flags))
    reader = Reader(await client.call(Proc.LIST_ALL_STORAGE_POOLS, args))
    pools = reader.array(lambda: StoragePool.read(reader), 4096)
    return [pool.name for pool in pools], reader.u32()


def packed(of: StoragePool | StorageVol) -> bytes:
    return bytes(of.write(Writer()))


@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        (0, True),
        (ACTIVE, True),
        (INACTIVE, False),
        (ACTIVE | INACTIVE, True),
        (PERSISTENT | AUTOSTART | ZFS, True),
        (TRANSIENT, False),
        (NO_AUTOSTART, False),
        (DIR, False),
        (DIR | ZFS, True),
    ],
)
def test_the_list_of_all_is_joined_by_its_flags(tmp_path: Path, flags: int, ours: bool) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        world.libvirtd.answers[Proc.LIST_ALL_STORAGE_POOLS] = answers(listing([THEIRS], 1))
        assert await listed(client, flags) == (["default", *([OURS.name] * ours)], 1 + ours)
        world.libvirtd.answers[Proc.LIST_ALL_STORAGE_POOLS] = answers(listing([], 1))
        assert await listed(client, flags, need=0) == ([], 1 + ours)
        assert nothing_done(world)

    play(tmp_path, body)


def test_the_old_lists_are_joined_and_keep_their_limit(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        answered = world.libvirtd.answers
        for proc in (Proc.NUM_OF_STORAGE_POOLS, Proc.NUM_OF_DEFINED_STORAGE_POOLS):
            answered[proc] = answers(pack_count(1))
        assert Reader(await client.call(Proc.NUM_OF_STORAGE_POOLS)).i32() == 2
        assert Reader(await client.call(Proc.NUM_OF_DEFINED_STORAGE_POOLS)).i32() == 1
        for proc in (Proc.LIST_STORAGE_POOLS, Proc.LIST_DEFINED_STORAGE_POOLS):
            answered[proc] = answers(pack_names(["default"]))

        async def names(proc: Proc, most: int) -> list[str]:
            return read_names(await client.call(proc, bytes(Writer().i32(most))), most)

        assert await names(Proc.LIST_STORAGE_POOLS, 5) == ["default", OURS.name]
        assert await names(Proc.LIST_STORAGE_POOLS, 1) == ["default"]
        assert await names(Proc.LIST_DEFINED_STORAGE_POOLS, 5) == ["default"]

    play(tmp_path, body)


def test_what_libvirtd_refuses_is_refused(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        for proc in (
            Proc.LIST_ALL_STORAGE_POOLS,
            Proc.NUM_OF_STORAGE_POOLS,
            Proc.LIST_STORAGE_POOLS,
        ):
            world.libvirtd.refuse[proc] = Refused(Code.ACCESS_DENIED, "no")
            with pytest.raises(ReplyError, match="no"):
                await client.call(proc, bytes(Writer().i32(1).u32(0)))

    play(tmp_path, body)


def test_without_a_target_libvirtds_own_are_listed(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        world.libvirtd.answers[Proc.LIST_ALL_STORAGE_POOLS] = answers(listing([THEIRS], 1))
        world.target.refuse["bdev_lvol_get_lvstores"] = RpcError(-5, "I/O error")
        assert await listed(client) == (["default"], 1)
        with pytest.raises(ReplyError, match="I/O error"):
            await client.call(Proc.STORAGE_POOL_LOOKUP_BY_NAME, pack_string(OURS.name))

    play(tmp_path, body)


def test_a_pool_is_found_by_name_uuid_path_and_volume(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        no_pool = Refused(Code.NO_STORAGE_POOL, "no such pool")
        for proc in (Proc.STORAGE_POOL_LOOKUP_BY_UUID, Proc.STORAGE_POOL_LOOKUP_BY_TARGET_PATH):
            world.libvirtd.refuse[proc] = no_pool
        for proc, args in (
            (Proc.STORAGE_POOL_LOOKUP_BY_NAME, pack_string(OURS.name)),
            (Proc.STORAGE_POOL_LOOKUP_BY_UUID, OURS.uuid),
            (Proc.STORAGE_POOL_LOOKUP_BY_TARGET_PATH, pack_string("/dev/virtlun/lvs0")),
            (Proc.STORAGE_POOL_LOOKUP_BY_VOLUME, packed(DATA)),
        ):
            assert StoragePool.read(Reader(await client.call(proc, args))) == OURS, proc.name
        for proc, args in (
            (Proc.STORAGE_POOL_LOOKUP_BY_UUID, b"x" * 16),
            (Proc.STORAGE_POOL_LOOKUP_BY_TARGET_PATH, pack_string("/dev/virtlun/lvs1")),
        ):
            with pytest.raises(ReplyError, match="no such pool"):
                await client.call(proc, args)

    play(tmp_path, body)


def test_two_lvstores_of_one_name_are_no_pool(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        pools = world.gateway.services.pools
        found = await pools.every()
        assert [pool.name for pool in found] == [OURS.name]
        world.gateway.services.target.stores = lambda: _twice(found)  # type: ignore[method-assign]
        assert await pools.every() == []

    async def _twice(found: list[Pool]) -> Loaded:
        (one,) = found
        other = Target(WatchedClient(tmp_path / "other", 1.0))
        return Loaded([(one.target, one.store), (other, one.store)], [])

    play(tmp_path, body)


def test_a_silent_target_is_taken_to_have_what_it_had(tmp_path: Path) -> None:
    """What may be its is refused with a reason, and is never what another one has."""

    async def body(world: World) -> None:
        client = await world.client()
        targets, pools = world.gateway.services.target, world.gateway.services.pools
        (ours,) = await pools.every()
        other = Target(WatchedClient(tmp_path / "other", 1.0))
        at = Member(TargetAddress("gold", tmp_path / "other", tmp_path), other)
        gold = replace(ours.store, name="gold0", uuid=str(uuid.uuid4()))
        silent: list[tuple[Member, GatewayError]] = [
            (at, NoAnswer(Refusal.TIMEOUT, "it says nothing"))
        ]
        said = Loaded([], [])

        async def stores() -> Loaded:
            return said

        targets.stores = stores  # type: ignore[method-assign]
        here = (ours.target, ours.store)
        # It has another one's name, and one of its own.
        said = Loaded([here, (other, ours.store), (other, gold)], [])
        assert [pool.name for pool in await pools.every()] == ["virtlun-gold0"]
        said = Loaded([here], silent)
        assert await pools.every() == []
        for name in (OURS.name, "virtlun-gold0", "virtlun-unknown"):
            for proc, args in (
                (Proc.STORAGE_POOL_LOOKUP_BY_NAME, pack_string(name)),
                (Proc.STORAGE_POOL_DEFINE_XML, pack_define(name)),
                (Proc.STORAGE_VOL_LOOKUP_BY_KEY, pack_string(f"/dev/virtlun/{name[8:]}/data")),
            ):
                with pytest.raises(ReplyError, match="no target that answers; target gold") as no:
                    await client.call(proc, args)
                assert no.value.code != Code.NO_STORAGE_POOL, (name, proc.name)
        # It comes back without that name.
        said = Loaded([here, (other, gold)], [])
        assert [pool.name for pool in await pools.every()] == ["virtlun-gold0", OURS.name]
        said = Loaded([here], silent)
        assert [pool.name for pool in await pools.every()] == [OURS.name]

    play(tmp_path, body)


def pack_define(name: str) -> bytes:
    return XmlCall(f"<pool type='zfs'><name>{name}</name></pool>", 0).pack()


def test_a_volume_is_found_by_name_path_and_key(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        for proc, args in (
            (Proc.STORAGE_VOL_LOOKUP_BY_NAME, packed(OURS) + pack_string("data")),
            (Proc.STORAGE_VOL_LOOKUP_BY_PATH, pack_string(DATA.key)),
            (Proc.STORAGE_VOL_LOOKUP_BY_KEY, pack_string(DATA.key)),
        ):
            assert StorageVol.read(Reader(await client.call(proc, args))) == DATA, proc.name
        for proc, args in (
            (Proc.STORAGE_VOL_LOOKUP_BY_NAME, packed(OURS) + pack_string("none")),
            (Proc.STORAGE_VOL_LOOKUP_BY_PATH, pack_string("/dev/virtlun/lvs0/../x")),
            (Proc.STORAGE_VOL_LOOKUP_BY_KEY, pack_string("/dev/virtlun/lvs0/a b")),
            (Proc.STORAGE_VOL_GET_XML_DESC, packed(StorageVol(OURS.name, "", DATA.key)) + bytes(4)),
        ):
            with pytest.raises(ReplyError) as caught:
                await client.call(proc, args)
            assert caught.value.code == Code.NO_STORAGE_VOL, proc.name
        assert nothing_done(world)

    play(tmp_path, body)


def test_volumes_are_counted_listed_and_described(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        world.target.add_volume("lvs0/b", 16, thin=False)
        world.target.lvstores["lvs1"] = str(uuid.uuid4())
        world.target.add_volume("lvs1/other")
        count = await client.call(Proc.STORAGE_POOL_NUM_OF_VOLUMES, packed(OURS))
        assert Reader(count).i32() == 2
        args = packed(OURS) + bytes(Writer().i32(1))
        assert read_names(await client.call(Proc.STORAGE_POOL_LIST_VOLUMES, args), 1) == ["b"]
        for need in (0, 1):
            args = packed(OURS) + bytes(Writer().i32(need).u32(0))
            reader = Reader(await client.call(Proc.STORAGE_POOL_LIST_ALL_VOLUMES, args))
            found = reader.array(lambda r=reader: StorageVol.read(r), 9)  # type: ignore[misc]
            assert [vol.name for vol in found] == ["b", "data"][: 2 * need]
            assert reader.u32() == 2
        info = Reader(await client.call(Proc.STORAGE_VOL_GET_INFO, packed(DATA)))
        assert (info.i32(), info.u64(), info.u64()) == (1, 64 * MIB, 3 * MIB)
        info = Reader(await client.call(Proc.STORAGE_VOL_GET_INFO_FLAGS, packed(DATA) + bytes(4)))
        assert (info.i32(), info.u64()) == (1, 64 * MIB)
        assert read_string(await client.call(Proc.STORAGE_VOL_GET_PATH, packed(DATA))) == DATA.key
        info = Reader(await client.call(Proc.STORAGE_POOL_GET_INFO, packed(OURS)))
        assert (info.u32(), info.u64()) == (2, 1024 * MIB)
        with pytest.raises(ReplyError, match="unsupported flags"):
            await client.call(Proc.STORAGE_VOL_GET_XML_DESC, packed(DATA) + bytes(Writer().u32(4)))

    play(tmp_path, body)


def test_what_is_of_others_asks_no_target(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        theirs = StorageVol("default", "v", "/images/v")
        calls = (
            (Proc.STORAGE_POOL_LOOKUP_BY_NAME, pack_string("default")),
            (Proc.STORAGE_POOL_LOOKUP_BY_UUID, THEIRS.uuid),
            (Proc.STORAGE_POOL_GET_INFO, packed(THEIRS)),
            (Proc.STORAGE_POOL_IS_ACTIVE, packed(THEIRS)),
            (Proc.STORAGE_POOL_NUM_OF_VOLUMES, packed(THEIRS)),
            (Proc.STORAGE_VOL_LOOKUP_BY_NAME, packed(THEIRS) + pack_string("v")),
            (Proc.STORAGE_VOL_LOOKUP_BY_PATH, pack_string("/images/v")),
            (Proc.STORAGE_VOL_GET_INFO, packed(theirs)),
        )
        for proc, args in calls:
            world.libvirtd.answers[proc] = answers(b"as it is")
            assert await client.call(proc, args) == b"as it is", proc.name
        assert world.target.requests == []

    play(tmp_path, body)


def pkcheck(folder: Path, allowed: str) -> dict[str, str]:
    """Returns options under which libvirtd judges calls by polkit, which allows some actions.

    With =NAME one is allowed of a volume of that name alone.
    """
    conf = folder / "libvirtd.conf"
    conf.write_text('access_drivers = [ "polkit" ]\n')
    program = folder / "pkcheck"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/asked\n'
        'name="${2#org.libvirt.api.}"\n'
        'of="$(echo "$*" | sed -n "s/.*vol_name \\([^ ]*\\).*/\\1/p")"\n'
        f'echo " {allowed} " | grep -q -e " $name " -e " $name=$of "\n'
    )
    program.chmod(0o755)
    return {"libvirtd_conf": str(conf), "pkcheck": str(program)}


def test_polkit_is_asked_as_libvirtd_would(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        world.target.add_volume("lvs0/b")
        world.libvirtd.answers[Proc.LIST_ALL_STORAGE_POOLS] = answers(listing([THEIRS], 1))
        assert await listed(client) == (["default"], 1)
        for proc, args in (
            (Proc.STORAGE_POOL_LOOKUP_BY_NAME, pack_string(OURS.name)),
            (Proc.STORAGE_VOL_LOOKUP_BY_PATH, pack_string(DATA.key)),
            (Proc.STORAGE_POOL_GET_XML_DESC, packed(OURS) + bytes(4)),
        ):
            with pytest.raises(ReplyError, match="denied access") as caught:
                await client.call(proc, args)
            assert caught.value.code == Code.ACCESS_DENIED
        count = await client.call(Proc.STORAGE_POOL_NUM_OF_VOLUMES, packed(OURS))
        assert Reader(count).i32() == 1
        asked = (tmp_path / "asked").read_text()
        assert "--action-id org.libvirt.api.storage-pool.getattr --process " in asked
        assert (
            f"--detail connect_driver QEMU --detail pool_name {OURS.name}"
            f" --detail pool_uuid {LVSTORE_UUID} --detail vol_name b"
            " --detail vol_key /dev/virtlun/lvs0/b"
        ) in asked

    allowed = "storage-pool.search-storage-vols storage-vol.getattr=b"
    play(tmp_path, body, **pkcheck(tmp_path, allowed))
