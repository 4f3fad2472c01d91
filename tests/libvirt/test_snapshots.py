"""Snapshots, checkpoints and backups of domains with disks of ours, alone and beside libvirt's own.

None of it needs a guest; tests/libvirt/test_snapshots_guest.py has one.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import partial

import pytest

from pydataplane.errors import RpcError
from tests.support.host import Host
from tests.support.libvirtd import VirshError, virsh
from tests.support.wait import until

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


@pytest.mark.parametrize("words", ["checkpoint-create-as snap c", "backup-begin snap"])
def test_what_would_be_of_disks_of_both_kinds_is_refused(running: Host, words: str) -> None:
    said = refused(running, *words.split())
    assert "is of virtlun disks (sdc) or of libvirt's own (vda), not of both: make two" in said
    assert "vdzz" not in said


def test_a_checkpoint_of_the_volume_beside_a_disk_of_libvirts(running: Host) -> None:
    running.virsh("checkpoint-create-as", NAME, "c0", "--diskspec", "sdc")
    assert running.virsh("checkpoint-list", NAME, "--name").split() == ["c0"]
    assert lvols(running, "snap") == {"snap": "snap@checkpoint-c0", "snap@checkpoint-c0": None}
    shown = running.virsh("checkpoint-dumpxml", NAME, "c0")
    assert re.findall(r"<disk name='(\w+)' checkpoint='(\w+)'", shown) == [("sdc", "bitmap")]
    running.virsh("checkpoint-delete", NAME, "c0")
    assert lvols(running, "snap") == {"snap": None}


def lvols(host: Host, volume: str) -> dict[str, str | None]:
    """Returns a volume and its snapshots, by name, with what each is a clone of."""
    found = host.volumes.volumes("lvs0")
    return {v.name: v.parent for v in found if v.name.split("@")[0] == volume}


def listed(host: Host, domain: str, snapshot: str) -> dict[str, str]:
    """Returns the disks of a snapshot, as a client sees them, with where each is held."""
    shown = host.virsh("snapshot-dumpxml", domain, snapshot, "--security-info")
    assert not re.search("vhostuser|virtlun.dev|virtlun-snapshot|ua-virtlun", shown)
    return dict(re.findall(r"<disk name='(\w+)' snapshot='(\w+)'", shown))


def test_a_snapshot_of_the_other_disks(running: Host) -> None:
    running.virsh(
        *("snapshot-create-as", NAME, "s1", "--disk-only", "--diskspec", "sdc,snapshot=no")
    )
    assert listed(running, NAME, "s1") == {"vda": "external", "sdc": "no"}
    assert lvols(running, "snap") == {"snap": None}
    shown = running.virsh("snapshot-dumpxml", NAME, "s1", "--security-info")
    assert shown.count("/dev/virtlun/lvs0/snap") == 2, "in the running and the inactive domain"
    path = running.scratch / "s1.xml"
    path.write_text(shown)
    inside = virsh(running.libvirtd.uri(), "snapshot-dumpxml", NAME, "s1", "--security-info")
    running.virsh("snapshot-delete", NAME, "s1", "--metadata")
    running.virsh("snapshot-create", NAME, str(path), "--redefine")
    assert running.virsh("snapshot-dumpxml", NAME, "s1", "--security-info") == shown
    again = virsh(running.libvirtd.uri(), "snapshot-dumpxml", NAME, "s1", "--security-info")
    assert again.count("vhost-user-scsi-pci") == inside.count("vhost-user-scsi-pci") == 2


def test_a_snapshot_of_both_kinds_of_disks(running: Host) -> None:
    running.virsh("snapshot-create-as", NAME, "both", "--disk-only")
    assert listed(running, NAME, "both") == {"vda": "external", "sdc": "internal"}
    assert lvols(running, "snap") == {"snap": "snap@both", "snap@both": None}
    assert running.virsh("domstate", NAME) == "running"
    said = refused(running, "snapshot-revert", NAME, "both")
    assert "has vda beside virtlun disks" in said and "lvs0/snap@both" in said
    assert running.virsh("domstate", NAME) == "running"
    running.virsh("snapshot-delete", NAME, "both")
    assert lvols(running, "snap") == {"snap": None}
    assert not list((running.scratch / "notes").iterdir())


def test_what_libvirtd_refuses_leaves_no_snapshot_of_ours(running: Host) -> None:
    file = running.scratch / "there"
    file.write_text("something else")
    disk = f"vda,file={file}"
    said = refused(running, "snapshot-create-as", NAME, "no", "--disk-only", "--diskspec", disk)
    assert "already exists" in said
    for words in ("no --disk-only --quiesce", "no --live --disk-only", "a/b --disk-only"):
        refused(running, "snapshot-create-as", NAME, *words.split())
    assert lvols(running, "snap") == {"snap": None}
    assert running.virsh("domstate", NAME) == "running"
    assert "no" not in running.virsh("snapshot-list", NAME, "--name").split()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("s", "a snapshot inside of the files of vda is not possible: take an external one"),
        ("s --disk-only --diskspec sdc,snapshot=external", "holds its snapshots itself"),
        ("s --disk-only --diskspec sdc,file=/x", "leave snapshot=external and file= out"),
        ("s_% --disk-only", "letters, digits, dots, hyphens and underscores"),
    ],
)
def test_what_a_volume_cannot_is_refused_in_one_sentence(
    running: Host, words: str, sentence: str
) -> None:
    assert sentence in refused(running, "snapshot-create-as", NAME, *words.split())


def test_memory_in_a_file_beside_the_disks_of_both_kinds(running: Host) -> None:
    file = running.scratch / "own.mem"
    running.virsh("snapshot-create-as", NAME, "mem", "--memspec", f"file={file}")
    assert listed(running, NAME, "mem") == {"vda": "external", "sdc": "internal"}
    assert file.exists() and "running" in running.virsh("domstate", NAME)
    assert "State:          running" in running.virsh("snapshot-info", NAME, "mem")
    running.virsh("snapshot-delete", NAME, "mem", "--metadata")
    assert "snap@mem" in lvols(running, "snap"), "as the files of libvirt's own disks"
    running.volumes.delete("lvs0/snap@mem")


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
    assert "take an external one" in refused(running, "snapshot-create-as", NAME, "s")
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
    ended = partial(host.virsh, "domjobinfo", NAME, "--completed")
    until(lambda: "Backup" in ended(), ended, 90.0)


ONE = "ours"
DISKS = "".join(
    f"<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/{name}'/>"
    f"<target dev='{dev}' bus='scsi'/></disk>"
    for name, dev in (("one", "sda"), ("two", "sdb"))
)


@pytest.fixture
def alone(host: Host) -> Iterator[Host]:
    """A domain that is off, with the volumes sda and sdb and no other disk."""
    for name in ("one", "two"):
        host.volumes.create(f"lvs0/{name}", 8 << 20, thin=True)
    path = host.scratch / "ours.xml"
    path.write_text(
        f"<domain type='qemu'><name>{ONE}</name><memory unit='MiB'>64</memory>"
        f"<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>{DISKS}</devices></domain>"
    )
    host.virsh("define", str(path))
    yield host
    host.virsh("destroy", ONE, check=False)
    host.virsh("undefine", ONE, "--snapshots-metadata", "--managed-save")
    for _ in range(2):  # those that others are made of go when these have gone
        for volume in reversed(host.volumes.volumes("lvs0")):
            if volume.name.split("@")[0] in ("one", "two", "clone"):
                try:
                    host.volumes.delete(volume.path)
                except RpcError:
                    continue


def take(host: Host, name: str, *words: str) -> None:
    host.virsh("snapshot-create-as", ONE, name, *words)


@pytest.mark.nightly
def test_the_tree_is_libvirtds_and_a_revert_goes_to_each_of_its_nodes(alone: Host) -> None:
    alone.virsh("start", ONE)
    for name in ("a", "b"):
        take(alone, name, "--disk-only", "--atomic")
    assert listed(alone, ONE, "a") == {"sda": "internal", "sdb": "internal"}
    assert "already exists" in refused(alone, "snapshot-create-as", ONE, "a", "--disk-only")
    alone.virsh("snapshot-revert", ONE, "a")
    assert alone.virsh("domstate", ONE) == "shut off"
    assert alone.virsh("snapshot-current", ONE, "--name") == "a"
    assert lvols(alone, "one") == {"one": "one@a", "one@a": None, "one@b": "one@a"}
    take(alone, "c", "--disk-only", "--diskspec", "sdb,snapshot=no")
    assert listed(alone, ONE, "c") == {"sda": "internal", "sdb": "no"}
    assert "shutoff" in alone.virsh("snapshot-info", ONE, "c")
    for name in ("b", "c"):
        assert alone.virsh("snapshot-parent", ONE, name) == "a"
    alone.virsh("snapshot-revert", ONE, "b", "--running")
    assert alone.virsh("domstate", ONE) == "running"
    assert alone.virsh("snapshot-current", ONE, "--name") == "b"
    assert lvols(alone, "one")["one"] == "one@b"
    assert lvols(alone, "two")["two"] == "two@b"
    alone.virsh("snapshot-revert", ONE, "c", "--paused")
    assert alone.virsh("domstate", ONE) == "paused"
    assert lvols(alone, "one")["one"] == "one@c" and lvols(alone, "two")["two"] == "two@b"
    said = refused(alone, "snapshot-delete", ONE, "a")
    assert "lvs0/one@b and lvs0/one@c were taken after lvs0/one@a and need it" in said
    alone.virsh("snapshot-delete", ONE, "c")
    assert lvols(alone, "one") == {"one": "one@a", "one@a": None, "one@b": "one@a"}
    alone.virsh("snapshot-delete", ONE, "a")
    assert lvols(alone, "one") == {"one": None, "one@b": None}, "each has what it needs of it"
    alone.virsh("snapshot-delete", ONE, "b", "--children")
    assert lvols(alone, "one") == {"one": None} and lvols(alone, "two") == {"two": None}
    assert alone.virsh("snapshot-list", ONE, "--name") == ""
    assert not list((alone.scratch / "notes").iterdir())


def test_a_snapshot_that_a_clone_needs_is_not_deleted(alone: Host) -> None:
    take(alone, "s")
    alone.volumes.clone("lvs0/one@s", "clone")
    said = refused(alone, "snapshot-delete", ONE, "s")
    assert "lvs0/clone is a clone of lvs0/one@s: delete it, or give it all that it lacks" in said
    assert alone.virsh("snapshot-list", ONE, "--name") == "s"
    alone.volumes.inflate("lvs0/clone")
    alone.virsh("snapshot-delete", ONE, "s")
    assert lvols(alone, "one") == {"one": None}


def test_a_snapshot_is_defined_again_as_it_was_shown(alone: Host) -> None:
    take(alone, "s", "--disk-only")
    path = alone.scratch / "again.xml"
    shown = alone.virsh("snapshot-dumpxml", ONE, "s", "--security-info")
    path.write_text(shown.replace("<name>s</name>", "<name>s</name><description>new</description>"))
    for _ in range(2):  # of one that libvirtd knows (snapshot-edit), and of one that it does not
        alone.virsh("snapshot-create", ONE, str(path), "--redefine", "--current")
        assert "<description>new" in alone.virsh("snapshot-dumpxml", ONE, "s")
        assert listed(alone, ONE, "s") == {"sda": "internal", "sdb": "internal"}
        alone.virsh("snapshot-delete", ONE, "s", "--metadata")
    path.write_text(path.read_text().replace("<name>s</name>", "<name>other</name>"))
    said = refused(alone, "snapshot-create", ONE, str(path), "--redefine")
    assert "there is no volume lvs0/one@other" in said


@pytest.mark.nightly
def test_memory_and_disks_come_back_together(alone: Host) -> None:
    alone.virsh("start", ONE)
    take(alone, "m")
    assert "running" in alone.virsh("snapshot-info", ONE, "m")
    (file,) = (alone.scratch / "memory").iterdir()
    assert alone.virsh("domstate", ONE, "--reason") == "running (unpaused)"
    alone.virsh("suspend", ONE)
    take(alone, "p")
    assert "paused" in alone.virsh("snapshot-info", ONE, "p")
    alone.virsh("destroy", ONE)
    alone.virsh("snapshot-revert", ONE, "m")
    assert alone.virsh("domstate", ONE) == "running"
    alone.virsh("snapshot-revert", ONE, "p")
    assert alone.virsh("domstate", ONE) == "paused"
    assert lvols(alone, "one")["one"] == "one@p"
    file.rename(file.with_suffix(".away"))
    assert "Failed to open file" in refused(alone, "snapshot-revert", ONE, "m")
    assert alone.virsh("domstate", ONE) == "paused", "nothing has changed"
    file.with_suffix(".away").rename(file)
    alone.virsh("snapshot-delete", ONE, "m")
    assert not file.exists()


@pytest.mark.nightly
def test_halt_no_metadata_and_a_saved_state(alone: Host) -> None:
    alone.virsh("start", ONE)
    take(alone, "h", "--disk-only", "--halt")
    assert alone.virsh("domstate", ONE) == "shut off"
    take(alone, "n", "--no-metadata", "--disk-only")
    assert alone.virsh("snapshot-list", ONE, "--name") == "h"
    assert lvols(alone, "one") == {"one": "one@n", "one@n": "one@h", "one@h": None}
    alone.virsh("start", ONE)
    alone.virsh("managedsave", ONE)
    assert "revert requires force" in refused(alone, "snapshot-revert", ONE, "h")
    alone.virsh("snapshot-revert", ONE, "h", "--force", "--running")
    assert alone.virsh("domstate", ONE) == "running"
    assert lvols(alone, "one")["one"] == "one@h"


def test_a_definition_goes_back_with_its_snapshot(alone: Host) -> None:
    take(alone, "s", "--disk-only")
    alone.virsh("detach-disk", ONE, "sdb", "--config")
    alone.virsh("snapshot-revert", ONE, "s")
    assert "/dev/virtlun/lvs0/two" in alone.virsh("domblklist", ONE)
    assert "virtlun-snapshot" not in alone.virsh_direct("dumpxml", ONE)
    alone.volumes.delete("lvs0/one@s")
    said = refused(alone, "snapshot-revert", ONE, "s")
    assert "snapshot s: lvs0/one@s of disk sda is not there any more" in said
