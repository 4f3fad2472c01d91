"""A real target process on a scratch directory, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydataplane.client import Client
from pydataplane.errors import TargetError
from tests.support import threads
from tests.support.wait import listens, serves, until

START_DEADLINE_S = 120.0
"""A busy disk can hold a process that makes a file for half a minute."""
STOP_DEADLINE_S = 120.0
SANDBOX_REFUSED = "the sandbox refused the system call"
"""In the log: the target made a call that is missing in crates/sandbox/src/calls."""
ROOT = Path(__file__).parents[2]
PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


class TargetFailed(AssertionError):
    """The target ended, or did not answer, when it should have; the text carries its log."""


def stand(process: subprocess.Popen[Any]) -> str:
    """Returns what the process's threads wait for, and what else waits for the disk."""
    return f"{threads.of_processes(process.pid)}\nand\n{threads.of_all_that_block()}"


def binary(name: str = "virtlun-target") -> Path:
    """Returns the program under test: $VIRTLUN_TARGET, else the one that `make setup` installed.

    Another `name` is looked for beside it first.
    """
    given = os.environ.get("VIRTLUN_TARGET")
    if given and name == "virtlun-target":
        return Path(given)
    if given and Path(given).with_name(name).exists():
        return Path(given).with_name(name)
    installed = Path(sys.executable).with_name(name)
    if installed.exists():
        return installed
    raise FileNotFoundError(f"{installed} is not built: run `make build`")


class Target:
    """One target process at a time, whose state lives in `directory` across restarts.

    The directory's path must be short: sockets are made in it (108 bytes at most, unix(7)).
    """

    def __init__(self, directory: Path, *options: str) -> None:
        """Prepares a target; `options` are further ones of `virtlun-target`."""
        self.directory = directory
        self.options = options
        self.rpc_socket = directory / "rpc.sock"
        self.vhost_dir = directory / "vhost"
        self.state_dir = directory / "state"
        self.export_dir = directory / "export"
        self.holder_socket = directory / "holder.sock"
        self.log = directory / "target.log"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *options: str) -> list[str]:
        """Returns the command line."""
        return [
            str(binary()),
            *("--rpc-socket", str(self.rpc_socket)),
            *("--vhost-dir", str(self.vhost_dir)),
            *("--state-dir", str(self.state_dir)),
            *("--export-dir", str(self.export_dir)),
            *self.options,
            *options,
        ]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Runs a target that is expected to end by itself, and returns how it did."""
        command = self.command(*options)
        pipe = subprocess.PIPE
        with subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe) as process:
            try:
                out, err = process.communicate(timeout=START_DEADLINE_S)
            except subprocess.TimeoutExpired:
                stands = stand(process)
                process.kill()
                raise TargetFailed(f"the target does not end by itself:\n{stands}") from None
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def start(self, *options: str) -> Target:
        """Starts the process and waits until its socket is there, which means that it is ready."""
        assert self.process is None, "it runs already"
        self.rpc_socket.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command(*options), stdout=log, stderr=log)
        end = time.monotonic() + START_DEADLINE_S
        while not self.rpc_socket.exists():
            if self.process.poll() is not None:
                self.process = None
                raise TargetFailed(f"the target ended at start:\n{self.words()}")
            if time.monotonic() > end:
                stands = stand(self.process)
                self.kill9()
                raise TargetFailed(f"the target is not ready:\n{self.words()}\n{stands}")
            time.sleep(0.005)
        return self

    def restored(self) -> Target:
        """Waits until all that is recorded is there: a start waits for no server for long."""

        def left() -> list[Any]:
            problems: list[Any] = self.rpc("virtlun_get_status")["restore_problems"]
            return problems

        until(lambda: not left(), lambda: f"all is restored: {left()}\n{self.words()}")
        return self

    def stop(self) -> int:
        """Stops it in order and returns its exit status; 0 if it did not run."""
        return self.signal(signal.SIGTERM)

    def kill9(self) -> None:
        """Ends it as a crash does."""
        self.signal(signal.SIGKILL)

    def crash(self) -> Target:
        """Ends it as a crash does, and starts it again."""
        self.kill9()
        return self.start()

    def signal(self, number: signal.Signals) -> int:
        """Sends a signal that ends it, and returns its exit status; 0 if it did not run."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            status = process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            stands = stand(process)
            process.kill()
            process.wait()
            raise TargetFailed(f"the target did not end:\n{self.words()}\n{stands}") from None
        if SANDBOX_REFUSED in self.words():
            raise TargetFailed(f"the target made a call that is not listed:\n{self.words()}")
        return status

    @contextlib.contextmanager
    def holder(
        self, *options: str, before: tuple[str, ...] = ()
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Runs a holder of this target's exports by itself, for the duration of a block.

        `before` are the words of a program that runs it. It listens when the block begins.
        """
        command = [
            *before,
            str(binary("virtlun-holder")),
            *("--socket", str(self.holder_socket), "--dir", str(self.export_dir), *options),
        ]
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            there = partial(listens, self.holder_socket, socket.SOCK_SEQPACKET)
            serves(process, there, "the holder", self.log)
            yield process
        finally:
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def exported(self, bdev: str) -> Iterator[Path]:
        """Shows a bdev as a file, for the duration of a block."""
        yield Path(self.rpc("virtlun_export_create", bdev_name=bdev)["path"])
        self.rpc("virtlun_export_delete", bdev_name=bdev)

    def holder_pid(self) -> int:
        """Returns the process that holds what is the target's; OSError if there is none."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(str(self.holder_socket))
            found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
            pid: int = PEER.unpack(found)[0]
            return pid

    def kill_holder(self) -> None:
        """Kills the holder that the target has started, if it is there."""
        with contextlib.suppress(OSError):
            os.kill(self.holder_pid(), signal.SIGKILL)

    def end_holder(self) -> None:
        """Ends the holder that the target has started, and what it holds with it."""
        self.kill_holder()
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            point = line.split()[4]
            if Path(point).parent == self.export_dir:
                subprocess.run(["umount", "-l", point], check=False)

    def restart(self) -> Target:
        """Stops it in order and starts it again."""
        assert self.stop() == 0, self.words()
        return self.start()

    def upgrade(self, *options: str, program: Sequence[str] = ()) -> Target:
        """Has a new process, of `program` if given, take over; TargetFailed if it does not."""
        old, self.process = self.process, None
        assert old is not None, "it does not run"
        command = [*program, *self.options, *options] if program else self.command(*options)
        with self.log.open("ab") as log:
            new = subprocess.Popen([*command, "--take-over"], stdout=log, stderr=log)
        end = time.monotonic() + START_DEADLINE_S
        while old.poll() is None and new.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        if new.poll() is None and old.poll() == 0:
            self.process = new
            return self
        self.process = old if old.poll() is None else None
        if new.poll() is None:
            new.kill()
        new.wait()
        if self.process is not None:
            # The old program waits for another one a moment after it has refused this one.
            waits = Path(f"{self.rpc_socket}.upgrade").exists
            until(waits, lambda: f"a new program is waited for: {self.words()}")
        raise TargetFailed(f"the new program did not take over:\n{self.words()}")

    def words(self) -> str:
        """Returns the log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def pid(self) -> int:
        """The running process."""
        assert self.process is not None, "it does not run"
        return self.process.pid

    @property
    def client(self) -> Client:
        """Our own client."""
        return Client(self.rpc_socket)

    def rpc(self, method: str, **params: Any) -> Any:
        """Calls a method and returns its result; pydataplane.errors.RpcError if it is refused."""
        return self.client.call_raw(method, **params)

    def fails(self, method: str, **params: Any) -> TargetError:
        """Calls a method that is expected to be refused, and returns the error."""
        try:
            result = self.rpc(method, **params)
        except TargetError as error:
            return error
        raise AssertionError(f"{method} {params} gave {result!r} but should have failed")

    def spdk_rpc(self, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Runs the unmodified `spdk-rpc` of the `spdk` package against it."""
        program = Path(sys.executable).with_name("spdk-rpc")
        return subprocess.run(
            [str(program), "-s", str(self.rpc_socket), *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def make_file(self, name: str, size: int) -> Path:
        """Makes a sparse file of `size` bytes in the directory."""
        path = self.directory / name
        with path.open("xb") as file:
            file.truncate(size)
        return path

    def make_lvstore(
        self, name: str = "lvs0", size: int = 64 << 20, cluster: int = 1 << 20
    ) -> Path:
        """Makes an lvstore on a new file of `size` bytes, which it returns, with such clusters."""
        file = self.make_file(f"{name}.img", size)
        self.rpc("bdev_uring_create", filename=str(file), name=f"{name}-base", block_size=512)
        self.rpc(
            "bdev_lvol_create_lvstore",
            bdev_name=f"{name}-base",
            lvs_name=name,
            cluster_sz=cluster,
        )
        return file

    def make_thin(self, name: str, mib: int, store: str = "lvs0") -> str:
        """Makes a thin volume of `mib` MiB, and returns its UUID."""
        made: str = self.rpc(
            "bdev_lvol_create", lvs_name=store, lvol_name=name, size_in_mib=mib, thin_provision=True
        )
        return made

    def add_lun(self, controller: str, bdev: str, number: int = 0, **options: Any) -> None:
        """Adds a bdev to a controller as LUN 0 of target `number`."""
        self.rpc(
            "vhost_scsi_controller_add_target",
            ctrlr=controller,
            scsi_target_num=number,
            bdev_name=bdev,
            **options,
        )

    def attach(self, controller: str, *bdevs: str, **options: Any) -> Path:
        """Makes a controller that shows bdevs as targets 0 and on; returns its socket."""
        self.rpc("vhost_create_scsi_controller", ctrlr=controller)
        for number, bdev in enumerate(bdevs):
            self.add_lun(controller, bdev, number, **options)
        return self.vhost_dir / controller

    def is_kept(self, controller: str) -> bool:
        """Whether the session of a controller goes on if the target is killed."""
        (found,) = self.rpc("vhost_get_controllers", name=controller)
        return any(session["kept"] for session in found["sessions"])

    def configuration(self) -> dict[str, list[dict[str, Any]]]:
        """Returns what is recorded on disk, by subsystem."""
        text = json.loads((self.state_dir / "config.json").read_text())
        return {entry["subsystem"]: entry["config"] for entry in text["subsystems"]}
