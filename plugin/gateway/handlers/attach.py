"""Attach, detach and update of our disks, live and persistent.

Order of a live attach: libvirtd's permission, the volume, the metadata (persistent and live), the
LUN, the event, the reply. Whatever fails rolls back what was done before it. Before the first step
it is entered in the journal: if the gateway or libvirtd dies in between, plugin.gateway.recovery
completes it or rolls it back.

Disks that are libvirtd's own pass, unless they would take the place of one of ours.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import structlog

from plugin.gateway.call import Call
from plugin.gateway.domains import (
    Sides,
    carrier_dev,
    check_may_change,
    disk_dev,
    running_as,
    sides,
)
from plugin.gateway.errors import Code, GatewayError, Refused
from plugin.gateway.events import DeviceChange, DeviceEvent
from plugin.gateway.handlers.start import check_free
from plugin.gateway.journal import Entry, Operation
from plugin.gateway.messages import Domain, DomainCall
from plugin.gateway.procs import Proc
from plugin.gateway.recovery import recover
from plugin.gateway.services import Services
from plugin.gateway.upstream import (
    AFFECT_CONFIG,
    AFFECT_LIVE,
    XML_INACTIVE,
    XML_SECURE,
    Upstream,
)
from pydataplane.domain import translate
from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.translate import CARRIER_ALIAS, Change, controller_name

_log = structlog.get_logger(__name__)

FORCE = 4
"""VIR_DOMAIN_DEVICE_MODIFY_FORCE: about removable media, of no effect on disks of ours."""

_WITHOUT_FLAGS = {Proc.ATTACH_DEVICE, Proc.DETACH_DEVICE}

Compute = Callable[[str, bool], Change | None]
"""From one side's XML and whether it is the live one to the change."""


def _arguments(call: Call) -> DomainCall:
    """Reads the arguments; the calls without flags mean the running domain."""
    if call.header.procedure in _WITHOUT_FLAGS:
        args = DomainCall.read(call.payload, text=True)
        return DomainCall(args.dom, args.text, AFFECT_LIVE)
    return DomainCall.read(call.payload, text=True, flags=True)


def _check_flags(args: DomainCall) -> None:
    unknown = args.flags & ~(AFFECT_LIVE | AFFECT_CONFIG | FORCE)
    if unknown:
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{unknown:x})")


async def attach(call: Call) -> None:
    """ATTACH_DEVICE and ATTACH_DEVICE_FLAGS."""
    services, settings = call.services, call.services.settings
    args = _arguments(call)
    reference = None
    if translate.may_be_ours(args.text, settings):
        # Before anything is parsed: whoever may not attach has nothing to send.
        await check_may_change(await call.caller.own(), args.dom, args.flags)
        reference = await call.parse(lambda: translate.recognise(args.text, settings), args.text)
    if reference is None:
        await _attach_theirs(call, args)
        return
    _check_flags(args)
    async with services.domain_lock(args.dom.uuid):
        admin = await services.admin()  # whoever may change a domain need not be allowed to read it
        both = await sides(admin, args.dom, args.flags, peer=True)
        volume = await services.target.volume(reference.alias)
        uuids = {reference.alias: volume.uuid}

        def compute(xml: str, live: bool) -> Change | None:
            peer = both.config if live else both.live
            at = services.target.at_home(settings, xml)
            return translate.attach(xml, args.text, at, live=live, peer_xml=peer, uuids=uuids)

        live, config = await _changes(call, admin, args, both, compute)
        for change in (live, config):
            if change is not None and change.plan is not None:
                await services.target.check_home(change.plan, change.lun)
        async with services.locks.hold(f"volume:{volume.uuid}"):
            if live is not None and live.plan is not None:
                await check_free(call, live.plan, live.lun, volume)

            async def add(change: Change) -> None:
                if change.plan is not None:
                    await services.target.add(change.plan, change.lun, volume)

            await _carry_out(call, args.dom, both, "attach", live, config, add)
    if live is not None and both.live is not None:
        dom = running_as(both.live, args.dom)
        # Before the answer: whoever waits for it must not depend on this client reading its own.
        services.announce(DeviceChange(DeviceEvent.ADDED, dom, live.alias))
        _log.info("attached", domain=dom.name, dev=live.lun.dev, volume=reference.alias)
    await call.answer()


async def _attach_theirs(call: Call, args: DomainCall) -> None:
    """Lets libvirtd attach a device, but no disk under the target dev of one of ours."""
    if "<disk" not in args.text or await _admin_if_ours(call, args.dom) is None:
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
    admin = await _admin_if_ours(call, args.dom)
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
        raise _carries(args.dom)
    services = call.services

    def compute(xml: str, live: bool) -> Change | None:
        at = services.target.at_home(services.settings, xml)
        return translate.detach_alias(xml, args.text, at, live=live)

    await _detach(call, args, compute)


def _carries(dom: Domain) -> Refused:
    return Refused(
        Code.OPERATION_DENIED,
        f"{CARRIER_ALIAS} carries the virtlun disks of {dom.name}: detach those instead",
    )


async def _detach(call: Call, args: DomainCall, compute: Compute) -> None:
    services = call.services
    controller = controller_name(args.dom.uuid_text)

    async def remove(change: Change) -> None:
        await services.target.remove(controller, change.lun.target)

    async def check(change: Change) -> None:
        services.block_jobs.check_free(args.dom, change.lun)
        await services.target.ping(controller)

    # Asked first, so that a target that is down fails the call before anything changes.
    altered = await _alter(call, args, "detach", compute, before=check, after=remove)
    if altered is None:
        await call.pass_on()
        return
    live = altered.change
    if live is not None:
        services.announce(DeviceChange(DeviceEvent.REMOVED, altered.dom, live.alias))
        _log.info("detached", domain=altered.dom.name, dev=live.lun.dev)
    await call.answer()


async def update(call: Call) -> None:
    """UPDATE_DEVICE_FLAGS: only metadata changes; the guest's disk stays as it is."""
    args = _arguments(call)
    if "<disk" not in args.text:
        await call.pass_on()
        return
    services, settings = call.services, call.services.settings
    judged = translate.may_be_ours(args.text, settings)
    reference = None
    if judged:
        await check_may_change(await call.caller.own(), args.dom, args.flags)
        reference = await call.parse(lambda: translate.recognise(args.text, settings), args.text)
    uuids: dict[str, str] = {}
    if reference is not None:
        uuids = await services.target.uuids([reference.alias])

    def compute(xml: str, live: bool) -> Change | None:
        at = services.target.at_home(settings, xml)
        return translate.update(xml, args.text, at, live=live, uuids=uuids)

    altered = await _alter(call, args, "update", compute, judged=judged)
    if altered is None:
        await call.pass_on()
    else:
        await call.answer()


@dataclass(frozen=True)
class Altered:
    """What `_alter` did to the running domain, and the domain as libvirtd knows it."""

    change: Change | None
    dom: Domain


async def _alter(
    call: Call,
    args: DomainCall,
    operation: Operation,
    compute: Compute,
    *,
    judged: bool = False,
    before: Callable[[Change], Awaitable[None]] | None = None,
    after: Callable[[Change], Awaitable[None]] | None = None,
) -> Altered | None:
    """Changes a disk that the domain has; None if it is not ours and libvirtd is to answer.

    `before` and `after` are done for a change of the running domain, around that of its metadata.
    `judged`: libvirtd has been asked whether the client may change the domain.

    Raises:
        Refused: also where the disk is the carrier of ours: it stays as long as the domain.
    """
    async with call.services.domain_lock(args.dom.uuid):
        admin = await _admin_if_ours(call, args.dom)
        if admin is None:
            return None
        # Whoever may not change the domain is told that, and nothing else about it.
        if not judged:
            await check_may_change(await call.caller.own(), args.dom, args.flags)
        both = await sides(admin, args.dom, args.flags)
        live, config = await _changes(call, admin, args, both, compute)
        if live is None and config is None:
            dev = await call.parse(lambda: disk_dev(args.text), args.text)
            carriers = partial(_carriers, both)
            if dev is not None and dev in await call.services.parse(carriers):
                raise _carries(args.dom)
            return None
        _check_flags(args)
        if live is not None and before is not None:
            await before(live)
        await _carry_out(call, args.dom, both, operation, live, config, after)
        dom = running_as(both.live, args.dom) if both.live is not None else args.dom
        return Altered(live, dom)


async def _admin_if_ours(call: Call, dom: Domain) -> Upstream | None:
    """Returns the gateway's connection if either side of the domain has metadata of ours.

    With it a domain is read for clients that may change it, which need not be allowed to read it;
    nothing that it says may reach a client before libvirtd has judged that. None as well if the
    domain is not there: libvirtd's answer to the call itself says why.
    """
    try:
        admin = await call.services.admin()
        ours = (await call.services.known.current(dom)).ours or (
            await admin.persistent(dom) and await admin.metadata(dom, AFFECT_CONFIG) is not None
        )
    except GatewayError:
        return None
    return admin if ours else None


async def _changes(
    call: Call, admin: Upstream, args: DomainCall, both: Sides, compute: Compute
) -> tuple[Change | None, Change | None]:
    """Computes the change of each side the call is for; both have it or neither.

    Raises:
        Refused: the disk is ours on one of the two sides only.
    """
    live = config = missing = None
    if both.to_live and (xml := both.live) is not None:
        try:
            live = await call.parse(partial(compute, xml, True), args.text)
        except TranslateError as error:
            missing = _if_missing(error)
    if both.to_config and (xml := both.config) is not None:
        try:
            config = await call.parse(partial(compute, xml, False), args.text)
        except TranslateError as error:
            missing = _if_missing(error)
        if config is not None and config.redefine:
            # Passwords are left out of plain XML, and a definition made from it would lose them.
            secure = await admin.xml(args.dom, XML_INACTIVE | XML_SECURE)
            config = await call.parse(partial(compute, secure, False), args.text)
    if both.to_live and both.to_config and (live is None) != (config is None):
        there, lacking = ("running domain", "persistent definition")
        if live is None:
            there, lacking = lacking, there
        raise Refused(
            Refusal.DISK_MISSING,
            f"the disk is in the {there} of {args.dom.name} but not in its {lacking}: "
            "name only the one that has it (--live or --config)",
        )
    if missing is not None:
        raise missing
    return live, config


def _if_missing(error: TranslateError) -> TranslateError:
    """Returns the error that one side has no such disk of ours; raises any other."""
    if error.refusal is not Refusal.DISK_MISSING:
        raise error
    return error


async def _carry_out(
    call: Call,
    dom: Domain,
    both: Sides,
    operation: Operation,
    live: Change | None,
    config: Change | None,
    act: Callable[[Change], Awaitable[None]] | None,
) -> None:
    """Writes the changes of metadata and then does `act` on the target, or nothing of it all."""
    services, own = call.services, await call.caller.own()
    admin = await services.admin()
    if live is None:  # one change, which libvirtd makes whole or not at all
        await _write(services, own, dom, live, config)
        return
    redefine = config is not None and config.redefine
    before = partial(_elements, both.live, both.config if config is not None else None)
    live_before, config_before = await services.parse(before)
    stored = services.journal.append(
        Entry(
            operation=operation,
            uuid=dom.uuid_text,
            name=dom.name,
            dev=live.lun.dev,
            target=live.lun.target,
            bdev=live.lun.bdev_name,
            to_config=config is not None,
            live=live_before,
            config=config_before,
            config_xml=await admin.xml(dom, XML_INACTIVE | XML_SECURE) if redefine else None,
        )
    )
    try:
        await _write(services, own, dom, live, config)
        if act is not None:
            await act(live)
    except BaseException:
        await recover(services, stored, roll_back=True)
        raise
    services.journal.remove(stored)


def _carriers(both: Sides) -> tuple[str | None, str | None]:
    """Returns the target dev of what stands for our controller on each side."""
    return carrier_dev(both.live), carrier_dev(both.config)


def _elements(live: str | None, config: str | None) -> tuple[str | None, str | None]:
    """Returns our metadata element of each side, None where there is none."""
    return translate.element(live or ""), translate.element(config or "")


async def _write(
    services: Services, own: Upstream, dom: Domain, live: Change | None, config: Change | None
) -> None:
    """Puts the changes into libvirtd, the persistent side first."""
    if config is not None:
        if config.redefine and config.domain_xml is not None:
            await services.redefine(own, dom.uuid, config.domain_xml)
        else:
            await own.set_metadata(dom, config.metadata_xml, AFFECT_CONFIG)
    if live is not None:
        await own.set_metadata(dom, live.metadata_xml, AFFECT_LIVE)
