"""Attach, detach and update of our disks, live and persistent.

Order of a live attach: libvirtd's permission, the volume, the metadata (persistent and live), the
LUN, the event, the reply; all of it or nothing: see plugin.gateway.handlers.altering.

Disks that are libvirtd's own pass, unless they would take the place of one of ours.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import structlog

from plugin.gateway import images
from plugin.gateway.call import Call
from plugin.gateway.domains import Sides, check_may_change, disk_dev, running_as, sides
from plugin.gateway.errors import GatewayError
from plugin.gateway.events import DeviceChange, DeviceEvent
from plugin.gateway.handlers import plugging
from plugin.gateway.handlers.altering import (
    Compute,
    admin_if_ours,
    alter,
    carries,
    carry_out,
    changes,
    check_flags,
)
from plugin.gateway.handlers.start import check_free
from plugin.gateway.messages import DomainCall
from plugin.gateway.procs import Proc
from plugin.gateway.upstream import AFFECT_LIVE
from pydataplane.domain import translate
from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.limits import NONE
from pydataplane.domain.translate import CARRIER_ALIAS, Change, VolumeRef, controller_name
from pydataplane.lvols import Lvol

_log = structlog.get_logger(__name__)

_WITHOUT_FLAGS = {Proc.ATTACH_DEVICE, Proc.DETACH_DEVICE}


def _arguments(call: Call) -> DomainCall:
    """Reads the arguments; the calls without flags mean the running domain."""
    if call.header.procedure in _WITHOUT_FLAGS:
        args = DomainCall.read(call.payload, text=True)
        return DomainCall(args.dom, args.text, AFFECT_LIVE)
    return DomainCall.read(call.payload, text=True, flags=True)


async def attach(call: Call) -> None:
    """ATTACH_DEVICE and ATTACH_DEVICE_FLAGS."""
    settings = call.services.settings
    args = _arguments(call)
    attached = False
    if translate.may_be_ours(args.text, settings) or translate.names_network(args.text):
        # Before anything is parsed: whoever may not attach has nothing to send.
        await check_may_change(await call.caller.own(), args.dom, args.flags)
        if await call.parse(lambda: translate.may_be_far(args.text, settings), args.text):
            attached = await _attach_ours(call, args, None)  # if its domain has it so
        else:
            recognise = partial(translate.recognise, args.text, settings)
            reference = await call.parse(recognise, args.text)
            attached = reference is not None and await _attach_ours(call, args, reference)
    if attached:
        await call.answer()
    else:
        await _attach_theirs(call, args)


async def _attach_ours(call: Call, args: DomainCall, reference: VolumeRef | None) -> bool:
    """Attaches a disk of ours: `reference`, or one over the network; False if that is QEMU's."""
    services, settings = call.services, call.services.settings
    if reference is not None:
        check_flags(args)
    async with services.domain_lock(args.dom.uuid):
        admin = await services.admin()  # whoever may change a domain need not be allowed to read it
        both = await sides(admin, args.dom, args.flags, peer=True)
        volume, uuids = None, {}
        if reference is not None:
            volume = await services.target.volume(reference.alias)
            uuids = {reference.alias: volume.uuid}
        elif await _is_qemus(call, args, both):
            return False
        else:
            check_flags(args)

        def compute(xml: str, live: bool) -> Change | None:
            peer = both.config if live else both.live
            at = services.target.at_home(settings, xml)
            return translate.attach(xml, args.text, at, live=live, peer_xml=peer, uuids=uuids)

        live, config = await changes(call, admin, args, both, compute)
        for change in (live, config):
            if change is not None and change.plan is not None:
                await services.target.check_home(change.plan, change.lun)
        name = next((each.lun.bdev_name for each in (live, config) if each is not None), "")
        async with services.locks.hold(f"volume:{name}"), _open(call, live) as image:
            volume = volume or image
            if live is not None and live.plan is not None and volume is not None:
                await check_free(call, live.plan, live.lun, volume)

            async def add(change: Change) -> None:
                if change.plan is not None and volume is not None:
                    await services.target.add(change.plan, change.lun, volume)
                if change.device_xml is not None:
                    await plugging.plug(await call.caller.own(), args.dom, change)

            await carry_out(call, args.dom, both, "attach", live, config, add)
            if live is not None:  # not the one of the disk before it
                services.thresholds.forget(args.dom.uuid, live.lun.dev)
    if live is not None and live.device_xml is not None:
        _log.info("attached", domain=args.dom.name, dev=live.lun.dev, volume=live.lun.volume.alias)
    elif live is not None and both.live is not None:
        dom = running_as(both.live, args.dom)
        # Before the answer: whoever waits for it must not depend on this client reading its own.
        services.announce(DeviceChange(DeviceEvent.ADDED, dom, live.alias))
        _log.info("attached", domain=dom.name, dev=live.lun.dev, volume=live.lun.volume.alias)
    return True


async def _is_qemus(call: Call, args: DomainCall, both: Sides) -> bool:
    """Whether a disk over the network is QEMU's, on both sides then that the call is for."""
    settings = call.services.settings
    asked = [(both.live, True)] if both.to_live else []
    asked += [(both.config, False)] if both.to_config else []

    def work() -> bool:
        return any(
            translate.stays_qemus(xml, args.text, settings, live=live)
            for xml, live in asked
            if xml is not None
        )

    return await call.parse(work, args.text)


@asynccontextmanager
async def _open(call: Call, live: Change | None) -> AsyncIterator[Lvol | None]:
    """Opens the image of a disk over the network that a running domain is to get."""
    if live is None or live.plan is None or live.lun.volume.source is None:
        yield None
        return
    async with images.opened(call, live.plan, [live.lun]):
        yield await call.services.target.image(live.plan, live.lun)


async def _attach_theirs(call: Call, args: DomainCall) -> None:
    """Lets libvirtd attach a device, but no disk under the target dev of one of ours."""
    if "<disk" not in args.text or await admin_if_ours(call, args.dom) is None:
        await call.pass_on()
        return
    await check_may_change(await call.caller.own(), args.dom, args.flags)
    dev = await call.parse(lambda: disk_dev(args.text), args.text)
    if dev is None:
        await call.pass_on()
        return
    async with call.services.domain_lock(args.dom.uuid):
        if await _has_ours(call, args, dev):
            raise TranslateError(Refusal.TARGET_EXISTS, f"target {dev} already exists")
        reply = await call.forward()
    await call.respond(reply)


async def _has_ours(call: Call, args: DomainCall, dev: str) -> bool:
    """Whether a side that the call is for has a disk of ours with this target dev.

    No, where nobody can know: libvirtd's answer to the call itself says why.
    """
    admin = await admin_if_ours(call, args.dom)
    if admin is None:
        return False
    try:
        both = await sides(admin, args.dom, args.flags)
        texts = (both.live if both.to_live else None, both.config if both.to_config else None)
        plans = await call.services.parse(lambda: [translate.plan(text or "") for text in texts])
    except (GatewayError, TranslateError):
        return False
    return any(lun.dev == dev for plan in plans if plan is not None for lun in plan.luns)


async def detach(call: Call) -> None:
    """DETACH_DEVICE and DETACH_DEVICE_FLAGS."""
    args = _arguments(call)
    if "<disk" not in args.text:
        await call.pass_on()
        return
    services = call.services

    def compute(xml: str, live: bool) -> Change | None:
        at = services.target.at_home(services.settings, xml)
        return translate.detach(xml, args.text, at, live=live)

    await _detach(call, args, compute)


async def detach_alias(call: Call) -> None:
    """DETACH_DEVICE_ALIAS."""
    args = _arguments(call)
    if args.text == CARRIER_ALIAS:
        raise carries(args.dom)
    services = call.services

    def compute(xml: str, live: bool) -> Change | None:
        at = services.target.at_home(services.settings, xml)
        return translate.detach_alias(xml, args.text, at, live=live)

    await _detach(call, args, compute)


async def _detach(call: Call, args: DomainCall, compute: Compute) -> None:
    services = call.services
    controller = controller_name(args.dom.uuid_text)

    async def remove(change: Change) -> None:
        lun = change.lun
        limited = lun.bdev_name if lun.limits != NONE else None
        await services.target.remove(lun.address(controller), limited)
        if lun.histograms and not lun.shareable:
            with suppress(GatewayError):  # the disk is gone; that its volume counts hurts nobody
                await services.target.count(lun.bdev_name, controller, counted=False)

    async def check(change: Change) -> None:
        services.block_jobs.check_free(args.dom, change.lun)
        await services.target.ping(controller)

    # Asked first, so that a target that is down fails the call before anything changes.
    altered = await alter(call, args, "detach", compute, before=check, after=remove)
    if altered is None:
        await call.pass_on()
        return
    live = altered.change
    if live is not None and live.device_xml is None:  # of a device libvirtd tells itself
        services.announce(DeviceChange(DeviceEvent.REMOVED, altered.dom, live.alias))
        _log.info("detached", domain=altered.dom.name, dev=live.lun.dev)
    await call.answer()


async def update(call: Call) -> None:
    """UPDATE_DEVICE_FLAGS: the guest's disk stays as it is; at most it is counted anew."""
    args = _arguments(call)
    if "<disk" not in args.text:
        await call.pass_on()
        return
    services, settings = call.services, call.services.settings
    judged = translate.may_be_ours(args.text, settings)
    reference = None
    if judged:
        await check_may_change(await call.caller.own(), args.dom, args.flags)
        if not await call.parse(lambda: translate.may_be_far(args.text, settings), args.text):
            recognise = partial(translate.recognise, args.text, settings)
            reference = await call.parse(recognise, args.text)
    uuids: dict[str, str] = {}
    if reference is not None:
        uuids = await services.target.uuids([reference.alias])

    def compute(xml: str, live: bool) -> Change | None:
        at = services.target.at_home(settings, xml)
        return translate.update(xml, args.text, at, live=live, uuids=uuids)

    async def count(change: Change) -> None:
        if change.lun.histograms and not change.lun.shareable:
            controller = controller_name(args.dom.uuid_text)
            await services.target.count(change.lun.bdev_name, controller, counted=True)

    altered = await alter(call, args, "update", compute, judged=judged, after=count)
    if altered is None:
        await call.pass_on()
    else:
        await call.answer()
