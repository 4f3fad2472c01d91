"""What virsh is told of events."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.host import Host
from tests.support.wait import until


class Watcher:
    """`virsh event --all --loop` into a file."""

    def __init__(self, uri: str, log: Path) -> None:
        self.log = log
        words = ["stdbuf", "-oL", "virsh", "-c", uri, "event", "--all", "--loop"]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def text(self) -> str:
        """What virsh wrote so far."""
        return self.log.read_text()

    def hears(self, host: Host, name: str) -> bool:
        """Whether virsh has registered: it is told of a change of somebody's metadata."""
        uri = "http://example.org/hears"
        host.virsh("metadata", name, uri, "--key", "m", "--set", "<m/>", "--config")
        return uri in self.text

    def line(self, words: str) -> str:
        """Waits for a line with these words, and returns the first one."""

        def there() -> str | None:
            return next((line for line in self.text.splitlines() if words in line), None)

        return until(there, lambda: f"an event with {words!r} in: {self.text}")

    @property
    def ended(self) -> bool:
        """Whether virsh has ended by itself, as it does with its connection."""
        return self.process.poll() is not None

    def close(self) -> None:
        """Ends virsh."""
        self.process.kill()
        self.process.wait()
