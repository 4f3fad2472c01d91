"""Makes the bdevs of a domain's disks over the network: of Ceph, NBD servers, iSCSI targets.

The target keeps them as long as a guest has them, over its own restart and upgrade, with the key or
password that they were made with (in its state directory, which only its user and root can read).
That is passed in the call and nowhere else.

Standard library only: the hook is made of it.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydataplane.domain.errors import ImageError, ImageServerSilent
from pydataplane.domain.model import Allowed, Host, LunPlan, NetworkSource, Plan
from pydataplane.domain.names import domain_of
from pydataplane.domain.observed import look_up, observe
from pydataplane.domain.xml.network import forbidden
from pydataplane.errors import BUSY, EXISTS, NO_DEVICE, TIMED_OUT, RpcError
from pydataplane.methods import Rpc

QEMUS_INITIATOR = "iqn.2008-11.org.linux-kvm:"
"""QEMU's own initiator is called so, with the domain's UUID: arrays may let in that name."""
BLOCK_BYTES = 512
"""Logical block of an image of Ceph; a disk can be shown with larger ones."""


def of_plan(plan: Plan) -> list[LunPlan]:
    """Returns the disks that are on images."""
    return [lun for lun in plan.luns if lun.volume.source is not None]


def is_open(rpc: Rpc, lun: LunPlan) -> bool:
    """Whether the image of a disk is open.

    Raises:
        TargetError: the target refuses or does not answer.
    """
    return look_up(rpc, lun.bdev_name) is not None


def has_image(rpc: Rpc, lun: LunPlan) -> bool:
    """Whether the image of a disk is open, or recorded, so that the target goes on to try that.

    Raises:
        TargetError: the target refuses or does not answer.
    """
    if is_open(rpc, lun):
        return True
    status, own = rpc.call("virtlun_get_status"), f"bdev {lun.bdev_name}"
    waiting = [each["name"] for each in status["waiting"]]
    return own in waiting or any(p.startswith(f"{own} ") for p in status["restore_problems"])


@dataclass(frozen=True)
class LunIdentity:
    """What tells a LUN from another one that gets its number."""

    uuid: str
    """Made of its target's name and its own identification."""
    block_size: int
    """Bytes."""


def identity_of(rpc: Rpc, lun: LunPlan) -> LunIdentity | None:
    """Returns which LUN a disk that is open is on; None: it is on none, or not open.

    Raises:
        TargetError: the target refuses or does not answer.
    """
    try:
        (found,) = rpc.call("bdev_get_bdevs", name=lun.bdev_name)
    except RpcError as error:
        if error.code != NO_DEVICE:
            raise
        return None
    its = found.get("driver_specific", {}).get("iscsi")
    return None if its is None else LunIdentity(its["lun_uuid"], its["lun_block_size"])


def is_lun(lun: LunPlan) -> bool:
    """Whether a disk is named by the number of a LUN, which may be another one's later."""
    return lun.volume.source is not None and lun.volume.source.protocol == "iscsi"


def open_image(
    rpc: Rpc,
    controller: str,
    lun: LunPlan,
    key: str | None,
    expected: LunIdentity | None = None,
    *,
    incoming: bool = False,
) -> bool:
    """Makes the bdev of a disk over the network; False if it is there already, and stays.

    `controller` is the name of its domain's; `key` is the value of the source's secret, of Ceph as
    that writes keys; `expected` is the LUN that it has to be, where a guest has it already;
    `incoming` is as of `Plan`: an image of Ceph is locked only when the guest runs here, and one
    that was opened so for an earlier attempt is opened anew. The caller shows the bdev to a guest
    within a minute, or it goes again.

    Raises:
        ImageError: the image cannot be had; one sentence.
        TargetTimeout, TargetUnavailable: the target does not answer.
    """
    source = lun.volume.source
    assert source is not None
    assert lun.uuid is not None
    if source.protocol == "iscsi" and source.initiator is None:
        source = replace(source, initiator=QEMUS_INITIATOR + domain_of(controller))
    try:
        _OPENERS[source.protocol](rpc, lun.uuid, source, _Way(key, expected, incoming))
    except RpcError as error:
        if error.code == EXISTS and look_up(rpc, lun.uuid) is not None:
            return False
        kind = ImageServerSilent if error.code == TIMED_OUT else ImageError
        raise kind(f"disk {lun.dev} (image {lun.volume.alias}): {error}") from error
    return True


def check_allowed(lun: LunPlan, allowed: Allowed) -> None:
    """Refuses a disk that this host's configuration has not served, whatever its metadata says.

    Raises:
        ImageError: says why.
    """
    assert lun.volume.source is not None
    why = forbidden(lun.volume.source, allowed)
    if why is not None:
        raise ImageError(f"disk {lun.dev} (image {lun.volume.alias}): {why}")


def open_without_secrets(
    rpc: Rpc, plan: Plan, allowed: Allowed, running: bool
) -> dict[LunPlan, ImageError]:
    """Makes the bdevs of a plan's disks over the network, for who cannot ask libvirt for secrets.

    The images of a plan that is `incoming` are left to the other host until the guest runs here.
    Returns why which disks have none: it needs a secret (that it is open for another domain is no
    right to it), or its domain is `running` and nobody
    knows here which LUN it had, or as `open_image`.

    Raises:
        TargetTimeout, TargetUnavailable: the target does not answer.
    """
    failed: dict[LunPlan, ImageError] = {}
    for lun in of_plan(plan):
        source = lun.volume.source
        assert source is not None
        try:
            check_allowed(lun, allowed)
            # What an earlier attempt left for a guest that comes is out of date, perhaps.
            if source.secret is None and (plan.incoming or not is_open(rpc, lun)):
                if running and is_lun(lun) and not has_image(rpc, lun):
                    raise unknown_lun(lun)
                open_image(rpc, plan.controller, lun, None, incoming=plan.incoming)
        except ImageError as error:
            failed[lun] = error
            continue
        if source.secret is not None and not _has_it_open(rpc, plan, lun):
            failed[lun] = ImageError(
                f"disk {lun.dev} (image {lun.volume.alias}): libvirt has the secret that it is"
                " opened with, which virtlun-gateway alone can ask for: start the domain through"
                " that"
            )
    return failed


def _has_it_open(rpc: Rpc, plan: Plan, lun: LunPlan) -> bool:
    """Whether the image of a disk is open, and the plan's domain has it as a disk."""
    if not is_open(rpc, lun):
        return False
    state = observe(rpc)
    return lun.bdev_name in state.bdevs_of(state.of_domain(plan.controller))


def unknown_lun(lun: LunPlan) -> ImageError:
    """Returns why the disk of a running guest is not opened again."""
    return ImageError(
        f"disk {lun.dev} (image {lun.volume.alias}): the target has lost which LUN the guest had,"
        " and its number may be another one's by now: stop the domain, and start it"
    )


def close_image(rpc: Rpc, lun: LunPlan) -> None:
    """Closes the image of a disk that no guest was shown, unless somebody uses it.

    Raises:
        TargetError: the target does not answer; it goes by itself then.
    """
    rpc.call("virtlun_guest_disk_close", name=lun.bdev_name)


@dataclass(frozen=True)
class _Way:
    """How one is opened; see `open_image`."""

    key: str | None = field(repr=False)
    expected: LunIdentity | None
    incoming: bool


def _open_rbd(rpc: Rpc, uuid: str, source: NetworkSource, way: _Way) -> None:
    config = {}
    if source.hosts:
        config["mon_host"] = ",".join(host.text for host in source.hosts)
    if way.key is not None:
        config["key"] = way.key
    rpc.call(
        "bdev_rbd_create",
        name=uuid,
        uuid=uuid,
        user_id=source.user,
        pool_name=source.pool,
        rbd_name=source.image,
        block_size=BLOCK_BYTES,
        config=config,
        config_file=source.config,
        read_only=source.read_only,
        shared=True if source.shared else None,
        incoming=True if way.incoming else None,
        guest_disk=True,
    )


def _open_nbd(rpc: Rpc, uuid: str, source: NetworkSource, way: _Way) -> None:
    assert way.key is None

    def make(uri: str) -> None:
        rpc.call(
            "virtlun_nbd_create",
            name=uuid,
            uuid=uuid,
            uri=uri,
            readonly=source.read_only,
            guest_disk=True,
            shared=True if source.shared else None,
        )

    _at_one_of(nbd_uris(source), make)


def _open_iscsi(rpc: Rpc, uuid: str, source: NetworkSource, way: _Way) -> None:
    assert source.initiator is not None
    initiator, key, expected = source.initiator, way.key, way.expected

    def make(url: str) -> None:
        rpc.call(
            "bdev_iscsi_create",
            name=uuid,
            uuid=uuid,
            url=url,
            initiator_iqn=initiator,
            user=source.user if key is not None else None,
            password=key,
            read_only=True if source.read_only else None,
            guest_disk=True,
            shared=True if source.shared else None,
            lun_uuid=expected.uuid if expected is not None else None,
            lun_block_size=expected.block_size if expected is not None else None,
        )

    (host,) = source.hosts
    hosts = [Host(address, host.port) for address in _addresses("iSCSI target", host.name)]
    _at_one_of([f"iscsi://{each.text}/{source.pool}/{source.image}" for each in hosts], make)


def _at_one_of(addresses: Sequence[str], make: Callable[[str], None]) -> None:
    """Makes a bdev at the first of a server's addresses where it is reached.

    Raises:
        RpcError: at none, or it is in use, or the server refuses.
    """
    *others, last = addresses
    for address in others:
        try:
            make(address)
        except RpcError as error:
            if error.code in (EXISTS, BUSY) or _ANSWERS.search(str(error)):
                raise  # else it is not reached there
        else:
            return
    make(last)


_ANSWERS = re.compile(r"uthenti|uthoriz|LUN [0-9]+ of|another LUN is there")
"""In what is said of a server that was reached, and would say the same at its other addresses."""

_OPENERS: Mapping[str, Callable[[Rpc, str, NetworkSource, _Way], None]] = {
    "rbd": _open_rbd,
    "nbd": _open_nbd,
    "iscsi": _open_iscsi,
}
"""By protocol."""


def nbd_uris(source: NetworkSource) -> list[str]:
    """Returns the URIs of an NBD export: of each of its server's addresses, in order.

    Raises:
        ImageError: nobody knows the name.
    """
    (host,) = source.hosts
    if host.port is None:
        return [f"nbd+unix:///{_quoted(source.image)}?socket={_quoted(host.name)}"]
    hosts = [Host(address, host.port) for address in _addresses("NBD server", host.name)]
    return [f"nbd://{each.text}/{_quoted(source.image)}" for each in hosts]


def _quoted(text: str) -> str:
    """Returns a part of a URI; urllib.parse is slow to import."""
    plain = b"-._~abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    return "".join(chr(byte) if byte in plain else f"%{byte:02X}" for byte in text.encode())


def _addresses(what: str, name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ImageError(f"{what} {name}: {error.strerror or error}") from error
    return list(dict.fromkeys(str(each[4][0]) for each in found))
