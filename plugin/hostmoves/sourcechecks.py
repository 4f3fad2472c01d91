"""May a volume leave for another host, and which domain has it."""

from __future__ import annotations

from dataclasses import dataclass

from plugin.hostmoves import movesnapshots
from plugin.hostmoves.handover import LeavingDomain
from plugin.hostmoves.remote import Remote
from plugin.hostmoves.wire import Message, identity
from plugin.moves import moverequest, notes
from plugin.moves.naming import Domains
from pydataplane.domain.names import CONTROLLER_PREFIX, domain_of
from pydataplane.errors import VolumeError
from pydataplane.lvols import Volume
from pydataplane.volumes import Volumes

ROOM_BYTES = 1 << 30
"""What is to be left in an lvstore for what a guest writes while a volume of more is sent."""
NOVA = "http://openstack.org/xmlns/libvirt/nova/"
"""What the names of Nova's metadata in a domain's definition are of."""


@dataclass(frozen=True)
class HostMove:
    """What is asked for."""

    to: str | None = None
    """LVSTORE or LVSTORE/NAME there; None: what it is called here."""
    key: str | None = None
    """The key there; None: that of the same name, if it has one here."""
    shutdown: bool = False
    with_vm: bool = False
    keep: bool = False


def check(
    volumes: Volumes, domains: Domains | None, source: Volume, wanted: HostMove
) -> LeavingDomain | None:
    """Returns the domain that uses a volume, or that is to go along; None: there is none.

    Raises:
        VolumeError: the volume cannot move, or not so; libvirt's: nobody knows.
    """
    if volumes.lvstore(source.lvstore).is_pool:
        raise VolumeError(f"{source.path} is of a pool: send it by `rbd export-diff`")
    moverequest.check_movable(volumes, source, to_host=True)
    movesnapshots.check_name(source.name)
    if source.dif_type is not None:
        raise VolumeError(
            f"volume {source.path} keeps protection information, which no stream has: copy it"
            " within a guest"
        )
    notes.check_target(volumes.client, source.uuid)
    user = _user(volumes, source)
    if user is not None and not wanted.shutdown:
        raise VolumeError(
            f"volume {source.path} is in use by VM {user}: shut that down, or add --shutdown, which"
            " does it when little is left to be sent"
        )
    if user is not None:
        _check_room(volumes, source)
    if domains is None:
        if user is not None or wanted.with_vm:
            raise VolumeError(
                f"no gateway answers, which knows the VM of volume {source.path}: start"
                " virtlun-gateway"
            )
        return None
    domains.check_none_saved(source.path)
    _check_not_novas(domains, source)
    return _domain(domains, source, user, wanted)


def _check_not_novas(domains: Domains, source: Volume) -> None:
    for handle, xml in domains.defined(source.path):
        if NOVA in xml:
            raise VolumeError(
                f"domain {handle.name()}, which has volume {source.path}, is Nova's, which knows"
                " on which host both are: move it by `openstack server migrate`"
            )


def _check_room(volumes: Volumes, source: Volume) -> None:
    """Refuses a volume in use whose guest could soon write no more, for a snapshot of the move."""
    store = volumes.lvstore(source.lvstore)
    room = min(source.allocated, ROOM_BYTES)
    if store.tells_room and store.free < room:
        raise VolumeError(
            f"{store.name} has {store.free} bytes left, and what the VM of volume {source.path}"
            f" writes while that is sent takes some, {room} are to be there: free some, or shut the"
            " VM down before"
        )


def check_another(volumes: Volumes, remote: Remote) -> None:
    """Refuses to move a volume to the target that it is in; `remote` is connected.

    Raises:
        VolumeError: it is that.
    """
    if remote.target and remote.target == identity(volumes.client.path):
        raise VolumeError(
            f"{remote.host}: that is this target: name another host, or move the volume within this"
            " one, without --host"
        )


def needs(volumes: Volumes, source: Volume, domain: LeavingDomain) -> Message:
    """Returns what the other host is to have for a domain, its other volumes with their UUIDs.

    Raises:
        VolumeError: nobody could tell there; or something of it would stay on this host.
    """
    found = domain.needs(source.path)
    here = volumes.some(found["volumes"])
    if gone := [name for name in found["volumes"] if name not in here]:
        raise VolumeError(
            f"domain {domain.name} names {', '.join(gone)}, which is not here, so that nobody knows"
            " whether what is called so on the other host is it: move a domain's other volumes with"
            " --keep, or this one without --with-vm"
        )
    return found | {"volumes": {name: here[name].uuid for name in found["volumes"]}}


def _user(volumes: Volumes, source: Volume) -> str | None:
    """Returns the UUID of the domain that has a volume as a disk; None: nobody uses it."""
    names = sorted({disk.controller for disk in moverequest.disks_on(volumes, source.uuid)})
    listed = ", ".join(names)
    if any(not name.startswith(CONTROLLER_PREFIX) for name in names):
        raise VolumeError(
            f"volume {source.path} is in use by controller {listed}: delete that first"
        )
    users = {domain_of(name) for name in names}
    if len(users) > 1:
        raise VolumeError(
            f"volume {source.path} is in use by several VMs ({listed}): shut all of them down"
        )
    others = volumes.users(source.uuid) if not users else []
    if others:
        raise VolumeError(f"volume {source.path} is in use ({', '.join(others)}): end that first")
    return next(iter(users), None)


def _domain(
    domains: Domains, source: Volume, user: str | None, wanted: HostMove
) -> LeavingDomain | None:
    if user is not None:
        handles = [domains.of_uuid(user)]
        if None in handles:
            raise VolumeError(f"the gateway knows no domain {user}, which uses the volume")
    elif wanted.with_vm:
        handles = [handle for handle, _ in domains.defined(source.path)]
    else:
        return None
    if len(handles) != 1:
        names = ", ".join(sorted(handle.name() for handle in handles)) or "none"
        raise VolumeError(
            f"the domains that name volume {source.path} are {names}, and one can go along: move"
            " the volume without --with-vm"
        )
    domain = LeavingDomain(domains, handles[0])
    if domain.is_running and not wanted.shutdown:
        raise VolumeError(f"domain {domain.name} runs: shut it down, or add --shutdown")
    return domain
