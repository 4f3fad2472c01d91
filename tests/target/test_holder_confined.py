"""The holder's allow-list of system calls: all of its work is on it, and nothing of an intruder's.

Needs root, /dev/fuse and a C compiler.
"""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.target import SANDBOX_REFUSED, Target, binary
from tests.support.wait import listens, until
from tests.target.conftest import MakeTarget

pytestmark = pytest.mark.root
DEADLINE_S = 90.0
KEPT = 1 << 0 | 1 << 1 | 1 << 21
"""CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_SYS_ADMIN."""
UUID = "6f2b3a1e-7c38-4d1a-9b7e-1f0d6a5c4b32"
#: In the holder, at the first look at who has connected: what root might do to the node, and what
#: the kernel answers each time.
INTRUDER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static void tried(const char *name, long answer) {
    fprintf(stderr, "intruder: %s %s\n", name, answer < 0 && errno == EPERM ? "EPERM" : "DONE");
}

int getsockopt(int fd, int level, int name, void *value, socklen_t *size) {
    static int once;
    if (!once++) {
        tried("bind mount", mount("/", VICTIM, NULL, MS_BIND, NULL));
        tried("unshare", unshare(CLONE_NEWNS));
        tried("bpf", syscall(SYS_bpf, 0, NULL, 0));
        tried("ptrace", ptrace(PTRACE_TRACEME, 0, NULL, NULL));
        tried("network", socket(AF_INET, SOCK_STREAM, 0));
        tried("program", execl("/bin/true", "true", NULL));
    }
    int (*real)(int, int, int, void *, socklen_t *) = dlsym(RTLD_NEXT, "getsockopt");
    return real(fd, level, name, value, size);
}
"""


def ask(target: Target, words: str) -> str:
    """Asks the holder one thing, when it listens."""
    until(lambda: listens(target.holder_socket, socket.SOCK_SEQPACKET), target.words, DEADLINE_S)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(DEADLINE_S)
        peer.connect(str(target.holder_socket))
        peer.send(words.encode())
        return peer.recv(4096).decode()


def rights(target: Target) -> dict[str, str]:
    """Returns what the holder says of its own."""
    state, *facts = ask(target, "rights").split(" ")
    assert state == "ok", facts
    return dict(fact.split("=") for fact in facts)


def test_all_its_work_is_allowed(make_target: MakeTarget) -> None:
    """A life with everything in it: what is refused would be in its answer, and in the log."""
    target = make_target()
    target.export_dir.mkdir()
    stale = target.export_dir / UUID
    with target.holder():
        assert ask(target, f"mount {UUID}") == "ok"
    with target.holder("--user", "51001"):
        assert ask(target, f"mount {UUID}") == "ok"  # over what the killed one has left
        assert "detached the mount of a killed process" in target.words()
        subprocess.run(["umount", "-l", stale], check=True)
        assert ask(target, f"mount {UUID}") == "ok"  # put back
        assert "mounted again" in target.words()
        assert ask(target, "list") == f"ok {UUID}"
        assert ask(target, "eat").startswith("failed")
        target.start("--holder-socket", str(target.holder_socket))
        target.rpc("bdev_malloc_create", name="m", num_blocks=8192, block_size=512)
        path = Path(target.rpc("virtlun_export_create", bdev_name="m")["path"])
        with path.open("r+b") as file:
            assert file.write(b"a" * 4096) == 4096
        target.rpc("virtlun_export_delete", bdev_name="m")
        assert target.stop() == 0
        assert ask(target, f"end {UUID}") == "ok"
        assert list(target.export_dir.iterdir()) == []
        found = rights(target)
        assert found["refused"] == ""
        assert (found["uid"], found["no_new_privs"], found["seccomp"]) == ("0", "1", "2")
        assert int(found["capabilities"], 16) & ~KEPT == 0
    assert SANDBOX_REFUSED not in target.words()


def test_an_intruder_is_refused_and_named(scratch: Path) -> None:
    """By each call's name, once, in the log and to who asks; and the holder goes on."""
    victim = scratch / "victim"
    victim.mkdir()
    source, library = scratch / "intruder.c", scratch / "intruder.so"
    source.write_text(INTRUDER)
    compiled = ["cc", "-shared", "-fPIC", f'-DVICTIM="{victim}"', "-o", str(library), str(source)]
    subprocess.run(compiled, check=True)
    target = Target(scratch)
    command = [
        str(binary("virtlun-holder")),
        *("--socket", str(target.holder_socket), "--dir", str(target.export_dir)),
    ]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    with (scratch / "holder.log").open("wb") as log:
        holder = subprocess.Popen(command, env=environment, stderr=log)
    try:
        assert ask(target, "list") == "ok"
        said = (scratch / "holder.log").read_text()
        tries = [line for line in said.splitlines() if line.startswith("intruder: ")]
        assert len(tries) == 6, said
        assert all(line.endswith(" EPERM") for line in tries), said
        named = ["bpf", "execve", "mount", "ptrace", "socket", "unshare"]
        for call in named:
            assert said.count(f"ERROR {SANDBOX_REFUSED} {call} (number ") == 1, said
        assert sorted(rights(target)["refused"].split(",")) == named
        assert not list(victim.iterdir())
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.wait()
