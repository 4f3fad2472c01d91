"""virt-manager, unmodified, through the gateway: our pools and disks are as any there.

With VIRTLUN_WRITE_DOCS=1 the picture for the site is made anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.desktop import Desktop, desktop
from tests.support.host import Host
from tests.support.scratch import short_directory
from tests.support.wait import until

pytestmark = [pytest.mark.nightly, pytest.mark.root, pytest.mark.vm]

MIB = 1 << 20
SCREEN = (800, 600)
PICTURE = Path(__file__).parents[2] / "docs/pages/how-to/virt-manager.png"


@pytest.fixture(scope="module", autouse=True)
def web(host: Host) -> None:
    """The running VM `web`, that has `lvs0/a`."""
    host.start_without_guest("web", "a")


@contextmanager
def virt_manager(host: Host, *words: str) -> Iterator[Desktop]:
    program = ("virt-manager", "--no-fork", "--connect", host.uri, *words)
    before = host.libvirtd.command()
    with (
        short_directory("vx-", "/var/tmp") as folder,
        desktop(folder, program, SCREEN, before) as windows,
    ):
        yield windows


def test_a_volume_is_made_in_our_pool(host: Host) -> None:
    with virt_manager(host, "--show-host-summary") as windows:
        windows.do("select", "page tab", "Storage")
        windows.do("focus", "table cell", "virtlun-lvs0")
        windows.do("find", "table cell", "web")
        windows.do("press", "push button", "vol-new")
        windows.do("find", "label", "virtlun-lvs0's available space")
        windows.do("write", "text", text="new")
        windows.do("press", "push button", "Finish")
        windows.do("find", "table cell", "new")
        made = host.volumes.volume("lvs0/new")
        assert made.size == 103 * MIB
        if "VIRTLUN_WRITE_DOCS" in os.environ:
            windows.picture(PICTURE)


def test_a_volume_is_added_to_a_running_vm(host: Host) -> None:
    uuid = host.volumes.create("lvs0/added", 8 * MIB).uuid
    with virt_manager(host, "--show-domain-editor", "web") as windows:
        windows.do("press", "push button", "add-hardware")
        windows.do("press", "radio button", "Select or create custom storage")
        windows.do("write", "text", "storage-entry", "/dev/virtlun/lvs0/added")
        windows.do("click", "push button", "Finish")
        # It knows no file of that name whose folders it could open to QEMU's user.
        windows.do("press", "push button", "No")
        until(lambda: uuid in served(host), "the disk of the VM")
        # As of any disk, first of the running VM and then of its next start.
        until(lambda: is_named(host, "added"), "the disk in the VM's XML")
        until(lambda: is_named(host, "added", "--inactive"), "the disk in its definition")


def test_a_volume_is_chosen_in_the_browser_of_storage(host: Host) -> None:
    uuid = host.volumes.create("lvs0/chosen", 8 * MIB).uuid
    with virt_manager(host, "--show-domain-editor", "web") as windows:
        windows.do("press", "push button", "add-hardware")
        windows.do("press", "radio button", "Select or create custom storage")
        windows.do("press", "push button", "storage-browse")
        windows.do("focus", "table cell", "virtlun-lvs0")
        windows.do("focus", "table cell", "chosen")
        windows.do("press", "push button", "Choose Volume")
        windows.do("click", "push button", "Finish")
        windows.do("press", "push button", "No")
        until(lambda: uuid in served(host), "the disk of the VM")
        until(lambda: is_named(host, "chosen"), "the disk in the VM's XML")
        until(lambda: is_named(host, "chosen", "--inactive"), "the disk in its definition")


def is_named(host: Host, volume: str, *side: str) -> bool:
    """Whether the VM's XML has a volume that was added."""
    return f"/dev/virtlun/lvs0/{volume}" in host.virsh("dumpxml", "web", *side)


def served(host: Host) -> set[str]:
    """Returns the bdevs that the target shows as LUNs to VMs that are connected."""
    return {
        lun["bdev_name"]
        for controller in host.client.call("vhost_get_controllers")
        if controller["sessions"]
        for scsi in controller["backend_specific"].get("scsi") or ()
        for lun in scsi["luns"]
    }
