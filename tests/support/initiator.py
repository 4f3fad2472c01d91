"""A vhost-user front end for tests: drives a controller's socket as a guest does."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.target import Target, binary
from tests.support.wait import until

ANSWER_DEADLINE_S = 60.0
"""A busy disk may have a request wait for half a minute."""
WAITING = {"cdb", "wait", "tmf", "blk", "wait_blk"}
"""Commands that wait for the answer to a request, so long where a test says nothing else."""


class Refused(AssertionError):
    """The initiator could not do a command; the text says why."""


class Initiator:
    """One `virtlun-bench exec` process; a context manager that ends it.

    Commands and answers are those of pydataplane/crates/initiator/src/exec/command.rs; bytes are
    given and returned as `bytes`.
    """

    def __init__(
        self,
        socket: Path,
        *,
        user: int | None = None,
        group: int | None = None,
        program: Sequence[str] = (),
    ) -> None:
        """Starts the process, as another user and in another group if asked for (as root).

        `program` is the command line that runs virtlun-bench, where it is not the one that was
        built. It connects at `connect`.
        """
        self._process = subprocess.Popen(
            [*(program or [str(binary("virtlun-bench"))]), "exec", str(socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            user=user,
            group=group,
            extra_groups=None if group is None else [],
        )

    def __enter__(self) -> Initiator:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def kill(self) -> None:
        """Ends it as a crash of QEMU does."""
        self._process.kill()
        self._process.communicate(timeout=ANSWER_DEADLINE_S)

    def send(self, cmd: str, **given: Any) -> dict[str, Any]:
        """Executes a command and returns its answer.

        Raises:
            Refused: the answer is not ok.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if cmd in WAITING:
            given = {"timeout_ms": int(ANSWER_DEADLINE_S * 1000), **given}
        plain = {k: v.hex() if isinstance(v, bytes) else v for k, v in given.items()}
        self._process.stdin.write(json.dumps({"cmd": cmd, **plain}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        if not answer["ok"]:
            raise Refused(answer["error"])
        for name in ("data", "data_in", "sense"):
            if name in answer:
                answer[name] = bytes.fromhex(answer[name])
        return answer

    def until_connected(self, cmd: str = "reconnect", **given: Any) -> dict[str, Any]:
        """Connects as QEMU does: again and again, until there is somebody."""
        return until(lambda: self.send(cmd, **given), "a target that answers", not_yet=Refused)

    def cdb(self, cdb: bytes, *, target: int = 0, **given: Any) -> dict[str, Any]:
        """Sends a SCSI command and waits for its end."""
        return self.send("cdb", cdb=cdb, target=target, **given)

    def ready(self, target: int = 0, **given: Any) -> None:
        """Sends TEST UNIT READY until no unit attention is left (a new nexus has some)."""
        for _ in range(8):
            answer = self.cdb(bytes(6), target=target, **given)
            if (answer["response"], answer["status"]) == (0, 0):
                return
            assert answer["sense"][2] & 15 == 6, answer
        raise AssertionError("unit attentions do not end")

    def read(
        self, lba: int, blocks: int, *, target: int = 0, block_size: int = 512, **given: Any
    ) -> bytes:
        """READ(10) of blocks of `block_size` bytes that must end well."""
        cdb = bytes([0x28, 0, *lba.to_bytes(4, "big"), 0, *blocks.to_bytes(2, "big"), 0])
        answer = self.cdb(cdb, target=target, data_in_len=blocks * block_size, **given)
        assert (answer["response"], answer["status"], answer["residual"]) == (0, 0, 0), answer
        data: bytes = answer["data_in"]
        return data

    def write(
        self, lba: int, data: bytes, *, target: int = 0, block_size: int = 512, **given: Any
    ) -> None:
        """WRITE(10) of blocks of `block_size` bytes that must end well."""
        blocks = len(data) // block_size
        cdb = bytes([0x2A, 0, *lba.to_bytes(4, "big"), 0, *blocks.to_bytes(2, "big"), 0])
        answer = self.cdb(cdb, target=target, data_out=data, **given)
        assert (answer["response"], answer["status"], answer["residual"]) == (0, 0, 0), answer


def connected(target: Target, controller: str = "vm-0", **options: Any) -> Initiator:
    """Returns a guest of a controller whose target 0 is ready; `options` are those of `connect`."""
    guest = Initiator(target.vhost_dir / controller)
    try:
        guest.send("connect", **options)
        guest.ready()
    except BaseException:
        guest.kill()
        raise
    return guest
