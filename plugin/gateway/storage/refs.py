"""Pools and volumes as libvirt's protocol names them (remote_protocol.x)."""

from __future__ import annotations

import uuid as uuids
from dataclasses import dataclass

from plugin.gateway.xdr import Reader, Writer

POOLS_MAX = 4096
"""REMOTE_STORAGE_POOL_LIST_MAX."""

VOLUMES_MAX = 16_384
"""REMOTE_STORAGE_VOL_LIST_MAX."""


@dataclass(frozen=True, slots=True)
class StoragePool:
    """remote_nonnull_storage_pool: name and UUID (16 bytes)."""

    name: str
    uuid: bytes

    @property
    def uuid_text(self) -> str:
        """The UUID as people write it."""
        return str(uuids.UUID(bytes=self.uuid))

    @staticmethod
    def read(reader: Reader) -> StoragePool:
        """Reads one."""
        return StoragePool(reader.string(), reader.fixed(16))

    def write(self, writer: Writer) -> Writer:
        """Appends it."""
        return writer.string(self.name).fixed(self.uuid)


@dataclass(frozen=True, slots=True)
class StorageVol:
    """remote_nonnull_storage_vol: the pool's name, its own, and its key."""

    pool: str
    name: str
    key: str

    @staticmethod
    def read(reader: Reader) -> StorageVol:
        """Reads one."""
        return StorageVol(reader.string(), reader.string(), reader.string())

    def write(self, writer: Writer) -> Writer:
        """Appends it."""
        return writer.string(self.pool).string(self.name).string(self.key)


def pack_count(number: int) -> bytes:
    """Returns a result that is one int."""
    return bytes(Writer().i32(number))


def read_names(payload: bytes, most: int) -> list[str]:
    """Reads a result that is a list of at most `most` names."""
    reader = Reader(payload)
    names = reader.array(reader.string, most)
    reader.end()
    return names


def pack_names(names: list[str]) -> bytes:
    """Returns a result that is a list of names."""
    writer = Writer()
    return bytes(writer.array(names, writer.string))
