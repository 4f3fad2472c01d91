"""A guest of an encrypted volume, by plain virsh: it waits for its key, and loses nothing."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from pydataplane.errors import RpcError
from tests.support.agent import Agent
from tests.support.encryption import KEY, KEY2
from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU, VirshError
from tests.support.verified_io import VerifiedIo

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "vm"
MIB = 1 << 20
MARK = b"what the guest keeps from whoever has the disk"
DISK = (
    "<disk type='file'><source file='/dev/virtlun/lvs0/secret'/>"
    "<target dev='sda' bus='scsi'/></disk>"
)


def give_key(host: Host) -> None:
    host.client.call("accel_crypto_key_create", cipher="AES_XTS", key=KEY, key2=KEY2, name="k0")


@pytest.fixture(scope="module")
def domain(host: Host) -> Iterator[Host]:
    """A running guest with the encrypted thin volume sda."""
    give_key(host)
    host.volumes.create("lvs0/secret", 32 * MIB, thin=True, key="k0")
    host.define(NAME, devices=DISK, emulator=NEWER_QEMU)  # which connects again
    host.virsh("start", NAME)
    yield host
    host.virsh("destroy", NAME, check=False)


@pytest.fixture(scope="module")
def agent(domain: Host) -> Iterator[Agent]:
    """The guest's shell."""
    agent = domain.agent(NAME)
    agent.wait_for("[ -b /dev/sda ]")
    yield agent
    agent.close()


@pytest.mark.nightly
def test_it_waits_for_its_key_and_goes_on(domain: Host, agent: Agent) -> None:
    io = VerifiedIo(agent, "sda", seed=secrets.randbelow(1 << 32), threads=2, depth=4)
    for end in (domain.kill_target, domain.stop_target):
        end()
        domain.start_target()
        with pytest.raises(RpcError, match="waits for its key k0: give it with"):
            domain.volumes.volume("lvs0/secret")
        waiting = io.status().requests
        agent.run("sleep 3")
        assert io.status().requests == waiting
        give_key(domain)
        io.goes_on(waiting, 120)
    io.finish()
    assert "I/O error" not in agent.run("dmesg")
    assert domain.virsh("domstate", NAME) == "running"


@pytest.mark.nightly
def test_snapshot_and_clone_are_the_guests_alone(domain: Host, agent: Agent) -> None:
    agent.run("mkfs.ext4 -q /dev/sda && mount /dev/sda /mnt", 120)
    agent.run(f"for i in $(seq 400); do echo '{MARK.decode()}'; done > /mnt/file; sync", 60)
    domain.virsh("snapshot-create-as", NAME, "--disk-only", "--no-metadata", "--name", "s")
    agent.run("echo later > /mnt/file; sync", 60)
    domain.volumes.clone("lvs0/secret@s", "copy")
    assert MARK not in (domain.scratch / "lvs0.img").read_bytes()
    for source, options in (("secret@s", ("--mode", "readonly")), ("copy", ())):
        domain.virsh("attach-disk", NAME, f"/dev/virtlun/lvs0/{source}", "sdb", *options)
        agent.wait_for("[ -b /dev/sdb ]")
        agent.run("mkdir -p /tmp/m", 60)
        mode = "ro,noload" if options else "rw"
        agent.run(f"mount -o {mode} /dev/sdb /tmp/m", 60)
        assert agent.run("cat /tmp/m/file").split("\n").count(MARK.decode()) == 400
        agent.run("umount /tmp/m", 60)
        domain.virsh("detach-disk", NAME, "sdb")
        agent.wait_for("! [ -b /dev/sdb ]")
    assert agent.run("cat /mnt/file").strip() == "later"


@pytest.mark.nightly
def test_without_the_key_it_is_not_started(domain: Host, agent: Agent) -> None:
    domain.virsh("destroy", NAME)
    domain.stop_target()
    domain.start_target()
    with pytest.raises(VirshError, match="waits for its key k0: give it with"):
        domain.virsh("start", NAME)
    give_key(domain)
    domain.virsh("start", NAME)
