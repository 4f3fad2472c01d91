"""A guest whose thin volume finds no room: paused as libvirt pauses one, and resumed. Real QEMU."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plugin.gateway import autoresume, ioerrors
from tests.support.agent import Agent
from tests.support.failing_disk import FailingDisk, failing_disk
from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU
from tests.support.night import at_night
from tests.support.wait import until
from tests.support.watcher import Watcher

pytestmark = [pytest.mark.root, pytest.mark.vm]

DEADLINE_S = 120.0
MIB = 1 << 20
SIZE_MIB = 24
"""What the guest writes."""
LEFT_MIB = 4
"""What there is room for."""


@dataclass(frozen=True)
class Bus:
    """How the guest has the disk."""

    name: str
    dev: str
    alias: str
    """As libvirt's clients see it."""

    def disk(self, path: str, driver: str = "") -> str:
        """Returns the disk on the volume LVSTORE/LVOL as a client writes it."""
        return (
            f"<disk type='file' device='disk'>{driver}<source file='/dev/virtlun/{path}'/>"
            f"<target dev='{self.dev}' bus='{self.name}'/></disk>"
        )

    @property
    def write(self) -> str:
        """What the guest runs that needs more room than there is."""
        return (
            f"dd if=/dev/urandom of=/tmp/data bs=1M count={SIZE_MIB} 2> /dev/null;"
            f" (dd if=/tmp/data of=/dev/{self.dev} bs=64k conv=fsync > /tmp/dd 2>&1;"
            " echo $? > /tmp/rc) < /dev/null > /dev/null 2>&1 &"
        )


SCSI = Bus("scsi", "sda", "virtlun-disk-sda")
VIRTIO = Bus("virtio", "vda", "virtio-disk0")
#: Of a virtio disk by night alone: by day a guest without room on a SCSI disk shows the same.
each_bus = pytest.mark.parametrize(
    "bus", [SCSI, pytest.param(VIRTIO, marks=pytest.mark.nightly)], ids=lambda bus: bus.name
)


@pytest.fixture
def full(host: Host) -> Iterator[Callable[..., None]]:
    """Defines a domain of that name, whose disk is a thin volume in a store that is almost full."""
    made: list[str] = []

    def make(name: str, bus: Bus, **options: Any) -> None:
        made.append(name)
        host.volumes.create(f"lvs0/{name}", 2 * SIZE_MIB * MIB, thin=True)
        free = host.volumes.lvstore("lvs0").free
        host.volumes.create("lvs0/filler", free - LEFT_MIB * MIB)
        host.define(name, devices=bus.disk(f"lvs0/{name}"), **options)
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


def grow(host: Host) -> None:
    """Makes the store larger."""
    host.volumes.resize_lvstore("lvs0", host.volumes.lvstore("lvs0").total + 4 * SIZE_MIB * MIB)


def ends_well(host: Host, name: str, guest: Agent, bus: Bus) -> None:
    """Waits until the guest has written all, and looks at what it reads."""
    assert guest.wait_for("cat /tmp/rc", DEADLINE_S).strip() == "0", guest.run("cat /tmp/dd")
    read = guest.run(
        "echo 3 > /proc/sys/vm/drop_caches;"
        f" dd if=/dev/{bus.dev} bs=1M count={SIZE_MIB} 2> /dev/null | cmp - /tmp/data && echo same",
        DEADLINE_S,
    )
    assert read.strip() == "same"
    assert host.virsh("domstate", name).strip() == "running"
    assert "error" not in host.console(name).lower()


@pytest.mark.parametrize(
    ("bus", "room"),
    [
        pytest.param(SCSI, make_room, id="scsi-deleted"),
        at_night(VIRTIO, grow, id="virtio-grown"),
    ],
)
def test_a_guest_without_room_is_paused_and_goes_on_when_there_is(
    host: Host,
    full: Callable[..., None],
    tmp_path: Path,
    bus: Bus,
    room: Callable[[Host], None],
) -> None:
    name = f"no-room-{bus.name}"
    full(name, bus)
    guest = host.agent(name)
    watcher = Watcher(host.uri, tmp_path / "events")
    try:
        until(lambda: watcher.hears(host, name), "virsh listens", DEADLINE_S)
        guest.run(bus.write, DEADLINE_S)
        until(lambda: is_paused(host, name), "it is paused", DEADLINE_S)
        # To libvirtd a client did it.
        assert host.virsh_direct("domstate", name, "--reason").strip() == "paused (user)"
        assert host.virsh("domblkerror", name).split() == [f"{bus.dev}:", "no", "space"]
        source = f"/dev/virtlun/lvs0/{name}"
        told = f"event 'io-error-reason' for domain '{name}': {source} ({bus.alias}) pause"
        until(lambda: f"{told} due to enospc" in watcher.text, "it is told why", DEADLINE_S)
        assert f"<alias name='{bus.alias}'/>" in host.virsh("dumpxml", name)
        told = f"event 'lifecycle' for domain '{name}': Suspended"
        until(lambda: told in watcher.text, "it is told that", DEADLINE_S)
        assert f"{told} I/O Error" in watcher.text
        assert f"{told} Paused" not in watcher.text

        (row,) = json.loads(virtlun(host, "errors", "--json"))
        shown = tuple(row[key] for key in ("domain", "dev", "volume", "target", "error"))
        number = 0 if bus is SCSI else None
        assert shown == (name, bus.dev, f"lvs0/{name}", number, "no_space")

        # Without room it is paused again.
        before = watcher.text.count("due to enospc")
        assert virtlun(host, "retry", name) == f"{name} is resumed and tries again\n"
        until(lambda: watcher.text.count("due to enospc") > before, "it is told again", DEADLINE_S)
        until(lambda: is_paused(host, name), "it is paused again", DEADLINE_S)
        time.sleep(3 * ioerrors.POLL_S)
        assert is_paused(host, name), "nobody resumes it without room"

        # With room it goes on by itself.
        room(host)
        ends_well(host, name, guest, bus)
        told = f"event 'lifecycle' for domain '{name}': Resumed"
        until(lambda: told in watcher.text, "it is told that it goes on", DEADLINE_S)
        assert host.virsh("domblkerror", name).strip() == "No errors found"
        assert json.loads(virtlun(host, "errors", "--json")) == []
        assert virtlun(host, "retry", name).endswith("nothing to try again\n")
    finally:
        watcher.close()
        guest.close()


@pytest.fixture
def small(host: Host, tmp_path: Path) -> Iterator[Path]:
    """Where an lvstore `small` is, on a file that finds no more room in its file system."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(folder))
    subprocess.run(mount, check=True)
    try:
        # Where the target is, so that it sees that file system, which libvirtd does not.
        host.stop_gateway()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host.libvirtd, "command", lambda *words: list(words))
            host.start_gateway()
        host.volumes.create_lvstore("small", folder / "file", 200 * MIB)
        host.volumes.create("small/data", 2 * SIZE_MIB * MIB, thin=True)
        yield folder
        host.virsh("destroy", "small", check=False)
        host.virsh("undefine", "small")
        host.volumes.delete("small/data")
        host.volumes.delete_lvstore("small")
    finally:
        host.stop_gateway()
        host.start_gateway()
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.nightly
@each_bus
def test_a_guest_goes_on_when_the_file_system_below_its_lvstore_has_room(
    host: Host, small: Path, bus: Bus
) -> None:
    name = "small"
    host.define(name, devices=bus.disk("small/data"))
    host.virsh("start", name)
    guest = host.agent(name)
    try:
        (small / "filler").write_bytes(bytes((SIZE_MIB // 2) * MIB))
        guest.run(bus.write, DEADLINE_S)
        until(lambda: is_paused(host, name), "it is paused", DEADLINE_S)
        assert host.volumes.lvstore("small").free > SIZE_MIB * MIB
        # Perhaps it is tried once more before it is known what it waits for.
        time.sleep(autoresume.AGAIN_S + 4 * ioerrors.POLL_S)
        until(lambda: is_paused(host, name), "it stays paused", DEADLINE_S)
        (small / "filler").unlink()
        subprocess.run(["mount", "-o", f"remount,size={4 * SIZE_MIB}m", str(small)], check=True)
        ends_well(host, name, guest, bus)
    finally:
        guest.close()


@pytest.mark.nightly
@each_bus
def test_what_an_administrator_wants_paused_stays_so(
    host: Host, full: Callable[..., None], bus: Bus
) -> None:
    name = f"paused-{bus.name}"
    full(name, bus)
    guest = host.agent(name)
    try:
        guest.run(bus.write, DEADLINE_S)
        until(lambda: is_paused(host, name), "it is paused", DEADLINE_S)
        host.virsh("suspend", name)
        make_room(host)
        time.sleep(4 * ioerrors.POLL_S)
        assert is_paused(host, name)
        host.virsh("resume", name)
        ends_well(host, name, guest, bus)
    finally:
        guest.close()


@pytest.mark.nightly
@each_bus
def test_a_guest_that_is_saved_while_it_waits_goes_on_where_it_is_restored(
    host: Host, full: Callable[..., None], bus: Bus
) -> None:
    """What waits goes with the guest's memory."""
    name = f"saved-{bus.name}"
    full(name, bus)
    guest = host.agent(name)
    guest.run(bus.write, DEADLINE_S)
    until(lambda: is_paused(host, name), "it is paused", DEADLINE_S)
    guest.close()
    host.virsh("managedsave", name, "--running")
    make_room(host)
    host.virsh("start", name)
    guest = host.agent(name)
    ends_well(host, name, guest, bus)
    guest.close()


@pytest.mark.nightly
@each_bus
def test_nothing_is_lost_where_gateway_and_target_are_away_meanwhile(
    host: Host, full: Callable[..., None], bus: Bus
) -> None:
    name = f"away-{bus.name}"
    try:
        # An older one does not see that the target of a paused guest has gone.
        full(name, bus, emulator=NEWER_QEMU)
        guest = host.agent(name)
        host.stop_gateway()
        guest.run(bus.write, DEADLINE_S)
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
        ends_well(host, name, guest, bus)
        guest.close()
    finally:
        if not host.has_gateway:
            host.start_gateway()


@pytest.mark.nightly
@each_bus
def test_a_guest_that_is_to_be_told_is_told(
    host: Host, full: Callable[..., None], bus: Bus
) -> None:
    name = f"told-{bus.name}"
    full(name, bus)
    host.virsh("destroy", name)
    xml = host.virsh("dumpxml", name, "--inactive")
    (driver,) = re.findall("<driver [^>]*type='raw'[^>]*/>", xml)
    path = host.scratch / "told.xml"
    path.write_text(xml.replace(driver, driver.replace("/>", " error_policy='report'/>")))
    host.virsh("define", str(path))
    host.virsh("start", name)
    guest = host.agent(name)
    guest.run(bus.write, DEADLINE_S)
    assert guest.wait_for("cat /tmp/rc", DEADLINE_S).strip() != "0"
    assert host.virsh("domstate", name).strip() == "running"
    guest.close()


STOP = "<driver name='qemu' type='raw' error_policy='stop' rerror_policy='stop'/>"
KNOWN = "dd if=/dev/urandom of=/tmp/data bs=64k count=16 2> /dev/null"
FAILS = {
    "read_medium": "dd if=/dev/DEV of=/tmp/back bs=64k skip=320 count=16 iflag=direct",
    "write_medium": "dd if=/tmp/data of=/dev/DEV bs=64k seek=384 count=16 conv=fsync",
}
"""By the target's word for the error, what a guest does where the disk fails, 20 MiB in."""


@pytest.fixture
def failing(host: Host, tmp_path: Path, bus: Bus) -> Iterator[FailingDisk]:
    """A domain `failing` that runs with a volume on such a disk; it is to stop at each error."""
    with failing_disk(tmp_path) as disk:
        host.volumes.create_lvstore("failing", Path(disk.device))
        host.volumes.create("failing/data", 40 * MIB)
        host.define("failing", devices=bus.disk("failing/data", STOP))
        host.virsh("start", "failing")
        try:
            yield disk
        finally:
            host.virsh("destroy", "failing", check=False)
            host.virsh("undefine", "failing")
            host.volumes.delete("failing/data")
            host.volumes.delete_lvstore("failing")


@pytest.mark.nightly
@each_bus
def test_a_guest_whose_disk_fails_is_paused_and_goes_on_when_it_is_mended(
    host: Host, failing: FailingDisk, tmp_path: Path, bus: Bus
) -> None:
    name = "failing"
    fails = {error: command.replace("DEV", bus.dev) for error, command in FAILS.items()}
    guest = host.agent(name)
    watcher = Watcher(host.uri, tmp_path / "events")
    try:
        until(lambda: watcher.hears(host, name), "virsh listens", DEADLINE_S)
        guest.run(f"{KNOWN}; {fails['write_medium'].replace('384', '320')} 2> /dev/null")
        told = f"event 'io-error-reason' for domain '{name}': /dev/virtlun/failing/data"
        for error, command in fails.items():
            failing.fail()
            heard = watcher.text.count(told)
            guest.run(
                f"rm -f /tmp/rc; ({command} > /tmp/dd 2>&1; echo $? > /tmp/rc)"
                " < /dev/null > /dev/null 2>&1 &"
            )
            until(lambda: is_paused(host, name), f"{error}: it is paused", DEADLINE_S)
            assert host.virsh("domblkerror", name).split() == [
                f"{bus.dev}:",
                "unspecified",
                "error",
            ]
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
        read = f"dd if=/dev/{bus.dev} bs=64k skip=384 count=16 iflag=direct 2> /dev/null"
        same = f"cmp /tmp/data /tmp/back && {read} | cmp - /tmp/data && echo same"
        assert guest.run(same).strip() == "same", "what was read, and what was written"
        assert "error" not in host.console(name).lower(), "the guest has heard of none"
    finally:
        watcher.close()
        guest.close()
