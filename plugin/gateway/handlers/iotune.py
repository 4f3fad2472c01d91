"""Limits of our disks' I/O: shown, and changed live and in the persistent definition.

The target has those of a running domain; what an <iotune> says of a disk that is plugged or of a
domain that starts is pydataplane.domain.limiting's.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from plugin.gateway import domaincache
from plugin.gateway.call import Call, Reply
from plugin.gateway.domains import Sides, check_may_change, running_as, sides
from plugin.gateway.errors import Code, Refused
from plugin.gateway.events import TunableEvent
from plugin.gateway.handlers.altering import admin_if_ours, carry_out, changes
from plugin.gateway.handlers.block import check_shown, named, seen
from plugin.gateway.messages import (
    STRING,
    ULLONG,
    DomainCall,
    TuneCall,
    TuneQuery,
    TypedParam,
    pack_params,
)
from plugin.gateway.upstream import AFFECT_CONFIG, AFFECT_LIVE, XML_INACTIVE, Upstream
from plugin.gateway.xdr import Writer
from pydataplane.domain import translate
from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.limits import (
    MAX,
    NAMES,
    NONE,
    RATES,
    Limits,
    contradiction,
    doubled,
    limits_of,
    merged,
)
from pydataplane.domain.translate import Change, LunPlan, controller_name

_log = structlog.get_logger(__name__)

GROUP = "group_name"
_GROUP_TEXT = "each volume has limits of its own, and no group: set them without one"


async def get(call: Call) -> None:
    """GET_BLOCK_IO_TUNE: of a running domain what the target has, else what the definition says."""
    await call.give(await _get(call, TuneQuery.read(call.payload)))


async def _get(call: Call, args: TuneQuery) -> Reply | bytes:
    """Returns the result, or libvirtd's reply where that is the answer."""
    services = call.services
    domain = await seen(call, args.dom)
    to_config = bool(args.flags & AFFECT_CONFIG)
    if not args.disk or not (domain.ours or to_config):
        return await call.forward()
    # How many parameters it has libvirtd tells of any disk, if its client may ask it of the domain.
    judged = await call.forward(TuneQuery(args.dom, args.disk, 0, args.flags).pack())
    if not judged.ok:
        return judged
    if to_config and domain.running:
        xml = await (await services.admin()).xml(args.dom, XML_INACTIVE)
        domain = await services.parse(lambda: domaincache.read(xml))
    lun = named(call, domain, args.disk)
    if lun is None:
        return await call.forward()
    limits = lun.limits
    if domain.running:
        limits = await services.target.limits(lun.bdev_name)
    params = [TypedParam(name, ULLONG, value) for name, value in limits.all.items()]
    shown = params[: max(0, args.count)]
    return pack_params(shown) + bytes(Writer().i32(len(shown) if args.count else len(params)))


async def set_(call: Call) -> None:
    """SET_BLOCK_IO_TUNE: what is not named stays as libvirt's QEMU driver has it stay."""
    args = TuneCall.read(call.payload)
    async with call.services.domain_lock(args.dom.uuid):
        reply = await _set(call, args)
    await call.give(reply)


async def _set(call: Call, args: TuneCall) -> Reply | None:
    """Changes a disk of ours; returns libvirtd's reply where that is the answer."""
    services = call.services
    admin = await admin_if_ours(call, args.dom)
    if admin is None:
        return await call.forward()
    await check_may_change(await call.caller.own(), args.dom, args.flags)
    both = await sides(admin, args.dom, args.flags)
    live, config = await _luns(call, both, args.disk)
    lun = live or config
    if lun is None:
        named(call, await services.domain_cache.current(args.dom), args.disk)
        return await call.forward()
    wanted = _values(lun, args)
    _check_alone(lun, limits_of(wanted))
    volume = (await check_shown(call, args.dom, live)).uuid if live is not None else None
    await _tune(call, args, admin, both, volume, wanted)
    return None


async def _tune(
    call: Call,
    args: TuneCall,
    admin: Upstream,
    both: Sides,
    volume: str | None,
    wanted: Mapping[str, int],
) -> None:
    """Changes a disk of ours; `volume` is that of the running side, its UUID."""
    services, settings = call.services, call.services.settings
    now = await services.target.limits(volume) if volume is not None else None

    def compute(xml: str, live: bool) -> Change | None:
        lun = translate.find(xml, args.disk, settings)
        if lun is None:
            return None
        limits = merged(lun.limits if now is None or not live else now, wanted)
        _check_alone(lun, limits)
        _check(lun, limits)
        at = services.target.at_home(settings, xml)
        return translate.tuned(xml, args.disk, limits, at, live=live)

    async def act(change: Change) -> None:
        assert volume is not None
        owner = controller_name(args.dom.uuid_text)
        await services.target.tune(volume, owner, change.lun.limits)

    given = DomainCall(args.dom, args.disk, args.flags)
    live, config = await changes(call, admin, given, both, compute)
    await carry_out(call, args.dom, both, "tune", live, config, act, now)
    if live is not None and both.live is not None:
        dom = running_as(both.live, args.dom)
        services.announce(TunableEvent(dom, live.lun.dev, wanted))
        _log.info("limits set", domain=dom.name, dev=live.lun.dev, **live.lun.limits.given)


async def _luns(call: Call, both: Sides, path: str) -> tuple[LunPlan | None, LunPlan | None]:
    """Returns the disk of ours that `path` means on each side that the call is for."""
    settings = call.services.settings
    live, config = both.live if both.to_live else "", both.config if both.to_config else ""

    def work() -> tuple[LunPlan | None, LunPlan | None]:
        return (
            translate.find(live or "", path, settings),
            translate.find(config or "", path, settings),
        )

    return await call.services.parse(work)


def _values(lun: LunPlan, args: TuneCall) -> dict[str, int]:
    """Returns what a call sets, by name; refused in libvirt's words where that cannot be.

    Raises:
        Refused: it is not what virDomainSetBlockIoTune takes, or contradicts itself.
    """
    unknown = args.flags & ~(AFFECT_LIVE | AFFECT_CONFIG)
    if unknown:
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{unknown:x})")
    values: dict[str, int] = {}
    for param in args.params:
        name, wanted = param.field, STRING if param.field == GROUP else ULLONG
        if name == GROUP and param.kind == STRING:
            raise Refused(Refusal.CANNOT_CHANGE, f"disk {lun.dev}: {GROUP}: {_GROUP_TEXT}")
        if name not in (*NAMES, GROUP):
            raise Refused(Code.INVALID_ARG, f"parameter '{name}' not supported")
        if param.kind != wanted:
            raise Refused(Code.INVALID_ARG, f"invalid type of parameter '{name}'")
        if name in values:
            raise Refused(Code.INVALID_ARG, f"parameter '{name}' occurs multiple times")
        values[name] = int(param.value)
        if values[name] > MAX:
            raise Refused(
                Code.ARGUMENT_UNSUPPORTED,
                f"block I/O throttle limit value must be no more than {MAX}",
            )
    wrong = doubled(Limits(**values))
    if wrong is not None:
        raise Refused(Code.INVALID_ARG, wrong)
    return values


def _check_alone(lun: LunPlan, limits: Limits) -> None:
    """Refuses limits of a disk whose volume others share; those that it has by hand are not its."""
    if lun.shareable and limits != NONE:
        raise Refused(
            Refusal.CANNOT_CHANGE,
            f"disk {lun.dev}: limits would be of all the domains that share volume"
            f" {lun.volume.alias}: limit the volume itself (`virtlun volume limits"
            f" {lun.volume.alias}`)",
        )


def _check(lun: LunPlan, limits: Limits) -> None:
    """Refuses what a disk would have after a call, in libvirt's words where it has some.

    Raises:
        TranslateError: UNSUPPORTED.
    """
    values = limits.all
    wrong = contradiction(limits)
    for rate in RATES:
        burst = f"{rate}_max"
        if values[burst] and not values[rate]:
            wrong = f"cannot reset '{rate}' when '{burst}' is set: set both, or both to 0"
    if wrong is not None:
        raise TranslateError(Refusal.UNSUPPORTED, f"disk {lun.dev}: {wrong}")
