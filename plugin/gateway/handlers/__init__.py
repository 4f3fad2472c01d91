"""What the gateway does with the calls it looks into, one module a concern.

A handler answers its call exactly once or raises: GatewayError and TranslateError become the
call's error. WRITING are the calls that a read-only connection may not make; there they go to
libvirtd's read-only socket untouched, which refuses them in its own words. SET_IDENTITY is not
among them: the read-only socket takes it, as it must for us.
"""

from __future__ import annotations

from plugin.gateway.call import Handler
from plugin.gateway.handlers import (
    attach,
    block,
    connection,
    define,
    describe,
    metadata,
    migrate,
    saved,
    snapshots,
    start,
    stats,
    unsupported,
)
from plugin.gateway.messages import (
    DOMAIN_LIST_MAX,
    SMALL_CALL_MAX_BYTES,
    XML_CALL_MAX_BYTES,
)
from plugin.gateway.procs import Proc

HANDLERS: dict[int, Handler] = {
    Proc.SET_IDENTITY: connection.set_identity,
    Proc.CALLBACK_REGISTER_ANY: connection.register,
    Proc.CALLBACK_DEREGISTER_ANY: connection.deregister,
    Proc.EVENT_REGISTER_ANY: connection.register_legacy,
    Proc.EVENT_DEREGISTER_ANY: connection.deregister_legacy,
    Proc.DEFINE_XML: define.define,
    Proc.DEFINE_XML_FLAGS: define.define,
    Proc.CREATE_XML: define.create,
    Proc.CREATE_XML_WITH_FILES: define.create,
    Proc.CREATE: start.start,
    Proc.CREATE_WITH_FLAGS: start.start,
    Proc.CREATE_WITH_FILES: start.start,
    Proc.GET_XML_DESC: describe.xml,
    Proc.ATTACH_DEVICE: attach.attach,
    Proc.ATTACH_DEVICE_FLAGS: attach.attach,
    Proc.DETACH_DEVICE: attach.detach,
    Proc.DETACH_DEVICE_FLAGS: attach.detach,
    Proc.DETACH_DEVICE_ALIAS: attach.detach_alias,
    Proc.UPDATE_DEVICE_FLAGS: attach.update,
    Proc.GET_BLOCK_INFO: block.info,
    Proc.BLOCK_STATS: block.stats,
    Proc.BLOCK_STATS_FLAGS: block.stats_flags,
    Proc.BLOCK_RESIZE: block.resize,
    Proc.BLOCK_PEEK: unsupported.peek,
    Proc.SET_BLOCK_IO_TUNE: unsupported.io_tune,
    Proc.GET_BLOCK_IO_TUNE: unsupported.io_tune,
    Proc.GET_ALL_DOMAIN_STATS: stats.all_domains,
    Proc.GET_METADATA: metadata.get,
    Proc.SET_METADATA: metadata.set_,
    Proc.XML_TO_NATIVE: describe.to_native,
    Proc.SAVE_FLAGS: saved.save,
    Proc.SAVE_PARAMS: saved.save,
    Proc.RESTORE: saved.restore,
    Proc.RESTORE_FLAGS: saved.restore,
    Proc.RESTORE_PARAMS: saved.restore,
    Proc.SAVE_IMAGE_GET_XML_DESC: saved.image_xml,
    Proc.SAVE_IMAGE_DEFINE_XML: saved.define_image,
    Proc.MANAGED_SAVE_GET_XML_DESC: saved.image_xml,
    Proc.MANAGED_SAVE_DEFINE_XML: saved.define_managed,
    Proc.SNAPSHOT_CREATE_XML: snapshots.create,
    Proc.SNAPSHOT_GET_XML_DESC: snapshots.xml,
    Proc.CHECKPOINT_CREATE_XML: snapshots.create_checkpoint,
    Proc.CHECKPOINT_GET_XML_DESC: snapshots.xml,
    Proc.BACKUP_BEGIN: snapshots.begin_backup,
    Proc.BACKUP_GET_XML_DESC: snapshots.backup_xml,
    Proc.MIGRATE_BEGIN3: migrate.begin,
    Proc.MIGRATE_BEGIN3_PARAMS: migrate.begin_params,
    Proc.MIGRATE_PREPARE3: migrate.prepare,
    Proc.MIGRATE_PREPARE3_PARAMS: migrate.prepare_params,
    Proc.MIGRATE_PREPARE_TUNNEL3: migrate.prepare,
    Proc.MIGRATE_PREPARE_TUNNEL3_PARAMS: migrate.prepare_params,
    Proc.MIGRATE_PERFORM3: migrate.perform,
    Proc.MIGRATE_PERFORM3_PARAMS: migrate.perform_params,
    Proc.BLOCK_JOB_ABORT: unsupported.block_job,
    Proc.GET_BLOCK_JOB_INFO: unsupported.block_job_info,
    Proc.BLOCK_JOB_SET_SPEED: unsupported.block_job,
    Proc.BLOCK_PULL: unsupported.block_job,
    Proc.BLOCK_REBASE: unsupported.block_job,
    Proc.BLOCK_COMMIT: unsupported.block_job,
    Proc.BLOCK_COPY: unsupported.block_job,
    Proc.SET_BLOCK_THRESHOLD: unsupported.threshold,
}

READING = {
    Proc.SET_IDENTITY,
    Proc.CALLBACK_REGISTER_ANY,
    Proc.CALLBACK_DEREGISTER_ANY,
    Proc.EVENT_REGISTER_ANY,
    Proc.EVENT_DEREGISTER_ANY,
    Proc.GET_XML_DESC,
    Proc.GET_BLOCK_INFO,
    Proc.BLOCK_STATS,
    Proc.BLOCK_STATS_FLAGS,
    Proc.GET_BLOCK_IO_TUNE,
    Proc.GET_BLOCK_JOB_INFO,
    Proc.GET_ALL_DOMAIN_STATS,
    Proc.GET_METADATA,
    Proc.MANAGED_SAVE_GET_XML_DESC,
    Proc.SNAPSHOT_GET_XML_DESC,
    Proc.CHECKPOINT_GET_XML_DESC,
    Proc.BACKUP_GET_XML_DESC,
}

WRITING = HANDLERS.keys() - READING

_LARGEST = {
    Proc.MIGRATE_BEGIN3_PARAMS,
    Proc.MIGRATE_PREPARE3,
    Proc.MIGRATE_PREPARE3_PARAMS,
    Proc.MIGRATE_PREPARE_TUNNEL3,
    Proc.MIGRATE_PREPARE_TUNNEL3_PARAMS,
    Proc.MIGRATE_PERFORM3,
    Proc.MIGRATE_PERFORM3_PARAMS,
    Proc.BACKUP_BEGIN,
}
"""Calls with several texts, or one and a cookie."""

_WITH_XML = {
    Proc.DEFINE_XML,
    Proc.DEFINE_XML_FLAGS,
    Proc.CREATE_XML,
    Proc.CREATE_XML_WITH_FILES,
    Proc.ATTACH_DEVICE,
    Proc.ATTACH_DEVICE_FLAGS,
    Proc.DETACH_DEVICE,
    Proc.DETACH_DEVICE_FLAGS,
    Proc.UPDATE_DEVICE_FLAGS,
    Proc.SET_METADATA,
    Proc.XML_TO_NATIVE,
    Proc.SAVE_FLAGS,
    Proc.SAVE_PARAMS,
    Proc.RESTORE_FLAGS,
    Proc.RESTORE_PARAMS,
    Proc.SAVE_IMAGE_DEFINE_XML,
    Proc.MANAGED_SAVE_DEFINE_XML,
    Proc.SNAPSHOT_CREATE_XML,
    Proc.CHECKPOINT_CREATE_XML,
    Proc.MIGRATE_BEGIN3,
    Proc.BLOCK_COPY,
}


def payload_limit(procedure: int) -> int:
    """Returns how long the arguments of a call may be that is read whole, bytes."""
    if procedure in _LARGEST:
        return 3 * XML_CALL_MAX_BYTES
    if procedure in _WITH_XML:
        return XML_CALL_MAX_BYTES
    if procedure == Proc.GET_ALL_DOMAIN_STATS:
        return DOMAIN_LIST_MAX * 128
    return SMALL_CALL_MAX_BYTES
