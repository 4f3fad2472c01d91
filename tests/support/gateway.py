"""A gateway process of a test's own, beside or instead of the host's."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.support import warm
from tests.support.wait import listens, serves

#: The gateway on another event loop than asyncio's own.
ON_UVLOOP = """
import asyncio, uvloop
asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
from plugin.gateway.__main__ import main
main()
"""


class GatewayProcess:
    """`virtlun-gateway` with `options`, listening on `path`; a context manager that ends it.

    With `uvloop` it has that event loop, which must be there to import.
    """

    def __init__(
        self, config: Path, path: Path, log: Path, *options: str, uvloop: bool = False
    ) -> None:
        """Starts it and waits for its socket."""
        self.socket = path
        words = ["--config", str(config), "--listen", str(path), "--listen-ro", f"{path}-ro"]
        words += options
        with log.open("ab") as out:
            self._process: subprocess.Popen[bytes]
            if uvloop:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", ON_UVLOOP, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            else:
                self._process = warm.begin(
                    warm.GATEWAY, words, stdout=out, stderr=subprocess.STDOUT
                )
        serves(self._process, lambda: listens(path), "the gateway", log)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Ends it; returns its exit status."""
        self._process.send_signal(how)
        return self._process.wait(timeout=90)

    def __enter__(self) -> GatewayProcess:
        """Returns the running gateway."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        if self._process.poll() is None:
            self.stop()
