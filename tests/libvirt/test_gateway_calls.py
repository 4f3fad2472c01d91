"""The gateway between real virsh and real libvirtd: everything libvirt can do still works."""

from __future__ import annotations

import hashlib
import os
import pty
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

import pytest

from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.relay import Step
from tests.support.wait import until
from tests.support.watcher import Watcher

pytestmark = [pytest.mark.root, pytest.mark.vm]

GUEST = "gw"
MIB = 1 << 20


@pytest.fixture(scope="module")
def guest(host: Host) -> Agent:
    """A running guest that was defined through the gateway, without disks."""
    host.define(GUEST)
    host.virsh("start", GUEST)
    return host.agent(GUEST)


@pytest.fixture
def volumes(host: Host) -> Iterator[list[str]]:
    """Eight volumes."""
    names = [f"lvs0/c{number}" for number in range(8)]
    for name in names:
        host.volumes.create(name, 8 * MIB)
    yield names
    for name in names:
        host.volumes.delete(name)


def listed(host: Host, *words: str) -> dict[str, str]:
    """Returns source by target dev as domblklist shows them."""
    lines = host.virsh("domblklist", GUEST, *words).splitlines()
    return dict(line.split(None, 1) for line in lines if line.strip())


def luns(host: Host) -> int:
    """Returns how many LUNs the target shows the guest."""
    uuid = host.virsh("domuuid", GUEST)
    for controller in host.client.call("vhost_get_controllers"):
        if controller["ctrlr"] == f"vm-{uuid}":
            return len(controller["backend_specific"]["scsi"])
    return 0


@pytest.fixture
def watcher(host: Host, guest: Agent, tmp_path: Path) -> Iterator[Watcher]:
    """Virsh that has registered for events through the gateway."""
    made = Watcher(host.uri, tmp_path / "events")
    try:
        until(lambda: made.hears(host, GUEST), "virsh listens")
        yield made
    finally:
        made.close()


FIGURES = re.compile(r"(?<=[=: ])[\d.]+s?$", re.MULTILINE)
"""At the end of a line, what goes on while two commands run: times and counters."""


def comparable(said: str) -> str:
    """Returns what virsh said without figures and disks: libvirtd shows the controller as one."""
    if not said.lstrip().startswith("<domain "):
        lines = [line for line in said.splitlines() if not line.lstrip().startswith("block.")]
        return FIGURES.sub("N", "\n".join(lines))
    domain = ElementTree.fromstring(said)
    devices = domain.find("devices")
    assert devices is not None
    for disk in devices.findall("disk[@type='vhostuser']"):
        devices.remove(disk)
    for name in (
        "metadata",
        "memoryBacking",
        "{http://libvirt.org/schemas/domain/qemu/1.0}override",
    ):
        for part in domain.findall(name):
            domain.remove(part)
    return ElementTree.canonicalize(ElementTree.tostring(domain), strip_text=True)


@pytest.mark.parametrize(
    "words",
    [
        "version",
        "hostname",
        "nodeinfo",
        "capabilities",
        "domcapabilities",
        "list --all",
        f"dominfo {GUEST}",
        f"domstate {GUEST} --reason",
        f"vcpuinfo {GUEST}",
        f"dumpxml {GUEST}",
        f"dumpxml {GUEST} --inactive --security-info",
        f"dumpxml {GUEST} --migratable",
        f"domstats {GUEST}",
        f"domjobinfo {GUEST}",
        f"qemu-monitor-command {GUEST} --hmp info version",
        "pool-list --all --type dir",
        "nwfilter-list",
        "nodedev-list",
        "secret-list",
    ],
)
@pytest.mark.usefixtures("guest")
def test_virsh_says_the_same_through_the_gateway(host: Host, words: str) -> None:
    through, direct = host.virsh(*words.split()), host.virsh_direct(*words.split())
    if words.startswith(("dumpxml", "domstats", "vcpuinfo")):  # ours differ, or time passes
        through, direct = comparable(through), comparable(direct)
    assert through == direct


@pytest.mark.usefixtures("guest")
def test_define_edit_and_undefine(host: Host) -> None:
    xml = host.virsh("dumpxml", "--inactive", GUEST)
    copy = re.sub(r"<uuid>.*?</uuid>", "", xml).replace(f"<name>{GUEST}</name>", "<name>cp</name>")
    path = host.scratch / "cp.xml"
    path.write_text(copy)
    host.virsh("define", str(path))
    host.virsh("desc", "cp", "--config", "a description")
    assert host.virsh("desc", "cp") == "a description"
    assert "a description" in host.virsh("dumpxml", "cp")
    host.virsh("undefine", "cp")
    with pytest.raises(VirshError, match="failed to get domain"):
        host.virsh("dumpxml", "cp")


@pytest.mark.nightly
def test_volumes_stream_both_ways_unharmed(host: Host) -> None:
    pool = host.scratch / "pool"
    pool.mkdir()
    host.virsh("pool-create-as", "p0", "dir", "--target", str(pool))
    source, back = host.scratch / "source", host.scratch / "back"
    source.write_bytes(os.urandom(64 * MIB))
    host.virsh("vol-create-as", "p0", "v0", str(64 * MIB))
    host.virsh("vol-upload", "v0", str(source), "--pool", "p0")
    host.virsh("vol-download", "v0", str(back), "--pool", "p0")
    sums = [hashlib.md5(path.read_bytes()).hexdigest() for path in (source, pool / "v0", back)]
    assert len(set(sums)) == 1


def test_the_console_streams(host: Host, guest: Agent) -> None:
    main, far = pty.openpty()
    process = subprocess.Popen(
        ["virsh", "-c", host.uri, "console", GUEST, "--force"],
        stdin=far,
        stdout=far,
        stderr=far,
        start_new_session=True,
    )
    os.close(far)
    try:
        seen = b""
        end = time.monotonic() + 60
        sent = False
        while time.monotonic() < end and b"end-of-burst" not in seen:
            # Said before libvirtd has opened the console: of what comes earlier nothing is kept.
            if b"Escape character" in seen and b"it-streams" not in seen:
                guest.run("echo it-streams > /dev/ttyS0")
            elif b"it-streams" in seen and not sent:
                sent = True
                guest.run(
                    "(for n in $(seq 1 800); do echo line-$n-0123456789012345678901234567890; "
                    "done; echo end-of-burst) > /dev/ttyS0 &"
                )
            if select.select([main], [], [], 0.2)[0]:
                seen += os.read(main, 65536)
        numbers = [int(n) for n in re.findall(rb"line-(\d+)-", seen)]
        assert numbers == list(range(1, 801))
    finally:
        process.kill()
        process.wait()
        os.close(main)


def test_events_of_libvirtd_and_of_ours_arrive(
    host: Host, guest: Agent, watcher: Watcher, volumes: list[str]
) -> None:
    host.virsh("suspend", GUEST)
    watcher.line("Suspended")
    host.virsh("resume", GUEST)
    watcher.line("Resumed")
    host.virsh("attach-disk", GUEST, f"/dev/virtlun/{volumes[0]}", "sda", "--live")
    added = watcher.line("device-added")
    assert f"'{GUEST}'" in added
    host.virsh("detach-disk", GUEST, "sda", "--live")
    removed = watcher.line("device-removed")
    assert added.split()[-1] == removed.split()[-1], "the same alias"


def test_statistics_show_our_disk_among_the_others(
    host: Host, guest: Agent, volumes: list[str]
) -> None:
    host.virsh("attach-disk", GUEST, f"/dev/virtlun/{volumes[0]}", "sda", "--live")
    try:
        guest.wait_for("[ -b /dev/sda ]")
        guest.run("dd if=/dev/zero of=/dev/sda bs=64k count=16 oflag=direct", 60)
        stats = host.virsh("domstats", "--block", GUEST)
        assert "block.count=1" in stats and "block.0.name=sda" in stats
        assert f"block.0.path=/dev/virtlun/{volumes[0]}" in stats
        written = re.search(r"block\.0\.wr\.bytes=(\d+)", stats)
        assert written and int(written[1]) >= MIB
        assert f"block.0.capacity={8 * MIB}" in stats
        human = host.virsh("domblkstat", GUEST, "sda", "--human")
        assert "write" in human
        assert re.search(rf"wr_bytes {written[1]}", host.virsh("domblkstat", GUEST))
        assert f"{8 * MIB}" in host.virsh("domblkinfo", GUEST, "--all")
    finally:
        host.virsh("detach-disk", GUEST, "sda", "--live")


@pytest.mark.nightly
@pytest.mark.usefixtures("guest")
def test_twenty_clients_at_a_time(host: Host) -> None:
    def one(number: int) -> None:
        name = f"many{number}"
        xml = host.scratch / f"{name}.xml"
        xml.write_text(
            f"<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory>"
            "<os><type arch='x86_64' machine='q35'>hvm</type></os>"
            f"<devices><disk type='block' device='disk'><source dev='/dev/virtlun/lvs0/m{number}'/>"
            "<target dev='sda' bus='scsi'/></disk></devices></domain>"
        )
        host.virsh("define", str(xml))
        assert f"/dev/virtlun/lvs0/m{number}" in host.virsh("dumpxml", name)
        assert GUEST in host.virsh("list", "--all", "--name")
        host.virsh("undefine", name)

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(one, range(20)))
    assert "many" not in host.virsh("list", "--all", "--name")


@pytest.mark.usefixtures("guest")
def test_concurrent_attaches_and_detaches(host: Host, volumes: list[str]) -> None:
    disks = {f"sd{'abcdefgh'[n]}": name for n, name in enumerate(volumes)}

    def attach(dev: str) -> None:
        source = f"/dev/virtlun/{disks[dev]}"
        host.virsh("attach-disk", GUEST, source, dev, "--live", "--config")

    def detach(dev: str) -> None:
        host.virsh("detach-disk", GUEST, dev, "--live", "--config")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(attach, disks))
    expected = {dev: f"/dev/virtlun/{name}" for dev, name in disks.items()}
    assert listed(host) == listed(host, "--inactive") == expected
    assert luns(host) == 8
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(detach, disks))
    assert listed(host) == listed(host, "--inactive") == {}
    assert luns(host) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("attach-disk gw /dev/virtlun/lvs0/none sdx --live", "lvs0/none"),
        ("attach-disk gw /dev/virtlun/nostore/none sdx --live", "nostore/none"),
        ("attach-disk gw /dev/virtlun/wrong sdx --live", "/dev/virtlun/wrong"),
        ("attach-disk gw /dev/virtlun/lvs0/c1 sda --live", "sda"),
        ("attach-disk gw /dev/virtlun/lvs0/c0 sdb --live", "lvs0/c0"),
        ("attach-device gw {broken} --live", "in tag disk line 1"),
        ("detach-disk gw sdq --live", "sdq"),
        ("blockresize gw sda 2T", "bytes left"),
        ("blockresize gw sda 4M", "cut off data"),
        ("blockresize gw sdz 9M", "sdz"),
        ("blkdeviotune gw sda --read-iops-sec-max 100", "cannot reset 'read_iops_sec' when"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_changes(
    host: Host, guest: Agent, volumes: list[str], words: str, says: str
) -> None:
    broken = host.scratch / "broken.xml"
    broken.write_text("<disk type='block'><source dev='/dev/virtlun/lvs0/c1'/>")
    host.virsh("attach-disk", GUEST, f"/dev/virtlun/{volumes[0]}", "sda", "--live")
    try:
        before = host.virsh("dumpxml", GUEST)
        with pytest.raises(VirshError) as error:
            host.virsh(*words.format(broken=broken).split())
        assert says in str(error.value)
        assert host.virsh("dumpxml", GUEST) == before
        assert luns(host) == 1
        assert host.volumes.volume(volumes[0]).size == 8 * MIB
    finally:
        host.virsh("detach-disk", GUEST, "sda", "--live")


@pytest.mark.usefixtures("guest")
def test_a_volume_of_another_domain_is_refused_by_name(host: Host, volumes: list[str]) -> None:
    xml = host.scratch / "holder.xml"
    xml.write_text(
        "<domain type='qemu'><name>holder</name><memory unit='MiB'>64</memory>"
        "<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>"
        f"<disk type='block' device='disk'><source dev='/dev/virtlun/{volumes[0]}'/>"
        "<target dev='sda' bus='scsi'/></disk></devices></domain>"
    )
    host.virsh("create", str(xml))
    try:
        with pytest.raises(VirshError, match="in use by domain holder"):
            host.virsh("attach-disk", GUEST, f"/dev/virtlun/{volumes[0]}", "sda", "--live")
        assert listed(host) == {}
    finally:
        host.virsh("destroy", "holder")
    host.virsh("attach-disk", GUEST, f"/dev/virtlun/{volumes[0]}", "sda", "--live")
    host.virsh("detach-disk", GUEST, "sda", "--live")


def test_garbage_on_the_socket_harms_nobody(host: Host, watcher: Watcher) -> None:
    for garbage in (b"\0" * 4096, b"GET / HTTP/1.0\r\n\r\n" * 9, os.urandom(65536), b"\xff" * 100):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(host.gateway_socket))
            client.settimeout(90)
            try:
                client.sendall(garbage)
                assert client.recv(1) == b""
            except (BrokenPipeError, ConnectionResetError):
                continue
    host.virsh("suspend", GUEST)
    watcher.line("Suspended")
    host.virsh("resume", GUEST)


@pytest.mark.usefixtures("guest")
def test_clients_killed_in_mid_call_leave_nothing_half_done(host: Host, volumes: list[str]) -> None:
    source = f"/dev/virtlun/{volumes[0]}"
    words = ["virsh", "-c", host.uri, "attach-disk", GUEST, source, "sda", "--live", "--config"]

    def agreed() -> bool:
        live = listed(host)
        return live == listed(host, "--inactive") and len(live) == luns(host)

    with host.relayed() as relay:
        for when in ("before", "unanswered", "answered"):
            begun: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()

            def kill(begun: SimpleQueue[subprocess.Popen[bytes]] = begun) -> None:
                client = begun.get()
                client.kill()
                client.wait()

            relay.end_at(Step(when, "vhost_scsi_controller_add_target"), kill)
            client = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            begun.put(client)
            assert client.wait(90) == -signal.SIGKILL
            assert relay.hit()
            until(agreed, lambda: (listed(host), listed(host, "--inactive"), luns(host)))
            if listed(host):
                host.virsh("detach-disk", GUEST, "sda", "--live", "--config")


def test_libvirtd_restarted_under_the_gateway(
    host: Host, guest: Agent, watcher: Watcher, volumes: list[str]
) -> None:
    host.virsh("attach-disk", GUEST, f"/dev/virtlun/{volumes[0]}", "sda", "--live")
    host.libvirtd.kill()
    # Clients see the end of their connection, as libvirtd's own would.
    until(lambda: watcher.ended, "the end of virsh")
    host.libvirtd.start()
    assert host.virsh("domstate", GUEST) == "running"
    assert listed(host) == {"sda": f"/dev/virtlun/{volumes[0]}"}
    host.virsh("detach-disk", GUEST, "sda", "--live")
    assert guest.run("echo alive").strip() == "alive"


@pytest.mark.usefixtures("guest")
def test_a_gateway_that_died_in_between_puts_things_right_at_start(
    host: Host, volumes: list[str]
) -> None:
    host.virsh("attach-disk", GUEST, f"/dev/virtlun/{volumes[0]}", "sda", "--live")
    controller = f"vm-{host.virsh('domuuid', GUEST)}"
    host.stop_gateway(signal.SIGKILL)
    # As if it had died after the metadata and before the LUN.
    host.client.call("vhost_scsi_controller_remove_target", ctrlr=controller, scsi_target_num=0)
    host.start_gateway()
    until(lambda: _luns_of(host, controller) == 1, "the LUN is there again")
    host.virsh("detach-disk", GUEST, "sda", "--live")


def _luns_of(host: Host, controller: str) -> int:
    (found,) = host.client.call("vhost_get_controllers", name=controller)
    return len(found["backend_specific"]["scsi"])


def test_without_a_target_an_attach_fails_and_the_guest_goes_on(
    host: Host, guest: Agent, volumes: list[str]
) -> None:
    with pytest.raises(VirshError, match="no target answers"):
        host.client.path.rename(host.scratch / "hidden.sock")
        try:
            host.virsh("attach-disk", GUEST, f"/dev/virtlun/{volumes[0]}", "sda", "--live")
        finally:
            (host.scratch / "hidden.sock").rename(host.client.path)
    assert listed(host) == {}
    assert host.virsh("domstate", GUEST) == "running"
    assert guest.run("echo alive").strip() == "alive"


@pytest.mark.usefixtures("guest")
def test_libvirtds_own_xml_of_the_domain_is_untouched_by_reading(host: Host) -> None:
    direct = ElementTree.fromstring(host.virsh_direct("dumpxml", GUEST))
    assert len(direct.findall("devices/disk")) == 1, "the carrier"
    shown = ElementTree.fromstring(host.virsh("dumpxml", GUEST))
    assert shown.findall("devices/disk") == []
    assert shown.find("metadata") is None


def test_the_sockets_have_libvirts_group_and_modes(host: Host) -> None:
    modes = {}
    for path in (host.gateway_socket, host.gateway_socket_ro):
        modes[path.name] = oct(Path(path).stat().st_mode & 0o777)
    assert modes == {"gateway": "0o660", "gateway-ro": "0o666"}
    assert host.gateway_socket.group() == "libvirt"
