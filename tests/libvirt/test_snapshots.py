"""Snapshots, checkpoints and backups of a domain that has disks of ours beside libvirt's own."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support.host import Host
from tests.support.libvirtd import VirshError, virsh

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "snap"


@pytest.fixture(scope="module")
def running(host: Host) -> Iterator[Host]:
    """A running domain with a qcow2 file vda and a volume sdc; it needs no guest."""
    image = host.scratch / "snap.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(image), "8M"], check=True)
    image.chmod(0o666)
    host.scratch.chmod(0o777)  # QEMU's user makes the files of snapshots
    host.volumes.create("lvs0/snap", 8 << 20)
    path = host.scratch / "snap.xml"
    path.write_text(
        f"<domain type='qemu'><name>{NAME}</name><memory unit='MiB'>64</memory>"
        "<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>"
        "<disk type='file' device='disk'><driver name='qemu' type='qcow2'/>"
        f"<source file='{image}'/><target dev='vda' bus='virtio'/></disk>"
        "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/snap'/>"
        "<target dev='sdc' bus='scsi'/></disk></devices></domain>"
    )
    host.virsh("define", str(path))
    host.virsh("start", NAME)
    yield host
    host.virsh("destroy", NAME)


def refused(host: Host, *words: str) -> str:
    with pytest.raises(VirshError) as caught:
        host.virsh(*words)
    return str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "snapshot-create-as snap s --disk-only",
        "snapshot-create-as snap s --disk-only --diskspec sdc,snapshot=external",
        "checkpoint-create-as snap c",
        "checkpoint-create-as snap c --diskspec sdc",
        "backup-begin snap",
    ],
)
def test_what_would_silently_lack_a_disk_is_refused_by_its_name(running: Host, words: str) -> None:
    said = refused(running, *words.split())
    assert "cannot include its virtlun disks (sdc)" in said
    assert "vdzz" not in said


def test_an_internal_snapshot_is_refused_in_one_sentence(running: Host) -> None:
    assert "take an external one" in refused(running, "snapshot-create-as", NAME, "s")


def test_a_snapshot_of_the_other_disks(running: Host) -> None:
    running.virsh(
        *("snapshot-create-as", NAME, "s1", "--disk-only", "--diskspec", "sdc,snapshot=no")
    )
    shown = running.virsh("snapshot-dumpxml", NAME, "s1", "--security-info")
    assert re.findall(r"<disk name='(\w+)' snapshot='(\w+)'", shown) == [
        ("vda", "external"),
        ("sdc", "no"),
    ]
    assert not re.search("vhostuser|virtlun.dev|vdzz", shown)
    assert shown.count("/dev/virtlun/lvs0/snap") == 2, "in the running and the inactive domain"
    path = running.scratch / "s1.xml"
    path.write_text(shown)
    inside = virsh(running.libvirtd.uri(), "snapshot-dumpxml", NAME, "s1", "--security-info")
    running.virsh("snapshot-delete", NAME, "s1", "--metadata")
    running.virsh("snapshot-create", NAME, str(path), "--redefine")
    assert running.virsh("snapshot-dumpxml", NAME, "s1", "--security-info") == shown
    again = virsh(running.libvirtd.uri(), "snapshot-dumpxml", NAME, "s1", "--security-info")
    assert again.count("vhost-user-scsi-pci") == inside.count("vhost-user-scsi-pci") == 2


def test_a_checkpoint_of_the_other_disks(running: Host) -> None:
    running.virsh(
        *("checkpoint-create-as", NAME, "c1", "--diskspec", "vda"),
        *("--diskspec", "sdc,checkpoint=no"),
    )
    shown = running.virsh("checkpoint-dumpxml", NAME, "c1")
    assert re.findall(r"<disk name='(\w+)' checkpoint='(\w+)'", shown) == [
        ("vda", "bitmap"),
        ("sdc", "no"),
    ]
    assert not re.search("vhostuser|virtlun.dev|vdzz", shown)


def test_a_backup_of_the_other_disks(running: Host) -> None:
    path = running.scratch / "backup.xml"
    path.write_text(
        "<domainbackup><disks><disk name='vda' backup='yes' type='file'>"
        f"<target file='{running.scratch}/b1'/></disk><disk name='sdc' backup='no'/></disks>"
        "</domainbackup>"
    )
    running.virsh("backup-begin", NAME, str(path))
    _wait_for_backup(running)
    assert (running.scratch / "b1").exists()


def test_without_a_disk_of_ours_nothing_needs_to_be_left_out(running: Host) -> None:
    running.virsh("detach-disk", NAME, "sdc", "--live")
    running.virsh("snapshot-create-as", NAME, "s2", "--disk-only")
    running.virsh("checkpoint-create-as", NAME, "c2")
    shown = running.virsh("checkpoint-dumpxml", NAME, "c2", "--no-domain")
    assert re.findall(r"<disk name='(\w+)' checkpoint='(\w+)'", shown) == [("vda", "bitmap")]
    before = set(running.scratch.iterdir())
    running.virsh("backup-begin", NAME)
    _wait_for_backup(running)
    (made,) = set(running.scratch.iterdir()) - before
    assert made.name.startswith("snap.s2."), "beside the disk's present file, as libvirt does"


def _wait_for_backup(host: Host) -> None:
    end = time.monotonic() + 90
    while "Backup" not in host.virsh("domjobinfo", NAME, "--completed"):
        assert time.monotonic() < end
        time.sleep(0.1)
