"""Domain XML to plan and back: strings in, strings and dataclasses out.

Pure: no clock, and no I/O but what asks which QEMU a domain has. Three views of one domain:

- the client's: what virsh, Nova or a person wrote; disks of ours are ordinary <disk> elements;
- libvirtd's: our disks are gone from <devices>; they stand, as the client wrote them, in
  <metadata>; one carrier <disk type='vhostuser'> that a <qemu:override> turns into
  vhost-user-scsi-pci, and shared memory, were added;
- the plan: controller, socket and LUNs that the target must have.

`define` goes from the first to the second and the third, `present` from the second back to the
first, `plan` from the second to the third. `attach`, `detach`, `update` and `tuned` change the
second, and `refitted` brings it up to date with this host's QEMU.
`carry` and `carry_blk` are for KubeVirt, where the account of our disks is kept elsewhere.

Callers: plugin.gateway for every call that shows or takes XML, plugin.cli for plans, csi.kubevirt
for these. plugin.hook reads plans by `xml`, of which this package is made, too.

Text is edited in place by byte position: what needs no change keeps every byte, quote, comment,
CDATA section, entity and namespace prefix. XML that is not well formed, or not a <domain> of type
qemu or kvm, is handed back as it is, so that libvirtd's own error reaches the client.
"""

from __future__ import annotations

from pydataplane.domain.model import Change, Definition, LunPlan, Plan, Settings, VolumeRef
from pydataplane.domain.names import (
    CARRIER_ALIAS,
    CONTROLLER_PREFIX,
    MAX_TARGETS,
    NAMESPACE,
    PREFIX,
    controller_name,
)
from pydataplane.domain.translate.carrying import carry, carry_blk
from pydataplane.domain.translate.changing import (
    attach,
    detach,
    detach_alias,
    moved,
    stays_qemus,
    update,
)
from pydataplane.domain.translate.mirrors import Mirror, mirrored
from pydataplane.domain.translate.operations import (
    check_memory,
    check_protection,
    define,
    element,
    find,
    has_controller,
    has_devices,
    identify,
    is_marked,
    mark,
    meant,
    plan,
    present,
    refitted,
    settable,
    socket,
    with_target,
    without_target,
)
from pydataplane.domain.translate.recognising import (
    is_foreign,
    may_be_far,
    may_be_ours,
    names_network,
    recognise,
    volume_format,
    volume_of,
)
from pydataplane.domain.translate.tuning import tuned

__all__ = [
    "CARRIER_ALIAS",
    "CONTROLLER_PREFIX",
    "MAX_TARGETS",
    "NAMESPACE",
    "PREFIX",
    "Change",
    "Definition",
    "LunPlan",
    "Mirror",
    "Plan",
    "Settings",
    "VolumeRef",
    "attach",
    "carry",
    "carry_blk",
    "check_memory",
    "check_protection",
    "controller_name",
    "define",
    "detach",
    "detach_alias",
    "element",
    "find",
    "has_controller",
    "has_devices",
    "identify",
    "is_foreign",
    "is_marked",
    "mark",
    "may_be_far",
    "may_be_ours",
    "meant",
    "mirrored",
    "moved",
    "names_network",
    "plan",
    "present",
    "recognise",
    "refitted",
    "settable",
    "socket",
    "stays_qemus",
    "tuned",
    "update",
    "volume_format",
    "volume_of",
    "with_target",
    "without_target",
]
