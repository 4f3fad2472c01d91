"""Names that libvirt, the target and we agree on. Imports nothing: the hook begins with it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from uuid import UUID

NAMESPACE = "https://virtlun.dev/xmlns/domain/1"
"""Namespace of our element in a domain's <metadata>."""
PREFIX = "virtlun"
"""Prefix (libvirt: key) that goes with NAMESPACE."""
SNAPSHOT_NAMESPACE = "https://virtlun.dev/xmlns/snapshot/1"
"""Namespace of our element in the metadata of a domain inside a snapshot."""
SNAPSHOT_PREFIX = "virtlun-snapshot"
"""Prefix that goes with it."""
NETWORK_NAMESPACE = "https://virtlun.dev/xmlns/network/1"
"""Namespace of the element by which a domain says which of its disks over the network are ours. It
is the client's: libvirt keeps one element of a namespace, so it has one of its own."""
QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"
"""libvirt's namespace of <qemu:override> and <qemu:commandline>."""
CARRIER_ALIAS = "ua-virtlun-scsi0"
"""Alias of the vhostuser disk that stands for our controller; QEMU's device id."""
CONTROLLER_PREFIX = "vm-"
"""Controllers whose name begins so are of domains; others are never touched."""
JOURNAL_VERSION = 1
"""Of the entries of the gateway's journal, which the hook looks at, too."""
MAX_TARGETS = 255
"""SCSI targets of one controller, numbers 0..254 (QEMU: max_target 255, the last never scanned)."""
MAX_SOCKET_PATH_BYTES = 107
"""sockaddr_un.sun_path without its NUL."""


def controller_name(domain: UUID | str) -> str:
    """Returns the name of a domain's controller; `domain` is its UUID, as text in small letters."""
    return f"{CONTROLLER_PREFIX}{domain}"


def blk_controller_name(controller: str, number: int) -> str:
    """Returns the name of the controller of a virtio-blk disk; `controller` is the domain's."""
    return f"{controller}.{number}"


def domain_controller(name: str) -> str:
    """Returns the name of the domain's own controller, of that or of one of its disks'."""
    return name.partition(".")[0]


def domain_of(name: str) -> str:
    """Returns the UUID, as text, of the domain that a controller's name is made of."""
    return domain_controller(name).removeprefix(CONTROLLER_PREFIX)
