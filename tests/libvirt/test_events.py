"""Events of our disks are those that libvirtd sends for its own in the same calls.

Of the definition alone that is none, also where a disk of ours changes what the domain boots, for
which the gateway defines the domain anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host import Host
from tests.support.night import by_day
from tests.support.wait import until
from tests.support.watcher import Watcher

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "events"
DEADLINE_S = 120.0

BOOTS = "<disk type='file'><source file='/dev/virtlun/lvs0/boot'/><target dev='sda'/></disk>"


@pytest.fixture(params=[BOOTS, ""], ids=["boots another", "is the first disk"])
def running(host: Host, request: pytest.FixtureRequest) -> Iterator[Host]:
    """A running domain that can have disks of both kinds, and a volume and a file for them."""
    made = [host.volumes.create(f"lvs0/{name}", 8 << 20) for name in ("ours", "boot")]
    with (host.scratch / "theirs.img").open("wb") as file:
        file.truncate(8 << 20)
    (host.scratch / "theirs.img").chmod(0o666)
    host.define(NAME, devices=request.param)
    host.virsh("start", NAME)
    yield host
    host.virsh("destroy", NAME)
    host.virsh("undefine", NAME)
    for volume in made:
        host.volumes.delete(volume.uuid)


def events(host: Host, watcher: Watcher, source: str, dev: str) -> list[str]:
    """Attaches a disk to the definition, detaches it, and returns the events of that.

    A change of somebody's metadata shows that virsh has registered, and another one ends it all.
    """

    def told(words: str) -> bool:
        uri = f"http://example.org/{words}"
        host.virsh("metadata", NAME, uri, "--key", "m", "--set", "<m/>", "--config")
        return f"/{words}" in watcher.text

    until(lambda: told("begin"), "virsh listens", DEADLINE_S)
    host.virsh("attach-disk", NAME, source, dev, "--config")
    host.virsh("detach-disk", NAME, dev, "--config")
    until(lambda: told("end"), "all is told", DEADLINE_S)
    return [line for line in watcher.text.splitlines() if "example.org" not in line]


@pytest.mark.nightly
def test_a_disk_more_in_the_definition_is_told_as_one_of_libvirts(
    running: Host, tmp_path: Path
) -> None:
    found = []
    for source, dev in (
        (str(running.scratch / "theirs.img"), "vdb"),
        ("/dev/virtlun/lvs0/ours", "sdb"),
        ("/dev/virtlun/lvs0/ours", "vdc"),
    ):
        watcher = Watcher(running.uri, tmp_path / dev)
        try:
            found.append(events(running, watcher, source, dev))
        finally:
            watcher.close()
    theirs, lun, blk = found
    assert lun == blk == theirs


@by_day("is the first disk")
def test_a_definition_that_a_client_replaces_is_told(running: Host, tmp_path: Path) -> None:
    """Also after the gateway has replaced it, for a disk: that event alone was held back."""
    watcher = Watcher(running.uri, tmp_path / "log")
    path = tmp_path / "domain.xml"
    try:
        told = events(running, watcher, "/dev/virtlun/lvs0/ours", "sdb")
        assert not [line for line in told if "Defined" in line]
        path.write_text(running.virsh("dumpxml", NAME, "--inactive"))
        for _ in range(2):
            running.virsh("define", str(path))
        until(lambda: watcher.text.count("Defined Updated") == 2, lambda: watcher.text, DEADLINE_S)
    finally:
        watcher.close()
