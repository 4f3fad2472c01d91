"""The page on virsh commands is what they do: see tests/docs/virsh.py.

`VIRTLUN_WRITE_DOCS=1` writes the page anew.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from plugin.gateway.procedures import PROCEDURES
from tests.docs.virsh import (
    CONCERNED,
    ELSEWHERE,
    GROUPS,
    OF_NO_ROW,
    PAGE,
    ROWS,
    Row,
    answered,
    outcome,
    page,
    sentence,
)
from tests.support.clients import CLIENTS
from tests.support.host import Host
from tests.support.libvirtd import VirshError

pytestmark = [pytest.mark.root, pytest.mark.vm]

#: The libvirt whose words the page has.
OF_PAGE = next(each.version for each in CLIENTS if each.package == "libvirt-daemon-system")
DISK = (
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/b'/>"
    "<target dev='sdb' bus='scsi'/>{more}</disk>"
)
DOMAIN = (
    "<domain type='qemu'><name>vm</name><uuid>6f1c9a52-7b0d-4c55-9a0e-3d5f0b7a1c42</uuid>"
    "<memory unit='MiB'>64</memory>"
    "<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>"
    "<disk type='file' device='disk'><driver name='qemu' type='qcow2'/>"
    "<source file='{folder}/vda.qcow2'/><target dev='vda' bus='virtio'/></disk>"
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/a'/>"
    "<target dev='sda' bus='scsi'/></disk><disk type='file' device='cdrom'>"
    "<target dev='sdz' bus='sata'/><readonly/></disk></devices></domain>"
)
FILES = {
    "readonly.xml": DISK.format(more="<readonly/>"),
    "alias.xml": DISK.format(more="<alias name='ua-b'/>"),
    "snapshot.xml": "<domainsnapshot><name>s2</name><disks><disk name='sda' snapshot='no'/>"
    "<disk name='vda' snapshot='external'/></disks></domainsnapshot>",
    "checkpoint.xml": "<domaincheckpoint><name>c2</name><disks><disk name='vda'/>"
    "<disk name='sda' checkpoint='no'/></disks></domaincheckpoint>",
    "backup.xml": "<domainbackup mode='pull'><server transport='unix' socket='{folder}/nbd'/>"
    "<disks><disk name='vda' backup='yes' type='file'><scratch file='{folder}/backup'/></disk>"
    "<disk name='sda' backup='no'/></disks></domainbackup>",
    "ours.xml": "<domainbackup mode='pull'><server transport='unix' socket='{folder}/ours'/>"
    "<disks><disk name='sda' backupmode='incremental' incremental='ours'/></disks></domainbackup>",
    "vm.xml": DOMAIN,
    "pool.xml": "<pool type='dir'><name>p</name><uuid>0d3f1c52-7b0d-4c55-9a0e-3d5f0b7a1c42</uuid>"
    "<target><path>{folder}/pool</path></target></pool>",
    "volume.xml": "<volume><name>b</name><capacity unit='MiB'>1</capacity></volume>",
    "ours-volume.xml": "<volume><name>x</name><capacity unit='MiB'>8</capacity></volume>",
    "clone.xml": "<volume><name>c</name></volume>",
    "ours-pool.xml": "<pool type='zfs'><name>virtlun-lvs0</name><source><name>lvs0</name></source>"
    "</pool>",
    "second.xml": "<volume><name>c</name><capacity unit='MiB'>1</capacity></volume>",
}


def libvirts_version() -> str:
    """Returns the version of the libvirt that runs."""
    asked = ["virsh", "--version"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def named() -> set[str]:
    """Returns the commands of this virsh that the page has to name."""
    lines = "".join(
        subprocess.run(["virsh", "help", group], capture_output=True, text=True, check=True).stdout
        for group in GROUPS
    ).splitlines()
    words = {line.split()[0] for line in lines if line.startswith("    ")}
    return {word for word in words if CONCERNED.match(word)}


def test_the_page_names_every_command() -> None:
    rows = {row.command for row in ROWS}
    assert not rows & ELSEWHERE.keys()
    assert named() == rows | ELSEWHERE.keys()


def test_no_call_that_the_gateway_looks_into_is_left_out() -> None:
    in_rows = {call.value for row in ROWS for call in row.calls}
    others = {call.value for call in OF_NO_ROW}
    assert not in_rows & others
    assert PROCEDURES.keys() - in_rows == others


@pytest.mark.nightly
def test_each_command_does_what_the_page_says(host: Host) -> None:
    folder = str(host.scratch)
    host.scratch.chmod(0o777)  # QEMU's user makes the files of snapshots
    for name, text in FILES.items():
        (host.scratch / name).write_text(text.replace("{folder}", folder))
    image = host.scratch / "vda.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", image, "8M"], check=True)
    image.chmod(0o666)
    (host.scratch / "medium.iso").write_bytes(bytes(1 << 20))
    for name in ("a", "b"):
        host.volumes.create(f"lvs0/{name}", 16 << 20, thin=name == "a")
    host.virsh("define", f"{folder}/vm.xml")
    host.virsh("start", "vm")
    said: dict[Row, str] = {}
    for row in ROWS:
        words = row.words.replace("{FOLDER}", folder).split()
        if row.fails:
            with pytest.raises(VirshError) as caught:
                host.virsh(*words)
            said[row] = sentence(str(caught.value), folder)
        else:
            host.virsh(*words)
    host.virsh("destroy", "vm")
    if libvirts_version() != OF_PAGE:
        # Which commands work is checked above; what libvirtd says has other words in each version.
        text = PAGE.read_text()
        ours = [row for row in said if answered(row) == "gateway"]
        assert [row.words for row in ours if outcome(row, said) not in text] == []
        assert ours
        return
    made = page(said)
    if os.environ.get("VIRTLUN_WRITE_DOCS"):
        PAGE.write_text(made)
    assert PAGE.read_text() == made, "if that is right: VIRTLUN_WRITE_DOCS=1"
