"""A change of one disk on both sides of a domain: computed, written, or rolled back as a whole.

Whatever fails rolls back what was done before it. Before the first step it is entered in the
journal: if the gateway or libvirtd dies in between, plugin.gateway.recovery completes it or rolls
it back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

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
from plugin.gateway.handlers import plugging
from plugin.gateway.journal import Entry, Operation
from plugin.gateway.messages import Domain, DomainCall
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
from pydataplane.domain.limits import Limits
from pydataplane.domain.translate import CARRIER_ALIAS, Change

FORCE = 4
"""VIR_DOMAIN_DEVICE_MODIFY_FORCE: about removable media, of no effect on disks of ours."""

Compute = Callable[[str, bool], Change | None]
"""From one side's XML and whether it is the live one to the change."""


def check_flags(args: DomainCall) -> None:
    """Refuses flags that a change of a disk of ours does not know."""
    unknown = args.flags & ~(AFFECT_LIVE | AFFECT_CONFIG | FORCE)
    if unknown:
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{unknown:x})")


def carries(dom: Domain) -> Refused:
    """Returns why what carries the disks of a domain stays as it is."""
    return Refused(
        Code.OPERATION_DENIED,
        f"{CARRIER_ALIAS} carries the virtlun disks of {dom.name}: detach those instead",
    )


@dataclass(frozen=True)
class Altered:
    """What `_alter` did to the running domain, and the domain as libvirtd knows it."""

    change: Change | None
    dom: Domain


async def alter(
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
        admin = await admin_if_ours(call, args.dom)
        if admin is None:
            return None
        # Whoever may not change the domain is told that, and nothing else about it.
        if not judged:
            await check_may_change(await call.caller.own(), args.dom, args.flags)
        both = await sides(admin, args.dom, args.flags)
        live, config = await changes(call, admin, args, both, compute)
        if live is None and config is None:
            dev = await call.parse(lambda: disk_dev(args.text), args.text)
            carriers = partial(_carriers, both)
            if dev is not None and dev in await call.services.parse(carriers):
                raise carries(args.dom)
            return None
        check_flags(args)
        if live is not None and before is not None:
            await before(live)
        await carry_out(call, args.dom, both, operation, live, config, after)
        dom = running_as(both.live, args.dom) if both.live is not None else args.dom
        return Altered(live, dom)


async def admin_if_ours(call: Call, dom: Domain) -> Upstream | None:
    """Returns the gateway's connection if either side of the domain has metadata of ours.

    With it a domain is read for clients that may change it, which need not be allowed to read it;
    nothing that it says may reach a client before libvirtd has judged that. None as well if the
    domain is not there: libvirtd's answer to the call itself says why.
    """
    try:
        admin = await call.services.admin()
        ours = (await call.services.domain_cache.current(dom)).ours or (
            await admin.persistent(dom) and await admin.metadata(dom, AFFECT_CONFIG) is not None
        )
    except GatewayError:
        return None
    return admin if ours else None


async def changes(
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


async def carry_out(
    call: Call,
    dom: Domain,
    both: Sides,
    operation: Operation,
    live: Change | None,
    config: Change | None,
    act: Callable[[Change], Awaitable[None]] | None,
    limits: Limits | None = None,
) -> None:
    """Writes the changes of metadata and then does `act` on the target, or nothing of it all.

    `limits` are those that the disk has in the target, where `act` changes them.

    A device that a guest does not let go stays in the running domain, as one of libvirt's own.
    """
    services, own = call.services, await call.caller.own()
    admin = await services.admin()
    if live is None:  # one change, which libvirtd makes whole or not at all
        await _write_config(services, own, dom, config)
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
            front=live.lun.front,
            bdev=live.lun.bdev_name,
            to_config=config is not None,
            live=live_before,
            config=config_before,
            config_xml=await admin.xml(dom, XML_INACTIVE | XML_SECURE) if redefine else None,
            limits=limits.given if limits is not None else None,
        )
    )
    try:
        await _write_config(services, own, dom, config)
        if operation != "detach" or await plugging.let_go(own, dom, live):
            await own.set_metadata(dom, live.metadata_xml, AFFECT_LIVE)
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


async def _write_config(
    services: Services, own: Upstream, dom: Domain, config: Change | None
) -> None:
    """Puts the change of the persistent side, if there is one, into libvirtd."""
    if config is None:
        return
    if config.redefine and config.domain_xml is not None:
        await services.redefine(own, dom.uuid, config.domain_xml)
    else:
        await own.set_metadata(dom, config.metadata_xml, AFFECT_CONFIG)
