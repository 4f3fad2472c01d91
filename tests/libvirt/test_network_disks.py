"""Disks over the network as libvirt's clients write them, served by the target: Ceph and NBD.

Real libvirtd, virsh, QEMU, guest, Ceph with keys, and nbdkit.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from uuid import uuid4

import pytest

from pydataplane.domain.names import NETWORK_NAMESPACE
from tests.support import cloud as clouds
from tests.support.agent import Agent
from tests.support.ceph import POOL, lacks
from tests.support.cloud import MIB, NAME, Cloud
from tests.support.libvirtd import VirshError
from tests.support.nbdkit import Nbdkit
from tests.support.ports import free_port
from tests.support.wait import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.vm,
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.timeout(300),
]

OWN = ["boot", "root"]
"""The images that the guest has from its start."""
SERIAL = "5a1c7b52-8f0f-4f5e-9c6e-0f7f54a0a001"


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    """The cluster and the host of the module's tests."""
    with clouds.cloud() as made:
        yield made


@pytest.fixture(scope="module")
def guest(cloud: Cloud) -> Iterator[Agent]:
    """A running guest that had a disk of Ceph when it was defined, as Nova's do."""
    cloud.ceph.image("root", 16)
    cloud.ceph.image("boot", 4)
    serial = f"<serial>{SERIAL}</serial>"
    devices = cloud.disk("root", "sda", serial) + cloud.disk("boot", "vda")
    cloud.host.define(NAME, devices=devices)
    cloud.host.virsh("start", NAME)
    agent = cloud.host.agent(NAME)
    yield agent
    agent.close()
    cloud.host.virsh("destroy", NAME)
    until(lambda: cloud.images == [], lambda: f"nothing is open: {cloud.images}")
    cloud.host.virsh("undefine", NAME)


@pytest.mark.nightly
def test_a_disk_of_a_cloud_is_served_by_the_target(cloud: Cloud, guest: Agent) -> None:
    host = cloud.host
    assert cloud.images == OWN
    assert guest.run("cat /sys/block/sda/size").strip() == str(16 * MIB // 512)
    assert SERIAL.encode() in guest.run("cat /sys/block/sda/device/vpd_pg80").encode()
    assert guest.run("cat /sys/block/vda/size").strip() == str(4 * MIB // 512)
    guest.run("echo written by the guest > /dev/sda && sync")
    guest.run("echo by virtio > /dev/vda && sync")
    assert cloud.ceph.content("boot").startswith(b"by virtio")
    assert cloud.ceph.content("root").startswith(b"written by the guest")
    shown = host.virsh("dumpxml", NAME)
    assert f'<source protocol="rbd" name="{POOL}/root">' in shown
    assert f'uuid="{cloud.secret}"' in shown
    assert f"{POOL}/root" in host.virsh("domblklist", NAME)
    assert "protocol='rbd'" not in host.virsh_direct("dumpxml", NAME)
    assert "16777216" in host.virsh("domblkinfo", NAME, "sda")
    assert "wr_req" in host.virsh("domblkstat", NAME, "sda")
    # By libvirt's call, and by Ceph's own command on any host.
    host.virsh("blockresize", NAME, "sda", "24M")
    guest.wait_for(f"[ $(cat /sys/block/sda/size) = {24 * MIB // 512} ]")
    cloud.ceph.rbd("resize", "--no-progress", "--size", "32M", f"{POOL}/root")
    guest.wait_for(f"[ $(cat /sys/block/sda/size) = {32 * MIB // 512} ]")
    with pytest.raises(VirshError) as refused:
        host.virsh("snapshot-create-as", NAME, "s1", "--disk-only")
    assert f"image rbd:{POOL}/root is no virtlun volume" in str(refused.value)
    (place,) = cloud.places_of_the_key()
    assert place == host.paths.state_dir / "config.json"
    assert not stat.S_IMODE(place.stat().st_mode) & 0o077


def test_attached_and_detached_while_the_guest_runs(cloud: Cloud, guest: Agent) -> None:
    cloud.ceph.image("more", 8)
    xml = cloud.disk("more", "sdb")
    cloud.attach(xml, "--config")
    guest.wait_for("[ -b /dev/sdb ]")
    assert cloud.locks("more") == 1
    guest.run("echo more > /dev/sdb && sync")
    cloud.detach(xml, "--config")
    guest.wait_for("[ ! -e /sys/block/sdb ]")
    until(lambda: cloud.images == OWN, lambda: f"its own alone are open: {cloud.images}")
    until(lambda: cloud.locks("more") == 0, "nobody has it locked")
    cloud.ceph.rbd("snap", "create", f"{POOL}/more@then")
    snapshot = cloud.disk("more", "sdb", "<readonly/>").replace(
        "</source>", '<snapshot name="then"/></source>'
    )
    cloud.attach(snapshot)
    guest.wait_for("[ -b /dev/sdb ]")
    assert guest.run("head -n 1 /dev/sdb") == "more\n"
    assert guest.run("cat /sys/block/sdb/ro").strip() == "1"
    cloud.detach(snapshot)


def test_what_cannot_be_had_is_refused_and_leaves_nothing(cloud: Cloud, guest: Agent) -> None:
    before = cloud.host.virsh_direct("dumpxml", NAME)
    private = cloud.new_secret("private", cloud.key, private="yes")
    empty = str(uuid4())
    cases = (
        (cloud.disk("none", "sdb"), "image rbd/none"),
        (cloud.disk("root", "sdb", secret=private), "is private"),
        (cloud.disk("root", "sdb", secret=empty), "Secret not found"),
    )
    for xml, why in cases:
        text = cloud.refusal(xml)
        assert why in text, text
        assert cloud.key not in text
        assert cloud.images == OWN, xml
    assert cloud.host.virsh_direct("dumpxml", NAME) == before


@pytest.mark.nightly
def test_a_wrong_key_and_a_cluster_that_is_not_there(cloud: Cloud, guest: Agent) -> None:
    """Each takes 15 s, which librados is given."""
    other = cloud.ceph.run("ceph-authtool", "--gen-print-key").strip()
    wrong = cloud.new_secret("wrong", other)
    for xml in (
        cloud.disk("root", "sdb", secret=wrong),
        cloud.disk("root", "sdb", port=str(free_port())),
    ):
        text = cloud.refusal(xml)
        assert f"disk sdb (image rbd:{POOL}/root)" in text
        assert "cannot be reached as user cinder" in text
        assert other not in text
        assert cloud.images == OWN


def test_an_export_of_an_nbd_server(cloud: Cloud, guest: Agent) -> None:
    scratch = cloud.host.scratch
    disk = (
        "<disk type='network' device='disk'><driver name='qemu' type='raw'/>"
        "<source protocol='nbd' name='a/b'>{host}</source><target dev='{dev}' bus='scsi'/></disk>"
    )
    with (
        Nbdkit(scratch, "memory", "8M") as local,
        Nbdkit(scratch, "memory", "4M", name="far", port=free_port()) as far,
    ):
        local.socket.chmod(0o777)
        xml = disk.format(host=f"<host transport='unix' socket='{local.socket}'/>", dev="sdb")
        cloud.attach(xml)
        guest.wait_for(f"[ $(cat /sys/block/sdb/size) = {8 * MIB // 512} ]")
        guest.run("echo over a socket > /dev/sdb && sync")
        assert guest.run("head -n 1 /dev/sdb") == "over a socket\n"
        with pytest.raises(VirshError) as refused:
            cloud.host.virsh("blockresize", NAME, "sdb", "16M")
        assert "is resized by its server" in str(refused.value)
        with pytest.raises(VirshError) as refused:
            cloud.host.virsh(
                *("snapshot-create-as", NAME, "s1", "--disk-only", "--diskspec", "sda,snapshot=no")
            )
        assert "is no virtlun volume" in str(refused.value)
        by_tcp = disk.format(host=f"<host name='localhost' port='{far.port}'/>", dev="sdc")
        cloud.attach(by_tcp)
        guest.wait_for(f"[ $(cat /sys/block/sdc/size) = {4 * MIB // 512} ]")
        cloud.detach(by_tcp)
        cloud.detach(xml)
    assert cloud.images == OWN
    assert "refused" in cloud.refusal(xml)
    assert cloud.images == OWN


def test_a_domain_says_whether_its_disks_are_served(cloud: Cloud, guest: Agent) -> None:
    host = cloud.host
    says = "which this host does not allow: add nbd to serve_network_on_request"
    served = 'serve_network = ["rbd", "nbd"]'
    asked = 'serve_network = ["rbd"]\nserve_network_on_request = ["nbd"]'
    with Nbdkit(host.scratch, "memory", "8M", name="asked") as server:
        server.socket.chmod(0o777)
        xml = (
            "<disk type='network' device='disk'><driver name='qemu' type='raw'/>"
            f"<source protocol='nbd' name=''><host transport='unix' socket='{server.socket}'/>"
            "</source><target dev='vdb' bus='virtio'/><serial>asked-1</serial></disk>"
        )

        said = "nothing"

        def attached() -> bool:
            """Attaches it, reads what was written and writes; returns whether it was served."""
            nonlocal said
            cloud.attach(xml)
            guest.wait_for("[ -b /dev/vdb ]")
            assert guest.run("cat /sys/block/vdb/serial") == "asked-1"
            if said != "nothing":
                assert guest.run("head -n 1 /dev/vdb") == f"{said}\n"
            said = str(uuid4())
            guest.run(f"echo {said} > /dev/vdb && sync")
            is_served = cloud.images != OWN
            assert str(server.socket) in host.virsh("dumpxml", NAME)
            assert cloud.theirs("nbd") == (not is_served)
            cloud.detach(xml)
            guest.wait_for("[ ! -e /sys/block/vdb ]")
            until(lambda: cloud.images == OWN, lambda: f"its own alone are open: {cloud.images}")
            return is_served

        assert attached()
        cloud.serve("rbd", "--live")
        assert not attached()
        with host.configured(served, asked):
            cloud.serve(None, "--live")
            assert not attached()
            cloud.serve("rbd nbd", "--live")
            assert attached()
        with host.configured(served, 'serve_network = ["rbd"]'):
            assert says in cloud.refusal(xml)
            assert cloud.images == OWN
            cloud.serve("rbd", "--live")
            assert not attached()
        assert 'serve="rbd"' in host.virsh("metadata", NAME, NETWORK_NAMESPACE)
        cloud.serve(None, "--live")


def test_it_is_there_again_after_the_target_was_killed(cloud: Cloud, guest: Agent) -> None:
    guest.run("echo before the end > /dev/sda && sync")
    cloud.host.kill_target()
    cloud.host.start_target()
    guest.run("echo 3 > /proc/sys/vm/drop_caches")
    assert guest.run("head -n 1 /dev/sda") == "before the end\n"
    assert cloud.images == OWN


@pytest.mark.nightly
def test_started_by_libvirtd_itself_and_after_the_target_lost_its_state(cloud: Cloud) -> None:
    host, name = cloud.host, "own-vm"
    path, device = host.scratch / f"{name}.xml", host.scratch / "device.xml"
    cloud.ceph.image("own", 8)
    before = cloud.images
    with Nbdkit(host.scratch, "memory", "8M", name="hooked") as server:
        server.socket.chmod(0o777)
        path.write_text(
            f"<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><os>"
            "<type arch='x86_64' machine='q35'>hvm</type></os><devices>"
            "<disk type='network' device='disk'><source protocol='nbd' name=''>"
            f"<host transport='unix' socket='{server.socket}'/></source>"
            "<target dev='sda' bus='scsi'/></disk></devices></domain>"
        )
        host.virsh("define", str(path))
        host.virsh_direct("start", name)  # the hook opens what needs no secret
        assert len(cloud.images) == len(before) + 1
        host.virsh("destroy", name)
        assert cloud.images == before
        device.write_text(cloud.disk("own", "sdb"))
        host.virsh("attach-device", name, str(device), "--config")
        assert cloud.images == before
        with pytest.raises(VirshError, match="virtlun-gateway alone can ask for"):
            host.virsh_direct("start", name)
        host.virsh("start", name)
        running = cloud.images
        assert len(running) == len(before) + 2
        host.virsh("managedsave", name)
        assert cloud.images == before
        host.virsh("start", name)
        assert cloud.images == running
        host.stop_gateway()
        host.kill_target()
        (host.paths.state_dir / "config.json").unlink()
        host.start_target()
        assert cloud.images == []
        host.start_gateway()
        until(lambda: cloud.images == running, "the images to be open again")
        host.virsh("destroy", name)
    host.virsh("undefine", name)


def test_a_domain_without_a_controller_keeps_qemus_own(cloud: Cloud) -> None:
    host, name = cloud.host, "qemus-vm"
    path, device = host.scratch / f"{name}.xml", host.scratch / "device.xml"
    path.write_text(
        f"<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><os>"
        "<type arch='x86_64' machine='q35'>hvm</type></os><devices>"
        "<controller type='scsi' model='virtio-scsi'/></devices></domain>"
    )
    host.virsh_direct("define", str(path))
    host.virsh_direct("start", name)
    with Nbdkit(host.scratch, "memory", "8M", name="own") as server:
        server.socket.chmod(0o777)
        device.write_text(
            "<disk type='network' device='disk'><driver name='qemu' type='raw'/>"
            f"<source protocol='nbd' name=''><host transport='unix' socket='{server.socket}'/>"
            "</source><target dev='sda' bus='scsi'/></disk>"
        )
        before = cloud.images
        host.virsh("attach-device", name, str(device), "--live", "--config")
        until(lambda: "protocol='nbd'" in host.virsh_direct("dumpxml", name), "QEMU's disk")
        assert cloud.images == before
        host.virsh("detach-device", name, str(device), "--live", "--config")
    host.virsh("destroy", name)
    host.virsh("undefine", name)
