"""The checkpoint or backup that a client asks for, where disks of ours are in it, and how it shows.

libvirtd knows nothing of the disks of ours, so it has no part of these: see `listing` for those of
its own disks alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import LunPlan, Settings
from pydataplane.domain.translate.recognising import check_encoding
from pydataplane.domain.translate.snapshotrequests import listed, names_of
from pydataplane.domain.translate.snapshotxml import text_of
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.disk import read
from pydataplane.domain.xml.document import Document, Node, NotXmlError, escape
from pydataplane.domain.xml.view import View

FORMATS = ("qcow2", "raw")
PORT_MAX = 65_535
SECONDS = re.compile("[0-9]{1,12}")


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """A client's <domaincheckpoint>."""

    name: str | None
    description: str | None
    created_s: int | None
    """When it was taken, seconds since the epoch, of one that is defined anew."""
    parent: str | None
    """Name of the one before it, of one that is defined anew."""
    luns: tuple[LunPlan, ...]
    """The disks of ours that are in it."""
    others: tuple[str, ...]
    """Target devs of libvirtd's own disks that are in it."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a backup in pull mode is served, by NBD."""

    transport: Literal["tcp", "unix"]
    host: str = ""
    port: int = 0
    socket: str = ""
    """Path, of the transport `unix`."""

    @property
    def address(self) -> str:
        """What to call it in messages."""
        return self.socket or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class BackupDisk:
    """A disk of ours in a backup."""

    lun: LunPlan
    incremental: str | None
    """The checkpoint since which it is what has changed; None: all of it."""
    form: str
    """Format of what is written in push mode, one of FORMATS."""
    file: str | None
    """Where it is written in push mode; None: the client leaves that to us."""
    block: bool
    """Whether that is a block device."""
    export: str
    """Name of the NBD export in pull mode."""
    bitmap: str
    """Name of the dirty bitmap that tells there what has changed."""


@dataclass(frozen=True, slots=True)
class BackupRequest:
    """A client's <domainbackup>."""

    server: Server | None
    """Of pull mode; None: push mode."""
    incremental: str | None
    disks: tuple[BackupDisk, ...]
    """Those of ours that are in it."""
    others: tuple[str, ...]
    """Target devs of libvirtd's own disks that are in it."""
    left: tuple[str, ...]
    """Target devs of all disks that are not."""


def checkpoint_requested(xml: str, domain_xml: str, settings: Settings) -> CheckpointRequest | None:
    """Reads the checkpoint that a client asks for; `domain_xml` is libvirtd's of the domain.

    Returns:
        None if either is something else: libvirtd's answer to the call itself says why.

    Raises:
        TranslateError: it lists a disk that the domain has not.
    """
    found = _parse(xml, "domaincheckpoint", domain_xml)
    if found is None:
        return None
    root, domain = found
    disks = _chosen(root, domain, settings, "checkpoint")
    created, parent = text_of(root, "creationTime") or "", root.child("parent")
    return CheckpointRequest(
        name=text_of(root, "name") or None,
        description=text_of(root, "description") or None,
        created_s=int(created) if SECONDS.fullmatch(created) else None,
        parent=None if parent is None else text_of(parent, "name"),
        luns=tuple(lun for lun, _ in disks.ours if not lun.read_only),
        others=disks.others,
    )


def backup_requested(xml: str, domain_xml: str, settings: Settings) -> BackupRequest | None:
    """Reads the backup that a client asks for; `domain_xml` is libvirtd's of the domain.

    Returns:
        None if either is something else: libvirtd's answer to the call itself says why.

    Raises:
        TranslateError: it contradicts itself, or asks for what cannot be.
    """
    found = _parse(xml, "domainbackup", domain_xml)
    if found is None:
        return None
    root, domain = found
    mode = root.attrs.get("mode", "push")
    if mode not in ("push", "pull"):
        raise TranslateError(Refusal.UNSUPPORTED, f"unknown backup mode '{mode}'")
    incremental = text_of(root, "incremental") or None
    disks = _chosen(root, domain, settings, "backup")
    return BackupRequest(
        server=_server(root, mode),
        incremental=incremental,
        disks=tuple(_disk(lun, node, incremental) for lun, node in disks.ours),
        others=disks.others,
        left=disks.left,
    )


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Which disks of a domain are in a checkpoint or backup."""

    ours: tuple[tuple[LunPlan, Node | None], ...]
    """With what lists each, if anything does."""
    others: tuple[str, ...]
    left: tuple[str, ...]


def _chosen(root: Node, domain: View, settings: Settings, attribute: str) -> _Chosen:
    """As virDomainBackupAlignDisks: all that a guest can write, or what is listed and not `no`."""
    given = {node.attrs.get("name", ""): node for node in listed(root)}
    unknown = set(given)
    ours: list[tuple[LunPlan, Node | None]] = []
    others: list[str] = []
    left: list[str] = []
    metadata = domain.salvaged
    for entry in metadata.entries if metadata is not None else ():
        lun = entry.lun
        names = names_of(lun, settings)
        node = next((given[name] for name in names if name in given), None)
        unknown.difference_update(names)
        if _is_in(node, attribute, default=not given and not lun.read_only):
            ours.append((lun, node))
        else:
            left.append(lun.dev)
    for disk_node in domain.their_nodes():
        disk, source = read(disk_node), disk_node.child("source")
        if disk_node.attrs.get("type") == "vhostuser":
            continue
        dev = disk.dev or ""
        names = (dev, *(source.attrs.values() if source is not None else ()))
        node = next((given[name] for name in names if name in given), None)
        unknown.difference_update(names)
        by_itself = source is not None and not disk.read_only and disk.device in ("disk", "lun")
        chosen = _is_in(node, attribute, default=not given and by_itself)
        (others if chosen else left).append(dev)
    if unknown:
        raise TranslateError(Refusal.UNSUPPORTED, f"no disk named '{min(unknown)}'")
    return _Chosen(tuple(ours), tuple(others), tuple(left))


def _is_in(node: Node | None, attribute: str, *, default: bool) -> bool:
    return default if node is None else node.attrs.get(attribute) != "no"


def _disk(lun: LunPlan, node: Node | None, incremental: str | None) -> BackupDisk:
    """Reads one <disk>, which may be missing."""
    attrs = node.attrs if node is not None else {}
    since = attrs.get("incremental", incremental)
    if attrs.get("backupmode") == "full":
        since = None
    elif attrs.get("backupmode") == "incremental" and since is None:
        raise TranslateError(
            Refusal.UNSUPPORTED,
            f"disk {lun.dev}: an incremental backup needs the name of a checkpoint in incremental=",
        )
    form = node.value("driver", "type") if node is not None else None
    if form is not None and form not in FORMATS:
        raise TranslateError(
            Refusal.UNSUPPORTED,
            f"disk {lun.dev}: a backup has the format {' or '.join(FORMATS)}, not {form}",
        )
    kind = attrs.get("type", "file")
    if kind not in ("file", "block"):
        raise TranslateError(Refusal.UNSUPPORTED, f"unsupported disk backup type '{kind}'")
    where = "dev" if kind == "block" else "file"
    return BackupDisk(
        lun=lun,
        incremental=since,
        form=form or "qcow2",
        file=node.value("target", where) if node is not None else None,
        block=kind == "block",
        export=attrs.get("exportname", lun.dev),
        bitmap=attrs.get("exportbitmap", f"backup-{lun.dev}"),
    )


def _server(root: Node, mode: str) -> Server | None:
    """Reads <server>; None in push mode.

    Raises:
        TranslateError: it is missing, or something that NBD here cannot do.
    """
    node = root.child("server")
    if mode == "push":
        if node is not None:
            raise TranslateError(Refusal.UNSUPPORTED, "use of <server> requires pull mode backup")
        return None
    attrs = node.attrs if node is not None else {}
    transport = attrs.get("transport", "tcp")
    if attrs.get("tls") == "yes":
        raise TranslateError(
            Refusal.UNSUPPORTED,
            "a backup of virtlun disks is served without TLS: use transport='unix', and a tunnel",
        )
    if transport == "unix":
        socket = attrs.get("socket", "")
        if not socket.startswith("/"):
            raise TranslateError(
                Refusal.UNSUPPORTED, f"backup socket path '{socket}' must be absolute"
            )
        return Server("unix", socket=socket)
    if transport != "tcp":
        raise TranslateError(
            Refusal.UNSUPPORTED, f"transport {transport} is not supported for <server>"
        )
    port = attrs.get("port", "")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) <= PORT_MAX):
        raise TranslateError(
            Refusal.UNSUPPORTED, f"<server> of a backup needs port= from 1 to {PORT_MAX}"
        )
    return Server("tcp", host=attrs.get("name", "localhost"), port=int(port))


def show_backup(request: BackupRequest, files: Sequence[str]) -> str:
    """Returns a backup under way as a client is to see it; `files` are those of push mode."""
    server, lines = request.server, []
    if request.incremental:
        lines.append(f"  <incremental>{escape(request.incremental)}</incremental>")
    if server is not None:
        where = (
            {"socket": server.socket}
            if server.transport == "unix"
            else {"name": server.host, "port": str(server.port)}
        )
        lines.append(f"  <server{_attributes({'transport': server.transport} | where)}/>")
    lines.append("  <disks>")
    for index, disk in enumerate(request.disks):
        values = {"name": disk.lun.dev, "backup": "yes"}
        if server is None:
            values["type"] = "block" if disk.block else "file"
        values["backupmode"] = "full" if disk.incremental is None else "incremental"
        if disk.incremental is not None:
            values["incremental"] = disk.incremental
        if server is not None:
            values["exportname"] = disk.export
            if disk.incremental is not None:
                values["exportbitmap"] = disk.bitmap
            lines.append(f"    <disk{_attributes(values)}/>")
            continue
        where = {"dev" if disk.block else "file": files[index]}
        lines.append(f"    <disk{_attributes(values)}>")
        lines.append(f"      <driver{_attributes({'type': disk.form})}/>")
        lines.append(f"      <target{_attributes(where)}/>")
        lines.append("    </disk>")
    lines += [f"    <disk{_attributes({'name': dev, 'backup': 'no'})}/>" for dev in request.left]
    lines.append("  </disks>")
    mode = "push" if server is None else "pull"
    return f"<domainbackup mode='{mode}'>\n" + "\n".join(lines) + "\n</domainbackup>\n"


def show_checkpoint(
    name: str,
    description: str | None,
    parent: str | None,
    created_s: int,
    sizes: Sequence[tuple[str, int | None]],
) -> str:
    """Returns a checkpoint of disks of ours as a client is to see it.

    `sizes` has the target dev of each, and the bytes that have changed since, if they are asked.
    """
    lines = [f"  <name>{escape(name)}</name>"]
    if description:
        lines.append(f"  <description>{escape(description)}</description>")
    if parent is not None:
        lines.append(f"  <parent>\n    <name>{escape(parent)}</name>\n  </parent>")
    lines += [f"  <creationTime>{created_s}</creationTime>", "  <disks>"]
    for dev, size in sizes:
        values = {"name": dev, "checkpoint": "bitmap", "bitmap": name}
        lines.append(
            f"    <disk{_attributes(values | ({} if size is None else {'size': str(size)}))}/>"
        )
    lines.append("  </disks>")
    return "<domaincheckpoint>\n" + "\n".join(lines) + "\n</domaincheckpoint>\n"


def _attributes(values: Mapping[str, str]) -> str:
    """Returns attributes as libvirt writes them."""
    return "".join(f" {name}='{escape(value)}'" for name, value in values.items())


def _parse(xml: str, name: str, domain_xml: str) -> tuple[Node, View] | None:
    check_encoding(xml)
    domain = views.parse(domain_xml)
    try:
        document = Document(xml)
    except NotXmlError:
        return None
    root = document.root
    if domain is None or root.name != name or root.namespace:
        return None
    return root, domain
