"""The steps of a domain's snapshot that are done again after a crash, and so are safe to repeat.

The journal's entry says all that they need. Callers: handlers.snapshots, handlers.reverting and
recovery.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from uuid import UUID

import structlog

from plugin.gateway import copies, domsnapshots, freezing, images
from plugin.gateway.backup import launch
from plugin.gateway.domains import identity_of
from plugin.gateway.domsnapshots import LONG_S, Snapshot
from plugin.gateway.errors import Code, GatewayError, NoAnswer, Refused, UpstreamError
from plugin.gateway.journal import SnapshotEntry, StoredEntry
from plugin.gateway.messages import Domain, DomainCall, read_string
from plugin.gateway.procs import Proc
from plugin.gateway.services import Services
from plugin.gateway.upstream import PAUSED, PAUSED_BY_USER, XML_INACTIVE, XML_SECURE, Upstream
from plugin.gateway.xdr import Writer
from pydataplane.domain import translate
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import controller_name
from pydataplane.domain.translate.snapshotxml import (
    DiskSnapshot,
    domain_of,
    parse_snapshot,
    with_note,
)

START_PAUSED, FORCE_BOOT = 1, 8
"""VIR_DOMAIN_START_PAUSED, _FORCE_BOOT: what was saved of another run is not to come back."""

RESTORE_RUNNING, RESTORE_PAUSED = 2, 4
"""VIR_DOMAIN_SAVE_RUNNING, _PAUSED."""

LEAVE_TRIES = 50
LEAVE_S = 0.2
"""How often, and how many seconds apart, the QEMU of a stopped domain is given to let go."""

_log = structlog.get_logger(__name__)


async def hold_still(services: Services, entry: SnapshotEntry, dom: Domain) -> None:
    """Freezes and pauses a domain, as its entry says; `go_on` is the end of it.

    Raises:
        NotFrozen: nothing was frozen; see `unfrozen`.
        GatewayError: libvirtd refuses, or is gone.
    """
    if entry.thaw:
        await freezing.freeze(services, dom)
    if entry.resume:
        await (await services.admin()).suspend(dom)


async def go_on(services: Services, entry: SnapshotEntry, dom: Domain) -> None:
    """Has a domain go on that was paused and frozen for a snapshot; safe to repeat.

    Raises:
        NotThawed: its agent does not answer.
        GatewayError: libvirtd refuses, or is gone.
    """
    if entry.run is not None and entry.run != dom.id:
        return  # it has ended, and what runs now was never paused or frozen
    admin = await services.admin()
    if entry.resume:
        with suppress(UpstreamError):  # it has ended meanwhile
            if await admin.state(dom) == (PAUSED, PAUSED_BY_USER):
                await admin.resume(dom)
    if entry.thaw:
        await freezing.thaw(services, dom)


def unfrozen(services: Services, stored: StoredEntry, error: BaseException) -> StoredEntry:
    """Returns the entry to recover after `error`: where nothing was frozen, nothing is to thaw."""
    if not isinstance(error, freezing.NotFrozen) or not isinstance(stored.entry, SnapshotEntry):
        return stored
    try:
        return services.journal.replace(stored, replace(stored.entry, thaw=False))
    except Refused:  # then it is thawed for nothing
        return stored


async def delete_held(services: Services, entry: SnapshotEntry) -> None:
    """Deletes the lvol snapshots of an entry that are there.

    Raises:
        GatewayError: no target answers, or it refuses.
    """
    if entry.held:
        target = await services.target.of_volume(entry.held[0].volume)
        await target.delete_snapshots(entry.held)


async def forget_checkpoints(services: Services, held: Sequence[DiskSnapshot]) -> None:
    """Has lvol snapshots be of no checkpoint any more; safe to repeat.

    Raises:
        GatewayError: no target answers, or it refuses.
    """
    for each in held:
        try:
            target = await services.target.of_volume(each.uuid)
        except NoAnswer:
            raise
        except Refused:  # it was deleted meanwhile
            continue
        await target.forget_checkpoints(held)  # all of a domain's are of one target
        return


async def end_backup(services: Services, entry: SnapshotEntry) -> None:
    """Ends what an earlier gateway left of a backup: its program, its files, its exports.

    Raises:
        GatewayError: no target answers, or it refuses.
    """
    how = launch.Launch.of(launch.unit_of(entry.uuid))
    folder = launch.folder_in(services.config.listen.parent, entry.uuid)
    if entry.dom_uuid not in services.backups:  # else there are a later one's, of the same names
        await launch.stop(how, "writer")
        shutil.rmtree(folder, ignore_errors=True)
    await launch.remove(how, entry.files)
    if entry.exported:
        target = await services.target.of_volume(entry.exported[0])
        await target.end_exports(entry.exported)


async def note(services: Services, entry: SnapshotEntry, dom: Domain) -> None:
    """Notes the lvol snapshots in what libvirtd knows of a snapshot.

    A domain that was paused for it alone ran.

    Raises:
        GatewayError: libvirtd refuses, or is gone.
    """
    admin = await services.admin()
    xml = await domsnapshots.xml_of(admin, Snapshot(entry.snapshot, dom))
    was = parse_snapshot(xml)
    state = "running" if entry.resume and was is not None and was.state == "paused" else None
    text = await services.parse(lambda: with_note(xml, entry.held, state=state))
    await domsnapshots.redefine(admin, dom, text)


async def revert(services: Services, entry: SnapshotEntry, dom: Domain) -> None:
    """Brings a domain to one of its snapshots; the caller holds its lock and has checked all.

    Raises:
        GatewayError, TranslateError: a step failed; the same call again goes on there.
    """
    admin = await services.admin()
    snapshot = Snapshot(entry.snapshot, dom)
    xml = await domsnapshots.xml_of(admin, snapshot)
    inside = await services.parse(lambda: domain_of(xml))
    if inside is None:
        raise Refused(
            Code.SNAPSHOT_REVERT_RISKY,
            f"snapshot '{entry.snapshot}' lacks domain '{dom.name}' rollback info",
        )
    await _as_then(services, dom, inside)  # what it refuses is refused while the guest is there
    if await admin.active(dom):
        await admin.destroy(dom)
    await _released(services, dom)
    target = await services.target.of_volume(entry.held[0].volume)
    await target.roll_back(entry.held)
    await admin.define(await _as_then(services, dom, inside))
    await domsnapshots.redefine(admin, dom, xml)
    _log.info("reverted", domain=dom.name, snapshot=entry.snapshot)
    if entry.start is not None:
        await _start(services, admin, entry, dom)


async def _as_then(services: Services, dom: Domain, inside: str) -> str:
    """Returns the definition of a snapshot, for libvirtd.

    Raises:
        GatewayError, TranslateError: the domain cannot have it.
    """
    present = await (await services.admin()).xml(dom, XML_INACTIVE)
    made = await services.define(
        inside, new_uuid=UUID(int=0), current_xml=present, served_in=inside, as_stored=True
    )
    return made.xml


async def _released(services: Services, dom: Domain) -> None:
    """Waits until a stopped domain's QEMU has let go of its volumes.

    Raises:
        Refused: it does not, or what the target has recorded of them is needed still.
    """
    await copies.resolve(services, dom.uuid)
    copies.check_resolved(services, dom.uuid)
    for _ in range(LEAVE_TRIES):
        if await services.target.release_idle(controller_name(dom.uuid_text)) != "busy":
            return
        await asyncio.sleep(LEAVE_S)
    raise Refused(
        Code.RESOURCE_BUSY,
        f"the QEMU of domain {dom.name}, which has stopped, keeps its volumes: revert again",
    )


async def _start(services: Services, admin: Upstream, entry: SnapshotEntry, dom: Domain) -> None:
    """Starts a domain after a revert, or restores it, with its controller.

    Where that fails, the reconcile loop takes the controller away.
    """
    if entry.memory_file is None:
        saved, xml = None, await admin.xml(dom, XML_INACTIVE)
    else:  # its guest knows its disks by the numbers of then
        xml = saved = await saved_xml(admin, dom, entry.memory_file)
    plan = await services.parse(lambda: translate.plan(xml))
    if plan is not None:
        for error in (await images.bring_back(services, admin, plan)).values():
            raise error
        await services.target.ensure(await services.target.find_volumes(plan, {}))
    flags = entry.start or 0
    if entry.memory_file is None:
        args = DomainCall(dom, flags=flags | FORCE_BOOT).pack(flags=True)
        await admin.call(Proc.CREATE_WITH_FLAGS, args)
        return
    how = RESTORE_PAUSED if flags & START_PAUSED else RESTORE_RUNNING
    # With its XML: should the file be another one by then, libvirtd refuses that.
    writer = Writer().string(entry.memory_file)
    args = bytes(writer.optional(saved, writer.string).u32(how))
    await admin.call(Proc.RESTORE_FLAGS, args, LONG_S)


async def saved_xml(admin: Upstream, dom: Domain, file: str) -> str:
    """Returns the domain in a file that has the memory of one of a domain's snapshots.

    Raises:
        GatewayError: libvirtd cannot read it; or it is another domain's, whose guest it would
            start.
    """
    args = Writer().string(file).u32(XML_SECURE)
    xml = read_string(await admin.call(Proc.SAVE_IMAGE_GET_XML_DESC, bytes(args)))
    name, uuid = identity_of(xml)
    if uuid != dom.uuid:
        raise Refused(
            Refusal.BAD_ARGUMENT, f"{file} has the memory of domain {name}, not of {dom.name}"
        )
    return xml


async def undo(services: Services, entry: SnapshotEntry, dom: Domain) -> None:
    """Takes back a snapshot that could not be taken whole, and has the domain go on.

    Raises:
        GatewayError: that is to be tried later.
    """
    try:
        await go_on(services, entry, dom)
    finally:
        await delete_held(services, entry)
    admin = await services.admin()
    with suppress(UpstreamError):
        snapshot = Snapshot(entry.snapshot, dom)
        if entry.metadata and (found := await domsnapshots.read(admin, snapshot)) is not None:
            ours = {each.uuid for each in found.held} & {each.uuid for each in entry.held}
            if ours:
                await domsnapshots.delete(admin, snapshot, domsnapshots.METADATA_ONLY)


async def undefined(services: Services, entry: SnapshotEntry) -> bool:
    """Recovers an interrupted `undefine`; returns and raises as `finished`."""
    try:
        await (await services.admin()).lookup(entry.dom_uuid)
    except UpstreamError as error:
        if error.code != Code.NO_DOMAIN:
            raise
        await forget_checkpoints(services, entry.held)
        return True
    return False


async def finished(services: Services, entry: SnapshotEntry) -> bool:
    """Recovers an interrupted entry; the caller holds the domain's lock.

    Returns whether it was completed, not taken back.

    Raises:
        GatewayError, TranslateError: that is to be tried later.
    """
    admin = await services.admin()
    if entry.operation == "backup":
        await end_backup(services, entry)
    try:
        dom = await admin.lookup(entry.dom_uuid)
    except UpstreamError as error:
        if error.code != Code.NO_DOMAIN:
            raise
        if entry.operation in ("snapshot", "checkpoint", "backup"):
            await delete_held(services, entry)
        return False
    if entry.operation in ("checkpoint", "backup", "thaw"):
        try:
            await go_on(services, entry, dom)
        finally:
            await delete_held(services, entry)
        return entry.operation == "thaw"
    known = await domsnapshots.exists(admin, Snapshot(entry.snapshot, dom))
    if entry.operation == "delete":
        if not known:
            await delete_held(services, entry)
        return not known
    if entry.operation == "revert":
        if known:
            await revert(services, entry, dom)
        return known
    if known and entry.metadata and await _is_whole(services, entry):
        await note(services, entry, dom)
        await go_on(services, entry, dom)
        return True
    await undo(services, entry, dom)
    return False


async def _is_whole(services: Services, entry: SnapshotEntry) -> bool:
    try:
        target = await services.target.of_volume(entry.held[0].volume)
        return not await target.missing_snapshots(entry.held)
    except GatewayError:
        return False
