"""Snapshots and checkpoints that name lvols of other domains: these stay as they are.

libvirtd keeps what a client tells it of a snapshot, also what it is told without the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pydataplane.domain.translate.snapshotxml import DiskSnapshot, with_note
from tests.support.host import Host
from tests.support.libvirtd import VirshError

pytestmark = [pytest.mark.root, pytest.mark.vm]

VICTIM, OWN, PLAIN = "victim", "own", "plain"
MIB = 1 << 20


def domain(name: str, *volumes: str) -> str:
    disks = "".join(
        f"<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/{volume}'/>"
        f"<target dev='sd{letter}' bus='scsi'/></disk>"
        for letter, volume in zip("abc", volumes, strict=False)
    )
    return (
        f"<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><os>"
        f"<type arch='x86_64' machine='q35'>hvm</type></os><devices>{disks}</devices></domain>"
    )


@pytest.fixture(scope="module", autouse=True)
def domains(host: Host) -> Iterator[None]:
    """One whose snapshot `s` others want, one with a disk of its own, and one without a disk."""
    host.volumes.create("lvs0/victim", 8 * MIB, thin=True)
    host.volumes.create("lvs0/own", 8 * MIB, thin=True)
    for name, volumes in ((VICTIM, (VICTIM,)), (OWN, (OWN,)), (PLAIN, ())):
        path = host.scratch / f"{name}.xml"
        path.write_text(domain(name, *volumes))
        host.virsh("define", str(path))
    host.virsh("snapshot-create-as", VICTIM, "s", "--disk-only")
    yield
    for name in (VICTIM, OWN, PLAIN):
        host.virsh_direct("destroy", name, check=False)


def lvols(host: Host) -> dict[str, tuple[str, str | None]]:
    """Returns all volumes and snapshots, with UUID and parent, and what the victim has."""
    return {v.name: (v.uuid, v.parent) for v in host.volumes.volumes("lvs0")}


def uuid(host: Host, name: str) -> str:
    return host.volumes.volume(f"lvs0/{name}").uuid


def refused(host: Host, *words: str) -> str:
    before = lvols(host)
    with pytest.raises(VirshError) as caught:
        host.virsh(*words)
    assert lvols(host) == before
    return str(caught.value)


@dataclass(frozen=True)
class Forged:
    """What a snapshot's note says."""

    volume: str
    lvol: str
    says: str

    def held(self, host: Host) -> DiskSnapshot:
        return DiskSnapshot(
            "sda", uuid(host, self.volume), "lvs0", self.lvol, uuid(host, self.lvol)
        )


def forge(host: Host, name: str, snapshot: str, held: DiskSnapshot, memory: str = "") -> None:
    """Tells libvirtd itself of a snapshot of a domain that has this lvol as its own."""
    xml = host.virsh_direct("dumpxml", "--inactive", name)
    text = (
        f"<domainsnapshot><name>{snapshot}</name><state>{'running' if memory else 'shutoff'}"
        f"</state><creationTime>1</creationTime>{memory}{xml}</domainsnapshot>"
    )
    path = host.scratch / "forged.xml"
    path.write_text(with_note(text, [held]))
    host.virsh_direct("snapshot-create", name, str(path), "--redefine")


@pytest.fixture
def forgotten(host: Host) -> Iterator[None]:
    """Afterwards no domain but the victim has a snapshot."""
    yield
    for name in (OWN, PLAIN):
        for snapshot in host.virsh_direct("snapshot-list", name, "--name").split():
            host.virsh("snapshot-delete", name, snapshot, "--metadata")


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("name", [OWN, PLAIN])
@pytest.mark.parametrize(
    "forged",
    [
        Forged(VICTIM, VICTIM, "lvs0/victim for disk sda, which is no snapshot"),
        Forged(OWN, VICTIM, "lvs0/victim for disk sda, which is no snapshot"),
        Forged(VICTIM, "victim@s", "lvs0/victim@s, which is of snapshot s of domain victim"),
        Forged(OWN, "victim@s", "lvs0/victim@s, which is of snapshot s of domain victim"),
    ],
    ids=lambda forged: f"{forged.volume}-{forged.lvol}",
)
def test_what_is_anothers_is_neither_deleted_nor_rolled_back(
    host: Host, name: str, forged: Forged
) -> None:
    forge(host, name, "s", forged.held(host))
    assert forged.says in refused(host, "snapshot-delete", name, "s")
    assert forged.says in refused(host, "snapshot-revert", name, "s")
    shown = host.virsh("snapshot-dumpxml", name, "s", "--security-info")
    path = host.scratch / "shown.xml"
    path.write_text(shown.replace("snapshot='no'", "snapshot='internal'"))
    if name == OWN:  # defined anew through the gateway it does not become its own
        refused(host, "snapshot-create", name, str(path), "--redefine")
    host.virsh("snapshot-delete", name, "s", "--metadata")


@pytest.mark.usefixtures("forgotten")
def test_a_copy_of_a_domain_has_none_of_its_snapshots(host: Host) -> None:
    """Neither by libvirtd's own word, nor defined anew, while there is the one that took it."""
    path = host.scratch / "copy.xml"
    path.write_text(domain("copy", VICTIM))
    host.virsh("define", str(path))
    try:
        held = DiskSnapshot("sda", uuid(host, VICTIM), "lvs0", "victim@s", uuid(host, "victim@s"))
        forge(host, "copy", "s", held)
        says = "lvs0/victim@s, which is of snapshot s of domain victim"
        for words in (("snapshot-delete", "copy", "s"), ("snapshot-revert", "copy", "s")):
            assert says in refused(host, *words)
        host.virsh("snapshot-delete", "copy", "s", "--metadata")
        own, copy = (host.virsh("domuuid", name) for name in (VICTIM, "copy"))
        shown = host.virsh("snapshot-dumpxml", VICTIM, "s", "--security-info")
        path.write_text(shown.replace(own, copy).replace("<name>victim<", "<name>copy<"))
        assert says in refused(host, "snapshot-create", "copy", str(path), "--redefine")
    finally:
        host.virsh("undefine", "copy")


@pytest.mark.usefixtures("forgotten")
def test_what_has_no_mark_is_whose_disk_it_is_of(host: Host) -> None:
    """Of `virtlun volume snapshot`, or of an earlier version."""
    taken = host.volumes.snapshot(["lvs0/own"], "by-hand")[0]
    held = DiskSnapshot("sda", uuid(host, OWN), "lvs0", "own@by-hand", taken.uuid)
    forge(host, PLAIN, "by-hand", held)
    says = "names lvs0/own@by-hand, which is not of a disk that plain has"
    assert says in refused(host, "snapshot-delete", PLAIN, "by-hand")
    forge(host, OWN, "other", held)
    says = "names lvs0/own@by-hand, which is not of a disk that own has"
    assert says in refused(host, "snapshot-delete", OWN, "other")
    forge(host, OWN, "by-hand", held)
    path = host.scratch / "runs.xml"
    path.write_text(domain("runs", OWN))
    host.virsh("create", str(path), "--paused")
    try:
        says = "the volume of lvs0/own@by-hand is in use by domain runs: detach it there first"
        assert says in refused(host, "snapshot-delete", OWN, "by-hand")
    finally:
        host.virsh("destroy", "runs")
    host.virsh("snapshot-delete", OWN, "by-hand")
    assert "own@by-hand" not in lvols(host)


def test_a_domain_deletes_what_it_took_of_a_disk_that_it_has_no_more(host: Host) -> None:
    host.virsh("snapshot-create-as", OWN, "t", "--disk-only")
    path = host.scratch / "own.xml"
    path.write_text(host.virsh("dumpxml", OWN))
    host.virsh("detach-disk", OWN, "sda", "--config")
    host.virsh("snapshot-delete", OWN, "t")
    assert "own@t" not in lvols(host)
    host.virsh("define", str(path))


def test_who_has_its_disk_and_defines_it_anew_has_a_snapshot_of_a_domain_that_is_gone(
    host: Host,
) -> None:
    """As where definitions are brought back from a backup, under another UUID."""
    host.virsh("snapshot-create-as", OWN, "kept", "--disk-only")
    shown = host.virsh("snapshot-dumpxml", OWN, "kept", "--security-info")
    before = host.virsh("domuuid", OWN)
    host.virsh("undefine", OWN, "--snapshots-metadata")
    path = host.scratch / "own.xml"
    path.write_text(domain(OWN, OWN))
    host.virsh("define", str(path))
    path.write_text(shown.replace(before, host.virsh("domuuid", OWN)))
    host.virsh("snapshot-create", OWN, str(path), "--redefine")
    host.virsh("snapshot-revert", OWN, "kept")
    host.virsh("snapshot-delete", OWN, "kept")
    assert "own@kept" not in lvols(host)


@pytest.mark.usefixtures("forgotten")
def test_the_memory_of_another_domain_is_not_restored(host: Host) -> None:
    """A client may write any file's name into a snapshot, and the gateway restores as root."""
    image = host.scratch / "plain.save"
    host.virsh("start", PLAIN, "--paused")
    host.virsh("save", PLAIN, str(image))
    host.virsh("snapshot-create-as", OWN, "m", "--disk-only")
    held = DiskSnapshot("sda", uuid(host, OWN), "lvs0", "own@m", uuid(host, "own@m"))
    host.virsh("snapshot-delete", OWN, "m", "--metadata")
    forge(host, OWN, "m", held, f"<memory snapshot='external' file='{image}'/>")
    said = refused(host, "snapshot-revert", OWN, "m", "--force")
    assert f"{image} has the memory of domain plain, not of own" in said
    for name in (OWN, PLAIN):
        assert host.virsh("domstate", name) == "shut off"
    host.virsh("snapshot-delete", OWN, "m")
    assert image.exists()


def test_a_copy_of_a_domain_takes_no_checkpoint_of_it(host: Host) -> None:
    """Through the gateway alone: libvirtd knows nothing of checkpoints of virtlun disks."""
    host.virsh("start", VICTIM, "--paused")
    host.virsh("checkpoint-create-as", VICTIM, "c")
    shown = host.scratch / "checkpoint.xml"
    shown.write_text(host.virsh("checkpoint-dumpxml", VICTIM, "c"))
    path = host.scratch / "copy.xml"
    path.write_text(domain("copy", VICTIM))
    host.virsh("define", str(path))
    again = ("checkpoint-create", "copy", str(shown), "--redefine")
    try:
        says = "lvs0/victim@checkpoint-c is of a checkpoint of domain victim"
        assert says in refused(host, *again)
        host.virsh("checkpoint-delete", VICTIM, "c", "--metadata")
        says = "the volume of lvs0/victim@checkpoint-c is in use by domain victim"
        assert says in refused(host, *again)
        host.virsh("checkpoint-create", VICTIM, str(shown), "--redefine")
        assert host.virsh("checkpoint-list", VICTIM, "--name") == "c"
    finally:
        host.virsh("undefine", "copy")
    host.virsh("checkpoint-delete", VICTIM, "c")
    host.virsh("destroy", VICTIM)
