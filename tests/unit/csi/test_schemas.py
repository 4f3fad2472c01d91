"""The contracts under schemas/ and the code that is made of them say the same."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from csi import attributes
from csi.parameters import read, schema
from csi.proto.__main__ import ROOT, SCHEMAS, generate

CLASS_SCHEMA = ROOT / "schemas/csi/storageclass.schema.json"
ATTRIBUTES_SCHEMA = ROOT / "schemas/csi/volumeattributesclass.schema.json"


def test_the_generated_modules_are_those_of_the_schemas(tmp_path: Path) -> None:
    generate(tmp_path)
    for name in SCHEMAS:
        for suffix in (".py", ".pyi"):
            path = Path("csi/proto") / f"{name}_pb2{suffix}"
            assert (tmp_path / path).read_text() == (ROOT / path).read_text(), (
                "write it anew: python -m csi.proto"
            )


def test_the_class_schemas_are_the_models() -> None:
    assert json.loads(CLASS_SCHEMA.read_text()) == schema(), (
        "write it anew: python -m csi.parameters > schemas/csi/storageclass.schema.json"
    )
    assert json.loads(ATTRIBUTES_SCHEMA.read_text()) == attributes.schema(), (
        "write it anew: python -m csi.attributes > schemas/csi/volumeattributesclass.schema.json"
    )


@pytest.mark.parametrize(
    "parameters",
    [{"lvstore": "lvs0"}, {"lvstore": "a", "thin": "true", "fsType": "xfs", "blockSize": "4096"}],
)
def test_the_schema_allows_what_the_driver_does(parameters: dict[str, str]) -> None:
    jsonschema.validate(parameters, schema())
    assert read(parameters).lvstore == parameters["lvstore"]


@pytest.mark.parametrize("parameters", [{}, {"lvstore": "a", "thin": "1"}, {"lvstore": "a b"}])
def test_the_schema_refuses_what_the_driver_does(parameters: dict[str, str]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(parameters, schema())
    with pytest.raises(Exception, match="StorageClass parameter"):
        read(parameters)
