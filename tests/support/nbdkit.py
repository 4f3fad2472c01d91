"""A real NBD server for tests: Debian's nbdkit."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from tests.support.frozen import freeze
from tests.support.wait import listens, until


class Nbdkit:
    """One nbdkit at a time, at a UNIX socket or a TCP port; a context manager that ends it.

    What it serves is there again when it is started again, if that is a file.
    """

    def __init__(
        self, folder: Path, *command: str, name: str = "nbd", port: int | None = None
    ) -> None:
        """Prepares it; `command` are its options, the plugin and the plugin's parameters.

        With a `port` it is reached by TCP.
        """
        self.socket = folder / f"{name}.sock"
        self.log = folder / f"{name}.log"
        self.command = command
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Nbdkit:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill9()

    @property
    def uri(self) -> str:
        """Its address as `virtlun_nbd_create` takes it."""
        if self.port is not None:
            return f"nbd://127.0.0.1:{self.port}/"
        return f"nbd+unix:///?socket={quote(str(self.socket))}"

    def start(self) -> Nbdkit:
        """Starts it and waits until it can be connected to."""
        assert self._process is None, "it runs already"
        self.socket.unlink(missing_ok=True)
        port = self.port
        where = ["-U", str(self.socket)] if port is None else ["-i", "127.0.0.1", "-p", str(port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["nbdkit", "-f", "--exit-with-parent", *where, *self.command],
                stdout=log,
                stderr=log,
            )
        until(self._is_there, lambda: f"nbdkit is there: {self.log.read_text()}")
        return self

    def _is_there(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        if self.port is None:
            return listens(self.socket)
        with socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True

    def kill9(self) -> None:
        """Ends it as a crash does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def freeze(self) -> None:
        """Has it stand still from now on."""
        assert self._process is not None
        freeze(self._process.pid)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Has it stand still for the duration of a block."""
        self.freeze()
        try:
            yield
        finally:
            assert self._process is not None
            self._process.send_signal(signal.SIGCONT)
