"""The limits of a disk's volume in a target: set before its guest sees it, gone when it goes.

They are of the bdev, so that whatever uses the volume next would have them, too. Which of them a
disk has brought along, an xattr of the volume says, and with the disk those go; what somebody has
limited by hand stays. If that is cut off, the next disk of this volume has it done.

A target that is SPDK's own has four limits of these 19, and no xattrs: there a bdev's limits end
with its disk, whoever has set them. Once there, it changes them only while a VM uses the bdev: they
are taken away before a disk is, and those of a VM that has ended stay.

Standard library only: the hook is made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from pydataplane.domain.errors import ReconcileError
from pydataplane.domain.limits import NONE, Limits, limits_of
from pydataplane.domain.model import LunPlan
from pydataplane.domain.observed import State, bdev_of, look_up, observe
from pydataplane.errors import AGAIN, METHOD_NOT_FOUND, NO_DATA, NO_DEVICE, RpcError
from pydataplane.methods import Rpc

XATTR = "virtlun.limits"
"""Of a volume whose limits a disk has brought along: the name of its domain's controller."""

MIB = 1 << 20
SPDK_IOPS = 1000
"""SPDK rounds up what is no multiple of this."""
SPDK_RATES = {
    "rw_ios_per_sec": ("total_iops_sec", 1),
    "rw_mbytes_per_sec": ("total_bytes_sec", MIB),
    "r_mbytes_per_sec": ("read_bytes_sec", MIB),
    "w_mbytes_per_sec": ("write_bytes_sec", MIB),
}
"""SPDK's words: which limit each is, and in what unit."""


def bring(rpc: Rpc, controller: str, lun: LunPlan, state: State) -> None:
    """Gives a volume the limits of a disk that is to be shown; safe to repeat.

    Without any it takes away what an earlier disk has left. Of a volume that another domain has
    nothing is changed.

    Args:
        rpc: the target.
        controller: the domain's.
        lun: the disk.
        state: of the target, as far as it is known.

    Raises:
        ReconcileError: the target has no such limits.
        TargetError: it refuses, or does not answer.
    """
    of_lun = bdev_of(lun, state)
    bdev = of_lun.name
    if state.has_elsewhere(bdev, controller):
        return
    if lun.limits == NONE:
        if of_lun.limited is False:
            return
        with suppress(RpcError):  # whoever shows the disk is told what there is to tell
            if _owner(rpc, bdev):
                _take(rpc, bdev)
        return
    tune(rpc, bdev, controller, lun.limits)


def tune(rpc: Rpc, bdev: str, controller: str | None, limits: Limits) -> None:
    """Gives a volume these limits, which go with the disk of this controller's domain.

    None: they are of no disk. Raises as `bring`.
    """
    owner = _owner(rpc, bdev)
    if controller is not None and limits != NONE and owner not in (controller, None):
        rpc.call("virtlun_lvol_set_xattr", name=bdev, xattr_name=XATTR, xattr_value=controller)
    put(rpc, bdev, limits)
    if owner and (controller is None or limits == NONE):
        _unmark(rpc, bdev)


def by_hand(rpc: Rpc, bdev: str, limits: Limits, state: State) -> None:
    """Gives a volume limits that are of no disk, but where a disk that it has now has brought some.

    Those stay the disk's, and go with it. Raises as `bring`.
    """
    owner = _owner(rpc, bdev)
    if owner and bdev in state.bdevs_of(state.of_domain(owner)):
        put(rpc, bdev, limits)
    else:
        tune(rpc, bdev, None, limits)


def carry(rpc: Rpc, source: str, destination: str, controller: str) -> None:
    """Gives the volume that a disk is to go on with what the disk has limited; safe to repeat.

    Raises as `bring`.
    """
    try:
        of_disk = _owner(rpc, source) in (controller, None)
        limits = found(rpc, source) if of_disk else NONE
    except RpcError as error:
        if error.code != NO_DEVICE:
            raise
        return
    if limits != NONE:
        tune(rpc, destination, controller, limits)


def gone(rpc: Rpc, bdevs: Iterable[str], controller: str, state: State) -> None:
    """Takes away what disks of this controller's domain have brought along; safe to repeat.

    Not of a volume that another domain has, as `state` says. Of one that cannot be asked, as its
    key is not there, the next disk has it done.

    Raises:
        RpcError: the target refuses it for one of them; it is done for the others.
        TargetError: it does not answer.
    """
    refused: RpcError | None = None
    for bdev in bdevs:
        if state.has_elsewhere(bdev, controller):
            continue
        try:
            owner = _owner(rpc, bdev)
        except RpcError:
            continue
        try:
            if owner in (controller, None):
                _take(rpc, bdev)
        except RpcError as error:
            if error.code not in (NO_DEVICE, AGAIN):
                refused = error
    if refused is not None:
        raise refused


def gone_before(rpc: Rpc, bdev: str, controller: str) -> None:
    """Does what `gone` does, while the disk is there still: SPDK's target cannot afterwards.

    With another target nothing is done. Raises as `gone`.
    """
    try:
        is_spdks = _owner(rpc, bdev) is None
    except RpcError:
        return
    if is_spdks:
        gone(rpc, [bdev], controller, observe(rpc))


def found(rpc: Rpc, bdev: str) -> Limits:
    """Returns the limits that a volume has.

    Raises:
        TargetError: the target refuses, or does not answer.
    """
    try:
        return limits_of(rpc.call("virtlun_bdev_get_limits", name=bdev))
    except RpcError as error:
        if error.code != METHOD_NOT_FOUND:
            raise
    return _found_in_spdk(rpc, bdev)


def _found_in_spdk(rpc: Rpc, bdev: str) -> Limits:
    rates: Mapping[str, object] = rpc.call("bdev_get_bdevs", name=bdev)[0]["assigned_rate_limits"]
    return limits_of(
        {
            to: value * unit
            for name, (to, unit) in SPDK_RATES.items()
            if isinstance(value := rates.get(name), int)
        }
    )


def put(rpc: Rpc, bdev: str, limits: Limits) -> None:
    """Gives a volume exactly these limits, whoever had set others. Raises as `bring`."""
    try:
        rpc.call("virtlun_bdev_set_limits", name=bdev, **limits.given)
    except RpcError as error:
        if error.code != METHOD_NOT_FOUND:
            raise
    else:
        return
    _put_in_spdk(rpc, bdev, limits)


def _put_in_spdk(rpc: Rpc, bdev: str, limits: Limits) -> None:
    values: dict[str, Any] = {}
    rest = limits.given
    for name, (of, unit) in SPDK_RATES.items():
        values[name], odd = divmod(rest.pop(of, 0), unit)
        if odd:
            raise ReconcileError(
                f"{of} {getattr(limits, of)}: this target, which is SPDK's, limits whole MiB a"
                f" second: use a multiple of {MIB}"
            )
    if rest:
        raise ReconcileError(
            f"{', '.join(rest)}: this target, which is SPDK's or an older one, has no such limit:"
            " leave it out; total_iops_sec, total_bytes_sec, read_bytes_sec and write_bytes_sec"
            " are possible"
        )
    if values["rw_ios_per_sec"] % SPDK_IOPS:
        raise ReconcileError(
            f"total_iops_sec {limits.total_iops_sec}: this target, which is SPDK's, would round"
            f" that up: use a multiple of {SPDK_IOPS}"
        )
    if _found_in_spdk(rpc, bdev) == limits:
        return  # which it may not be able to set again
    try:
        rpc.call("bdev_set_qos_limit", name=bdev, **values)
    except RpcError as error:
        if error.code == AGAIN:
            raise RpcError(
                AGAIN,
                "the volume has I/O limits, which SPDK's target changes only while a VM uses it:"
                " start the VM without <iotune>, then use `virsh blkdeviotune`",
                error.method,
            ) from error
        if error.code != METHOD_NOT_FOUND:
            raise
        if limits == NONE:
            return  # what cannot be limited is not
        raise ReconcileError(
            "this target has no I/O limits: use a newer one (`virtlun target upgrade`), or remove"
            " <iotune>"
        ) from error


def _owner(rpc: Rpc, bdev: str) -> str | None:
    """Returns whose limits a volume has: a controller's, or nobody's (an empty string).

    None: the target has no way to tell, or it is no volume, but an image: its limits go with it.
    """
    try:
        return rpc.call("virtlun_lvol_get_xattrs", name=bdev).get(XATTR, "")
    except RpcError as error:
        is_image = error.code == NO_DEVICE and look_up(rpc, bdev) is not None
        if error.code != METHOD_NOT_FOUND and not is_image:
            raise
        return None


def _take(rpc: Rpc, bdev: str) -> None:
    """Takes all limits from a volume, and then the note whose they were."""
    if found(rpc, bdev) != NONE:
        put(rpc, bdev, NONE)
    _unmark(rpc, bdev)


def _unmark(rpc: Rpc, bdev: str) -> None:
    try:
        rpc.call("virtlun_lvol_remove_xattr", name=bdev, xattr_name=XATTR)
    except RpcError as error:
        if error.code not in (NO_DATA, METHOD_NOT_FOUND):
            raise
