"""Copies of disks of ours to other volumes of their target, while guests use them.

The target copies, and goes on when this gateway ends; the journal has what belongs to a copy from
before it begins until it is over. So a gateway that starts finds it again, and what became of it
is what the target says: the copy goes on, or the disk is on the one volume or the other. A disk
that is on the destination was pivoted, whoever asked for that, and its domain's XML follows. A
target that restarts loses its copies, and the disk stays on its source. What the target has
recorded of a disk may be all that says which volume counts: until that was seen, the domain is not
started, and its controller stays.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import structlog

from plugin.gateway.blockjobs import BlockJob, Kind, Status
from plugin.gateway.call import Call
from plugin.gateway.domains import is_active, is_running
from plugin.gateway.errors import Code, GatewayError, NoAnswer, Refused, UpstreamError
from plugin.gateway.journal import CopyEntry, StoredEntry
from plugin.gateway.lvolcopies import Copy, Disk
from plugin.gateway.messages import Domain
from plugin.gateway.services import Services
from plugin.gateway.target import Target
from plugin.gateway.upstream import AFFECT_CONFIG, AFFECT_LIVE, XML_INACTIVE, XML_SECURE
from pydataplane.domain import translate
from pydataplane.domain.errors import TranslateError
from pydataplane.domain.translate import controller_name

_log = structlog.get_logger(__name__)

PERIOD_S = 0.5
"""How often the target is asked about a copy, seconds."""

Side = Literal["source", "destination", "gone"]


async def check_none(call: Call, dom: Domain) -> None:
    """Refuses, as libvirtd does, what would end the copy of a disk with the domain's QEMU.

    Raises:
        Refused: a disk is copied. Who may not see the domain is told by libvirtd.
    """
    async with call.for_who_sees(dom):
        call.services.block_jobs.check_none(dom)


def entry_of(job: BlockJob) -> CopyEntry:
    """Returns what the journal has of a copy."""
    assert job.copy is not None
    assert isinstance(job.copy.entry, CopyEntry)
    return job.copy.entry


def disk_of(entry: CopyEntry) -> Disk:
    """Returns the disk as the target knows it."""
    return Disk(entry.address.controller, entry.address.target)


async def home(services: Services, entry: CopyEntry) -> Target:
    """Returns the target that copies; all volumes of a domain are of one.

    Raises:
        GatewayError: it does not answer.
    """
    try:
        return await services.target.of_volume(entry.destination)
    except NoAnswer:
        raise
    except Refused:  # deleted, as the copy was ended without this gateway
        return await services.target.of_volume(entry.source)


def begin(services: Services, dom: Domain, stored: StoredEntry) -> BlockJob:
    """Has a copy that the journal has, and the target, be the block job of its disk."""
    entry = stored.entry
    assert isinstance(entry, CopyEntry)
    job = BlockJob(Kind.COPY, dom, entry.dev, entry.source_path, entry.source, copy=stored)
    services.block_jobs.begin(job)
    services.block_jobs.spawn(_follow(services, job))
    return job


async def recover(services: Services, stored: StoredEntry) -> None:
    """Goes on with a copy that an earlier gateway left; the caller holds the domain's lock.

    Raises:
        GatewayError, TranslateError: nobody knows yet what became of it.
    """
    entry = stored.entry
    assert isinstance(entry, CopyEntry)
    if not stored.path.exists():
        return  # it was resolved while the lock was waited for
    admin = await services.admin()
    try:
        dom = await admin.lookup(entry.dom_uuid)
        xml = await admin.xml(dom, 0)
    except UpstreamError as error:
        if error.code != Code.NO_DOMAIN:
            raise
        services.journal.remove(stored)
        return
    if not is_running(xml):
        await _stopped(services, dom, xml, entry)
        services.journal.remove(stored)
        return
    if services.block_jobs.has(dom, entry.dev):  # of a later run, which nothing is left of this for
        services.journal.remove(stored)
        return
    ours = services.journal.append(entry)
    services.journal.remove(stored)
    begin(services, dom, ours)
    _log.info("a block copy is followed again", domain=dom.name, dev=entry.dev)


async def _stopped(services: Services, dom: Domain, xml: str, entry: CopyEntry) -> None:
    """Has the definition of a domain that has stopped name the copy, if its disk was pivoted to it.

    Raises:
        GatewayError, TranslateError: nobody knows yet.
    """
    if await _change(services, xml, entry, live=False) is None:
        return  # the disk has another volume by now, or is gone
    target = await home(services, entry)
    side = await _side(target, entry)
    if side == "destination":
        await _rename(services, dom, entry, target)
        _log.info("a pivot is followed by its stopped domain", domain=entry.name, dev=entry.dev)
    elif side == "gone" and (entry.asked or await target.hides(entry.address, entry.front)):
        raise _nobody_knows(entry)


def domain_stopped(services: Services, uuid: bytes) -> None:
    """Has no job go on of a domain (its UUID) that runs no more; recovery resolves its copies."""
    for job in [job for job, _ in services.block_jobs.copies() if job.dom.uuid == uuid]:
        _leave(services, job)
    services.block_jobs.domain_stopped(uuid)


async def leave_stopped(services: Services) -> None:
    """Does that for domains that stopped while libvirtd was away, which told nobody.

    Raises:
        GatewayError: libvirtd does not say which run.
    """
    admin = await services.admin()
    for uuid in {job.dom.uuid for job, _ in services.block_jobs.copies()}:
        if not await is_active(admin, uuid):
            domain_stopped(services, uuid)


def _leave(services: Services, job: BlockJob) -> None:
    assert job.copy is not None
    job.left = True
    services.block_jobs.forget(job)
    services.journal.pending.append(job.copy)


async def resolve(services: Services, uuid: bytes) -> None:
    """Resolves copies of a domain (its UUID) that has stopped: which volume counts, if known.

    The caller holds the domain's lock.

    Raises:
        GatewayError: libvirtd does not say whether it runs.
    """
    if not unresolved(services, uuid) or await is_active(await services.admin(), uuid):
        return
    domain_stopped(services, uuid)
    for stored in unresolved(services, uuid):
        with suppress(GatewayError, TranslateError):
            await recover(services, stored)
            if stored in services.journal.pending:
                services.journal.pending.remove(stored)


def check_resolved(services: Services, uuid: bytes) -> None:
    """Refuses to start a domain (its UUID) of which nobody knows which volume a disk went on with.

    Raises:
        Refused: names the disk.
    """
    for stored in unresolved(services, uuid):
        assert isinstance(stored.entry, CopyEntry)
        raise _nobody_knows(stored.entry)


def _nobody_knows(entry: CopyEntry) -> Refused:
    return Refused(
        Code.OPERATION_FAILED,
        f"nobody knows yet whether disk {entry.dev} is on {entry.source_path} or went on with its"
        f" copy {entry.destination_path}, as a target does not answer, lacks an lvstore, or has the"
        " disk no more: bring that back and try again; or detach the disk from the definition, and"
        " attach it some seconds later with the volume that is to count",
    )


def unresolved(services: Services, uuid: bytes) -> list[StoredEntry]:
    """Returns what the journal has of copies of a domain (its UUID) that has stopped.

    Those of this gateway, followed still or not, and of earlier ones.
    """
    jobs = services.block_jobs.copies()
    live = [job.copy for job, _ in jobs if job.dom.uuid == uuid and job.copy is not None]
    entries = [*live, *services.journal.pending, *services.journal.orphans()]
    copies = (each for each in entries if isinstance(each.entry, CopyEntry))
    # One whose file is gone was resolved while it waited.
    return [each for each in copies if each.entry.dom_uuid == uuid and each.path.exists()]


async def _follow(services: Services, job: BlockJob) -> None:
    """Sees to a copy until it is over."""
    jobs, ready = services.block_jobs, False
    assert job.copy is not None
    while True:
        await asyncio.sleep(PERIOD_S)
        if not jobs.runs(job):
            if not job.left:
                services.journal.remove(job.copy)
            return
        if services.is_locked(job.dom.uuid):
            continue  # whoever changes the domain may be about to end it
        try:
            async with services.domain_lock(job.dom.uuid):
                if not jobs.runs(job):
                    continue
                copy = await look(services, job)
        except (GatewayError, TranslateError) as error:
            _log.debug("nothing is known of a block copy", dev=job.dev, error=str(error))
            continue
        if copy is not None and copy.state == "ready" and not ready:
            ready = True
            jobs.tell(job, Status.READY)


async def look(services: Services, job: BlockJob) -> Copy | None:
    """Returns how far a copy is; None: it is over, and all is as that has it.

    The caller holds the domain's lock.

    Raises:
        GatewayError, TranslateError: nobody knows.
    """
    entry = entry_of(job)
    target = await home(services, entry)
    copy = await target.copy(disk_of(entry), poll=True)
    if copy is not None and copy.destination != entry.destination:
        copy = None
    if copy is not None and copy.state != "failed":
        return copy
    if copy is not None:
        await target.end_copy(disk_of(entry))
        _over(services, job, Status.FAILED)
        _log.warning("block copy failed", domain=entry.name, dev=entry.dev, error=copy.error)
        return None
    side = await _side(target, entry)
    if side == "destination":
        await finish(services, job)
    elif side == "source":
        _over(services, job, Status.FAILED)
        _log.warning(
            "block copy is lost",
            domain=entry.name,
            dev=entry.dev,
            why="the target restarted before its pivot: the disk goes on with"
            f" {entry.source_path}; begin the copy anew",
        )
    else:
        await resolve(services, job.dom.uuid)
    return None


async def _side(target: Target, entry: CopyEntry) -> Side:
    """Returns which of the two volumes the disk is on."""
    state = await target.state()
    address = entry.address
    shown = state.controllers.get(address.controller, {}).get(address.target)
    places: dict[str, Side] = {entry.source: "source", entry.destination: "destination"}
    return places.get(shown.bdev, "gone") if shown is not None else "gone"


async def pivot(services: Services, job: BlockJob) -> None:
    """Has a disk go on with its copy, which is ready; the caller holds the domain's lock.

    Raises:
        GatewayError, TranslateError: the copy goes on, or what became of it will be found.
    """
    entry = entry_of(job)
    target, owner = await home(services, entry), controller_name(entry.uuid)
    await target.carry_limits(entry.source, entry.destination, owner)
    try:
        _ask(services, job)
        await target.pivot(disk_of(entry))
    except Refused:  # the copy goes on, and is no disk yet
        await target.unlimit(entry.destination, owner)
        raise
    await finish(services, job)


def _ask(services: Services, job: BlockJob) -> None:
    """Has the journal say that a disk may be on its copy from now on.

    Raises:
        Refused: it cannot be written, or the domain has stopped.
    """
    assert job.copy is not None
    if not services.block_jobs.runs(job):
        raise Refused(Code.OPERATION_FAILED, f"the block job of disk {job.dev} has ended")
    job.copy = services.journal.replace(job.copy, replace(entry_of(job), asked=True))


async def finish(services: Services, job: BlockJob) -> None:
    """Has a domain's XML follow a disk that is on its copy; the caller holds the domain's lock.

    Safe to repeat.

    Raises:
        GatewayError, TranslateError: it does not yet.
    """
    entry = entry_of(job)
    await _rename(services, job.dom, entry, await home(services, entry))
    _over(services, job, Status.COMPLETED)
    _log.info("block copy pivoted", domain=entry.name, dev=entry.dev, to=entry.destination_path)


async def _rename(services: Services, dom: Domain, entry: CopyEntry, target: Target) -> None:
    """Has a domain, one that runs on both sides, name the copy that its disk is on."""
    owner = controller_name(entry.uuid)
    await target.carry_limits(entry.source, entry.destination, owner)
    await target.unlimit(entry.source, owner)
    admin = await services.admin()
    live = await admin.xml(dom, 0)
    if await admin.persistent(dom):
        config = await admin.xml(dom, XML_INACTIVE | XML_SECURE)
        change = await _change(services, config, entry, live=False)
        if change is not None and change.redefine and change.domain_xml is not None:
            await services.redefine(admin, dom.uuid, change.domain_xml)
        elif change is not None:
            await admin.set_metadata(dom, change.metadata_xml, AFFECT_CONFIG)
    change = await _change(services, live, entry, live=True)
    if change is not None and is_running(live):
        await admin.set_metadata(dom, change.metadata_xml, AFFECT_LIVE)
    services.domain_cache.changed(dom.uuid)


async def _change(
    services: Services, xml: str, entry: CopyEntry, *, live: bool
) -> translate.Change | None:
    """Returns what has one side of a domain name the copy; None: its disk has another volume."""
    settings = services.target.at_home(services.settings, xml)
    old = (entry.source, entry.source_path.removeprefix(settings.path_prefix))
    return await services.parse(
        lambda: translate.moved(
            xml, entry.dev, old, entry.disk_xml, entry.destination, settings, live=live
        )
    )


async def cancel(services: Services, job: BlockJob) -> None:
    """Ends a copy; the disk goes on with its volume. The caller holds the domain's lock.

    Raises:
        Refused: the disk is on its copy already, and its domain's XML follows.
        GatewayError, TranslateError: the target does not end it, or what it is on will be found.
    """
    entry = entry_of(job)
    target = await home(services, entry)
    await target.end_copy(disk_of(entry))
    # A pivot may have been done of which nobody was told, or which could not be completed.
    if await _side(target, entry) == "destination":
        await finish(services, job)
        raise Refused(
            Code.OPERATION_INVALID,
            f"disk {entry.dev} is on its copy {entry.destination_path} already, and goes on there",
        )
    _over(services, job, Status.CANCELED)


def _over(services: Services, job: BlockJob, status: Status) -> None:
    """The copy is no job any more, and clients are told why."""
    entry = entry_of(job)
    assert job.copy is not None
    services.block_jobs.forget(job)
    services.journal.remove(job.copy)
    pivoted = status is Status.COMPLETED
    services.block_jobs.tell(job, status, entry.destination_path if pivoted else None)
