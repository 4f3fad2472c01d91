"""SNAPSHOT_CREATE_XML: a domain's disks of ours are held by lvol snapshots, all at one instant.

libvirtd keeps the snapshot itself: its XML, its place in the tree, and which is current. Of disks
that are its own, and of memory, it takes the snapshot, with ours left out, while the domain is
paused; of ours alone it is told by a definition. Whether the client may is for libvirtd to say,
before anything is done. What there is of it at each moment stands in the journal.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import structlog

from plugin.gateway import domsnapshots, inflight, snapshotsteps
from plugin.gateway.call import Call, Reply
from plugin.gateway.domains import is_running
from plugin.gateway.domsnapshots import (
    DISK_ONLY,
    HALT,
    LIVE,
    NO_METADATA,
    QUIESCE,
    REDEFINE,
    VALIDATE,
    Snapshot,
)
from plugin.gateway.errors import Code, Refused, UpstreamError
from plugin.gateway.handlers import snapshotowners
from plugin.gateway.handlers.disklists import settings_of
from plugin.gateway.journal import SnapshotEntry
from plugin.gateway.messages import Domain, DomainCall
from plugin.gateway.recovery import recover
from plugin.gateway.services import Services
from plugin.gateway.target import Target
from plugin.gateway.upstream import RUNNING, XML_INACTIVE, XML_SECURE, Upstream
from plugin.gateway.xdr import Writer
from pydataplane.domain import translate
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import LunPlan, listing
from pydataplane.domain.translate.snapshotrequests import Request, compose, snapshot_requested
from pydataplane.domain.translate.snapshotxml import DiskSnapshot, domain_of, with_note
from pydataplane.volumenames import VOLUME_NAME

CREATE_FLAGS = 2 * VALIDATE - 1
"""All virDomainSnapshotCreateFlags of libvirt 9.0."""

UNKNOWN = 1 << 30
"""A flag that libvirtd does not know: it refuses it after it has judged the call."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Wish:
    """A snapshot that is to be taken, of a domain whose lock is held."""

    call: Call
    dom: Domain
    flags: int
    request: Request
    """With a name; of a running domain with the file of its memory."""
    xml: str
    """libvirtd's XML of the domain with its passwords."""
    active: bool
    created_s: int

    @property
    def memory(self) -> bool:
        """Whether the guest's memory is in it."""
        return self.request.memory_file is not None

    @property
    def libvirtds(self) -> bool:
        """Whether libvirtd has a part of it."""
        return self.memory or bool(self.request.others)


async def judge(call: Call, payload: bytes, ours: int = 0) -> Reply | None:
    """Has libvirtd judge a call whose `payload` has UNKNOWN among its flags.

    `ours` are flags of libvirt's that we carry out and libvirtd may not know; it judges the
    permission for them all the same.

    Returns its refusal; None: the client may do it.
    """
    reply = await call.forward(payload)
    error = None if reply.ok else UpstreamError(reply.payload)
    if error is not None and error.code == Code.INVALID_ARG:
        unknown = re.search(r"\(0x([0-9a-f]+)\)", str(error))
        if unknown is not None and int(unknown[1], 16) & ~ours == UNKNOWN:
            return None
    return reply


async def has_controller(call: Call, dom: Domain) -> bool:
    """Whether a domain has a controller or device of ours; no, where libvirtd has no such domain.

    Raises:
        GatewayError: libvirtd does not say: what would lack a disk is not to pass.
    """
    try:
        return bool((await call.services.domain_cache.current(dom)).hidden)
    except UpstreamError:
        return False


async def create(call: Call) -> None:
    """SNAPSHOT_CREATE_XML: {dom, xml, flags}."""
    args = DomainCall.read(call.payload, text=True, flags=True)
    making = _define if args.flags & REDEFINE else _create
    if not await has_controller(call, args.dom) and (
        making is _create or translate.is_foreign(args.text, call.services.settings)
    ):
        await call.pass_on()
        return
    async with call.services.domain_lock(args.dom.uuid):
        answer = await making(call, args)
    await call.give(answer)


async def _create(call: Call, args: DomainCall) -> Reply | bytes:
    services = call.services
    asked = replace(args, flags=args.flags | UNKNOWN)
    refusal = await judge(call, asked.pack(text=True, flags=True))
    if refusal is not None:
        return refusal
    if args.flags & ~CREATE_FLAGS:
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{args.flags & ~CREATE_FLAGS:x})")
    admin = await services.admin()
    dom = await admin.lookup(args.dom.uuid)
    xml = await admin.xml(dom, XML_SECURE)
    request = await call.parse(
        lambda: snapshot_requested(args.text, xml, services.settings), args.text
    )
    if request is None:
        return await call.forward()
    if request.luns:
        services.block_jobs.check_none(dom)
    active = is_running(xml)
    whole = active and not args.flags & DISK_ONLY
    if whole:
        await inflight.check(services, dom)
    if not request.luns:
        if whole and request.memory in (None, "internal"):
            raise _inside(dom, request)
        return await _without_ours(call, args, request)
    if request.memory in ("internal", "external") and not whole:
        return await _without_ours(call, args, request)  # libvirtd says why that cannot be
    if whole and request.memory == "no":
        return await _without_ours(call, args, request)
    if request.memory == "internal" or (
        not args.flags & DISK_ONLY and request.others and request.memory != "external"
    ):
        raise _inside(dom, request)
    if args.flags & LIVE and not whole:
        raise Refused(
            Refusal.CANNOT_CHANGE,
            "live snapshot creation is supported only during full system snapshots",
        )
    created_s = int(time.time())
    request = request.named(request.name or str(created_s))
    _check_name(request)
    if whole:
        request = request.with_memory(_memory_file(call, dom, request))
    wish = _Wish(call, dom, args.flags, request, xml, active, created_s)
    return await _take(wish)


async def _without_ours(call: Call, args: DomainCall, request: Request) -> Reply:
    """Lets libvirtd take a snapshot that has no disk of ours."""
    return await call.forward(replace(args, text=request.xml).pack(text=True, flags=True))


def _inside(dom: Domain, request: Request) -> Refused:
    """Says why a snapshot cannot be inside of the files of libvirtd's own disks.

    libvirt wants each disk in it that is not read-only, and knows of none in a vhost-user device.
    """
    what = f" of {', '.join(request.others)}" if request.others else ""
    way = ""
    if not request.luns:
        way = (
            "shut it off first, or start it without a controller (`controllers` in virtlun.toml), "
            "or "
        )
    return Refused(
        Refusal.UNSUPPORTED,
        f"domain '{dom.name}' has a virtlun controller, so a snapshot inside of the files{what} is"
        f" not possible: {way}take an external one (`virsh snapshot-create-as --disk-only`, or with"
        " the memory in a file, `--memspec file=...`)",
    )


def _check_name(request: Request) -> None:
    """Refuses a name that an lvol snapshot cannot have.

    Raises:
        Refused: says which it can.
    """
    if not VOLUME_NAME.fullmatch(f"v@{request.name}"):
        raise Refused(
            Refusal.BAD_ARGUMENT,
            f"invalid snapshot name '{request.name}': that of a snapshot with virtlun disks has up"
            " to 62 letters, digits, dots, hyphens and underscores of ASCII",
        )


def _memory_file(call: Call, dom: Domain, request: Request) -> str:
    """Returns where the memory goes if the client does not say; makes the folder.

    Raises:
        Refused: it cannot be made.
    """
    folder = call.services.config.memory_dir
    if request.memory_file is None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(
                Refusal.INTERNAL,
                f"{folder} cannot be made ({error.strerror}): make gateway.memory_dir of"
                " virtlun.toml a folder with space, or name a file (`--memspec file=...`)",
            ) from error
    return str(memory_file(call.services, Snapshot(request.name or "", dom)))


def memory_file(services: Services, snapshot: Snapshot) -> Path:
    """Returns where the gateway has the memory of a snapshot put that names no file."""
    return services.config.memory_dir / f"{snapshot.dom.uuid_text}.{snapshot.name}"


async def _take(wish: _Wish) -> Reply | bytes:
    """Takes a snapshot that has disks of ours."""
    services, dom, request = wish.call.services, wish.dom, wish.request
    admin = await services.admin()
    snapshot = Snapshot(request.name or "", dom)
    metadata = not wish.flags & NO_METADATA
    if metadata and await domsnapshots.exists(admin, snapshot):
        raise Refused(
            Code.OPERATION_FAILED, f"domain moment {snapshot.name} already exists: choose another"
        )
    if wish.flags & HALT and not await admin.persistent(dom):
        raise Refused(Code.OPERATION_INVALID, "cannot halt after transient domain snapshot")
    held = await held_by(wish.call, request.luns, snapshot.name)
    target = await services.target.of_volume(held[0].volume)
    runs = wish.active and (await admin.state(dom))[0] == RUNNING
    together = len({each.lvstore for each in held}) == 1
    entry = SnapshotEntry(
        operation="snapshot",
        uuid=dom.uuid_text,
        name=dom.name,
        snapshot=snapshot.name,
        held=tuple(held),
        metadata=metadata,
        resume=runs and (wish.libvirtds or not together),
        thaw=bool(wish.flags & QUIESCE) and wish.active,
        run=dom.id,
    )
    stored = services.journal.append(entry)
    try:
        answer = await _carry_out(wish, entry, target)
        await snapshotsteps.go_on(services, entry, dom)
    except BaseException as error:
        await recover(services, snapshotsteps.unfrozen(services, stored, error))
        raise
    services.journal.remove(stored)
    if wish.flags & HALT and wish.active and not wish.libvirtds:
        await admin.destroy(dom)
    _log.info("snapshot taken", domain=dom.name, snapshot=snapshot.name, disks=entry.dev)
    return answer


async def _carry_out(wish: _Wish, entry: SnapshotEntry, target: Target) -> Reply | bytes:
    """Does the steps; all of it is to be undone where this fails."""
    services, dom = wish.call.services, wish.dom
    await snapshotsteps.hold_still(services, entry, dom)
    snapshot = Snapshot(entry.snapshot, dom)
    await target.snapshot(
        entry.held, snapshotowners.moment_of(snapshot) if entry.metadata else None
    )
    name = bytes(snapshot.write(Writer()))
    if wish.libvirtds:
        flags = wish.flags & ~QUIESCE
        args = DomainCall(dom, wish.request.xml, flags).pack(text=True, flags=True)
        reply = await wish.call.forward(args)
        if not reply.ok:
            raise UpstreamError(reply.payload)
        if entry.metadata:
            await snapshotsteps.note(services, entry, dom)
    elif entry.metadata:
        await _tell(wish, entry)
    return name


async def _tell(wish: _Wish, entry: SnapshotEntry) -> None:
    """Tells libvirtd of a snapshot of disks of ours alone."""
    admin = await wish.call.services.admin()
    inactive = None
    if wish.active and await admin.persistent(wish.dom):
        inactive = await admin.xml(wish.dom, XML_INACTIVE | XML_SECURE)
    # libvirtd wants all disks in what is taken of a domain that is off.
    off = not wish.active and not wish.request.left
    text = await wish.call.parse(
        partial(
            compose,
            wish.request,
            entry.held,
            state="shutoff" if off else "disk-snapshot",
            parent=await domsnapshots.current(admin, wish.dom),
            created_s=wish.created_s,
            domain_xml=wish.xml,
            inactive_xml=inactive,
        ),
        wish.request.xml,
    )
    await domsnapshots.redefine(admin, wish.dom, text)


async def held_by(call: Call, luns: tuple[LunPlan, ...], name: str) -> list[DiskSnapshot]:
    """Returns the lvol snapshots that a domain snapshot of this name has of these disks.

    Raises:
        GatewayError: a volume is not there.
    """
    held = []
    for lun in luns:
        volume = await call.services.target.lvol(lun.bdev_name)
        held.append(
            DiskSnapshot(
                lun.dev, volume.uuid, volume.lvstore, f"{volume.name}@{name}", str(uuid4())
            )
        )
    return held


async def _define(call: Call, args: DomainCall) -> Reply | bytes:
    """Has libvirtd know a snapshot that exists, as its XML was shown to a client."""
    services = call.services
    admin = await services.admin()
    current = await admin.xml(args.dom, XML_INACTIVE | XML_SECURE)
    settings = await settings_of(services, current)
    name = await call.parse(lambda: listing.name_of(args.text), args.text)
    held_in = await _domain_of(admin, Snapshot(name, args.dom))
    made = await call.parse(
        lambda: listing.define_inside(args.text, current, settings, held_in), args.text
    )
    text = made.xml
    if made.luns:
        asked = replace(args, flags=args.flags | UNKNOWN)
        refusal = await judge(call, asked.pack(text=True, flags=True))
        if refusal is not None:
            return refusal
        snapshot = Snapshot(made.name, await admin.lookup(args.dom.uuid))
        held = await _present(call, snapshot, made.luns)
        await snapshotowners.adopt(
            call, await services.target.of_volume(held[0].volume), snapshot, held
        )
        text = await services.parse(lambda: with_note(made.xml, held))
    return await call.forward(replace(args, text=text).pack(text=True, flags=True))


async def _domain_of(admin: Upstream, snapshot: Snapshot) -> str | None:
    """Returns the definition in a snapshot that libvirtd has; None: it has none, or no snapshot."""
    try:
        return domain_of(await domsnapshots.xml_of(admin, snapshot))
    except UpstreamError as error:
        if error.code in (Code.NO_DOMAIN_SNAPSHOT, Code.NO_DOMAIN):
            return None
        raise


async def _present(call: Call, snapshot: Snapshot, luns: tuple[LunPlan, ...]) -> list[DiskSnapshot]:
    """Returns the lvol snapshots that are there of these disks.

    Raises:
        GatewayError: one is not.
    """
    known = await domsnapshots.read(await call.services.admin(), snapshot)
    by_dev = {each.dev: each for each in known.held} if known is not None else {}
    found = []
    for each in await held_by(call, luns, snapshot.name):
        if each.dev not in by_dev:
            lvol = await call.services.target.volume(each.path)
            by_dev[each.dev] = replace(each, uuid=lvol.uuid)
        found.append(by_dev[each.dev])
    return found
