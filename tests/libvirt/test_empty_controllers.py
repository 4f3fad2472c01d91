"""Domains without a disk of ours, with a real libvirtd.

They have a controller where that is wanted and possible, and start, autostart, restore and snapshot
whatever becomes of it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

MIB = 1 << 20
DEVICE = "vhost-user-scsi-pci"
STAND_IN = "value='virtio-scsi-pci'"


@pytest.fixture(autouse=True)
def whole(host: Host) -> Iterator[None]:
    """Each test begins with a target and a gateway, and leaves no domain."""
    yield
    host.start_target()
    if not host.has_gateway:
        host.start_gateway()
    for name in host.virsh_direct("list", "--all", "--name").split():
        host.virsh_direct("destroy", name, check=False)
        host.virsh_direct("undefine", name, "--managed-save", "--snapshots-metadata", check=False)


def at_libvirtd(host: Host, name: str, *options: str) -> str:
    """Returns libvirtd's own XML, without the guest's command line, which has our name in it."""
    text = host.virsh_direct("dumpxml", name, *options)
    return re.sub("<cmdline>.*</cmdline>", "", text)


def refused(host: Host, name: str) -> str:
    """Attaches a disk to a running domain, which must fail; returns what is said."""
    host.volumes.create(f"lvs0/{name}", 8 * MIB)
    with pytest.raises(VirshError) as error:
        host.virsh("attach-disk", name, f"/dev/virtlun/lvs0/{name}", "sdb", "--live")
    host.volumes.delete(host.volumes.volume(f"lvs0/{name}").uuid)
    return str(error.value)


def attached(host: Host, name: str) -> None:
    """Attaches a disk to a running guest, which sees it, and detaches it."""
    made = host.volumes.create(f"lvs0/{name}", 8 * MIB)
    host.virsh("attach-disk", name, f"/dev/virtlun/lvs0/{name}", "sdb", "--live")
    agent = host.agent(name)
    agent.wait_for("[ -b /dev/sda ] && dd if=/dev/sda of=/dev/null bs=1M")
    agent.close()
    host.virsh("detach-disk", name, "sdb", "--live")
    host.volumes.delete(made.uuid)


def test_a_run_has_the_controller_and_the_definition_is_the_clients(host: Host) -> None:
    host.define("plain")
    before = at_libvirtd(host, "plain", "--inactive")
    assert "virtlun" not in before and "memoryBacking" not in before
    host.virsh("start", "plain")
    assert DEVICE in at_libvirtd(host, "plain")
    assert at_libvirtd(host, "plain", "--inactive") == before
    shown = host.virsh("dumpxml", "plain")
    assert not re.search("virtlun:|vhost|memoryBacking|override", shown)
    attached(host, "plain")
    # With --config, too: the definition has a controller for as long as it has a disk.
    host.volumes.create("lvs0/kept", 8 * MIB)
    host.virsh("attach-disk", "plain", "/dev/virtlun/lvs0/kept", "sdb", "--live", "--config")
    assert DEVICE in at_libvirtd(host, "plain", "--inactive")
    host.virsh("detach-disk", "plain", "sdb", "--live", "--config")
    after = at_libvirtd(host, "plain", "--inactive")
    assert DEVICE not in after and "memoryBacking" not in after
    host.virsh("destroy", "plain")
    assert host.client.call("vhost_get_controllers") == []


def test_it_starts_without_a_target_and_says_what_an_attach_needs(host: Host) -> None:
    host.define("alone")
    host.stop_target()
    for way in (host.virsh, host.virsh_direct):
        way("start", "alone", "--paused")
        assert host.virsh("domstate", "alone") == "paused"
        assert "virtlun" not in at_libvirtd(host, "alone")
        way("destroy", "alone")
    host.virsh("start", "alone", "--paused")
    host.start_target()
    said = refused(host, "alone")
    assert "domain 'alone' runs without a virtlun controller" in said
    assert "`virtlun domain prepare alone`" in said and "shut it down and start it again" in said
    host.virsh("destroy", "alone")
    host.virsh("start", "alone", "--paused")
    assert DEVICE in at_libvirtd(host, "alone")


@pytest.mark.nightly
def test_it_starts_by_itself_with_the_host_whatever_is_there(host: Host) -> None:
    host.define("early")
    host.virsh("autostart", "early")
    hook = host.libvirtd.hooks / "qemu.d/virtlun"
    away = host.scratch / "hook-away"
    host.stop_target()
    host.stop_gateway()
    for gone in (False, True):
        if gone:
            hook.rename(away)
        try:
            # libvirtd starts such domains where its run directory is new, as after the host's boot.
            host.libvirtd.kill()
            (host.libvirtd.scratch / "run-libvirt/qemu/autostarted").unlink(missing_ok=True)
            host.libvirtd.start()
            until(lambda: host.virsh_direct("domstate", "early") == "running", "it runs")
            host.virsh_direct("destroy", "early")
        finally:
            if gone:
                away.rename(hook)
                host.libvirtd.restart()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("save", "hook"),
        pytest.param("managedsave", "gateway", marks=pytest.mark.nightly),
        pytest.param("managedsave", "hook", marks=pytest.mark.nightly),
        pytest.param("save", "gateway", marks=pytest.mark.nightly),
    ],
)
def test_a_saved_guest_goes_on_without_a_target_and_later_with_one(
    host: Host, way: str, kind: str
) -> None:
    name = f"{kind}-{way}"
    host.define(name)
    host.virsh("start", name)
    agent = host.agent(name)
    agent.run("echo here >/tmp/mark")
    agent.close()
    image = host.scratch / f"{name}.image"
    words: list[list[str]] = [[kind, name], ["start", name]]
    if kind == "save":
        words = [[kind, name, str(image)], ["restore", str(image)]]
    host.virsh(*words[0])
    host.stop_target()
    if way == "hook":
        host.stop_gateway()
    (host.virsh if way == "gateway" else host.virsh_direct)(*words[1])
    assert STAND_IN in at_libvirtd(host, name)
    agent = host.agent(name)
    assert agent.run("cat /tmp/mark; ls /sys/class/scsi_host").split() == ["here", "host0"]
    agent.close()
    host.start_target()
    if way == "hook":
        host.start_gateway()
    assert "virtio-scsi" not in host.virsh("dumpxml", name)
    assert "runs without a virtlun controller" in refused(host, name)
    # The next one that it goes through with a target gives it its controller again.
    host.virsh(*words[0])
    if way == "hook":
        host.stop_gateway()
    (host.virsh if way == "gateway" else host.virsh_direct)(*words[1])
    if way == "hook":
        host.start_gateway()
    assert STAND_IN not in at_libvirtd(host, name)
    attached(host, name)


@pytest.mark.nightly
def test_a_saved_guest_goes_on_where_there_is_libvirtd_alone(host: Host) -> None:
    """Without target, gateway and hook; and with them again it gets its controller back."""
    host.define("left")
    host.virsh("start", "left")
    agent = host.agent("left")
    agent.run("echo here >/tmp/mark")
    agent.close()
    image = host.scratch / "left.image"
    kinds = (
        (("managedsave", "left"), ("start", "left")),
        (("save", "left", str(image)), ("restore", str(image))),
    )
    hook = host.libvirtd.hooks / "qemu.d/virtlun"
    away = host.scratch / "hook-away"
    for save, restore in kinds:
        assert DEVICE in at_libvirtd(host, "left")
        host.virsh(*save)
        if save[0] == "save":
            shown = host.virsh("save-image-dumpxml", str(image))
            assert not re.search("virtlun:|vhost|virtio-scsi|override", shown)
        host.stop_gateway()
        host.stop_target()
        hook.rename(away)
        host.libvirtd.restart()
        try:
            host.virsh_direct(*restore)
            assert STAND_IN in at_libvirtd(host, "left")
            agent = host.agent("left")
            assert agent.run("cat /tmp/mark").strip() == "here"
            agent.close()
        finally:
            away.rename(hook)
            host.libvirtd.restart()
            host.start_target()
            host.start_gateway()
        host.virsh(*save)
        host.virsh(*restore)
        attached(host, "left")


@pytest.mark.nightly
def test_what_cannot_have_a_controller_starts_as_its_client_defined_it(host: Host) -> None:
    for name, machine in (("old", "isapc"), ("tiny", "microvm")):
        path = host.scratch / f"{name}.xml"
        host.define(name)
        text = path.read_text().replace("machine='q35'", f"machine='{machine}'")
        text = text.replace("<features><acpi/></features>", "")
        path.write_text(text)
        host.virsh("undefine", name)
        given = direct(host, "define", str(path))
        assert given == through(host, "define", str(path))
        assert direct(host, "start", name, "--paused") == through(host, "start", name, "--paused")
    full = "".join(
        f"<interface type='user'><model type='virtio'/><address type='pci' domain='0x0000'"
        f" bus='0x00' slot='{slot:#04x}' function='0x0'/></interface>"
        for slot in range(2, 32)
    )
    host.define("full")
    host.virsh("undefine", "full")
    path = host.scratch / "full.xml"
    text = path.read_text().replace("machine='q35'", "machine='pc'")
    path.write_text(
        text.replace("<serial", f"<controller type='usb' model='none'/>{full}<serial", 1)
    )
    host.virsh("define", str(path))
    host.virsh("start", "full", "--paused")
    assert "virtlun" not in at_libvirtd(host, "full")
    assert "runs without a virtlun controller" in refused(host, "full")


def test_what_says_that_its_memory_is_private_is_told_so_and_not_to_restart(host: Host) -> None:
    path = host.scratch / "private.xml"
    host.define("private")
    host.virsh("undefine", "private")
    private = "<memoryBacking><access mode='private'/></memoryBacking>"
    path.write_text(path.read_text().replace("<os>", f"{private}<os>", 1))
    host.virsh("define", str(path))
    host.virsh("start", "private", "--paused")
    for said in (refused(host, "private"), prepare(host, "private", host.uri, refused=True)):
        assert "(<access mode='private'/>); use <access mode='shared'/>" in said
        assert "start" not in said
    assert "virtlun" not in at_libvirtd(host, "private")


def direct(host: Host, *words: str) -> str:
    """Does something at libvirtd itself, and takes it back; returns what was said."""
    said = host.virsh_direct(*words, check=False)
    undo(host, words)
    return said


def through(host: Host, *words: str) -> str:
    """The same through the gateway; what it did stays if it was a definition."""
    said = host.virsh(*words, check=False)
    if words[0] != "define":
        undo(host, words)
    return said


def undo(host: Host, words: tuple[str, ...]) -> None:
    """Takes back a definition or a start."""
    if words[0] == "define":
        name = words[1].rpartition("/")[2].removesuffix(".xml")
        host.virsh_direct("undefine", name, check=False)
    else:
        host.virsh_direct("destroy", words[1], check=False)


@pytest.fixture
def sparing(host: Host) -> Iterator[None]:
    """The gateway gives controllers where needed only."""
    text = host.config.read_text()
    host.stop_gateway()
    host.config.write_text(text.replace("[gateway]\n", '[gateway]\ncontrollers = "needed"\n'))
    host.start_gateway()
    yield
    host.stop_gateway()
    host.config.write_text(text)
    host.start_gateway()


def prepare(host: Host, name: str, uri: str, *, refused: bool = False) -> str:
    """Runs `virtlun domain prepare`; returns what it says."""
    done = subprocess.run(
        [
            *(host.program("virtlun"), "--socket", str(host.paths.rpc_socket)),
            *("domain", "prepare", name, "--connect", uri),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == int(refused), done.stderr
    return done.stderr if refused else done.stdout


@pytest.mark.nightly
@pytest.mark.usefixtures("sparing")
@pytest.mark.parametrize("way", ["gateway", pytest.param("libvirtd", marks=pytest.mark.nightly)])
def test_where_needed_only_prepare_gives_it_one(host: Host, way: str) -> None:
    name = f"asked-{way}"
    uri = host.uri if way == "gateway" else host.libvirtd.uri()
    host.define(name)
    host.virsh("start", name)
    assert "virtlun" not in at_libvirtd(host, name)
    assert f"`virtlun domain prepare {name}`" in refused(host, name)
    assert "restart needed" in prepare(host, name, uri)
    shown = host.virsh("dumpxml", name, "--inactive")
    assert "virtlun" not in re.sub("<cmdline>.*</cmdline>", "", shown)
    host.virsh("destroy", name)
    assert "at its next start" in prepare(host, name, uri)
    path = host.scratch / "same.xml"
    path.write_text(shown)
    host.virsh("define", str(path))  # to edit the domain keeps the mark
    host.virsh("start", name)
    assert DEVICE in at_libvirtd(host, name)
    attached(host, name)
    assert "disks can be attached now" in prepare(host, name, uri)
    # It is no condition: without a target it starts all the same.
    host.virsh("destroy", name)
    host.stop_target()
    for start in (host.virsh, host.virsh_direct):
        start("start", name, "--paused")
        start("destroy", name)
    host.start_target()
    # What has disks keeps them.
    host.volumes.create(f"lvs0/{name}-2", 8 * MIB)
    host.virsh("attach-disk", name, f"/dev/virtlun/lvs0/{name}-2", "sdb", "--config")
    prepare(host, name, uri)
    assert "sdb" in host.virsh("domblklist", name, "--inactive")


@pytest.mark.nightly
@pytest.mark.usefixtures("sparing")
def test_where_needed_only_a_domain_with_a_volume_has_one(host: Host) -> None:
    host.volumes.create("lvs0/own", 8 * MIB)
    host.define("own")
    host.virsh("attach-disk", "own", "/dev/virtlun/lvs0/own", "sdb", "--config")
    host.virsh("start", "own")
    attached_later = host.volumes.create("lvs0/more", 8 * MIB)
    host.virsh("attach-disk", "own", "/dev/virtlun/lvs0/more", "sdc", "--live")
    assert attached_later.uuid in str(host.client.call("vhost_get_controllers"))


@pytest.mark.nightly
def test_a_transient_domain_has_one_too_and_none_without_a_target(host: Host) -> None:
    host.define("brief")
    path = host.scratch / "brief.xml"
    host.virsh("undefine", "brief")
    host.virsh("create", str(path), "--paused")
    assert DEVICE in at_libvirtd(host, "brief")
    host.virsh("destroy", "brief")
    host.stop_target()
    host.virsh("create", str(path), "--paused")
    assert "virtlun" not in at_libvirtd(host, "brief")
    host.virsh("destroy", "brief")


@pytest.fixture
def qcow2(host: Host) -> str:
    """A domain with a disk that can hold snapshots, and none of ours."""
    disk = host.scratch / "inside.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(disk), "512M"], check=True)
    disk.chmod(0o666)
    host.define(
        "inside",
        devices=f"<disk type='file' device='disk'><driver name='qemu' type='qcow2'/>"
        f"<source file='{disk}'/><target dev='vda' bus='virtio'/></disk>",
        memory_mib=64,
    )
    return "inside"


def is_taken_inside(host: Host, name: str) -> None:
    """Takes a snapshot inside of a domain's disk, goes back to it and deletes it."""
    host.virsh("snapshot-create-as", name, "one")
    assert host.virsh("snapshot-list", name, "--name") == "one"
    assert "snapshot='internal'" in host.virsh("snapshot-dumpxml", name, "one")
    host.virsh("snapshot-revert", name, "one", "--paused")
    host.virsh("snapshot-delete", name, "one")


@pytest.mark.nightly
def test_a_snapshot_of_a_stopped_plain_domain_is_inside_its_disk(host: Host, qcow2: str) -> None:
    host.virsh("start", qcow2, "--paused")
    host.virsh("destroy", qcow2)
    is_taken_inside(host, qcow2)


@pytest.mark.nightly
def test_a_snapshot_of_a_running_one_is_where_it_has_no_controller(host: Host, qcow2: str) -> None:
    """It has one if it was started through the gateway with `controllers = "all"`."""
    host.virsh("start", qcow2, "--paused")
    with pytest.raises(VirshError, match="shut it off first, or start it without a controller"):
        host.virsh("snapshot-create-as", qcow2, "one")
    with pytest.raises(VirshError, match="require all disks to be selected"):
        host.virsh_direct("snapshot-create-as", qcow2, "one")  # it is not for us to allow
    host.virsh("destroy", qcow2)
    host.virsh_direct("start", qcow2, "--paused")
    is_taken_inside(host, qcow2)


@pytest.mark.nightly
@pytest.mark.usefixtures("sparing")
def test_a_snapshot_of_a_running_one_is_inside_where_few_have_one(host: Host, qcow2: str) -> None:
    host.virsh("start", qcow2, "--paused")
    is_taken_inside(host, qcow2)


@pytest.mark.nightly
def test_what_stands_in_for_a_controller_cannot_be_left_out_either(host: Host, qcow2: str) -> None:
    """To libvirt it is a vhost-user disk still."""
    host.virsh("start", qcow2)
    host.virsh("managedsave", qcow2)
    host.stop_target()
    host.virsh("start", qcow2, "--paused")
    assert STAND_IN in at_libvirtd(host, qcow2)
    with pytest.raises(VirshError, match="shut it off first"):
        host.virsh("snapshot-create-as", qcow2, "one")
    with pytest.raises(VirshError, match="require all disks to be selected"):
        host.virsh_direct("snapshot-create-as", qcow2, "one")
