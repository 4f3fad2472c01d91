"""System calls that the helper denies itself and its programs; each test has its own process."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from csi.host import syscalls
from tests.support.scratch import short_directory

ROOT = Path(__file__).parents[3]
BEGIN = f"""
import ctypes, json, os, socket, subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from csi.host.syscalls import Denial
from csi.host.server import log
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # no_new_privs
denial = Denial(log)
denial.begin()
libc = ctypes.CDLL(None, use_errno=True)
"""


def confined(code: str, *words: str) -> tuple[Any, list[dict[str, object]]]:
    """Runs Python under the filter; returns what it prints, and the lines of the log."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), [json.loads(line) for line in done.stderr.splitlines()]


def test_the_library_knows_each_call() -> None:
    library = ctypes.CDLL(syscalls.LIBRARY)
    names = [name for calls in syscalls.DENIED.values() for name in calls]
    unknown = [n for n in names if library.seccomp_syscall_resolve_name(n.encode()) == -1]
    assert unknown == []
    assert len(set(names)) == len(names)


def test_each_denied_call_fails_and_is_named_once() -> None:
    """Whatever its arguments are, by number, twice."""
    code = """
library = ctypes.CDLL("libseccomp.so.2")
found = {}
for name in sys.argv[1:]:
    number = library.seccomp_syscall_resolve_name(name.encode())
    for _ in range(2):
        answer = libc.syscall(number, -1, -1, -1, -1, -1)
        found[name] = [answer, ctypes.get_errno()]
print(json.dumps([found, denial.names()]))
"""
    library = ctypes.CDLL(syscalls.LIBRARY)
    names = [name for calls in syscalls.DENIED.values() for name in calls]
    here = [n for n in names if library.seccomp_syscall_resolve_name(n.encode()) >= 0]
    (found, denied), log = confined(code, *here)
    assert found == {name: [-1, 1] for name in here}  # EPERM
    assert denied == sorted(here)
    assert [line["call"] for line in log] == here
    assert {line["event"] for line in log} == {"denied"}


def test_programs_and_threads_inherit_it() -> None:
    """Network and namespaces, by a child; the calls' other uses are allowed."""
    code = """
import threading
socket.socketpair()
tried = [sys.executable, "-c", "import socket; socket.socket(socket.AF_INET)"]
networked = subprocess.run(tried, capture_output=True, text=True)
CLONE_NEWNS_AND_SIGCHLD = 0x20011
library = ctypes.CDLL("libseccomp.so.2")
clone = library.seccomp_syscall_resolve_name(b"clone")
child = libc.syscall(clone, CLONE_NEWNS_AND_SIGCHLD, 0, 0, 0, 0)
if child == 0:
    os._exit(0)
told = []
thread = threading.Thread(target=lambda: told.append(libc.unshare(0x20000)))
thread.start()
thread.join()
refused = "Operation not permitted" in networked.stderr
print(json.dumps([networked.returncode, refused, child, told]))
"""
    found, log = confined(code)
    assert found == [1, True, -1, [-1]]
    assert {"socket", "unshare"} <= {str(line["call"]) for line in log}
    assert str(log[0]["program"]).startswith("python")


@pytest.mark.root
@pytest.mark.parametrize("fs_type", ["ext4", "xfs"])
def test_what_is_done_with_file_systems_is_allowed(fs_type: str) -> None:
    """Loop devices, looking, making, mounting, growing, checking, unmounting: nothing is denied."""
    code = """
from csi import filesystems, kernel
from csi.hostdevice import loopctl
from csi.hosterrors import OfflineOnly
fs_type, file, place = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
def umount():
    kernel.umount(str(place))
device = loopctl.attach(file, "virtlun:test-of-denied-calls", read_only=False, block_size=512)
try:
    empty = filesystems.holds(device)
    filesystems.make(device, fs_type)
    filesystems.mount(device, place, fs_type, [], str(place), unmount=umount)
    try:
        os.truncate(file, 768 << 20)
        loopctl.grow(device)
        try:
            filesystems.grow(device, place, fs_type)
        except OfflineOnly:  # a machine without CAP_SYS_RESOURCE
            umount()
            filesystems.mount(device, place, fs_type, [], str(place), unmount=umount)
        room = os.statvfs(place)
        (place / "x").write_text("x")
    finally:
        umount()
    check = ["e2fsck", "-f", "-p"] if fs_type == "ext4" else ["xfs_repair", "-n"]
    subprocess.run([*check, device], check=True, capture_output=True)
    held = filesystems.holds(device)
finally:
    loop = loopctl.status(device)
    loopctl.release(loop)
    loopctl.wait_gone(loop)
print(json.dumps([empty, held, room.f_blocks * room.f_frsize > 600 << 20, denial.names()]))
"""
    with short_directory("vd-") as folder:
        file, place = folder / "file", folder / "place"
        place.mkdir()
        with file.open("wb") as opened:
            opened.truncate(400 << 20)
        found, log = confined(code, fs_type, str(file), str(place))
    assert found == ["", fs_type, True, []]
    assert log == []


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "LIBRARY", "libnothing.so.0")
    with pytest.raises(
        syscalls.Unavailable, match=r"install libseccomp2 .*or start with --no-sand"
    ):
        syscalls.Denial(lambda *_, **__: None)
