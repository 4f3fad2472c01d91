"""A box for a whole node: its own mounts, processes, network, host name and control groups.

Everything of a cluster runs in it. Its first process reaps what is left to it; when that one is
killed the kernel ends every other (pid_namespaces(7)) and drops every mount, whatever state they
are in. So a test that fails anywhere leaves nothing but loop devices, which are the kernel's own:
`Sandbox.close` detaches those whose file was in the box, and no other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.support.frozen import freeze
from tests.support.wait import until

HOST_NAME = "node1"
#: The nodes' network; each node adds its address.
BRIDGE = "node0"
#: Of the service `kubernetes`, the first of the cluster's services.
SERVICE_ADDRESS = "10.96.0.1"
STOP_DEADLINE_S = 90.0
CGROUPS = Path("/sys/fs/cgroup")

#: The reaper; it is also the image that a pod's sandbox runs (`images.py`).
PAUSE_C = """\
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int number) { (void)number; _exit(0); }
static void reap(int number) { (void)number; while (waitpid(-1, 0, WNOHANG) > 0) {} }
int main(void) {
    signal(SIGINT, end);
    signal(SIGTERM, end);
    signal(SIGCHLD, reap);
    for (;;) pause();
}
"""

#: Where a migrated machine is received (LibvirtDirectMigrationPort of pkg/virt-handler).
#: No connection of another program may have it as its own: QEMU then listens with IPv6 alone.
MIGRATION_PORT = 49152

#: What hides the host's directories that Kubernetes' programs write to without asking, and what
#: other tests have mounted just now: a loop device of theirs may become one of ours. One that they
#: unmount meanwhile is gone here, too.
#: No name server can be reached. Who asks the machine's waits for seconds, as libvirt does at each
#: start of a domain for its host's name.
SETUP = """\
hostname {name}
for place in $(awk '$5 ~ "^/(var/)?tmp/" {{print $5}}' /proc/self/mountinfo | tac); do
    umount --lazy "$place" || ! mountpoint --quiet "$place"
done
mount --make-rshared /
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/lock
mkdir -p {scratch}/var-log {scratch}/var-lib
mount --bind {scratch}/var-log /var/log
mount --bind {scratch}/var-lib /var/lib
echo '127.0.0.1 localhost {name}' > {scratch}/hosts
echo '# nobody to ask' > {scratch}/resolv.conf
mount --bind {scratch}/hosts /etc/hosts
mount --bind {scratch}/resolv.conf /etc/resolv.conf
ip link set lo up
echo {port} > /proc/sys/net/ipv4/ip_local_reserved_ports
ip addr add {service}/32 dev lo
ip link add {bridge} type bridge
ip link set {bridge} up
ip route add default dev {bridge}
"""

T = TypeVar("T")


class SandboxError(Exception):
    """The box, or a program in it, did not do what it should; the text has the program's words."""


@dataclass
class Process:
    """A program in the box. `process` is nsenter's, which ends with the program's own status."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def inner(self) -> int | None:
        """Returns the program's process id outside the box, or None where it ended."""
        outer = self.process.pid
        with contextlib.suppress(OSError, IndexError):
            return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
        return None

    def running(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the program; nothing where it ended."""
        pid = self.inner()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGCONT:
            self.process.send_signal(number)  # nsenter stops when its program does

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stops its clock for the duration of a block: it neither answers nor ends."""
        pid = self.inner()
        assert pid is not None, f"{self.name} has ended"
        freeze(pid)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends it, with SIGKILL in the end, and returns its exit status (negative: the signal)."""
        self.send(number)
        try:
            return self.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            return self.process.wait(STOP_DEADLINE_S)

    def words(self, last: int = 3000) -> str:
        """Returns the last characters of its log."""
        return self.log.read_text(errors="replace")[-last:] if self.log.exists() else ""


class Sandbox:
    """A running box; a context manager. Needs root; `scratch` is on a real file system."""

    def __init__(self, scratch: Path) -> None:
        """Makes the namespaces."""
        if os.geteuid() != 0:
            raise SandboxError("a cluster needs namespaces, mounts and loop devices: run as root")
        self.scratch = scratch
        self.logs = scratch / "logs"
        self.cgroup = f"virtlun-{scratch.name}"
        self.processes: list[Process] = []
        #: Names of files whose loop devices are ours, even when their mount and path are gone.
        self.files: set[str] = set()
        self.logs.mkdir(parents=True, exist_ok=True)
        self.pause = compile_pause(scratch)
        self._first = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "unshare", "--kill-child", "--fork"),
                *("--mount", "--pid", "--net", "--uts", "--ipc", "--mount-proc"),
                *("--propagation", "slave", str(self.pause)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=(self.logs / "box.log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        box = Process("box", self._first, self.logs / "box.log")
        self._pid = until(box.inner, "the box's first process", deadline_s=90)
        self._hierarchies = self._make_cgroups()
        try:
            # unshare mounts /proc last, before it becomes the first program
            target = Path(f"/proc/{self._pid}/exe")
            until(lambda: target.readlink().name == self.pause.name, "the box's mounts")
            self.run(
                *(
                    "sh",
                    "-ec",
                    SETUP.format(
                        name=HOST_NAME,
                        scratch=scratch,
                        bridge=BRIDGE,
                        service=SERVICE_ADDRESS,
                        port=MIGRATION_PORT,
                    ),
                ),
            )
        except BaseException:
            self.close()
            raise

    def _make_cgroups(self) -> list[Path]:
        """Makes the node's control group in each hierarchy of version 1, or that of version 2."""
        if (CGROUPS / "cgroup.controllers").exists():
            roots = [CGROUPS]
        else:
            roots = [path for path in CGROUPS.iterdir() if (path / "cgroup.procs").exists()]
            roots = sorted({path.resolve() for path in roots} - {CGROUPS / "unified"})
        groups = [root / self.cgroup for root in roots]
        for group in groups:
            group.mkdir(exist_ok=True)
        return groups

    def command(self, *words: str | Path) -> list[str]:
        """Returns the command line that runs `words` in the box."""
        box = ["nsenter", "--target", str(self._pid), "--mount", "--pid", "--net", "--uts", "--ipc"]
        return [*box, "--", *(str(word) for word in words)]

    def run(
        self,
        *words: str | Path,
        stdin: str = "",
        deadline_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program in the box to its end; SandboxError with what it said where it failed."""
        done = subprocess.run(
            self.command(*words),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
            env={**os.environ, **(env or {})},
        )
        if check and done.returncode != 0:
            said = (done.stderr or done.stdout)[-3000:]
            raise SandboxError(f"{' '.join(str(word) for word in words)[:300]}: {said}")
        return done

    def spawn(self, name: str, *words: str | Path, env: Mapping[str, str] | None = None) -> Process:
        """Starts a program in the box with a log of its own (appended to); it ends with the box."""
        log = self.logs / f"{name}.log"
        process = subprocess.Popen(
            self.command(*words),
            stdin=subprocess.DEVNULL,
            stdout=log.open("ab"),
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        started = Process(name, process, log)
        self.processes.append(started)
        return started

    def mounts(self, under: Path | str) -> list[str]:
        """Returns the places in the box, below a directory, where something is mounted."""
        lines = Path(f"/proc/{self._pid}/mountinfo").read_text().splitlines()
        places = (line.split()[4] for line in lines)
        return sorted(place for place in places if Path(place).is_relative_to(under))

    def loops(self) -> dict[str, str]:
        """Returns the machine's loop devices whose file is of this box, as path of the file."""
        ours = {}
        for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
            with contextlib.suppress(OSError):  # it went away meanwhile
                file = entry.read_text().strip().removesuffix(" (deleted)")
                if Path(file).is_relative_to(self.scratch) or Path(file).name in self.files:
                    ours[f"/dev/{entry.parts[3]}"] = file
        return ours

    def close(self) -> None:
        """Ends every process in the box; its mounts, loop devices and control groups go too."""
        loops = self.loops()  # while their files still have a whole path
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._first.wait(STOP_DEADLINE_S)
        for process in self.processes:
            process.process.send_signal(signal.SIGCONT)
            process.process.wait(STOP_DEADLINE_S)
        for device in {**loops, **self.loops()}:
            subprocess.run(["losetup", "--detach", device], check=False, capture_output=True)
        for group in self._hierarchies:
            until(partial(remove_cgroup, group), f"an empty {group}", deadline_s=90)

    def __enter__(self) -> Sandbox:
        """Returns the box."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        self.close()


def remove_cgroup(group: Path) -> bool:
    """Removes a control group and those in it, deepest first; False while one has processes."""
    try:
        for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
            folder.rmdir()
        if group.exists():
            group.rmdir()
    except OSError:
        return False
    return True


def compile_pause(directory: Path) -> Path:
    """Compiles the reaper, statically, into a directory."""
    program = directory / "pause"
    if not program.exists():
        (directory / "pause.c").write_text(PAUSE_C)
        compiler = shutil.which("cc") or "gcc"
        subprocess.run(
            [compiler, "-static", "-Os", "-s", "-o", str(program), str(directory / "pause.c")],
            check=True,
        )
    return program
