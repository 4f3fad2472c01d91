"""Two targets on one host, one gateway and hook: each domain's disks are where they should be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pydataplane import supervise
from pydataplane.client import Client
from pydataplane.volumes import Volumes
from tests.support.frozen import frozen
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

MIB = 1 << 20
SILVER, GOLDEN = "silver", "golden"


def disk(volume: str, dev: str = "sda") -> str:
    """Returns a disk as a person writes it."""
    return (
        f"<disk type='file' device='disk'><source file='/dev/virtlun/{volume}'/>"
        f"<target dev='{dev}' bus='scsi'/></disk>"
    )


class Second:
    """The target `gold` beside a host's first one, with the lvstore gold0."""

    def __init__(self, host: Host) -> None:
        folder = host.scratch / "gold"
        self.paths = supervise.TargetPaths(
            rpc_socket=folder / "target.sock",
            vhost_dir=folder / "vhost",
            state_dir=folder / "state",
            log=host.scratch / "gold.log",
        )
        self.client = Client(self.paths.rpc_socket)
        self.volumes = Volumes(self.client)
        self.start()
        self.volumes.create_lvstore("gold0", host.scratch / "gold0.img", 512 * MIB)

    def start(self) -> None:
        """Starts it, if it does not run."""
        supervise.start(self.paths, ["--socket-group", "kvm"])

    def kill(self) -> None:
        """Ends it as a crash does: its socket's file stays."""
        supervise.kill(self.paths.rpc_socket)


@pytest.fixture(scope="module")
def second(host: Host) -> Iterator[Second]:
    """Two targets and, defined and started through the gateway, a domain of each."""
    gold = Second(host)
    try:
        for volume in ("lvs0/a", "lvs0/b"):
            host.volumes.create(volume, 8 * MIB)
        for volume in ("gold0/a", "gold0/b"):
            gold.volumes.create(volume, 8 * MIB)
        host.define(SILVER, devices=disk("lvs0/a"))
        host.define(GOLDEN, devices=disk("gold0/a"))
        for name in (SILVER, GOLDEN):
            host.virsh("start", name)
            host.agent(name).close()
        yield gold
    finally:
        for name in (SILVER, GOLDEN):
            host.virsh_direct("destroy", name, check=False)
        gold.start()
        supervise.stop(gold.paths.rpc_socket)


def luns(client: Client) -> dict[str, list[int]]:
    """Returns the numbers of the LUNs of each controller."""
    return {
        item["ctrlr"]: [entry["scsi_dev_num"] for entry in item["backend_specific"]["scsi"]]
        for item in client.call("vhost_get_controllers")
    }


def controller(host: Host, name: str) -> str:
    """Returns the name of a domain's controller."""
    return f"vm-{host.virsh_direct('domuuid', name).strip()}"


@pytest.mark.nightly
def test_each_domain_gets_its_controller_where_its_volumes_are(host: Host, second: Second) -> None:
    assert str(second.paths.vhost_dir) in host.virsh_direct("dumpxml", GOLDEN)
    assert f"'{host.paths.vhost_dir}/vm-" in host.virsh_direct("dumpxml", SILVER)
    assert luns(host.client) == {controller(host, SILVER): [0]}
    assert luns(second.client) == {controller(host, GOLDEN): [0]}


@pytest.mark.nightly
def test_disks_of_both_come_grow_and_go(host: Host, second: Second) -> None:
    for name, store, client in ((SILVER, "lvs0", host.client), (GOLDEN, "gold0", second.client)):
        host.virsh("attach-disk", name, f"/dev/virtlun/{store}/b", "sdb", "--live", "--config")
        assert luns(client)[controller(host, name)] == [0, 1]
        host.virsh("blockresize", name, "sdb", "16M")
        assert str(16 * MIB) in host.virsh("domblkinfo", name, "sdb")
        assert "rd_req" in host.virsh("domblkstat", name, "sdb")
        host.virsh("detach-disk", name, "sdb", "--live", "--config")
        assert luns(client)[controller(host, name)] == [0]
    assert second.volumes.volume("gold0/b").size == 16 * MIB


def test_a_domain_has_disks_of_one_target(host: Host, second: Second) -> None:
    for how in ("--live", "--config"):
        with pytest.raises(VirshError) as refused:
            host.virsh("attach-disk", SILVER, "/dev/virtlun/gold0/b", "sdb", how)
        said = str(refused.value)
        assert "volume gold0/b is of target gold, but domain silver has its controller in" in said
        assert "in target default: all volumes of a domain are of one target" in said
    with pytest.raises(VirshError) as refused:
        host.define("mixed", devices=disk("lvs0/b") + disk("gold0/b", "sdb"))
    assert "lvstores lvs0 of target default and gold0 of target gold" in str(refused.value)
    assert "sdb" not in host.virsh("domblklist", SILVER)


def test_the_same_name_in_two_targets_is_no_volume(host: Host, second: Second) -> None:
    second.client.call("bdev_malloc_create", name="m", num_blocks=131072, block_size=512)
    second.client.call("bdev_lvol_create_lvstore", bdev_name="m", lvs_name="lvs0")
    second.volumes.create("lvs0/b", 8 * MIB)
    try:
        with pytest.raises(VirshError) as refused:
            host.virsh("attach-disk", SILVER, "/dev/virtlun/lvs0/b", "sdb", "--live")
        said = "volume lvs0/b is in target default and target gold: give one of the two lvstores"
        assert said in str(refused.value)
    finally:
        second.client.call("bdev_malloc_delete", name="m")


@pytest.mark.nightly
def test_a_target_that_is_stopped_hinders_the_other_one_not(host: Host, second: Second) -> None:
    """It takes connections, and says nothing: SIGSTOP, or a disk that does not answer."""
    virsh = ("virsh", "-c", host.uri)
    with frozen(supervise.status(second.paths.rpc_socket)["pid"]):
        change = ("attach-disk", GOLDEN, "/dev/virtlun/gold0/b", "sdb", "--live")
        waiting = [
            subprocess.Popen([*virsh, *change], stderr=subprocess.PIPE, text=True) for _ in range(3)
        ]
        # Two disks come and go while those wait, which is for 30 s.
        for _ in range(2):
            host.virsh("attach-disk", SILVER, "/dev/virtlun/lvs0/b", "sdb", "--live")
            assert "block.0.rd.reqs" in host.virsh("domstats", "--block", SILVER)
            host.virsh("detach-disk", SILVER, "sdb", "--live")
        assert [client.poll() for client in waiting] == [None] * 3
        for client in waiting:
            _, said = client.communicate(timeout=90)
            assert client.returncode
            assert "volume gold0/b is in no target that answers; target gold: " in said
            assert f"no answer from {second.paths.rpc_socket} " in said
    until(
        lambda: subprocess.run([*virsh, *change], check=False, capture_output=True).returncode == 0,
        "the target is heard again",
    )
    host.virsh("detach-disk", GOLDEN, "sdb", "--live")
    assert luns(second.client) == {controller(host, GOLDEN): [0]}


def test_a_target_that_is_down_hinders_the_other_one_not(host: Host, second: Second) -> None:
    second.kill()
    try:
        host.virsh("attach-disk", SILVER, "/dev/virtlun/lvs0/b", "sdb", "--live")
        host.virsh("detach-disk", SILVER, "sdb", "--live")
        with pytest.raises(VirshError) as refused:
            host.virsh("attach-disk", GOLDEN, "/dev/virtlun/gold0/b", "sdb", "--live")
        said = str(refused.value)
        assert "volume gold0/b is in no target that answers; target gold: no target answers" in said
        assert str(second.paths.rpc_socket) in said
    finally:
        second.start()
    assert luns(second.client) == {controller(host, GOLDEN): [0]}


def test_each_target_has_its_pools(host: Host, second: Second) -> None:
    """One that is down hinders no other, and what may be its own is not taken for missing."""
    pools = [row.split()[0] for row in host.virsh("pool-list").splitlines() if row.strip()]
    assert sorted(pools) == ["virtlun-gold0", "virtlun-lvs0"]
    host.virsh("vol-create-as", "virtlun-gold0", "new", "8M", "--allocation", "0")
    assert second.volumes.volume("gold0/new").thin
    second.kill()
    try:
        assert "virtlun-lvs0" in host.virsh("pool-list")
        assert "b" in host.virsh("vol-list", "virtlun-lvs0")
        for words in (
            ("pool-info", "virtlun-gold0"),
            ("vol-delete", "/dev/virtlun/gold0/new"),
            ("pool-define-as", "virtlun-gold0", "zfs", "--source-name", "gold0"),
        ):
            with pytest.raises(VirshError) as refused:
                host.virsh(*words)
            said = "pool virtlun-gold0 is in no target that answers; target gold: "
            assert said in str(refused.value)
    finally:
        second.start()
    host.virsh("vol-delete", "/dev/virtlun/gold0/new")


@pytest.mark.nightly
def test_the_hook_finds_the_target_by_the_folder_of_the_socket(host: Host, second: Second) -> None:
    host.virsh("destroy", GOLDEN)
    assert controller(host, GOLDEN) not in luns(second.client)
    host.stop_gateway()
    try:
        host.virsh_direct("start", GOLDEN)
        assert luns(second.client) == {controller(host, GOLDEN): [0]}
        assert controller(host, GOLDEN) not in luns(host.client)
        host.virsh_direct("destroy", GOLDEN)
        assert luns(second.client) == {}
    finally:
        host.start_gateway()


def test_the_command_lists_and_chooses_targets(host: Host, second: Second) -> None:
    def virtlun(*words: str) -> str:
        program = Path(sys.executable).parent / "virtlun"
        return subprocess.check_output(
            [str(program), "--config", str(host.config), *words], text=True, timeout=60
        )

    found = {row["name"]: row for row in json.loads(virtlun("target", "list", "--json"))}
    assert found.keys() == {"default", "gold"}
    assert found["default"]["lvstores"] == ["lvs0"]
    assert found["gold"]["lvstores"] == ["gold0"]
    assert found["gold"]["rpc_socket"] == str(second.paths.rpc_socket)
    assert "gold0/a" in virtlun("--target", "gold", "volume", "list")
    assert "gold0/a" not in virtlun("volume", "list")
