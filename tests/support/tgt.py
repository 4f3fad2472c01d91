"""A real iSCSI target for tests: Debian's tgt, as a process with a control socket of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.frozen import frozen
from tests.support.ports import free_port
from tests.support.wait import until

IQN = "iqn.2026-11.org.virtlun:disks"
"""Name of the target."""
CONTROL = "1"


def lacks() -> str:
    """Returns what is not installed that this needs."""
    has = shutil.which("tgtd") and shutil.which("tgtadm")
    return "" if has else "tgt"


class Tgt:
    """One tgtd at a time, at a port of this host; a context manager that ends it.

    Started again it has the same LUNs, which are files.
    """

    def __init__(self, folder: Path) -> None:
        """Prepares it, with a folder for its files."""
        self.folder = folder
        self.port = free_port()
        self.user: tuple[str, str] | None = None
        self.luns: dict[int, tuple[Path, dict[str, str]]] = {}
        self._log = folder / "tgtd.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Tgt:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill9()

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "TGT_IPC_SOCKET": str(self.folder / "tgt")}

    def url(self, lun: int = 1, login: str = "") -> str:
        """Returns the address of a LUN; `login` is USER%PASSWORD@."""
        return f"iscsi://{login}127.0.0.1:{self.port}/{IQN}/{lun}"

    def start(self) -> Tgt:
        """Starts it and waits until its LUNs can be used."""
        assert self._process is None, "it runs already"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "tgtd",
                    "-f",
                    "-C",
                    CONTROL,
                    "-t",
                    "2",
                    "--iscsi",
                    f"portal=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        until(self._is_there, lambda: f"tgtd is there: {self._log.read_text()}")
        self.admin("target", "new", "--targetname", IQN)
        if self.user is not None:
            self._set_user(*self.user)
        for lun, (path, options) in self.luns.items():
            self._show(lun, path, options)
        # Only now is anybody let in.
        self.admin("target", "bind", "--initiator-address", "ALL")
        return self

    def _is_there(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return (self.folder / f"tgt.{CONTROL}").exists()
        return False

    def admin(self, mode: str, operation: str, *words: str) -> str:
        """Runs tgtadm on the target."""
        of_all = (mode, operation) in {("account", "new"), ("target", "show")}
        of = [] if of_all else ["--tid", "1"]
        command = ["tgtadm", "-C", CONTROL, "--lld", "iscsi", "--mode", mode, "--op", operation]
        return subprocess.run(
            [*command, *of, *words],
            check=True,
            capture_output=True,
            text=True,
            env=self._environment,
        ).stdout

    def require(self, user: str, password: str) -> None:
        """Lets in only who proves to be `user` (CHAP)."""
        self.user = (user, password)
        self._set_user(user, password)

    def prove(self, user: str, password: str) -> None:
        """Proves to be `user` to whoever asks for that, until it ends."""
        self.admin("account", "new", "--user", user, "--password", password)
        self.admin("account", "bind", "--user", user, "--outgoing")

    def _set_user(self, user: str, password: str) -> None:
        self.admin("account", "new", "--user", user, "--password", password)
        self.admin("account", "bind", "--user", user)

    def disk(self, lun: int = 1, size: int = 8 << 20, **options: str) -> Path:
        """Makes a file of that size a LUN, with tgtadm's parameters; returns it."""
        path = self.folder / f"lun-{lun}.img"
        with path.open("ab") as file:
            file.truncate(size)
        self.luns[lun] = path, options
        self._show(lun, path, options)
        return path

    def _show(self, lun: int, path: Path, options: dict[str, str]) -> None:
        size = ["--blocksize", options["blocksize"]] if "blocksize" in options else []
        self.admin("logicalunit", "new", "--lun", str(lun), "--backing-store", str(path), *size)
        for name, value in options.items():
            if name != "blocksize":
                self.set(lun, **{name: value})

    def set(self, lun: int, **options: str) -> None:
        """Sets parameters of a LUN."""
        words = ",".join(f"{name}={value}" for name, value in options.items())
        self.admin("logicalunit", "update", "--lun", str(lun), "--params", words)

    def remove(self, lun: int) -> None:
        """Takes a LUN away; its file stays."""
        self.admin("logicalunit", "delete", "--lun", str(lun))

    @contextlib.contextmanager
    def reserved(self, lun: int = 1) -> Iterator[None]:
        """Has another initiator reserve a LUN (RESERVE) for the duration of a block."""
        library = ctypes.CDLL("libiscsi.so.7")
        for of in (library.iscsi_create_context, library.iscsi_reserve6_sync):
            of.restype = ctypes.c_void_p
        context = ctypes.c_void_p(library.iscsi_create_context(b"iqn.2026-11.org.virtlun:other"))
        library.iscsi_set_targetname(context, IQN.encode())
        library.iscsi_set_session_type(context, 2)
        portal = f"127.0.0.1:{self.port}".encode()
        try:
            assert library.iscsi_full_connect_sync(context, portal, lun) == 0
            task = ctypes.c_void_p(library.iscsi_reserve6_sync(context, lun))
            assert ctypes.c_int.from_address(task.value or 0).value == 0, "it is reserved"
            yield
        finally:
            library.iscsi_destroy_context(context)

    def sessions(self) -> int:
        """Returns how many initiators are logged in."""
        return self.admin("target", "show").count("I_T nexus: ")

    def kill9(self) -> None:
        """Ends it as a crash does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Has it stand still for the duration of a block."""
        assert self._process is not None
        with frozen(self._process.pid):
            yield
