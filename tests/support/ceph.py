"""A real Ceph for tests: a monitor and an OSD, no manager; here, or behind a link."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from tests.support.ports import free_port
from tests.support.scratch import short_directory
from tests.support.wait import until

PACKAGES = ("ceph-mon", "ceph-osd", "ceph-common", "librbd1")
"""Of Debian."""
COMMAND_DEADLINE_S = 120
POOL = "rbd"
WATCH_TIMEOUT_S = 30
"""As Ceph has it."""
_CONFIG = """
[global]
fsid = {fsid}
auth cluster required = {auth}
auth service required = {auth}
auth client required = {auth}
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 0
mon initial members = a
mon host = v2:{address}:{port}
public addr = {address}
run dir = {directory}/run
admin socket = {directory}/run/$cluster-$name.asok
log file = {directory}/log/$name.log
pid file = {directory}/run/$name.pid
[client]
keyring = {directory}/keyring
admin socket =
log file =
[mon.a]
mon data = {directory}/mon
[osd]
osd objectstore = {store}
memstore device bytes = 4294967296
bluestore block size = 2147483648
bluestore block wal create = false
bluestore block db create = false
bluestore fsck on mkfs = false
osd data = {directory}/osd
osd class load list = *
osd class default list = *
osd memory target = 939524096
osd client watch timeout = {watch_timeout}
"""


class Link:
    """A network namespace, and the link to it; a context manager. Needs root."""

    def __init__(self) -> None:
        """Makes them, with addresses of their own."""
        number = os.getpid()
        self.name = f"vl{number}"
        network = f"10.{96 + number % 128}.{number // 128 % 256}"
        self.address = f"{network}.2"
        """Of the other end."""
        self._ip("netns", "add", self.name)
        try:
            inside = ("peer", "name", f"{self.name}p", "netns", self.name)
            self._ip("link", "add", self.name, "type", "veth", *inside)
            self._ip("addr", "add", f"{network}.1/30", "dev", self.name)
            self._ip("-n", self.name, "addr", "add", f"{self.address}/30", "dev", f"{self.name}p")
            for words in ((self.name,), (f"{self.name}p",), ("lo",)):
                where = () if words == (self.name,) else ("-n", self.name)
                self._ip(*where, "link", "set", *words, "up")
        except BaseException:
            self.remove()
            raise

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=COMMAND_DEADLINE_S)

    def command(self, *words: str) -> list[str]:
        """The command that runs `words` at the other end."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        """Nothing goes through, without a word."""
        self._ip("link", "set", self.name, "down")

    def mend(self) -> None:
        """It is as it was."""
        self._ip("link", "set", self.name, "up")

    def remove(self) -> None:
        """Takes it away."""
        self._ip("netns", "delete", self.name)

    def __enter__(self) -> Link:
        """Returns it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Takes it away."""
        self.remove()


class _Up:
    """Which clusters of this process are up, by their folders."""

    now: ClassVar[set[Path]] = set()
    seen: ClassVar[bool] = False


def was_up() -> bool:
    """Returns whether a cluster of this process has been up since the last call."""
    seen, _Up.seen = _Up.seen, bool(_Up.now)
    return seen


class Ceph:
    """A cluster whose files are in `directory`; its path is short, as sockets are made in it."""

    def __init__(
        self,
        directory: Path,
        *,
        key: bool = False,
        watch_timeout_s: int = WATCH_TIMEOUT_S,
        link: Link | None = None,
        address: str = "127.0.0.1",
        in_memory: bool = False,
    ) -> None:
        """Makes and starts it; `key`: clients need one, which is in `keyring`.

        A client that does not answer for `watch_timeout_s` is given up. Its daemons are at an
        `address`, with a `link` at the other end of that. What its images hold is in a file, or
        `in_memory`: then it is gone with the OSD.
        """
        _Up.now.add(directory)
        _Up.seen = True
        self.link = link
        self.directory = directory
        self.conf = directory / "ceph.conf"
        self.keyring = directory / "keyring"
        self.fsid = str(uuid.uuid4())
        for name in ("mon", "osd", "run", "log"):
            (directory / name).mkdir()
        auth = "cephx" if key else "none"
        text = _CONFIG.format(
            fsid=self.fsid,
            auth=auth,
            directory=directory,
            port=free_port(),
            address=link.address if link else address,
            watch_timeout=watch_timeout_s,
            store="memstore" if in_memory else "bluestore",
        )
        self.conf.write_text(text)
        self.environment = {**os.environ, "CEPH_CONF": str(self.conf)}
        self._make_monitor()
        self._make_osd()
        self.run("ceph", "osd", "pool", "create", POOL, "8")
        self.run("ceph", "osd", "pool", "application", "enable", POOL, "rbd")

    def run(self, *command: str, deadline_s: float = COMMAND_DEADLINE_S) -> str:
        """Runs a command of Ceph's and returns what it printed."""
        done = self.tried(*command, deadline_s=deadline_s)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def tried(
        self, *command: str, deadline_s: float = COMMAND_DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command of Ceph's that may fail."""
        return subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )

    def _daemon(self, *command: str) -> None:
        self.run(*(self.link.command(*command) if self.link else command))

    def rbd(self, *words: str) -> str:
        """Runs `rbd` and returns what it printed."""
        return self.run("rbd", *words)

    def image(self, name: str, size_in_mib: int = 64, *options: str) -> str:
        """Makes an image; returns its name."""
        self.rbd("create", "--size", f"{size_in_mib}M", *options, f"{POOL}/{name}")
        return name

    @contextlib.contextmanager
    def opened(self, image: str) -> Iterator[None]:
        """Another client, not a target, has an image open for a block, and locks it not."""
        command = ["rbd", "watch", f"{POOL}/{image}"]
        pipe = subprocess.PIPE
        client = subprocess.Popen(command, env=self.environment, stdin=pipe, stdout=pipe)
        try:
            assert client.stdout is not None and client.stdout.readline(), "it could not be opened"
            yield
        finally:
            client.communicate(b"\n", timeout=COMMAND_DEADLINE_S)

    def users(self, image: str) -> tuple[str, list[str]]:
        """How targets write to an image, `alone` or `shared`, and their clients: client.4123."""
        identity = json.loads(self.rbd("info", "--format", "json", f"{POOL}/{image}"))["id"]
        words = ("lock", "info", f"rbd_header.{identity}", "virtlun.kind")
        lock = json.loads(self.run("rados", "-p", POOL, *words))
        return lock["tag"], [each["name"] for each in lock["lockers"]]

    def forget_user(self, image: str) -> None:
        """Takes away that the one client that has an image writes to it."""
        identity = json.loads(self.rbd("info", "--format", "json", f"{POOL}/{image}"))["id"]
        lock = (f"rbd_header.{identity}", "virtlun.kind")
        [user] = json.loads(self.run("rados", "-p", POOL, "lock", "info", *lock))["lockers"]
        words = ("lock", "break", *lock, user["name"], "--lock-cookie", user["cookie"])
        self.run("rados", "-p", POOL, *words)

    def cut_off_deletion(self, image: str) -> None:
        """Leaves an image as a target does that is killed while it deletes it: in the trash."""
        told = json.loads(self.rbd("info", "--format", "json", f"{POOL}/{image}"))
        mark = f"virtlun.deleted.{told['id']}"
        self.rbd("image-meta", "set", f"{POOL}/{image}", mark, "1")
        self.rbd("trash", "mv", f"{POOL}/{image}")

    def trash(self) -> set[str]:
        """Returns the names of the images in the trash of the pool."""
        listed = json.loads(self.rbd("trash", "ls", "--format", "json", POOL))
        return {each["name"] for each in listed}

    def content(self, image: str) -> bytes:
        """Returns what `rbd export` says an image or snapshot holds."""
        path = self.directory / "exported"
        path.unlink(missing_ok=True)
        self.rbd("export", "--no-progress", f"{POOL}/{image}", str(path))
        return path.read_bytes()

    def pid(self, daemon: str) -> int:
        """The process of `mon.a` or `osd.0`."""
        return int((self.directory / "run" / f"{daemon}.pid").read_text())

    def kill_osd(self) -> None:
        """Ends the OSD as a crash does."""
        pid = self.pid("osd.0")
        os.kill(pid, signal.SIGKILL)
        until(lambda: not _runs(pid), "the OSD to be gone")

    def start_osd(self) -> None:
        """Starts the OSD."""
        self._daemon("ceph-osd", "--id", "0")

    def kill_monitor(self) -> None:
        """Ends the monitor as a crash does."""
        pid = self.pid("mon.a")
        os.kill(pid, signal.SIGKILL)
        until(lambda: not _runs(pid), "the monitor to be gone")

    def start_monitor(self) -> None:
        """Starts the monitor."""
        self._daemon("ceph-mon", "--id", "a")

    def stop(self) -> None:
        """Ends all of it."""
        self._went_down()
        for daemon in ("osd.0", "mon.a"):
            with contextlib.suppress(OSError, ValueError):
                pid = self.pid(daemon)
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
                until(lambda pid=pid: not _runs(pid), f"{daemon} to be gone")  # type: ignore[misc]

    def _went_down(self) -> None:
        """Notes that it is not up any more."""
        _Up.now.discard(self.directory)

    def _make_monitor(self) -> None:
        ring = str(self.keyring)
        for name, caps in (
            ("mon.", ("mon", "allow *")),
            ("client.admin", ("mon", "allow *", "osd", "allow *", "mgr", "allow *")),
        ):
            pairs = zip(caps[::2], caps[1::2], strict=True)
            given = [word for pair in pairs for word in ("--cap", *pair)]
            create = [] if self.keyring.exists() else ["--create-keyring"]
            self.run("ceph-authtool", ring, *create, "--gen-key", "-n", name, *given)
        monmap, address = str(self.directory / "monmap"), self._monitor()
        self.run("monmaptool", "--create", "--fsid", self.fsid, "--addv", "a", address, monmap)
        self.run("ceph-mon", "--id", "a", "--mkfs", "--monmap", monmap, "--keyring", ring)
        self.start_monitor()

    def _monitor(self) -> str:
        (line,) = (line for line in self.conf.read_text().splitlines() if "mon host" in line)
        return f"[{line.split(' = ')[1]}]"

    def _make_osd(self) -> None:
        identity = str(uuid.uuid4())
        self.run("ceph", "osd", "new", identity)
        self.run("ceph", "osd", "crush", "add", "osd.0", "1", "root=default")
        ring = self.directory / "osd" / "keyring"
        self.run("ceph-authtool", str(ring), "--create-keyring", "--gen-key", "-n", "osd.0")
        allowed = ("osd", "allow *", "mon", "allow profile osd")
        self.run("ceph", "auth", "add", "osd.0", *allowed, "-i", str(ring))
        self.run("ceph-osd", "--id", "0", "--mkfs", "--osd-uuid", identity)
        self.start_osd()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def lacks() -> list[str]:
    """Programs of PACKAGES that are not installed."""
    return [name for name in ("ceph-mon", "ceph-osd", "rbd") if shutil.which(name) is None]


@contextlib.contextmanager
def cluster(
    *,
    key: bool = False,
    watch_timeout_s: int = WATCH_TIMEOUT_S,
    link: Link | None = None,
    in_memory: bool = False,
) -> Iterator[Ceph]:
    """A cluster for the duration of a block."""
    with short_directory("ceph-", "/var/tmp") as directory:
        made: list[Ceph] = []
        try:
            made.append(
                Ceph(
                    directory,
                    key=key,
                    watch_timeout_s=watch_timeout_s,
                    link=link,
                    in_memory=in_memory,
                )
            )
            yield made[0]
        finally:
            (made or [_Unmade(directory)])[0].stop()


class _Unmade(Ceph):
    """What is there of a cluster that could not be made."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
