"""The target as the gateway uses it: volumes, and the LUNs of each domain's controller.

Calls block, so each runs in a thread. Every error becomes a refusal with one sentence.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from plugin.gateway import (
    blocklimits,
    domaindisks,
    latencies,
    lvolchain,
    lvolcheckpoints,
    lvolcopies,
    lvolsnapshots,
    usage,
)
from plugin.gateway.blocklimits import BlockLimits
from plugin.gateway.errors import LunNotReleased, NoAnswer, Refused, ServerSilent
from plugin.gateway.latencies import Latencies, Wanted
from plugin.gateway.lvolchain import Range
from plugin.gateway.lvolcheckpoints import Checkpoint
from plugin.gateway.lvolcopies import Copy, Disk
from plugin.gateway.lvolsnapshots import XATTR, Moment, Owner
from plugin.gateway.usage import Unit, Usage
from pydataplane.client import Client
from pydataplane.domain import histograms, images, limiting, reconcile
from pydataplane.domain.errors import (
    ImageError,
    ImageServerSilent,
    LunKept,
    ReconcileError,
    Refusal,
)
from pydataplane.domain.images import LunIdentity
from pydataplane.domain.limits import Limits
from pydataplane.domain.model import DiskAddress, FrontEnd
from pydataplane.domain.names import domain_controller, domain_of
from pydataplane.domain.observed import State, is_hidden, observe
from pydataplane.domain.reconcile import Release
from pydataplane.domain.translate import LunPlan, Plan
from pydataplane.domain.translate.snapshotxml import DiskSnapshot
from pydataplane.errors import (
    METHOD_NOT_FOUND,
    NO_SPACE,
    RpcError,
    TargetError,
    TargetTimeout,
    TargetUnavailable,
    VolumeError,
    VolumeNotFoundError,
)
from pydataplane.lvols import Lvol, Sizes
from pydataplane.lvstores import Lvstore
from pydataplane.suspendedrequests import suspended
from pydataplane.volumes import MIB, Volumes
from pydataplane.watchedclient import WatchedClient

T = TypeVar("T")
Pages = Iterator[list[tuple[int, int]]]

COPY_DEADLINE_S = 86_400.0
"""How long a call may take that copies data, seconds."""

OPEN_S = 120.0
"""How long an image of another host may take to be opened, seconds; its own limits are shorter."""

CHANGES_MAX = 8
"""Changes of one target, and what is asked for them, at a time."""

POLLS_MAX = 4
"""Questions of pollers to one target at a time, each of them for all who ask."""


FILES_MAX = 8
"""Reads and writes of a target's volumes as files, at a time; they wait as long as it is away."""


@dataclass(frozen=True)
class Suspended:
    """A target of a controller whose requests wait because an I/O failed."""

    controller: str
    target: int
    error: str
    """The target's word: no_space, write_medium, and the like."""
    since: float
    """Seconds since the epoch; with the rest of it the name of this failure."""
    overtaken: bool = field(default=False, compare=False)
    """See plugin.gateway.inflight."""


@dataclass(frozen=True)
class Room:
    """What a thin volume can grow by, bytes."""

    lvstore: int
    """Free in its lvstore."""
    cluster: int
    """What it takes of that at a time."""
    below: int | None
    """Free in the file system of the lvstore's file; None: it is a device, or not known."""

    def has_come_since(self, before: Room) -> bool:
        """Whether there is what there was not, when this was `before`, and a write failed."""
        if self.lvstore < self.cluster:
            return False
        if before.lvstore < before.cluster or self.lvstore >= before.lvstore + self.cluster:
            return True
        if self.below is None or before.below is None:
            return False
        return self.below >= before.below + self.cluster


class Target:
    """One target, by its JSON-RPC client."""

    def __init__(self, client: WatchedClient) -> None:
        self._client = client
        self._volumes = Volumes(client)
        self._copying = Volumes(Client(client.path, COPY_DEADLINE_S))
        # Pollers never keep a change waiting, nor a target that hangs another one's calls.
        self._changes = ThreadPoolExecutor(CHANGES_MAX, f"target {client.path}")
        self._polls = ThreadPoolExecutor(POLLS_MAX, f"poll {client.path}")
        self._files = ThreadPoolExecutor(FILES_MAX, f"files {client.path}")
        self._closed = False

    def close(self) -> None:
        """Lets its threads and connections go; calls under way come to their end.

        Later ones are refused. For the event loop's thread, as all methods.
        """
        self._closed = True
        self._changes.shutdown(wait=False)
        self._polls.shutdown(wait=False)
        self._files.shutdown(wait=False)
        self._client.close()

    @property
    def silence(self) -> NoAnswer | None:
        """Returns why nothing should wait for it: it is silent; None if it is not."""
        if not self._client.silent_s:
            return None
        return NoAnswer(Refusal.TIMEOUT, self._client.silence)

    def _check_open(self) -> None:
        if self._closed:
            text = f"the target on {self._client.path} is not configured any more: try again"
            raise NoAnswer(Refusal.NO_TARGET, text)

    async def file_io(self, work: Callable[[], T]) -> T:
        """Reads or writes a volume's file in a thread.

        It is at its end when this returns, also when cancelled: else the file could be another one,
        by its number, before the thread is done with it.

        Raises:
            OSError: as `work`.
        """
        self._check_open()
        doing = asyncio.get_running_loop().run_in_executor(self._files, work)
        try:
            return await asyncio.shield(doing)
        finally:
            await asyncio.wait((doing,))

    async def _run(self, work: Callable[[], T], *, poll: bool = False) -> T:
        """Runs blocking work in a thread and turns its errors into refusals."""
        self._check_open()
        workers = self._polls if poll else self._changes
        try:
            return await asyncio.get_running_loop().run_in_executor(workers, work)
        except VolumeNotFoundError as error:
            raise Refused(Refusal.NO_VOLUME, str(error)) from error
        except LunKept as error:
            raise LunNotReleased(Refusal.NOT_POSSIBLE_NOW, str(error)) from error
        except ImageServerSilent as error:
            raise ServerSilent(Refusal.NO_TARGET, str(error)) from error
        except ImageError as error:
            raise Refused(Refusal.NO_TARGET, str(error)) from error
        except (VolumeError, ReconcileError) as error:
            raise Refused(Refusal.BAD_ARGUMENT, str(error)) from error
        except TargetUnavailable as error:
            raise NoAnswer(Refusal.NO_TARGET, str(error)) from error
        except TargetTimeout as error:
            raise NoAnswer(Refusal.TIMEOUT, str(error)) from error
        except RpcError as error:
            if error.code == METHOD_NOT_FOUND:
                raise Refused(Refusal.CANNOT_CHANGE, str(error)) from error
            where = f"{error.method}: " if error.method else ""
            raise Refused(Refusal.NO_TARGET, f"the target refused: {where}{error}") from error
        except TargetError as error:
            raise Refused(Refusal.NO_TARGET, str(error)) from error

    async def volume(self, reference: str) -> Lvol:
        """Returns a volume by LVSTORE/LVOL or UUID."""
        return await self._run(lambda: self._volumes.lvol(reference))

    async def uuids(self, references: list[str]) -> dict[str, str]:
        """Returns the UUIDs of those of these LVSTORE/LVOL that are there; few calls for all."""
        volumes = await self._run(lambda: self._volumes.some(references))
        return {name: volume.uuid for name, volume in volumes.items()}

    async def sizes(self, references: list[str]) -> dict[str, Sizes]:
        """Returns the sizes of those of these volumes (LVSTORE/LVOL or UUID) that are there."""
        return await self._run(lambda: self._volumes.sizes(references), poll=True)

    async def ping(self) -> None:
        """Raises a refusal if the target does not answer."""
        await self._run(lambda: self._client.call("vhost_get_controllers"))

    async def controllers(self) -> set[str]:
        """Returns the names of all controllers."""
        state = await self._run(lambda: observe(self._client))
        return set(state.controllers)

    async def stores(self) -> list[Lvstore]:
        """Returns all lvstores and pools that are loaded."""
        return await self._run(self._volumes.lvstores)

    async def lvstores(self) -> set[str]:
        """Returns the names of all lvstores that are loaded."""
        return {store.name for store in await self.stores()}

    async def do(self, work: Callable[[Volumes], T], *, copies: bool = False) -> T:
        """Does in a thread what takes several calls about volumes; `copies`: they copy data."""
        volumes = self._copying if copies else self._volumes
        return await self._run(lambda: work(volumes))

    async def rooms(self, names: Collection[str]) -> dict[str, Room]:
        """Returns what room there is in those of these lvstores that are loaded."""

        def work() -> dict[str, Room]:
            stores = [store for store in self._volumes.lvstores() if store.name in names]
            return {store.name: self._room(store) for store in stores}

        return await self._run(work, poll=True)

    def _room(self, store: Lvstore) -> Room:
        below = None
        with suppress(OSError, TargetError):
            file = self._volumes.file_of(store)
            if file is not None and Path(file).is_file():
                found = os.statvfs(file)
                below = found.f_bavail * found.f_frsize
        return Room(store.free, store.cluster_size, below)

    async def cluster_size(self, volume: Lvol) -> int:
        """Returns the step in which a volume's size can change, bytes."""
        if volume.image is not None:
            return MIB
        return await self._run(lambda: self._volumes.lvstore(volume.lvstore).cluster_size)

    async def resize(self, volume: Lvol, size: int) -> None:
        """Gives a volume at least `size` bytes; guests are told by the target."""

        def work() -> None:
            if volume.image is not None:
                self._volumes.resize_image(volume, size)
                return
            try:
                self._volumes.resize(volume.uuid, size)
            except RpcError as error:
                if error.code != NO_SPACE:
                    raise
                store = self._volumes.lvstore(volume.lvstore)
                raise VolumeError(
                    f"volume {volume.path} cannot have {size} bytes: "
                    f"lvstore {store.name} has {store.free} bytes left"
                ) from error

        await self._run(work)

    async def snapshot(self, wanted: Sequence[DiskSnapshot], moment: Moment | None = None) -> None:
        """Takes lvol snapshots, of a domain's snapshot or of none; see `lvolsnapshots.take`."""
        xattrs = {each.uuid: {XATTR: moment.text} for each in wanted} if moment else None
        await self._run(lambda: lvolsnapshots.take(self._copying, wanted, xattrs))

    async def snapshot_owners(
        self, held: Sequence[DiskSnapshot], name: str, disks: Collection[str]
    ) -> dict[str, Owner]:
        """Returns whose lvol snapshots are that a snapshot `name` of a domain names."""
        return await self._run(lambda: lvolsnapshots.owners(self._volumes, held, name, disks))

    async def mark_snapshots(self, snapshots: Sequence[str], moment: Moment) -> None:
        """Has lvol snapshots (UUIDs) be of a domain's snapshot."""
        await self._run(lambda: lvolsnapshots.mark(self._volumes, snapshots, moment))

    async def delete_snapshots(self, held: Sequence[DiskSnapshot]) -> None:
        """Deletes lvol snapshots that are there; see `lvolsnapshots.delete`."""
        await self._run(lambda: lvolsnapshots.delete(self._copying, held))

    async def check_deletable(
        self, snapshots: Sequence[tuple[str, Sequence[DiskSnapshot]]]
    ) -> None:
        """Refuses domain snapshots that something else needs."""
        await self._run(lambda: lvolsnapshots.check_deletable(self._volumes, snapshots))

    async def missing_snapshots(self, held: Sequence[DiskSnapshot]) -> list[DiskSnapshot]:
        """Returns those whose lvol snapshot, or volume, is not there."""
        return await self._run(lambda: lvolsnapshots.missing(self._volumes, held))

    async def merged_by(self, volume: str, wanted: Range, prefix: str) -> list[str]:
        """Returns the UUIDs of a volume's snapshots that a commit merges."""
        return await self._run(lambda: lvolchain.merged_by(self._volumes, volume, wanted, prefix))

    async def merge(self, snapshots: Sequence[str]) -> None:
        """Deletes snapshots (UUIDs) that are there; what is above each gets what it had."""
        await self._run(lambda: lvolchain.merge(self._copying, snapshots))

    async def roll_back(self, held: Sequence[DiskSnapshot]) -> None:
        """Has volumes that nobody uses read as their snapshots; safe to repeat."""
        await self._run(lambda: lvolsnapshots.roll_back(self._copying, held))

    async def take_checkpoint(
        self, checkpoint: Checkpoint, besides: Sequence[DiskSnapshot]
    ) -> None:
        """Takes a checkpoint, and other lvol snapshots at the same instant, all or none."""
        await self._run(lambda: lvolcheckpoints.take(self._copying, checkpoint, besides))

    async def checkpoints(self, lvstores: Iterable[str], domain: str) -> list[Checkpoint]:
        """Returns what checkpoints a domain (its UUID) has in these lvstores, oldest first."""
        return await self._run(lambda: lvolcheckpoints.found(self._volumes, lvstores, domain))

    async def forget_checkpoints(self, held: Sequence[DiskSnapshot]) -> None:
        """Has lvol snapshots that are there be of no checkpoint any more."""
        await self._run(lambda: lvolcheckpoints.forget(self._volumes, held))

    async def checkpoint_domains(self, held: Sequence[DiskSnapshot]) -> dict[str, str]:
        """Returns whose checkpoints lvol snapshots are of; see `lvolcheckpoints.domains`."""
        return await self._run(lambda: lvolcheckpoints.domains(self._volumes, held))

    async def define_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Has lvol snapshots that are there be a checkpoint."""
        await self._run(lambda: lvolcheckpoints.define(self._volumes, checkpoint))

    async def changed_since(self, held: DiskSnapshot) -> int:
        """Returns the bytes in which a volume may differ from what a checkpoint has of it."""
        return await self._run(lambda: lvolcheckpoints.changed(self._copying, held), poll=True)

    async def export_snapshots(self, held: Sequence[DiskSnapshot]) -> list[Path]:
        """Exports lvol snapshots, read-only; returns the file of each."""

        def work() -> list[Path]:
            return [self._volumes.export(each.uuid, read_only=True) for each in held]

        return await self._run(work)

    async def end_exports(self, uuids: Sequence[str]) -> None:
        """Ends the exports of these lvol snapshots that there are."""

        def work() -> None:
            for uuid in uuids:
                self._volumes.end_export(uuid)

        await self._run(work)

    async def with_ranges(
        self, uuid: str, since: str | None, work: Callable[[Pages], None]
    ) -> None:
        """Gives `work`, in a thread, what an lvol snapshot has, or has otherwise than another one.

        That are pages of offset and length in bytes, in order.
        """
        await self._run(lambda: work(self._copying.ranges(uuid, since)))

    async def inflate(self, volume: Lvol) -> None:
        """Gives a volume, in use or not, all that it has of others; returns when it has that."""

        def work() -> None:
            present = self._volumes.volume(volume.uuid)
            if present.parent is not None or present.external is not None:
                self._copying.inflate(volume.uuid)

        await self._run(work)

    async def make_destination(self, path: str, source: Lvol, *, reuse: bool) -> Lvol:
        """Returns the volume that another one is to be copied to; see `lvolcopies.destination`."""
        return await self._run(
            lambda: lvolcopies.destination(self._copying, path, source, reuse=reuse)
        )

    async def has_parent(self, uuid: str) -> bool:
        """Whether a volume has anything of a snapshot, or of what is outside of its lvstore."""

        def work() -> bool:
            present = self._volumes.volume(uuid)
            return present.parent is not None or present.external is not None

        return await self._run(work)

    async def delete_volume(self, uuid: str) -> None:
        """Deletes a volume that is there and that nobody uses."""
        await self._run(lambda: self._copying.delete(uuid, missing_ok=True))

    async def start_copy(self, of: Disk, destination: str, limit: int) -> None:
        """Begins to copy a disk to a volume (its UUID), with at most so many bytes a second."""
        await self._run(lambda: lvolcopies.start(self._client, of, destination, limit))

    async def copy(self, of: Disk, *, poll: bool = False) -> Copy | None:
        """Returns how far the copy of a disk is; None: there is none."""
        return await self._run(lambda: lvolcopies.found(self._client, of), poll=poll)

    async def limit_copy(self, of: Disk, limit: int) -> None:
        """Limits a copy to so many bytes a second; 0: as many as the disks can."""
        await self._run(lambda: lvolcopies.limit(self._client, of, limit))

    async def pivot(self, of: Disk) -> None:
        """Has a disk go on with its copy."""
        await self._run(lambda: lvolcopies.pivot(self._client, of))

    async def end_copy(self, of: Disk) -> None:
        """Ends the copy of a disk, which goes on with its volume; safe to repeat."""
        await self._run(lambda: lvolcopies.abort(self._client, of))

    async def usage(self, units: list[Unit]) -> dict[Unit, Usage]:
        """Returns what guests did with these LUNs; those that are not there lack."""
        return await self._run(lambda: usage.ask(self._client, units), poll=True)

    async def latencies(self, wanted: list[Wanted]) -> dict[Wanted, tuple[Latencies, ...]]:
        """Returns how long operations of bdevs took, of those that are counted."""
        return await self._run(lambda: latencies.ask(self._client, wanted), poll=True)

    async def block_limits(self, names: list[str]) -> dict[str, BlockLimits]:
        """Returns what requests of bdevs have to be like, of those that are there."""
        return await self._run(lambda: blocklimits.ask(self._client, names), poll=True)

    async def count(self, bdev: str, *, counted: bool) -> None:
        """Has the latencies of a bdev be counted anew from now on, or not any more."""
        work = histograms.begin if counted else histograms.end
        await self._run(lambda: work(self._client, bdev))

    async def holders(self, uuid: str, besides: str) -> list[str]:
        """Returns the UUIDs of other domains whose controllers have this volume as a disk."""

        def work() -> list[str]:
            present = observe(self._client).controllers
            return [
                domain_of(name)
                for name, luns in present.items()
                if domain_controller(name) != besides
                and any(lun.bdev == uuid for lun in luns.values())
            ]

        return await self._run(work)

    async def suspended(self) -> list[Suspended]:
        """Returns what waits because an I/O failed; nothing, where the target has no such thing."""

        def work() -> list[Suspended]:
            return [
                Suspended(
                    controller=each["ctrlr"],
                    target=each["scsi_target_num"],
                    error=each["error"],
                    since=each["since"],
                    overtaken=each.get("overtaken", False),  # an older target has not said
                )
                for each in suspended(self._client)
            ]

        return await self._run(work, poll=True)

    async def state(self) -> State:
        """Returns all controllers with their LUNs, and which of them a QEMU is connected to."""
        return await self._run(lambda: observe(self._client))

    async def hides(self, address: DiskAddress, front: FrontEnd) -> bool:
        """Whether a disk is recorded and cannot be shown, as what it is on is not there."""
        return await self._run(lambda: is_hidden(self._client, address, front))

    async def has_disk(self, address: DiskAddress, bdev: str) -> bool:
        """Whether a controller shows this bdev at this address."""
        state = await self._run(lambda: observe(self._client))
        shown = state.controllers.get(address.controller, {}).get(address.target)
        return shown is not None and shown.bdev == bdev

    async def find_volumes(self, plan: Plan, known: dict[str, str]) -> Plan:
        """Returns the plan with the UUIDs of the volumes that are there; see `missingvolumes`."""
        return await self._run(lambda: domaindisks.find(self._client, plan, known))

    async def is_open(self, lun: LunPlan) -> bool:
        """Whether the image of a disk over the network is open."""
        return await self._run(lambda: images.is_open(self._client, lun))

    async def has_image(self, lun: LunPlan) -> bool:
        """Whether the image of a disk over the network is open, or the target goes on to try."""
        return await self._run(lambda: images.has_image(self._client, lun))

    async def identity_of(self, lun: LunPlan) -> LunIdentity | None:
        """Returns which LUN a disk is on; see `images.identity_of`."""
        client = self._client
        return await self._run(lambda: images.identity_of(client, lun))

    async def open_image(
        self,
        controller: str,
        lun: LunPlan,
        key: str | None,
        expected: LunIdentity | None = None,
        *,
        incoming: bool = False,
    ) -> bool:
        """Opens the image of a disk over the network; see `images.open_image`."""
        client = Client(self._client.path, OPEN_S)

        def work() -> bool:
            return images.open_image(client, controller, lun, key, expected, incoming=incoming)

        return await self._run(work)

    async def close_image(self, lun: LunPlan) -> None:
        """Closes it unless somebody uses it; see `images.close_image`."""
        await self._run(lambda: images.close_image(self._client, lun))

    async def make_volumes(self, plan: Plan, mib: int) -> Plan:
        """Makes those volumes of the plan that have no UUID; returns it with all of them."""
        return await self._run(lambda: domaindisks.make(self._client, plan, mib))

    async def ensure(self, plan: Plan, *, whole: bool = True) -> list[LunPlan]:
        """Makes the controllers exist with exactly the plan's disks; safe to repeat.

        Returns the disks that had to be added. If it fails, what it added is taken away again. With
        `whole` false the domain runs: it keeps what it has, and gets what it lacks.
        """
        return await self._run(lambda: domaindisks.ensure(self._client, plan, whole=whole))

    async def add(self, plan: Plan, lun: LunPlan, volume: Lvol) -> bool:
        """Adds one disk, of this volume, to the plan's; False if it is there already."""
        return await self._run(lambda: domaindisks.add(self._client, plan, lun, volume))

    async def remove(self, address: DiskAddress, limited: str | None) -> None:
        """Removes one disk; its I/O has ended when this returns. Safe to repeat.

        The controller of a virtio-blk disk goes with it, unless a QEMU is connected to it. So do
        the limits that it has brought to its volume, `limited`.
        """
        await self._run(lambda: domaindisks.remove(self._client, address, limited))

    async def limits(self, volume: str) -> Limits:
        """Returns how much I/O is allowed with a volume."""
        return await self._run(
            lambda: limiting.found(self._client, self._volumes.lvol(volume).uuid)
        )

    async def tune(self, volume: str, controller: str | None, limits: Limits) -> None:
        """Gives a volume (its UUID) other limits, of a disk of this controller's domain or none."""
        await self._run(lambda: limiting.tune(self._client, volume, controller, limits))

    async def carry_limits(self, source: str, destination: str, controller: str) -> None:
        """Gives the volume of a disk's copy what the disk has limited; safe to repeat."""
        await self._run(lambda: limiting.carry(self._client, source, destination, controller))

    async def unlimit(self, volume: str, controller: str) -> None:
        """Takes what a disk of this controller's domain has limited from its volume (its UUID)."""
        await self._run(
            lambda: limiting.gone(self._client, [volume], controller, observe(self._client))
        )

    async def release_idle(self, controller: str) -> Release:
        """Deletes a domain's controllers with its disks unless a QEMU is connected to them."""
        return await self._run(lambda: reconcile.release_domain(self._client, controller))

    async def release_leftovers(self, plan: Plan) -> set[str]:
        """Deletes a running domain's idle controllers that its plan lacks; returns their names."""
        return await self._run(lambda: domaindisks.release_leftovers(self._client, plan))
