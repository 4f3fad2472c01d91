"""A holder that root runs for a target's user, whom a guest may have broken into."""

from __future__ import annotations

import os
import socket
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.support.target import binary
from tests.support.wait import listens, until

pytestmark = pytest.mark.root

UID = 51001
#: CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_SYS_ADMIN
KEPT = 1 << 0 | 1 << 1 | 1 << 21
DEADLINE_S = 90.0

#: Puts a folder of its own, with a link in it, in the place of the holder's; then asks for a mount.
ATTACK = """
import os, socket, sys
base, victim, name = sys.argv[1:]
os.rename(base + "/export", base + "/away")
os.mkdir(base + "/export")
os.symlink(victim, base + "/export/" + name)
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.connect(base + "/holder.sock")
peer.send(f"mount {name}".encode())
print(peer.recvmsg(4096, 4096)[0].decode())
"""


def command(folder: Path) -> list[str]:
    """The holder's, with all that it has in `folder`."""
    places = ("--socket", str(folder / "holder.sock"), "--dir", str(folder / "export"))
    return [str(binary("virtlun-holder")), *places, "--user", str(UID)]


def wait_for(folder: Path) -> None:
    """Waits until a holder listens in a folder."""
    until(lambda: listens(folder / "holder.sock", socket.SOCK_SEQPACKET), "the holder listens")


def test_no_link_of_the_targets_user_leads_a_mount_elsewhere(scratch: Path) -> None:
    base, victim = scratch / "run", scratch / "victim"
    for folder in (base, victim):
        folder.mkdir(mode=0o755)
    scratch.chmod(0o755)
    os.chown(base, UID, UID)
    holder = subprocess.Popen(command(base))
    name = str(uuid.uuid4())
    try:
        wait_for(base)
        words = ["/usr/bin/python3", "-c", ATTACK, str(base), str(victim), name]
        said = subprocess.run(
            words, user=UID, group=UID, extra_groups=[], check=True, capture_output=True, text=True
        )
        assert said.stdout.startswith("ok")
        table = Path("/proc/self/mountinfo").read_text()
        mounts = [line.split()[4] for line in table.splitlines()]
        assert str(victim) not in mounts
        assert str(base / "away" / name) in mounts
    finally:
        holder.kill()
        holder.wait()
        subprocess.run(["umount", "-l", base / "away" / name], check=False)


def test_a_target_in_another_container_is_served(scratch: Path) -> None:
    """It has no process number in the holder's PID namespace; its user is known all the same."""
    (scratch / "export").mkdir()
    own = ("unshare", "--pid", "--fork", "--kill-child")
    holder = subprocess.Popen([*own, *command(scratch)])
    try:
        wait_for(scratch)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(str(scratch / "holder.sock"))
            peer.send(b"list")
            assert peer.recv(4096) == b"ok"
    finally:
        holder.kill()
        holder.wait()


def test_what_is_no_connection_of_a_vm_is_not_kept(scratch: Path) -> None:
    """And what is one is given back as it came, under its name alone."""
    (scratch / "export").mkdir()
    holder = subprocess.Popen(command(scratch))
    near, far = socket.socketpair()
    names = (b"a b", b"n" * 101, b"")
    try:
        wait_for(scratch)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(str(scratch / "holder.sock"))

            def ask(words: bytes, *fds: int) -> tuple[bytes, list[int]]:
                socket.send_fds(peer, [words], fds)
                return socket.recv_fds(peer, 1 << 16, 16)[:2]

            for fds in ((), (near.fileno(),), (near.fileno(), 0), (near.fileno(), peer.fileno())):
                said = ask(b"vm-keep vm", *fds)[0]
                assert (
                    said == b"failed the second descriptor of a VM's connection is not its socket"
                )
            for name in names:
                assert ask(b"vm-keep " + name, 0, near.fileno())[0].startswith(b"failed "), name
            assert ask(b"vm-list") == (b"ok", [])
            assert ask(b"vm-keep vm", 0, near.fileno())[0] == b"ok"
            assert ask(b"vm-take v") == (b"none", [])
            words, fds_back = ask(b"vm-take vm")
            assert (words, len(fds_back)) == (b"ok", 2)
            for fd in fds_back:
                os.close(fd)
            near.close()
            assert ask(b"vm-end vm")[0] == b"ok"
            assert far.recv(1) == b"", "nobody has the connection any more"
    finally:
        holder.kill()
        holder.wait()
        far.close()


def test_a_folder_of_somebody_else_is_refused(scratch: Path) -> None:
    (scratch / "export").mkdir()
    os.chown(scratch / "export", UID, UID)
    said = subprocess.run(
        command(scratch), check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert said.returncode == 1
    assert (
        f"user {UID} owns it, mode 755, so somebody else could turn mounts elsewhere" in said.stderr
    )


def test_only_the_socket_that_it_made_is_given_away(scratch: Path) -> None:
    """The user of the folder cannot have another file given to itself by a link."""
    secret = scratch / "secret"
    secret.write_text("")
    (scratch / "holder.sock").symlink_to(secret)
    holder = subprocess.Popen(command(scratch))
    try:
        wait_for(scratch)
        assert (scratch / "holder.sock").lstat().st_uid == UID
        assert secret.stat().st_uid == os.geteuid()
    finally:
        holder.kill()
        holder.wait()


def test_it_gives_up_what_it_does_not_need(scratch: Path) -> None:
    """And what it runs never gets more: it can only lose the rights that it has."""
    holder = subprocess.Popen(command(scratch))
    try:
        wait_for(scratch)
        lines = Path(f"/proc/{holder.pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines)
        for kind in ("CapPrm", "CapEff", "CapBnd"):
            assert int(status[kind], 16) & ~KEPT == 0, kind
        assert int(status["CapInh"], 16) == int(status["CapAmb"], 16) == 0
        assert status["NoNewPrivs"] == "1"
    finally:
        holder.kill()
        holder.wait()
