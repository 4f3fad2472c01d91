"""From the client's domain to libvirtd's: the one place where a controller enters a domain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import (
    Definition,
    LunPlan,
    Plan,
    Settings,
    VolumeRef,
)
from pydataplane.domain.names import MAX_SOCKET_PATH_BYTES, MAX_TARGETS, controller_name
from pydataplane.domain.translate import fields, fronts, memory
from pydataplane.domain.translate.current import Current, RunningCarrier
from pydataplane.domain.translate.networkchoice import Choice
from pydataplane.domain.translate.numbering import Ours, check_kept, numbered
from pydataplane.domain.xml import blkdisk
from pydataplane.domain.xml import boot as boots
from pydataplane.domain.xml import carrier as carriers
from pydataplane.domain.xml import disk as disks
from pydataplane.domain.xml import metadata as metadatas
from pydataplane.domain.xml.carrier import Carrier
from pydataplane.domain.xml.disk import Disk
from pydataplane.domain.xml.document import Edits, Node, layout, number
from pydataplane.domain.xml.metadata import Entry, Metadata
from pydataplane.domain.xml.vcpus import pinned_to
from pydataplane.domain.xml.view import View


def translate(
    xml: str,
    view: View,
    current: Current,
    settings: Settings,
    new_uuid: UUID,
    uuids: Mapping[str, str],
    *,
    controller: bool,
    choice: Choice,
) -> Definition:
    """Does the work of `define` on a domain without traces of ours.

    One without a LUN gets the controller only if `controller` says so, and its QEMU has it, or the
    domain has it already; with a QEMU that has none it gets what a virtio-blk disk needs, shared
    memory. Otherwise, without any disk of ours, what is kept of it is our metadata, empty, if it
    had any: the mark of a domain that is to have a controller whenever it can be given one (see
    plugin.gateway.emptycontrollers).

    `choice` says which disks over the network are ours.

    Raises:
        TranslateError: as `define`.
    """
    domain = view.domain
    kind = domain.at("os", "type")
    if domain.attrs.get("type") not in ("qemu", "kvm") or kind is None:
        return Definition(xml, None)
    if kind.text.strip() != "hvm":
        return Definition(xml, None)
    nodes = view.disk_nodes()
    read = [disks.read(node) for node in nodes]
    ours = [
        Ours(
            node, disk, ref, order, fronts.choose(node, disk, ref, domain, settings, current.fronts)
        )
        for order, (node, disk) in enumerate(zip(nodes, read, strict=True))
        if (ref := disks.volume(node, choice.settings(node, settings))) is not None
        and not (ref.source is not None and memory.is_private(domain))
    ]
    if current.running:
        check_kept(ours, current.disks, uuids)
    uuid = _uuid(domain, new_uuid)
    luns_of_it = [item for item in ours if item.front == "scsi"]
    carried = bool(luns_of_it) or (
        controller and (current.carried or fronts.can_have_scsi(domain, settings))
    )
    wanted = bool(ours) or carried or controller
    if not (wanted or current.marked) or uuid is None or domain.child("name") is None:
        return Definition(xml, None)
    edits = Edits(view.document)
    if not wanted:
        mark = Metadata(controller_name(uuid))
        metadatas.add(domain, metadatas.lines(mark, bare=False), edits)
        return Definition(edits.apply(), None)
    try:
        kept = [current.kept_queues(item) for item in ours]
        for item, had in zip(ours, kept, strict=True):
            fields.check(*(item.node, item.disk, item.volume, item.front), goes_on=had is not None)
        _check_set(view, read, ours)
        socket = _socket(settings, controller_name(uuid), kind.attrs.get("arch", ""), ours)
        added = memory.share(domain, edits)
    except TranslateError:
        if ours:
            raise
        return Definition(xml, None)
    luns = [
        current.as_it_was(lun)
        for lun in numbered(ours, current.disks, uuids, running=current.running)
    ]
    running = current.running_carrier
    num_queues = queues(domain, settings) if running is None else running.carrier.num_queues
    entries = tuple(
        Entry(
            lun,
            item.order,
            _next_of_theirs(read, luns_of_it, item.order),
            disks.stored_text(view.document, item.node),
        )
        for lun, item in zip(luns, ours, strict=True)
    )
    metadata = Metadata(controller_name(uuid), tuple(added), entries)
    of_disks = []
    for lun, item, had in zip(luns, ours, kept, strict=True):
        asked = dict(item.disk.queues) if had is None else had
        of_disks.append(blkdisk.count(asked, num_queues))
        _take_out(view, item, lun, socket, num_queues, settings, edits, had)
    if domain.child("uuid") is None:
        edits.insert_after(_named(domain), [(0, f"<uuid>{uuid}</uuid>")])
    metadatas.add(domain, metadatas.lines(metadata, bare=False), edits)
    protection = carried and _protection(domain, running, settings)
    if carried:
        boot, boot_target = _boot(read, luns_of_it, luns, running)
        carrier = Carrier(socket, num_queues, boot_target, boot, protection=protection)
        place(view, nodes, carrier, read, current, settings, edits)
        carriers.add_override(domain, carrier, edits)
    in_order = tuple(sorted(luns, key=lambda lun: lun.target))
    plan = Plan(
        view.name,
        metadata.controller,
        socket,
        num_queues if carried else max(of_disks, default=num_queues),
        in_order,
        has_scsi=carried,
        cpus=pinned_to(domain),
        protection=protection,
    )
    return Definition(edits.apply(), plan)


def _boot(
    read: Sequence[Disk],
    luns_of_it: Sequence[Ours],
    luns: Sequence[LunPlan],
    running: RunningCarrier | None,
) -> tuple[boots.Boot, int]:
    """Returns how the carrier takes part in booting, and which target its controller boots."""
    if running is not None:
        return running.carrier.boot, running.carrier.boot_target
    mine = {id(item.disk) for item in luns_of_it}
    boot = boots.choose([(disk, id(disk) in mine) for disk in read])
    return boot, next((lun.target for lun in luns if lun.dev == boot.dev), 0)


def _protection(domain: Node, running: RunningCarrier | None, settings: Settings) -> bool:
    """Returns whether the guest can carry protection information; one that goes on as it did."""
    if running is not None:
        return running.carrier.protection
    return carriers.protection(domain, settings)


def _take_out(
    view: View,
    item: Ours,
    lun: LunPlan,
    socket: str,
    num_queues: int,
    settings: Settings,
    edits: Edits,
    had: Mapping[str, str] | None,
) -> None:
    """Takes a client's disk out; a virtio-blk disk is a device of libvirtd's in its place."""
    node, document = item.node, view.document
    if item.front == "scsi":
        edits.remove(node)
        return
    again_s = blkdisk.reconnect_s(settings)
    lines = blkdisk.disk_lines(document, node, lun, socket, num_queues, again_s, had)
    edits.replace(node.start, node.end, layout(lines, document.indent(node)))


def check_new(
    seen: Sequence[tuple[Disk, LunPlan | None]], new: Disk, ref: VolumeRef, refusal: Refusal
) -> None:
    """Refuses a disk that collides with one that the client sees already.

    Raises:
        TranslateError: `refusal`: the target dev, volume, serial or alias is there already; BAD_XML
            for a boot order used twice.
    """
    for disk, lun in seen:
        if disk.dev == new.dev:
            raise TranslateError(refusal, f"target {new.dev} already exists")
        if lun is not None and lun.volume == ref:
            raise TranslateError(
                refusal, f"volume {ref.alias} is already attached to this domain as {disk.dev}"
            )
        if new.serial is not None and disk.serial == new.serial:
            raise TranslateError(
                refusal, f"serial '{new.serial}' of {new.dev} is already that of disk {disk.dev}"
            )
        if new.alias is not None and new.alias.startswith("ua-") and disk.alias == new.alias:
            raise TranslateError(
                refusal, f"alias '{new.alias}' of {new.dev} is already that of disk {disk.dev}"
            )
        if new.boot is not None and disk.boot == new.boot:
            raise TranslateError(
                Refusal.BAD_XML, f"boot order {new.boot} used for more than one device"
            )


def _next_of_theirs(read: Sequence[Disk], luns: Sequence[Ours], order: int) -> str | None:
    """Returns the dev of the next disk after number `order` that is no LUN, None if none is."""
    mine = {item.order for item in luns}
    return next((d.dev for i, d in enumerate(read) if i > order and i not in mine), None)


def _check_set(view: View, read: Sequence[Disk], ours: Sequence[Ours]) -> None:
    """Refuses disks of ours that collide with other devices of the domain, and too many."""
    if len(ours) > MAX_TARGETS:
        raise TranslateError(
            Refusal.UNSUPPORTED,
            f"domain '{view.name}' has {len(ours)} virtlun disks, more than the {MAX_TARGETS} that"
            " its controller can have; remove some",
        )
    mine = {id(item.disk) for item in ours}
    seen: list[tuple[Disk, LunPlan | None]] = [(d, None) for d in read if id(d) not in mine]
    for item in ours:
        check_new(seen, item.disk, item.volume, Refusal.BAD_XML)
        seen.append((item.disk, LunPlan(0, item.disk.dev or "", item.volume)))
    devices = view.domain.child("devices")
    own = {id(item.node) for item in ours}
    others = {
        device.value("boot", "order")
        for device in (devices.children if devices is not None else ())
        if id(device) not in own
    }
    for item in ours:
        if item.disk.boot is not None and str(item.disk.boot) in others:
            raise TranslateError(
                Refusal.BAD_XML, f"boot order {item.disk.boot} used for more than one device"
            )


def _uuid(domain: Node, new_uuid: UUID) -> UUID | None:
    """Returns the domain's UUID, None if what it gives is none (libvirtd will say so)."""
    node = domain.child("uuid")
    if node is None:
        return new_uuid
    try:
        return UUID(node.text.strip())
    except ValueError:
        return None


def _named(domain: Node) -> Node:
    node = domain.child("name")
    assert node is not None
    return node


def _socket(settings: Settings, controller: str, arch: str, ours: Sequence[Ours]) -> str:
    """Returns the controller's socket.

    Raises:
        TranslateError: UNSUPPORTED, the path is too long, or the guest has no PCI.
    """
    if arch.startswith("s390"):
        raise TranslateError(
            Refusal.UNSUPPORTED, f"virtlun disks need a guest with PCI; {arch} has none"
        )
    path = f"{settings.vhost_dir.rstrip('/')}/{controller}"
    more = len(".254") if any(item.front == "blk" for item in ours) else 0
    if len(path.encode()) + more > MAX_SOCKET_PATH_BYTES:
        raise TranslateError(
            Refusal.UNSUPPORTED,
            f"the controller's socket {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes; shorten"
            " vhost_dir in virtlun.toml",
        )
    return path


def queues(domain: Node, settings: Settings) -> int:
    """Returns the request queues: one for each vCPU that the domain can have, up to the limit."""
    node = domain.child("vcpu")
    text = node.text.strip() if node is not None else ""
    return max(1, min(number(text) or 1, settings.max_queues))


def place(
    view: View,
    nodes: Sequence[Node],
    carrier: Carrier,
    read: Iterable[Disk],
    current: Current,
    settings: Settings,
    edits: Edits,
) -> None:
    """Writes the carrier's <disk> before or behind the client's disks."""
    document, domain = view.document, view.domain
    running = current.running_carrier
    if running is not None:
        dev, behind = running.dev, running.before
    else:
        dev, behind = boots.carrier_dev(carrier.boot.first, (disk.dev for disk in read)), None
    following = [node for node in nodes if behind and node.value("target", "dev") == behind]
    if not following and carrier.boot.front:
        following = list(nodes)
    address = current.address
    if address is not None and carriers.address_taken(domain, address):
        address = None
    again_s = carriers.reconnect_s(domain, settings)
    lines = carriers.disk_lines(carrier, dev, address, again_s)
    devices = domain.child("devices")
    if following:
        indent = document.indent(following[0])
        edits.insert(document.lead(following[0]), indent + layout(lines, indent))
    elif nodes:
        edits.insert_after(nodes[-1], lines)
    elif devices is None:
        deeper = [(depth + 1, line) for depth, line in lines]
        edits.append(domain, [(0, "<devices>"), *deeper, (0, "</devices>")])
    elif (emulator := devices.child("emulator")) is not None:
        edits.insert_after(emulator, lines)
    else:
        edits.append(devices, lines)
