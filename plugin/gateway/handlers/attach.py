"""Attach, detach and update of our disks, live and persistent.

Order of a live attach: libvirtd's permission, the volume, the metadata (live and persistent), the
LUN, the event, the reply. Whatever fails takes back what was done before it. If the gateway itself
dies in between, the metadata is the truth and `reconcile` makes the LUNs follow at its next start.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from plugin import translate
from plugin.errors import Refusal
from plugin.gateway.call import Call
from plugin.gateway.domains import Sides, check_may_change, sides, without_prefixes
from plugin.gateway.errors import Code, GatewayError, Refused
from plugin.gateway.events import DeviceEvent, Happening
from plugin.gateway.handlers.start import check_free
from plugin.gateway.messages import Domain, DomainCall
from plugin.gateway.procs import Proc
from plugin.gateway.upstream import (
    AFFECT_CONFIG,
    AFFECT_LIVE,
    XML_INACTIVE,
    XML_SECURE,
    Upstream,
)
from plugin.translate import CARRIER_ALIAS, Change, controller_name

_log = structlog.get_logger(__name__)

FORCE = 4
"""VIR_DOMAIN_DEVICE_MODIFY_FORCE: about removable media, of no effect on disks of ours."""

_WITHOUT_FLAGS = {Proc.ATTACH_DEVICE, Proc.DETACH_DEVICE}

Compute = Callable[[str, bool], Change | None]
"""From one side's XML and whether it is the live one to the change."""


@dataclass
class Undo:
    """What takes back the steps done so far, last first."""

    steps: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    async def run(self) -> None:
        """Takes everything back; a step that fails is logged, reconcile repairs it later."""
        for step in reversed(self.steps):
            try:
                await step()
            except GatewayError as error:
                _log.error("a failed change could not be taken back", error=str(error))


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
    gateway, settings = call.session.gateway, call.session.gateway.settings
    args = _arguments(call)
    reference = translate.recognise(args.text, settings)
    if reference is None:
        await call.pass_on()
        return
    _check_flags(args)
    own = await call.session.own()
    undo = Undo()
    async with gateway.locks.hold(f"domain:{args.dom.uuid.hex()}"):
        await check_may_change(own, args.dom, args.flags)
        both = await sides(own, args.dom, args.flags)
        volume = await gateway.target.volume(reference.alias)
        uuids = {reference.alias: volume.uuid}

        def compute(xml: str, live: bool) -> Change | None:
            peer = both.config if live else both.live
            return translate.attach(xml, args.text, settings, live=live, peer_xml=peer, uuids=uuids)

        live, config = await _changes(own, args.dom, both, compute)
        async with gateway.locks.hold(f"volume:{volume.uuid}"):
            try:
                if live is not None and live.plan is not None:
                    await check_free(call, live.plan, live.lun, volume)
                await _write(own, args.dom, live, config, undo)
                if live is not None and live.plan is not None:
                    await gateway.target.add(live.plan, live.lun)
            except BaseException:
                await undo.run()
                raise
    if live is not None:
        # Before the answer: whoever waits for it must not depend on this client reading its own.
        gateway.announce(Happening(DeviceEvent.ADDED, both.running(args.dom), live.alias))
        _log.info("attached", domain=args.dom.name, dev=live.lun.dev, volume=reference.alias)
    await call.answer()


async def detach(call: Call) -> None:
    """DETACH_DEVICE and DETACH_DEVICE_FLAGS."""
    args = _arguments(call)
    if "<disk" not in args.text:
        await call.pass_on()
        return
    settings = call.session.gateway.settings
    await _detach(
        call, args, lambda xml, live: translate.detach(xml, args.text, settings, live=live)
    )


async def detach_alias(call: Call) -> None:
    """DETACH_DEVICE_ALIAS."""
    args = _arguments(call)
    if args.text == CARRIER_ALIAS:
        raise Refused(
            Code.OPERATION_DENIED,
            f"{CARRIER_ALIAS} carries the virtlun disks of {args.dom.name}: detach those instead",
        )
    settings = call.session.gateway.settings
    await _detach(
        call, args, lambda xml, live: translate.detach_alias(xml, args.text, settings, live=live)
    )


async def _detach(call: Call, args: DomainCall, compute: Compute) -> None:
    gateway = call.session.gateway
    controller = controller_name(args.dom.uuid_text)

    async def remove(change: Change) -> None:
        await gateway.target.remove(controller, change.lun.target)

    # Asked first, so that a target that is down fails the call before anything changes.
    altered = await _alter(call, args, compute, before=gateway.target.ping, after=remove)
    if altered is None:
        await call.pass_on()
        return
    live = altered.change
    if live is not None:
        gateway.announce(Happening(DeviceEvent.REMOVED, altered.dom, live.alias))
        _log.info("detached", domain=args.dom.name, dev=live.lun.dev)
    await call.answer()


async def update(call: Call) -> None:
    """UPDATE_DEVICE_FLAGS: only metadata changes; the guest's disk stays as it is."""
    args = _arguments(call)
    if "<disk" not in args.text:
        await call.pass_on()
        return
    gateway, settings = call.session.gateway, call.session.gateway.settings
    reference = translate.recognise(args.text, settings)
    uuids: dict[str, str] = {}
    if reference is not None:
        await check_may_change(await call.session.own(), args.dom, args.flags)
        uuids = await gateway.target.uuids([reference.alias])
    altered = await _alter(
        call,
        args,
        lambda xml, live: translate.update(xml, args.text, settings, live=live, uuids=uuids),
    )
    if altered is None:
        await call.pass_on()
    else:
        await call.answer()


@dataclass(frozen=True)
class Altered:
    """What `_alter` did to the running domain, and the domain with its present id."""

    change: Change | None
    dom: Domain


async def _alter(
    call: Call,
    args: DomainCall,
    compute: Compute,
    *,
    before: Callable[[], Awaitable[None]] | None = None,
    after: Callable[[Change], Awaitable[None]] | None = None,
) -> Altered | None:
    """Changes a disk that the domain has; None if it is not ours and libvirtd is to answer.

    `before` and `after` are done for a change of the running domain, around that of its metadata.
    """
    undo = Undo()
    async with call.session.gateway.locks.hold(f"domain:{args.dom.uuid.hex()}"):
        own = await _own_if_ours(call, args.dom)
        if own is None:
            return None
        both = await sides(own, args.dom, args.flags)
        live, config = await _changes(own, args.dom, both, compute)
        if live is None and config is None:
            return None
        _check_flags(args)
        await check_may_change(own, args.dom, args.flags)
        if live is not None and before is not None:
            await before()
        try:
            await _write(own, args.dom, live, config, undo)
            if live is not None and after is not None:
                await after(live)
        except BaseException:
            await undo.run()
            raise
        return Altered(live, both.running(args.dom))


async def _own_if_ours(call: Call, dom: Domain) -> Upstream | None:
    """Returns the connection for our calls if either side of the domain has metadata of ours.

    None as well if the client may not know: libvirtd's answer to the call itself says why.
    """
    try:
        own = await call.session.own()
        ours = await own.metadata(dom, 0) is not None or (
            await own.persistent(dom) and await own.metadata(dom, AFFECT_CONFIG) is not None
        )
    except GatewayError:
        return None
    return own if ours else None


async def _changes(
    own: Upstream, dom: Domain, both: Sides, compute: Compute
) -> tuple[Change | None, Change | None]:
    """Computes the change of each side the call is for; both have it or neither.

    Raises:
        Refused: the disk is ours on one of the two sides only.
    """
    live = compute(both.live, True) if both.to_live and both.live is not None else None
    config = None
    if both.to_config and both.config is not None:
        config = compute(both.config, False)
        if config is not None and config.redefine:
            # Passwords are left out of plain XML, and a definition made from it would lose them.
            config = compute(await own.xml(dom, XML_INACTIVE | XML_SECURE), False)
    if both.to_live and both.to_config and (live is None) != (config is None):
        there, lacking = ("running domain", "persistent definition")
        if live is None:
            there, lacking = lacking, there
        raise Refused(
            Refusal.DISK_MISSING,
            f"the disk is in the {there} of {dom.name} but not in its {lacking}: "
            "name only the one that has it (--live or --config)",
        )
    return live, config


async def _write(
    own: Upstream, dom: Domain, live: Change | None, config: Change | None, undo: Undo
) -> None:
    """Puts the changes into libvirtd, the persistent side first; `undo` learns the way back."""
    if config is not None:
        before = await own.metadata(dom, AFFECT_CONFIG)
        if config.redefine and config.domain_xml is not None:
            old = await own.xml(dom, XML_INACTIVE | XML_SECURE)

            async def define_old() -> None:
                await own.define(old)

            await own.define(config.domain_xml)
            undo.steps.append(define_old)
        else:
            await own.set_metadata(dom, config.metadata_xml, AFFECT_CONFIG)
            undo.steps.append(_restore(own, dom, before, AFFECT_CONFIG))
    if live is not None:
        before = await own.metadata(dom, AFFECT_LIVE)
        await own.set_metadata(dom, live.metadata_xml, AFFECT_LIVE)
        undo.steps.append(_restore(own, dom, before, AFFECT_LIVE))


def _restore(
    own: Upstream, dom: Domain, before: str | None, flags: int
) -> Callable[[], Awaitable[None]]:
    async def step() -> None:
        await own.set_metadata(dom, without_prefixes(before) if before else None, flags)

    return step
