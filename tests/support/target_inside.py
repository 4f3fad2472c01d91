"""A target in a guest: what the kernel of this machine lacks is tested on another one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from tests.support import program_disk
from tests.support.agent import GuestError
from tests.support.qemu import Guest
from tests.support.target import binary
from tests.support.wait import until

#: What a target in a guest needs beside it there.
PROGRAMS = ("virtlun-target", "virtlun-holder")
VOLUME_MIB = 32
VOLUME = "lvs0/v0"
SOCKET = "/ram/rpc.sock"
COMMAND = (
    f"/programs/virtlun-target --rpc-socket {SOCKET} --vhost-dir /ram/vhost --state-dir /ram/state "
    "--export-dir /run/virtlun/export"
)
#: Memory for its disk, its log and its sockets.
PREPARE = f"mkdir -p /ram; mount -t tmpfs -o size={4 * VOLUME_MIB}m tmpfs /ram"
#: Ends what a test has running, and removes what it made; a device that is left is its mistake.
CLEAN = """\
for name in virtlun-target virtlun-holder; do
    for pid in $(pidof $name); do kill -9 $pid; done
    for i in $(seq 300); do pidof $name || break; sleep .1; done >/dev/null
    if pidof $name; then exit 1; fi
done
awk '$2 ~ "^/(ram|run/virtlun)" { print $2 }' /proc/mounts | tac | xargs -r -n 1 umount -l
rm -rf /run/virtlun /tmp/*.pid /tmp/said /tmp/status
! ls /dev | grep 'ublk[bc]'
"""


def programs() -> dict[str, Path]:
    """Returns the programs as `program_disk.guest` takes them."""
    return {name: binary(name) for name in PROGRAMS}


class TargetInside:
    """A target in a guest, with a volume on a file of the guest's memory."""

    def __init__(self, guest: Guest, *options: str) -> None:
        """Starts it, with further options, and makes the volume."""
        self.guest, self.options = guest, options
        guest.run(f"truncate -s {3 * VOLUME_MIB}M /ram/disk; touch /ram/log; chmod 666 /ram/disk")
        self.start()
        self.rpc("bdev_uring_create", filename="/ram/disk", name="base", block_size=512)
        self.rpc("bdev_lvol_create_lvstore", bdev_name="base", lvs_name="lvs0")
        self.rpc(
            "bdev_lvol_create",
            lvol_name="v0",
            size_in_mib=VOLUME_MIB,
            lvs_name="lvs0",
            thin_provision=True,
        )

    def start(self, *options: str) -> None:
        """Starts a process and waits until it serves."""
        before = self.guest.run("cat /tmp/target.pid 2>/dev/null || true").strip()
        command = shlex.join(["setsid", *COMMAND.split(), *self.options, *options])
        self.guest.run(
            f"export LD_LIBRARY_PATH={program_disk.PLACE}/lib; {command} >>/ram/log 2>&1 & "
            "echo $! >/tmp/target.pid"
        )
        until(lambda: self._serves(before), self.words, 120.0, 0.1)

    def _serves(self, before: str) -> bool:
        try:
            return bool(self.rpc("virtlun_get_status"))
        except AssertionError:
            lives = self.guest.run("kill -0 $(cat /tmp/target.pid)", check=False) == ""
            assert lives, f"{before}: {self.words()}"
            return False

    def rpc(self, method: str, **params: object) -> Any:
        """Calls a method and returns its result; AssertionError with the error."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        if not params:
            del request["params"]
        said = self.guest.run(f"unix_call {SOCKET} {shlex.quote(json.dumps(request))}", check=False)
        assert said.startswith("{"), said
        answer = json.loads(said)
        assert "result" in answer, f"{method}: {answer}\n{self.words()}"
        return answer["result"]

    def words(self) -> str:
        """Returns the log, with the kernel's."""
        return self.guest.run("dmesg | tail -n 30; tail -n 60 /ram/log; ps")

    def kill(self) -> None:
        """As a crash, and a new process."""
        self.guest.run(f"kill -9 $(cat /tmp/target.pid); rm -f {SOCKET}")
        self.start()

    def terminate(self) -> None:
        """In order, and a new process."""
        self.guest.run(
            "pid=$(cat /tmp/target.pid); kill -TERM $pid; "
            "for i in $(seq 300); do [ -d /proc/$pid ] || exit 0; sleep .1; done; exit 1"
        )
        self.start()

    def upgrade(self) -> None:
        """A new process takes over from the one that serves."""
        before = self.guest.run("cat /tmp/target.pid").strip()
        self.start("--take-over")
        ended = f"for i in $(seq 300); do [ -d /proc/{before} ] || exit 0; sleep .1; done; exit 1"
        try:
            self.guest.run(ended, 240.0)
        except GuestError as error:
            raise AssertionError(f"pid {before} serves on:\n{self.words()}") from error
