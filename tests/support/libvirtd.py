"""A libvirtd of one's own: private directories in a mount namespace, nothing of the host's used.

Runs the installed libvirtd with its shipped defaults where it can. What differs, and why:
- every libvirt directory is bind-mounted from the scratch directory, so several libvirtds can run
  side by side and none touches the user's; clients reach it by its socket under `scratch`;
- no cgroups (two libvirtds would fight over the same names) and no virtlogd;
- /dev/kvm is a node of group kvm, or libvirt would probe QEMU anew at each start where the host's
  is for root alone;
- what libvirt found out about QEMU is kept in the cache between runs: probing takes seconds.
"""

from __future__ import annotations

import contextlib
import grp
import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path
from typing import ClassVar

from tests.guest.emulator import PROGRAM, newer
from tests.support.cache import CACHE
from tests.support.wait import listens, serves

DIRECTORIES = {
    "etc": "/etc/libvirt",
    "run-libvirt": "/run/libvirt",
    "lib": "/var/lib/libvirt",
    "log": "/var/log/libvirt",
}

#: Where libvirtd and its QEMUs see the newer QEMU; the cache itself may be closed to their user.
NEWER_QEMU = Path("/var/lib/libvirt/newer-qemu") / PROGRAM

LIBVIRTD_CONF = """\
unix_sock_dir = "{run}"
unix_sock_group = "libvirt"
unix_sock_ro_perms = "0777"
unix_sock_rw_perms = "0770"
auth_unix_ro = "none"
auth_unix_rw = "none"
max_clients = {max_clients}
log_filters = "1:qemu.qemu_hook 3:*"
log_outputs = "2:file:{log}"
host_uuid = "{uuid}"
{extra}
"""

QEMU_CONF = """\
cgroup_controllers = []
stdio_handler = "file"
security_driver = "none"
"""


DEATH_S = 5.0
"""The time between the close of a dying process's sockets and its end, on a slow machine."""

CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")

CALLED = 'hostname "$0"; exec "$@"'
"""Of a shell: what it runs sees another hostname."""

HOST_UUID = "c0ffee00-0000-4000-8000-000000000001"


class LibvirtdDiedError(Exception):
    """libvirtd ended though no test ended it; the text says by what signal, and where it was."""


class Libvirtd:
    """A running private libvirtd; a context manager that ends it and its QEMUs.

    `scratch` must be short (socket paths) and readable by the user libvirt-qemu. Needs root.
    """

    #: Those of this process, for `virsh` to look at where it was cut off.
    _running: ClassVar[set[Libvirtd]] = set()

    def __init__(
        self,
        scratch: Path,
        *,
        config: str = "",
        host_uuid: str = HOST_UUID,
        max_clients: int = 200,
        hostname: str = "",
        network: str = "",
        kvm: bool = True,
    ) -> None:
        """Makes the namespace and starts libvirtd; `config` is added to libvirtd.conf.

        `hostname` is what it calls its host, by default what that calls itself, and `network` the
        network namespace that it and its QEMUs are in, by default that of this process. Without
        `kvm` clients that choose by capabilities, as virt-install does, find none: on some machines
        it is there, and no guest boots with it.
        """
        self.scratch = scratch
        joined = ("nsenter", f"--net=/run/netns/{network}") if network else ()
        called = ("unshare", "--uts", "sh", "-ec", CALLED, hostname) if hostname else ()
        self._in_its_own = (*joined, *called)
        self.run_dir = scratch / "run"
        self.log = scratch / "libvirtd.log"
        self.socket = self.run_dir / "libvirt-sock"
        self.socket_ro = self.run_dir / "libvirt-sock-ro"
        self.hooks = scratch / "etc/hooks"
        self._pid_file = scratch / "libvirtd.pid"
        scratch.mkdir(parents=True, exist_ok=True)
        scratch.chmod(0o755)
        self.run_dir.mkdir(exist_ok=True)
        for name, path in DIRECTORIES.items():
            (scratch / name).mkdir(exist_ok=True)
            Path(path).mkdir(exist_ok=True)  # only a place to mount on
        self.hooks.mkdir(exist_ok=True)
        (scratch / "etc/libvirtd.conf").write_text(
            LIBVIRTD_CONF.format(
                run=self.run_dir,
                log=self.log,
                max_clients=max_clients,
                uuid=host_uuid,
                extra=config,
            )
        )
        (scratch / "etc/qemu.conf").write_text(QEMU_CONF)
        caps = CACHE / "libvirt-capabilities" if kvm else scratch / "capabilities"
        caps.mkdir(parents=True, exist_ok=True)
        mounts = [f"mount --bind {scratch / name} {path}" for name, path in DIRECTORIES.items()]
        mounts.append(f"mount --bind {caps} /var/cache/libvirt")
        (scratch / "lib/newer-qemu").mkdir(exist_ok=True)
        mounts.append(f"mount --bind '{newer().path.parent}' {NEWER_QEMU.parent}")
        node = self._kvm_node(usable=kvm)
        if node is not None:
            mounts.append(f"mount --bind {node} /dev/kvm")
        mounts += ["echo ready", "exec sleep infinity"]
        self._namespace = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "slave", "sh", "-ec", "\n".join(mounts)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._namespace.stdout is not None
        ready = self._namespace.stdout.readline() == "ready\n"
        assert ready, "the mount namespace could not be made: run as root"
        self._daemon: subprocess.Popen[bytes] | None = None
        self._running.add(self)
        self.start()

    def _kvm_node(self, *, usable: bool) -> Path | None:
        """Makes what libvirtd has as /dev/kvm; None where this machine has none."""
        host, null = Path("/dev/kvm"), Path("/dev/null")
        if not host.exists():
            return None
        node = self.scratch / "kvm"
        # libvirtd's probing QEMU opens what its user may not; as /dev/null it is no KVM.
        device = (host if usable else null).stat().st_rdev
        mode = 0o660 if usable else 0
        if not node.exists():
            os.mknod(node, mode | stat.S_IFCHR, device)
        os.chown(node, 0, grp.getgrnam("kvm").gr_gid)
        node.chmod(mode)
        return node

    def command(self, *words: str) -> list[str]:
        """Returns the command line that runs `words` in libvirtd's mount namespace."""
        return ["nsenter", "--mount", "--target", str(self.mounts_of), *words]

    @property
    def mounts_of(self) -> int:
        """The id of a process in libvirtd's mount namespace."""
        return self._namespace.pid

    def start(self) -> None:
        """Starts libvirtd and waits for its sockets."""
        for path in (self.socket, self.socket_ro):
            path.unlink(missing_ok=True)
        with (self.scratch / "libvirtd.out").open("ab") as out:
            self._daemon = subprocess.Popen(
                # Its core goes to its working directory, unless core_pattern says otherwise.
                self.command(
                    *self._in_its_own,
                    *("env", f"--chdir={self.scratch}", "prlimit", "--core=unlimited", "--"),
                    *("/usr/sbin/libvirtd", "-p", str(self._pid_file)),
                ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        sockets = self.socket, self.socket_ro
        serves(self._daemon, lambda: all(map(listens, sockets)), "libvirtd's sockets", self.log)

    @property
    def pid(self) -> int:
        """libvirtd's process id."""
        assert self._daemon is not None
        return self._daemon.pid

    def kill(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends libvirtd (its QEMUs go on) and waits for it.

        Raises:
            LibvirtdDiedError: it had ended before.
        """
        self.check()
        daemon, self._daemon = self._daemon, None  # from here on it does not end by itself
        assert daemon is not None
        daemon.send_signal(how)
        try:
            daemon.wait(timeout=90)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
            raise

    def restart(self) -> None:
        """Ends libvirtd and starts it again, as an upgrade does; raises what `kill` does."""
        self.kill()
        self.start()

    def check(self, within_s: float = 0) -> None:
        """Raises LibvirtdDiedError where libvirtd ended, or does so now, and no test ended it."""
        daemon = self._daemon
        if daemon is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise LibvirtdDiedError(self._obituary(daemon.pid, daemon.wait(within_s)))

    @classmethod
    def check_all(cls, within_s: float = 0) -> None:
        """`check` of each that this process has started."""
        for one in cls._running:
            one.check(within_s)

    def _obituary(self, pid: int, status: int) -> str:
        """Returns what is known of a libvirtd that ended by itself: signal, words, backtrace."""
        by = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        said = "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
            for path in (self.scratch / "libvirtd.out", self.log)
            if path.exists()
        )
        cores = [path for name in ("core", f"core.{pid}") if (path := self.scratch / name).exists()]
        traced = "\n".join(map(backtrace, cores)) or (
            f"no core in {self.scratch}; core_pattern: {CORE_PATTERN.read_text().strip()}"
        )
        return f"libvirtd (pid {pid}) died {by}\n{said}\n{traced}"

    def qemu_log(self, domain: str) -> str:
        """Returns what libvirt logged of a domain's QEMUs: their command lines and their words."""
        return qemu_log(self.scratch, domain)

    def qemu_pid(self, domain: str) -> int | None:
        """Returns the process id of a running domain's QEMU; None where libvirt has noted none."""
        try:
            return int((self.scratch / f"run-libvirt/qemu/{domain}.pid").read_text())
        except (OSError, ValueError):
            return None

    def uri(self, socket: Path | None = None) -> str:
        """Returns the connection URI for `socket`, by default libvirtd's own."""
        return f"qemu+unix:///system?socket={socket or self.socket}"

    def stop(self) -> None:
        """Ends the QEMUs, libvirtd and the namespace.

        Raises:
            LibvirtdDiedError: libvirtd had ended before; the rest is ended nevertheless.
            subprocess.TimeoutExpired: libvirtd did not end in time and was killed.
        """
        self._running.discard(self)
        for pid_file in (self.scratch / "run-libvirt/qemu").glob("*.pid"):
            if pid_file.name == "driver.pid":
                continue  # libvirtd itself
            try:
                os.kill(int(pid_file.read_text()), signal.SIGKILL)
            except (OSError, ValueError):
                continue
        try:
            if self._daemon is not None:
                self.kill()
        finally:
            self._namespace.kill()
            self._namespace.wait()

    def __enter__(self) -> Libvirtd:
        """Returns the running libvirtd."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops it."""
        self.stop()


def backtrace(core: Path) -> str:
    """Returns the calls of all threads in libvirtd's `core`, the one that died first; needs gdb."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return f"{core}: no gdb here to read it"
    commands = ("-ex", "bt 40", "-ex", "thread apply all -q bt 25")
    done = subprocess.run(
        [gdb, "-batch", "-nx", *commands, "/usr/sbin/libvirtd", str(core)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return f"{core}:\n{done.stdout[-12000:] or done.stderr[-2000:]}"


class VirshError(Exception):
    """virsh failed; the text is what it said."""


def qemu_log(scratch: Path, domain: str) -> str:
    """Returns what the libvirtd of a scratch folder logged of a domain's QEMUs; "": of none."""
    path = scratch / f"log/qemu/{domain}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def virsh(uri: str, *words: str, deadline_s: float = 90.0, check: bool = True) -> str:
    """Runs the unmodified virsh against `uri`; returns its output, both streams.

    Raises:
        VirshError: a status other than 0 (with `check`), or no end within `deadline_s` seconds.
        LibvirtdDiedError: a status other than 0, and a libvirtd of these tests is there no more.
    """
    try:
        done = subprocess.run(
            [shutil.which("virsh") or "virsh", "-q", "-c", uri, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
            start_new_session=True,  # on a terminal, virsh starts polkit's agent, which talks too
        )
    except subprocess.TimeoutExpired as error:
        raise VirshError(f"virsh {' '.join(words)}: no end within {deadline_s:.0f} s") from error
    said = "\n".join(part for part in (done.stdout.strip(), done.stderr.strip()) if part)
    if done.returncode != 0:
        # Its sockets are closed a moment before its end can be seen.
        cut_off = any(text in said for text in ("end of file", "hangup", "refused", "reset"))
        Libvirtd.check_all(DEATH_S if cut_off else 0)
    if check and done.returncode != 0:
        raise VirshError(f"virsh {' '.join(words)}: {said}")
    return said
