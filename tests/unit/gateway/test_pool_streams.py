"""Volumes up- and downloaded: what is left of it at the end, however it ends, is nothing."""

from __future__ import annotations

import asyncio
import socket
import threading
from functools import partial
from pathlib import Path

import pytest

from plugin.gateway.budget import POOL_BYTES
from plugin.gateway.errors import Code, Refused
from plugin.gateway.handlers import storage
from plugin.gateway.procs import Proc
from plugin.gateway.storage import exports, leftovers
from plugin.gateway.storage.leftovers import Leftovers
from plugin.gateway.storage.openexport import OpenExport
from plugin.gateway.storage.pools import Pool
from plugin.gateway.target import FILES_MAX
from plugin.gateway.wire import Header, MessageType, Status, message
from plugin.gateway.xdr import Reader, Writer
from pydataplane.errors import BUSY, RpcError
from pydataplane.lvols import Volume
from pydataplane.volumes import Volumes
from tests.support.fake_target import LVSTORE_UUID, MIB
from tests.unit.gateway.test_pools import DATA, OURS, packed
from tests.unit.gateway.world import ReplyError, TestClient, World, play, until

ALL = bytes(Writer().u64(0).u64(0).u32(0))
"""Offset, length and flags."""


class Streaming:
    """A call of a client with a stream."""

    def __init__(self, client: TestClient, proc: Proc) -> None:
        self.client, self._proc = client, proc
        self._serial = 0

    async def begin(self) -> None:
        """Calls; raises ReplyError."""
        self._serial = await self.client.send(self._proc, packed(DATA) + ALL)
        await self.client.reply(self._serial)

    async def send(
        self,
        payload: bytes,
        status: Status = Status.CONTINUE,
        kind: MessageType = MessageType.STREAM,
    ) -> None:
        """Sends a message of the stream."""
        sent = message(kind, self._proc, self._serial, payload, status=status)
        await self.client.channel.send(sent)

    async def hears(self) -> tuple[Header, bytes]:
        """Returns what comes next."""
        async with asyncio.timeout(20):
            header = await self.client.channel.header()
            assert header is not None
            payload, _ = await self.client.channel.payload(header, 4 * MIB)
        return header, payload

    async def fails(self) -> tuple[int, str]:
        """Returns code and text of the error with which it ends."""
        header, payload = await self.hears()
        assert (header.type, header.status) == (MessageType.STREAM, Status.ERROR)
        reader = Reader(payload)
        code = reader.i32()
        reader.i32()
        return code, reader.optional(reader.string) or ""


def files(world: World, *uuids: str) -> Path:
    """Has exports of these volumes be files of a MiB; returns their folder."""
    folder = world.path.parent / "export"
    folder.mkdir()
    world.target.export_dir = str(folder)
    for uuid in uuids:
        with (folder / uuid).open("wb") as file:
            file.truncate(MIB)
    return folder


def uploading(world: World) -> tuple[str, Path]:
    """Returns UUID and file of the volume `data`, 1 MiB."""
    volume = world.target.volumes["lvs0/data"]
    volume.mib = 1
    return volume.uuid, files(world, volume.uuid) / volume.uuid


def is_clean(world: World) -> bool:
    """Whether there is no export, no lvol snapshot and no note."""
    notes = list(world.gateway.services.config.state_dir.glob(f"*{leftovers.SUFFIX}"))
    return not world.target.exports and set(world.target.volumes) == {"lvs0/data"} and not notes


async def pool_and_volume(world: World) -> tuple[Pool, Volume]:
    pool = await world.gateway.services.pools.named(OURS.name)
    assert pool is not None
    return pool, await pool.target.do(lambda volumes: volumes.volume("lvs0/data"))


def test_what_is_sent_is_written_and_confirmed_when_the_volume_is_free(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        _, file = uploading(world)
        ends = world.target.gate["virtlun_export_delete"] = threading.Event()
        upload = Streaming(await world.client(), Proc.STORAGE_VOL_UPLOAD)
        await upload.begin()
        await upload.send(b"written")
        await upload.send(b"", Status.OK)
        await until(lambda: "virtlun_export_delete" in world.target.calls)
        with pytest.raises(BlockingIOError):  # nothing has been said
            upload.client.sock.recv(1, socket.MSG_DONTWAIT)
        ends.set()
        header, _ = await upload.hears()
        assert (header.type, header.status) == (MessageType.STREAM, Status.OK)
        assert is_clean(world)
        assert file.read_bytes() == b"written".ljust(MIB, b"\0")

    play(tmp_path, body)


def test_an_upload_whose_export_cannot_be_ended_fails_and_is_ended_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "RETRY_S", 0.05)

    async def body(world: World) -> None:
        uploading(world)
        world.target.refuse["virtlun_export_delete"] = RpcError(BUSY, "it is busy")
        upload = Streaming(await world.client(), Proc.STORAGE_VOL_UPLOAD)
        await upload.begin()
        await upload.send(b"", Status.OK)
        assert "it is busy" in (await upload.fails())[1]
        assert not is_clean(world)
        del world.target.refuse["virtlun_export_delete"]
        await until(lambda: is_clean(world))

    play(tmp_path, body)


def test_a_client_that_leaves_in_an_upload_leaves_nothing(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        uploading(world)
        upload = Streaming(await world.client(), Proc.STORAGE_VOL_UPLOAD)
        await upload.begin()
        await upload.send(b"x" * 512)
        upload.client.channel.close()
        await until(lambda: is_clean(world))
        await (await world.client()).call(Proc.STORAGE_VOL_DELETE, packed(DATA) + bytes(4))

    play(tmp_path, body)


def test_a_target_that_is_silent_at_the_end_is_not_waited_for_as_one_that_copies(
    tmp_path: Path,
) -> None:
    async def body(world: World) -> None:
        uploading(world)
        upload = Streaming(await world.client(), Proc.STORAGE_VOL_UPLOAD)
        await upload.begin()
        world.target.stop()
        world.target.start(mute=True)
        await upload.send(b"", Status.OK)
        assert "no answer from" in (await upload.fails())[1]

    play(tmp_path, body, timeout_s=3)


def test_a_gateway_that_stops_ends_what_it_has_begun(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        uploading(world)
        upload = Streaming(await world.client(), Proc.STORAGE_VOL_UPLOAD)
        await upload.begin()
        world.gateway.stop()
        code, _ = await upload.fails()
        assert code == Code.RPC and is_clean(world)

    play(tmp_path, body)


def test_what_no_stream_has_ends_it_with_one_error(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        uploading(world)
        upload = Streaming(await world.client(), Proc.STORAGE_VOL_UPLOAD)
        await upload.begin()
        bad = bytes(Writer().i64(-1).u32(0))
        await upload.send(bad, kind=MessageType.STREAM_HOLE)
        code, text = await upload.fails()
        assert code == Code.RPC and "a hole of -1 bytes" in text
        assert is_clean(world)
        # No second reply is on the way.
        await upload.client.call(Proc.STORAGE_POOL_IS_ACTIVE, packed(OURS))

    play(tmp_path, body)


def test_what_is_sent_is_read_when_there_is_room_for_it(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        _, file = uploading(world)
        upload = Streaming(await world.client(), Proc.STORAGE_VOL_UPLOAD)
        await upload.begin()
        budget = world.gateway.services.budget
        await budget.take(0, POOL_BYTES)
        sending = asyncio.create_task(upload.send(b"x" * MIB))
        await until(lambda: bool(budget._waiting))
        assert file.read_bytes() == bytes(MIB)
        budget.give(POOL_BYTES)
        await sending
        await upload.send(b"", Status.OK)
        header, _ = await upload.hears()
        assert header.status == Status.OK
        assert file.read_bytes() == b"x" * MIB and not budget.held

    play(tmp_path, body)


def test_a_volume_that_is_written_is_refused_to_others_as_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its client says nothing."""
    monkeypatch.setattr(storage, "BUSY_S", 0.05)

    async def body(world: World) -> None:
        uploading(world)
        upload = Streaming(await world.client(), Proc.STORAGE_VOL_UPLOAD)
        await upload.begin()
        other = await world.client()
        for proc, args in (
            (Proc.STORAGE_VOL_DELETE, bytes(4)),
            (Proc.STORAGE_VOL_WIPE, bytes(4)),
            (Proc.STORAGE_VOL_UPLOAD, ALL),
            (Proc.STORAGE_VOL_RESIZE, bytes(Writer().u64(MIB << 7).u32(0))),
        ):
            with pytest.raises(ReplyError, match="data is being written, wiped or made") as caught:
                await other.call(proc, packed(DATA) + args)
            assert caught.value.code == Code.RESOURCE_BUSY, proc.name
        await upload.send(b"", Status.OK)
        await upload.hears()
        await other.call(Proc.STORAGE_VOL_DELETE, packed(DATA) + bytes(4))

    play(tmp_path, body)


def test_a_domain_and_an_upload_keep_each_other_out(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        uuid, _ = uploading(world)
        upload = Streaming(await world.client(), Proc.STORAGE_VOL_UPLOAD)
        await upload.begin()
        target = world.target
        target.controllers["vm-other"] = {}
        with pytest.raises(RpcError, match="in use by an export"):
            target.vhost_scsi_controller_add_target("vm-other", 0, uuid)
        await upload.send(b"", Status.OK)
        await upload.hears()
        # It starts between the gateway's question and the export.
        pool, volume = await pool_and_volume(world)
        target.vhost_scsi_controller_add_target("vm-other", 0, uuid)
        notes = world.gateway.services.pools.leftovers
        with pytest.raises(Refused, match="in use by a controller"):
            async with exports.opened(pool, volume, notes, write=True):
                pass
        assert is_clean(world)

    play(tmp_path, body)


def test_a_download_leaves_a_thick_volume_thick(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        volume = world.target.volumes["lvs0/data"]
        volume.mib, volume.thin = 1, False
        pool, found = await pool_and_volume(world)
        files(world)
        async with exports.opened(pool, found, _with_files(world), write=False):
            assert volume.thin
        assert not volume.thin and is_clean(world)

    play(tmp_path, body)


def _with_files(world: World) -> Leftovers:
    """Returns the notes, and has the lvol snapshot that is taken next be a file."""
    made = world.target.add_volume

    def add(alias: str, *args: int) -> str:
        uuid = made(alias, *args)
        Path(f"{world.target.export_dir}/{uuid}").touch()
        return uuid

    world.target.add_volume = add  # type: ignore[method-assign,assignment]
    return world.gateway.services.pools.leftovers


@pytest.mark.parametrize("method", ["bdev_lvol_snapshot", "virtlun_export_create"])
def test_what_cannot_begin_leaves_nothing(tmp_path: Path, method: str) -> None:
    async def body(world: World) -> None:
        world.target.refuse[method] = RpcError(-5, "I/O error")
        with pytest.raises(ReplyError, match="I/O error"):
            await Streaming(await world.client(), Proc.STORAGE_VOL_DOWNLOAD).begin()
        assert is_clean(world)

    play(tmp_path, body)


def test_what_cannot_be_noted_does_not_begin(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        world.gateway.services.pools.leftovers = Leftovers(Path("/proc/none"))
        with pytest.raises(ReplyError, match="cannot be written"):
            await Streaming(await world.client(), Proc.STORAGE_VOL_DOWNLOAD).begin()
        assert "bdev_lvol_snapshot" not in world.target.calls

    play(tmp_path, body)


@pytest.mark.parametrize("method", ["bdev_lvol_snapshot", "virtlun_export_create"])
def test_who_is_cancelled_while_it_begins_leaves_nothing(tmp_path: Path, method: str) -> None:
    async def body(world: World) -> None:
        gate = world.target.gate[method] = threading.Event()
        pool, volume = await pool_and_volume(world)
        files(world)
        opened = exports.opened(pool, volume, _with_files(world), write=False)
        opening = asyncio.ensure_future(opened.__aenter__())
        await until(lambda: method in world.target.calls)
        opening.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert is_clean(world)

    play(tmp_path, body)


def test_what_blocks_is_at_its_end_when_its_task_is_cancelled(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        pool, _ = await pool_and_volume(world)
        gate, done = threading.Event(), threading.Event()

        def work() -> None:
            gate.wait(60)
            done.set()

        doing = asyncio.create_task(pool.target.file_io(work))
        await asyncio.sleep(0)
        doing.cancel()
        asyncio.get_running_loop().call_later(0.05, gate.set)
        with pytest.raises(asyncio.CancelledError):
            await doing
        assert done.is_set()

    play(tmp_path, body)


def test_volumes_of_a_target_that_is_away_keep_nothing_else_waiting(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        pool, _ = await pool_and_volume(world)
        gate = threading.Event()
        waiting = [
            asyncio.create_task(pool.target.file_io(partial(gate.wait, 60)))
            for _ in range(2 * FILES_MAX)
        ]
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            # What other parts of the gateway do in threads, and calls of that target.
            assert await asyncio.to_thread(int) == 0
            assert await pool.target.stores()
        gate.set()
        assert all(await asyncio.gather(*waiting))

    play(tmp_path, body)


def begin(world: World, *, snapshot: bool) -> OpenExport:
    """Begins what a gateway that is killed leaves, and notes it as that does."""
    volumes = Volumes(world.target)
    begun = OpenExport.of(LVSTORE_UUID, volumes.volume("lvs0/data"), snapshot=snapshot)
    begun.begin(volumes, write=not snapshot)
    Leftovers(world.gateway.services.config.state_dir).add(begun)
    return begun


@pytest.mark.parametrize("snapshot", [True, False])
def test_what_a_killed_gateway_had_begun_is_ended(tmp_path: Path, snapshot: bool) -> None:
    async def body(world: World) -> None:
        begin(world, snapshot=snapshot)
        services = world.gateway.services
        after = Leftovers(services.config.state_dir)
        cleaning = asyncio.create_task(after.clean(services.target, services.locks))
        await until(lambda: is_clean(world))
        cleaning.cancel()

    play(tmp_path, body)


def test_what_is_left_of_a_volume_is_ended_by_its_next_user_first(tmp_path: Path) -> None:
    """Not beside it: who cleans up waits for the lock, and finds nothing then."""

    async def body(world: World) -> None:
        client = await world.client()  # the gateway has looked for notes by now
        uploading(world)
        begun = begin(world, snapshot=False)
        services = world.gateway.services
        after = services.pools.leftovers = Leftovers(services.config.state_dir)
        users = services.locks._users
        async with services.locks.hold(begun.lock):
            upload = Streaming(client, Proc.STORAGE_VOL_UPLOAD)
            beginning = asyncio.create_task(upload.begin())
            await until(lambda: users[begun.lock] == 2)
            cleaning = asyncio.create_task(after.clean(services.target, services.locks))
            await until(lambda: users[begun.lock] == 3)
            assert begun.uuid in world.target.exports
        await beginning
        assert begun.uuid in world.target.exports  # the upload's
        await upload.send(b"", Status.OK)
        header, _ = await upload.hears()
        assert header.status == Status.OK and is_clean(world)
        cleaning.cancel()

    play(tmp_path, body)


def test_notes_that_say_nothing_are_passed_over(tmp_path: Path) -> None:
    for number, text in enumerate(("", "snapshot", "[1]", "{}", "\xff")):
        (tmp_path / f"{number}{leftovers.SUFFIX}").write_bytes(text.encode("latin-1"))
    assert Leftovers(tmp_path)._left == {}
