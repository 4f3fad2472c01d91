"""Every call that the gateway looks into, one row each, and those of which it shows the reply.

All others pass through unread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from plugin.gateway.call import Handler
from plugin.gateway.handlers import (
    attach,
    backups,
    block,
    blockjobs,
    checkpoints,
    commit,
    connection,
    copying,
    define,
    describe,
    diskerrors,
    disklists,
    guest,
    iotune,
    jobs,
    metadata,
    migrate,
    poolchanges,
    poolevents,
    pools,
    pull,
    reverting,
    saverestore,
    snapshots,
    start,
    stats,
    threshold,
    undefine,
    unsupported,
    volumechanges,
    volumes,
    volumestreams,
)
from plugin.gateway.messages import SMALL_CALL_MAX_BYTES, XML_CALL_MAX_BYTES
from plugin.gateway.procs import Proc
from plugin.gateway.services import Services

SMALL = SMALL_CALL_MAX_BYTES
XML = XML_CALL_MAX_BYTES
TEXTS = 3 * XML_CALL_MAX_BYTES
"""Arguments with several texts, or one and a cookie."""


class Access(Enum):
    """Which connections may make a call."""

    READ = "read"
    """All. SET_IDENTITY is one: libvirtd's read-only socket takes it, as it must for us."""
    WRITE = "write"
    """Read-write ones. On others libvirtd refuses it in its own words, without us."""


class By(Enum):
    """Who answers a call when it is about a disk or a domain of ours."""

    GATEWAY = "gateway"
    """We alone; libvirtd is asked for permission only."""
    LIBVIRTD = "libvirtd"
    """libvirtd, with its arguments or its result changed by us, or after we prepared for it."""
    NOBODY = "nobody"
    """It is refused with a sentence."""


@dataclass(frozen=True, slots=True)
class Procedure:
    """One row."""

    proc: Proc
    handler: Handler
    access: Access
    max_bytes: int
    """How long its arguments may be, which are read whole, bytes."""
    by: By
    only_bytes: int | None = None
    """Only with arguments of this length: others pass."""
    of_paused: bool = False
    """Only while a domain is paused because of I/O errors of ours: else libvirtd answers alone."""


_READ, _WRITE = Access.READ, Access.WRITE
_GATEWAY, _LIBVIRTD, _NOBODY = By.GATEWAY, By.LIBVIRTD, By.NOBODY

_ROWS = (
    Procedure(Proc.SET_IDENTITY, connection.set_identity, _READ, SMALL, _LIBVIRTD),
    Procedure(Proc.CALLBACK_REGISTER_ANY, connection.register, _READ, SMALL, _LIBVIRTD),
    Procedure(Proc.CALLBACK_DEREGISTER_ANY, connection.deregister, _READ, SMALL, _LIBVIRTD),
    Procedure(Proc.EVENT_REGISTER_ANY, connection.register_legacy, _READ, SMALL, _LIBVIRTD),
    Procedure(Proc.EVENT_DEREGISTER_ANY, connection.deregister_legacy, _READ, SMALL, _LIBVIRTD),
    Procedure(Proc.DEFINE_XML, define.define, _WRITE, XML, _LIBVIRTD),
    Procedure(Proc.DEFINE_XML_FLAGS, define.define, _WRITE, XML, _LIBVIRTD),
    Procedure(Proc.UNDEFINE, undefine.undefine, _WRITE, SMALL, _LIBVIRTD),
    Procedure(Proc.UNDEFINE_FLAGS, undefine.undefine, _WRITE, SMALL, _LIBVIRTD),
    Procedure(Proc.CREATE_XML, define.create, _WRITE, XML, _LIBVIRTD),
    Procedure(Proc.CREATE_XML_WITH_FILES, define.create, _WRITE, XML, _LIBVIRTD),
    Procedure(Proc.CREATE, start.start, _WRITE, SMALL, _LIBVIRTD),
    Procedure(Proc.CREATE_WITH_FLAGS, start.start, _WRITE, SMALL, _LIBVIRTD),
    Procedure(Proc.CREATE_WITH_FILES, start.start, _WRITE, SMALL, _LIBVIRTD),
    Procedure(Proc.ATTACH_DEVICE, attach.attach, _WRITE, XML, _GATEWAY),
    Procedure(Proc.ATTACH_DEVICE_FLAGS, attach.attach, _WRITE, XML, _GATEWAY),
    Procedure(Proc.DETACH_DEVICE, attach.detach, _WRITE, XML, _GATEWAY),
    Procedure(Proc.DETACH_DEVICE_FLAGS, attach.detach, _WRITE, XML, _GATEWAY),
    Procedure(Proc.DETACH_DEVICE_ALIAS, attach.detach_alias, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.UPDATE_DEVICE_FLAGS, attach.update, _WRITE, XML, _GATEWAY),
    Procedure(Proc.GET_BLOCK_INFO, block.info, _READ, SMALL, _GATEWAY),
    Procedure(Proc.BLOCK_STATS, block.stats, _READ, SMALL, _GATEWAY),
    Procedure(Proc.BLOCK_STATS_FLAGS, block.stats_flags, _READ, SMALL, _GATEWAY),
    Procedure(Proc.GET_STATE, diskerrors.state, _READ, SMALL, _LIBVIRTD, of_paused=True),
    Procedure(Proc.SUSPEND, diskerrors.suspend, _WRITE, SMALL, _LIBVIRTD, of_paused=True),
    Procedure(
        Proc.GET_DISK_ERRORS, diskerrors.disk_errors, _READ, SMALL, _LIBVIRTD, of_paused=True
    ),
    Procedure(Proc.BLOCK_RESIZE, block.resize, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.BLOCK_PEEK, unsupported.peek, _WRITE, SMALL, _NOBODY),
    Procedure(Proc.SET_BLOCK_IO_TUNE, iotune.set_, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.GET_BLOCK_IO_TUNE, iotune.get, _READ, SMALL, _GATEWAY),
    Procedure(
        Proc.GET_ALL_DOMAIN_STATS,
        stats.of_all,
        _READ,
        SMALL,
        _LIBVIRTD,
        only_bytes=stats.BYTES,
    ),
    Procedure(Proc.GET_FSINFO, guest.filesystems, _READ, SMALL, _LIBVIRTD),
    Procedure(Proc.GET_GUEST_INFO, guest.info, _READ, SMALL, _LIBVIRTD),
    Procedure(Proc.GET_METADATA, metadata.get, _READ, SMALL, _NOBODY),
    Procedure(Proc.SET_METADATA, metadata.set_, _WRITE, XML, _NOBODY),
    Procedure(Proc.XML_TO_NATIVE, describe.to_native, _WRITE, XML, _LIBVIRTD),
    Procedure(Proc.SAVE, saverestore.save, _WRITE, SMALL, _LIBVIRTD),
    Procedure(Proc.MANAGED_SAVE, saverestore.save_managed, _WRITE, SMALL, _LIBVIRTD),
    Procedure(Proc.SAVE_FLAGS, saverestore.save, _WRITE, XML, _LIBVIRTD),
    Procedure(Proc.SAVE_PARAMS, saverestore.save, _WRITE, XML, _LIBVIRTD),
    Procedure(Proc.RESTORE, saverestore.restore, _WRITE, SMALL, _LIBVIRTD),
    Procedure(Proc.RESTORE_FLAGS, saverestore.restore, _WRITE, XML, _LIBVIRTD),
    Procedure(Proc.RESTORE_PARAMS, saverestore.restore, _WRITE, XML, _LIBVIRTD),
    Procedure(Proc.SAVE_IMAGE_DEFINE_XML, saverestore.define_image, _WRITE, XML, _LIBVIRTD),
    Procedure(Proc.MANAGED_SAVE_DEFINE_XML, saverestore.define_managed, _WRITE, XML, _LIBVIRTD),
    Procedure(Proc.SNAPSHOT_CREATE_XML, snapshots.create, _WRITE, XML, _LIBVIRTD),
    Procedure(Proc.SNAPSHOT_GET_XML_DESC, disklists.listed_xml, _READ, SMALL, _LIBVIRTD),
    Procedure(Proc.REVERT_TO_SNAPSHOT, reverting.revert, _WRITE, SMALL, _LIBVIRTD),
    Procedure(Proc.SNAPSHOT_DELETE, reverting.delete, _WRITE, SMALL, _LIBVIRTD),
    Procedure(Proc.CHECKPOINT_CREATE_XML, checkpoints.create, _WRITE, XML, _GATEWAY),
    Procedure(Proc.LIST_ALL_CHECKPOINTS, checkpoints.listed, _READ, SMALL, _GATEWAY),
    Procedure(Proc.CHECKPOINT_LIST_ALL_CHILDREN, checkpoints.children, _READ, SMALL, _GATEWAY),
    Procedure(Proc.CHECKPOINT_LOOKUP_BY_NAME, checkpoints.look_up, _READ, SMALL, _GATEWAY),
    Procedure(Proc.CHECKPOINT_GET_PARENT, checkpoints.parent, _READ, SMALL, _GATEWAY),
    Procedure(Proc.CHECKPOINT_DELETE, checkpoints.delete, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.CHECKPOINT_GET_XML_DESC, checkpoints.xml, _READ, SMALL, _GATEWAY),
    Procedure(Proc.BACKUP_BEGIN, backups.begin, _WRITE, TEXTS, _GATEWAY),
    Procedure(Proc.BACKUP_GET_XML_DESC, backups.xml, _READ, SMALL, _GATEWAY),
    Procedure(Proc.GET_JOB_INFO, jobs.info, _READ, SMALL, _GATEWAY),
    Procedure(Proc.GET_JOB_STATS, jobs.stats, _READ, SMALL, _GATEWAY),
    Procedure(Proc.ABORT_JOB, jobs.abort, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.ABORT_JOB_FLAGS, jobs.abort, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.MIGRATE_BEGIN3, migrate.begin, _WRITE, XML, _LIBVIRTD),
    Procedure(Proc.MIGRATE_BEGIN3_PARAMS, migrate.begin_params, _WRITE, TEXTS, _LIBVIRTD),
    Procedure(Proc.MIGRATE_PREPARE3, migrate.prepare, _WRITE, TEXTS, _LIBVIRTD),
    Procedure(Proc.MIGRATE_PREPARE3_PARAMS, migrate.prepare_params, _WRITE, TEXTS, _LIBVIRTD),
    Procedure(Proc.MIGRATE_PREPARE_TUNNEL3, migrate.prepare, _WRITE, TEXTS, _LIBVIRTD),
    Procedure(
        Proc.MIGRATE_PREPARE_TUNNEL3_PARAMS,
        migrate.prepare_params,
        _WRITE,
        TEXTS,
        _LIBVIRTD,
    ),
    Procedure(Proc.MIGRATE_PERFORM3, migrate.perform, _WRITE, TEXTS, _LIBVIRTD),
    Procedure(Proc.MIGRATE_PERFORM3_PARAMS, migrate.perform_params, _WRITE, TEXTS, _LIBVIRTD),
    Procedure(Proc.BLOCK_JOB_ABORT, blockjobs.abort, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.GET_BLOCK_JOB_INFO, blockjobs.info, _READ, SMALL, _GATEWAY),
    Procedure(Proc.BLOCK_JOB_SET_SPEED, copying.set_speed, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.BLOCK_PULL, pull.pull, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.BLOCK_REBASE, copying.rebase, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.BLOCK_COMMIT, commit.commit, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.BLOCK_COPY, copying.copy, _WRITE, XML, _GATEWAY),
    Procedure(Proc.SET_BLOCK_THRESHOLD, threshold.set_, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.NUM_OF_STORAGE_POOLS, pools.count, _READ, SMALL, _LIBVIRTD),
    Procedure(Proc.LIST_STORAGE_POOLS, pools.list_names, _READ, SMALL, _LIBVIRTD),
    Procedure(Proc.NUM_OF_DEFINED_STORAGE_POOLS, pools.count, _READ, SMALL, _LIBVIRTD),
    Procedure(Proc.LIST_DEFINED_STORAGE_POOLS, pools.list_names, _READ, SMALL, _LIBVIRTD),
    Procedure(Proc.LIST_ALL_STORAGE_POOLS, pools.list_all, _READ, SMALL, _LIBVIRTD),
    Procedure(Proc.STORAGE_POOL_LOOKUP_BY_NAME, pools.look_up_name, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_LOOKUP_BY_UUID, pools.look_up_uuid, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_LOOKUP_BY_VOLUME, pools.look_up_volume, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_LOOKUP_BY_TARGET_PATH, pools.look_up_path, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_GET_INFO, pools.info, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_GET_XML_DESC, pools.xml, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_GET_AUTOSTART, pools.autostart, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_IS_ACTIVE, pools.is_active, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_IS_PERSISTENT, pools.is_persistent, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_NUM_OF_VOLUMES, volumes.count, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_LIST_VOLUMES, volumes.list_names, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_LIST_ALL_VOLUMES, volumes.list_all, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_VOL_LOOKUP_BY_NAME, volumes.look_up_name, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_VOL_LOOKUP_BY_KEY, volumes.look_up_path, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_VOL_LOOKUP_BY_PATH, volumes.look_up_path, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_VOL_GET_INFO, volumes.info, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_VOL_GET_INFO_FLAGS, volumes.info_flags, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_VOL_GET_XML_DESC, volumes.xml, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_VOL_GET_PATH, volumes.path, _READ, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_DEFINE_XML, poolchanges.define, _WRITE, XML, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_CREATE_XML, poolchanges.create, _WRITE, XML, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_CREATE, poolchanges.start, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_DESTROY, poolchanges.destroy, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_UNDEFINE, poolchanges.undefine, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_REFRESH, poolchanges.refresh, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_SET_AUTOSTART, poolchanges.set_autostart, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_POOL_BUILD, poolchanges.build, _WRITE, SMALL, _NOBODY),
    Procedure(Proc.STORAGE_POOL_DELETE, poolchanges.delete, _WRITE, SMALL, _NOBODY),
    Procedure(Proc.STORAGE_POOL_EVENT_REGISTER_ANY, poolevents.register, _READ, SMALL, _LIBVIRTD),
    Procedure(
        Proc.STORAGE_POOL_EVENT_DEREGISTER_ANY, poolevents.deregister, _READ, SMALL, _LIBVIRTD
    ),
    Procedure(Proc.STORAGE_VOL_CREATE_XML, volumechanges.create, _WRITE, XML, _GATEWAY),
    Procedure(Proc.STORAGE_VOL_CREATE_XML_FROM, volumechanges.create_from, _WRITE, XML, _GATEWAY),
    Procedure(Proc.STORAGE_VOL_DELETE, volumechanges.delete, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_VOL_RESIZE, volumechanges.resize, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_VOL_UPLOAD, volumestreams.upload, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_VOL_DOWNLOAD, volumestreams.download, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_VOL_WIPE, volumechanges.wipe, _WRITE, SMALL, _GATEWAY),
    Procedure(Proc.STORAGE_VOL_WIPE_PATTERN, volumechanges.wipe, _WRITE, SMALL, _GATEWAY),
)

PROCEDURES = {row.proc.value: row for row in _ROWS}
"""By the number of the procedure."""


class Showing(Protocol):
    """How clients are to see the payload of a reply."""

    def at_once(self, payload: bytes) -> bytes | None:
        """Returns it at once; None: ask `translated`."""

    async def translated(self, payload: bytes) -> bytes:
        """Returns it; raises GatewayError or WireError where that cannot be done."""


def _xml(services: Services) -> Showing:
    return services.xml_cache


def _stats(services: Services) -> Showing:
    return services.domain_stats


SHOWING: dict[int, Callable[[Services], Showing]] = {
    Proc.GET_XML_DESC.value: _xml,
    Proc.SAVE_IMAGE_GET_XML_DESC.value: _xml,
    Proc.MANAGED_SAVE_GET_XML_DESC.value: _xml,
    Proc.GET_ALL_DOMAIN_STATS.value: _stats,
}
"""Calls that pass as they are, with any flags, and in whose result clients see their own disks and
nothing of what carries them: one domain's XML, and the statistics of several."""
