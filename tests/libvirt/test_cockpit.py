"""Cockpit's own page of VMs, unmodified, through the gateway: our pools and disks are as any there.

And our page beside it, as far as it asks libvirt.

With VIRTLUN_WRITE_DOCS=1 the picture for the site is made anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from tests.support.browser import Browser, Page, PageError
from tests.support.cockpit import ROOT, machines
from tests.support.host import Host
from tests.support.scratch import short_directory
from tests.support.wait import until

pytestmark = [pytest.mark.nightly, pytest.mark.root, pytest.mark.vm]

MIB = 1 << 20
WHERE = "/cockpit/@localhost/machines/index.html"
POOLS = "#/storages?connection=system"
PICTURE = ROOT / "docs/pages/how-to/cockpit-machines.png"


@pytest.fixture(scope="module")
def site(host: Host) -> Iterator[str]:
    """Cockpit on a host with the running VM `web` that has the volume `lvs0/a`."""
    host.start_without_guest("web", "a")
    with short_directory("vc-", "/var/tmp") as folder, machines(host, folder) as url:
        yield url


@pytest.fixture
def browser(host: Host) -> Iterator[Browser]:
    with short_directory("vb-") as folder, Browser(folder) as running:
        yield running


def shown(browser: Browser, url: str) -> Page:
    """Returns the page; it is told that there is no KVM, where it sees none."""
    page = browser.open(url, (1280, 760))
    page.until("/Ignore|Virtual machines/.test(document.body.innerText)")
    if "Ignore" in page.names("button"):
        page.press("button", "Ignore")
    return page


def disks(host: Host) -> dict[str, dict[str, str]]:
    """Returns the sources of the VM's disks, by their names."""
    xml = ElementTree.fromstring(host.virsh("dumpxml", "web"))
    found = {}
    for disk in xml.findall("devices/disk"):
        (target,), (source,) = disk.findall("target"), disk.findall("source")
        found[target.attrib["dev"]] = dict(source.attrib)
    return found


def test_a_disk_is_made_in_our_pool_and_added_to_a_running_vm(
    host: Host, site: str, browser: Browser
) -> None:
    page = shown(browser, f"{site}{WHERE}#vm?name=web&connection=system")
    page.until_says("/dev/virtlun/lvs0/a")
    page.press("button", "Add disk")
    page.until_says("virtlun-lvs0")
    page.write("Name", "new")
    page.write("Size", "64", role="spinbutton")
    page.choose("MiB")
    page.press("button", "Add")
    page.until("!document.querySelector('[role=dialog]')", "the dialog to close")
    assert host.volumes.volume("lvs0/new").size == 64 * MIB
    assert disks(host) == {
        "sda": {"file": "/dev/virtlun/lvs0/a"},
        "vda": {"pool": "virtlun-lvs0", "volume": "new"},
    }
    # Its QEMU has the volume, as the target's connection of it shows.
    (uuid,) = [each.uuid for each in host.volumes.volumes("lvs0") if each.name == "new"]
    controllers = host.client.call("vhost_get_controllers")
    blocks = [each["backend_specific"].get("block") for each in controllers if each["sessions"]]
    assert uuid in [block["bdev"] for block in blocks if block]
    page.until_says("virtlun-lvs0", "new")


def test_our_pools_are_listed_with_their_volumes(host: Host, site: str, browser: Browser) -> None:
    host.volumes.create("lvs0/spare", 128 * MIB, thin=True)
    page = shown(browser, site + WHERE + POOLS)
    page.until_says("virtlun-lvs0", "active")
    page.press("button", "Details")
    page.until_says("/dev/virtlun/lvs0")
    page.press("tab", "Storage volumes")
    page.until_says("spare", "web")
    if "VIRTLUN_WRITE_DOCS" in os.environ:
        page.picture(PICTURE)


def test_our_page_names_vms_that_are_shut_off(host: Host, site: str, browser: Browser) -> None:
    host.start_without_guest("off", "b")
    host.virsh("destroy", "off")
    page = browser.open(f"{site}/cockpit/@localhost/virtlun/index.html")
    page.until_says("off (shut off)")
    page.press("button", "Delete lvs0/b")
    page.until_says("off has it as a disk, and will not start without it.")
    page.press("button", "Cancel")
    # One that was made since the page has asked, which it does every half minute.
    host.start_without_guest("later", "c")
    host.virsh("destroy", "later")
    page.press("button", "Delete lvs0/c")
    page.until_says("later has it as a disk, and will not start without it.")


def opens(page: Page, button: str, title: str) -> None:
    """Presses a button until its dialog is there: what is above it may just have moved it."""

    def there() -> bool:
        if title not in page.text() and page.names("button").count(button):
            page.press("button", button)
        return title in page.text()

    until(there, lambda: f"{title}, on the page:\n{page.text()}", not_yet=PageError)


def test_import_vm_wants_a_file(host: Host, site: str, browser: Browser) -> None:
    """It looks for the image among the host's files, and takes no path that it does not find."""
    page = shown(browser, site + WHERE)
    page.until_says("web", "Running", "Import VM")
    opens(page, "Import VM", "Import a virtual machine")
    page.write("Existing disk image on host's file system", "/dev/virtlun/lvs0/a")
    page.until_says("No such file or directory")
    page.press("button", "Cancel")


def test_a_disk_has_no_size_to_edit(host: Host, site: str, browser: Browser) -> None:
    """Cockpit grows none, of whatever kind; what grew elsewhere is shown."""
    page = shown(browser, f"{site}{WHERE}#vm?name=web&connection=system")
    page.until_says("/dev/virtlun/lvs0/a")
    host.virsh("blockresize", "web", "sda", "2G")
    page.until(r"/\b2\sGiB/.test(document.body.innerText)")
    opens(page, "Edit", "Edit a attributes")
    shows = page.run("document.querySelector('[role=dialog]').innerText")
    assert "Access" in shows and "Cache" in shows
    assert "size" not in shows.lower() and "capacity" not in shows.lower()
    assert page.names("spinbutton") == page.names("textbox") == []
    assert not [name for name in page.names("button") if "size" in name.lower()]
    page.press("button", "Cancel")


def use_existing(page: Page, volume: str) -> None:
    """Chooses a volume that is there, in the dialog that adds a disk to the VM.

    It is to be a LUN, for which the VM needs no PCI slot.
    """
    page.press("button", "Add disk")
    page.press("radio", "Use existing")
    page.until(
        f"[...document.querySelectorAll('option')].some(each => each.text === '{volume}')",
        f"the volume {volume} among those to be chosen",
    )
    page.choose(volume)
    page.press("button", "Show additional options")
    page.find("combobox", "Bus")
    page.choose("scsi")


def test_a_volume_that_is_there_is_added_to_a_running_vm(
    host: Host, site: str, browser: Browser
) -> None:
    there = host.volumes.create("lvs0/there", 16 * MIB, thin=True)
    page = shown(browser, f"{site}{WHERE}#vm?name=web&connection=system")
    page.until_says("/dev/virtlun/lvs0/a")
    use_existing(page, "there")
    page.press("button", "Add")
    page.until("!document.querySelector('[role=dialog]')", "the dialog to close")
    assert disks(host)["sdb"] == {"pool": "virtlun-lvs0", "volume": "there"}
    found = host.client.call("vhost_get_controllers")
    of = [each["backend_specific"].get("scsi", []) for each in found if each["sessions"]]
    assert there.uuid in [lun["bdev_name"] for each in of for scsi in each for lun in scsi["luns"]]
    page.until_says("virtlun-lvs0", "there")


def test_a_volume_of_another_running_vm_is_not_added(
    host: Host, site: str, browser: Browser
) -> None:
    """Cockpit would share it, which both VMs have to say before they start."""
    host.start_without_guest("other", "d")
    before = disks(host), host.virsh("dumpxml", "other", "--inactive")
    page = shown(browser, f"{site}{WHERE}#vm?name=web&connection=system")
    page.until_says("/dev/virtlun/lvs0/a")
    use_existing(page, "d")
    page.until_says("This volume is already used by other.")
    page.press("button", "Add")
    page.until_says("Disk failed to be attached", "lvs0/d is in use by domain other")
    assert (disks(host), host.virsh("dumpxml", "other", "--inactive")) == before
    page.press("button", "Cancel")
