"""What polkit is asked about pools and volumes (viraccessdriverpolkit.c, remote_protocol.x)."""

from __future__ import annotations

from plugin.gateway.storage.refs import StoragePool, StorageVol


def pool_action(right: str) -> str:
    """Returns the action of a right of storage_pool."""
    return f"org.libvirt.api.storage-pool.{right}"


def volume_action(right: str) -> str:
    """Returns the action of a right of storage_vol."""
    return f"org.libvirt.api.storage-vol.{right}"


def pool_details(pool: StoragePool) -> dict[str, str]:
    """Returns what polkit is told of a pool."""
    return {"pool_name": pool.name, "pool_uuid": pool.uuid_text}


def volume_details(pool: StoragePool, volume: StorageVol) -> dict[str, str]:
    """Returns what polkit is told of a volume."""
    return {**pool_details(pool), "vol_name": volume.name, "vol_key": volume.key}
