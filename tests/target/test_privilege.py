"""What the target may still do: its user, its capabilities, its system calls."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pydataplane import inherited, supervise
from pydataplane.client import Client
from pydataplane.errors import RpcError, TargetUnavailable
from tests.support import tracer
from tests.support.initiator import connected
from tests.support.target import SANDBOX_REFUSED, Target, TargetFailed, binary
from tests.support.tracer import Tracer
from tests.support.wait import serves, until
from tests.target.conftest import MakeTarget

UID, GID, SOCKET_GID = 54321, 54322, 54323
"""An account by numbers: nothing is made in /etc/passwd."""
NONE = "0000000000000000"
WRITE_10, READ_10 = 0x2A, 0x28
EACCES = -13
PPOLL, GETPGID = 271, 121
"""System calls on x86-64: one that the target makes, and a harmless one that it never does."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def tasks(pid: int) -> Iterator[dict[str, str]]:
    """Yields the fields of proc_pid_status(5) of each thread."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        yield {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def make_user_target(make_target: MakeTarget, *options: str) -> Target:
    """Prepares a target that becomes the account; what it works in is the account's to enter."""
    target = make_target("--user", f"{UID}:{GID}", "--socket-group", str(SOCKET_GID), *options)
    target.directory.parent.chmod(0o711)
    os.chown(target.directory, UID, GID)
    return target


def write_and_read(target: Target, ctrlr: str) -> None:
    """Writes a block of LUN 0 as a guest does, and reads it back."""
    block = os.urandom(4096)
    count = len(block) // 512
    cdb = (0).to_bytes(4, "big") + b"\0" + count.to_bytes(2, "big") + b"\0"
    with connected(target, ctrlr) as guest:
        answer = guest.cdb(bytes([WRITE_10, 0]) + cdb, data_out=block)
        assert answer["status"] == 0, answer
        answer = guest.cdb(bytes([READ_10, 0]) + cdb, data_in_len=len(block))
        assert answer["data_in"] == block


def test_every_thread_is_confined(target: Target) -> None:
    target.make_lvstore()
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    found = list(tasks(target.pid))
    assert len(found) > 3
    for task in found:
        assert (task["Seccomp"], task["NoNewPrivs"]) == ("2", "1"), task["Name"]
        assert task["CapInh"] == task["CapAmb"] == NONE
    status = target.rpc("virtlun_get_status")
    assert (status["sandbox"], status["refused_calls"]) == ("enforce", [])


@pytest.mark.skipif(not tracer.is_possible(), reason="the tracer knows x86-64 alone")
def test_a_call_that_the_target_should_not_make_fails_and_is_named(scratch: Path) -> None:
    """A controller's thread makes one in place of the ppoll(2) in which it waits."""
    directory = scratch / "0"
    directory.mkdir()
    target = Target(directory).start()
    try:
        target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
        target.attach("vm-1", "m0")
        pid = target.pid
        with (
            Tracer(pid, tracer.thread_named(pid, "vhost vm-1")) as traced,
            socket.socket(socket.AF_UNIX) as client,
        ):
            client.connect(str(target.vhost_dir / "vm-1"))
            traced.until_call(PPOLL, lambda *_: True)
            traced.let_go(instead=GETPGID)
        until(lambda: target.rpc("virtlun_get_status")["refused_calls"] == ["getpgid"])
        named = f"{SANDBOX_REFUSED} getpgid (number {GETPGID}) of thread vhost vm-1: it fails with"
        until(lambda: named in target.words(), "it is named")
        write_and_read(target, "vm-1")
        assert target.rpc("virtlun_get_status")["pid"] == pid
        with pytest.raises(TargetFailed, match="a call that is not listed"):
            target.stop()
    finally:
        if target.process is not None:
            with contextlib.suppress(TargetFailed):
                target.kill9()
        target.end_holder()


def test_without_sandbox_there_is_a_warning(make_target: MakeTarget) -> None:
    target = make_target("--no-sandbox").start()
    assert {task["Seccomp"] for task in tasks(target.pid)} == {"0"}
    assert target.rpc("virtlun_get_status")["sandbox"] == "off"
    assert "--no-sandbox: a guest that finds a way to run code" in target.words()


def test_system_calls_can_be_logged_only(make_target: MakeTarget) -> None:
    target = make_target("--sandbox", "log").start()
    assert {task["Seccomp"] for task in tasks(target.pid)} == {"2"}
    assert target.rpc("virtlun_get_status")["sandbox"] == "log"


def test_a_user_that_is_not_there_is_an_error(make_target: MakeTarget) -> None:
    ended = make_target("--user", "no-such-user-here").run()
    assert ended.returncode == 1
    assert "there is no user no-such-user-here in /etc/passwd: create it" in ended.stderr


@as_root
def test_root_keeps_few_capabilities(make_target: MakeTarget) -> None:
    target = make_target("--user", "root").start()
    # CHOWN, DAC_OVERRIDE, FOWNER, IPC_LOCK, SYS_ADMIN, SYS_RESOURCE (linux/capability.h).
    most = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 14 | 1 << 21 | 1 << 24
    for task in tasks(target.pid):
        for kind in ("CapPrm", "CapEff", "CapBnd"):
            assert int(task[kind], 16) & ~most == 0, (task["Name"], kind)


@as_root
def test_another_user_has_no_capability_and_serves_a_guest(make_target: MakeTarget) -> None:
    target = make_user_target(make_target, "--cpumask", "[0]").start()
    for task in tasks(target.pid):
        assert task["Uid"].split() == [str(UID)] * 4
        assert task["Gid"].split() == [str(GID)] * 4
        assert task["Groups"] == str(SOCKET_GID)
        for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert task[kind] == NONE, (task["Name"], kind)
    assert target.rpc("virtlun_get_status")["user"] == {"name": str(UID), "uid": UID, "gid": GID}
    file = target.make_file("lvs0.img", 64 << 20)
    os.chown(file, UID, GID)
    file.chmod(0o600)
    target.rpc("bdev_uring_create", filename=str(file), name="base", block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="base", lvs_name="lvs0")
    target.rpc("bdev_lvol_create", lvol_name="data", size_in_mib=8, lvs_name="lvs0")
    target.attach("vm-1", "lvs0/data")
    socket = (target.vhost_dir / "vm-1").stat()
    assert (socket.st_uid, socket.st_gid) == (UID, SOCKET_GID)
    assert stat.S_IMODE(socket.st_mode) == 0o660
    write_and_read(target, "vm-1")
    target.restart()
    write_and_read(target, "vm-1")
    target.crash()
    write_and_read(target, "vm-1")
    assert target.rpc("virtlun_get_status")["restore_problems"] == []


def virtlun(target: Target, *words: str) -> str:
    """Runs the command for people on a target; returns what it printed."""
    program = Path(sys.executable).parent / "virtlun"
    done = subprocess.run(
        [str(program), "--socket", str(target.rpc_socket), *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert words[0] == "doctor" or done.returncode == 0, done.stderr
    return done.stdout


def rights(target: Target, whose: str = "target") -> dict[str, str]:
    """Returns what doctor finds of them."""
    findings = json.loads(virtlun(target, "doctor", "--json"))
    (found,) = (item for item in findings if item["what"] == f"the {whose}'s rights")
    return dict(found)


@pytest.mark.nightly
@as_root
def test_lvstores_that_the_command_makes_are_the_users(make_target: MakeTarget) -> None:
    target = make_user_target(make_target).start()
    file = target.directory / "lvs0.img"
    virtlun(target, "lvstore", "create", "lvs0", "--file", str(file), "--size", "64M")
    assert (file.stat().st_uid, file.stat().st_gid) == (UID, GID)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    virtlun(target, "lvstore", "resize", "lvs0", "80M")
    target.restart()
    assert "lvs0" in virtlun(target, "lvstore", "list")
    assert f"user     {UID}\nsandbox  enforce\n" in virtlun(target, "target", "status")


@pytest.mark.nightly
@as_root
def test_doctor_shows_the_rights(make_target: MakeTarget) -> None:
    target = make_user_target(make_target).start()
    found = rights(target)
    assert found["state"] == "ok", found
    expected = f"user {UID}; capabilities none; no_new_privs set; seccomp enforced"
    assert found["found"] == expected
    assert target.stop() == 0
    target.options = (*target.options, "--no-sandbox")
    target.start()
    found = rights(target)
    assert (found["state"], found["advice"]) == ("warning", "start it without --no-sandbox")
    assert "no_new_privs not set; seccomp not enforced" in found["found"]
    assert target.stop() == 0
    target.options = ("--user", "root")
    target.start()
    found = rights(target)
    assert found["state"] == "warning"
    assert "user root; capabilities CHOWN, DAC_OVERRIDE" in found["found"]


@pytest.mark.nightly
@as_root
def test_doctor_shows_the_holders_rights(make_target: MakeTarget) -> None:
    """Of the one that the target has started, of one by itself, and of none."""
    target = make_user_target(make_target).start()
    found = rights(target, "holder")
    assert found["state"] == "ok", found
    assert found["found"].startswith("user root; capabilities CHOWN, DAC_OVERRIDE, SYS_ADMIN; ")
    assert found["found"].endswith("; no_new_privs set; seccomp enforced")
    assert target.stop() == 0
    target.end_holder()
    target.start("--holder-socket", str(target.holder_socket))
    found = rights(target, "holder")
    assert (found["state"], found["advice"]) == ("ok", "")
    assert found["found"].startswith(f"none runs at {target.holder_socket}: ")
    with target.holder("--no-sandbox"):
        until(lambda: "none runs" not in rights(target, "holder")["found"], "the holder")
        found = rights(target, "holder")
        assert (found["state"], found["advice"]) == ("warning", "start it without --no-sandbox")
        assert "seccomp not enforced" in found["found"]


@as_root
def test_what_is_closed_to_the_user_is_named_with_the_cure(make_target: MakeTarget) -> None:
    target = make_user_target(make_target).start()
    file = target.make_file("root.img", 1 << 20)
    file.chmod(0o600)
    with pytest.raises(RpcError) as refused:
        target.rpc("bdev_uring_create", filename=str(file), name="a")
    assert refused.value.code == EACCES
    cure = f"user {UID} may not open {file}: chown {UID} {file}, or setfacl -m u:{UID}:rw {file}"
    assert cure in refused.value.message
    closed = target.directory / "closed"
    closed.mkdir(mode=0o700)
    file = file.rename(closed / "b.img")
    with pytest.raises(RpcError) as refused:
        target.rpc("bdev_uring_create", filename=str(file), name="a")
    assert refused.value.code == EACCES
    cure = f"user {UID} may not enter the folder {closed}: setfacl -m u:{UID}:x {closed}"
    assert cure in refused.value.message
    closed.chmod(0o711)
    os.chown(file, UID, GID)
    target.rpc("bdev_uring_create", filename=str(file), name="a")


@as_root
def test_sockets_go_to_groups_that_the_user_is_in(make_target: MakeTarget) -> None:
    target = make_user_target(make_target, "--groups", "107,108").start()
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1", socket_gid=107)
    assert (target.vhost_dir / "vm-1").stat().st_gid == 107
    with pytest.raises(RpcError) as refused:
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-2", socket_gid=109)
    assert "user is not in that group: start it with --groups" in refused.value.message
    assert not (target.vhost_dir / "vm-2").exists()


@as_root
def test_the_holder_mounts_what_the_user_exports(make_target: MakeTarget) -> None:
    target = make_user_target(make_target).start()
    target.rpc("bdev_malloc_create", name="m", num_blocks=65536, block_size=512)
    export = Path(target.rpc("virtlun_export_create", bdev_name="m")["path"])
    assert export.stat().st_size == 65536 * 512
    data = os.urandom(1 << 20)
    node = os.open(export, os.O_RDWR)
    # Bytes of Python's do not begin on a page.
    assert os.pwrite(node, data, 512) == len(data)
    assert os.pread(node, len(data), 512) == data
    os.close(node)
    assert {task["CapEff"] for task in tasks(target.pid)} == {NONE}
    target.rpc("virtlun_export_delete", bdev_name="m")


@as_root
def test_a_block_device_opens_for_its_group(make_target: MakeTarget) -> None:
    target = make_user_target(make_target).start()
    file = target.make_file("disk", 64 << 20)
    loop = subprocess.check_output(["losetup", "-f", "--show", str(file)], text=True).strip()
    device = Path(loop)
    before = device.stat()
    try:
        os.chown(loop, 0, 0)
        device.chmod(0o660)
        with pytest.raises(RpcError) as refused:
            target.rpc("bdev_aio_create", filename=loop, name="d", block_size=512)
        assert f"user {UID} may not open the block device {loop}: add it to" in str(refused.value)
        os.chown(loop, 0, SOCKET_GID)
        target.rpc("bdev_aio_create", filename=loop, name="d", block_size=512)
        target.rpc("bdev_lvol_create_lvstore", bdev_name="d", lvs_name="lvs0")
        assert target.stop() == 0
    finally:
        os.chown(loop, before.st_uid, before.st_gid)
        device.chmod(stat.S_IMODE(before.st_mode))
        subprocess.run(["losetup", "-d", loop], check=True)


@as_root
def test_what_an_earlier_release_left_as_roots_goes_on_working(make_target: MakeTarget) -> None:
    """That ran as root, and so did what it made."""
    target = make_target("--user", "root").start()
    target.directory.parent.chmod(0o711)
    file = target.make_lvstore()
    file.chmod(0o600)
    target.rpc("bdev_lvol_create", lvol_name="data", size_in_mib=8, lvs_name="lvs0")
    target.kill9()
    os.chown(target.directory, UID, GID)
    os.chown(target.vhost_dir, UID, GID)
    target.options = ("--user", f"{UID}:{GID}")
    target.start()
    assert target.rpc("virtlun_get_status")["restore_problems"] == []
    assert target.rpc("bdev_get_bdevs", name="lvs0/data")
    for path in (file, target.state_dir, *target.state_dir.iterdir()):
        assert (path.stat().st_uid, path.stat().st_gid) == (UID, GID), path


@as_root
def test_the_packaged_folders_become_the_users_to_work_in(scratch: Path) -> None:
    """In a mount namespace of its own, where an earlier release left them as root's."""
    make = "mkdir -pm755 /run/virtlun/vhost /var/lib/virtlun/hook && chmod 1775 /run/virtlun"
    # What the user could take of others' there, and what it must not lose of them.
    make += " && cd /run/virtlun && touch libvirt-sock other"
    make += f" && chown {UID} libvirt-sock"
    script = f'mount -t tmpfs t /run && mount -t tmpfs t /var/lib && {make} && exec "$@"'
    command = [str(binary()), "--user", f"{UID}:{GID}"]
    log = scratch / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "slave", "sh", "-ec", script, "sh", *command],
            stdout=out,
            stderr=out,
        )
    root = Path(f"/proc/{process.pid}/root")
    try:
        rpc_socket = root / "run/virtlun/.target.sock.d/rpc.sock"
        serves(process, rpc_socket.exists, "the target", log)
        found = {
            path: (at.st_uid, at.st_gid, stat.S_IMODE(at.st_mode))
            for path in (
                "run/virtlun",
                "run/virtlun/.target.sock.d",
                "run/virtlun/vhost",
                "var/lib/virtlun",
                "var/lib/virtlun/hook",
            )
            if (at := (root / path).stat())
        }
        assert found == {
            # The gateway's sockets are there, too: nobody may take their names.
            "run/virtlun": (0, 0, 0o755),
            "run/virtlun/.target.sock.d": (UID, GID, 0o755),
            "run/virtlun/vhost": (UID, GID, 0o755),
            "var/lib/virtlun": (0, 0, 0o755),
            "var/lib/virtlun/hook": (0, 0, 0o755),
        }
        run = root / "run/virtlun"
        assert (run / "target.sock").readlink() == Path(".target.sock.d/rpc.sock")
        assert (run / "other").exists()
        assert not (run / "libvirt-sock").exists()
        assert (run / "holder.sock").stat().st_uid == UID, "of its holder, who gave it"
        inside = ["nsenter", "--mount", f"--target={process.pid}", "--"]
        touch = [*inside, "setpriv", f"--reuid={UID}", f"--regid={GID}", "--clear-groups", "touch"]
        for name in ("libvirt-sock", "gold"):
            done = subprocess.run(
                [*touch, f"/run/virtlun/{name}"], capture_output=True, text=True, check=False
            )
            assert "Permission denied" in done.stderr, done
        # A client finds it by the link.
        assert Client(run / ".target.sock.d/rpc.sock").call("virtlun_get_status")["rpc_socket"] == (
            "/run/virtlun/target.sock"
        )
    finally:
        process.terminate()
        assert process.wait(90) == 0, log.read_text()


@as_root
def test_what_another_user_recorded_gives_away_nothing(make_target: MakeTarget) -> None:
    """It may name a file that the user is to have no part of."""
    target = make_user_target(make_target).start()
    target.rpc("bdev_malloc_create", name="m", num_blocks=8, block_size=512)
    assert target.stop() == 0
    secret = target.make_file("secret", 1 << 20)
    record = target.state_dir / "config.json"
    text = record.read_text().replace("bdev_malloc_create", "bdev_aio_create")
    assert text != record.read_text()
    record.write_text(text.replace('"num_blocks": 8', f'"filename": "{secret}"'))
    target.start()
    assert secret.stat().st_uid == 0
    assert "not restored" in str(target.rpc("virtlun_get_status")["restore_problems"])


@as_root
def test_a_folder_that_the_user_may_not_use_is_named(make_target: MakeTarget) -> None:
    target = make_target("--user", str(UID))
    target.directory.parent.chmod(0o711)
    ended = target.run()
    assert ended.returncode == 1
    assert f"user {UID} may not make files in {target.directory}: chown {UID}" in ended.stderr
    assert SANDBOX_REFUSED not in ended.stderr


@as_root
def test_roots_upgrade_does_not_take_the_word_of_a_target_that_is_not_roots(
    make_target: MakeTarget,
) -> None:
    """Its command line is its own to write, so another process stands for it here."""
    target = make_user_target(make_target).start()
    given = inherited.options(target.rpc_socket, target.pid)
    assert given == target.command()[1:]
    forged = ["--user", "root", "--no-sandbox", *target.command()[1:]]
    with subprocess.Popen(["sh", "-c", "sleep 60", *forged]) as liar:
        assert inherited.options(target.rpc_socket, liar.pid) == given
        liar.kill()
    old, target.process = target.process, None
    assert old is not None
    options = ("--spin-us", "60")
    found = supervise.upgrade(target.rpc_socket, options, target.log, binary())
    assert old.wait(supervise.STOP_DEADLINE_S) == 0
    assert found["user"]["name"] == given[given.index("--user") + 1].split(":")[0]
    assert inherited.options(target.rpc_socket, found["pid"]) == [*given, *options]
    (record,) = target.directory.parent.rglob(".*.options")
    record.unlink()
    with pytest.raises(TargetUnavailable, match="root has no record of how the target on"):
        supervise.upgrade(target.rpc_socket, log=target.log, with_program=binary())
    supervise.stop(target.rpc_socket)
