"""A guest whose thin volume finds no room: paused as libvirt pauses one, and resumed. Real QEMU."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plugin.gateway import ioerrors
from tests.support.agent import Agent
from tests.support.failing_disk import FailingDisk, failing_disk
from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU
from tests.support.wait import until
from tests.support.watcher import Watcher

pytestmark = [pytest.mark.root, pytest.mark.vm]

DEADLINE_S = 120.0
MIB = 1 << 20
SIZE_MIB = 24
"""What the guest writes."""
LEFT_MIB = 4
"""What there is room for."""

WRITE = (
    f"dd if=/dev/urandom of=/tmp/data bs=1M count={SIZE_MIB} 2> /dev/null;"
    f" (dd if=/tmp/data of=/dev/sda bs=64k conv=fsync > /tmp/dd 2>&1; echo $? > /tmp/rc)"
    " < /dev/null > /dev/null 2>&1 &"
)


@pytest.fixture
def full(host: Host) -> Iterator[Callable[[str], None]]:
    """Defines a domain of that name, whose disk is a thin volume in a store that is almost full."""
    made: list[str] = []

    def make(name: str, **options: Any) -> None:
        made.append(name)
        host.volumes.create(f"lvs0/{name}", 2 * SIZE_MIB * MIB, thin=True)
        free = host.volumes.lvstore("lvs0").free
        host.volumes.create("lvs0/filler", free - LEFT_MIB * MIB)
        host.define(
            name,
            devices="<disk type='file' device='disk'>"
            f"<source file='/dev/virtlun/lvs0/{name}'/><target dev='sda' bus='scsi'/></disk>",
            **options,
        )
        host.virsh("start", name)

    yield make
    for name in made:
        host.virsh("destroy", name, check=False)
        host.virsh("undefine", name, check=False)
        host.volumes.delete(f"lvs0/{name}")
    make_room(host)


def make_room(host: Host) -> None:
    """Deletes what fills the store, if it is there."""
    if any(volume.name == "filler" for volume in host.volumes.volumes()):
        host.volumes.delete("lvs0/filler")


def is_paused(host: Host, name: str) -> bool:
    """Whether a client sees that the domain is paused because of an I/O error."""
    return host.virsh("domstate", name, "--reason").strip() == "paused (I/O error)"


def virtlun(host: Host, *words: str, uri: str | None = None) -> str:
    """Runs `virtlun domain` with these words; returns what it printed."""
    done = subprocess.run(
        [
            *(host.program("virtlun"), "--config", str(host.config), "domain", *words),
            *("--connect", uri or host.uri),
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ends_well(host: Host, name: str, guest: Agent) -> None:
    """Waits until the guest has written all, and looks at what it reads."""
    assert guest.wait_for("cat /tmp/rc", DEADLINE_S).strip() == "0", guest.run("cat /tmp/dd")
    read = guest.run(
        "echo 3 > /proc/sys/vm/drop_caches;"
        f" dd if=/dev/sda bs=1M count={SIZE_MIB} 2> /dev/null | cmp - /tmp/data && echo same",
        DEADLINE_S,
    )
    assert read.strip() == "same"
    assert host.virsh("domstate", name).strip() == "running"
    assert "error" not in host.console(name).lower()


def test_a_guest_without_room_is_paused_and_goes_on_when_there_is(
    host: Host, full: Callable[..., None], tmp_path: Path
) -> None:
    name = "no-room"
    full(name)
    guest = host.agent(name)
    watcher = Watcher(host.uri, tmp_path / "events")
    try:
        until(lambda: watcher.hears(host, name), "virsh listens", DEADLINE_S)
        guest.run(WRITE, DEADLINE_S)
        until(lambda: is_paused(host, name), "it is paused", DEADLINE_S)
        # To libvirtd a client did it.
        assert host.virsh_direct("domstate", name, "--reason").strip() == "paused (user)"
        assert host.virsh("domblkerror", name).split() == ["sda:", "no", "space"]
        source = f"/dev/virtlun/lvs0/{name}"
        told = f"event 'io-error-reason' for domain '{name}': {source} (virtlun-disk-sda) pause"
        until(lambda: f"{told} due to enospc" in watcher.text, "it is told why", DEADLINE_S)
        told = f"event 'lifecycle' for domain '{name}': Suspended"
        until(lambda: told in watcher.text, "it is told that", DEADLINE_S)
        assert f"{told} I/O Error" in watcher.text
        assert f"{told} Paused" not in watcher.text

        (row,) = json.loads(virtlun(host, "errors", "--json"))
        shown = tuple(row[key] for key in ("domain", "dev", "volume", "target", "error"))
        assert shown == (name, "sda", f"lvs0/{name}", 0, "no_space")

        # Without room it is paused again.
        before = watcher.text.count("due to enospc")
        assert virtlun(host, "retry", name) == f"{name} is resumed and tries again\n"
        until(lambda: watcher.text.count("due to enospc") > before, "it is told again", DEADLINE_S)
        until(lambda: is_paused(host, name), "it is paused again", DEADLINE_S)

        make_room(host)
        host.virsh("resume", name)
        ends_well(host, name, guest)
        assert host.virsh("domblkerror", name).strip() == "No errors found"
        assert json.loads(virtlun(host, "errors", "--json")) == []
        assert virtlun(host, "retry", name).endswith("nothing to try again\n")
    finally:
        watcher.close()
        guest.close()


def test_nothing_is_lost_where_gateway_and_target_are_away_meanwhile(
    host: Host, full: Callable[..., None]
) -> None:
    name = "away"
    try:
        full(name, emulator=NEWER_QEMU)
        guest = host.agent(name)
        host.stop_gateway()
        guest.run(WRITE, DEADLINE_S)
        until(lambda: bool(host.client.call("virtlun_vhost_get_suspended")), "it waits", DEADLINE_S)
        host.kill_target()
        host.start_target()
        until(
            lambda: bool(host.client.call("virtlun_vhost_get_suspended")),
            "it waits again",
            DEADLINE_S,
        )
        assert host.virsh_direct("domstate", name).strip() == "running"
        own = host.libvirtd.uri()
        assert virtlun(host, "retry", name, uri=own) == f"{name} tries again: 1 disk\n"
        until(lambda: bool(host.client.call("virtlun_vhost_get_suspended")), "again", DEADLINE_S)
        host.start_gateway()
        until(lambda: is_paused(host, name), "it is paused", DEADLINE_S)
        # So it is for a gateway that comes later.
        host.stop_gateway()
        host.start_gateway()
        until(lambda: is_paused(host, name), "it is known", DEADLINE_S)
        # The target that kept the request is gone, and the next one has nothing of it.
        host.kill_target()
        host.start_target()
        until(lambda: host.client.call("virtlun_vhost_get_suspended") == [], "new", DEADLINE_S)
        time.sleep(3 * ioerrors.POLL_S)  # the gateway has asked it
        assert is_paused(host, name)
        make_room(host)
        assert virtlun(host, "retry", name) == f"{name} is resumed and tries again\n"
        ends_well(host, name, guest)
        guest.close()
    finally:
        if not host.has_gateway:
            host.start_gateway()


@pytest.mark.nightly
def test_a_guest_that_is_to_be_told_is_told(host: Host, full: Callable[..., None]) -> None:
    name = "told"
    full(name)
    host.virsh("destroy", name)
    xml = host.virsh("dumpxml", name, "--inactive")
    (driver,) = re.findall("<driver [^>]*type='raw'[^>]*/>", xml)
    path = host.scratch / "told.xml"
    path.write_text(xml.replace(driver, driver.replace("/>", " error_policy='report'/>")))
    host.virsh("define", str(path))
    host.virsh("start", name)
    guest = host.agent(name)
    guest.run(WRITE, DEADLINE_S)
    assert guest.wait_for("cat /tmp/rc", DEADLINE_S).strip() != "0"
    assert host.virsh("domstate", name).strip() == "running"
    guest.close()


STOP = (
    "<disk type='file' device='disk'>"
    "<driver name='qemu' type='raw' error_policy='stop' rerror_policy='stop'/>"
    "<source file='/dev/virtlun/failing/data'/><target dev='sda' bus='scsi'/></disk>"
)
KNOWN = "dd if=/dev/urandom of=/tmp/data bs=64k count=16 2> /dev/null"
FAILS = {
    "read_medium": "dd if=/dev/sda of=/tmp/back bs=64k skip=320 count=16 iflag=direct",
    "write_medium": "dd if=/tmp/data of=/dev/sda bs=64k seek=384 count=16 conv=fsync",
}
"""By the target's word for the error, what a guest does where the disk fails, 20 MiB in."""


@pytest.fixture
def failing(host: Host, tmp_path: Path) -> Iterator[FailingDisk]:
    """A domain `failing` that runs with a volume on such a disk; it is to stop at each error."""
    with failing_disk(tmp_path) as disk:
        host.volumes.create_lvstore("failing", Path(disk.device))
        host.volumes.create("failing/data", 40 * MIB)
        host.define("failing", devices=STOP)
        host.virsh("start", "failing")
        try:
            yield disk
        finally:
            host.virsh("destroy", "failing", check=False)
            host.virsh("undefine", "failing")
            host.volumes.delete("failing/data")
            host.volumes.delete_lvstore("failing")


def test_a_guest_whose_disk_fails_is_paused_and_goes_on_when_it_is_mended(
    host: Host, failing: FailingDisk, tmp_path: Path
) -> None:
    name = "failing"
    guest = host.agent(name)
    watcher = Watcher(host.uri, tmp_path / "events")
    try:
        until(lambda: watcher.hears(host, name), "virsh listens", DEADLINE_S)
        guest.run(f"{KNOWN}; {FAILS['write_medium'].replace('384', '320')} 2> /dev/null")
        told = f"event 'io-error-reason' for domain '{name}': /dev/virtlun/failing/data"
        for error, command in FAILS.items():
            failing.fail()
            heard = watcher.text.count(told)
            guest.run(
                f"rm -f /tmp/rc; ({command} > /tmp/dd 2>&1; echo $? > /tmp/rc)"
                " < /dev/null > /dev/null 2>&1 &"
            )
            until(lambda: is_paused(host, name), f"{error}: it is paused", DEADLINE_S)
            assert host.virsh("domblkerror", name).split() == ["sda:", "unspecified", "error"]
            (row,) = json.loads(virtlun(host, "errors", "--json"))
            assert (row["volume"], row["error"]) == ("failing/data", error)
            until(lambda: watcher.text.count(told) > heard, "it is told", DEADLINE_S)  # noqa: B023
            # It fails still.
            heard = watcher.text.count(told)
            host.virsh("resume", name)
            until(lambda: watcher.text.count(told) > heard, "told again", DEADLINE_S)  # noqa: B023
            until(lambda: is_paused(host, name), "it is paused again", DEADLINE_S)
            failing.mend()
            host.virsh("resume", name)
            assert guest.wait_for("cat /tmp/rc", DEADLINE_S).strip() == "0", guest.run(
                "cat /tmp/dd"
            )
            assert host.virsh("domblkerror", name).strip() == "No errors found"
        read = "dd if=/dev/sda bs=64k skip=384 count=16 iflag=direct 2> /dev/null"
        same = f"cmp /tmp/data /tmp/back && {read} | cmp - /tmp/data && echo same"
        assert guest.run(same).strip() == "same", "what was read, and what was written"
        assert "error" not in host.console(name).lower(), "the guest has heard of none"
    finally:
        watcher.close()
        guest.close()
