"""The VmVolume's model, its schema and the CustomResourceDefinition say the same."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from csi.kubevirt.vmvolume.crd import (
    CRD,
    IMMUTABLE,
    ROOT,
    SCHEMA,
    crd,
    crd_text,
    object_schema,
    schema,
    schema_text,
)
from csi.kubevirt.vmvolume.model import Spec
from csi.kubevirt.vmvolume.status import status
from tests.unit.vmvolume.test_status import WAITS, attached
from tests.unit.vmvolume.world import NOW, vm_volume

AGAIN = "write it anew: python -m csi.kubevirt.vmvolume.crd"
LEAST = {"vmName": "vm", "claimName": "data"}


def test_the_files_are_those_of_the_model() -> None:
    assert SCHEMA.read_text() == schema_text(), AGAIN
    assert CRD.read_text() == crd_text(), AGAIN


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize(
    "spec",
    [
        LEAST,
        LEAST | {"readOnly": True, "removable": False, "serial": "disk 1"},
        LEAST | {"releaseTimeoutSeconds": 0},
        LEAST | {"serial": "x" * 64},
    ],
)
def test_what_the_schema_allows_the_controller_reads(spec: dict[str, Any]) -> None:
    jsonschema.validate({"spec": spec}, schema())
    assert Spec.model_validate(spec).plain().items() >= spec.items()


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"vmName": "vm"},
        {"claimName": "data"},
        LEAST | {"vmName": ""},
        LEAST | {"vmName": "../others/vm"},
        LEAST | {"claimName": "../../others/persistentvolumeclaims/data"},
        LEAST | {"claimName": "Data"},
        LEAST | {"claimName": "data."},
        LEAST | {"serial": ""},
        LEAST | {"serial": "x" * 65},
        LEAST | {"serial": "\u00e4"},
        LEAST | {"releaseTimeoutSeconds": -1},
        LEAST | {"releaseTimeoutSeconds": 86401},
    ],
)
def test_what_the_schema_refuses_so_does_the_controller(spec: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"spec": spec}, schema())
    with pytest.raises(ValidationError):
        Spec.model_validate(spec)


def test_defaults_are_the_model_s() -> None:
    properties = object_schema()["properties"]["spec"]["properties"]
    given = {name: each["default"] for name, each in properties.items() if "default" in each}
    assert Spec.model_validate(LEAST).plain() == LEAST | given
    assert given == {"readOnly": False, "removable": True, "releaseTimeoutSeconds": 30}


def test_the_contract_names_every_reason_and_metric() -> None:
    contract = (ROOT / "schemas/csi/README.md").read_text()
    code = "".join(
        (ROOT / f"csi/kubevirt/vmvolume/{name}.py").read_text()
        for name in ("decide", "reconcile", "metrics")
    )
    phases = "Pending|Attached|Releasing|Failed"
    said = rf'Say\(\s*"(?:{phases})",\s*"(\w+)"|(?:_pending|_failed)\(seen, "(\w+)"'
    reasons = {one or other for one, other in re.findall(said, code)}
    assert {"ClaimTaken", "NotOurs", "ForcedRelease", "TargetFailed", "OwnDisk"} <= reasons
    metrics = set(re.findall(r'"(virtlun_csi_vmvolumes?\w*)"', code))
    assert len(metrics) == 5
    for word in reasons | metrics:
        assert re.search(rf"\b{word}(_total)?\b", contract), word


def test_every_status_that_is_written_is_of_the_schema() -> None:
    for say in (WAITS, attached(), attached(guest_seen_at=None)):
        written = status(vm_volume(), say, NOW).plain()
        jsonschema.validate({"spec": LEAST, "status": written}, schema())
        known = object_schema()["properties"]["status"]["properties"]
        assert written.keys() <= known.keys(), "the server would drop the rest"


def test_only_the_timeout_can_be_changed() -> None:
    properties = object_schema()["properties"]["spec"]["properties"]
    guarded = {name for name, each in properties.items() if "x-kubernetes-validations" in each}
    assert guarded == set(IMMUTABLE) == properties.keys() - {"releaseTimeoutSeconds"}


def test_the_columns_are_fields_that_there_are() -> None:
    (version,) = crd()["spec"]["versions"]
    root = version["schema"]["openAPIV3Schema"]["properties"]
    names: list[str] = []
    wide: list[str] = []
    for column in version["additionalPrinterColumns"]:
        (wide if column.get("priority") else names).append(column["name"].upper())
        part, field = column["jsonPath"].split(".")[1:]
        if part != "metadata":
            assert root[part]["properties"][field]["type"] == column["type"]
    assert names == ["VM", "CLAIM", "NODE", "TARGET", "PHASE", "AGE"]
    assert wide == ["MESSAGE"]
    assert version["subresources"] == {"status": {}}


def test_the_schema_is_structural() -> None:
    """As Kubernetes demands it: a type everywhere, and no references or alternatives."""

    def walk(node: dict[str, Any]) -> None:
        assert "type" in node
        assert not node.keys() & {"$ref", "$defs", "anyOf", "oneOf", "allOf", "title"}
        for each in (node.get("properties") or {}).values():
            walk(each)
        if node["type"] == "array":
            walk(node["items"])

    (version,) = crd()["spec"]["versions"]
    walk(version["schema"]["openAPIV3Schema"])
