"""Programs that are made for libvirt's pools, on ours: virt-install, virt-clone, libvirt-python."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

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
