"""One backup of disks of ours, from its beginning to its end.

In push mode what is to be copied is written to a file for each disk; in pull mode it is served by
NBD until the client ends the job. What is read are lvol snapshots, which the target exports.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from plugin.gateway.backup import launch as launching
from plugin.gateway.backup import marks
from plugin.gateway.backup.daemon import END_S, PROGRAM, QMP, Job, QmpError, StorageDaemon
from plugin.gateway.backup.launch import DIES_WITH_US, Launch
from plugin.gateway.backup.progress import Progress, Status
from plugin.gateway.errors import Code, Refused
from plugin.gateway.target import Target
from pydataplane.domain.translate.backups import BackupDisk, BackupRequest, Server, show_backup
from pydataplane.domain.translate.snapshotxml import DiskSnapshot

GRANULARITY = 65_536
"""Bytes of one bit of a dirty bitmap."""


@dataclass(frozen=True, slots=True)
class Part:
    """One disk of a backup."""

    disk: BackupDisk
    frozen: DiskSnapshot
    """The lvol snapshot that is copied."""
    since: DiskSnapshot | None
    """What it is compared with; None: all is copied."""
    size: int
    """Bytes of the disk."""


class BackupJob:
    """A backup under way."""

    def __init__(
        self,
        target: Target,
        launch: Launch,
        folder: Path,
        request: BackupRequest,
        parts: Sequence[Part],
        *,
        reuse: bool,
    ) -> None:
        """`folder` is made, for sockets; with `reuse` the files of push mode are there already."""
        self.request = request
        self._target = target
        self._launch = launch
        self._folder = folder
        self._parts = parts
        self._reuse = reuse
        self._begun = time.monotonic()
        self._total = self._done = 0
        self._finished: dict[str, Job] = {}
        self._created: list[str] = []
        self._aborted = asyncio.Event()
        self._reader: StorageDaemon | None = None
        self._worker: StorageDaemon | None = None

    @property
    def xml(self) -> str:
        """How a client is to see it."""
        return show_backup(self.request, [part.disk.file or "" for part in self._parts])

    @property
    def new_files(self) -> list[str]:
        """What `start` makes."""
        if self.request.server is not None or self._reuse:
            return []
        return [part.disk.file or "" for part in self._parts if not part.disk.block]

    async def prepare(self) -> None:
        """Opens what is to be copied; makes none of the files. See `start`."""
        with self._as_refusals():
            self._folder.mkdir(mode=0o700)
            await self._read_from(await self._target.export_snapshots(self._frozen))
            # Last: in a folder of another user's names may come to mean other files.
            self._launch.give(self._folder)
            command = self._launch.command([PROGRAM, *QMP], "writer")
            self._worker = await StorageDaemon.start(command)
            for number, part in enumerate(self._parts):
                await self._worker.call(
                    "blockdev-add",
                    driver="nbd",
                    node_name=f"source{number}",
                    server={"type": "unix", "path": str(self._socket("source"))},
                    export=part.disk.lun.dev,
                    read_only=True,
                )
            for file in self.new_files:
                await self._check_free(self._worker, file)
            await self._mark(self._worker)

    async def start(self) -> None:
        """Begins; the caller calls `finish` where this or `prepare` fails.

        Raises:
            GatewayError: it cannot be.
        """
        assert self._worker is not None
        with self._as_refusals():
            if self.request.server is not None:
                await self._serve(self._worker, self.request.server)
                return
            for number, part in enumerate(self._parts):
                await self._push(self._worker, number, part)

    @contextmanager
    def _as_refusals(self) -> Iterator[None]:
        """Turns what goes wrong at the beginning into refusals."""
        try:
            yield
        except QmpError as error:
            hint = ""
            if "Permission denied" in str(error) and self._launch.user is not None:
                hint = f": user {self._launch.user.pw_name} must be able to make and write it"
            raise Refused(
                Code.OPERATION_FAILED, f"the backup does not begin: {error}{hint}"
            ) from error
        except OSError as error:
            raise Refused(
                Code.OPERATION_FAILED, f"{self._folder} cannot be made: {error.strerror}"
            ) from error

    async def run(self) -> Progress:
        """Waits for the end, which `abort` brings about as well, and returns how it was."""
        assert self._worker is not None
        aborted = asyncio.create_task(self._aborted.wait())
        waits = asyncio.create_task(self._end(self._worker))
        try:
            await asyncio.wait((aborted, waits), return_when=asyncio.FIRST_COMPLETED)
            if self._aborted.is_set():
                return self._progress(Status.CANCELLED)
            try:
                error = waits.result()
            except QmpError as gone:
                error = f"{PROGRAM}: {gone}"
            return self._progress(Status.FAILED if error else Status.COMPLETED, error)
        finally:
            for task in (aborted, waits):
                task.cancel()
            await asyncio.gather(aborted, waits, return_exceptions=True)

    async def progress(self) -> Progress:
        """Returns how far it is."""
        with suppress(QmpError):
            if self._worker is not None and self.request.server is None:
                jobs = (await self._worker.jobs()) | self._finished
                self._count(job for name, job in jobs.items() if name.startswith("copy"))
        return self._progress(Status.RUNNING)

    def abort(self) -> None:
        """Ends it early: of push mode nothing is left, pull mode is served no longer."""
        self._aborted.set()

    async def finish(self, end: Status) -> None:
        """Ends the programs; files that are not whole are removed. Safe to repeat.

        The exports are left, to be ended by the caller.
        """
        # First, and not in order: it may wait for the target, and the other one for it.
        gone = self._reader is None or await self._reader.kill()
        if self._worker is not None and not await self._end_worker(self._worker, in_order=gone):
            await launching.stop(self._launch, "writer")  # what runs it is dead, not itself
            if self.request.server is not None and self.request.server.socket:
                await launching.remove(self._launch, [self.request.server.socket])
        self._worker = self._reader = None
        if end is not Status.COMPLETED:
            await launching.remove(self._launch, self._created)
            self._created.clear()
        for name in ("source", "marks"):
            self._socket(name).unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()

    async def _end_worker(self, worker: StorageDaemon, *, in_order: bool) -> bool:
        """Ends the program that clients use; returns whether that was in order, as asked for."""
        if not in_order:
            await worker.kill()
            return False
        if self.request.server is not None:
            with suppress(QmpError, TimeoutError):
                async with asyncio.timeout(END_S):
                    await worker.call("nbd-server-stop")  # removes the client's socket
        return await worker.close()

    @property
    def _frozen(self) -> list[DiskSnapshot]:
        return [part.frozen for part in self._parts]

    def _socket(self, name: str) -> Path:
        return self._folder / name

    def _progress(self, status: Status, error: str | None = None) -> Progress:
        if self._finished and status is not Status.RUNNING:
            self._count(self._finished.values())
        elapsed_s = time.monotonic() - self._begun
        return Progress(status, elapsed_s, self._total, self._done, error)

    def _count(self, copies: Iterable[Job]) -> None:
        """Takes over how far the copies are, in bytes."""
        copies = list(copies)
        self._done = sum(job.done for job in copies)
        self._total = sum(job.total for job in copies)

    async def _read_from(self, paths: Sequence[Path]) -> None:
        """Serves the exports of the snapshots to the program that may not open them."""
        self._reader = await StorageDaemon.start([*DIES_WITH_US, "--", PROGRAM, *QMP])
        address = {"type": "unix", "data": {"path": str(self._socket("source"))}}
        await self._reader.call("nbd-server-start", addr=address)
        self._launch.give(self._socket("source"))
        for number, (part, path) in enumerate(zip(self._parts, paths, strict=True)):
            await self._reader.call(
                "blockdev-add",
                driver="file",
                node_name=f"source{number}",
                filename=str(path),
                read_only=True,
                locking="off",
                cache={"direct": True},
            )
            await self._reader.call(
                "block-export-add",
                type="nbd",
                id=f"source{number}",
                node_name=f"source{number}",
                name=part.disk.lun.dev,
            )

    def _is_marked(self, part: Part) -> bool:
        """Whether what is to be copied is told by a bitmap; else it is all of it.

        What is written anew reads as zeros where the snapshot has nothing.
        """
        if part.since is not None:
            return True
        if self.request.server is not None or self._reuse:
            return False
        return not part.disk.block or part.disk.form == "qcow2"

    async def _mark(self, worker: StorageDaemon) -> None:
        """Gives each source that needs one a dirty bitmap of what is to be copied."""
        marked = [(n, part) for n, part in enumerate(self._parts) if self._is_marked(part)]
        if not marked:
            return
        socket = self._socket("marks")
        address = {"type": "unix", "data": {"path": str(socket)}}
        await worker.call("nbd-server-start", addr=address)
        for number, part in marked:
            node, bitmap = f"marks{number}", part.disk.bitmap
            await worker.call("blockdev-add", driver="null-co", node_name=node, size=part.size)
            made = {"name": bitmap, "granularity": GRANULARITY}
            await worker.call("block-dirty-bitmap-add", node=node, **made)
            await worker.call(
                "block-export-add", type="nbd", id=node, node_name=node, name=node, writable=True
            )
            since = part.since.uuid if part.since is not None else None
            dirty = partial(marks.mark, socket=socket, export=node, size=part.size)
            await self._target.with_ranges(part.frozen.uuid, since, dirty)
            await worker.call("block-export-del", id=node, mode="hard")
            source = f"source{number}"
            await worker.call("block-dirty-bitmap-add", node=source, **made)
            await worker.call(
                "block-dirty-bitmap-merge",
                node=source,
                target=bitmap,
                bitmaps=[{"node": node, "name": bitmap}],
            )
        await worker.call("nbd-server-stop")

    async def _serve(self, worker: StorageDaemon, server: Server) -> None:
        """Serves the disks to the client."""
        address: dict[str, Any] = {"type": "unix", "data": {"path": server.socket}}
        if server.transport == "tcp":
            data = {"host": server.host, "port": str(server.port)}
            address = {"type": "inet", "data": data}
        try:
            await worker.call("nbd-server-start", addr=address)
        except QmpError as error:
            raise Refused(Code.OPERATION_FAILED, f"{server.address}: {error}") from error
        for number, part in enumerate(self._parts):
            await worker.call(
                "block-export-add",
                type="nbd",
                id=f"export{number}",
                node_name=f"source{number}",
                name=part.disk.export,
                bitmaps=[part.disk.bitmap] if self._is_marked(part) else [],
            )

    async def _push(self, worker: StorageDaemon, number: int, part: Part) -> None:
        """Begins to copy one disk."""
        await self._open(worker, number, part)
        how: dict[str, Any] = {"sync": "full"}
        if self._is_marked(part):
            how = {"sync": "bitmap", "bitmap": part.disk.bitmap, "bitmap_mode": "never"}
        job = f"copy{number}"
        worker.expect(job)
        await worker.call(
            "blockdev-backup",
            job_id=job,
            device=f"source{number}",
            target=f"target{number}",
            auto_dismiss=False,
            **how,
        )

    async def _open(self, worker: StorageDaemon, number: int, part: Part) -> None:
        """Opens what one disk is written to, and makes it first where that is wanted."""
        disk = part.disk
        file: dict[str, Any] = {"driver": "file", "filename": disk.file}
        if disk.block:
            file["driver"] = "host_device"
        elif not self._reuse:
            size = part.size if disk.form == "raw" else 0
            await self._create(worker, f"file{number}", file | {"size": size})
            self._created.append(disk.file or "")
        made = not self._reuse and (disk.form == "qcow2" or not disk.block)
        await worker.call("blockdev-add", node_name=f"file{number}", **file)
        if made and disk.form == "qcow2":
            options = {"driver": "qcow2", "file": f"file{number}", "size": part.size}
            await self._create(worker, f"format{number}", options)
        more: dict[str, Any] = {"backing": None} if disk.form == "qcow2" else {}
        await worker.call(
            "blockdev-add",
            driver=disk.form,
            node_name=f"target{number}",
            file=f"file{number}",
            **more,
        )

    async def _check_free(self, worker: StorageDaemon, file: str) -> None:
        """Refuses a file that is there already.

        Raises:
            Refused: it is.
            QmpError: that cannot be told.
        """
        try:
            await worker.call(
                "blockdev-add", driver="file", filename=file, node_name="probe", read_only=True
            )
        except QmpError as error:
            if "No such file" not in str(error):
                raise
            return
        await worker.call("blockdev-del", node_name="probe")
        raise Refused(
            Code.INVALID_ARG,
            f"store '{file}' for the backup exists: name another, or say --reuse-external",
        )

    async def _create(self, worker: StorageDaemon, job: str, options: dict[str, Any]) -> None:
        worker.expect(job)
        await worker.call("blockdev-create", job_id=job, options=options)
        ended = await worker.conclusion(job)
        if ended.error is not None:
            raise QmpError(ended.error)

    async def _end(self, worker: StorageDaemon) -> str | None:
        """Waits until all is copied, in pull mode until the program ends; returns an error."""
        if self.request.server is not None:
            await worker.ended()
            return f"{PROGRAM} ended"
        jobs = [f"copy{number}" for number in range(len(self._parts))]
        for ending in asyncio.as_completed([worker.conclusion(job) for job in jobs]):
            job = await ending
            self._finished[job.name] = job
            if job.error is not None:
                return job.error
        for number in range(len(self._parts)):
            # What is written is durable when this has returned.
            await worker.call("blockdev-del", node_name=f"target{number}")
            await worker.call("blockdev-del", node_name=f"file{number}")
        return None


@dataclass(frozen=True)
class Backup:
    """A backup that runs, and the task that carries it through."""

    job: BackupJob
    task: asyncio.Task[None]

    async def ended(self) -> None:
        """Returns when nothing is left of it."""
        await asyncio.wait([self.task])
