"""What a domain has on its host besides the volume that leaves, by its XML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydataplane.domain.model import Settings
from pydataplane.domain.translate import sources
from pydataplane.domain.xml.document import Document, Node

BOOT_FILES = ("loader", "kernel", "initrd", "dtb")
"""Elements of <os> whose text is a path that the domain does not start without."""


@dataclass(frozen=True)
class Needs:
    """What has to be on a host for the domain to start there."""

    volumes: list[str]
    """LVSTORE/NAME of its disks that are ours."""
    files: list[str]
    """Paths of other disks, and of what it boots."""
    machine: list[str | None]
    """Emulator, architecture, machine and virtualisation type, as libvirt's capabilities of a
    domain are asked for; None: the host's default."""


def needs(domain_xml: str, settings: Settings) -> Needs:
    """Returns what a domain needs; its XML is the one that clients see."""
    root = Document(domain_xml).root
    boots = [root.at("os", name) for name in BOOT_FILES]
    files = [each.text.strip() for each in boots if each is not None]
    ours = sources.volumes_named(domain_xml, settings)
    for disk in _devices(root, "disk"):
        path = disk.value("source", "file") or disk.value("source", "dev") or ""
        if path.removeprefix(settings.path_prefix) not in ours:
            files.append(path)
    emulator = root.at("devices", "emulator")
    machine = [
        emulator.text.strip() if emulator is not None else None,
        root.value("os/type", "arch"),
        root.value("os/type", "machine"),
        root.attrs.get("type"),
    ]
    return Needs(ours, [path for path in files if path], machine)


def state_on_host(domain_xml: str) -> list[str]:
    """Returns what libvirt keeps of a domain on its host, in no volume; in words."""
    root = Document(domain_xml).root
    found = []
    if root.at("os", "nvram") is not None:
        found.append("its UEFI variables")
    if any(tpm.value("backend", "type") == "emulator" for tpm in _devices(root, "tpm")):
        found.append("the state of its TPM")
    return found


def _devices(root: Node, kind: str) -> Iterator[Node]:
    devices = root.child("devices")
    return devices.every(kind) if devices is not None else iter(())
