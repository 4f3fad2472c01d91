"""A running guest moves between two hosts with its disk, an image of a pool that both have.

Real libvirtds, virsh, QEMU, guest and Ceph; the guest verifies what it reads all the time. The
image is locked for one host at a time, and the lock moves when the guest does. libvirtd and QEMU of
each host have a network of their own, and a cable to the other's.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support.cable import Cable
from tests.support.ceph import POOL, lacks
from tests.support.ceph_pair import DISK, Pair, pair
from tests.support.cloud import CONFIG, Cloud
from tests.support.frozen import freeze
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.moving import IMAGE_MIB, NAME, Moving, running
from tests.support.night import at_night
from tests.support.wait import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.vm,
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.timeout(600),
]

WATCH_TIMEOUT_S = 5
MEMORY_MIB, LINK_MIB = 64, "24"
"""What a guest writes to again and again, and what a second of a migration moves of it."""
ROUNDS = 8
"""In as many a migration has sent what its guest had changed, and is no nearer to its end."""
SECRET = "5ec2e700-0000-4000-8000-000000000001"
ANY = ["scsi", at_night("network", id="network")]
"""A volume of a pool, and a disk over the network; see `moving`."""


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    """What is between the two hosts."""
    with Cable() as made:
        yield made


@pytest.fixture(scope="module")
def hosts(cable: Cable) -> Iterator[Pair]:
    """Two hosts over one pool of a cluster that soon gives up who does not answer."""
    with pair(watch_timeout_s=WATCH_TIMEOUT_S, key=True, more_config=CONFIG, cable=cable) as made:
        yield made


@pytest.fixture(scope="module")
def cloud(hosts: Pair) -> Cloud:
    """The same as a cloud's hosts, both of which have its secret."""
    Cloud(hosts.ceph, hosts.second, SECRET)
    return Cloud(hosts.ceph, hosts.first, SECRET)


@pytest.fixture
def moving(hosts: Pair, cloud: Cloud, request: pytest.FixtureRequest) -> Iterator[Moving]:
    """A guest on the first host, which writes.

    Its disk is a volume of a pool on a bus (`scsi`, `virtio`), or one that a cloud has (`network`,
    `network-virtio`).
    """
    kind: str = getattr(request, "param", "scsi")
    bus = "virtio" if kind.endswith("virtio") else "scsi"
    image = f"i{abs(hash(request.node.name)) % 10**8}"
    disk = DISK.format(image=image, bus=bus)
    if kind.startswith("network"):
        disk = cloud.disk(image, "sda" if bus == "scsi" else "vda")
    with running(hosts, image, disk=disk, dev="sda" if bus == "scsi" else "vda") as made:
        yield made


@pytest.mark.parametrize("ways", [1, at_night(2, id="and-back")])
@pytest.mark.parametrize("moving", ANY, indirect=True)
def test_a_running_guest_goes_to_another_host_and_its_lock_with_it(
    moving: Moving, ways: int
) -> None:
    owners = [moving.owner()]
    for _ in range(ways):
        done = moving.io.status().requests
        process = moving.begin()
        # It writes while its memory is sent, and the source alone has the image locked.
        moving.io.goes_on(done)
        assert moving.owner() == owners[-1]
        moving.let_finish(process)
        moving.moved()
        moving.check()
        owners.append(moving.owner())
        logs = [host.paths.log.read_text(errors="replace") for host in (moving.there, moving.here)]
        path = f"{POOL}/{moving.image}"
        assert f"image {path} is let go, as its guest goes on elsewhere" in logs[0]
        assert f"image {path} is locked for its guest" in logs[1]
        print(f"downtime: {moving.hosts.downtime_ms(moving.here, NAME)} ms")
    assert owners[0] != owners[1]
    moving.audit()


@pytest.mark.nightly
@pytest.mark.parametrize("moving", ["virtio", "network-virtio"], indirect=True)
def test_so_does_a_virtio_blk_disk(moving: Moving) -> None:
    source = moving.owner()
    moving.let_finish(moving.begin())
    moving.moved()
    moving.check()
    assert moving.owner() != source
    moving.audit()


@pytest.mark.nightly
def test_the_definition_goes_with_it(moving: Moving) -> None:
    moving.hosts.migrate(moving.here, NAME, "--persistent", "--undefinesource")
    moving.moved()
    moving.check()
    assert moving.there.virsh("list", "--all", "--name") == ""
    listed = moving.here.virsh("domblklist", NAME, "--inactive").split()
    assert listed == ["sda", f"/dev/virtlun/ceph0/{moving.image}"]
    moving.audit()
    # As any guest of that host.
    moving.agent.close()
    moving.here.virsh("start", NAME)
    moving.hosts.agent(moving.here, NAME).close()


@pytest.mark.nightly
@pytest.mark.parametrize("moving", ANY, indirect=True)
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_target_that_a_guest_came_to_is_started_again_as_any(moving: Moving, how: str) -> None:
    moving.let_finish(moving.begin())
    moving.moved()
    moving.check()
    done = moving.io.status().requests
    if how == "killed":
        moving.here.kill_target()
    else:
        moving.here.stop_target()
    moving.here.start_target()
    moving.io.goes_on(done)
    moving.check()
    moving.audit()


@pytest.mark.nightly
@pytest.mark.parametrize("moving", ANY, indirect=True)
def test_a_cancelled_migration_leaves_all_as_it_was(moving: Moving) -> None:
    source = moving.owner()
    process = moving.begin()
    moving.here.virsh("domjobabort", NAME)
    said = process.communicate(timeout=120)[0]
    assert process.returncode != 0 and "cancel" in said, said
    moving.check()
    assert moving.owner() == source
    moving.audit()


@pytest.mark.nightly
def test_a_cable_that_is_pulled_leaves_the_guest_where_it_was(moving: Moving, cable: Cable) -> None:
    """Nobody is told; whoever gives the migration up has the guest at its source."""
    source = moving.owner()
    process = moving.begin()
    cable.pull()
    try:
        for _ in range(2):  # the first count may be of before
            moving.io.goes_on(moving.io.status().requests)
        assert process.poll() is None, "who migrates waits"
        assert moving.owner() == source
        moving.here.virsh("domjobabort", NAME)
        process.communicate(timeout=120)
        assert process.returncode != 0
        moving.check()
        assert moving.owner() == source
    finally:
        cable.plug()
    # And by the same cable it goes over later.
    moving.let_finish(moving.begin())
    moving.moved()
    moving.check()
    moving.audit()


@pytest.mark.nightly
def test_a_guest_that_writes_faster_than_it_moves_is_slowed_down_where_that_is_asked_for(
    moving: Moving,
) -> None:
    """By `--auto-converge`: without it the migration has no end."""
    moving.agent.run(
        f"(memory_writes {MEMORY_MIB} > /tmp/memory 2>&1; echo ended >> /tmp/memory) &"
    )
    moving.agent.wait_for("grep -q 'pass 2 ' /tmp/memory")
    source = moving.owner()
    process = slow_migration(moving)
    until(lambda: job(moving.here, "Iteration") > ROUNDS, "rounds that are all alike", 240)
    assert process.poll() is None, process.communicate()[0]
    assert moving.owner() == source
    moving.here.virsh("domjobabort", NAME)
    process.communicate(timeout=120)
    moving.check()
    process = slow_migration(moving, "--auto-converge")
    said = process.communicate(timeout=420)[0]
    assert process.returncode == 0, said
    moving.moved()
    moving.check()
    print(f"downtime: {moving.hosts.downtime_ms(moving.here, NAME)} ms")
    lines = moving.agent.run("cat /tmp/memory").splitlines()
    assert lines and all(
        line.startswith("memory pass") and line.endswith("lost 0") for line in lines
    )
    moving.agent.wait_for(f"[ $(wc -l < /tmp/memory) -gt {len(lines)} ]")
    moving.audit()


def slow_migration(moving: Moving, *words: str) -> subprocess.Popen[str]:
    """Begins a migration by a link that is slower than what the guest writes to its memory."""
    command = moving.hosts.command(moving.here, NAME, "--bandwidth", LINK_MIB, *words)
    return subprocess.Popen(
        ["virsh", "-q", "-c", moving.here.uri, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def job(host: Host, what: str) -> int:
    """Returns a number of the migration that goes on; 0: it is not told yet."""
    said = host.virsh("domjobinfo", NAME)
    found = re.search(rf"^{what}:\s+(\d+)", said, re.MULTILINE)
    return int(found[1]) if found else 0


@pytest.mark.nightly
@pytest.mark.parametrize("moving", ANY, indirect=True)
def test_so_does_one_whose_destination_dies(moving: Moving) -> None:
    source = moving.owner()
    process = moving.begin()
    os.kill(moving.hosts.qemu(moving.there), signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0
    moving.check()
    assert moving.owner() == source
    moving.audit()


@pytest.mark.nightly
@pytest.mark.parametrize("moving", ANY, indirect=True)
def test_a_target_that_is_killed_meanwhile_keeps_what_its_guest_has(moving: Moving) -> None:
    """That of the source: it is the one that its guest still writes by."""
    process = moving.begin()
    moving.here.kill_target()
    moving.here.start_target()
    moving.io.goes_on(moving.io.status().requests)
    assert moving.shown(moving.here)["locked"] is True
    assert moving.shown(moving.there)["locked"] is False
    moving.let_finish(process)
    moving.moved()
    moving.check()
    moving.audit()


@pytest.mark.nightly
@pytest.mark.parametrize("moving", ANY, indirect=True)
def test_so_does_that_of_the_destination_which_waits_on(moving: Moving) -> None:
    source = moving.owner()
    process = moving.begin()
    moving.there.kill_target()
    moving.there.start_target()
    assert moving.shown(moving.there)["locked"] is False
    assert moving.owner() == source
    moving.let_finish(process)
    moving.moved()
    moving.check()
    assert moving.owner() != source
    moving.audit()


@pytest.mark.nightly
@pytest.mark.parametrize("moving", ANY, indirect=True)
def test_a_gateway_that_is_killed_meanwhile_leaves_all_as_it_was(moving: Moving) -> None:
    """That of the destination, to which virsh is connected."""
    source = moving.owner()
    process = moving.begin()
    moving.there.stop_gateway(signal.SIGKILL)
    moving.fast()
    process.communicate(timeout=120)
    assert process.returncode != 0
    moving.there.start_gateway()
    moving.check()
    assert moving.owner() == source
    # And then it does go.
    moving.let_finish(moving.begin())
    moving.moved()
    moving.check()
    moving.audit()


@pytest.mark.nightly
@pytest.mark.parametrize("moving", ANY, indirect=True)
@pytest.mark.parametrize("killed", [False, True])
def test_a_guest_that_could_not_go_on_there_takes_its_lock_back(
    moving: Moving, killed: bool
) -> None:
    """All of it was sent, and its source had let go; `killed`: then its source's target was."""
    process = moving.begin()
    pid = moving.hosts.qemu(moving.there)
    libvirtd = moving.there.libvirtd.pid
    freeze(libvirtd)
    try:
        moving.fast()
        until(lambda: moving.hosts.lock(moving.image) is None, "the source to let go", 120)
        if killed:
            moving.here.kill_target()
            moving.here.start_target()
        os.kill(pid, signal.SIGKILL)
    finally:
        os.kill(libvirtd, signal.SIGCONT)
    process.communicate(timeout=120)
    assert process.returncode != 0
    moving.check()
    moving.audit()


@pytest.mark.nightly
def test_a_guest_that_goes_on_here_after_another_host_had_its_image_has_no_disk_any_more(
    moving: Moving,
) -> None:
    """As where it ran there, and ended, before the source learned of it."""
    hosts, here = moving.hosts, moving.here
    process = moving.begin()
    pid = hosts.qemu(moving.there)
    libvirtd = moving.there.libvirtd.pid
    freeze(libvirtd)
    try:
        moving.fast()
        until(lambda: hosts.lock(moving.image) is None, "the source to let go", 120)
        hosts.ceph.rbd("image-meta", "set", f"{POOL}/{moving.image}", "virtlun.generation", "other")
        os.kill(pid, signal.SIGKILL)
        until(lambda: hosts.lock(moving.image) is None, "that to be done")
        before = hosts.ceph.content(moving.image)
    finally:
        os.kill(libvirtd, signal.SIGCONT)
    process.communicate(timeout=120)
    assert process.returncode != 0

    until(lambda: moving.shown(here)["fenced"], "the source to know")
    until(lambda: "I/O error" in here.console(NAME), "the guest to be told")
    said = f"image {POOL}/{moving.image} was locked by another host since its guest"
    assert said in here.paths.log.read_text(errors="replace")
    assert hosts.ceph.content(moving.image) == before
    # A start is of a new guest, which has the disk.
    here.virsh("destroy", NAME)
    here.virsh("start", NAME)
    moving.agent.close()
    hosts.agent(here, NAME).close()


@pytest.mark.nightly
@pytest.mark.parametrize("words", ["--postcopy", "--postcopy --p2p", "--copy-storage-all"])
def test_what_is_not_possible_is_refused_before_anything_happens(
    moving: Moving, words: str
) -> None:
    source = moving.owner()
    why = "post-copy is not possible" if "postcopy" in words else "libvirt does not copy"
    with pytest.raises(VirshError, match=why) as refused:
        moving.hosts.migrate(moving.here, NAME, *words.split())
    assert str(refused.value).count("\n") == 0
    assert moving.hosts.watchers(moving.image) == {source}
    moving.check()


@pytest.mark.nightly
def test_the_hook_alone_prepares_a_destination_as_well(moving: Moving) -> None:
    """From libvirtd to libvirtd, without the gateways."""
    here, there = moving.here, moving.there
    xml = here.virsh_direct("dumpxml", "--migratable", NAME)
    path = here.scratch / "there.xml"
    path.write_text(xml.replace(str(here.paths.vhost_dir), str(there.paths.vhost_dir)))
    command = moving.hosts.command(here, NAME, "--xml", str(path))
    command[command.index(there.uri)] = there.libvirtd.uri()
    here.virsh_direct(*command, deadline_s=240)
    moving.moved()
    moving.check()
    moving.audit()


@pytest.mark.nightly
def test_xml_with_other_monitors_leaves_the_guests_disk_what_it_is(
    hosts: Pair, cloud: Cloud
) -> None:
    """The first of two disks is detached before: the other one stays target 1, of the same name."""

    def monitors(*names: str) -> str:
        return "".join(f"<host name='{name}' port='{cloud.port}'/>" for name in names)

    def shown(host: Host) -> tuple[int, str, str]:
        (controller,) = host.client.call("vhost_get_controllers")
        (target,) = controller["backend_specific"]["scsi"]
        (lun,) = target["luns"]
        return target["scsi_dev_num"], lun["serial"], lun["bdev_name"]

    one, other = "127.0.0.1", "127.0.0.9"  # nobody listens at the latter
    image, gone = (f"monitors-{n}" for n in "ab")
    hosts.ceph.image(gone, 1)
    disk = re.sub("<host [^>]*>", monitors(one, other), cloud.disk(image, "sdb"))
    with running(hosts, image, disk=disk, dev="sdb", first=cloud.disk(gone, "sda")) as moving:
        number, serial, bdev = shown(moving.here)
        assert (number, serial) == (1, bdev)
        for names in ((other, one), (one,), (one, other)):
            xml = moving.here.virsh("dumpxml", "--migratable", "--security-info", NAME)
            path = moving.here.scratch / "there.xml"
            found = re.search("(<host [^>]*>\\s*)+", xml)
            assert found is not None
            path.write_text(xml.replace(found[0], monitors(*names)))
            hosts.migrate(moving.here, NAME, "--xml", str(path))
            moving.moved()
            moving.check()
            assert shown(moving.here)[:2] == (1, serial)
            assert (shown(moving.here)[2] == bdev) == (len(names) == 2)
        path.write_text(xml.replace(f"{POOL}/{image}", f"{POOL}/{gone}"))
        says = f"source rbd:{POOL}/{gone} of disk sdb does not match rbd:{POOL}/{image}"
        with pytest.raises(VirshError, match=says):
            hosts.migrate(moving.here, NAME, "--xml", str(path))
        moving.check()
        moving.audit()


@pytest.mark.nightly
@pytest.mark.parametrize("moving", ["network"], indirect=True)
def test_a_destination_that_cannot_have_a_disk_over_the_network_says_why(
    moving: Moving, cloud: Cloud
) -> None:
    hosts, here, there = moving.hosts, moving.here, moving.there
    source = moving.owner()

    def refusal(uri: str) -> str:
        command = hosts.command(here, NAME)
        command[command.index(there.uri)] = uri
        with pytest.raises(VirshError) as refused:
            here.virsh(*command, deadline_s=240)
        moving.check()
        assert moving.owner() == source
        return str(refused.value)

    there.virsh("secret-undefine", SECRET)
    said = refusal(there.uri)
    Cloud(hosts.ceph, there, SECRET)
    assert "Secret not found" in said, said
    said = refusal(there.libvirtd.uri())  # with the hook
    assert "libvirt has the secret that it is opened with, which virtlun-gateway alone" in said
    hosts.migrate(here, NAME)
    moving.moved()
    moving.check()
    moving.audit()


@pytest.mark.nightly
@pytest.mark.parametrize("moving", ANY, indirect=True)
def test_another_host_is_refused_an_image_while_a_guest_writes(moving: Moving) -> None:
    moving.hosts.define_on(moving.there, NAME)
    with pytest.raises(VirshError, match=r"is locked by the client at 127\.0\.0\.1") as refused:
        moving.there.virsh("start", NAME)
    assert str(refused.value).count("\n") == 1, "after libvirt's own line"
    assert moving.there.virsh("domstate", NAME) == "shut off"
    moving.check()
    moving.audit()


@pytest.mark.nightly
def test_where_a_host_dies_while_its_guest_migrates_nobody_writes_until_it_is_started(
    moving: Moving,
) -> None:
    hosts, there = moving.hosts, moving.there
    hosts.define_on(there, NAME)
    before = moving.owner()
    process = moving.begin()
    with dead(moving.here, processes(moving.here)):
        process.communicate(timeout=120)
        assert process.returncode != 0
        assert there.virsh("domstate", NAME) == "shut off"
        until(lambda: not hosts.disks(there), "the destination to let go")
        assert moving.owner() == before
        start_elsewhere(moving, before)
    check_fenced(moving)


@pytest.mark.nightly
def test_a_guest_of_a_host_that_is_silent_is_started_elsewhere_and_the_old_one_fenced(
    moving: Moving,
) -> None:
    moving.hosts.define_on(moving.there, NAME)
    before = moving.owner()
    with dead(moving.here, processes(moving.here)):
        start_elsewhere(moving, before)
    check_fenced(moving)


def start_elsewhere(moving: Moving, before: str) -> None:
    """Starts the guest on the other host, whose target takes the image over."""
    hosts, there = moving.hosts, moving.there
    begun = time.monotonic()
    there.virsh("start", NAME, deadline_s=120)
    print(f"started elsewhere after {time.monotonic() - begun:.1f} s")
    assert moving.owner() != before
    agent = hosts.agent(there, NAME)
    agent.wait_for("[ -b /dev/sda ]")
    agent.run(f"dd if=/dev/zero of=/dev/sda bs=1M count={IMAGE_MIB}; echo mine > /dev/sda; sync")
    agent.close()


def check_fenced(moving: Moving) -> None:
    """Checks that the first host, which goes on by now, writes no more, and knows why."""
    hosts, here = moving.hosts, moving.here

    until(lambda: moving.shown(here)["fenced"], "the first host to know that it is fenced")
    until(lambda: "I/O error" in here.console(NAME), "the old guest to be told")
    assert "has fenced this host" in here.paths.log.read_text(errors="replace")
    assert hosts.ceph.content(moving.image) == b"mine\n".ljust(IMAGE_MIB << 20, b"\0")
    # When nothing of it runs there any more, the host can have images again.
    here.virsh("destroy", NAME)
    moving.there.virsh("destroy", NAME)
    moving.agent.close()
    hosts.forget_fence(here)
    here.virsh("start", NAME)
    hosts.agent(here, NAME).close()


def processes(host: Host) -> list[int]:
    """All that a host runs for its guest: QEMU, libvirtd, the target, the gateway."""
    target = int(host.client.call("virtlun_get_status")["pid"])
    return [Pair.qemu(host), host.libvirtd.pid, target, host.gateway_pid]


@contextlib.contextmanager
def dead(host: Host, pids: list[int]) -> Iterator[None]:
    """Nothing of a host runs, for the length of a block; its connections are cut."""
    for pid in pids:
        freeze(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
