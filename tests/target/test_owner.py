"""A controller belongs to one process: whoever else may open its socket is refused.

The processes are real ones of several users, all of the group that may open the sockets, as the
QEMUs of one host are.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from pydataplane.errors import RpcError
from tests.support.initiator import Initiator, Refused
from tests.support.target import ROOT, Target
from tests.support.wait import until
from tests.target.test_vhost_rpc import ask_features, connect, features

GROUP, OWNER, INTRUDER = 51000, 51001, 51002
SECRET = b"the first VM's secret".ljust(512, b"\0")
DEADLINE_S = 60.0
ROUNDS = 10

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of other users")


def process_of(user: int, path: Path) -> Initiator:
    """Returns a process of a user that may open the socket."""
    return Initiator(path, user=user, group=GROUP)


@pytest.fixture
def vm(target: Target, scratch: Path) -> Path:
    """The socket of a controller with a disk that has the secret, which the group may open."""
    for folder in (scratch, target.directory, target.vhost_dir):
        folder.chmod(0o755)
    target.make_lvstore()
    target.rpc("bdev_lvol_create", lvol_name="v0", size_in_mib=1, lvs_name="lvs0")
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1", socket_gid=GROUP)
    target.add_lun("vm-1", "lvs0/v0")
    return target.vhost_dir / "vm-1"


@pytest.fixture
def owner(vm: Path) -> Iterator[Initiator]:
    """The VM: connected, with the secret written."""
    with process_of(OWNER, vm) as guest:
        guest.send("connect")
        guest.ready()
        guest.write(0, SECRET)
        guest.cdb(bytes([0x35, *bytes(9)]))
        yield guest


def shown(target: Target) -> dict[str, Any]:
    """Returns the controller as the target shows it."""
    (controller,) = target.rpc("vhost_get_controllers", name="vm-1")
    return dict(controller)


def is_refused(comer: Initiator) -> bool:
    """Tries to connect, and to read the secret."""
    try:
        comer.send("connect")
        comer.ready()
    except Refused:
        return True
    assert comer.read(0, 1) == SECRET
    return False


@needs_root
def test_nobody_else_comes_first_after_a_crash_of_the_target(
    target: Target, vm: Path, owner: Initiator
) -> None:
    with process_of(INTRUDER, vm) as intruder, process_of(OWNER, vm) as sibling:
        for _ in range(ROUNDS):
            target.crash()
            # The owner gives them all the time that they want.
            for stranger in (intruder, sibling):
                assert is_refused(stranger)
                assert is_refused(stranger)
            owner.until_connected()
            owner.ready()
            assert owner.read(0, 1) == SECRET
            assert is_refused(intruder)
        for stranger, user in ((intruder, INTRUDER), (sibling, OWNER)):
            named = f"refused process {stranger.pid} (virtlun-bench) of user {user}"
            assert named in target.words()
        assert f"belongs to process {owner.pid} (virtlun-bench) of user {OWNER}" in target.words()
    assert shown(target)["owner"]["pid"] == owner.pid


@needs_root
def test_connections_that_are_held_never_lock_the_owner_out(target: Target, vm: Path) -> None:
    with process_of(OWNER, vm) as guest, contextlib.ExitStack() as held:
        guest.until_connected("connect")
        target.crash()
        # The test's own process is another one. Its connections fill the backlog, too.
        for _ in range(ROUNDS):
            for _ in range(60):
                peer = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                peer.setblocking(False)
                with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                    peer.connect(str(vm))
                    ask_features(peer)
            guest.send("disconnect")
            guest.until_connected()
            guest.ready()
    assert target.words().count("refused process") < 6 * ROUNDS, "strangers fill the log"


@needs_root
def test_a_vm_that_is_started_again_has_its_disks(
    target: Target, vm: Path, owner: Initiator
) -> None:
    assert shown(target)["owner"] == {
        "pid": owner.pid,
        "uid": OWNER,
        "start_time": shown(target)["owner"]["start_time"],
        "command": "virtlun-bench",
    }
    owner.kill()
    assert shown(target)["owner"] is None
    with process_of(INTRUDER, vm) as again:
        again.until_connected("connect")
        again.ready()
        assert again.read(0, 1) == SECRET
        assert shown(target)["owner"]["pid"] == again.pid
        target.kill9()
        again.kill()
        target.start()
    # It ended while the target was away.
    assert shown(target)["owner"] is None
    with process_of(OWNER, vm) as last:
        last.until_connected("connect")
        last.ready()


@needs_root
def test_only_the_named_user_or_root_may_be_first(target: Target, vm: Path) -> None:
    name = partial(target.rpc, "virtlun_controller_set_owner", ctrlr="vm-1")
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-2", owner_uid=OWNER)
    (made,) = target.rpc("vhost_get_controllers", name="vm-2")
    assert (made["owner_uid"], made["owner"]) == (OWNER, None)
    assert name(uid=OWNER) is True
    for restart in (False, True):
        if restart:
            target.crash()
        assert (shown(target)["owner_uid"], shown(target)["owner"]) == (OWNER, None)
        with process_of(INTRUDER, vm) as intruder:
            assert is_refused(intruder)
        with process_of(OWNER, vm) as guest:
            guest.until_connected("connect")
            guest.ready()
        with Initiator(vm) as root:
            root.until_connected("connect")
            root.ready()
            with process_of(OWNER, vm) as guest:
                assert is_refused(guest)
    assert f"only processes of user {OWNER} may be the first" in target.words()
    assert name() is True
    assert shown(target)["owner_uid"] is None


@needs_root
def test_a_process_that_was_there_before_the_vm_is_not_the_vm(target: Target, vm: Path) -> None:
    with process_of(INTRUDER, vm) as waits:
        time.sleep(0.05)
        target.rpc("virtlun_controller_set_owner", ctrlr="vm-1", fresh=True)
        assert is_refused(waits)
        target.crash()
        assert is_refused(waits)
        with process_of(INTRUDER, vm) as started:
            started.until_connected("connect")
            started.ready()
    assert "started before the VM" in target.words()


@pytest.mark.nightly
@needs_root
def test_whoever_is_named_takes_it_from_whoever_came_first(
    target: Target, vm: Path, owner: Initiator
) -> None:
    name = partial(target.rpc, "virtlun_controller_set_owner", ctrlr="vm-1")
    with process_of(INTRUDER, vm) as other:
        name(pid=other.pid)
        assert shown(target)["owner"]["pid"] == other.pid
        with pytest.raises(Refused):
            owner.ready()
        assert is_refused(owner)
        other.until_connected("connect")
        other.ready()
        # Named again, it stays connected.
        name(pid=other.pid)
        other.read(0, 1)
        # Nobody: it may come again.
        name()
        with pytest.raises(Refused):
            other.read(0, 1)
        other.until_connected()
        other.ready()
    error = target.fails("virtlun_controller_set_owner", ctrlr="vm-1", pid=other.pid)
    assert isinstance(error, RpcError)
    assert (error.code, f"process {other.pid} cannot be named" in error.message) == (-2, True)
    error = target.fails("virtlun_controller_set_owner", ctrlr="none")
    assert isinstance(error, RpcError)
    assert error.code == -19


@needs_root
def test_it_belongs_to_the_same_process_after_an_upgrade(
    target: Target, vm: Path, owner: Initiator
) -> None:
    first = shown(target)["owner"]
    assert first["pid"] == owner.pid
    for _ in range(2):
        target.upgrade()
        assert shown(target)["owner"] == first
        assert owner.read(0, 1) == SECRET
        with process_of(INTRUDER, vm) as intruder:
            assert is_refused(intruder)
    # One that is named and was not there yet.
    with process_of(INTRUDER, vm) as other:
        target.rpc("virtlun_controller_set_owner", ctrlr="vm-1", pid=other.pid)
        target.upgrade()
        assert shown(target)["owner"]["pid"] == other.pid
        assert is_refused(owner)
        other.until_connected("connect")
        other.ready()
        target.upgrade()
        assert is_refused(owner)
        other.read(0, 1)
    # It has ended, which a target that was not there when it came sees, too.
    owner.until_connected("connect")
    owner.ready()
    assert shown(target)["owner"]["pid"] == owner.pid


def test_who_only_looks_owns_nothing(target: Target) -> None:
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    path = target.vhost_dir / "vm-1"
    with connect(path) as silent:
        with Initiator(path) as guest:
            guest.until_connected("connect")
            assert shown(target)["owner"]["pid"] == guest.pid
        assert silent.recv(1) == b""


def test_an_owner_that_cannot_be_recorded_is_not_served(target: Target) -> None:
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    path = target.vhost_dir / "vm-1"
    in_the_way = target.state_dir / "owners.json.new"
    in_the_way.mkdir()
    with connect(path) as peer:
        with contextlib.suppress(BrokenPipeError):
            ask_features(peer)
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""
    assert shown(target)["owner"] is None
    until(lambda: "cannot be recorded" in target.words(), "a sentence in the log")
    in_the_way.rmdir()
    with connect(path) as peer:
        ask_features(peer)
        features(peer)
        record = json.loads((target.state_dir / "owners.json").read_text())
        validate(record, json.loads((ROOT / "schemas/config/owners.json").read_text()))
        (recorded,) = [call["params"] for call in record["owners"]]
        assert recorded["process"]["pid"] == os.getpid() == shown(target)["owner"]["pid"]
    # With the next change it stands in the configuration.
    target.rpc("bdev_null_create", name="n0", num_blocks=8, block_size=512)
    assert recorded in [call["params"] for call in target.configuration()["vhost_scsi"]]
    assert not (target.state_dir / "owners.json").exists()
    target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    assert target.configuration()["vhost_scsi"] == []


class Contained(Target):
    """A target in a PID namespace of its own, in which processes of ours have no number."""

    def command(self, *options: str) -> list[str]:
        """Returns the command line."""
        return ["unshare", "--pid", "--fork", *super().command(*options)]

    def signal(self, number: signal.Signals) -> int:
        """Sends a signal to the target, which unshare waits for."""
        process, self.process = self.process, None
        if process is None:
            return 0
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        for pid in children.split():
            os.kill(int(pid), number)
        return process.wait(DEADLINE_S)


@needs_root
def test_an_owner_of_another_pid_namespace_is_known_again_after_a_crash(scratch: Path) -> None:
    directory = scratch / "0"
    directory.mkdir()
    target = Contained(directory).start()
    try:
        for folder in (scratch, directory, target.vhost_dir):
            folder.chmod(0o755)
        target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-1", socket_gid=GROUP)
        target.add_lun("vm-1", "m0")
        vm = target.vhost_dir / "vm-1"
        with process_of(OWNER, vm) as first:
            first.until_connected("connect")
            first.ready()
            assert shown(target)["owner"]["pid"] == 0
            target.crash()
        with process_of(OWNER, vm) as second, process_of(INTRUDER, vm) as other:
            # Nobody can tell that it is not the first one.
            second.until_connected("connect")
            second.ready()
            with pytest.raises(Refused):
                other.send("connect")
                other.ready()
            second.kill()
            # But that it has ended is seen.
            other.until_connected("connect")
            other.ready()
    finally:
        target.kill9()
        target.end_holder()


def done(target: Target) -> dict[str, int]:
    """Returns what the target counted of the one LUN."""
    (controller,) = target.rpc("virtlun_vhost_get_stats", name="vm-1", scsi_target_num=0)
    (unit,) = controller["targets"]
    return {name: unit[name] for name in ("writes", "write_bytes", "flushes", "reads")}


@needs_root
def test_what_a_unit_did_is_counted_for_each_process_anew(
    target: Target, vm: Path, owner: Initiator
) -> None:
    """As QEMU counts it: libvirt's statistics of a disk begin again with its VM."""
    assert done(target) == {"writes": 1, "write_bytes": 512, "flushes": 1, "reads": 0}
    # Its own connection anew is the same VM.
    owner.send("reconnect")
    owner.ready()
    assert owner.read(0, 1) == SECRET
    assert done(target) == {"writes": 1, "write_bytes": 512, "flushes": 1, "reads": 1}
    owner.__exit__(None, None, None)
    with process_of(OWNER, vm) as following:
        following.until_connected("connect")
        following.ready()
        assert set(done(target).values()) == {0}
        following.write(0, SECRET * 2)
        assert done(target) == {"writes": 1, "write_bytes": 1024, "flushes": 0, "reads": 0}
        target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
        target.add_lun("vm-1", "lvs0/v0")
        assert set(done(target).values()) == {0}
        following.ready()
        following.write(0, SECRET)
    # Also where it is named before it comes.
    with process_of(OWNER, vm) as named:
        target.rpc("virtlun_controller_set_owner", ctrlr="vm-1", pid=named.pid)
        named.until_connected("connect")
        named.ready()
        assert set(done(target).values()) == {0}
    (none,) = target.rpc("virtlun_vhost_get_stats", name="vm-1", scsi_target_num=1)
    assert none["targets"] == []
