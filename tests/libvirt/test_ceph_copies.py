"""blockcopy by plain virsh: a disk moves to a pool of Ceph and back while its guest writes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.libvirt.test_block_copies import DEADLINE_S, DISK, SIZE, VCPUS, path
from tests.libvirt.test_volume_moves import refused
from tests.support.agent import Agent
from tests.support.ceph import POOL, Ceph, cluster, lacks
from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU
from tests.support.verified_io import VerifiedIo
from tests.support.wait import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.vm,
    pytest.mark.nightly,
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.timeout(400),
]

NAME = "mover"
WATCH_TIMEOUT_S = 5
LVSTORE, CEPH = "lvs0/disk", "ceph0/disk"
WAYS = pytest.mark.parametrize(("was", "to"), [(LVSTORE, CEPH), (CEPH, LVSTORE)])


@pytest.fixture(scope="module")
def ceph() -> Iterator[Ceph]:
    """A cluster that soon gives up who does not answer."""
    with cluster(watch_timeout_s=WATCH_TIMEOUT_S) as made:
        yield made


@pytest.fixture(scope="module")
def host(ceph: Ceph) -> Iterator[Host]:
    """A host whose target has the pool as `ceph0`, and a running guest with the disk sda."""
    with Host(keep=True, target_options=["--rbd"]) as made:
        made.volumes.add_pool("ceph0", POOL, conf=ceph.conf)
        made.volumes.create(LVSTORE, SIZE, thin=True)
        made.define(NAME, devices=DISK.format(path(LVSTORE)), vcpus=VCPUS, emulator=NEWER_QEMU)
        made.virsh("start", NAME)
        yield made
        made.virsh("destroy", NAME, check=False)


@pytest.fixture(scope="module")
def load(host: Host) -> Iterator[VerifiedIo]:
    """The guest's I/O of all kinds, which it checks all the time, and at the end the whole disk."""
    agent: Agent = host.agent(NAME)
    agent.wait_for("[ -b /dev/sda ]", DEADLINE_S)
    io = VerifiedIo(agent, "sda", seed=17, threads=VCPUS, depth=4)
    yield io
    io.finish()
    assert "I/O error" not in agent.run("dmesg")
    agent.close()


def lun(host: Host) -> dict[str, Any]:
    (controller,) = host.client.call_raw("vhost_get_controllers")
    found: dict[str, Any] = controller["backend_specific"]["scsi"][0]["luns"][0]
    return found


def is_open(ceph: Ceph) -> bool:
    """Whether a host has the image `disk` open; if so, it has it locked."""
    if "disk" not in json.loads(ceph.rbd("ls", "--format", "json", POOL)):
        return False
    status, locks = (
        json.loads(ceph.rbd(*words, "--format", "json", f"{POOL}/disk"))
        for words in (("status",), ("lock", "ls"))
    )
    clients = {f"client.{watcher['client']}" for watcher in status["watchers"]}
    assert len(locks) <= 1, locks
    # The lock of a process that was killed stays until somebody opens the image, and then yields.
    return bool(clients & {lock["locker"] for lock in locks})


def check_on(host: Host, ceph: Ceph, volume: str) -> None:
    """Both sides of the domain, the target, and the lock of the image say so; no job is left."""
    for words in ((), ("--inactive",)):
        assert host.virsh("domblklist", NAME, *words).split()[-1] == path(volume)
    assert lun(host)["bdev_name"] == host.volumes.volume(volume).uuid
    until(lambda: is_open(ceph) == (volume == CEPH), "the image is locked if it is the disk")
    assert not host.virsh("blockjob", NAME, "sda", "--info")
    until(lambda: not list((host.scratch / "notes").glob("*")), "the journal is empty")


def begin_at(host: Host, ceph: Ceph, load: VerifiedIo, volume: str) -> None:
    """The guest writes to this volume, and there is no other."""
    here = host.virsh("domblklist", NAME).split()[-1]
    delete_others(host, here)
    if here != path(volume):
        copy(host, volume, "--wait", "--pivot")
        delete_others(host, path(volume))
    check_on(host, ceph, volume)
    load.goes_on(load.status().requests, DEADLINE_S)


def delete_others(host: Host, here: str) -> None:
    """Deletes all volumes but the one of this path."""
    for each in host.volumes.volumes():
        if path(each.path) != here:
            host.volumes.delete(each.uuid)


def copy(host: Host, to: str, *words: str) -> None:
    host.virsh("blockcopy", NAME, "sda", "--dest", path(to), "--transient-job", *words)


def until_ready(host: Host) -> None:
    def ready() -> bool:
        said = host.virsh("blockjob", NAME, "sda", "--info")
        return "[100 %]" in said or "[100.00 %]" in said

    until(ready, "it is ready")


@WAYS
def test_a_guest_writes_on(host: Host, ceph: Ceph, load: VerifiedIo, was: str, to: str) -> None:
    begin_at(host, ceph, load, was)
    serial = lun(host)["serial"]
    said = refused(host, was, to)
    assert f"`virsh blockcopy DOMAIN DISK --dest {path(to)} --transient-job" in said, said
    check_on(host, ceph, was)
    assert [each.path for each in host.volumes.volumes()] == [was]
    copy(host, to)
    until_ready(host)
    done = load.status().requests
    host.virsh("blockjob", NAME, "sda", "--abort")
    check_on(host, ceph, was)
    load.goes_on(done, DEADLINE_S)
    copy(host, to, "--reuse-external", "--wait", "--pivot")
    check_on(host, ceph, to)
    load.goes_on(load.status().requests, DEADLINE_S)
    assert lun(host)["serial"] == serial, "the same disk to its guest"


@pytest.mark.parametrize("when", ["copying", "ready", "pivoted"])
@WAYS
def test_a_killed_target_has_it_on_one_of_the_two(
    host: Host, ceph: Ceph, load: VerifiedIo, was: str, to: str, when: str
) -> None:
    begin_at(host, ceph, load, was)
    copy(host, to, *(("--bandwidth", "1") if when == "copying" else ()))
    if when != "copying":
        until_ready(host)
    if when == "pivoted":
        host.virsh("blockjob", NAME, "sda", "--pivot")
    done = load.status().requests
    host.kill_target()
    host.start_target()
    load.goes_on(done, DEADLINE_S)
    until(lambda: not host.virsh("blockjob", NAME, "sda", "--info"), "the job is over")
    check_on(host, ceph, to if when == "pivoted" else was)


@pytest.mark.parametrize("when", ["copying", "pivoted"])
@WAYS
def test_a_killed_gateway_finds_what_became_of_it(
    host: Host, ceph: Ceph, load: VerifiedIo, was: str, to: str, when: str
) -> None:
    """`pivoted`: the target has the disk on the copy, and nobody has told libvirtd."""
    begin_at(host, ceph, load, was)
    copy(host, to, *(("--bandwidth", "1") if when == "copying" else ()))
    if when == "pivoted":
        until_ready(host)
    host.stop_gateway(signal.SIGKILL)
    if when == "pivoted":
        (controller,) = host.client.call_raw("vhost_get_controllers")
        which = {"ctrlr": controller["ctrlr"], "scsi_target_num": 0}
        host.client.call_raw("virtlun_lun_copy_pivot", **which)
    host.start_gateway()
    if when == "copying":
        until(
            lambda: "Block Copy" in host.virsh("blockjob", NAME, "sda", "--info"),
            "the job is there again",
        )
        host.virsh("blockjob", NAME, "sda", "--bandwidth", "0")
        until_ready(host)
        host.virsh("blockjob", NAME, "sda", "--pivot")
    until(lambda: path(to) in host.virsh("domblklist", NAME, check=False), "the XML follows")
    check_on(host, ceph, to)
    load.goes_on(load.status().requests, DEADLINE_S)
