"""A file whose disk answers late, so that requests to it pile up."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.frozen import freeze
from tests.support.target import Target
from tests.support.wait import until

#: For so long the disk answers nothing, then everything that waits.
WAIT_S = 0.12
ANSWER_S = 0.004
DEADLINE_S = 60.0


class SlowDisk:
    """A RAM disk of a second target, exported as a file; a context manager.

    That target is stopped and continued all the time: what a guest has in flight is in flight
    nearly always, and hundreds of requests a second get through. Needs root and /dev/fuse.
    """

    def __init__(self, directory: Path, size: int) -> None:
        """Makes the file `path` of `size` bytes; `directory` must be short (sockets)."""
        directory.mkdir()
        self._backing = Target(directory).start()
        self._bdev = self._backing.rpc("bdev_malloc_create", num_blocks=size // 512, block_size=512)
        self.path = Path(self._backing.rpc("virtlun_export_create", bdev_name=self._bdev)["path"])
        self._ending = threading.Event()
        self._hang, self._hangs = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._delay)
        self._thread.start()

    def _delay(self) -> None:
        pid = self._backing.pid
        while not self._ending.is_set():
            freeze(pid)
            self._ending.wait(WAIT_S)
            while self._hang.is_set() and not self._ending.is_set():
                self._hangs.set()
                self._ending.wait(ANSWER_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(ANSWER_S)

    def hang(self) -> None:
        """Answers nothing from now on."""
        self._hangs.clear()
        self._hang.set()
        assert self._hangs.wait(DEADLINE_S)

    def go_on(self) -> None:
        """Answers again."""
        self._hang.clear()

    def stop(self) -> None:
        """Ends it; nobody may have the file open."""
        self._ending.set()
        self._thread.join()
        # The kernel tells of its closing later; what looks open is left to the holder, which waits.
        until(lambda: not self._listed()["opens"], "the file to be closed")
        self._backing.rpc("virtlun_export_delete", bdev_name=self._bdev)
        assert self._backing.stop() == 0, self._backing.words()

    def _listed(self) -> dict[str, Any]:
        (export,) = self._backing.rpc("virtlun_export_list")
        return dict(export)

    def __enter__(self) -> SlowDisk:
        """Returns the disk."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        self.stop()
