"""virtlun-holder by itself: under a service manager, with no target, with peers that are none.

Needs root and /dev/fuse.
"""

from __future__ import annotations

import array
import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.target import ROOT, Target, binary
from tests.support.wait import listens, serves, until
from tests.target.conftest import MakeTarget

pytestmark = pytest.mark.root
MIB = 1 << 20
DEADLINE_S = 60.0
FIRST_FD = 3
PEERS_MAX = 16
"""Connections of a holder at most."""
UID = 54321
"""Of an account by its number: nothing is made in /etc/passwd."""


class Manager:
    """What systemd is to a service: it is told of things, and keeps descriptors (sd_notify(3))."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._path = target.directory / "notify.sock"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._path))
        self._socket.settimeout(DEADLINE_S)
        self.stored: dict[str, int] = {}
        self.process: subprocess.Popen[bytes] | None = None

    def told(self, until: str) -> None:
        """Takes what it is told until that comes."""
        while True:
            text, fds = socket.recv_fds(self._socket, 4096, 4)[:2]
            words = dict(line.split("=", 1) for line in text.decode().splitlines())
            if words.get("FDSTORE") == "1":
                (self.stored[words["FDNAME"]],) = fds
            elif words.get("FDSTOREREMOVE") == "1":
                os.close(self.stored.pop(words["FDNAME"]))
            if until in text.decode():
                return

    def start(self) -> None:
        """Starts the service with what is stored."""
        names, fds = list(self.stored), list(self.stored.values())
        count = len(fds)

        def prepare() -> None:
            # To where none of them is yet, then to their places.
            moved = [os.dup2(fd, 500 + n) for n, fd in enumerate(fds)]
            for n, fd in enumerate(moved):
                os.dup2(fd, FIRST_FD + n)
                os.close(fd)

        command = [
            str(binary("virtlun-holder")),
            *("--socket", str(self.target.holder_socket)),
            *("--dir", str(self.target.export_dir)),
        ]
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(self._path),
            "LISTEN_FDS": str(count),
            "LISTEN_FDNAMES": ":".join(names),
        }
        # LISTEN_PID is the service's own.
        words = ["sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh", *command]
        self.process = subprocess.Popen(
            words,
            env=environment,
            preexec_fn=prepare,  # noqa: PLW1509
            pass_fds=range(FIRST_FD, FIRST_FD + count),
        )
        self.told("READY=1")

    def kill(self) -> None:
        """Kills the service; what is stored stays."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def end(self) -> None:
        """Kills the service and lets go of everything."""
        self.kill()
        for fd in self.stored.values():
            os.close(fd)
        self._socket.close()


@pytest.fixture
def manager(make_target: MakeTarget) -> Iterator[Manager]:
    """A service manager for the holder of a target that is still to be started."""
    made = Manager(make_target())
    yield made
    made.end()


def exported(target: Target) -> tuple[str, int]:
    """Makes an exported volume; returns its UUID and its file, open and written to."""
    target.make_lvstore(size=256 * MIB)
    uuid = target.rpc("bdev_lvol_create", lvol_name="v0", size_in_mib=16, lvs_name="lvs0")
    path = target.rpc("virtlun_export_create", bdev_name=uuid)["path"]
    node = os.open(path, os.O_RDWR)
    os.pwrite(node, b"a" * 4096, 0)
    return uuid, node


def test_holder_and_target_are_killed_and_the_service_manager_has_the_descriptors(
    manager: Manager,
) -> None:
    manager.start()
    target = manager.target
    target.start("--holder-socket", str(target.holder_socket))
    uuid, node = exported(target)
    manager.told(f"FDNAME=record-{uuid}")
    assert sorted(manager.stored) == [f"fuse-{uuid}", f"record-{uuid}"]
    target.kill9()
    manager.kill()
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(os.pread(node, 4, 0)))
    reader.start()
    manager.start()
    target.start("--holder-socket", str(target.holder_socket))
    reader.join(DEADLINE_S)
    assert found == [b"aaaa"]
    os.close(node)
    target.rpc("virtlun_export_delete", bdev_name=uuid)
    manager.told(f"FDSTOREREMOVE=1\nFDNAME=record-{uuid}")
    assert manager.stored == {}
    assert target.stop() == 0


def test_the_rights_of_its_unit_are_enough_for_a_target_of_another_user(
    make_target: MakeTarget, scratch: Path
) -> None:
    """As systemd starts both: the target may mount nothing, and the holder little else."""
    unit = (ROOT / "examples/systemd/virtlun-holder.service").read_text()
    (found,) = re.findall(r"^CapabilityBoundingSet=(.+)$", unit, re.MULTILINE)
    rights = ["-all", *(name.removeprefix("CAP_").lower() for name in found.split())]
    assert "NoNewPrivileges=yes" in unit.splitlines()
    scratch.chmod(0o711)
    # In a folder of root's, which the holder may write to without further rights.
    own, address = scratch / "run/export", scratch / "run/holder.sock"
    command = [
        *("setpriv", "--no-new-privs", f"--bounding-set={',+'.join(rights)}", "--"),
        *(str(binary("virtlun-holder")), "--socket", str(address), "--dir", str(own)),
        *("--user", str(UID)),
    ]
    target = make_target("--user", f"{UID}:{UID}", "--holder-socket", str(address))
    os.chown(target.directory, UID, UID)
    target.export_dir = own
    process = subprocess.Popen(command)
    try:
        serves(process, lambda: listens(address, socket.SOCK_SEQPACKET), "the holder", target.log)
        target.start()
        target.rpc("bdev_malloc_create", name="m", num_blocks=8192, block_size=512)
        path = target.rpc("virtlun_export_create", bdev_name="m")["path"]
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert re.search(r"^CapEff:\t0+200001$", status, re.MULTILINE), status
        node = os.open(path, os.O_RDWR)
        assert os.pwrite(node, b"a" * 4096, 0) == 4096
        target.kill9()
        read: list[bytes] = []
        reader = threading.Thread(target=lambda: read.append(os.pread(node, 4, 4096)))
        reader.start()
        target.start()
        reader.join(DEADLINE_S)
        assert read == [bytes(4)]
        os.close(node)
        target.rpc("virtlun_export_delete", bdev_name="m")
        assert target.stop() == 0
    finally:
        process.kill()
        process.wait()


def test_what_nobody_serves_is_given_up_in_the_end(make_target: MakeTarget) -> None:
    target = make_target()
    with target.holder("--wait", "1"):
        target.start("--holder-socket", str(target.holder_socket))
        _, node = exported(target)
        target.kill9()
        with pytest.raises(OSError):
            os.pread(node, 512, 0)
        os.close(node)
        # Whoever has it open is told first.
        until(lambda: not list(target.export_dir.iterdir()), "it is unmounted")
        until(lambda: "given up" in target.words(), "it is said")
        target.start("--holder-socket", str(target.holder_socket))
        (export,) = target.rpc("virtlun_export_list")
        assert Path(export["path"]).read_bytes()[:4] == b"aaaa"
        assert target.stop() == 0


def test_a_holder_that_a_target_has_started_ends_when_it_is_not_needed(target: Target) -> None:
    assert target.holder_socket.is_socket()
    assert target.stop() == 0
    until(lambda: not target.holder_socket.exists(), "the holder ends")


def test_nonsense_is_answered_and_ends_nobody(make_target: MakeTarget) -> None:
    target = make_target()
    with target.holder() as holder:
        answers = []
        for words in ("mount ../../etc", "eat", "take", "keep " + "0" * 36, "x" * 100_000, "list"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.settimeout(DEADLINE_S)
                peer.connect(str(target.holder_socket))
                peer.send(words.encode())
                answers.append(peer.recv(1 << 18).decode()[:6])
        assert answers == ["failed"] * 5 + ["ok"]
        uuid = "6f2b3a1e-7c38-4d1a-9b7e-1f0d6a5c4b32"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(str(target.holder_socket))
            one = array.array("i", [peer.fileno()])
            peer.sendmsg([f"keep {uuid}".encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, one)])
            assert peer.recv(4096).startswith(b"failed")
        assert holder.poll() is None
        holder.send_signal(signal.SIGTERM)
        assert holder.wait(DEADLINE_S) == 0


def switches(process: subprocess.Popen[bytes]) -> int:
    """How often a process has waited for something."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)
    assert found
    return int(found[1])


def test_a_holder_with_no_room_for_a_target_says_so_and_is_not_asked_without_end(
    make_target: MakeTarget,
) -> None:
    target = make_target()
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(target.holder())
        others = []
        for _ in range(PEERS_MAX):
            peer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            peer.connect(str(target.holder_socket))
            peer.send(b"list")
            assert peer.recv(1 << 18).startswith(b"ok")
            others.append(peer)
        target.start("--holder-socket", str(target.holder_socket), "--hold-sessions")
        until(lambda: "16 programs are connected" in target.words(), "the holder says why")
        until(lambda: "VMs lose their disks if this process is killed" in target.words(), "it too")
        before = switches(holder)
        time.sleep(1.0)
        # Ten attempts of two connections, each two at most; thousands before.
        assert switches(holder) - before < 200
        assert target.words().count("programs are connected") == 1
        others.pop().close()
        others.pop().close()
        until(lambda: target.rpc("virtlun_get_status")["holds_sessions"], "there is room again")


def test_it_ends_when_told_to_as_the_first_process_of_a_container(make_target: MakeTarget) -> None:
    """Such a process has no default action of a signal (pid_namespaces(7))."""
    target = make_target()
    with target.holder(before=("unshare", "--pid", "--fork", "--kill-child")) as outer:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        os.kill(int(children.read_text()), signal.SIGTERM)
        assert outer.wait(DEADLINE_S) == 0
