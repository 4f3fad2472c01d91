"""Devices that virtio-blk disks are: libvirtd plugs them, under the client's own identity."""

from __future__ import annotations

import structlog

from plugin.gateway.errors import Refused, UpstreamError
from plugin.gateway.messages import Domain
from plugin.gateway.upstream import Upstream
from pydataplane.domain import translate
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import Change

_log = structlog.get_logger(__name__)

NO_SLOT = "No more available PCI slots"
"""In libvirtd's words."""
RESTARTED = "requires shared memory"
"""The same: after its own restart it does not know any more that a running domain without <numa>
has it (libvirt 9.0's virQEMUCapsGetMachineDefaultRAMid: that is kept of no running domain)."""


async def plug(own: Upstream, dom: Domain, change: Change) -> None:
    """Has libvirtd attach the device that a virtio-blk disk is.

    Raises:
        UpstreamError: libvirtd's own refusal.
        Refused: the same, where it says too little.
    """
    assert change.device_xml is not None
    try:
        await own.attach(dom, change.device_xml)
    except UpstreamError as error:
        if RESTARTED in str(error):
            raise Refused(
                Refusal.NOT_POSSIBLE_NOW,
                f"disk {change.lun.dev}: libvirtd was restarted while {dom.name} ran, and plugs no"
                " vhost-user device into it until it is started again: attach the disk with"
                " bus='scsi' (a target like sda), or with --config only; a domain with"
                " <cell memAccess='shared'> in <numa> takes it also then",
            ) from error
        if NO_SLOT not in str(error):
            raise
        raise Refused(
            Refusal.NOT_POSSIBLE_NOW,
            f"disk {change.lun.dev}: {NO_SLOT}, and a virtio-blk disk takes one: define the domain"
            " with one more <controller type='pci' model='pcie-root-port'/> for its next start, or"
            " attach the disk with bus='scsi' (a target like sda)",
        ) from error


async def let_go(own: Upstream, dom: Domain, live: Change) -> bool:
    """Has a guest let the device go that a disk is, if it is one; False if it has it still.

    What is left of it then goes with the reconcile loop, once libvirtd says that it has.
    """
    if live.device_xml is None:
        return True
    await own.detach(dom, live.device_xml)
    there = translate.plan(await own.xml(dom, 0))
    if there is None or all(lun.dev != live.lun.dev for lun in there.luns):
        return True
    _log.warning("a guest has not let a disk go yet", domain=dom.name, dev=live.lun.dev)
    return False
