"""Namespaces of an NVMe/TCP target as volumes of a pool, as libvirt's clients have them.

Real libvirtd, virsh, QEMU and guest; the target is a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from uuid import NAMESPACE_OID, UUID, uuid5

import pytest
from click.testing import CliRunner

from plugin.cli.main import main
from tests.libvirt.test_pools import valid
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.nvme_target import NQN, Namespace, NvmeTarget
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm, pytest.mark.timeout(300)]

NAME, MIB, BLOCK = "nvme-vm", 1 << 20, 512
ONE, TWO, THREE = (f"namespace-uuid-{number}".encode() for number in (1, 2, 3))
KEEP_ALIVE_MS = 1000


def called(uuid: bytes) -> str:
    """The volume of a namespace."""
    return f"uuid.{UUID(bytes=uuid)}"


def path(uuid: bytes) -> str:
    """Its path."""
    return f"/dev/virtlun/nv0/{called(uuid)}"


def disk(uuid: bytes, dev: str) -> str:
    """Returns a <disk> on a namespace."""
    return (
        "<disk type='block' device='disk'><driver name='qemu' type='raw' cache='none'/>"
        f"<source dev='{path(uuid)}'/><target bus='scsi' dev='{dev}'/></disk>"
    )


class Array:
    """A model with two ports, and a host that has it as pool `nv0`."""

    def __init__(self, host: Host, model: NvmeTarget) -> None:
        self.host, self.model = host, model

    def virtlun(self, *words: str, code: int = 0) -> str:
        """Runs the command `virtlun`; returns what it printed."""
        socket = str(self.host.paths.rpc_socket)
        done = CliRunner().invoke(main, ["--socket", socket, *words])
        assert done.exit_code == code, done.output
        return done.output

    def add(self) -> None:
        """Adds the pool."""
        ports = (self.model.port(number) for number in range(self.model.ports))
        paths = [word for port in ports for word in ("--nvme-tcp", f"127.0.0.1:{port}")]
        self.virtlun("pool", "add", "nv0", *paths, "--subnqn", NQN)

    def refused(self, *words: str) -> str:
        """Returns why virsh cannot do something."""
        with pytest.raises(VirshError) as refused:
            self.host.virsh(*words)
        return str(refused.value)

    @property
    def controllers(self) -> int:
        """How many volumes are open."""
        return len(self.host.client.call("bdev_nvme_get_controllers"))


@pytest.fixture
def array() -> Iterator[Array]:
    """The host with the pool."""
    spaces = {
        number: Namespace(4 * MIB // BLOCK, uuid=uuid) for number, uuid in ((1, ONE), (2, TWO))
    }
    options = ["--network", "--hold-sessions"]
    with Host(keep=True, target_options=options) as host, NvmeTarget(spaces, ports=2) as model:
        host.client.call("bdev_nvme_set_options", keep_alive_timeout_ms=KEEP_ALIVE_MS)
        made = Array(host, model)
        made.add()
        yield made


def test_a_pool_of_namespaces_is_a_pool_of_libvirts(array: Array) -> None:
    host, model, pool = array.host, array.model, "virtlun-nv0"
    rows = {row["name"]: row for row in json.loads(array.virtlun("volume", "list", "--json"))}
    assert {name: row["size"] for name, row in rows.items()} == {
        called(ONE): 4 * MIB,
        called(TWO): 4 * MIB,
    }
    of_array = (str(uuid5(NAMESPACE_OID, f"{NQN}\0{called(each)}")) for each in (ONE, TWO))
    assert [rows[called(each)]["uuid"] for each in (ONE, TWO)] == list(of_array)
    assert pool in host.virsh("pool-list", "--persistent", "--autostart")
    xml = host.virsh("pool-dumpxml", pool)
    valid("storagepool.rng", xml)
    volumes = dict(row.split() for row in host.virsh("vol-list", pool).splitlines())
    assert volumes[called(ONE)] == path(ONE)
    xml = host.virsh("vol-dumpxml", called(ONE), "--pool", pool)
    valid("storagevol.rng", xml)
    assert f"<capacity unit='bytes'>{4 * MIB}</capacity>" in xml.replace('"', "'")
    assert host.virsh("vol-pool", path(ONE)) == pool
    (data := host.scratch / "up").write_bytes(b"to the array" * 512)
    host.virsh("vol-upload", called(ONE), str(data), "--pool", pool)
    until(lambda: model.namespaces[1].content.startswith(data.read_bytes()), "the array to have it")
    back = host.scratch / "down"
    host.virsh("vol-download", called(ONE), str(back), "--pool", pool, "--length", "6144")
    assert back.read_bytes() == data.read_bytes()
    # What the array alone does.
    for words in (
        ("vol-create-as", pool, "new", "4M"),
        ("vol-resize", called(ONE), "8M", "--pool", pool),
        ("vol-delete", called(ONE), "--pool", pool),
    ):
        assert "array" in array.refused(*words)
    model.add(3, Namespace(4 * MIB // BLOCK, uuid=THREE))
    host.virsh("pool-refresh", pool)
    assert called(THREE) in host.virsh("vol-list", pool)
    # A domain does not start while the array is away, and says why; nor with another namespace.
    host.define(NAME, devices=disk(ONE, "sda"))
    for port in range(2):
        model.vanish(port)
    assert "Connection refused" in array.refused("start", NAME)
    for port in range(2):
        model.listen(port)
    model.add(1, Namespace(4 * MIB // BLOCK, uuid=b"namespace-uuid-X"))
    assert "Storage volume not found" in array.refused("start", NAME)
    host.virsh("undefine", NAME)
    assert array.controllers == 0
    array.virtlun("pool", "remove", "nv0")
    assert pool not in host.virsh("pool-list", "--all")


def test_namespaces_are_attached_by_plain_virsh_and_stay_over_restarts(array: Array) -> None:
    host, model = array.host, array.model
    host.define(NAME, devices=disk(ONE, "sda"))
    host.virsh("start", NAME)
    guest = host.agent(NAME)
    guest.wait_for(f"[ $(cat /sys/block/sda/size) = {4 * MIB // BLOCK} ]")
    host.virsh("attach-disk", NAME, path(TWO), "sdb", "--live", "--config")
    guest.wait_for(f"[ $(cat /sys/block/sdb/size) = {4 * MIB // BLOCK} ]")
    guest.run("echo of the pool > /dev/sdb && sync")
    assert model.namespaces[2].content.startswith(b"of the pool")
    said = array.refused("blockresize", NAME, "sdb", "8M")
    assert "whose array gives namespaces another size" in said
    said = array.refused("snapshot-create-as", NAME, "s1", "--disk-only")
    assert "whose array takes snapshots" in said
    model.resize(8 * MIB // BLOCK, 2)
    guest.wait_for(f"[ $(cat /sys/block/sdb/size) = {8 * MIB // BLOCK} ]")
    assert str(8 * MIB) in host.virsh("domblkinfo", NAME, "sdb")
    # It is written to by one domain, unless both share it.
    host.define("other", devices=disk(TWO, "sda"))
    assert f"is in use by domain {NAME}" in array.refused("start", "other")
    host.virsh("undefine", "other")
    host.stop_gateway()
    host.kill_target()
    host.start_target()
    host.start_gateway()
    guest.run("echo 3 > /proc/sys/vm/drop_caches")
    assert guest.run("head -n 1 /dev/sdb") == "of the pool\n"
    # By another path.
    model.vanish(0)
    guest.run("echo by another path > /dev/sda && sync")
    assert model.namespaces[1].content.startswith(b"by another path")
    host.virsh("detach-disk", NAME, "sdb", "--live", "--config")
    guest.wait_for("[ ! -e /sys/block/sdb ]")
    until(lambda: array.controllers == 1, "it is closed")
    guest.close()
    host.virsh("destroy", NAME)
    until(lambda: not model.connections, "all are closed")
    host.virsh("undefine", NAME)
