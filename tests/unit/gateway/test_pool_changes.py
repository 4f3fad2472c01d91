"""Changes of our pools and volumes: rights, units, whole blocks, and what a killed gateway left."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from plugin import volumefile
from plugin.gateway.errors import Code, Refused
from plugin.gateway.handlers.volumechanges import SHRINK
from plugin.gateway.messages import XmlCall
from plugin.gateway.procs import Proc
from plugin.gateway.storage.events import LIFECYCLE, OWN, REFRESH, Lifecycle
from plugin.gateway.storage.refs import StorageVol
from plugin.gateway.storage.states import State, States
from plugin.gateway.storage.xml import read_volume
from plugin.gateway.streams import Piece, Stream, StreamEnded
from plugin.gateway.wire import Header, MessageType, Status, WireError
from plugin.gateway.xdr import Reader, Writer
from pydataplane.errors import EXISTS, RpcError
from tests.support.fake_target import LVSTORE_UUID, MIB
from tests.unit.gateway.test_pools import DATA, OURS, THEIRS, answers, packed, pkcheck
from tests.unit.gateway.world import ReplyError, World, nothing_done, play, until

VOLUME = "<volume><name>new</name><capacity unit='MiB'>8</capacity>{more}</volume>"


def creation(more: str = "") -> bytes:
    return packed(OURS) + bytes(Writer().string(VOLUME.format(more=more)).u32(0))


def test_each_change_needs_its_right(tmp_path: Path) -> None:
    """What polkit does not allow leaves the target as it was."""

    async def body(world: World) -> None:
        client = await world.client()
        define = XmlCall("<pool type='zfs'><name>virtlun-lvs0</name></pool>", 0).pack()
        for proc, args in (
            (Proc.STORAGE_POOL_DEFINE_XML, define),
            (Proc.STORAGE_POOL_CREATE_XML, define),
            (Proc.STORAGE_POOL_DESTROY, packed(OURS)),
            (Proc.STORAGE_POOL_UNDEFINE, packed(OURS)),
            (Proc.STORAGE_POOL_CREATE, packed(OURS) + bytes(4)),
            (Proc.STORAGE_POOL_REFRESH, packed(OURS) + bytes(4)),
            (Proc.STORAGE_POOL_DELETE, packed(OURS) + bytes(4)),
            (Proc.STORAGE_VOL_CREATE_XML, creation()),
            (Proc.STORAGE_VOL_DELETE, packed(DATA) + bytes(4)),
            (Proc.STORAGE_VOL_WIPE, packed(DATA) + bytes(4)),
            (Proc.STORAGE_VOL_RESIZE, packed(DATA) + bytes(Writer().u64(MIB << 7).u32(0))),
            (Proc.STORAGE_VOL_UPLOAD, packed(DATA) + bytes(20)),
            (Proc.STORAGE_VOL_DOWNLOAD, packed(DATA) + bytes(20)),
        ):
            with pytest.raises(ReplyError, match="denied access") as caught:
                await client.call(proc, args)
            assert caught.value.code == Code.ACCESS_DENIED, proc.name
        assert nothing_done(world)
        asked = (tmp_path / "asked").read_text()
        for right in ("save", "start", "stop", "delete", "refresh", "format"):
            assert f"storage-pool.{right} " in asked, right
        for right in ("create", "delete", "format", "resize", "data-write", "data-read"):
            assert f"storage-vol.{right} " in asked, right

    play(tmp_path, body, **pkcheck(tmp_path, "storage-pool.write storage-pool.read"))


def test_a_volume_is_made_once_and_deleted_once(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        await client.call(Proc.STORAGE_VOL_CREATE_XML, creation("<allocation>0</allocation>"))
        made = world.target.volumes["lvs0/new"]
        assert made.thin and made.mib == 8
        with pytest.raises(ReplyError, match="exists already") as caught:
            await client.call(Proc.STORAGE_VOL_CREATE_XML, creation())
        assert caught.value.code == Code.STORAGE_VOL_EXIST
        new = packed(OURS) + bytes(Writer().string("new"))
        ref = await client.call(Proc.STORAGE_VOL_LOOKUP_BY_NAME, new)
        await client.call(Proc.STORAGE_VOL_DELETE, ref + bytes(4))
        assert "lvs0/new" not in world.target.volumes
        with pytest.raises(ReplyError, match="no storage vol"):
            await client.call(Proc.STORAGE_VOL_DELETE, ref + bytes(4))

    play(tmp_path, body)


def test_a_size_is_compared_with_what_the_volume_has_when_it_is_changed(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        volume = world.target.volumes["lvs0/data"]
        locks = world.gateway.services.locks
        to = packed(DATA) + bytes(Writer().u64((volume.mib + 8) * MIB).u32(0))
        async with locks.hold(f"volume:{volume.uuid}"):  # as `virsh blockresize` has
            resize = asyncio.create_task(client.call(Proc.STORAGE_VOL_RESIZE, to))
            await until(lambda: any("/data" in name for name in locks._locks))
            volume.mib += 16
        with pytest.raises(ReplyError, match="can't shrink capacity below current"):
            await resize
        assert "bdev_lvol_resize" not in world.target.calls

    play(tmp_path, body)


@pytest.mark.parametrize("allowed", [False, True])
def test_a_shrink_needs_the_configuration_as_blockresize_does(
    tmp_path: Path, allowed: bool
) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        to = packed(DATA) + bytes(Writer().u64(8 * MIB).u32(SHRINK))
        if allowed:
            await client.call(Proc.STORAGE_VOL_RESIZE, to)
        else:
            with pytest.raises(ReplyError, match=r"8388608 would cut off data: .* --shrink"):
                await client.call(Proc.STORAGE_VOL_RESIZE, to)
        assert world.target.volumes["lvs0/data"].mib == (8 if allowed else 64)

    play(tmp_path, body, allow_shrink=allowed)


def test_a_volume_is_told_from_libvirtds_of_the_same_pool_and_name_by_its_key(
    tmp_path: Path,
) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        world.libvirtd.answers[Proc.STORAGE_VOL_DELETE] = answers(b"")
        theirs = StorageVol(OURS.name, "data", "/srv/images/data")
        await client.call(Proc.STORAGE_VOL_DELETE, packed(theirs) + bytes(4))
        assert world.libvirtd.calls().count(Proc.STORAGE_VOL_DELETE) == 1
        for pool in ("default", "virtlun-lvs1"):  # a key of ours is never asked of libvirtd
            with pytest.raises(ReplyError, match="no storage vol") as caught:
                ours = StorageVol(pool, "data", DATA.key)
                await client.call(Proc.STORAGE_VOL_DELETE, packed(ours) + bytes(4))
            assert caught.value.code == Code.NO_STORAGE_VOL
        assert world.libvirtd.calls().count(Proc.STORAGE_VOL_DELETE) == 1
        assert "lvs0/data" in world.target.volumes
        # So is its pool, and what a volume of another pool is a copy of.
        copy = packed(THEIRS) + bytes(Writer().string("<volume/>"))
        for proc, args in (
            (Proc.STORAGE_POOL_LOOKUP_BY_VOLUME, packed(theirs)),
            (Proc.STORAGE_VOL_CREATE_XML_FROM, copy + packed(theirs) + bytes(4)),
        ):
            world.libvirtd.answers[proc] = answers(b"as it is")
            assert await client.call(proc, args) == b"as it is", proc.name
        with pytest.raises(ReplyError, match="cannot be copied to another pool at once"):
            await client.call(Proc.STORAGE_VOL_CREATE_XML_FROM, copy + packed(DATA) + bytes(4))

    play(tmp_path, body)


def test_a_clone_that_cannot_be_made_leaves_no_snapshot(tmp_path: Path) -> None:
    """Another one of that name has come since it was looked for."""

    async def body(world: World) -> None:
        client = await world.client()
        world.target.refuse["bdev_lvol_clone"] = RpcError(EXISTS, "File exists")
        args = creation()[:-4] + packed(DATA) + bytes(4)
        with pytest.raises(ReplyError):
            await client.call(Proc.STORAGE_VOL_CREATE_XML_FROM, args)
        assert "bdev_lvol_snapshot" in world.target.calls
        assert set(world.target.volumes) == {"lvs0/data"}

    play(tmp_path, body)


def test_a_volume_in_use_is_kept_and_its_domain_is_named(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        dom = world.domain()
        controller = f"vm-{'11111111-1111-4111-8111-111111111111'}"
        world.target.controllers[controller] = {0: world.target.volumes["lvs0/data"].uuid}
        with pytest.raises(ReplyError, match=f"data is a disk of domain {dom.name}"):
            await client.call(Proc.STORAGE_VOL_DELETE, packed(DATA) + bytes(4))
        world.libvirtd.refuse[Proc.LOOKUP_BY_UUID] = Refused(Code.ACCESS_DENIED, "no")
        with pytest.raises(ReplyError, match="data is a disk of another domain"):
            await client.call(Proc.STORAGE_VOL_DELETE, packed(DATA) + bytes(4))
        assert "lvs0/data" in world.target.volumes

    play(tmp_path, body)


def test_who_registered_hears_of_pools(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = await world.client()
        register, deregister = (
            Proc.STORAGE_POOL_EVENT_REGISTER_ANY,
            Proc.STORAGE_POOL_EVENT_DEREGISTER_ANY,
        )
        world.libvirtd.answers[register] = answers(bytes(Writer().i32(3)))
        await client.call(register, bytes(Writer().i32(LIFECYCLE).u32(0)))
        one = bytes(OURS.write(Writer().i32(REFRESH).u32(1)))
        callback = Reader(await client.call(register, one)).i32()
        assert callback > OWN
        theirs = bytes(THEIRS.write(Writer().i32(LIFECYCLE).u32(1)))
        assert Reader(await client.call(register, theirs)).i32() == 3
        await client.call(Proc.STORAGE_POOL_REFRESH, packed(OURS) + bytes(4))
        await client.call(Proc.STORAGE_POOL_DESTROY, packed(OURS))
        refreshed = bytes(OURS.write(Writer().i32(callback)))
        stopped = bytes(OURS.write(Writer().i32(3)).i32(Lifecycle.STOPPED).i32(0))
        heard = [await client.event(), await client.event()]
        assert heard == [
            (Proc.STORAGE_POOL_EVENT_REFRESH, refreshed),
            (Proc.STORAGE_POOL_EVENT_LIFECYCLE, stopped),
        ]
        await client.call(deregister, bytes(Writer().i32(callback)))
        assert deregister not in world.libvirtd.calls()
        # While libvirtd does not agree, what it knows of stays.
        world.libvirtd.refuse[deregister] = Refused(Code.ACCESS_DENIED, "no")
        with pytest.raises(ReplyError, match="no"):
            await client.call(deregister, bytes(Writer().i32(3)))
        await client.call(Proc.STORAGE_POOL_CREATE, packed(OURS) + bytes(4))
        started = bytes(OURS.write(Writer().i32(3)).i32(Lifecycle.STARTED).i32(0))
        assert await client.event() == (Proc.STORAGE_POOL_EVENT_LIFECYCLE, started)

    play(tmp_path, body)


def test_states_outlast_the_gateway(tmp_path: Path) -> None:
    states = States(tmp_path)
    states.set(LVSTORE_UUID, State.INACTIVE)
    assert States(tmp_path).of(LVSTORE_UUID) is State.INACTIVE
    states.set(LVSTORE_UUID, State.ACTIVE)
    assert States(tmp_path).of(LVSTORE_UUID) is states.of("other") is State.ACTIVE
    (tmp_path / f"{LVSTORE_UUID}.pool").write_text("rubbish")
    assert States(tmp_path).of(LVSTORE_UUID) is State.ACTIVE


def test_what_cannot_be_noted_is_refused_with_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    with pytest.raises(Refused, match=r"cannot be written .*: make gateway.state_dir of"):
        States(folder / "notes").set(LVSTORE_UUID, State.INACTIVE)


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("<capacity>1</capacity>", 1),
        ("<capacity unit='bytes'>512</capacity>", 512),
        ("<capacity unit='KB'>1</capacity>", 1000),
        ("<capacity unit='k'>1</capacity>", 1024),
        ("<capacity unit='GiB'> 2 </capacity>", 2 << 30),
        ("<capacity unit='T'>1</capacity>", 1 << 40),
    ],
)
def test_sizes_have_libvirts_units(given: str, size: int) -> None:
    assert read_volume(f"<volume><name>a</name>{given}</volume>", "p").capacity == size


@pytest.mark.parametrize("given", ["-1", "1.5", "1e3", "", "9" * 30])
def test_what_is_no_size_is_refused(given: str) -> None:
    with pytest.raises(Refused):
        read_volume(f"<volume><name>a</name><capacity>{given}</capacity></volume>", "p")


@pytest.mark.parametrize("block", [512, 4096])
def test_data_goes_in_whole_blocks(tmp_path: Path, block: int) -> None:
    """Whatever offsets and lengths the pieces have: the rest of a block is kept."""
    chance, path = random.Random(block), tmp_path / "volume"
    expected = bytearray(chance.randbytes(16 * block))
    path.write_bytes(expected)
    file = os.open(path, os.O_RDWR)
    try:
        for _ in range(200):
            offset = chance.randrange(len(expected))
            length = chance.randrange(1, len(expected) - offset + 1)
            data = chance.randbytes(length) if chance.random() < 0.6 else bytes(length)
            if any(data):
                volumefile.write(file, offset, data, block)
            else:
                volumefile.clear(file, offset, length, block)
            expected[offset : offset + length] = data
            assert path.read_bytes() == expected
            assert volumefile.read(file, offset, length, block) == data
    finally:
        os.close(file)


def header(kind: MessageType, status: Status) -> Header:
    return Header(28, 1, 1, Proc.STORAGE_VOL_UPLOAD, kind, 9, status)


def test_a_stream_is_data_and_holes_to_its_end(tmp_path: Path) -> None:
    async def body(_: World) -> None:
        stream = Stream(header(MessageType.CALL, Status.OK))
        hole = bytes(Writer().i64(4096).u32(0))
        for kind, status, payload in (
            (MessageType.STREAM, Status.CONTINUE, b"data"),
            (MessageType.STREAM_HOLE, Status.CONTINUE, hole),
            (MessageType.STREAM, Status.OK, b""),
        ):
            await stream.put(header(kind, status), payload)
            piece = await stream.next()
            assert (piece and (piece.data, piece.hole)) == {
                b"data": (b"data", 0),
                hole: (b"", 4096),
                b"": None,
            }[payload]
        bad = bytes(Writer().i64(-1).u32(0))
        await stream.put(header(MessageType.STREAM_HOLE, Status.CONTINUE), bad)
        with pytest.raises(WireError):
            await stream.next()
        await stream.put(header(MessageType.STREAM, Status.ERROR), b"")
        with pytest.raises(StreamEnded):
            await stream.next()
        stream.end()
        await stream.put(header(MessageType.STREAM, Status.CONTINUE), b"x")  # nobody takes it
        with pytest.raises(StreamEnded):
            await stream.next()

    play(tmp_path, body)


def test_a_stream_whose_client_is_gone_ends_behind_what_had_come(tmp_path: Path) -> None:
    async def body(_: World) -> None:
        stream = Stream(header(MessageType.CALL, Status.OK))
        await stream.put(header(MessageType.STREAM, Status.CONTINUE), b"the last")
        stream.end()
        assert await stream.next() == Piece(b"the last")
        async with asyncio.timeout(10):
            with pytest.raises(StreamEnded):
                await stream.next()

    play(tmp_path, body)
