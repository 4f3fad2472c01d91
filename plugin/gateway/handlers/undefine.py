"""UNDEFINE: a domain's checkpoints of disks of ours go with it, if its client says so.

As libvirt does it for its own: a domain that is off and has some is not undefined without
VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA; with it they are checkpoints no longer, and the lvol
snapshots stay. Those of a domain that runs stay as they are: it goes on as a transient one.
"""

from __future__ import annotations

import structlog

from plugin.gateway import domcheckpoints, domsnapshots, polkit, snapshotsteps
from plugin.gateway.call import Call, Reply
from plugin.gateway.errors import Code, GatewayError, Refused
from plugin.gateway.handlers.snapshots import has_controller
from plugin.gateway.journal import SnapshotEntry
from plugin.gateway.lvolcheckpoints import Checkpoint
from plugin.gateway.messages import Domain, DomainCall
from plugin.gateway.procs import Proc
from plugin.gateway.recovery import recover

SNAPSHOTS_METADATA, CHECKPOINTS_METADATA = 2, 16
"""Of virDomainUndefineFlagsValues."""

_log = structlog.get_logger(__name__)


async def undefine(call: Call) -> None:
    """UNDEFINE: {dom}, and UNDEFINE_FLAGS: {dom, flags}."""
    args = DomainCall.read(call.payload, flags=call.header.procedure == Proc.UNDEFINE_FLAGS)
    if not await has_controller(call, args.dom):
        await call.pass_on()
        return
    async with call.services.domain_lock(args.dom.uuid):
        reply = await _undefine(call, args.dom, args.flags)
    await call.respond(reply)


async def _undefine(call: Call, dom: Domain, flags: int) -> Reply:
    """Undefines a domain whose lock is held; returns libvirtd's reply.

    Raises:
        GatewayError: it has checkpoints, and is not to lose them, or none can be told of.
    """
    admin = await call.services.admin()
    if await admin.active(dom):
        return await call.forward()
    known = await _checkpoints(call, dom, flags)
    if known and flags & CHECKPOINTS_METADATA:
        return await _with_checkpoints(call, dom, known)
    if known and (
        # Else libvirtd refuses it, for what it looks at before.
        await call.caller.may((polkit.DELETE,), dom.name, dom.uuid_text)
        and (flags & SNAPSHOTS_METADATA or not await domsnapshots.count(admin, dom))
    ):
        raise Refused(
            Code.OPERATION_INVALID, f"cannot delete inactive domain with {len(known)} checkpoints"
        )
    return await call.forward()


async def _checkpoints(call: Call, dom: Domain, flags: int) -> list[Checkpoint]:
    """Returns the domain's; without the flag none where no target says which there are.

    A target that is away is no reason to keep a definition: what it has lasts without one.
    """
    try:
        return await domcheckpoints.of_domain(call.services, dom)
    except GatewayError as error:
        if flags & CHECKPOINTS_METADATA:
            raise
        _log.warning("undefined without a look at checkpoints", domain=dom.name, error=str(error))
        return []


async def _with_checkpoints(call: Call, dom: Domain, known: list[Checkpoint]) -> Reply:
    """Undefines it first, for libvirtd may refuse that; then there are no checkpoints any more."""
    services = call.services
    held = tuple(each for checkpoint in known for each in checkpoint.held)
    entry = SnapshotEntry(
        operation="undefine", uuid=dom.uuid_text, name=dom.name, snapshot="", held=held
    )
    stored = services.journal.append(entry)
    try:
        reply = await call.forward()
    except BaseException:
        await recover(services, stored)
        raise
    try:
        if reply.ok:
            await snapshotsteps.forget_checkpoints(services, held)
    except GatewayError as error:
        services.journal.pending.append(stored)
        _log.warning("checkpoints stay until the target answers", domain=dom.name, error=str(error))
    else:
        services.journal.remove(stored)
    return reply
