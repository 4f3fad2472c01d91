"""One qemu-storage-daemon, told by QMP on its standard input and output."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from plugin.gateway.errors import Refused
from pydataplane.domain.errors import Refusal

PROGRAM = "qemu-storage-daemon"
QMP = ("--chardev", "stdio,id=qmp,signal=off", "--monitor", "chardev=qmp")
LINE_MAX = 4 << 20
"""The longest answer, bytes."""
CALL_S = 60.0
END_S = 10.0
"""How long it may take for a call, and to end, seconds."""
GONE_S = 2.0
"""How long one that was killed may take to go, seconds. Where it waits for a file of a target that
is away, in a system call that nothing interrupts, it goes when the target is back."""


class QmpError(Exception):
    """What it says that it cannot do."""


@dataclass(frozen=True, slots=True)
class Job:
    """How far a block job is, or was at its end."""

    name: str
    done: int
    total: int
    """Bytes to copy, as far as it knows."""
    error: str | None


class StorageDaemon:
    """A running qemu-storage-daemon."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """`process` reads QMP from its standard input."""
        self._process = process
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._concluded: dict[str, asyncio.Event] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, launch: Sequence[str]) -> StorageDaemon:
        """Starts one; `launch` is what comes before the program in its command line.

        Raises:
            Refused: the program is not installed, or does not run.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *launch,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_MAX,
            )
        except OSError as error:
            raise Refused(Refusal.INTERNAL, f"{launch[0]}: {error.strerror}") from error
        daemon = cls(process)
        try:
            await daemon.call("qmp_capabilities")
        except QmpError as error:
            await daemon.close()
            raise Refused(
                Refusal.INTERNAL,
                f"{PROGRAM}, which makes backups, does not run ({error}): install"
                " qemu-system-common, and see the gateway's log",
            ) from error
        return daemon

    async def ended(self) -> None:
        """Returns when it has ended, by itself or not."""
        await asyncio.wait([self._reader])

    async def call(self, command: str, **arguments: Any) -> Any:
        """Carries out a QMP command (`_` in names of arguments stands for `-`); returns its result.

        Raises:
            QmpError: its error, or that it has ended.
        """
        number = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        given = {name.replace("_", "-"): value for name, value in arguments.items()}
        line = json.dumps({"execute": command, "arguments": given, "id": number})
        stdin = self._process.stdin
        try:
            if self._reader.done() or stdin is None:
                raise QmpError("it has ended")
            stdin.write(line.encode() + b"\n")
            await stdin.drain()
            async with asyncio.timeout(CALL_S):
                return await answer
        except TimeoutError as error:
            raise QmpError(f"it does not answer {command}") from error
        except OSError as error:
            raise QmpError("it has ended") from error
        finally:
            self._waiting.pop(number, None)

    def expect(self, job: str) -> None:
        """Has `conclusion` of a job be there, which is about to begin."""
        self._concluded[job] = asyncio.Event()

    async def jobs(self) -> dict[str, Job]:
        """Returns the jobs that were not dismissed yet, by name.

        Raises:
            QmpError: the program has ended.
        """
        return {
            item["id"]: Job(
                item["id"], item["current-progress"], item["total-progress"], item.get("error")
            )
            for item in await self.call("query-jobs")
        }

    async def conclusion(self, job: str) -> Job:
        """Waits until a job has ended, and dismisses it; returns how far it came.

        Raises:
            QmpError: the program has ended.
        """
        await self._concluded[job].wait()
        found = (await self.jobs()).get(job)
        if found is None:
            raise QmpError(f"job {job} is lost")
        await self.call("job-dismiss", id=job)
        return found

    async def close(self) -> bool:
        """Ends it, at once if need be; safe to repeat. Returns whether it ended in order."""
        with suppress(QmpError, TimeoutError):
            async with asyncio.timeout(END_S):
                await self.call("quit")
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        in_order = self._process.returncode is not None
        await self.kill()
        return in_order

    async def kill(self) -> bool:
        """Ends it at once; safe to repeat. Returns whether it has gone: see GONE_S."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(GONE_S):
                    await self._process.wait()
        self._reader.cancel()
        await asyncio.wait([self._reader])
        return self._process.returncode is not None

    async def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            while line := await stdout.readline():
                self._take(json.loads(line))
        except ValueError:  # no QMP: somebody else's words
            pass
        finally:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(QmpError("it has ended"))
            for event in self._concluded.values():
                event.set()

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("event") == "JOB_STATUS_CHANGE":
            data = message["data"]
            if data["status"] == "concluded" and data["id"] in self._concluded:
                self._concluded[data["id"]].set()
            return
        answer = self._waiting.get(message.get("id", 0))
        if answer is None or answer.done():
            return
        if "error" in message:
            answer.set_exception(QmpError(message["error"]["desc"]))
        else:
            answer.set_result(message["return"])
