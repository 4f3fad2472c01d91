"""VMs that Cockpit's page of VMs makes by its dialog, on volumes of our pool.

Its script runs virt-install, which finds the gateway at libvirt's own place. The medium installs a
disk's image, and the VM boots from the volume then.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.guest.installmedium import install_medium
from tests.libvirt.test_cockpit import MIB, WHERE, opens, shown
from tests.support.browser import Browser, Page
from tests.support.cockpit import machines
from tests.support.host import Host, is_root
from tests.support.network import network, start_default
from tests.support.scratch import short_directory
from tests.support.wait import until

pytestmark = [pytest.mark.nightly, pytest.mark.root, pytest.mark.vm, pytest.mark.timeout(900)]

INSTALL_S = 300.0
"""The longest time in which a guest boots from the medium, installs, and boots what it has."""
SIZE = 128 * MIB
MARK, MARK_AT, BLOCK = b"booted from the volume\n", 100 * MIB, 4096
BOOTED = f"""\
export PATH=/tools:/sbin:/bin:/usr/sbin:/usr/bin
while sleep 1; do
    for disk in /dev/vda /dev/sda; do
        [ -b $disk ] || continue
        printf '{MARK.decode().strip()}\\n' >/tmp/mark
        dd if=/tmp/mark of=$disk bs={BLOCK} seek={MARK_AT // BLOCK} conv=sync,fsync && exit
    done
done
"""
"""What is installed tells that it runs by a mark on its disk."""
MEDIUM = "Local install media (ISO image or distro install tree)"
SYSTEM = "Debian testing"
COCKPIT = "{https://github.com/cockpit-project/cockpit-machines}"


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """One with libvirt's network `default`, which virt-install takes unless told otherwise."""
    if not is_root():
        pytest.fail("tests/libvirt need root: they run a libvirtd in a mount namespace")
    # virt-install would take it where libvirt has it.
    with network() as name, Host(keep=True, network=name, kvm=False) as running:
        start_default(running)
        yield running


@pytest.fixture(scope="module")
def medium(host: Host) -> Path:
    """The path of the medium, where QEMU's user may read it."""
    path = host.scratch / "install.iso"
    shutil.copy(install_medium(BOOTED), path)
    path.chmod(0o644)
    return path


@pytest.fixture(scope="module")
def site(host: Host) -> Iterator[str]:
    with short_directory("vc-", "/var/tmp") as folder, machines(host, folder) as url:
        yield url


@pytest.fixture
def browser() -> Iterator[Browser]:
    with short_directory("vb-") as folder, Browser(folder) as running:
        yield running


def fill(page: Page, name: str, volume: str, medium: Path) -> None:
    """Opens the dialog, and says all that it wants for a VM with a volume of ours."""
    opens(page, "Create VM", "Create new virtual machine")
    page.write("Name", name)
    page.choose(MEDIUM)
    page.write("Path to ISO file on host's file system", str(medium))
    page.press("option", str(medium))
    page.write("Choose an operating system", SYSTEM)
    page.press("option", SYSTEM)
    page.choose("virtlun-lvs0")
    page.choose(volume)


def disk(host: Host, name: str) -> tuple[str, str, str]:
    """Returns type, path and bus of a VM's one disk, as its definition has them."""
    xml = ElementTree.fromstring(host.virsh("dumpxml", "--inactive", name))
    (found,) = xml.findall("devices/disk[@device='disk']")
    (source,), (target,) = found.findall("source"), found.findall("target")
    return found.attrib["type"], "".join(source.attrib.values()), target.attrib["bus"]


def served(host: Host) -> list[str | None]:
    """Returns the UUIDs of what running QEMUs have as virtio-blk disks, as the target shows it."""
    found = host.client.call("vhost_get_controllers")
    blocks = [each["backend_specific"].get("block") for each in found if each["sessions"]]
    return [block["bdev"] for block in blocks if block]


def marked(host: Host, volume: str) -> bool:
    """Whether what is installed on a volume has booted from it."""
    back = host.scratch / "mark"
    words = ("--pool", "virtlun-lvs0", "--offset", str(MARK_AT), "--length", str(BLOCK))
    host.virsh("vol-download", volume, str(back), *words)
    return back.read_bytes().startswith(MARK)


def made(host: Host, page: Page, name: str, ready: Callable[[], bool], what: str) -> None:
    """Waits for what becomes of a VM; says what Cockpit says, and QEMU said, where it failed."""

    def there() -> bool:
        if "show more" in page.names("button"):
            page.press("button", "show more")
            raise AssertionError(f"{page.text()}\n{host.libvirtd.qemu_log(name)}")
        return ready()

    def told() -> str:
        return f"{what}; {host.virsh('domstate', name, check=False)}:\n{page.text()}"

    until(there, told, INSTALL_S, 3.0)


def waits(host: Host, name: str) -> str:
    """Returns whether a VM waits for its installation, as Cockpit notes it in the definition."""
    xml = ElementTree.fromstring(host.virsh("dumpxml", "--inactive", name))
    return xml.findtext(f"metadata/{COCKPIT}data/{COCKPIT}has_install_phase", "")


def test_a_vm_is_created_and_installed_on_our_volume(
    host: Host, site: str, browser: Browser, medium: Path
) -> None:
    volume = host.volumes.create("lvs0/run", SIZE, thin=True)
    page = shown(browser, site + WHERE)
    fill(page, "run", "run", medium)
    page.press("button", "Create and run")
    page.until("!document.querySelector('[role=dialog]')", "the dialog to close")
    made(host, page, "run", lambda: volume.uuid in served(host), "the VM's disk")
    made(host, page, "run", lambda: marked(host, "run"), "the mark")
    page.until_says("run", "Running")
    assert disk(host, "run") == ("block", "/dev/virtlun/lvs0/run", "virtio")
    assert volume.uuid in served(host)
    made(host, page, "run", lambda: waits(host, "run") == "false", "Cockpit's note")
    assert disk(host, "run") == ("block", "/dev/virtlun/lvs0/run", "virtio")
    host.virsh("destroy", "run")
    # It starts again as Cockpit has defined it.
    host.virsh("start", "run")
    assert volume.uuid in served(host)
    host.virsh("destroy", "run")


def test_a_vm_is_created_and_installed_later(
    host: Host, site: str, browser: Browser, medium: Path
) -> None:
    volume = host.volumes.create("lvs0/later", SIZE, thin=True)
    page = shown(browser, site + WHERE)
    fill(page, "later", "later", medium)
    page.press("button", "Create and edit")
    page.until_says("later", "Shut off", "Install")
    assert disk(host, "later") == ("block", "/dev/virtlun/lvs0/later", "virtio")
    assert waits(host, "later") == "true"
    assert volume.uuid not in served(host)
    page.press("button", "Install")
    made(host, page, "later", lambda: marked(host, "later"), "the mark")
    assert volume.uuid in served(host)
    made(host, page, "later", lambda: waits(host, "later") == "false", "Cockpit's note")
    host.virsh("destroy", "later")
