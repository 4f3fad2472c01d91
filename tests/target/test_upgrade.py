"""A new program takes everything over from the one that serves; guests notice a pause."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pydataplane import inherited, supervise
from pydataplane.client import Client
from pydataplane.errors import TargetUnavailable
from tests.support.initiator import Initiator, connected
from tests.support.night import by_day
from tests.support.target import Target, TargetFailed, binary
from tests.support.wait import until
from tests.target.conftest import MakeTarget

UPGRADES = 10
MANY = 64
DEADLINE_S = 60.0
VERSION = 2


def disks(target: Target, count: int, size_in_mib: int = 4) -> list[str]:
    """Makes an lvstore with a volume for each of the controllers vm-0, vm-1, ...: returns them."""
    target.make_lvstore(size=(count * size_in_mib + 32) << 20)
    names = [f"vm-{n}" for n in range(count)]
    for n, name in enumerate(names):
        volume = target.rpc(
            "bdev_lvol_create", lvol_name=f"v{n}", size_in_mib=size_in_mib, lvs_name="lvs0"
        )
        target.attach(name, volume)
    return names


def sessions(target: Target) -> dict[str, Any]:
    """Returns the sessions of each controller: the same number means the same connection."""
    return {c["ctrlr"]: c["sessions"] for c in target.rpc("vhost_get_controllers")}


class Load:
    """Verified writes and reads of one guest, one after the other, until :meth:`check`."""

    def __init__(self, target: Target, name: str) -> None:
        """Connects and begins."""
        self._guest = Initiator(target.vhost_dir / name)
        self._guest.send("connect")
        self._guest.ready()
        self._stop = threading.Event()
        self._problem: BaseException | None = None
        self.rounds = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                at, data = self.rounds % 64 * 8, self.rounds.to_bytes(8, "big") * 512
                self._guest.write(at, data)
                before = max(self.rounds - 63, 0)
                expected = before.to_bytes(8, "big") * 512
                assert self._guest.read(before % 64 * 8, 8) == expected
                self.rounds += 1
        except BaseException as problem:
            self._problem = problem

    def wait(self, more: int = 20) -> None:
        """Waits until it did `more` rounds."""
        wanted = self.rounds + more
        until(lambda: self.rounds >= wanted or self._problem, "I/O goes on", every_s=0.002)
        assert self._problem is None, self._problem

    def check(self) -> None:
        """Ends it; nothing may have gone wrong."""
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert self._problem is None, self._problem

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._guest.kill()
        self._thread.join(DEADLINE_S)


class FullQueue:
    """Verified random I/O of one guest with many in flight, for some seconds; a context manager."""

    def __init__(self, target: Target, name: str, seconds: float, *, blk: bool = False) -> None:
        """Connects and begins."""
        command = [
            str(binary("virtlun-bench")),
            *("run", str(target.vhost_dir / name), "--rw", "randrw", "--bs", "4096"),
            *("--iodepth", "16", "--time", str(seconds), "--verify", "--json"),
            *(["--blk"] if blk else []),
        ]
        self._deadline_s = DEADLINE_S + seconds
        self._load = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def runs(self) -> bool:
        """Whether its time is not over."""
        return self._load.poll() is None

    def check(self) -> None:
        """Waits for its end; nothing may have gone wrong."""
        out, err = self._load.communicate(timeout=self._deadline_s)
        assert self._load.returncode == 0, err
        report = json.loads(out)
        assert (report["errors"], report["miscompares"]) == (0, 0), report
        assert report["ios"] > 0

    def __enter__(self) -> FullQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self._load.kill()
        self._load.wait()


def busy(target: Target) -> int:
    """Requests of all guests so far."""
    return sum(c["requests"] for c in target.rpc("virtlun_vhost_get_stats"))


def wait_for_io(target: Target, more: int = 50) -> None:
    """Waits until guests did `more` requests."""
    wanted = busy(target) + more
    until(lambda: busy(target) >= wanted, "I/O goes on", every_s=0.005)


def test_a_guest_and_an_rpc_client_go_on(target: Target) -> None:
    disks(target, 1)
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
    target.add_lun("vm-0", "m0", 1)
    status = target.rpc("virtlun_get_status")
    assert status["upgrade"] is None
    with (
        Initiator(target.vhost_dir / "vm-0") as guest,
        socket.socket(socket.AF_UNIX) as client,
    ):
        guest.send("connect")
        for number in (0, 1):
            guest.ready(number)
            guest.write(8, bytes([number + 1]) * 512, target=number)
        client.connect(str(target.rpc_socket))
        client.settimeout(DEADLINE_S)
        # Half a request before the upgrade, the rest after it.
        request = json.dumps({"id": 7, "method": "spdk_get_version"}).encode()
        client.sendall(request[:10])
        shown = sessions(target)
        target.upgrade()
        client.sendall(request[10:])
        assert json.loads(client.recv(65536))["id"] == 7
        now = target.rpc("virtlun_get_status")
        assert (now["pid"], now["upgrade"]["from_pid"]) == (target.pid, status["pid"])
        assert now["upgrade"]["pause_ms"] > 0
        assert sessions(target) == shown
        for number in (0, 1):
            # No unit attention: nothing happened to the disk.
            assert guest.read(8, 1, target=number) == bytes([number + 1]) * 512
        # What is configured is still recorded, and may change.
        target.rpc("bdev_null_create", name="n0", num_blocks=8, block_size=512)
        target.restart()
        assert {b["name"] for b in target.rpc("bdev_get_bdevs")} >= {"n0", "m0", "lvs0-base"}


@pytest.mark.nightly
def test_ten_upgrades_in_a_row_under_verified_io(target: Target) -> None:
    (name,) = disks(target, 1)
    left = UPGRADES
    # A machine may be so slow that the time of one load is not enough.
    while left:
        with FullQueue(target, name, seconds=15) as load:
            wait_for_io(target)
            shown = sessions(target)
            while left and load.runs():
                target.upgrade()
                left -= 1
                wanted, now = busy(target) + 50, sessions(target)
                # Later than both were asked for: it was connected then.
                assert not load.runs() or now == shown
                while load.runs() and busy(target) < wanted:
                    time.sleep(0.005)
            load.check()


@pytest.mark.parametrize("guests", [8, pytest.param(MANY, marks=pytest.mark.nightly)])
def test_ten_upgrades_under_verified_io_of_many_guests(target: Target, guests: int) -> None:
    names = disks(target, guests)
    with ExitStack() as stack:
        loads = [stack.enter_context(Load(target, name)) for name in names]
        shown = sessions(target)
        for _ in range(UPGRADES):
            for load in loads:
                load.wait(3)
            target.upgrade()
            assert sessions(target) == shown
        for load in loads:
            load.wait(3)
        for load in loads:
            load.check()
    pause_ms = target.rpc("virtlun_get_status")["upgrade"]["pause_ms"]
    print(f"the last pause of {len(names)} guests: {pause_ms:.0f} ms")


@pytest.mark.nightly
def test_many_controllers_and_counters_go_along(target: Target) -> None:
    names = disks(target, MANY)
    with ExitStack() as stack:
        guests = [stack.enter_context(Initiator(target.vhost_dir / name)) for name in names]
        for guest in guests:
            guest.send("connect")
            guest.ready()
        for turn in range(3):
            for n, guest in enumerate(guests):
                guest.write(turn, bytes([n, turn]) * 256)
            requests = busy(target)
            shown = sessions(target)
            target.upgrade()
            assert sessions(target) == shown
            assert busy(target) >= requests
            for n, guest in enumerate(guests):
                assert guest.read(turn, 1) == bytes([n, turn]) * 256


def exchange(stream: socket.socket, message: dict[str, Any] | None) -> dict[str, Any]:
    """Says `message`, if any, to a target as a new program does, and returns its answer."""
    if message is not None:
        text = json.dumps(message).encode()
        stream.sendall(struct.pack("=II", len(text), 0) + text)
    head = stream.recv(8, socket.MSG_WAITALL)
    if len(head) < 8:
        return {"message": "gone"}
    length, count = struct.unpack("=II", head)
    text = stream.recv(length, socket.MSG_WAITALL)
    while count:
        _, fds, _, _ = socket.recv_fds(stream, 1, 253)
        for fd in fds:
            os.close(fd)
        count -= len(fds)
    answer: dict[str, Any] = json.loads(text)
    return answer


HELLO = {"message": "hello", "oldest": VERSION, "newest": VERSION, "program": "test"}


def reach(step: str, path: Path) -> None:
    """Acts as a new program until `step`; ends there, as one that crashed."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(DEADLINE_S)
        stream.connect(str(path))
        if step == "connected":
            return
        assert exchange(stream, HELLO)["message"] == "welcome"
        if step == "welcome":
            return
        answer = exchange(stream, {"message": "ready"})
        for phase in ("outlook", "held"):
            while answer["message"] != "end":
                if step == f"{phase}: {answer['message']}":
                    return
                answer = exchange(stream, None)
            if step == f"{phase}: end":
                # Not ready, or not prepared.
                return
            if phase == "outlook":
                answer = exchange(stream, {"message": "expecting"})
        assert exchange(stream, {"message": "prepared"})["message"] == "go"
        if step == "go":
            return
    raise AssertionError(f"there is no step {step}")


STEPS = (
    *("connected", "welcome", "outlook: outlook", "outlook: controller", "outlook: end"),
    *("held: target", "held: controller", "held: end"),
)


def end_at(step: str, target: Target) -> int:
    """Runs a new program that ends at `step`, and returns its exit status."""
    code = (
        "import sys; from pathlib import Path; from tests.target.test_upgrade import reach;"
        "reach(sys.argv[1], Path(sys.argv[2]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, step, f"{target.rpc_socket}.upgrade"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    return process.wait(DEADLINE_S)


def upgrade_ends(target: Target, step: str) -> None:
    """Has a new program come up that ends at `step`, where the old one goes on."""
    assert end_at(step, target) in (0, -signal.SIGKILL)
    # It is waited for again when the old program serves.
    until(Path(f"{target.rpc_socket}.upgrade").exists, "a new program is waited for")


@by_day("welcome", "outlook: outlook", "held: target")
@pytest.mark.parametrize("step", STEPS)
def test_a_new_program_that_crashes_at_any_step_leaves_the_old_one_serving(
    target: Target, step: str
) -> None:
    names = disks(target, 2)
    with Load(target, names[0]) as first, Load(target, names[1]) as second:
        first.wait()
        shown = sessions(target)
        upgrade_ends(target, step)
        first.wait()
        assert sessions(target) == shown
        # And the next one succeeds.
        target.upgrade()
        second.wait()
        assert sessions(target) == shown
        first.check()
        second.check()


def test_a_new_program_that_dies_before_it_serves_is_a_failure_to_the_service_manager(
    target: Target,
) -> None:
    (name,) = disks(target, 1)
    with connected(target, name):
        assert end_at("go", target) == 0
        # Neither of them has the guests now: Restart=on-failure has to act.
        assert target.process is not None
        assert target.process.wait(DEADLINE_S) == 1
        target.process = None
        assert "does not say that it serves" in target.words()
        target.start()


@pytest.mark.nightly
def test_a_new_program_that_hangs_is_ended(target: Target) -> None:
    (name,) = disks(target, 1)
    with connected(target, name) as guest:
        code = (
            "import sys, signal; from pathlib import Path; import tests.target.test_upgrade as t;"
            "import socket; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
            "t.exchange(s, t.HELLO); a = t.exchange(s, {'message': 'ready'})\n"
            "while a['message'] != 'end': a = t.exchange(s, None)\n"
            "a = t.exchange(s, {'message': 'expecting'})\n"
            "while a['message'] != 'end': a = t.exchange(s, None)\n"
            "signal.pause()"
        )
        hung = subprocess.Popen(
            [sys.executable, "-c", code, f"{target.rpc_socket}.upgrade"],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert hung.wait(DEADLINE_S) == -signal.SIGKILL
        guest.write(0, b"x" * 512)
        assert guest.read(0, 1) == b"x" * 512
    assert "the upgrade is abandoned" in target.words()


def test_versions_that_do_not_meet_and_nonsense_are_refused(target: Target) -> None:
    path = f"{target.rpc_socket}.upgrade"
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(path)
        stream.settimeout(DEADLINE_S)
        answer = exchange(stream, {**HELLO, "oldest": VERSION + 1, "newest": VERSION + 2})
        assert answer["message"] == "failed"
        assert f"understands {VERSION + 1} to {VERSION + 2}" in answer["why"]
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(path)
        stream.settimeout(DEADLINE_S)
        stream.sendall(b"\xff" * 8)
        assert exchange(stream, None)["message"] == "gone"
    assert Path(path).stat().st_mode & 0o777 == 0o600
    target.upgrade()


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("vhost_dir", "start the new program with the same folder"),
        ("state_dir", "give --state-dir as it has"),
    ],
)
def test_a_new_program_that_does_not_fit_ends_and_the_old_one_goes_on(
    target: Target, scratch: Path, folder: str, why: str
) -> None:
    (name,) = disks(target, 1)
    with connected(target, name) as guest:
        right, other = getattr(target, folder), scratch / "other"
        other.mkdir()
        (other / "lock").touch()
        setattr(target, folder, other)
        with pytest.raises(TargetFailed):
            target.upgrade()
        setattr(target, folder, right)
        guest.write(0, b"x" * 512)
        assert why in target.words()
        assert guest.read(0, 1) == b"x" * 512
        target.upgrade()
        assert guest.read(0, 1) == b"x" * 512


@pytest.mark.nightly
def test_what_is_no_target_and_where_none_serves(target: Target, scratch: Path) -> None:
    with pytest.raises(TargetFailed):
        target.upgrade(program=("/bin/false",))
    target.rpc("virtlun_get_status")
    other = Target(scratch / "nobody")
    other.directory.mkdir()
    done = other.run("--take-over")
    assert done.returncode == 1
    assert "start one without --take-over" in done.stderr


def test_the_service_manager_is_told_of_the_new_process(
    make_target: MakeTarget, scratch: Path, monkeypatch: Any
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(scratch / "notify"))
        manager.settimeout(DEADLINE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(scratch / "notify"))
        target = make_target().start()
        assert manager.recv(100) == b"READY=1"
        target.upgrade()
        assert manager.recv(100) == f"MAINPID={target.pid}\nREADY=1".encode()
        assert target.stop() == 0
        assert manager.recv(100) == b"STOPPING=1"
    assert not Path(f"{target.rpc_socket}.upgrade").exists()


def test_rpc_calls_meanwhile_are_answered(target: Target) -> None:
    """Nobody is refused or cut off, whenever he connects."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            while not stop.is_set():
                Client(target.rpc_socket).call("virtlun_get_status")
        except BaseException as error:
            failed.append(error)

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    for _ in range(UPGRADES):
        target.upgrade()
    stop.set()
    for asker in askers:
        asker.join()
    assert failed == []


def test_the_command_keeps_the_options_and_says_why_it_failed(target: Target) -> None:
    given = inherited.options(target.rpc_socket, target.pid)
    assert given == target.command()[1:]
    with pytest.raises(TargetUnavailable, match="the old one serves on: status 1"):
        supervise.upgrade(target.rpc_socket, log=target.log, with_program=Path("/bin/false"))
    with pytest.raises(TargetUnavailable, match=r"the old one serves on: .*--no-such-option"):
        supervise.upgrade(target.rpc_socket, ["--no-such-option"], target.log, binary())
    old, target.process = target.process, None
    assert old is not None
    found = supervise.upgrade(target.rpc_socket, log=target.log, with_program=binary())
    assert old.wait(DEADLINE_S) == 0
    assert found["upgrade"] is not None and found["upgrade"]["from_pid"] == old.pid
    assert inherited.options(target.rpc_socket, found["pid"]) == given
    supervise.stop(target.rpc_socket)
