"""The targets that are measured: each a process of its own that can be frozen while others run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydataplane.client import Client
from pydataplane.errors import TargetError
from tests.support.frozen import freeze
from tests.support.target import binary

START_DEADLINE_S = 20.0
BLOCK_BYTES = 512
POLL_MAX_NS = 1_000_000
"""How long QEMU's storage daemon spins in the variants that poll."""
SLOW_US = 300
"""What an I/O of the slow disk takes, microseconds."""
LVSTORE_MIB = 256
"""What the bdev below an lvstore has more than its volume."""
SPDK_PROGRAM = "build/bin/vhost"
"""SPDK's target, below its folder."""
SPDK_MIB = 512
"""Huge pages of SPDK's target beside its disk in memory."""


@dataclass
class Subject:
    """One target under measurement."""

    name: str
    socket: Path
    process: subprocess.Popen[bytes]
    blk: bool
    rpc: Client | None = None
    """Ours only: for its own account of busy time."""
    huge: bool = False
    """Whether the guest's memory is in huge pages, which SPDK needs of it."""
    filled: bool = field(default=False)

    @property
    def pid(self) -> int:
        """The target's process."""
        return self.process.pid

    def freeze(self) -> None:
        """Stops it, so that it takes no CPU from the one measured."""
        freeze(self.pid)

    def thaw(self) -> None:
        """Lets it go on."""
        self.process.send_signal(signal.SIGCONT)


def spawn(command: list[str], log: Path, cpu: int | None) -> subprocess.Popen[bytes]:
    """Starts `command` in a session of its own with the most weight the scheduler gives.

    The kernel shares the CPUs out between sessions first (autogroup), so a nice value is not
    enough. With `cpu` the whole process is bound to that CPU.
    """

    def prepare() -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text("-20")
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})

    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509 - no thread was started yet
        )


def wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until a socket is there."""
    end = time.monotonic() + START_DEADLINE_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{path} does not appear:\n{log.read_text(errors='replace')}")
        time.sleep(0.01)


def wait_until_ready(client: Client) -> None:
    """Waits until SPDK's target, whose socket is there, has started."""
    end = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            client.call("framework_wait_init")
        except (OSError, TargetError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            return


def spdk_command(spdk: Path, rpc_socket: Path, vhost: Path, memory_mib: int, cpu: int) -> list[str]:
    """Returns what runs SPDK's target: with its vhost sockets in `vhost`, on one CPU."""
    return [
        *(str(spdk / SPDK_PROGRAM), "-r", str(rpc_socket), "-S", str(vhost)),
        *("-m", hex(1 << cpu), "--disable-cpumask-locks", "-s", str(memory_mib)),
    ]


def start_spdk(
    spdk: Path, directory: Path, size_mib: int, cpu: int
) -> tuple[subprocess.Popen[bytes], Client]:
    """Starts SPDK's target, with room for disks in memory of that size; sockets in `directory`."""
    rpc_socket, log = directory / "rpc.sock", directory / "log"
    command = spdk_command(spdk, rpc_socket, directory, size_mib + SPDK_MIB, cpu)
    process = spawn(command, log, None)
    try:
        wait_for(rpc_socket, process, log)
        client = Client(rpc_socket)
        wait_until_ready(client)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process, client


def huge_pages() -> int:
    """Returns how many huge pages the host has set aside."""
    return int(Path("/proc/sys/vm/nr_hugepages").read_text())


def check_spdk(directory: Path) -> None:
    """Ends the program with a sentence where SPDK's target is not there, or cannot start."""
    program = directory / SPDK_PROGRAM
    if not program.exists():
        raise SystemExit(f"{program} is not there: build SPDK with ./configure and make")
    if not huge_pages():
        raise SystemExit("SPDK needs huge pages: sysctl vm.nr_hugepages=8000 for all its targets")


def serve(client: Client, bdev: str, *, blk: bool) -> None:
    """Makes the controller `bench` with this bdev, as a LUN or as a virtio-blk disk."""
    if blk:
        client.call("vhost_create_blk_controller", ctrlr="bench", dev_name=bdev)
        return
    client.call("vhost_create_scsi_controller", ctrlr="bench")
    client.call(
        "vhost_scsi_controller_add_target", ctrlr="bench", scsi_target_num=0, bdev_name=bdev
    )


@dataclass(frozen=True)
class Bench:
    """What all subjects have in common."""

    scratch: Path
    memory: Path
    """A directory on a file system in memory (/dev/shm)."""
    size_mib: int
    cpu: int | None
    """Where targets poll."""
    program: Path = field(default_factory=binary)
    """Our target."""
    label: str = "virtlun"
    """What it is called."""
    spdk: Path | None = None
    """SPDK's folder, where it was built."""

    def _ours(
        self,
        name: str,
        options: list[str],
        prepare: Callable[[Client], str],
        *,
        blk: bool = False,
        huge: bool = False,
    ) -> Subject:
        """Starts our target; `prepare` makes a bdev and returns its name.

        `huge` guests have their memory in huge pages; beside SPDK's, which needs that, all have.
        """
        name = f"{self.label} {name}" + (" huge" if huge else "")
        directory = self.scratch / name.replace(" ", "-")
        (directory / "vhost").mkdir(parents=True)
        rpc_socket, log = directory / "rpc.sock", directory / "log"
        command = [
            *(str(self.program), "--rpc-socket", str(rpc_socket)),
            *("--vhost-dir", str(directory / "vhost"), "--state-dir", str(directory / "state")),
            *("--export-dir", str(directory / "export")),
            *options,
        ]
        if self.cpu is not None:
            command += ["--cpumask", hex(1 << self.cpu)]
        # Its reactor binds itself; its other threads stay where the kernel puts them.
        process = spawn(command, log, None)
        try:
            wait_for(rpc_socket, process, log)
            client = Client(rpc_socket)
            serve(client, prepare(client), blk=blk)
        except BaseException:
            process.kill()
            process.wait()
            raise
        socket = directory / "vhost" / "bench"
        huge = huge or self.spdk is not None
        return Subject(name, socket, process, blk=blk, rpc=client, huge=huge)

    def _blocks(self) -> int:
        return self.size_mib * 1024 * 1024 // BLOCK_BYTES

    def _null(self, client: Client) -> str:
        """Makes a bdev that does nothing, as each `prepare` that follows; returns its name."""
        client.call("bdev_null_create", name="n", num_blocks=self._blocks(), block_size=BLOCK_BYTES)
        return "n"

    def _malloc(self, client: Client, more_mib: int = 0) -> str:
        """Makes a bdev in memory."""
        blocks = self._blocks() + more_mib * 1024 * 1024 // BLOCK_BYTES
        client.call("bdev_malloc_create", name="m", num_blocks=blocks, block_size=BLOCK_BYTES)
        return "m"

    def _lvol(self, client: Client) -> str:
        """Makes a thick volume of an lvstore in memory."""
        base = self._malloc(client, LVSTORE_MIB)
        client.call("bdev_lvol_create_lvstore", bdev_name=base, lvs_name="lvs")
        client.call("bdev_lvol_create", lvs_name="lvs", lvol_name="vol", size_in_mib=self.size_mib)
        return "lvs/vol"

    def ours_null(self, *, poll: bool, blk: bool = False, huge: bool = False) -> Subject:
        """Our target on a bdev that does nothing."""
        name = ("blk " if blk else "") + "null" + (" poll" if poll else "")
        return self._ours(name, ["--poll"] if poll else [], self._null, blk=blk, huge=huge)

    def ours_malloc(self, *, poll: bool = True, blk: bool = False, huge: bool = False) -> Subject:
        """Our target on memory."""
        name = ("blk " if blk else "") + "malloc" + (" poll" if poll else "")
        return self._ours(name, ["--poll"] if poll else [], self._malloc, blk=blk, huge=huge)

    def ours_slow(self) -> Subject:
        """Our target on memory that answers as late as a cluster."""

        def prepare(client: Client) -> str:
            client.call(
                "bdev_delay_create",
                base_bdev_name=self._malloc(client),
                name="slow",
                avg_read_latency=SLOW_US,
                p99_read_latency=SLOW_US,
                avg_write_latency=SLOW_US,
                p99_write_latency=SLOW_US,
            )
            return "slow"

        return self._ours("slow", [], prepare)

    def ours_lvol(self) -> Subject:
        """Our target on a thick volume of an lvstore on memory."""
        return self._ours("lvol poll", ["--poll"], self._lvol)

    def ours_file(self, *, poll: bool, blk: bool = False, huge: bool = False) -> Subject:
        """Our target on a file in memory."""
        name = ("blk " if blk else "") + "file" + (" poll" if poll else "")
        path = self._file(f"{self.label}-{name}{'-huge' if huge else ''}".replace(" ", "-"))

        def prepare(client: Client) -> str:
            client.call("bdev_uring_create", filename=str(path), name="f", block_size=BLOCK_BYTES)
            return "f"

        return self._ours(name, ["--poll"] if poll else [], prepare, blk=blk, huge=huge)

    def _spdk(self, name: str, prepare: Callable[[Client], str], *, blk: bool = False) -> Subject:
        """Starts SPDK's target, which always polls; `prepare` makes a bdev and returns its name."""
        assert self.spdk is not None
        name = f"spdk {name}"
        directory = self.scratch / name.replace(" ", "-")
        directory.mkdir()
        process, client = start_spdk(self.spdk, directory, self.size_mib, self.cpu or 0)
        try:
            serve(client, prepare(client), blk=blk)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return Subject(name, directory / "bench", process, blk=blk, rpc=client, huge=True)

    def spdk_null(self, *, blk: bool = False) -> Subject:
        """SPDK's target on a bdev that does nothing."""
        return self._spdk(("blk " if blk else "") + "null", self._null, blk=blk)

    def spdk_malloc(self, *, blk: bool = False) -> Subject:
        """SPDK's target on memory."""
        return self._spdk(("blk " if blk else "") + "malloc", self._malloc, blk=blk)

    def spdk_lvol(self) -> Subject:
        """SPDK's target on a thick volume of an lvstore on memory."""
        return self._spdk("lvol", self._lvol)

    def spdk_file(self, method: Literal["bdev_aio_create", "bdev_uring_create"]) -> Subject:
        """SPDK's target on a file in memory, of a bdev that `method` makes."""
        module = method.split("_")[1]
        path = self._file("spdk-" + module)

        def prepare(client: Client) -> str:
            client.call(method, filename=str(path), name="f", block_size=BLOCK_BYTES)
            return "f"

        return self._spdk(f"file {module}", prepare)

    def _file(self, name: str) -> Path:
        path = self.memory / name
        with path.open("wb") as file:
            file.truncate(self.size_mib * 1024 * 1024)
        return path

    def ours_rbd(self, name: str, conf: Path, image: str, *options: str, blk: bool) -> Subject:
        """Our target on an image of a cluster, `POOL/IMAGE`."""

        def prepare(client: Client) -> str:
            pool, image_name = image.split("/")
            client.call("bdev_rbd_register_cluster", name="ceph", config_file=str(conf))
            client.call(
                "bdev_rbd_create",
                name="i",
                cluster_name="ceph",
                pool_name=pool,
                rbd_name=image_name,
                block_size=BLOCK_BYTES,
            )
            return "i"

        return self._ours(name, ["--rbd", *options], prepare, blk=blk)

    def _qsd(self, name: str, blockdev: str, *, poll: bool) -> Subject:
        directory = self.scratch / name.replace(" ", "-")
        directory.mkdir()
        socket, log = directory / "blk.sock", directory / "log"
        iothread = "iothread,id=io" + (f",poll-max-ns={POLL_MAX_NS}" if poll else "")
        command = [
            *("qemu-storage-daemon", "--blockdev", f"{blockdev},node-name=disk"),
            *("--object", iothread, "--export"),
            "vhost-user-blk,id=e,node-name=disk,writable=on,iothread=io,"
            f"addr.type=unix,addr.path={socket}",
        ]
        process = spawn(command, log, self.cpu)
        try:
            wait_for(socket, process, log)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return Subject(name, socket, process, blk=True)

    def qsd_null(self, *, poll: bool) -> Subject:
        """QEMU's storage daemon on a disk that does nothing."""
        size = self.size_mib * 1024 * 1024
        name = "qsd null" + (" poll" if poll else "")
        return self._qsd(name, f"null-co,size={size},read-zeroes=off", poll=poll)

    def qsd_file(self, aio: str, *, poll: bool) -> Subject:
        """QEMU's storage daemon on a file in memory, by `aio` (threads or io_uring)."""
        name = f"qsd file {aio}" + (" poll" if poll else "")
        path = self._file(name.replace(" ", "-"))
        return self._qsd(name, f"file,filename={path},aio={aio}", poll=poll)

    def qsd_rbd(self, conf: Path, image: str) -> Subject:
        """QEMU's storage daemon on an image of a cluster, without a cache, as ours."""
        return self._qsd("qsd", rbd_node(conf, image), poll=False)


def rbd_node(conf: Path, image: str) -> str:
    """Returns QEMU's words for an image `POOL/IMAGE` of a cluster, without a cache."""
    pool, name = image.split("/")
    return f"rbd,pool={pool},image={name},conf={conf},cache.direct=on"


@contextlib.contextmanager
def running(make: list[Callable[[], Subject]]) -> Iterator[list[Subject]]:
    """Starts all subjects, each frozen once it is up, and ends them at the end."""
    subjects: list[Subject] = []
    try:
        for one in make:
            subjects.append(one())
            subjects[-1].freeze()
        yield subjects
    finally:
        for subject in subjects:
            subject.thaw()
            subject.process.terminate()
        for subject in subjects:
            try:
                subject.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                subject.process.kill()
                subject.process.wait()
