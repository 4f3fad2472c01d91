"""libvirtd's calls about snapshots of domains, and what it says of each."""

from __future__ import annotations

from dataclasses import dataclass

from plugin.gateway.errors import Code, UpstreamError
from plugin.gateway.messages import Domain, DomainCall, read_string
from plugin.gateway.procs import Proc
from plugin.gateway.upstream import XML_SECURE, Upstream
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.translate.snapshotxml import SnapshotXml, parse_snapshot

REDEFINE, CURRENT, NO_METADATA, HALT, DISK_ONLY, REUSE_EXT, QUIESCE, ATOMIC, LIVE, VALIDATE = (
    1 << bit for bit in range(10)
)
"""virDomainSnapshotCreateFlags."""

CHILDREN, METADATA_ONLY, CHILDREN_ONLY = 1, 2, 4
"""virDomainSnapshotDeleteFlags."""

REVERT_RUNNING, REVERT_PAUSED, REVERT_FORCE, REVERT_RESET_NVRAM = 1, 2, 4, 8
"""virDomainSnapshotRevertFlags."""

LIST_DESCENDANTS, LIST_TOPOLOGICAL = 1, 1 << 10
"""VIR_DOMAIN_SNAPSHOT_LIST_DESCENDANTS, _TOPOLOGICAL: parents before their children."""

SNAPSHOTS_MAX = 16_384
"""REMOTE_DOMAIN_SNAPSHOT_LIST_MAX."""

LONG_S = 3600.0
"""How long libvirtd may take to save or load a guest's memory, or to merge files, seconds."""


@dataclass(frozen=True)
class Snapshot:
    """remote_nonnull_domain_snapshot."""

    name: str
    dom: Domain

    @staticmethod
    def read(reader: Reader) -> Snapshot:
        """Reads one."""
        return Snapshot(reader.string(), Domain.read(reader))

    def write(self, writer: Writer) -> Writer:
        """Appends it."""
        return self.dom.write(writer.string(self.name))


async def exists(upstream: Upstream, snapshot: Snapshot) -> bool:
    """Whether libvirtd has it (needs domain:read).

    Raises:
        GatewayError: it does not say.
    """
    args = snapshot.dom.write(Writer()).string(snapshot.name).u32(0)
    try:
        await upstream.call(Proc.SNAPSHOT_LOOKUP_BY_NAME, bytes(args))
    except UpstreamError as error:
        if error.code in (Code.NO_DOMAIN_SNAPSHOT, Code.NO_DOMAIN):
            return False
        raise
    return True


async def xml_of(upstream: Upstream, snapshot: Snapshot) -> str:
    """Returns its XML as libvirtd has it, with passwords (needs domain:read_secure)."""
    args = bytes(snapshot.write(Writer()).u32(XML_SECURE))
    return read_string(await upstream.call(Proc.SNAPSHOT_GET_XML_DESC, args))


async def read(upstream: Upstream, snapshot: Snapshot) -> SnapshotXml | None:
    """Returns what it holds; None if libvirtd has no such snapshot.

    Raises:
        GatewayError: it does not say.
    """
    try:
        return parse_snapshot(await xml_of(upstream, snapshot))
    except UpstreamError as error:
        if error.code in (Code.NO_DOMAIN_SNAPSHOT, Code.NO_DOMAIN):
            return None
        raise


async def count(upstream: Upstream, dom: Domain) -> int:
    """Returns how many snapshots libvirtd has of a domain (needs domain:read)."""
    args = DomainCall(dom).pack(flags=True)
    return Reader(await upstream.call(Proc.SNAPSHOT_NUM, args)).i32()


async def current(upstream: Upstream, dom: Domain) -> str | None:
    """Returns the name of a domain's current snapshot, None without one (needs domain:read)."""
    args = DomainCall(dom).pack(flags=True)
    if not Reader(await upstream.call(Proc.HAS_CURRENT_SNAPSHOT, args)).i32():
        return None
    return Snapshot.read(Reader(await upstream.call(Proc.SNAPSHOT_CURRENT, args))).name


async def descendants(upstream: Upstream, snapshot: Snapshot) -> list[Snapshot]:
    """Returns what was taken after it, and of that, each behind its parent (needs domain:read)."""
    args = snapshot.write(Writer()).i32(1).u32(LIST_DESCENDANTS | LIST_TOPOLOGICAL)
    reader = Reader(await upstream.call(Proc.SNAPSHOT_LIST_ALL_CHILDREN, bytes(args)))
    return reader.array(lambda: Snapshot.read(reader), SNAPSHOTS_MAX)


async def redefine(upstream: Upstream, dom: Domain, xml: str, flags: int = CURRENT) -> None:
    """Tells libvirtd of a snapshot that exists, or changes what it knows of one."""
    args = DomainCall(dom, xml, flags | REDEFINE).pack(text=True, flags=True)
    await upstream.call(Proc.SNAPSHOT_CREATE_XML, args)


async def delete(upstream: Upstream, snapshot: Snapshot, flags: int) -> None:
    """Deletes one, or with METADATA_ONLY what libvirtd knows of it; its children stay."""
    args = bytes(snapshot.write(Writer()).u32(flags))
    await upstream.call(Proc.SNAPSHOT_DELETE, args, LONG_S)


async def freeze(upstream: Upstream, dom: Domain) -> None:
    """Has the guest's agent freeze all file systems (needs domain:fs_freeze)."""
    await upstream.call(Proc.FSFREEZE, _all_file_systems(dom))


async def thaw(upstream: Upstream, dom: Domain, deadline_s: float) -> None:
    """Has the guest's agent thaw all file systems (needs domain:fs_freeze)."""
    await upstream.call(Proc.FSTHAW, _all_file_systems(dom), deadline_s)


def _all_file_systems(dom: Domain) -> bytes:
    writer = dom.write(Writer())
    return bytes(writer.array([], writer.string).u32(0))
