"""Events: those of our disks, which libvirtd knows nothing of, and those that are about us only."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from enum import Enum

from plugin.gateway.backup.progress import Progress, Status
from plugin.gateway.messages import (
    BOOLEAN,
    INT,
    STRING,
    ULLONG,
    Domain,
    TypedParam,
    pack_params,
)
from plugin.gateway.procs import Proc
from plugin.gateway.storage.events import PoolEvent, PoolSubscriptions
from plugin.gateway.wire import REMOTE_PROGRAM, Header, MessageType, WireError, message
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.names import NETWORK_NAMESPACE
from pydataplane.domain.translate import PREFIX

_OUR_NAMESPACES = f"https://{PREFIX}.dev/xmlns/"
"""How the URIs of all metadata begin that has to do with us."""


def is_our_own(uri: str | None) -> bool:
    """Whether metadata of a URI is the gateway's own, and no client's."""
    return uri is not None and uri.startswith(_OUR_NAMESPACES) and uri != NETWORK_NAMESPACE


def is_event_of_metadata(header: Header) -> bool:
    """Whether libvirtd tells of changed metadata."""
    return (header.program, header.type, header.procedure) == (
        REMOTE_PROGRAM,
        MessageType.MESSAGE,
        Proc.CALLBACK_METADATA_CHANGE,
    )


def is_ours(payload: bytes) -> bool:
    """Whether an event of changed metadata is about an element of ours."""
    reader = Reader(payload)
    try:
        reader.i32()  # the callback
        Domain.read(reader)
        reader.i32()  # description, title or element
        uri = reader.optional(reader.string)
    except WireError:
        return False
    return is_our_own(uri)


class DeviceEvent(Enum):
    """virDomainEventID of the events we send."""

    REMOVED = 15
    ADDED = 19


_CALLBACK_PROC = {
    DeviceEvent.REMOVED: Proc.CALLBACK_DEVICE_REMOVED,
    DeviceEvent.ADDED: Proc.CALLBACK_DEVICE_ADDED,
}


@dataclass(frozen=True)
class DeviceChange:
    """A disk came or went."""

    event: DeviceEvent
    dom: Domain
    alias: str


@dataclass(frozen=True)
class IoErrorEvent:
    """A disk failed, and its domain is paused for it."""

    dom: Domain
    path: str
    """The disk's source."""
    alias: str
    reason: str
    """enospc, or empty."""


@dataclass(frozen=True)
class BlockJobEvent:
    """A block job of a disk is ready, or came to its end."""

    dom: Domain
    path: str
    """The disk's source."""
    dev: str
    kind: int
    """virDomainBlockJobType."""
    status: int
    """virConnectDomainEventBlockJobStatus."""


@dataclass(frozen=True)
class JobEvent:
    """A backup came to its end."""

    dom: Domain
    progress: Progress


@dataclass(frozen=True)
class TunableEvent:
    """A disk of a running domain got other limits."""

    dom: Domain
    dev: str
    limits: Mapping[str, int]
    """Those that the call named."""


@dataclass(frozen=True)
class ThresholdEvent:
    """A volume has more allocated than a client wanted to hear of; sizes are in bytes."""

    dom: Domain
    dev: str
    """The disk, as the client called it."""
    path: str
    """The disk's source."""
    threshold: int
    excess: int
    """What is allocated beyond that."""


DomainEvent = DeviceChange | IoErrorEvent | BlockJobEvent | JobEvent | TunableEvent | ThresholdEvent
Announced = DomainEvent | PoolEvent
"""What clients are told of."""

IO_ERROR = 4
IO_ERROR_REASON = 6
"""virDomainEventID."""

BLOCK_JOB = 8
BLOCK_JOB_2 = 16
"""virDomainEventID: the first names the disk by its source, the second by its target dev."""

JOB_COMPLETED = 21
TUNABLE = 17
BLOCK_THRESHOLD = 24
"""virDomainEventID."""

BLKDEV = "blkdeviotune."
"""How the names begin that TUNABLE has for what is of a disk (VIR_DOMAIN_TUNABLE_BLKDEV_*)."""

OPERATION_BACKUP = 9
"""VIR_DOMAIN_JOB_OPERATION_BACKUP."""

_ACTION_PAUSE = 1
"""VIR_DOMAIN_EVENT_IO_ERROR_PAUSE."""

_LIFECYCLE = {Proc.CALLBACK_LIFECYCLE.value, Proc.EVENT_LIFECYCLE.value}
DEFINED, UNDEFINED, SUSPENDED = 0, 1, 3
"""VIR_DOMAIN_EVENT_DEFINED, _UNDEFINED, _SUSPENDED."""
_SUSPENDED_PAUSED = 0
_SUSPENDED_IOERROR = 2
"""Two details of the last."""


def is_lifecycle(header: Header) -> bool:
    """Whether libvirtd tells that a domain started, stopped, or the like."""
    kind = (header.program, header.type)
    return kind == (REMOTE_PROGRAM, MessageType.MESSAGE) and header.procedure in _LIFECYCLE


def lifecycle(payload: bytes) -> tuple[Domain, int] | None:
    """Returns the domain and the virDomainEventType of remote_domain_event_callback_lifecycle_msg.

    None: the message is not one.
    """
    reader = Reader(payload)
    try:
        reader.i32()  # the callback
        return Domain.read(reader), reader.i32()
    except WireError:
        return None


def subject(payload: bytes) -> Domain | None:
    """Returns the domain that an event with a callback is about; None: the message is not one."""
    reader = Reader(payload)
    try:
        reader.i32()  # the callback
        return Domain.read(reader)
    except WireError:
        return None


def of_io_error(header: Header, payload: bytes, paused: Container[bytes]) -> bytes:
    """Returns a lifecycle event with I/O errors as the reason, if its domain is paused for such."""
    reader = Reader(payload)
    try:
        if header.procedure == Proc.CALLBACK_LIFECYCLE:
            reader.i32()  # the callback
        dom = Domain.read(reader)
        at = reader.offset
        event, detail = reader.i32(), reader.i32()
    except WireError:
        return payload
    if dom.uuid not in paused or (event, detail) != (SUSPENDED, _SUSPENDED_PAUSED):
        return payload
    return payload[: at + 4] + bytes(Writer().i32(_SUSPENDED_IOERROR)) + payload[at + 8 :]


@dataclass
class Subscriptions:
    """What one client registered for, as its own calls and libvirtd's replies tell."""

    callbacks: dict[int, tuple[int, bytes | None]] = field(default_factory=dict)
    """By callback id: event id, and the domain's UUID or None for all."""
    legacy: set[int] = field(default_factory=set)
    """Event ids of the calls that have no callback id (clients before libvirt 1.3.3)."""
    pools: PoolSubscriptions = field(default_factory=PoolSubscriptions)

    def registered(self, args: bytes, result: bytes) -> None:
        """Notes a successful CONNECT_DOMAIN_EVENT_CALLBACK_REGISTER_ANY."""
        reader = Reader(args)
        event = reader.i32()
        dom = reader.optional(lambda: Domain.read(reader))
        self.callbacks[Reader(result).i32()] = (event, dom.uuid if dom else None)

    def deregistered(self, args: bytes) -> None:
        """Notes a successful CONNECT_DOMAIN_EVENT_CALLBACK_DEREGISTER_ANY."""
        self.callbacks.pop(Reader(args).i32(), None)

    def wants(self, change: Announced) -> bool:
        """Whether the client gets at least one message about this."""
        return bool(self.messages(change))

    def messages(self, change: Announced) -> list[bytes]:
        """Returns the messages to send to the client."""
        match change:
            case PoolEvent():
                found = self.pools.messages(change)
            case IoErrorEvent():
                found = self._io_error(change)
            case BlockJobEvent():
                found = self._block_job(change)
            case JobEvent():
                found = self._job(change)
            case TunableEvent():
                found = self._tunable(change)
            case ThresholdEvent():
                found = self._threshold(change)
            case DeviceChange():
                found = self._device(change)
        return found

    def _device(self, change: DeviceChange) -> list[bytes]:
        event, dom, alias = change.event, change.dom, change.alias
        found = []
        for callback, (wanted, uuid) in self.callbacks.items():
            if wanted == event.value and uuid in (None, dom.uuid):
                body = bytes(dom.write(Writer().i32(callback)).string(alias))
                found.append(message(MessageType.MESSAGE, _CALLBACK_PROC[event], 0, body))
        # The protocol has a message without callback id for removal only.
        if event is DeviceEvent.REMOVED and event.value in self.legacy:
            body = bytes(dom.write(Writer()).string(alias))
            found.append(message(MessageType.MESSAGE, Proc.EVENT_DEVICE_REMOVED, 0, body))
        return found

    def _io_error(self, error: IoErrorEvent) -> list[bytes]:
        found = []
        for callback, (wanted, uuid) in self.callbacks.items():
            if wanted not in (IO_ERROR, IO_ERROR_REASON) or uuid not in (None, error.dom.uuid):
                continue
            body = error.dom.write(Writer().i32(callback))
            body.string(error.path).string(error.alias).i32(_ACTION_PAUSE)
            proc = Proc.CALLBACK_IO_ERROR
            if wanted == IO_ERROR_REASON:
                body.string(error.reason)
                proc = Proc.CALLBACK_IO_ERROR_REASON
            found.append(message(MessageType.MESSAGE, proc, 0, bytes(body)))
        return found

    def _block_job(self, job: BlockJobEvent) -> list[bytes]:
        found = []
        for callback, (wanted, uuid) in self.callbacks.items():
            if wanted not in (BLOCK_JOB, BLOCK_JOB_2) or uuid not in (None, job.dom.uuid):
                continue
            by_path = wanted == BLOCK_JOB
            body = job.dom.write(Writer().i32(callback))
            body.string(job.path if by_path else job.dev).i32(job.kind).i32(job.status)
            proc = Proc.CALLBACK_BLOCK_JOB if by_path else Proc.EVENT_BLOCK_JOB_2
            found.append(message(MessageType.MESSAGE, proc, 0, bytes(body)))
        return found

    def _job(self, end: JobEvent) -> list[bytes]:
        found = []
        for callback, (wanted, uuid) in self.callbacks.items():
            if wanted != JOB_COMPLETED or uuid not in (None, end.dom.uuid):
                continue
            body = bytes(end.dom.write(Writer().i32(callback)))
            body += pack_params(job_params(end.progress))
            found.append(message(MessageType.MESSAGE, Proc.CALLBACK_JOB_COMPLETED, 0, body))
        return found

    def _tunable(self, change: TunableEvent) -> list[bytes]:
        params = [TypedParam(f"{BLKDEV}disk", STRING, change.dev)]
        params += [TypedParam(BLKDEV + n, ULLONG, v) for n, v in change.limits.items()]
        found = []
        for callback, (wanted, uuid) in self.callbacks.items():
            if wanted != TUNABLE or uuid not in (None, change.dom.uuid):
                continue
            body = bytes(change.dom.write(Writer().i32(callback))) + pack_params(params)
            found.append(message(MessageType.MESSAGE, Proc.CALLBACK_TUNABLE, 0, body))
        return found

    def _threshold(self, exceeded: ThresholdEvent) -> list[bytes]:
        found = []
        for callback, (wanted, uuid) in self.callbacks.items():
            if wanted != BLOCK_THRESHOLD or uuid not in (None, exceeded.dom.uuid):
                continue
            body = exceeded.dom.write(Writer().i32(callback)).string(exceeded.dev)
            body.optional(exceeded.path, body.string).u64(exceeded.threshold).u64(exceeded.excess)
            found.append(message(MessageType.MESSAGE, Proc.EVENT_BLOCK_THRESHOLD, 0, bytes(body)))
        return found


def job_params(progress: Progress) -> list[TypedParam]:
    """Returns the statistics of a backup as virDomainGetJobStats has them: ms and bytes."""
    params = [
        TypedParam("operation", INT, OPERATION_BACKUP),
        TypedParam("time_elapsed", ULLONG, int(progress.elapsed_s * 1000)),
        TypedParam("disk_total", ULLONG, progress.total),
        TypedParam("disk_processed", ULLONG, progress.done),
        TypedParam("disk_remaining", ULLONG, progress.total - progress.done),
    ]
    if progress.status is not Status.RUNNING:
        success = progress.status is Status.COMPLETED
        params.append(TypedParam("success", BOOLEAN, success))
    if progress.error is not None:
        params.append(TypedParam("errmsg", STRING, progress.error))
    return params
