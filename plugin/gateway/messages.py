"""Arguments and results of the calls we touch, as typed values (remote_protocol.x)."""

from __future__ import annotations

import uuid as uuids
from dataclasses import dataclass

from plugin.gateway.xdr import Reader, Writer, XdrError

DOMAIN_LIST_MAX = 16_384
"""REMOTE_DOMAIN_LIST_MAX."""

STATS_PARAMS_MAX = 262_144
"""REMOTE_CONNECT_GET_ALL_DOMAIN_STATS_MAX: typed parameters of one domain."""

TUNE_PARAMS_MAX = 32
"""REMOTE_DOMAIN_BLOCK_IO_TUNE_PARAMETERS_MAX."""

XML_CALL_MAX_BYTES = 4_194_304 + 65_536
"""The longest payload of a call with one XML string."""

SMALL_CALL_MAX_BYTES = 65_536
"""The longest payload of a call with names, paths and numbers only."""

TypedValue = int | float | bool | str

INT, UINT, LLONG, ULLONG, DOUBLE, BOOLEAN, STRING = range(1, 8)


@dataclass(frozen=True)
class Domain:
    """remote_nonnull_domain: name, UUID (16 bytes), and id or -1 as the client last saw it."""

    name: str
    uuid: bytes
    id: int

    @property
    def uuid_text(self) -> str:
        """The UUID as people and our controllers' names write it."""
        return str(uuids.UUID(bytes=self.uuid))

    @staticmethod
    def read(reader: Reader) -> Domain:
        """Reads one."""
        return Domain(reader.string(), reader.fixed(16), reader.i32())

    def write(self, writer: Writer) -> Writer:
        """Appends it."""
        return writer.string(self.name).fixed(self.uuid).i32(self.id)


@dataclass(frozen=True)
class DomainCall:
    """Arguments {dom, text, flags}, with what the procedure at hand lacks left at its default.

    `text` is XML for attach, detach and update, an alias, or a disk's path or target.
    """

    dom: Domain
    text: str = ""
    flags: int = 0

    @staticmethod
    def read(payload: bytes, *, text: bool = False, flags: bool = False) -> DomainCall:
        """Reads arguments that have a text, flags, both or neither."""
        reader = Reader(payload)
        dom = Domain.read(reader)
        call = DomainCall(dom, reader.string() if text else "", reader.u32() if flags else 0)
        reader.end()
        return call

    def pack(self, *, text: bool = False, flags: bool = False) -> bytes:
        """Returns the payload."""
        writer = self.dom.write(Writer())
        if text:
            writer.string(self.text)
        if flags:
            writer.u32(self.flags)
        return bytes(writer)


@dataclass(frozen=True)
class XmlCall:
    """Arguments {xml, flags} of define and create; `descriptors` is the count of the _WITH_FDS."""

    xml: str
    flags: int | None
    descriptors: int | None = None

    @staticmethod
    def read(payload: bytes, *, flags: bool, descriptors: bool = False) -> XmlCall:
        """Reads the arguments."""
        reader = Reader(payload)
        count = reader.u32() if descriptors else None
        call = XmlCall(reader.string(), reader.u32() if flags else None, count)
        reader.end()
        return call

    def pack(self) -> bytes:
        """Returns the payload."""
        writer = Writer()
        if self.descriptors is not None:
            writer.u32(self.descriptors)
        writer.string(self.xml)
        if self.flags is not None:
            writer.u32(self.flags)
        return bytes(writer)


@dataclass(frozen=True)
class DiskNumberCall:
    """Arguments of BLOCK_RESIZE and SET_BLOCK_THRESHOLD: a disk, and a number about it.

    That is a size, in KiB unless the flag says bytes; or a threshold, in bytes.
    """

    dom: Domain
    disk: str
    number: int
    flags: int

    @staticmethod
    def read(payload: bytes) -> DiskNumberCall:
        """Reads the arguments."""
        reader = Reader(payload)
        call = DiskNumberCall(Domain.read(reader), reader.string(), reader.u64(), reader.u32())
        reader.end()
        return call


@dataclass(frozen=True)
class TypedParam:
    """remote_typed_param: `kind` is one of INT .. STRING."""

    field: str
    kind: int
    value: TypedValue

    @staticmethod
    def read(reader: Reader) -> TypedParam:
        """Reads one."""
        field, kind = reader.string(), reader.i32()
        value: TypedValue
        if kind in (INT, BOOLEAN):
            value = reader.i32()
        elif kind == UINT:
            value = reader.u32()
        elif kind == LLONG:
            value = reader.i64()
        elif kind == ULLONG:
            value = reader.u64()
        elif kind == DOUBLE:
            value = reader.double()
        elif kind == STRING:
            value = reader.string()
        else:
            raise XdrError(f"typed parameter {field} of type {kind}")
        return TypedParam(field, kind, value)

    def write(self, writer: Writer) -> Writer:
        """Appends it."""
        writer.string(self.field).i32(self.kind)
        if self.kind == STRING:
            return writer.string(str(self.value))
        if self.kind == DOUBLE:
            return writer.double(float(self.value))
        number = int(self.value)
        if self.kind in (INT, BOOLEAN):
            return writer.i32(number)
        if self.kind == UINT:
            return writer.u32(number)
        return writer.i64(number) if self.kind == LLONG else writer.u64(number)


@dataclass(frozen=True)
class TuneQuery:
    """Arguments of GET_BLOCK_IO_TUNE; `count` 0 asks how many parameters there are."""

    dom: Domain
    disk: str | None
    count: int
    flags: int

    @staticmethod
    def read(payload: bytes) -> TuneQuery:
        """Reads the arguments."""
        reader = Reader(payload)
        dom, disk = Domain.read(reader), reader.optional(reader.string)
        call = TuneQuery(dom, disk, reader.i32(), reader.u32())
        reader.end()
        return call

    def pack(self) -> bytes:
        """Returns the payload."""
        writer = self.dom.write(Writer())
        return bytes(writer.optional(self.disk, writer.string).i32(self.count).u32(self.flags))


@dataclass(frozen=True)
class TuneCall:
    """Arguments of SET_BLOCK_IO_TUNE."""

    dom: Domain
    disk: str
    params: list[TypedParam]
    flags: int

    @staticmethod
    def read(payload: bytes) -> TuneCall:
        """Reads the arguments."""
        reader = Reader(payload)
        dom, disk = Domain.read(reader), reader.string()
        params = reader.array(lambda: TypedParam.read(reader), TUNE_PARAMS_MAX)
        call = TuneCall(dom, disk, params, reader.u32())
        reader.end()
        return call


def pack_params(params: list[TypedParam]) -> bytes:
    """Returns a remote_typed_param<>."""
    writer = Writer()
    return bytes(writer.array(params, lambda param: param.write(writer)))


def read_params(payload: bytes) -> dict[str, TypedValue]:
    """Reads the remote_typed_param<> with which `payload` begins, by name."""
    reader = Reader(payload)
    params = reader.array(lambda: TypedParam.read(reader), 64)
    return {param.field: param.value for param in params}


def read_string(payload: bytes) -> str:
    """Reads a result that is one string."""
    reader = Reader(payload)
    value = reader.string()
    reader.end()
    return value


def pack_string(value: str) -> bytes:
    """Returns a result that is one string."""
    return bytes(Writer().string(value))
