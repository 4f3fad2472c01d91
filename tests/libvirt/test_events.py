"""Events of our disks are those that libvirtd sends for its own in the same calls.

Of the definition alone that is none. The first disk of ours is another matter: where it changes
what the domain boots, the gateway defines the domain anew, and clients are told of that.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "events"


class Watcher:
    """`virsh event --all --loop` through the gateway, into a file."""

    def __init__(self, uri: str, log: Path) -> None:
        self.log = log
        words = ["stdbuf", "-oL", "virsh", "-c", uri, "event", "--all", "--loop"]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    def close(self) -> None:
        """Ends virsh."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def running(host: Host, tmp_path: Path) -> Iterator[Host]:
    """A running domain that can have disks of both kinds, and a volume and a file for them."""
    host.volumes.create("lvs0/ours", 8 << 20)
    with (host.scratch / "theirs.img").open("wb") as file:
        file.truncate(8 << 20)
    (host.scratch / "theirs.img").chmod(0o666)
    host.volumes.create("lvs0/boot", 8 << 20)
    disk = "<disk type='file'><source file='/dev/virtlun/lvs0/boot'/><target dev='sda'/></disk>"
    host.define(NAME, devices=disk)
    host.virsh("start", NAME)
    yield host
    host.virsh("destroy", NAME)


def until(condition: Callable[[], bool], deadline_s: float = 120.0) -> None:
    """Returns when `condition` holds."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def events(host: Host, watcher: Watcher, source: str, dev: str) -> list[str]:
    """Attaches a disk to the definition, detaches it, and returns the events of that.

    A change of somebody's metadata shows that virsh has registered, and another one ends it all.
    """

    def told(words: str) -> bool:
        uri = f"http://example.org/{words}"
        host.virsh("metadata", NAME, uri, "--key", "m", "--set", "<m/>", "--config")
        return f"/{words}" in watcher.log.read_text()

    until(lambda: told("begin"))
    host.virsh("attach-disk", NAME, source, dev, "--config")
    host.virsh("detach-disk", NAME, dev, "--config")
    until(lambda: told("end"))
    return [line for line in watcher.log.read_text().splitlines() if "example.org" not in line]


def test_a_disk_more_in_the_definition_is_told_as_one_of_libvirts(
    running: Host, tmp_path: Path
) -> None:
    found = []
    for source, dev in (
        (str(running.scratch / "theirs.img"), "vdb"),
        ("/dev/virtlun/lvs0/ours", "sdb"),
    ):
        watcher = Watcher(running.uri, tmp_path / dev)
        try:
            found.append(events(running, watcher, source, dev))
        finally:
            watcher.close()
    theirs, ours = found
    assert ours == theirs
