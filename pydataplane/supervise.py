"""Starts, asks and stops a target process on this host."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from pydataplane import inherited, methods, service
from pydataplane.client import DEFAULT_SOCKET, Client
from pydataplane.errors import TargetError, TargetForbidden, TargetUnavailable

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 30.0
# Longer than the old target waits for a new one; see its help.
UPGRADE_DEADLINE_S = 120.0


@dataclass(frozen=True)
class TargetPaths:
    """Where a target keeps what it needs; the defaults are the packaged ones."""

    rpc_socket: Path = DEFAULT_SOCKET
    vhost_dir: Path = Path("/run/virtlun/vhost")
    state_dir: Path = Path("/var/lib/virtlun/target")
    log: Path = Path("/var/log/virtlun/target.log")
    name: str | None = None
    """Of one of several targets of a host."""

    @classmethod
    def of(cls, name: str | None) -> TargetPaths:
        """Returns the packaged paths of the target `name`, as `virtlun-target --name` has them."""
        if name is None:
            return cls()
        run = DEFAULT_SOCKET.parent / name
        return cls(
            run / "target.sock",
            run / "vhost",
            Path("/var/lib/virtlun") / name / "target",
            Path(f"/var/log/virtlun/target-{name}.log"),
            name,
        )


def program(name: str = "virtlun-target") -> Path:
    """Returns the path of one of our programs: beside this Python, else on PATH.

    Raises:
        TargetUnavailable: it is not installed.
    """
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return beside
    found = shutil.which(name)
    if found is None:
        raise TargetUnavailable(f"{name} is not installed: run `pip install .` or `make build`")
    return Path(found)


def start(paths: TargetPaths, options: Sequence[str] = ()) -> int:
    """Starts a target in the background and waits until it answers; returns its process id.

    `options` are further ones of `virtlun-target`. One that runs already is left as it is.

    Raises:
        TargetUnavailable: it ended at once or did not answer within START_DEADLINE_S seconds; the
            text carries its last words.
    """
    try:
        return int(status(paths.rpc_socket)["pid"])
    except TargetForbidden:
        raise
    except TargetUnavailable:
        pass
    # The others it makes itself, for the user that it becomes.
    paths.log.parent.mkdir(parents=True, exist_ok=True)
    with paths.log.open("ab") as log:
        begin = log.tell()
        process = subprocess.Popen(
            [
                str(program()),
                *(("--name", paths.name) if paths.name else ()),
                *("--rpc-socket", str(paths.rpc_socket)),
                *("--vhost-dir", str(paths.vhost_dir)),
                *("--state-dir", str(paths.state_dir)),
                *options,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    end = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < end:
        if process.poll() is not None:
            words = paths.log.read_bytes()[begin:].decode(errors="replace").strip()
            raise TargetUnavailable(
                f"the target did not start: {_reason(words) or f'status {process.returncode}'}"
            )
        try:
            status(paths.rpc_socket)
        except TargetError:
            time.sleep(0.02)
            continue
        return process.pid
    process.kill()
    process.wait()
    raise TargetUnavailable(
        f"the target did not answer within {START_DEADLINE_S:.0f} s: see {paths.log}"
    )


def _reason(words: str) -> str:
    """Returns the line of a program's last words that says why it ended."""
    lines = words.splitlines()
    said = [line for line in lines if line.startswith(("error: ", "virtlun-target: "))]
    return (said or lines or [""])[-1]


def status(rpc_socket: Path = DEFAULT_SOCKET) -> methods.Status:
    """Returns `virtlun_get_status` of the target on `rpc_socket`; TargetUnavailable if none."""
    return Client(rpc_socket, timeout_s=5.0).call("virtlun_get_status")


def upgrade(
    rpc_socket: Path = DEFAULT_SOCKET,
    options: Sequence[str] = (),
    log: Path | None = None,
    with_program: Path | None = None,
) -> methods.Status:
    """Has a new target take everything over from the one on `rpc_socket`; guests notice a pause.

    It gets the options that the old one has, of which `options` replace those of the same name;
    writes its log to `log`, or where this process writes its own; and is `with_program`, or the
    one that is installed. Returns its `virtlun_get_status`, which tells the pause.

    Raises:
        TargetUnavailable: none runs, or the new one did not come up within UPGRADE_DEADLINE_S
            seconds: then the old one serves on. The text carries the new one's last words. Or it
            is a systemd service, of which one that is started from here would be no part.
    """
    old = int(status(rpc_socket)["pid"])
    if unit := service.main_of(old):
        raise TargetUnavailable(
            f"the target (pid {old}) is systemd's {unit}, which would take it for ended: upgrade "
            f"it with `systemctl reload {unit}`; other options belong into its ExecStart="
        )
    words = inherited.options(rpc_socket, old, options)
    command = [str(with_program or program()), *words, "--take-over"]
    begin = log.stat().st_size if log and log.exists() else 0
    with log.open("ab") if log else nullcontext() as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    end = time.monotonic() + UPGRADE_DEADLINE_S
    while time.monotonic() < end:
        if process.poll() is not None:
            said = log.read_bytes()[begin:].decode(errors="replace").strip() if log else ""
            why = _reason(said) or f"status {process.returncode}; see its log"
            raise TargetUnavailable(
                f"the new target did not take over, and the old one serves on: {why}"
            )
        with suppress(TargetError):
            found = status(rpc_socket)
            if found["pid"] == process.pid:
                return found
        time.sleep(0.02)
    process.kill()
    process.wait()
    raise TargetUnavailable(
        f"the new target did not take over within {UPGRADE_DEADLINE_S:.0f} s, and was ended; the "
        "old one serves on"
    )


def stop(rpc_socket: Path = DEFAULT_SOCKET) -> None:
    """Stops the target on `rpc_socket` in order and waits for its end, STOP_DEADLINE_S at most.

    Raises:
        TargetUnavailable: none runs, or it did not end in time.
    """
    pid = int(status(rpc_socket)["pid"])
    Client(rpc_socket).call("spdk_kill_instance", sig_name="SIGTERM")
    end = time.monotonic() + STOP_DEADLINE_S
    while _alive(pid):
        if time.monotonic() > end:
            raise TargetUnavailable(
                f"the target (pid {pid}) did not end within {STOP_DEADLINE_S:.0f} s"
            )
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    """Whether a process runs (one that ended and waits for its parent does not).

    Any thread of it: after the first one has ended another may still end its I/O, and until then
    the process has its files and their locks.
    """
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                state = (thread / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state not in "ZX":
                    return True
    return False


def kill(rpc_socket: Path = DEFAULT_SOCKET) -> None:
    """Kills the target on `rpc_socket` (SIGKILL) and waits for its end, for crash tests."""
    pid = int(status(rpc_socket)["pid"])
    os.kill(pid, signal.SIGKILL)
    while _alive(pid):
        time.sleep(0.005)
