"""The page for Cockpit, in a real Cockpit and a real browser, on a target with real guests.

With VIRTLUN_WRITE_DOCS=1 the picture for the site is made anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pydataplane.errors import NO_DEVICE, RpcError
from tests.guest.conftest import BootGuest, disk
from tests.support.browser import PHONE, Browser, Page, PageError
from tests.support.cockpit import ROOT, cockpit
from tests.support.frozen import frozen
from tests.support.qemu import Guest
from tests.support.slow_disk import SlowDisk
from tests.support.target import Target
from tests.support.tgt import IQN, Tgt
from tests.support.wait import until

pytestmark = [pytest.mark.nightly, pytest.mark.root, pytest.mark.vm]

MIB = 1 << 20
STORE_MIB = 256
WHERE = "/cockpit/@localhost/virtlun/index.html"
#: No volume's name has a space or a slash, without which there is no attribute in HTML.
MARKUP = "<b>bold<img"
HOSTILE_VM = "<img src=x onerror=document.title=1>"
NOBODY = 65534
HOST = "iqn.2026-11.org.virtlun:host"
PICTURE = ROOT / "docs/pages/how-to/cockpit.png"

Site = str
"""The page's URL."""


@pytest.fixture
def environment(scratch: Path, target: Target) -> dict[str, str]:
    """What makes the page's commands use the target, and no libvirt of this machine."""
    config = scratch / "virtlun.toml"
    config.write_text(
        f'[target]\nrpc_socket = "{target.rpc_socket}"\nvhost_dir = "{target.vhost_dir}"\n'
    )
    return {"VIRTLUN_CONFIG": str(config), "LIBVIRT_DEFAULT_URI": "test:///default"}


@pytest.fixture
def site(scratch: Path, target: Target, environment: dict[str, str]) -> Iterator[Site]:
    """Cockpit, and an lvstore, lvs0, with the volume `data`."""
    target.make_lvstore(size=STORE_MIB * MIB)
    target.make_thin("data", 16)
    folder = scratch / "cockpit"
    folder.mkdir()
    with cockpit(folder, environment) as url:
        yield url


@pytest.fixture
def browser(scratch: Path) -> Iterator[Browser]:
    folder = scratch / "browser"
    folder.mkdir()
    with Browser(folder) as running:
        yield running


@pytest.fixture
def page(site: Site, browser: Browser) -> Page:
    """The page, when it shows the store."""
    opened = browser.open(site + WHERE)
    opened.until_says("lvs0", "data")
    return opened


def volumes(target: Target) -> dict[str, int]:
    """Returns the sizes of all lvols in MiB, by name."""
    return {each["name"]: each["size"] // MIB for each in target.rpc("bdev_lvol_get_lvols")}


def has_ended(page: Page) -> None:
    """Waits until no dialog is there."""
    page.until("!document.querySelector('dialog')", "the dialog to close")


def create(page: Page, name: str, size: str, *, times: int = 1) -> None:
    page.press("button", "Create a volume in lvs0")
    page.write("Name", name)
    page.write("Size", size)
    page.press("button", "Create", times=times)


def delete(page: Page) -> None:
    """Presses the button of a dialog that asks for the name, when it knows who has the volume."""
    until(lambda: page.is_enabled("button", "Delete"), "who has the volume", not_yet=PageError)
    page.press("button", "Delete")


def refused(page: Page, *says: str) -> None:
    """Waits for the one sentence of a dialog that failed, and closes that."""
    sentence = page.until("document.querySelector('dialog [role=alert]:not([hidden])')?.innerText")
    for each in says:
        assert each in sentence, sentence
    assert "\n" not in sentence
    page.press("button", "Cancel")
    has_ended(page)


def test_a_volume_from_its_creation_to_its_end(target: Target, page: Page) -> None:
    page.until_says(f"{STORE_MIB - 3} MiB free (0 %)")
    create(page, "root", "64M")
    has_ended(page)
    assert volumes(target) == {"data": 16, "root": 64}
    # Thick: it has its room, which the store's fill shows.
    page.until_says("root", "64 MiB of 253 MiB used, 189 MiB free (25 %)")
    assert page.run("document.querySelector('[role=meter]').getAttribute('aria-valuenow')") == "25"

    page.press("button", "Grow lvs0/root")
    page.write("New size", "96 MiB")
    page.key("Enter", 13, "\r")
    has_ended(page)
    assert volumes(target)["root"] == 96

    page.press("button", "Snapshot lvs0/root")
    page.write("Name of the snapshot", "before")
    page.press("button", "Take snapshot")
    has_ended(page)
    (taken,) = [each for each in target.rpc("bdev_lvol_get_lvols") if each["name"] == "root@before"]
    assert taken["is_snapshot"]
    page.until_says("root@before", "snapshot")
    # Of a snapshot there is nothing but its end.
    assert [name for name in page.names("button") if "@before" in name] == [
        "Delete lvs0/root@before"
    ]

    page.press("button", "Delete lvs0/root")
    page.until("!document.querySelector('dialog').innerText.includes('Asking')")
    assert not page.is_enabled("button", "Delete")
    page.write("Type root to delete it", "roo")
    assert not page.is_enabled("button", "Delete")
    page.key("Enter", 13, "\r")
    assert "root" in volumes(target)
    page.write("Type root to delete it", "root")
    delete(page)
    has_ended(page)
    assert volumes(target) == {"data": 16, "root@before": 96}
    page.until("!document.body.innerText.includes('Delete lvs0/root ')")
    assert page.problems() == []


def test_nothing_is_done_twice(target: Target, page: Page) -> None:
    create(page, "once", "8M", times=4)
    has_ended(page)
    page.until_says("once")
    # What is asked for a second time is refused, and said.
    assert page.run("document.getElementById('alerts').innerText") == ""
    page.press("button", "Snapshot lvs0/once", times=2)
    assert page.run("document.querySelectorAll('dialog').length") == 1
    page.key("Escape", 27)
    has_ended(page)
    assert volumes(target) == {"data": 16, "once": 8}


def test_what_fails_is_one_sentence(target: Target, page: Page) -> None:
    target.attach("vm1", "lvs0/data")
    create(page, "data", "8M")
    refused(page, "lvs0/data", "exists")
    create(page, "large", "1G")
    refused(page, "lvs0", "free")
    create(page, "new", "much")
    refused(page, '"much" is not a size')
    create(page, "a/b", "8M")
    refused(page, '"a/b" is no name here')
    page.press("button", "Grow lvs0/data")
    page.write("New size", "8M")
    page.press("button", "Grow")
    refused(page, "16 MiB already")
    page.press("button", "Delete lvs0/data")
    page.write("Type data to delete it", "data")
    delete(page)
    refused(page, "in use")
    assert volumes(target) == {"data": 16}


def test_many_volumes_are_filtered_by_name(target: Target, page: Page) -> None:
    assert page.names("searchbox") == []
    for number in range(12):
        target.make_thin(f"v{number}", 1)
    page.find("button", "Grow lvs0/v11")
    page.write("Filter by name", "V1", role="searchbox")
    page.until("document.querySelectorAll('tbody tr').length == 3")
    grown = [name for name in page.names("button") if name.startswith("Grow")]
    assert grown == ["Grow lvs0/v1", "Grow lvs0/v10", "Grow lvs0/v11"]
    page.write("Filter by name", "none", role="searchbox")
    page.until_says("No volumes.")


def test_a_volume_that_is_gone_is_said(target: Target, page: Page) -> None:
    page.press("button", "Grow lvs0/data")
    target.rpc("bdev_lvol_delete", name="lvs0/data")
    page.write("New size", "1G")
    page.press("button", "Grow")
    with pytest.raises(RpcError) as error:
        target.rpc("bdev_lvol_resize", name="lvs0/data", size_in_mib=1)
    assert error.value.code == NO_DEVICE
    refused(page, "No such device")
    page.until_says("No volumes.")


@pytest.fixture
def slow(scratch: Path, target: Target) -> Iterator[SlowDisk]:
    """The disk below lvs0."""
    with SlowDisk(scratch / "disk", 64 * MIB) as disk:
        target.rpc("bdev_aio_create", filename=str(disk.path), name="d", block_size=512)
        target.rpc("bdev_lvol_create_lvstore", bdev_name="d", lvs_name="lvs0", cluster_sz=MIB)
        yield disk
        disk.go_on()
        target.stop()


def test_what_takes_long_goes_on_without_its_dialog(
    scratch: Path, target: Target, slow: SlowDisk, environment: dict[str, str], browser: Browser
) -> None:
    folder = scratch / "cockpit"
    folder.mkdir()
    with cockpit(folder, environment) as url:
        page = browser.open(url + WHERE)
        page.until_says("No volumes.")
        slow.hang()
        create(page, "new", "16M")
        page.press("button", "Close")
        has_ended(page)
        page.until_says("Making lvs0/new: 0 % zeroed.")
        slow.go_on()
        page.find("button", "Grow lvs0/new")
        assert volumes(target) == {"new": 16}
        page.until("!document.body.innerText.includes('zeroed')", "the end of zeroing")
        # What fails then is said at the top.
        slow.hang()
        create(page, "large", "32M")
        page.press("button", "Close")
        has_ended(page)
        target.rpc("virtlun_lvol_cancel", name="lvs0/large")
        slow.go_on()
        # What makes the disk slow runs beside the target, as another one of this host.
        page.until_says("Create a volume in lvs0 at target default: ", "large")
        page.press("button", "Close this message")
        assert page.run("document.getElementById('alerts').innerText") == ""


def busy(boot: BootGuest, target: Target, controller: str, vm: str, volume: str) -> Guest:
    """Returns a guest of that name that reads its disk, on a controller of its own."""
    target.attach(controller, volume)
    guest = boot(controller, extra=("-name", f"guest={vm}"))
    read = f"dd if=/dev/{disk(guest, 0)} of=/dev/null bs=4k iflag=direct"
    guest.run(f"setsid sh -c 'while {read}; do true; done' >/dev/null 2>&1 </dev/null &")
    return guest


def number(page: Page, chart: str) -> str:
    """Returns what stands beside a chart, without its name."""
    figures = "[...document.querySelectorAll('figure')]"
    script = f"{figures}.find(f => f.innerText.startsWith({json.dumps(chart)}))"
    text = f"{script}?.querySelector('.number').innerText"
    return str(page.until(f"/[0-9]/.test({text}) && {text}"))


def test_the_charts_move_and_names_are_text(
    target: Target, site: Site, browser: Browser, boot: BootGuest
) -> None:
    target.make_thin(MARKUP, 16)
    busy(boot, target, "vm-a", HOSTILE_VM, f"lvs0/{MARKUP}")
    page = browser.open(site + WHERE)
    page.until_says(MARKUP, HOSTILE_VM, f"lvs0/{MARKUP} (scsi 0)")
    first = number(page, "I/O a second")
    assert float(first.replace(",", "")) > 0
    assert "s" in number(page, "Latency")
    page.until(
        f"document.querySelector('figure .number').innerText != {json.dumps(first)}",
        "a number that changes",
    )
    lines = "[...document.querySelectorAll('path.line')].map(p => p.getAttribute('d'))"
    assert all(line.count("L") >= 1 for line in page.until(f"{lines}.every(d => d) && {lines}"))
    # As a user of the volume, too, and where its deletion is asked for.
    page.press("button", f"Delete lvs0/{MARKUP}")
    page.until_says(f"{HOSTILE_VM} has it as a disk.")
    page.find("textbox", f"Type {MARKUP} to delete it")
    assert page.run("document.querySelectorAll('img, b').length") == 0
    assert page.run("document.title") == "VM volumes"
    assert page.problems() == []
    # The target counts latencies as long as somebody looks.
    assert target.rpc("virtlun_bdev_get_latencies", borders_ns=[]) != []
    page.close()
    until(
        lambda: target.rpc("virtlun_bdev_get_latencies", borders_ns=[]) == [],
        "the end of counting",
    )


@pytest.fixture
def second(scratch: Path, environment: dict[str, str]) -> Iterator[Target]:
    """Another target of the host, which does not run."""
    other = Target(scratch / "second", "--iscsi")
    other.directory.mkdir()
    with Path(environment["VIRTLUN_CONFIG"]).open("a") as config:
        config.write(
            f'[targets.second]\nrpc_socket = "{other.rpc_socket}"\n'
            f'vhost_dir = "{other.vhost_dir}"\n'
        )
    yield other
    other.kill9()


def test_another_target_and_its_pool(
    scratch: Path,
    target: Target,
    second: Target,
    environment: dict[str, str],
    browser: Browser,
) -> None:
    target.make_lvstore(size=STORE_MIB * MIB)
    folder = scratch / "cockpit"
    folder.mkdir()
    with Tgt(scratch) as array, cockpit(folder, environment) as url:
        array.disk(1)
        second.start()
        portal = {"portal": f"127.0.0.1:{array.port}", "target_iqn": IQN, "initiator_iqn": HOST}
        second.rpc("virtlun_iscsi_pool_create", name="san", **portal)
        page = browser.open(url + WHERE)
        page.until_says("lvs0")
        page.choose("second")
        page.until_says("san", "LUNs of an iSCSI target", "lun-1", "its size is not told")
        assert "lvs0" not in page.text()
        # The array makes, grows and deletes them.
        assert page.names("button") == ["Check again"]
        page.choose("default")
        page.until_says("lvs0")
        page.close()
        assert second.stop() == 0


class Held:
    """Cockpit's `virtlun`, whose commands of the target without a name can be held up."""

    def __init__(self, folder: Path) -> None:
        """Puts it in place of the one in `folder`, where Cockpit runs."""
        self._folder = folder
        program = folder / "bin/virtlun"
        self._gate, there = folder / "gate", program.rename(folder / "bin/virtlun.there")
        program.write_text(
            f"""#!/bin/sh
case "$1 $2" in
"domain list" | "doctor --json")
    if [ -e {self._gate} ]; then
        echo $$ > "{folder}/pid.$1"
        until [ ! -e {self._gate} ]; do sleep 0.05; done
    fi
esac
exec {there} "$@"
"""
        )
        program.chmod(0o755)

    def close(self) -> None:
        self._gate.touch()

    def waiting(self) -> list[int]:
        """Returns the ids of the processes of those that were held up, when they are."""
        pids = [self._folder / f"pid.{each}" for each in ("domain", "doctor")]
        until(lambda: all(pid.exists() and pid.read_text() for pid in pids), "the commands")
        return [int(pid.read_text()) for pid in pids]

    def open(self) -> None:
        self._gate.unlink()


def test_a_deletion_says_who_made_a_volume(
    scratch: Path, target: Target, site: Site, browser: Browser
) -> None:
    uuid = target.make_thin("pvc", 4)
    target.rpc(
        "virtlun_lvol_set_xattr", name=uuid, xattr_name="csi.volume", xattr_value="a driver's"
    )
    target.make_thin("volume-6b1e0f4e-8a55-4c5d-9d0b-3f6d7c1a2b3c", 4)
    held = Held(scratch / "cockpit")
    page = browser.open(site + WHERE)
    for name, made in (
        ("data", ()),
        ("pvc", ("delete its PersistentVolumeClaim",)),
        ("volume-6b1e0f4e-8a55-4c5d-9d0b-3f6d7c1a2b3c", ("OpenStack's Cinder made it",)),
    ):
        page.find("button", f"Delete lvs0/{name}")
        held.close()
        page.press("button", f"Delete lvs0/{name}")
        page.write(f"Type {name} to delete it", name)
        # Nobody decides before all is known.
        page.until_says("Asking who has it")
        assert not page.is_enabled("button", "Delete")
        held.open()
        page.until("!document.querySelector('dialog').innerText.includes('Asking')")
        dialog = page.run("document.querySelector('dialog').innerText")
        assert all(each in dialog for each in made)
        assert dialog.count("made it") == len(made)
        assert page.is_enabled("button", "Delete")
        page.press("button", "Cancel")
        has_ended(page)


def test_a_deletion_says_that_libvirt_cannot_be_asked(
    scratch: Path, target: Target, environment: dict[str, str], browser: Browser
) -> None:
    target.make_lvstore(size=STORE_MIB * MIB)
    target.make_thin("data", 16)
    folder = scratch / "cockpit"
    folder.mkdir()
    nowhere = f"qemu+unix:///system?socket={scratch}/none"
    with cockpit(folder, {**environment, "LIBVIRT_DEFAULT_URI": nowhere}) as url:
        page = browser.open(url + WHERE)
        page.press("button", "Delete lvs0/data")
        page.until_says(f"Which VMs that are shut off have it is not known: libvirt at {nowhere}")
        page.write("Type data to delete it", "data")
        page.press("button", "Delete")
        has_ended(page)
        assert volumes(target) == {}


def ended_and_told(page: Page, pids: list[int]) -> None:
    """Waits until these processes have ended, and the page was told so."""
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the commands' ends")
    # The bridge has told of them before it tells of what it was asked later.
    page.run("cockpit.spawn(['true'])")


def test_what_was_asked_of_one_target_is_not_shown_of_another(
    scratch: Path, second: Target, site: Site, browser: Browser
) -> None:
    second.start()
    second.make_lvstore(name="lvs1", size=64 * MIB)
    second.make_thin("other", 4, "lvs1")
    held = Held(scratch / "cockpit")
    held.close()
    page = browser.open(site + WHERE)
    page.until_says("lvs0", "data")
    pids = held.waiting()
    page.choose("second")
    page.until_says("lvs1", "other")
    page.until("!!document.querySelector('#findings ul')", "the second's findings")
    findings = page.run("document.getElementById('findings').textContent")
    assert "libiscsi is there" in findings
    held.open()
    ended_and_told(page, pids)
    # All that comes of the first now, and of the time before, is of no use.
    assert "lvs0" not in page.text()
    assert page.run("document.getElementById('findings').textContent") == findings
    assert page.is_enabled("button", "Check again")
    # What is done is done to the one that the dialog names.
    page.press("button", "Delete lvs1/other")
    page.find("dialog", "Delete lvs1/other at target second?")
    page.press("button", "Cancel")
    page.choose("default")
    page.until_says("lvs0", "data")
    assert "lvs1" not in page.text()
    assert page.problems() == []


def test_who_leaves_and_comes_back_sees_each_store_once(
    scratch: Path, site: Site, browser: Browser
) -> None:
    held = Held(scratch / "cockpit")
    held.close()
    page = browser.open(site + WHERE)
    page.until_says("lvs0", "data")
    pids = held.waiting()
    page.run("dispatchEvent(new Event('pagehide'))")
    page.run("dispatchEvent(new Event('pageshow'))")
    stores = "document.querySelectorAll('#stores article').length"
    page.until(f"{stores} == 1")
    held.open()
    ended_and_told(page, pids)
    page.press("button", "Check again")
    page.until("!!document.querySelector('#findings ul')", "the findings")
    assert page.run(stores) == 1
    assert page.problems() == []


def test_findings_are_those_of_the_command(
    target: Target, page: Page, environment: dict[str, str]
) -> None:
    code = "from plugin.cli import main; main(prog_name='virtlun')"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    found = {each["what"]: each for each in json.loads(done.stdout)}
    for what in ("gateway", "the target's rights"):
        assert found[what]["state"] != "ok"
        page.until_says(f"{what}: {found[what]['found']}", found[what]["advice"])
    # What is ok is there to be opened.
    assert found["target"]["state"] == "ok"
    page.press("DisclosureTriangle", page.names("DisclosureTriangle")[0])
    page.until_says(f"lvstores: {found['lvstores']['found']}")
    assert target.stop() == 0
    page.press("button", "Check again")
    page.until("/target: .*no target/.test(document.querySelector('#findings ul').innerText)")
    target.start()


def test_a_target_that_goes_away_and_comes_back(target: Target, page: Page) -> None:
    assert target.stop() == 0
    page.until_says(f"No target listens on {target.rpc_socket}")
    target.start()
    page.until("document.getElementById('alerts').innerText == ''", "the end of the message")
    create(page, "again", "8M")
    has_ended(page)
    assert "again" in volumes(target)


def test_a_target_that_does_not_answer(target: Target, page: Page) -> None:
    alerts = "document.getElementById('alerts').innerText"
    with frozen(target.pid):
        page.until_says(f"The target on {target.rpc_socket} has not answered for 10 s.")
        # Once, and what was there stays.
        assert page.run(alerts).count("has not answered") == 1
        page.find("button", "Grow lvs0/data")
    page.until(f"{alerts} == ''", "the end of the message")
    create(page, "again", "8M")
    page.find("button", "Grow lvs0/again")


def test_what_throws_once_is_asked_again(target: Target, page: Page) -> None:
    # Whatever it is that goes wrong while what was told is shown.
    page.run("{ window.search = document.getElementById('search'); search.remove() }")
    page.until("document.getElementById('alerts').innerText", "a sentence")
    page.run("document.getElementById('stores').before(window.search)")
    page.until("document.getElementById('alerts').innerText == ''", "the end of the message")
    target.make_thin("later", 4)
    page.find("button", "Grow lvs0/later")


def test_who_has_no_right_is_told_what_is_missing(
    scratch: Path, target: Target, environment: dict[str, str], browser: Browser
) -> None:
    # A user who may run our programs, wherever this checkout is, and not open the socket.
    os.chown(target.rpc_socket, NOBODY, NOBODY)
    folder = scratch / "cockpit"
    folder.mkdir()
    with cockpit(folder, environment, bridge=("setpriv", "--bounding-set=-dac_override")) as url:
        page = browser.open(url + WHERE)
        page.until_says(f"may not use {target.rpc_socket}", "turn on administrative access")


def test_light_dark_and_narrow(page: Page, browser: Browser, site: Site) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.run(colour)
    dark = browser.open(site + WHERE, PHONE, dark=True)
    dark.until_says("lvs0", "data", "ok")
    assert dark.run(colour) != light
    # As Cockpit's user chose, whatever the browser has.
    dark.run(
        "window.dispatchEvent(new CustomEvent('cockpit-style', { detail: { style: 'light' } }))"
    )
    assert dark.run(colour) == light
    assert dark.run("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
    names = dark.names("button")
    assert all(names) and len(set(names)) == len(names), names


@pytest.mark.skipif("VIRTLUN_WRITE_DOCS" not in os.environ, reason="makes the site's picture")
def test_the_picture(target: Target, site: Site, browser: Browser, boot: BootGuest) -> None:
    target.make_thin("web-root", 48)
    target.make_thin("db-root", 96)
    target.rpc("bdev_lvol_create", lvs_name="lvs0", lvol_name="db-log", size_in_mib=64)
    guests = [
        busy(boot, target, f"vm-{vm}", vm, f"lvs0/{volume}")
        for vm, volume in (("web", "web-root"), ("db", "db-root"))
    ]
    for guest in guests:
        guest.run("dd if=/dev/zero of=/dev/sda bs=1M count=30 oflag=direct")
    target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/db-root", snapshot_name="db-root@monday")
    target.rpc("bdev_lvol_delete", name="lvs0/data")
    page = browser.open(f"{site}/virtlun", (1200, 1060))
    frame = "document.querySelector('iframe[name$=\"/virtlun\"]')?.contentDocument"
    lines = f"[...{frame}.querySelectorAll('path.line')]"
    page.until(
        f"{lines}.length == 6 && {lines}.every(p => p.getAttribute('d').split('L').length > 12)",
        "half a minute of charts",
    )
    page.picture(PICTURE)
