"""Checks that lvol snapshots belong to the domain's snapshot, or checkpoint, that names them.

What libvirtd knows of a snapshot its clients can write (`snapshot-create --redefine`, at libvirtd
itself, too), or copy to another domain: that is no reason to delete an lvol or to roll a volume
back. So each lvol snapshot that is taken for a domain's snapshot is marked with it in the target.
One that has no mark (of an earlier version, or of `virtlun volume snapshot`) counts if its name
fits, it is of a disk that the domain has, and no other domain's QEMU has that volume.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from plugin.gateway.call import Call
from plugin.gateway.domsnapshots import Snapshot
from plugin.gateway.errors import Code, Refused, UpstreamError
from plugin.gateway.lvolsnapshots import Moment, Owner
from plugin.gateway.messages import Domain
from plugin.gateway.services import Services
from plugin.gateway.target import Target
from plugin.gateway.upstream import XML_INACTIVE
from pydataplane.domain import translate
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import controller_name
from pydataplane.domain.translate.snapshotxml import DiskSnapshot


def moment_of(snapshot: Snapshot) -> Moment:
    """Returns what the lvol snapshots of a domain's snapshot are marked with."""
    return Moment(snapshot.dom.uuid_text, snapshot.name)


async def check(
    call: Call, target: Target, snapshot: Snapshot, held: Sequence[DiskSnapshot]
) -> None:
    """Refuses lvol snapshots that are not of this snapshot; those that are gone are nobody's.

    The caller holds the domain's lock.

    Raises:
        GatewayError: says which; nothing has changed.
    """
    for each, owner in await _owners(call.services, target, snapshot, held):
        if owner.moment == moment_of(snapshot):
            continue
        if owner.moment is not None or not owner.fits:
            raise await _foreign(call.services, snapshot, each, owner)
        await check_unused(call.services, snapshot.dom, each)


async def adopt(
    call: Call, target: Target, snapshot: Snapshot, held: Sequence[DiskSnapshot]
) -> None:
    """Marks lvol snapshots that are there as of a snapshot that is defined anew.

    Also those of a domain that libvirtd has no more. The caller holds the domain's lock.

    Raises:
        GatewayError: one is of another domain or another snapshot; none is marked.
    """
    services, moment = call.services, moment_of(snapshot)
    found = await _owners(services, target, snapshot, held)
    for each, owner in found:
        if owner.moment == moment:
            continue
        if not owner.fits or (
            owner.moment is not None and await _domain(services, owner.moment.uuid) is not None
        ):
            raise await _foreign(services, snapshot, each, owner)
        await check_unused(services, snapshot.dom, each)
    await target.mark_snapshots([each.uuid for each, _ in found], moment)


async def check_checkpoint(
    call: Call, target: Target, dom: Domain, name: str, held: Sequence[DiskSnapshot]
) -> None:
    """Refuses lvol snapshots that a checkpoint `name`, defined anew, would take from others.

    Raises:
        Refused: one is of a checkpoint of another domain that there is, or that runs with its
            volume.
    """
    services = call.services
    owners = await target.checkpoint_domains(held)
    for each in held:
        owner = owners.get(each.uuid)
        if owner == dom.uuid_text:
            continue
        other = await _domain(services, UUID(owner).bytes) if owner is not None else None
        if other is not None:
            raise Refused(
                Refusal.BAD_ARGUMENT,
                f"checkpoint {name} of {dom.name}: {each.path} is of a checkpoint of domain"
                f" {other.name}: delete that one first, or take another",
            )
        await check_unused(services, dom, each)


async def check_unused(services: Services, dom: Domain, held: DiskSnapshot) -> None:
    """Refuses a volume that another domain's controller has.

    Raises:
        Refused: it has.
    """
    for holder in await services.target.holders(held.volume, controller_name(dom.uuid_text)):
        try:
            other = await _domain(services, UUID(holder).bytes)
        except ValueError:  # a controller that is not the gateway's
            other = None
        raise Refused(
            Refusal.VOLUME_IN_USE,
            f"the volume of {held.path} is in use by domain {other.name if other else holder}:"
            " detach it there first",
        )


async def _owners(
    services: Services, target: Target, snapshot: Snapshot, held: Sequence[DiskSnapshot]
) -> list[tuple[DiskSnapshot, Owner]]:
    disks = await _disks(services, snapshot.dom)
    found = await target.snapshot_owners(held, snapshot.name, disks)
    return [(each, found[each.uuid]) for each in held if each.uuid in found]


async def _foreign(
    services: Services, snapshot: Snapshot, held: DiskSnapshot, owner: Owner
) -> Refused:
    """Says that an lvol snapshot is not of the snapshot that names it."""
    what = f"is not of a disk that {snapshot.dom.name} has"
    if owner.moment is not None:
        other = await _domain(services, owner.moment.uuid)
        name = other.name if other is not None else owner.moment.domain
        what = f"is of snapshot {owner.moment.name} of domain {name}"
    return Refused(
        Refusal.BAD_ARGUMENT,
        f"snapshot {snapshot.name} of {snapshot.dom.name} names {held.path}, which {what}: forget"
        f" {snapshot.name} (`virsh snapshot-delete --metadata`)",
    )


async def _disks(services: Services, dom: Domain) -> set[str]:
    """Returns the UUIDs of the volumes that a domain has as disks, running or in its definition."""
    admin = await services.admin()
    texts = [await admin.xml(dom, 0)]
    if await admin.persistent(dom):
        texts.append(await admin.xml(dom, XML_INACTIVE))
    plans = await services.parse(lambda: [translate.plan(text) for text in texts])
    luns = [lun for plan in plans if plan is not None for lun in plan.luns]
    unknown = {lun.volume.alias for lun in luns if lun.uuid is None}
    found = await services.target.uuids(sorted(unknown))
    return {lun.uuid for lun in luns if lun.uuid is not None} | set(found.values())


async def _domain(services: Services, uuid: bytes) -> Domain | None:
    """Returns a domain; None if libvirtd has none of this UUID."""
    try:
        return await (await services.admin()).lookup(uuid)
    except UpstreamError as error:
        if error.code != Code.NO_DOMAIN:
            raise
        return None
