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

import grp
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.guest.emulator import PROGRAM, newer
from tests.guest.image import CACHE

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
max_clients = 200
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


HOST_UUID = "c0ffee00-0000-4000-8000-000000000001"


class LibvirtdError(Exception):
    """libvirtd did not start; the text ends with its log."""


class Libvirtd:
    """A running private libvirtd; a context manager that ends it and its QEMUs.

    `scratch` must be short (socket paths) and readable by the user libvirt-qemu. Needs root.
    """

    def __init__(
        self,
        scratch: Path,
        *,
        config: str = "",
        host_uuid: str = HOST_UUID,
    ) -> None:
        """Makes the namespace and starts libvirtd; `config` is added to libvirtd.conf."""
        self.scratch = scratch
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
            LIBVIRTD_CONF.format(run=self.run_dir, log=self.log, uuid=host_uuid, extra=config)
        )
        (scratch / "etc/qemu.conf").write_text(QEMU_CONF)
        caps = CACHE / "libvirt-capabilities"
        caps.mkdir(parents=True, exist_ok=True)
        mounts = [f"mount --bind {scratch / name} {path}" for name, path in DIRECTORIES.items()]
        mounts.append(f"mount --bind {caps} /var/cache/libvirt")
        (scratch / "lib/newer-qemu").mkdir(exist_ok=True)
        mounts.append(f"mount --bind '{newer().path.parent}' {NEWER_QEMU.parent}")
        kvm = self._kvm_node()
        if kvm is not None:
            mounts.append(f"mount --bind {kvm} /dev/kvm")
        mounts += ["echo ready", "exec sleep infinity"]
        self._namespace = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "slave", "sh", "-ec", "\n".join(mounts)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._namespace.stdout is not None
        if self._namespace.stdout.readline() != "ready\n":
            raise LibvirtdError("the mount namespace could not be made: run as root")
        self._daemon: subprocess.Popen[bytes] | None = None
        self.start()

    def _kvm_node(self) -> Path | None:
        host = Path("/dev/kvm")
        if not host.exists():
            return None
        node = self.scratch / "kvm"
        if not node.exists():
            os.mknod(node, 0o660 | 0o020000, host.stat().st_rdev)
        os.chown(node, 0, grp.getgrnam("kvm").gr_gid)
        node.chmod(0o660)
        return node

    def command(self, *words: str) -> list[str]:
        """Returns the command line that runs `words` in libvirtd's mount namespace."""
        return ["nsenter", "--mount", "--target", str(self._namespace.pid), *words]

    def start(self, deadline_s: float = 60.0) -> None:
        """Starts libvirtd and waits for its socket; LibvirtdError after `deadline_s` seconds."""
        for path in (self.socket, self.socket_ro):
            path.unlink(missing_ok=True)
        self._daemon = subprocess.Popen(
            self.command("/usr/sbin/libvirtd", "-p", str(self._pid_file)),
            stdin=subprocess.DEVNULL,
            stdout=(self.scratch / "libvirtd.out").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        end = time.monotonic() + deadline_s
        while not self.socket.exists():
            if self._daemon.poll() is not None or time.monotonic() > end:
                text = self.log.read_text(errors="replace") if self.log.exists() else ""
                raise LibvirtdError(f"libvirtd did not start:\n{text[-2000:]}")
            time.sleep(0.02)

    def kill(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends libvirtd (its QEMUs go on) and waits for it."""
        assert self._daemon is not None
        self._daemon.send_signal(how)
        self._daemon.wait(timeout=30)

    def restart(self) -> None:
        """Ends libvirtd and starts it again, as an upgrade does."""
        self.kill()
        self.start()

    def uri(self, socket: Path | None = None) -> str:
        """Returns the connection URI for `socket`, by default libvirtd's own."""
        return f"qemu+unix:///system?socket={socket or self.socket}"

    def stop(self) -> None:
        """Ends the QEMUs, libvirtd and the namespace."""
        for pid_file in (self.scratch / "run-libvirt/qemu").glob("*.pid"):
            try:
                os.kill(int(pid_file.read_text()), signal.SIGKILL)
            except (OSError, ValueError):
                continue
        if self._daemon is not None and self._daemon.poll() is None:
            try:
                self.kill()
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait()
        self._namespace.kill()
        self._namespace.wait()

    def __enter__(self) -> Libvirtd:
        """Returns the running libvirtd."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops it."""
        self.stop()


class VirshError(Exception):
    """virsh failed; the text is what it said."""


def virsh(uri: str, *words: str, deadline_s: float = 90.0, check: bool = True) -> str:
    """Runs the unmodified virsh against `uri`; returns its output, both streams.

    Raises:
        VirshError: a status other than 0 (with `check`), or no end within `deadline_s` seconds.
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
    if check and done.returncode != 0:
        raise VirshError(f"virsh {' '.join(words)}: {said}")
    return said
