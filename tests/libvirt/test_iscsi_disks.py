"""LUNs of an iSCSI target as libvirt's clients write them, and as volumes of a pool.

Real libvirtd, virsh, QEMU, guest, and tgtd with CHAP.
"""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from plugin.cli.main import main
from tests.libvirt.test_pools import valid
from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.netdisks import MIB, NAME, NetDisks
from tests.support.tgt import IQN, Tgt, lacks
from tests.support.wait import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.vm,
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {lacks()}"),
    pytest.mark.timeout(300),
]

USER, PASSWORD = "ali", "open?sesame@12/3"
"""Of CHAP; the latter as no URL could have it."""
INITIATOR = "iqn.2026-11.org.virtlun:guest"
CONFIG = """
[disks]
serve_network = ["iscsi"]
iscsi_portals = ["*"]
"""


class San(NetDisks):
    """An iSCSI target, and a host whose libvirt has its password."""

    def __init__(self, host: Host, tgt: Tgt) -> None:
        super().__init__(host)
        self.tgt = tgt
        self.secret = self.password("right", PASSWORD)

    def password(self, usage: str, password: str) -> str:
        """Makes a secret of CHAP; returns its UUID."""
        value = base64.b64encode(password.encode()).decode()
        return self.secret_of(f"<usage type='iscsi'><target>{usage}</target></usage>", value)

    def disk(
        self, lun: int, dev: str, more: str = "", *, secret: str = "", initiator: str = ""
    ) -> str:
        """Returns a <disk> on a LUN."""
        bus = "scsi" if dev.startswith("sd") else "virtio"
        own = f"<initiator><iqn name='{initiator}'/></initiator>" if initiator else ""
        return (
            "<disk type='network' device='disk'><driver name='qemu' type='raw' cache='none'/>"
            f"<source protocol='iscsi' name='{IQN}/{lun}'>"
            f"<host name='localhost' port='{self.tgt.port}'/>{own}"
            f"<auth username='{USER}'><secret type='iscsi' uuid='{secret or self.secret}'/></auth>"
            f"</source><target bus='{bus}' dev='{dev}'/>{more}</disk>"
        )

    def url(self, lun: int) -> str:
        """Returns what the target tells of a LUN."""
        return self.tgt.url(lun, login=f"{USER}@")

    def virtlun(self, *words: str, code: int = 0, given: str | None = None) -> str:
        """Runs the command `virtlun`; returns what it printed."""
        socket = str(self.host.paths.rpc_socket)
        done = CliRunner().invoke(main, ["--socket", socket, *words], input=given)
        assert done.exit_code == code, done.output
        return done.output


@pytest.fixture(scope="module")
def san() -> Iterator[San]:
    """The target and the host of the module's tests."""
    options = ["--iscsi", "--hold-sessions"]
    with (
        Host(keep=True, target_options=options, more_config=CONFIG) as host,
        Tgt(host.scratch) as tgt,
    ):
        tgt.require(USER, PASSWORD)
        yield San(host, tgt)


@pytest.fixture(scope="module")
def guest(san: San) -> Iterator[Agent]:
    """A running guest that had a LUN when it was defined."""
    san.tgt.disk(1, thin_provisioning="1")
    san.host.define(NAME, devices=san.disk(1, "sda", initiator=INITIATOR))
    san.host.virsh("start", NAME)
    agent = san.host.agent(NAME)
    yield agent
    agent.close()
    san.host.virsh("destroy", NAME)
    until(lambda: san.images == [], lambda: f"nothing is open: {san.images}")
    until(lambda: san.tgt.sessions() == 0, "all are logged out")
    san.host.virsh("undefine", NAME)


def test_a_lun_that_libvirt_names_is_served_by_the_target(san: San, guest: Agent) -> None:
    host, tgt = san.host, san.tgt
    assert san.images == [san.url(1)]
    assert f"Initiator: {INITIATOR}" in tgt.admin("target", "show")
    assert guest.run("cat /sys/block/sda/size").strip() == str(8 * MIB // 512)
    guest.run("echo written by the guest > /dev/sda && sync")
    assert tgt.luns[1][0].read_bytes().startswith(b"written by the guest")
    shown = host.virsh("dumpxml", NAME)
    assert f'name="{IQN}/1"' in shown.replace("'", '"')
    assert san.secret in shown and INITIATOR in shown
    assert f"{IQN}/1" in host.virsh("domblklist", NAME)
    assert "iscsi" not in host.virsh_direct("dumpxml", NAME).split("</metadata>")[1]
    assert str(8 * MIB) in host.virsh("domblkinfo", NAME, "sda")
    assert "wr_req" in host.virsh("domblkstat", NAME, "sda")
    with pytest.raises(VirshError) as refused:
        host.virsh("blockresize", NAME, "sda", "16M")
    assert "is resized by its array" in str(refused.value)
    # It grows there, which tgt has no other way for.
    tgt.remove(1)
    tgt.disk(1, size=16 * MIB, thin_provisioning="1")
    guest.wait_for(f"[ $(cat /sys/block/sda/size) = {16 * MIB // 512} ]")
    assert guest.run("head -n 1 /dev/sda") == "written by the guest\n"
    with pytest.raises(VirshError) as refused:
        host.virsh("snapshot-create-as", NAME, "s1", "--disk-only")
    assert "is no virtlun volume" in str(refused.value)
    (place,) = san.places_of(PASSWORD)
    assert place == host.paths.state_dir / "config.json"
    assert not stat.S_IMODE(place.stat().st_mode) & 0o077


def test_a_lun_is_attached_and_detached_while_the_guest_runs(san: San, guest: Agent) -> None:
    san.tgt.disk(2, size=4 * MIB)
    xml = san.disk(2, "sdb")
    san.attach(xml, "--config")
    guest.wait_for("[ -b /dev/sdb ]")
    uuid = san.host.virsh("domuuid", NAME).strip()
    # As QEMU calls itself, which the array may let in.
    assert f"Initiator: iqn.2008-11.org.linux-kvm:{uuid} " in san.tgt.admin("target", "show")
    guest.run("echo more > /dev/sdb && sync")
    san.detach(xml, "--config")
    guest.wait_for("[ ! -e /sys/block/sdb ]")
    assert san.images == [san.url(1)]
    until(lambda: san.tgt.sessions() == 1, "it is logged out")


def test_a_lun_that_cannot_be_had_is_refused_and_leaves_nothing(san: San, guest: Agent) -> None:
    before = san.host.virsh_direct("dumpxml", NAME)
    wrong = san.password("wrong", "quite-another-1")
    broken = san.password("broken", "two\nlines")
    two = san.disk(1, "sdb").replace("<host", "<host name='10.0.0.1'/><host", 1)
    cases = (
        (san.disk(7, "sdb"), "LUN 7 of"),
        (san.disk(8, "sdb", secret=wrong), "Authentication failure"),
        (san.disk(8, "sdb", secret=broken), "is no password of CHAP"),
        # By another name it is the same LUN.
        (san.disk(1, "sdb"), "is written to as bdev"),
        (two, "is to have one <host>, not 2"),
        (san.disk(1, "sdb").replace(f"{IQN}/1", f"{IQN}/x"), "is to name a target and a LUN"),
    )
    for xml, why in cases:
        text = san.refusal(xml)
        assert why in text, text
        assert PASSWORD not in text and "quite-another-1" not in text
        assert san.images == [san.url(1)], xml
    assert san.host.virsh_direct("dumpxml", NAME) == before


def test_luns_of_a_pool_are_attached_by_plain_virsh(san: San, guest: Agent) -> None:
    host, tgt = san.host, san.tgt
    tgt.disk(3, size=4 * MIB)
    asked = ("pool", "add", "san", "--iscsi", f"127.0.0.1:{tgt.port},{IQN}", "--user", USER)
    san.virtlun(*asked, "--password-file", "-", given=f"{PASSWORD}\n")
    rows = {row["name"]: row for row in json.loads(san.virtlun("volume", "list", "--json"))}
    assert rows["lun-3"]["size"] == 4 * MIB
    host.virsh("attach-disk", NAME, "/dev/virtlun/san/lun-3", "sdb", "--live")
    guest.wait_for(f"[ $(cat /sys/block/sdb/size) = {4 * MIB // 512} ]")
    guest.run("echo of the pool > /dev/sdb && sync")
    assert tgt.luns[3][0].read_bytes().startswith(b"of the pool")
    with pytest.raises(VirshError) as refused:
        host.virsh("blockresize", NAME, "sdb", "8M")
    assert "whose array gives LUNs another size" in str(refused.value)
    tgt.remove(3)
    tgt.disk(3, size=8 * MIB)
    guest.wait_for(f"[ $(cat /sys/block/sdb/size) = {8 * MIB // 512} ]")
    assert str(8 * MIB) in host.virsh("domblkinfo", NAME, "sdb")
    # The one LUN that another disk has is not had twice.
    with pytest.raises(VirshError, match="is written to as bdev"):
        host.virsh("attach-disk", NAME, "/dev/virtlun/san/lun-1", "sdd", "--live")
    host.kill_target()
    host.start_target()
    guest.run("echo 3 > /proc/sys/vm/drop_caches")
    assert guest.run("head -n 1 /dev/sdb") == "of the pool\n"
    assert guest.run("head -n 1 /dev/sda") == "written by the guest\n"
    host.virsh("detach-disk", NAME, "sdb", "--live")
    guest.wait_for("[ ! -e /sys/block/sdb ]")
    san.virtlun("pool", "remove", "san")
    assert san.images == [san.url(1)]
    assert san.places_of(PASSWORD) == [host.paths.state_dir / "config.json"]


def test_a_pool_of_luns_is_a_pool_of_libvirts(san: San) -> None:
    host, tgt, pool = san.host, san.tgt, "virtlun-array"
    file = tgt.disk(5, size=4 * MIB)
    asked = ("pool", "add", "array", "--iscsi", f"127.0.0.1:{tgt.port},{IQN}", "--user", USER)
    san.virtlun(*asked, "--password-file", "-", given=f"{PASSWORD}\n")
    assert pool in host.virsh("pool-list", "--persistent", "--autostart")
    assert "running" in host.virsh("pool-info", pool)
    xml = host.virsh("pool-dumpxml", pool)
    valid("storagepool.rng", xml)
    assert PASSWORD not in xml and f"<name>{pool}</name>" in xml
    volumes = dict(row.split() for row in host.virsh("vol-list", pool).splitlines())
    assert volumes["lun-5"] == "/dev/virtlun/array/lun-5"
    xml = host.virsh("vol-dumpxml", "lun-5", "--pool", pool)
    valid("storagevol.rng", xml)
    assert f"<capacity unit='bytes'>{4 * MIB}</capacity>" in xml.replace('"', "'")
    assert host.virsh("vol-pool", volumes["lun-5"]) == pool
    (data := host.scratch / "up").write_bytes(b"to the array" * 512)
    host.virsh("vol-upload", "lun-5", str(data), "--pool", pool)
    until(lambda: file.read_bytes().startswith(data.read_bytes()), "the array to have it")
    back = host.scratch / "down"
    host.virsh("vol-download", "lun-5", str(back), "--pool", pool, "--length", "6144")
    assert back.read_bytes() == data.read_bytes()
    # What the array alone does.
    for words in (
        ("vol-create-as", pool, "new", "4M"),
        ("vol-resize", "lun-5", "8M", "--pool", pool),
        ("vol-delete", "lun-5", "--pool", pool),
    ):
        with pytest.raises(VirshError, match="array"):
            host.virsh(*words)
    tgt.disk(6, size=4 * MIB)
    host.virsh("pool-refresh", pool)
    assert "lun-6" in host.virsh("vol-list", pool)
    san.virtlun("pool", "remove", "array")
    assert pool not in host.virsh("pool-list", "--all")
    for lun in (5, 6):
        tgt.remove(lun)


@pytest.mark.nightly
def test_a_domain_with_a_lun_is_started_by_who_can_have_its_secret(san: San) -> None:
    host, name = san.host, "own-vm"
    san.tgt.disk(4, size=4 * MIB)
    path = host.scratch / f"{name}.xml"
    path.write_text(
        f"<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><os>"
        "<type arch='x86_64' machine='q35'>hvm</type></os><devices>"
        f"{san.disk(4, 'vda')}</devices></domain>"
    )
    before = san.images
    host.virsh("define", str(path))
    with pytest.raises(VirshError, match="virtlun-gateway alone can ask for"):
        host.virsh_direct("start", name)
    host.virsh("start", name)
    running = san.images
    assert len(running) == len(before) + 1
    host.virsh("managedsave", name)
    assert san.images == before
    host.virsh("start", name)
    assert san.images == running
    host.stop_gateway()
    host.kill_target()
    (host.paths.state_dir / "config.json").unlink()
    host.start_target()
    assert san.images == []
    host.start_gateway()
    until(lambda: san.images == running, "the images to be open again")
    host.virsh("destroy", name)
    host.virsh("undefine", name)


@pytest.mark.nightly
def test_a_target_that_is_away_keeps_a_start_and_nothing_else(san: San, guest: Agent) -> None:
    san.tgt.kill9()
    text = san.refusal(san.disk(2, "sdb"))
    assert "cannot be logged in to: Connection refused" in text, text
    assert san.images == [san.url(1)]
    san.tgt.start()
    guest.run("dd if=/dev/sda of=/dev/null bs=4k count=1 iflag=direct")
    assert Path(san.tgt.luns[1][0]).exists()
