"""The parameters of a VolumeAttributesClass: how much I/O the volumes of claims with it may do.

schemas/csi/volumeattributesclass.schema.json is made from them. Kubernetes gives every parameter as
text. What a class does not name stays as the volume has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from csi import parameters
from pydataplane.domain.limits import Limits, limits_of

MIB = 1 << 20
KIB = 1 << 10
RATES = {
    "iops": ("total_iops_sec", 1),
    "read_iops": ("read_iops_sec", 1),
    "write_iops": ("write_iops_sec", 1),
    "throughput": ("total_bytes_sec", MIB),
    "read_throughput": ("read_bytes_sec", MIB),
    "write_throughput": ("write_bytes_sec", MIB),
}
"""Which limit of the target each parameter is, and in what unit."""
PARTS = {
    "iops": ("read_iops", "write_iops"),
    "throughput": ("read_throughput", "write_throughput"),
}
"""What a total is in place of."""
OPERATIONS = ("iops", *PARTS["iops"])


@dataclass(frozen=True)
class Whole:
    """Marks the text of a whole number: `least`, 0 or 1, to so many digits of 9."""

    digits: int
    least: int = 0

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Checks it, for pydantic."""
        return no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Tells it in a JSON Schema, for pydantic."""
        return handler(core) | {"pattern": f"^({self._pattern})$"}

    @property
    def _pattern(self) -> str:
        return f"[1-9][0-9]{{0,{self.digits - 1}}}" + ("" if self.least else "|0")

    def _checked(self, text: str) -> str:
        if re.fullmatch(self._pattern, text) is None:
            why = "give a whole number from {least} to {most}"
            between = {"least": self.least, "most": 10**self.digits - 1}
            raise PydanticCustomError("whole", why, between)
        return text


Iops = Annotated[str, Whole(9)]
Throughput = Annotated[str, Whole(5)]
BurstSeconds = Annotated[str, Whole(3, least=1)]
IoSize = Annotated[str, Whole(4)]


class Attributes(BaseModel):
    """What a VolumeAttributesClass of csi.virtlun.dev can say; one it does not know is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        populate_by_name=True,
        alias_generator=to_camel,
    )

    iops: Iops | None = None
    """Reads and writes a second, up to 999999999, in place of `readIops` and `writeIops`; 0: no
    limit."""
    read_iops: Iops | None = None
    """Reads a second, in place of `iops`; 0: no limit."""
    write_iops: Iops | None = None
    """Writes a second, in place of `iops`; 0: no limit."""
    throughput: Throughput | None = None
    """MiB a second of reads and writes, up to 99999, in place of `readThroughput` and
    `writeThroughput`; 0: no limit."""
    read_throughput: Throughput | None = None
    """MiB a second of reads, in place of `throughput`; 0: no limit."""
    write_throughput: Throughput | None = None
    """MiB a second of writes, in place of `throughput`; 0: no limit."""
    iops_burst: Iops | None = None
    """Reads and writes a second in a burst, beside `iops` and no less; 0: no burst."""
    read_iops_burst: Iops | None = None
    """Reads a second in a burst, beside `readIops` and no less; 0: no burst."""
    write_iops_burst: Iops | None = None
    """Writes a second in a burst, beside `writeIops` and no less; 0: no burst."""
    throughput_burst: Throughput | None = None
    """MiB a second in a burst, beside `throughput` and no less; 0: no burst."""
    read_throughput_burst: Throughput | None = None
    """MiB a second of reads in a burst, beside `readThroughput` and no less; 0: no burst."""
    write_throughput_burst: Throughput | None = None
    """MiB a second of writes in a burst, beside `writeThroughput` and no less; 0: no burst."""
    burst_seconds: BurstSeconds | None = None
    """Seconds that the bursts of the class last, up to 999; 1 where no class has said otherwise."""
    io_size_kib: IoSize | None = Field(default=None, alias="ioSizeKiB")
    """KiB that count as one operation, up to 9999, beside a limit of operations: one of twice as
    many counts twice; 0: any counts as one."""

    @model_validator(mode="after")
    def _alone(self) -> Self:
        """Refuses a class that contradicts itself, whatever volume it is for."""
        for total, parts in PARTS.items():
            for part in parts:
                if self._number(total) and self._number(part):
                    raise _wrong(total, f"it goes without {to_camel(part)}: leave one of them out")
        for rate in RATES:
            burst = self._number(f"{rate}_burst")
            if burst and not self._number(rate):
                raise _wrong(f"{rate}_burst", f"it needs {to_camel(rate)}, which it is a burst of")
            if burst and burst < self._number(rate):
                raise _wrong(f"{rate}_burst", f"it is less than {to_camel(rate)}: give as much")
        if self.burst_seconds and not any(self._number(f"{rate}_burst") for rate in RATES):
            raise _wrong("burst_seconds", "it needs a burst, such as iopsBurst")
        if self._number("io_size_kib") and not any(self._number(rate) for rate in OPERATIONS):
            raise _wrong("io_size_kib", "it needs iops, readIops or writeIops")
        return self

    def _number(self, name: str) -> int:
        return int(getattr(self, name) or 0)

    def onto(self, before: Limits) -> Limits:
        """Returns what a volume with these limits has from then on.

        What the class does not name stays (CSI 1.13, ControllerModifyVolumeRequest), unless it
        cannot stand beside what it does name.
        """
        values = before.all
        for total, parts in PARTS.items():
            for one, others in ((total, parts), *((part, (total,)) for part in parts)):
                if self._number(one):
                    values |= {RATES[other][0]: 0 for other in others}
        for rate, (limit, unit) in RATES.items():
            burst = f"{rate}_burst"
            if getattr(self, rate) is not None:
                values[limit] = self._number(rate) * unit
            if getattr(self, burst) is not None:
                values[f"{limit}_max"] = self._number(burst) * unit
                if self.burst_seconds is not None:
                    values[f"{limit}_max_length"] = int(self.burst_seconds)
            if not values[limit] or values[f"{limit}_max"] < values[limit]:
                values[f"{limit}_max"] = 0
            length = max(1, values[f"{limit}_max_length"])
            values[f"{limit}_max_length"] = length if values[f"{limit}_max"] else 0
        if self.io_size_kib is not None:
            values["size_iops_sec"] = self._number("io_size_kib") * KIB
        if not any(values[RATES[rate][0]] for rate in OPERATIONS):
            values["size_iops_sec"] = 0
        return limits_of(values)


def read(given: Mapping[str, str]) -> Attributes:
    """Returns what a class's parameters say, without what csi-resizer adds.

    Raises:
        Failure: INVALID_ARGUMENT; the text names the parameter and what is possible.
    """
    return parameters.parsed(given, Attributes, "VolumeAttributesClass parameter")


def _wrong(name: str, why: str) -> PydanticCustomError:
    """Returns the error of one parameter that does not go with the others."""
    field = Attributes.model_fields[name]
    return PydanticCustomError("together", why, {"parameter": field.alias})


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of a class's parameters, which Kubernetes gives as texts."""
    return parameters.schema(Attributes)


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
