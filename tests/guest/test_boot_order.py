"""The firmware boots the disk that the client's XML asks for: SeaBIOS, real QEMU, a real target."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from lxml import etree

from pydataplane.domain.reconcile import ensure
from pydataplane.domain.translate import Settings, define
from tests.support.scratch import short_directory
from tests.support.target import Target
from tests.support.wait import until

QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}"

DOMAIN = """
<domain type='qemu'>
  <name>boots</name>
  <memory unit='MiB'>64</memory>
  <os><type arch='x86_64' machine='q35'>hvm</type>{os}</os>
  <devices>{disks}</devices>
</domain>
"""
DISK = """<disk type='block' device='disk'><source dev='/dev/virtlun/lvs0/{name}'/>
<target dev='{dev}' bus='scsi'/>{boot}</disk>"""


def boot_sector(word: bytes) -> bytes:
    """Returns a boot sector that writes `word` and a line break to the first serial port."""
    code = b"\xba\xf8\x03"  # mov dx, 0x3f8
    for byte in word + b"\n":
        code += bytes([0xB0, byte, 0xEE])  # mov al, byte; out dx, al
    return (code + b"\xf4\xeb\xfd").ljust(510, b"\0") + b"\x55\xaa"  # hlt; jmp to it


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory with a path short enough for sockets."""
    with short_directory("vb-") as path:
        yield path


@pytest.fixture
def target(scratch: Path) -> Iterator[Target]:
    """A target without anything."""
    made = Target(scratch).start()
    yield made
    assert made.stop() == 0, made.words()


@pytest.mark.vm
@pytest.mark.parametrize(
    ("os", "disks", "expected"),
    [
        ("", [("sda", ""), ("sdb", ""), ("sdc", "")], "disk0"),
        ("<boot dev='hd'/>", [("sdc", ""), ("sdb", ""), ("sda", "")], "disk2"),
        ("", [("sda", "<boot order='3'/>"), ("sdb", ""), ("sdc", "<boot order='2'/>")], "disk2"),
    ],
)
def test_the_firmware_boots_the_disk_asked_for(
    scratch: Path, target: Target, os: str, disks: list[tuple[str, str]], expected: str
) -> None:
    names = {}
    for number, _ in enumerate(disks):
        path = scratch / f"disk{number}"
        path.write_bytes(boot_sector(path.name.encode()).ljust(1 << 20, b"\0"))
        target.rpc("bdev_aio_create", filename=str(path), name=f"d{number}", block_size=512)
        names[f"lvs0/disk{number}"] = f"d{number}"
    xml = DOMAIN.format(
        os=os,
        disks="".join(
            DISK.format(name=f"disk{number}", dev=dev, boot=boot)
            for number, (dev, boot) in enumerate(disks)
        ),
    )
    settings = Settings(vhost_dir=str(target.vhost_dir))
    definition = define(xml, settings, new_uuid=UUID(int=7), uuids=names)
    assert definition.plan is not None
    ensure(target.client, definition.plan, whole=True)
    properties = {
        item.get("name", ""): item.get("value", "")
        for item in etree.fromstring(definition.xml.encode()).iter(f"{QEMU}property")
    }
    driver = properties.pop("driver")
    device = ",".join([driver, "chardev=c0", "bootindex=1", *map("=".join, properties.items())])
    serial = scratch / "serial"
    qemu = subprocess.Popen(
        [
            "qemu-system-x86_64",
            *("-machine", "q35,memory-backend=m0", "-accel", "tcg", "-m", "64"),
            *("-object", "memory-backend-memfd,id=m0,size=64M,share=on"),
            *("-nodefaults", "-display", "none", "-boot", "strict=on"),
            *("-chardev", f"socket,id=c0,path={definition.plan.socket}", "-device", device),
            *("-serial", f"file:{serial}"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: b"\n" in serial.read_bytes(), "something boots", process=qemu)
    finally:
        qemu.kill()
        qemu.wait()
    assert serial.read_text() == f"{expected}\n"
