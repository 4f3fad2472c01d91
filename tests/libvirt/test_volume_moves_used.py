"""`virtlun volume move` of a volume that a guest writes to."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from plugin.moves import notes
from plugin.moves.blockcopy import Running
from pydataplane.errors import RpcError
from tests.libvirt.test_block_copies import DEADLINE_S, DISK, SIZE, VCPUS, path
from tests.libvirt.test_volume_moves import MIB, command, moved, refused
from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU, VirshError
from tests.support.night import at_night
from tests.support.verified_io import VerifiedIo
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "mover"
SLOW_MIB = 1

KILLED = """
import sys
from pathlib import Path
from plugin.cli import main
from plugin.moves.blockcopy import Running
from pydataplane.client import Client
from tests.support.killed import Fuse, rpc

fuse = Fuse(Path(sys.argv.pop(1)))
fuse.watch(Client, "call", rpc)
for name in ("begin", "until_ready", "pivot"):
    fuse.watch(Running, name, lambda *_, name=name: name)
main()
"""
"""The command, which ends by SIGKILL where a file says."""


@pytest.fixture(scope="module")
def domain(host: Host) -> Iterator[Host]:
    """A running guest with the thin volume sda, and a second lvstore."""
    host.volumes.create_lvstore("lvs1", host.scratch / "lvs1.img", 256 * MIB)
    host.volumes.create("lvs0/disk", SIZE, thin=True)
    devices = DISK.format(path("lvs0/disk"))
    host.define(NAME, devices=devices, vcpus=VCPUS, emulator=NEWER_QEMU)
    host.virsh("start", NAME)
    yield host
    host.virsh("destroy", NAME, check=False)


@pytest.fixture(scope="module")
def agent(domain: Host) -> Iterator[Agent]:
    """The guest's shell."""
    agent = domain.agent(NAME)
    agent.wait_for("[ -b /dev/sda ]", DEADLINE_S)
    yield agent
    agent.close()


@pytest.fixture(scope="module")
def load(agent: Agent) -> Iterator[VerifiedIo]:
    """The guest's I/O of all kinds, which it checks all the time, and at the end the whole disk."""
    io = VerifiedIo(agent, "sda", seed=11, threads=VCPUS, depth=4)
    yield io
    io.finish()
    assert "I/O error" not in agent.run("dmesg")


def lun(host: Host) -> dict[str, Any]:
    (controller,) = host.client.call_raw("vhost_get_controllers")
    found: dict[str, Any] = controller["backend_specific"]["scsi"][0]["luns"][0]
    return found


def here(host: Host) -> str:
    """Returns the disk's volume, LVSTORE/NAME, which both sides and the target agree about."""
    live, inactive = (
        host.virsh("domblklist", NAME, *words).split()[-1] for words in ((), ("--inactive",))
    )
    assert live == inactive
    volume = host.volumes.volume(live.removeprefix("/dev/virtlun/"))
    assert lun(host)["bdev_name"] == volume.uuid
    return volume.path


def other(host: Host) -> str:
    """Returns the lvstore that the disk is not in."""
    return "lvs1" if here(host).startswith("lvs0/") else "lvs0"


def check_only(host: Host, volume: str) -> None:
    """Checks that the disk is on it, and that there is nothing else."""
    assert here(host) == volume
    assert [each.path for each in host.volumes.volumes()] == [volume]
    assert host.volumes.xattrs(volume).keys() <= {notes.IDENTITY}
    assert not host.virsh("blockjob", NAME, "sda", "--info")
    until(lambda: not list((host.scratch / "notes").glob("*")), "the journal is empty")


def test_a_guest_writes_on(domain: Host, load: VerifiedIo) -> None:
    to, done, shown = other(domain), load.status().requests, lun(domain)["serial"]
    found = moved(domain, here(domain), f"{to}/renamed")
    assert (found["path"], found["size"], found["thin"]) == (f"{to}/renamed", SIZE, True)
    assert found["pause_us"] > 0
    assert lun(domain)["serial"] == shown, "the same disk to its guest"
    check_only(domain, f"{to}/renamed")
    load.goes_on(done, DEADLINE_S)
    moved(domain, here(domain), f"{other(domain)}/disk")
    load.goes_on(load.status().requests, DEADLINE_S)


def test_given_up_it_writes_on_where_it_was(
    domain: Host, load: VerifiedIo, monkeypatch: pytest.MonkeyPatch
) -> None:
    was, to = here(domain), other(domain)

    def given_up(*_: object) -> None:
        assert "Block Copy" in domain.virsh("blockjob", NAME, "sda", "--info")
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Running, "until_ready", given_up)
    assert f"cancelled: volume {was} is as it was" in refused(domain, was, to)
    check_only(domain, was)
    load.goes_on(load.status().requests, DEADLINE_S)


@pytest.mark.parametrize(
    "where",
    [
        at_night("after bdev_lvol_create"),
        at_night("before virtlun_lvol_set_xattr virtlun.move"),
        at_night("before begin"),
        at_night("after begin"),
        at_night("after until_ready"),
        at_night("before pivot"),
        "after pivot",
        at_night("before bdev_lvol_delete"),
        at_night("after bdev_lvol_delete"),
        at_night("before virtlun_lvol_remove_xattr"),
    ],
)
def test_one_that_is_killed_is_completed_by_the_next(
    domain: Host, load: VerifiedIo, where: str
) -> None:
    was, to = here(domain), f"{other(domain)}/disk"
    fuse = domain.scratch / "fuse"
    fuse.write_text(where)
    words = [sys.executable, "-c", KILLED, str(fuse), *command(domain, was, to)]
    ended = subprocess.run(words, check=False, capture_output=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    load.goes_on(load.status().requests, DEADLINE_S)
    moved(domain, was, to)
    check_only(domain, to)


@pytest.mark.nightly
def test_a_killed_target_has_the_guest_where_it_was(
    domain: Host, load: VerifiedIo, monkeypatch: pytest.MonkeyPatch
) -> None:
    was, to = here(domain), f"{other(domain)}/disk"

    def killed(*_: object) -> None:
        domain.virsh("blockjob", NAME, "sda", "--bandwidth", str(SLOW_MIB))
        domain.kill_target()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Running, "until_ready", killed)
        said = refused(domain, was, to)
    assert "counts is not known" in said and "delete none of them" in said, said
    domain.start_target()
    load.goes_on(load.status().requests, DEADLINE_S)
    until(lambda: not domain.virsh("blockjob", NAME, "sda", "--info"), "the job is over")
    assert here(domain) == was
    moved(domain, was, to)
    check_only(domain, to)


@pytest.mark.nightly
@pytest.mark.parametrize("pivots", [True, False])
def test_a_killed_gateway_completes_it_later(
    domain: Host, load: VerifiedIo, monkeypatch: pytest.MonkeyPatch, pivots: bool
) -> None:
    """`pivots`: the target has the disk on the copy, and nobody has told libvirtd."""
    was, to = here(domain), f"{other(domain)}/disk"
    with monkeypatch.context() as patched:
        patched.setattr(Running, "pivot", lambda *_: without_gateway(domain, pivots=pivots))
        said = refused(domain, was, to)
    assert said.startswith("Error: libvirt at")
    domain.start_gateway()
    load.goes_on(load.status().requests, DEADLINE_S)
    moved(domain, was, to)
    check_only(domain, to)
    load.goes_on(load.status().requests, DEADLINE_S)


def without_gateway(host: Host, *, pivots: bool) -> None:
    """Kills the gateway, and may have the target pivot; fails as the gateway's client then."""
    host.stop_gateway(signal.SIGKILL)
    if pivots:
        (controller,) = host.client.call_raw("vhost_get_controllers")
        which = {"ctrlr": controller["ctrlr"], "scsi_target_num": 0}
        host.client.call_raw("virtlun_lun_copy_pivot", **which)
    import libvirt  # noqa: PLC0415

    raise libvirt.libvirtError("the gateway is gone")


@pytest.mark.nightly
def test_the_job_of_somebody_else_goes_on(domain: Host, load: VerifiedIo) -> None:
    was, store = here(domain), other(domain)
    words = ("blockcopy", NAME, "sda", "--dest", path(f"{store}/theirs"), "--transient-job")
    domain.virsh(*words, "--bandwidth", str(SLOW_MIB))
    said = refused(domain, was, f"{store}/disk")
    assert "is being copied to another volume" in said, said
    assert "Block Copy" in domain.virsh("blockjob", NAME, "sda", "--info")
    domain.virsh("blockjob", NAME, "sda", "--abort")
    domain.volumes.delete(f"{store}/theirs")
    check_only(domain, was)
    load.goes_on(load.status().requests, DEADLINE_S)


def test_what_the_gateway_refuses_is_refused_and_undone(domain: Host) -> None:
    was, to = here(domain), other(domain)
    domain.virsh("snapshot-create-as", NAME, "s", "--disk-only")
    said = refused(domain, was, to)
    assert "has 1 snapshots" in said, said
    domain.virsh("snapshot-delete", NAME, "s")
    direct = refused(domain, was, to, "--connect", domain.libvirtd.uri())
    assert "is libvirtd itself" in direct, direct
    check_only(domain, was)


@pytest.mark.nightly
def test_a_virtio_blk_disk_goes_over_as_well(domain: Host, agent: Agent) -> None:
    domain.volumes.create("lvs0/blk", 8 * MIB, thin=True)
    words = ("--targetbus", "virtio", "--live", "--config")
    domain.virsh("attach-disk", NAME, path("lvs0/blk"), "vdb", *words)
    agent.wait_for("[ -b /dev/vda ]")
    agent.run("echo before > /dev/vda && sync")
    assert moved(domain, "lvs0/blk", "lvs1")["pause_us"] > 0
    assert agent.run("head -n 1 /dev/vda") == "before\n"
    agent.run("echo after > /dev/vda && sync")
    for side in ((), ("--inactive",)):
        assert path("lvs1/blk") in domain.virsh("domblklist", NAME, *side)
    domain.virsh("detach-disk", NAME, "vdb", "--live", "--config")
    agent.wait_for("[ ! -e /sys/block/vda ]")
    domain.volumes.delete("lvs1/blk")


@pytest.mark.nightly
def test_a_vm_that_ends_in_the_pivot_never_goes_back(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a gateway that is killed as well, so that the domain names the old volume."""
    name = "ends"
    for store in ("lvs0", "lvs1"):
        if store not in [each.name for each in host.volumes.lvstores()]:
            host.volumes.create_lvstore(store, host.scratch / f"{store}.img", 256 * MIB)
    host.volumes.create("lvs0/ends", 8 * MIB, thin=True)
    devices = DISK.format(path("lvs0/ends"))
    host.define(name, devices=devices, vcpus=1, emulator=NEWER_QEMU)
    host.virsh("start", name)
    agent = host.agent(name)
    agent.wait_for("[ -b /dev/sda ]", DEADLINE_S)

    def pivot(*_: object) -> None:
        host.stop_gateway(signal.SIGKILL)
        for each in host.client.call_raw("virtlun_lun_copy_check"):
            which = {key: each[key] for key in ("ctrlr", "scsi_target_num")}
            host.client.call_raw("virtlun_lun_copy_pivot", **which)
        agent.run("echo newest > /dev/sda && sync")
        agent.close()
        host.virsh_direct("destroy", name)
        import libvirt  # noqa: PLC0415

        raise libvirt.libvirtError("the gateway is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Running, "pivot", pivot)
        refused(host, "lvs0/ends", "lvs1")
    # The target has forgotten the disk as its VM ended, and goes by its notes.
    for controller in host.client.call_raw("vhost_get_controllers"):
        gone = {"ctrlr": controller["ctrlr"], "force": True}
        with suppress(RpcError):  # the hook may be first
            host.client.call_raw("vhost_delete_controller", **gone)
    host.start_gateway()
    with pytest.raises(VirshError, match="went on with volume lvs1/ends"):
        host.virsh("start", name)
    assert moved(host, "lvs0/ends", "lvs1")["domains"] == [name]
    host.virsh("start", name)
    agent = host.agent(name)
    agent.wait_for("[ -b /dev/sda ]", DEADLINE_S)
    assert agent.run("head -n 1 /dev/sda") == "newest\n"
    agent.close()
    host.virsh("destroy", name)
    host.virsh("undefine", name)
    host.volumes.delete("lvs1/ends")
