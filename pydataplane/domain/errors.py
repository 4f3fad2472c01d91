"""What the libvirt side refuses, and the libvirt error that each refusal becomes.

PluginError
|-- TranslateError         the XML or the call cannot be honoured; carries a Refusal
|-- ConfigError            virtlun.toml is missing, unreadable or wrong
|-- RecordError            the hook's record of a domain's volumes cannot be read or written
`-- ReconcileError         the target could not be brought to what the domains need
    `-- LunKept            a running domain keeps a LUN that its metadata does not have so

Standard library only: the hook is made of it.

A client of libvirt sees (domain, code, level, message). `LIBVIRT` is the only table of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

VIR_ERR_ERROR_LEVEL = 2
"""libvirt's virErrorLevel VIR_ERR_ERROR."""

VIR_FROM_QEMU = 10
VIR_FROM_STORAGE = 18
VIR_FROM_DOMAIN = 20
"""Values of libvirt's virErrorDomain."""


class Refusal(enum.Enum):
    """Why a call is refused, one member for each libvirt error code that we answer with."""

    BAD_XML = "bad-xml"
    """The disk's XML is malformed or contradicts itself."""
    UNSUPPORTED = "unsupported"
    """The XML asks for something that our disks or this domain cannot do."""
    TARGET_EXISTS = "target-exists"
    """Another disk of the domain has this target dev, volume or serial."""
    NOT_POSSIBLE_NOW = "not-possible-now"
    """Right as such, but not in the domain's present state."""
    DISK_MISSING = "disk-missing"
    """The domain has no such disk."""
    CANNOT_CHANGE = "cannot-change"
    """This field of a disk cannot be changed in place, or the target's program cannot do it."""
    NO_VOLUME = "no-volume"
    """The lvstore has no such volume."""
    NO_STORE = "no-store"
    """The target has no such lvstore."""
    VOLUME_IN_USE = "volume-in-use"
    """Another domain holds the volume and it is not shareable."""
    BAD_ARGUMENT = "bad-argument"
    """A parameter of the call, not of the XML, is out of range."""
    NO_TARGET = "no-target"
    """The target does not run, does not answer or failed."""
    TIMEOUT = "timeout"
    """The target or the guest did not answer in time."""
    DENIED = "denied"
    """The caller may not do this."""
    INTERNAL = "internal"
    """A defect of ours."""


@dataclass(frozen=True, slots=True)
class LibvirtCode:
    """Numbers of virterror.h: who reports, what, how bad."""

    domain: int
    code: int
    level: int = VIR_ERR_ERROR_LEVEL


LIBVIRT: dict[Refusal, LibvirtCode] = {
    Refusal.BAD_XML: LibvirtCode(VIR_FROM_DOMAIN, 27),  # VIR_ERR_XML_ERROR
    Refusal.UNSUPPORTED: LibvirtCode(VIR_FROM_DOMAIN, 67),  # VIR_ERR_CONFIG_UNSUPPORTED
    Refusal.TARGET_EXISTS: LibvirtCode(VIR_FROM_QEMU, 55),  # VIR_ERR_OPERATION_INVALID
    Refusal.NOT_POSSIBLE_NOW: LibvirtCode(VIR_FROM_QEMU, 55),  # VIR_ERR_OPERATION_INVALID
    Refusal.DISK_MISSING: LibvirtCode(VIR_FROM_QEMU, 99),  # VIR_ERR_DEVICE_MISSING
    Refusal.CANNOT_CHANGE: LibvirtCode(VIR_FROM_QEMU, 84),  # VIR_ERR_OPERATION_UNSUPPORTED
    Refusal.NO_VOLUME: LibvirtCode(VIR_FROM_STORAGE, 50),  # VIR_ERR_NO_STORAGE_VOL
    Refusal.NO_STORE: LibvirtCode(VIR_FROM_STORAGE, 49),  # VIR_ERR_NO_STORAGE_POOL
    Refusal.VOLUME_IN_USE: LibvirtCode(VIR_FROM_QEMU, 87),  # VIR_ERR_RESOURCE_BUSY
    Refusal.BAD_ARGUMENT: LibvirtCode(VIR_FROM_QEMU, 8),  # VIR_ERR_INVALID_ARG
    Refusal.NO_TARGET: LibvirtCode(VIR_FROM_QEMU, 9),  # VIR_ERR_OPERATION_FAILED
    Refusal.TIMEOUT: LibvirtCode(VIR_FROM_QEMU, 68),  # VIR_ERR_OPERATION_TIMEOUT
    Refusal.DENIED: LibvirtCode(VIR_FROM_QEMU, 88),  # VIR_ERR_ACCESS_DENIED
    Refusal.INTERNAL: LibvirtCode(VIR_FROM_QEMU, 1),  # VIR_ERR_INTERNAL_ERROR
}


class PluginError(Exception):
    """Base of the errors of this package; the text is one sentence for the person at virsh."""


class TranslateError(PluginError):
    """A domain's or disk's XML cannot be honoured."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        """Keeps why and the sentence that the client sees."""
        super().__init__(message)
        self.refusal = refusal
        self.message = message

    @property
    def libvirt(self) -> LibvirtCode:
        """Returns the numbers that libvirt's own error would carry."""
        return LIBVIRT[self.refusal]


class ConfigError(PluginError):
    """The configuration file is missing, unreadable or wrong; the text names file and key."""


class RecordError(PluginError):
    """The hook's record of a domain's volumes cannot be read or written."""


class ReconcileError(PluginError):
    """The target refused or failed while it was brought to what the domains need."""


class ImageError(PluginError):
    """What a disk is on over the network cannot be opened."""


class ImageServerSilent(ImageError):
    """It cannot, as its cluster or server did not answer in time."""


class LunKept(ReconcileError):
    """A running domain keeps a LUN that its metadata does not have so: nothing has failed."""
