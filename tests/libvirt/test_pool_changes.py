"""What plain virsh changes in pools of ours, and in their volumes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pydataplane import supervise
from tests.libvirt.test_pools import MIB, OURS, info, names, said
from tests.support.frozen import frozen
from tests.support.host import Host
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]


def size(host: Host, name: str) -> tuple[int, int]:
    """Returns capacity and allocation, bytes."""
    shown = info(host.virsh("vol-info", name, OURS, "--bytes"))
    return int(shown["Capacity"].split()[0]), int(shown["Allocation"].split()[0])


def test_a_pool_is_stopped_undefined_and_there_again(host: Host) -> None:
    host.volumes.create("lvs0/kept", 8 * MIB, thin=True)
    xml = host.scratch / "pool.xml"
    xml.write_text(host.virsh("pool-dumpxml", OURS))
    assert "still active" in said(host, "pool-undefine", OURS)
    assert "still active" in said(host, "pool-delete", OURS)
    assert "already active" in said(host, "pool-start", OURS)
    assert "already active" in said(host, "pool-create", str(xml))
    host.virsh("pool-destroy", OURS)
    assert names(host.virsh("pool-list", "--inactive")) == [OURS]
    assert info(host.virsh("pool-info", OURS))["State"] == "inactive"
    for words in (
        ("vol-list", OURS),
        ("vol-info", "kept", OURS),
        ("vol-create-as", OURS, "new", "8M"),
        ("vol-delete", "kept", OURS),
        ("pool-refresh", OURS),
        ("pool-destroy", OURS),
    ):
        assert "is not active" in said(host, *words), words
    assert "no storage vol" in said(host, "vol-name", "/dev/virtlun/lvs0/kept")
    assert "has 1 volume" in said(host, "pool-delete", OURS)
    host.stop_gateway()
    host.start_gateway()
    assert names(host.virsh("pool-list", "--inactive")) == [OURS]
    host.virsh("pool-undefine", OURS)
    assert names(host.virsh("pool-list", "--all")) == []
    assert "no storage pool" in said(host, "pool-info", OURS)
    host.virsh("pool-define", str(xml))
    assert names(host.virsh("pool-list", "--inactive")) == [OURS]
    host.virsh("pool-undefine", OURS)
    host.virsh("pool-create", str(xml))
    assert names(host.virsh("vol-list", OURS)) == ["kept"]
    host.virsh("pool-refresh", OURS)
    host.virsh("pool-autostart", OURS)
    host.virsh("vol-delete", "kept", OURS)


def test_what_is_no_pool_of_ours_is_refused(host: Host) -> None:
    for words, why in (
        (("pool-define-as", "virtlun-no", "zfs", "--source-name", "no"), "lvstore create no"),
        (("pool-define-as", OURS, "dir", "--target", "/x"), "pool-dumpxml"),
        (("pool-create-as", OURS, "zfs", "--source-name", "other"), "pool-dumpxml"),
        (("pool-autostart", OURS, "--disable"), "without autostart"),
        (("pool-build", OURS), "made already"),
    ):
        assert why in said(host, *words)
    assert names(host.virsh("pool-list", "--all")) == [OURS]


def test_a_volume_is_thin_or_thick_as_its_allocation_says(host: Host) -> None:
    host.virsh("vol-create-as", OURS, "thin", "64M", "--allocation", "0")
    host.virsh("vol-create-as", OURS, "thick", "16M")
    host.virsh("vol-create-as", OURS, "whole", "16M", "--allocation", "16M", "--format", "raw")
    assert size(host, "thin")[0] == 64 * MIB and size(host, "thin")[1] < 64 * MIB
    assert size(host, "thick") == size(host, "whole") == (16 * MIB, 16 * MIB)
    assert host.volumes.volume("lvs0/thin").thin and not host.volumes.volume("lvs0/thick").thin
    assert "exists already" in said(host, "vol-create-as", OURS, "thin", "64M")
    for name in ("thin", "thick", "whole"):
        host.virsh("vol-delete", name, "--pool", OURS)
    assert host.volumes.volumes() == []
    assert host.virsh("vol-list", OURS).strip() == ""


@pytest.mark.parametrize(
    ("xml", "why"),
    [
        ("<name>a</name>", "missing capacity"),
        ("<capacity>1</capacity>", "missing volume name"),
        ("<name>a/b</name><capacity>1</capacity>", "no volume's name"),
        ("<name>a@b</name><capacity>1</capacity>", "no volume's name"),
        ("<name>a</name><capacity unit='x'>1</capacity>", "malformed capacity"),
        ("<name>a</name><capacity>0</capacity>", "cannot have 0 bytes"),
        (
            "<name>a</name><capacity>1</capacity><target><format type='qcow2'/></target>",
            "format 'qcow2' is not possible",
        ),
        (
            "<name>a</name><capacity>1</capacity><target><encryption format='luks'/></target>",
            "volume create --key",
        ),
        (
            "<name>a</name><capacity>1</capacity><backingStore><path>/x</path></backingStore>",
            "<backingStore> is not possible",
        ),
        ("<name>a</name><capacity unit='TiB'>1</capacity>", "[Nn]o space|free|room"),
    ],
)
def test_what_no_volume_can_be_is_refused(host: Host, xml: str, why: str) -> None:
    path = host.scratch / "volume.xml"
    path.write_text(f"<volume>{xml}</volume>")
    assert re.search(why, said(host, "vol-create", OURS, str(path)))
    assert host.volumes.volumes() == []


def test_a_size_changes_as_the_flags_say(host: Host) -> None:
    host.virsh("vol-create-as", OURS, "grows", "8M", "--allocation", "0")
    host.virsh("vol-resize", "grows", "16M", "--pool", OURS)
    assert size(host, "grows")[0] == 16 * MIB
    host.virsh("vol-resize", "grows", "8M", "--pool", OURS, "--delta")
    assert size(host, "grows")[0] == 24 * MIB
    assert "shrink flag" in said(host, "vol-resize", "grows", "8M", "--pool", OURS)
    assert "is thin" in said(host, "vol-resize", "grows", "32M", "--pool", OURS, "--allocate")
    shrink = said(host, "vol-resize", "grows", "8M", "--pool", OURS, "--shrink")
    assert "would cut off data: to shrink it all the same, use `virtlun volume resize" in shrink
    assert size(host, "grows")[0] == 24 * MIB
    host.virsh("vol-delete", "grows", "--pool", OURS)


def test_a_volume_that_a_running_domain_has_is_kept(host: Host) -> None:
    host.start_without_guest("user", "a")
    text = "volume virtlun-lvs0/a is a disk of domain user"
    data = host.scratch / "data"
    data.write_bytes(b"x" * 512)
    for words in (
        ("vol-delete", "a", "--pool", OURS),
        ("vol-wipe", "a", "--pool", OURS),
        ("vol-upload", "a", str(data), "--pool", OURS),
        ("vol-resize", "a", "4M", "--pool", OURS, "--shrink"),
    ):
        assert text in said(host, *words), words
    host.virsh("vol-resize", "a", "16M", "--pool", OURS)
    assert "16777216" in host.virsh("domblkinfo", "user", "sda")
    host.virsh("vol-clone", "a", "b", "--pool", OURS)
    host.virsh("vol-download", "b", str(host.scratch / "copy"), "--pool", OURS)
    host.virsh("vol-download", "a", str(host.scratch / "running"), "--pool", OURS)
    assert (host.scratch / "running").stat().st_size == 16 * MIB
    host.virsh("destroy", "user")
    host.virsh("undefine", "user")
    for name in "ab":
        host.virsh("vol-delete", name, "--pool", OURS)
    assert host.volumes.all() == []


def test_data_goes_up_and_comes_down_and_is_wiped(host: Host) -> None:
    """Across what one message of a stream holds, at offsets, and with lengths."""
    data, back = host.scratch / "up", host.scratch / "down"
    data.write_bytes(os.urandom(3 * MIB + 4096))
    host.virsh("vol-create-as", OURS, "v", "8M", "--allocation", "0")
    host.virsh("vol-upload", "v", str(data), "--pool", OURS)
    host.virsh("vol-download", "v", str(back), "--pool", OURS)
    assert back.read_bytes() == data.read_bytes() + bytes(5 * MIB - 4096)
    data.write_bytes(data.read_bytes()[:8192])
    words = ("--pool", OURS, "--offset", "4096", "--length", "8192")
    host.virsh("vol-upload", "v", str(data), *words)
    host.virsh("vol-download", "v", str(back), *words)
    assert back.read_bytes() == data.read_bytes()
    beyond = ("--pool", OURS, "--offset", str(9 * MIB))
    assert "has 8388608 bytes" in said(host, "vol-download", "v", str(back), *beyond)
    data.write_bytes(bytes(9 * MIB))
    assert "bytes here, and more are sent" in said(
        host, "vol-upload", "v", str(data), "--pool", OURS
    )
    host.virsh("vol-upload", "v", __file__, "--pool", OURS)
    host.virsh("vol-wipe", "v", "--pool", OURS)
    assert "with zeros only" in said(host, "vol-wipe", "v", "--pool", OURS, "--algorithm", "random")
    host.virsh("vol-download", "v", str(back), "--pool", OURS)
    assert back.read_bytes() == bytes(8 * MIB)
    assert size(host, "v")[1] == 0
    host.virsh("vol-delete", "v", "--pool", OURS)
    assert host.volumes.all() == [] and host.client.call("virtlun_export_list") == []


@contextmanager
def streaming(host: Host, what: str, name: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`vol-upload` or `vol-download` of a volume, at a FIFO that makes it wait."""
    fifo = host.scratch / f"{what}-{name}"
    os.mkfifo(fifo)
    words = ("virsh", "-q", "-c", host.uri, what, name, str(fifo), "--pool", OURS)
    client = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        yield client, fifo
    finally:
        client.kill()
        client.communicate()


def exports(host: Host) -> list[str]:
    """Returns the UUIDs of the volumes that are files."""
    return [each["uuid"] for each in host.client.call("virtlun_export_list")]


def domain_of(host: Host, name: str) -> None:
    """Defines a domain NAME with the volume NAME as its disk."""
    xml = host.scratch / f"{name}.xml"
    xml.write_text(
        f"<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory>"
        "<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>"
        f"<disk type='volume' device='disk'><source pool='{OURS}' volume='{name}'/>"
        "<target dev='sda' bus='scsi'/></disk></devices></domain>"
    )
    host.virsh("define", str(xml))


def test_an_upload_keeps_domains_from_starting_and_ends_with_its_client(host: Host) -> None:
    host.virsh("vol-create-as", OURS, "up", "8M", "--allocation", "0")
    domain_of(host, "up")
    uuid = host.volumes.volume("lvs0/up").uuid
    with streaming(host, "vol-upload", "up") as (client, fifo), fifo.open("wb") as file:
        file.write(b"x" * MIB)
        until(lambda: exports(host) == [uuid], "the upload begins")
        assert re.search("in use|busy", said(host, "start", "up"))
        file.close()
        assert client.wait(60) == 0
        host.virsh("start", "up")  # at once
        host.virsh("destroy", "up")
        fifo.unlink()
    with streaming(host, "vol-upload", "up") as (client, fifo), fifo.open("wb") as file:
        until(lambda: exports(host) == [uuid], "another one begins")
        client.kill()
        until(lambda: not exports(host), "it ends with its client")
        fifo.unlink()
    with streaming(host, "vol-upload", "up") as (_, fifo), fifo.open("wb"):
        until(lambda: exports(host) == [uuid], "a third one begins")
        host.stop_gateway(signal.SIGKILL)
        assert exports(host) == [uuid]
        host.start_gateway()
        until(lambda: not exports(host), "the next gateway has ended it")
    host.virsh("undefine", "up")
    host.virsh("vol-delete", "up", "--pool", OURS)


def test_an_upload_that_ends_while_the_target_hangs_keeps_nobody_waiting(host: Host) -> None:
    host.virsh("vol-create-as", OURS, "hangs", "8M", "--allocation", "0")
    with streaming(host, "vol-upload", "hangs") as (client, fifo), fifo.open("wb") as file:
        file.write(b"x" * MIB)
        until(lambda: bool(exports(host)), "the upload begins")
        with frozen(supervise.status(host.paths.rpc_socket)["pid"]):
            client.kill()
            client.wait(30)
            for _ in range(3):
                host.virsh("list", "--all", deadline_s=20)
    until(lambda: not exports(host), "it ends when the target goes on")
    host.virsh("vol-delete", "hangs", "--pool", OURS)


def test_a_download_keeps_no_domain_from_starting_and_a_thick_volume_thick(host: Host) -> None:
    host.virsh("vol-create-as", OURS, "down", "16M")
    domain_of(host, "down")
    with streaming(host, "vol-download", "down") as (client, fifo), fifo.open("rb") as file:
        until(lambda: bool(exports(host)), "the download begins")
        host.virsh("start", "down")
        assert host.volumes.volume("lvs0/down").thin
        assert len(file.read()) == 16 * MIB
        assert client.wait(60) == 0
    assert not host.volumes.volume("lvs0/down").thin
    assert size(host, "down") == (16 * MIB, 16 * MIB)
    fifo.unlink()
    with streaming(host, "vol-download", "down") as (_, fifo), fifo.open("rb"):
        until(lambda: bool(exports(host)), "another one begins")
        host.stop_gateway(signal.SIGKILL)
        host.start_gateway()
        until(lambda: not host.volumes.volume("lvs0/down").thin, "the next gateway has ended it")
    assert [volume.name for volume in host.volumes.all()] == ["down"] and not exports(host)
    host.virsh("destroy", "down")
    host.virsh("undefine", "down")
    host.virsh("vol-delete", "down", "--pool", OURS)


def test_sparse_streams_carry_no_holes(host: Host) -> None:
    data, back = host.scratch / "sparse", host.scratch / "back"
    with data.open("wb") as file:
        file.seek(40 * MIB)
        file.write(b"x" * 4096)
        file.truncate(64 * MIB)
    host.virsh("vol-create-as", OURS, "v", "64M", "--allocation", "0")
    host.virsh("vol-upload", "v", str(data), "--pool", OURS, "--sparse")
    assert size(host, "v")[1] <= 8 * MIB
    host.virsh("vol-download", "v", str(back), "--pool", OURS, "--sparse")
    assert back.read_bytes() == data.read_bytes()
    assert back.stat().st_blocks * 512 <= 8 * MIB
    host.virsh("vol-delete", "v", "--pool", OURS)


def test_a_clone_is_another_volume_that_shares_what_neither_changes(host: Host) -> None:
    data, back = host.scratch / "data", host.scratch / "back"
    host.virsh("vol-create-as", OURS, "a", "8M", "--allocation", "0")
    data.write_bytes(b"a" * MIB)
    host.virsh("vol-upload", "a", str(data), "--pool", OURS)
    host.virsh("vol-clone", "a", "b", "--pool", OURS)
    assert "exists already" in said(host, "vol-clone", "a", "b", "--pool", OURS)
    assert size(host, "b") == (8 * MIB, 0)
    data.write_bytes(b"b" * 4096)
    host.virsh("vol-upload", "b", str(data), "--pool", OURS)
    host.virsh("vol-clone", "b", "c", "--pool", OURS)
    contents = {}
    for name in "abc":
        host.virsh("vol-download", name, str(back), "--pool", OURS, "--length", str(MIB))
        contents[name] = back.read_bytes()
    changed = b"b" * 4096 + b"a" * (MIB - 4096)
    assert contents == {"a": b"a" * MIB, "b": changed, "c": changed}
    host.virsh("vol-delete", "a", "--pool", OURS)
    host.virsh("vol-delete", "b", "--pool", OURS)
    host.virsh("vol-download", "c", str(back), "--pool", OURS, "--length", str(MIB))
    assert back.read_bytes() == changed
    host.virsh("vol-delete", "c", "--pool", OURS)
    assert host.volumes.all() == []


def test_a_volume_of_a_pool_is_a_disk_by_pool_and_name(host: Host) -> None:
    """Defined, started and attached, and shown as the client has written it."""
    for name in ("a", "b"):
        host.virsh("vol-create-as", OURS, name, "8M", "--allocation", "0")
    disk = (
        f"<disk type='volume' device='disk'><source pool='{OURS}' volume='{{0}}'/>"
        "<target dev='sd{0}' bus='scsi'/></disk>"
    )
    domain, more = host.scratch / "byvolume.xml", host.scratch / "more.xml"
    domain.write_text(
        "<domain type='qemu'><name>byvolume</name><memory unit='MiB'>64</memory>"
        "<os><type arch='x86_64' machine='q35'>hvm</type></os>"
        f"<devices>{disk.format('a')}</devices></domain>"
    )
    more.write_text(disk.format("b"))
    host.virsh("define", str(domain))
    host.virsh("start", "byvolume")
    host.virsh("attach-device", "byvolume", str(more), "--live")
    xml = ElementTree.fromstring(host.virsh("dumpxml", "byvolume"))
    sources = [each.attrib for each in xml.iterfind("devices/disk[@type='volume']/source")]
    assert [(each["pool"], each["volume"]) for each in sources] == [(OURS, "a"), (OURS, "b")]
    assert "is a disk of domain byvolume" in said(host, "vol-delete", "b", "--pool", OURS)
    host.virsh("detach-device", "byvolume", str(more), "--live")
    host.virsh("destroy", "byvolume")
    host.virsh("undefine", "byvolume")
    for name in ("a", "b"):
        host.virsh("vol-delete", name, "--pool", OURS)
