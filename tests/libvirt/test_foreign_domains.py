"""Clients that name a domain which is not theirs to change: nothing becomes of it.

One opens another driver of libvirtd's, which lets everybody do everything, and has a domain of the
victim's UUID there. Another restores an image of its own with XML that has the victim's controller.
Both meet a real libvirtd, behind the gateway.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from pydataplane.domain.translate import controller_name
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.night import by_day
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

MIB = 1 << 20
SIZE = 8 * MIB
VICTIM, ATTACKER = "victim", "attacker"
MADE_UP = """\
<domain type='test'><name>made-up</name><uuid>{uuid}</uuid><memory unit='MiB'>64</memory>
<os><type>hvm</type></os><devices>{devices}</devices></domain>"""


def disk(volume: str, dev: str) -> str:
    """Returns a disk of ours as people write it."""
    return (
        f"<disk type='block' device='disk'><source dev='/dev/virtlun/lvs0/{volume}'/>"
        f"<target dev='{dev}' bus='scsi'/></disk>"
    )


@dataclass(frozen=True)
class Victim:
    """The victim and what nobody may take from it, or give it."""

    host: Host
    uuid: str

    def state(self) -> tuple[object, ...]:
        """Returns its LUNs, whether its QEMU has them, its volumes' sizes and libvirtd's XML."""
        found = self.host.client.call("vhost_get_controllers")
        luns = [
            (
                [(each["scsi_dev_num"], each["luns"]) for each in item["backend_specific"]["scsi"]],
                [session["vid"] for session in item["sessions"]],
            )
            for item in found
            if item["ctrlr"] == controller_name(self.uuid)
        ]
        sizes = {volume.name: volume.size for volume in self.host.volumes.volumes("lvs0")}
        sides = [self.host.virsh_direct("dumpxml", VICTIM, *more) for more in ([], ["--inactive"])]
        return luns, sizes, sides


@pytest.fixture(scope="module")
def victim(host: Host) -> Iterator[Victim]:
    """A running domain with a disk; it is paused, for what its guest does is of no matter."""
    for volume in ("data", "more"):
        host.volumes.create(f"lvs0/{volume}", SIZE)
    host.define(VICTIM, devices=disk("data", "sda"))
    host.virsh("start", "--paused", VICTIM)
    yield Victim(host, host.virsh_direct("domuuid", VICTIM))
    for name in (VICTIM, ATTACKER):
        host.virsh_direct("destroy", name, check=False)


def at_test_driver(host: Host, *commands: str) -> str:
    """Runs commands of virsh on one connection to test:///default through the gateway."""
    done = subprocess.run(
        [
            *("virsh", "-q", "-c", f"test+unix:///default?socket={host.gateway_socket}"),
            "; ".join(commands),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "attach-device {uuid} {more} {flags}",
        "detach-device {uuid} {data} {flags}",
        "update-device {uuid} {data} {flags}",
        "detach-disk {uuid} sda {flags}",
        "blockresize {uuid} /dev/virtlun/lvs0/data 64M",
        "blockresize {uuid} sda 64M",
    ],
)
@pytest.mark.parametrize("flags", ["--live", "--live --config", "--config"])
def test_a_client_of_another_driver_changes_nothing(
    host: Host, victim: Victim, command: str, flags: str
) -> None:
    files = {"uuid": victim.uuid, "flags": flags}
    for volume, dev in (("data", "sda"), ("more", "sdb")):
        path = host.scratch / f"{volume}.xml"
        path.write_text(disk(volume, dev))
        files[volume] = str(path)
    made_up = host.scratch / "made-up.xml"
    made_up.write_text(MADE_UP.format(uuid=victim.uuid, devices=disk("data", "sda")))
    before = victim.state()
    assert len(before[0]) == 1  # type: ignore[arg-type]
    said = at_test_driver(
        host,
        f"define {made_up}",
        "start made-up",
        # It is there, of this UUID, and lets everybody do everything.
        f"desc {victim.uuid} --config done",
        command.format(**files),
        f"dominfo {victim.uuid}",
        "destroy made-up",
        "undefine made-up",
    )
    assert re.search(r"Name: +made-up", said) and victim.uuid in said, said
    assert re.search(r"State: +running", said), said
    assert victim.state() == before


@pytest.fixture(scope="module")
def image(host: Host, victim: Victim) -> Path:
    """The image of a guest with a controller of its own and a disk."""
    host.volumes.create("lvs0/own", SIZE)
    host.define(ATTACKER, devices=disk("own", "sda"))
    host.virsh("start", "--paused", ATTACKER)
    path = host.scratch / "attacker.save"
    host.virsh("save", ATTACKER, str(path))
    assert victim.uuid
    return path


def as_victim(xml: str, victim: Victim, own: str, what: str) -> str:
    """Returns the image's XML with the victim's controller, and with its name and UUID, too."""
    if "controller" in what:
        found = xml.count(controller_name(own))
        xml = xml.replace(controller_name(own), controller_name(victim.uuid))
        assert found >= 2, "metadata and carrier"
    if "disk" in what:
        xml = xml.replace("lvs0/own", "lvs0/more")
    if "identity" in what:
        xml = xml.replace(own, victim.uuid).replace(
            f"<name>{ATTACKER}</name>", f"<name>{VICTIM}</name>"
        )
    return xml


RESTORES_BY_DAY = {
    ("restore", "controller", True),
    ("restore", "controller, disk", False),
    ("restore", "identity", True),
    ("save-image-define", "controller", False),
    ("save-image-define", "controller, disk", True),
    ("save-image-define", "identity, disk", True),
}
RESTORES = [
    pytest.param(
        *each,
        id=f"{each[0]}-{each[1]}-{'running' if each[2] else 'stopped'} victim",
        marks=[] if each in RESTORES_BY_DAY else [pytest.mark.nightly],
    )
    for each in itertools.product(
        ("restore", "save-image-define"),
        ("controller", "controller, disk", "identity", "identity, disk"),
        (True, False),
    )
]
"""Ways to restore, what of the victim the XML has, and whether the victim runs."""


@by_day("restore-controller-running victim", "save-image-define-controller-stopped victim")
@pytest.mark.parametrize(("way", "what", "runs"), RESTORES)
def test_a_restore_with_anothers_controller_changes_nothing(
    host: Host, victim: Victim, image: Path, what: str, way: str, runs: bool
) -> None:
    """XML of another domain is refused; the guest itself comes back with its own controller."""
    own = host.virsh_direct("domuuid", ATTACKER)
    if not runs:
        host.virsh("destroy", VICTIM)
        until(lambda: victim.state()[0] == [], "the victim's controller is gone")
    before = victim.state()
    xml = host.virsh_direct("save-image-dumpxml", "--security-info", str(image))
    path = host.scratch / f"{uuid4()}.xml"
    path.write_text(as_victim(xml, victim, own, what))
    try:
        if way == "restore":
            host.virsh("restore", str(image), "--xml", str(path), "--paused")
        else:
            host.virsh("save-image-define", str(image), str(path))
            host.virsh("restore", str(image), "--paused")
    except VirshError as error:
        said = str(error)
        assert re.search(r"copy of another|not match", said), said
    else:
        assert "identity" not in what
        assert victim.uuid not in host.virsh_direct("dumpxml", ATTACKER)
        assert victim.state() == before
        host.virsh("destroy", ATTACKER)
    finally:
        assert victim.state() == before
        path.write_text(xml)
        host.virsh_direct("save-image-define", str(image), str(path))
        if not runs:
            host.virsh("start", "--paused", VICTIM)
    assert host.virsh_direct("domstate", ATTACKER) == "shut off"
    until(lambda: controllers(host) == [controller_name(victim.uuid)], "nothing is left")


def controllers(host: Host) -> list[str]:
    return [item["ctrlr"] for item in host.client.call("vhost_get_controllers")]


def test_the_image_itself_is_restored(host: Host, image: Path) -> None:
    """What was refused was refused for what it said."""
    host.virsh("restore", str(image), "--paused")
    assert host.virsh_direct("domstate", ATTACKER) == "paused"
