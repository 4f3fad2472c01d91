"""Checkpoints of domains as clients see them: those of libvirtd's own disks, and those of ours.

A checkpoint is of the one kind or of the other. Those of ours are in the target: see
`lvolcheckpoints`. Each of a domain's is the child of the one that was taken before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from plugin.gateway.lvolcheckpoints import Checkpoint
from plugin.gateway.messages import Domain
from plugin.gateway.services import Services
from plugin.gateway.xdr import Reader, Writer

REDEFINE, QUIESCE, REDEFINE_VALIDATE = 1, 2, 4
"""virDomainCheckpointCreateFlags."""

XML_SECURE, XML_NO_DOMAIN, XML_SIZE = 1, 2, 4
"""virDomainCheckpointXMLFlags."""

ROOTS_OR_DESCENDANTS, TOPOLOGICAL, LEAVES, NO_LEAVES = 1, 2, 4, 8
"""virDomainCheckpointListFlags."""

CHILDREN, METADATA_ONLY, CHILDREN_ONLY = 1, 2, 4
"""virDomainCheckpointDeleteFlags."""

CHECKPOINTS_MAX = 16_384
"""REMOTE_DOMAIN_CHECKPOINT_LIST_MAX."""


@dataclass(frozen=True)
class Named:
    """remote_nonnull_domain_checkpoint."""

    name: str
    dom: Domain

    @staticmethod
    def read(reader: Reader) -> Named:
        """Reads one."""
        return Named(reader.string(), Domain.read(reader))

    def write(self, writer: Writer) -> Writer:
        """Appends it."""
        return self.dom.write(writer.string(self.name))


async def of_domain(services: Services, dom: Domain) -> list[Checkpoint]:
    """Returns the checkpoints of disks of ours that a domain has, oldest first.

    Raises:
        GatewayError: libvirtd or the target does not say.
    """
    luns = (await services.domain_cache.current(dom)).luns
    lvstores = {lun.volume.lvstore for lun in luns if lun.volume.source is None}
    return await services.target.checkpoints(lvstores, dom.uuid_text) if lvstores else []


def position(checkpoints: list[Checkpoint], name: str) -> int | None:
    """Returns where one of this name is, None if there is none."""
    return next((at for at, each in enumerate(checkpoints) if each.name == name), None)


def filtered(checkpoints: list[Checkpoint], flags: int, *, roots: bool) -> list[Checkpoint]:
    """Returns those that a client lists; with `roots` the lowest flag means roots."""
    found = list(checkpoints)
    if roots and flags & ROOTS_OR_DESCENDANTS:
        found = found[:1]
    if flags & LEAVES and not flags & NO_LEAVES:
        found = [each for each in found if each is checkpoints[-1]]
    if flags & NO_LEAVES and not flags & LEAVES:
        found = [each for each in found if each is not checkpoints[-1]]
    return found
