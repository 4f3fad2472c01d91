"""GET_ALL_DOMAIN_STATS's result as values, which the change of its bytes is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from plugin.gateway.messages import DOMAIN_LIST_MAX, STATS_PARAMS_MAX, Domain, TypedParam
from plugin.gateway.xdr import Reader, Writer


@dataclass(frozen=True)
class StatsRecord:
    """remote_domain_stats_record."""

    dom: Domain
    params: list[TypedParam]

    @staticmethod
    def read_all(payload: bytes) -> list[StatsRecord]:
        """Reads the result of CONNECT_GET_ALL_DOMAIN_STATS."""
        reader = Reader(payload)

        def record() -> StatsRecord:
            dom = Domain.read(reader)
            return StatsRecord(dom, reader.array(lambda: TypedParam.read(reader), STATS_PARAMS_MAX))

        records = reader.array(record, DOMAIN_LIST_MAX)
        reader.end()
        return records

    @staticmethod
    def pack_all(records: list[StatsRecord]) -> bytes:
        """Returns the payload of CONNECT_GET_ALL_DOMAIN_STATS's result."""
        writer = Writer()

        def record(item: StatsRecord) -> None:
            item.dom.write(writer)
            writer.array(item.params, lambda param: param.write(writer))

        return bytes(writer.array(records, record))
