"""Programs that are made for libvirt's pools, on ours: virt-install, virt-clone, libvirt-python."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from tests.libvirt.test_pools import MIB, OURS
from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.vm]


def run(host: Host, *words: str) -> str:
    """Runs a program with the gateway's URI; returns what it said."""
    done = subprocess.run(
        [words[0], "--connect", host.uri, *words[1:]],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(host: Host, name: str, *disks: str) -> None:
    """Defines a domain with virt-install."""
    words = ["--name", name, "--memory", "64", "--import", "--osinfo", "detect=off,require=off"]
    words += ["--virt-type", "qemu", "--network", "none", "--graphics", "none"]
    words += [word for disk in disks for word in ("--disk", disk)]
    xml = host.scratch / f"{name}.xml"
    xml.write_text(run(host, "virt-install", *words, "--print-xml", "1"))
    host.virsh("define", str(xml))


@pytest.fixture
def volume(host: Host) -> Iterator[str]:
    host.virsh("vol-create-as", OURS, "there", "8M", "--allocation", "0")
    yield "there"
    host.virsh("vol-delete", "there", "--pool", OURS)


def test_virt_install_takes_a_volume_by_its_name_and_path(host: Host, volume: str) -> None:
    path = f"/dev/virtlun/lvs0/{volume}"
    for name, disk in (("byname", f"vol={OURS}/{volume}"), ("bypath", f"path={path}")):
        install(host, name, f"{disk},bus=scsi")
        assert f"/dev/virtlun/lvs0/{volume}" in host.virsh("domblklist", name)
        host.virsh("undefine", name)


def disks(host: Host, name: str, *more: str) -> dict[str, str]:
    """Returns what each disk of a domain is on, by its name in the guest."""
    rows = host.virsh("domblklist", name, *more).splitlines()
    return {row.split()[0]: row.split()[1] for row in rows if row.strip()}


def serial(host: Host, name: str, *more: str) -> str:
    """Returns the serial number of the one disk of ours that a domain has."""
    xml = ElementTree.fromstring(host.virsh("dumpxml", name, *more))
    return xml.findtext("devices/disk/serial", "")


@pytest.mark.parametrize("source", ["path=/dev/virtlun/lvs0/there", f"vol={OURS}/there"])
def test_virt_xml_adds_edits_and_removes_a_disk(host: Host, volume: str, source: str) -> None:
    name, path = "edited", f"/dev/virtlun/lvs0/{volume}"
    install(host, name, "none")
    # Of a domain that is only defined.
    disk = f"{source},bus=scsi,target.dev=sda"
    run(host, "virt-xml", name, "--add-device", "--disk", disk)
    assert disks(host, name) == {"sda": path}
    run(host, "virt-xml", name, "--edit", "target=sda", "--disk", "serial=first")
    assert serial(host, name) == "first"
    run(host, "virt-xml", name, "--remove-device", "--disk", "target=sda")
    assert disks(host, name) == {}
    # Of one that runs, which has it at once.
    host.virsh("start", name)
    run(host, "virt-xml", name, "--update", "--add-device", "--disk", f"{disk},serial=live")
    assert disks(host, name) == disks(host, name, "--inactive") == {"sda": path}
    assert serial(host, name) == "live"
    assert host.client.call("bdev_get_bdevs", name=f"lvs0/{volume}")[0]["claimed"]
    # What a running disk cannot have is for the next start.
    run(host, "virt-xml", name, "--edit", "target=sda", "--disk", "serial=next")
    assert (serial(host, name), serial(host, name, "--inactive")) == ("live", "next")
    run(host, "virt-xml", name, "--update", "--remove-device", "--disk", "target=sda")
    assert disks(host, name) == disks(host, name, "--inactive") == {}
    host.virsh("destroy", name)
    host.virsh("undefine", name)


CLASSES = """
import sys
sys.path.insert(0, "/usr/share/virt-manager")
from virtinst import cli, DeviceDisk, StoragePool, StorageVolume
connection = cli.getConnection(sys.argv[1])
pool = connection.storagePoolLookupByName(sys.argv[2])
shown = StoragePool(connection, parsexml=pool.XMLDesc(0))
assert shown.name == sys.argv[2] and shown.type == "zfs", shown.get_xml()
assert pool.name() in [each.name() for each in connection.listAllStoragePools()]
volume = StorageVolume(connection)
volume.pool = pool
volume.name = StorageVolume.find_free_name(connection, pool, "class")
volume.capacity = 8 << 20
volume.allocation = 0
volume.validate()
made = volume.install()
path = made.path()
again = StorageVolume(connection, parsexml=made.XMLDesc(0))
assert (again.key, again.target_path, again.capacity) == (made.key(), path, 8 << 20)
assert DeviceDisk.path_definitely_exists(connection, path)
assert not DeviceDisk.path_in_use_by(connection, path)
for by_path in (True, False):
    disk = DeviceDisk(connection)
    if by_path:
        disk.set_source_path(path)
    else:
        disk.set_vol_object(made, pool)
    disk.bus, disk.target = "scsi", "sda"
    disk.validate()
    assert disk.get_source_path() == path and disk.get_vol_object().key() == made.key()
    assert abs(disk.get_size() * 1024 - 8) < 0.01, disk.get_size()
    assert disk.type == "block", disk.get_xml()
clone = StorageVolume(connection)
clone.pool, clone.name, clone.capacity = pool, "copy", 8 << 20
clone.set_input_vol(made)
clone.validate()
clone.install()
assert {each.name() for each in pool.listAllVolumes()} == {made.name(), "copy"}
for each in pool.listAllVolumes():
    each.delete()
"""


def test_virt_managers_own_classes_make_and_use_volumes(host: Host) -> None:
    done = subprocess.run(
        ["/usr/bin/python3", "-c", CLASSES, host.uri, OURS],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert host.volumes.all() == []


def test_virt_install_makes_a_thin_volume_that_virt_clone_copies(host: Host) -> None:
    words = ("--name", "made", "--memory", "64", "--import", "--osinfo", "detect=off,require=off")
    more = ("--virt-type", "qemu", "--network", "none", "--graphics", "none", "--noautoconsole")
    run(host, "virt-install", *words, *more, "--disk", f"size=0.0625,pool={OURS},bus=scsi")
    (made,) = host.volumes.volumes()
    assert made.thin and made.size == 64 * MIB
    assert made.path in host.virsh("domblklist", "made")
    host.virsh("destroy", "made")
    copy = "/dev/virtlun/lvs0/copied"
    run(host, "virt-clone", "--original", "made", "--name", "copy", "--file", copy)
    assert copy in host.virsh("domblklist", "copy")
    assert host.volumes.volume("lvs0/copied").parent is not None
    host.virsh("start", "copy")
    host.virsh("destroy", "copy")
    for name in ("made", "copy"):
        host.virsh("undefine", name, "--remove-all-storage")
    assert host.volumes.all() == []


SCRIPT = """
import sys, threading, libvirt
libvirt.virEventRegisterDefaultImpl()
connection = libvirt.open(sys.argv[1])
heard = []
every = libvirt.VIR_STORAGE_POOL_EVENT_ID_LIFECYCLE
def changed(_, pool, event, detail, __): heard.append((pool.name(), event))
def refreshed(_, pool, __): heard.append((pool.name(), "refresh"))
pool = connection.storagePoolLookupByName(sys.argv[2])
of_all = connection.storagePoolEventRegisterAny(None, every, changed, None)
of_one = connection.storagePoolEventRegisterAny(
    pool, libvirt.VIR_STORAGE_POOL_EVENT_ID_REFRESH, refreshed, None)
volume = pool.createXML("<volume><name>v</name><capacity>8388608</capacity></volume>")
assert pool.listVolumes() == ["v"] and pool.numOfVolumes() == 1
assert connection.storageVolLookupByKey(volume.key()).path() == volume.path()
assert volume.storagePoolLookupByVolume().UUID() == pool.UUID()
assert connection.storagePoolLookupByUUID(pool.UUID()).name() == pool.name()
stream = connection.newStream()
volume.upload(stream, 0, 5)
stream.sendAll(lambda s, n, o: o.pop(), [b"", b"hello"])
stream.finish()
stream = connection.newStream()
volume.download(stream, 0, 5)
got = []
stream.recvAll(lambda s, data, o: o.append(data), got)
stream.finish()
assert b"".join(got) == b"hello", got
stream = connection.newStream()
volume.upload(stream, 0, 0)
stream.send(b"x" * 512)
try:
    stream.abort()
except libvirt.libvirtError as error:
    assert "aborted at client request" in str(error), error
large = pool.createXML(
    "<volume><name>w</name><capacity>268435456</capacity><allocation>0</allocation></volume>")
stream = connection.newStream()
large.download(stream, 0, 0)
assert len(stream.recv(65536)) > 0
try:
    stream.abort()
except libvirt.libvirtError as error:
    assert "aborted at client request" in str(error), error
large.delete()
volume.delete()
pool.destroy()
assert pool.isActive() == 0 and pool.isPersistent() == 1 and pool.autostart() == 1
assert pool.name() in connection.listDefinedStoragePools()
pool.create()
assert pool.name() in connection.listStoragePools()
wanted = [(pool.name(), 3), (pool.name(), 2)]
for _ in range(200):
    if all(each in heard for each in wanted) and heard.count((pool.name(), "refresh")) >= 3:
        break
    libvirt.virEventRunDefaultImpl()
else:
    raise SystemExit(heard)
for callback in (of_all, of_one):
    connection.storagePoolEventDeregisterAny(callback)
"""


def test_libvirts_own_binding_does_all_of_it_and_hears_of_it(host: Host) -> None:
    done = subprocess.run(
        ["/usr/bin/python3", "-c", SCRIPT, host.uri, OURS],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert host.volumes.all() == []


def virsh(host: Host, *words: str, editor: str = "false") -> subprocess.Popen[str]:
    """Starts virsh; `editor` is the program that it has a text edited with."""
    return subprocess.Popen(
        ["virsh", "--connect", host.uri, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "EDITOR": editor, "VISUAL": editor},
    )


def test_pool_event_tells_what_happens_to_a_pool(host: Host) -> None:
    """virsh does not say that it listens, so each happens until it has heard of it."""
    for event, *calls in (
        ("refresh", ("pool-refresh", OURS)),
        ("lifecycle", ("pool-destroy", OURS), ("pool-start", OURS)),
    ):
        words = ("pool-event", "--pool", OURS, "--event", event, "--timeout", "60")
        with virsh(host, *words) as listening:
            while listening.poll() is None:
                for call in calls:
                    host.virsh(*call)
            assert listening.stdout is not None
            said = listening.stdout.read()
        assert f"event '{event}' for storage pool {OURS}" in said
        assert "events received: 1" in said
    assert "running" in host.virsh("pool-info", OURS)


def test_pool_edit_takes_back_what_our_pool_is_and_nothing_else(host: Host) -> None:
    before = host.virsh("pool-dumpxml", OURS)
    for editor, says in (
        ("true", "not changed"),
        ("sed -i 's/<source>/<source><!-- seen -->/'", "configuration edited"),
        # Without a terminal virsh cannot ask whether to try again, and then takes it for done.
        ("sed -i 's/<name>lvs0</<name>other</'", "error: Failed."),
    ):
        with virsh(host, "pool-edit", OURS, editor=editor) as editing:
            assert editing.stdout is not None
            assert says in editing.stdout.read()
        assert host.virsh("pool-dumpxml", OURS) == before
