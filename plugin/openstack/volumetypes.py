"""What a volume type says of its volumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cinder import exception
from cinder.volume import volume_types

PROVISIONING = "provisioning:type"
"""Extra spec: thin, or thick."""
KEY = "virtlun:key"
"""Extra spec: the name of the target's key that volumes of a type are encrypted with."""


@dataclass(frozen=True)
class TypeSpecs:
    """What an lvol is to be."""

    thin: bool
    key: str | None

    @classmethod
    def of(cls, specs: Mapping[str, str]) -> TypeSpecs:
        """Returns what a type's extra specs say."""
        how = specs.get(PROVISIONING, "thin")
        if how not in ("thin", "thick"):
            raise exception.InvalidVolumeType(
                reason=f"the extra spec {PROVISIONING} is {how}: set it to thin or thick"
            )
        return cls(how == "thin", specs.get(KEY))


def check(volume: Any) -> TypeSpecs:
    """Returns what the type of a volume says; refuses one that asks for what there is not."""
    if volume.encryption_key_id:
        raise exception.InvalidVolumeType(
            reason="encryption by Nova (LUKS) is not possible with virtlun volumes: use a type "
            f"with the extra spec {KEY} and the name of a key that the target has"
        )
    check_qos(volume.volume_type_id)
    return TypeSpecs.of((volume.volume_type.extra_specs or {}) if volume.volume_type_id else {})


def check_qos(type_id: str | None) -> None:
    """Refuses limits that the back-end alone is to keep: a disk's are those of its XML."""
    specs = volume_types.get_volume_type_qos_specs(type_id)["qos_specs"] if type_id else None
    if specs and specs["consumer"] == "back-end":
        raise exception.InvalidVolumeType(
            reason=f"the QoS specs {specs['name']} have the consumer back-end: set it to "
            "front-end, as limits are those of the disk that Nova makes"
        )
