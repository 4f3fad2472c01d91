"""Writes the VmVolume's schema and CustomResourceDefinition from its model.

`python -m csi.kubevirt.vmvolume.crd` writes both files anew; a test compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # comes with lightkube

from csi.kinds import VM_VOLUME
from csi.kubevirt.vmvolume.model import Model, Spec, Status

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = ROOT / "schemas/kubevirt/vmvolume.schema.json"
CRD = ROOT / "examples/kubernetes/kubevirt/vmvolume-crd.yaml"
CRD_HEAD = """\
# The VmVolume, a claim as a disk of a running virtual machine.
# Made by `python -m csi.kubevirt.vmvolume.crd`: change csi/kubevirt/vmvolume/model.py instead.
"""
IMMUTABLE = ("vmName", "claimName", "readOnly", "removable", "serial")
UNKNOWN_TO_KUBERNETES = ("title", "additionalProperties")
COLUMNS = [
    ("VM", "string", ".spec.vmName", "The machine that gets the disk"),
    ("Claim", "string", ".spec.claimName", "The claim that becomes the disk"),
    ("Node", "string", ".status.node", "The machine's node"),
    ("Target", "integer", ".status.target", "SCSI target in the guest"),
    ("Phase", "string", ".status.phase", "Pending, Attached, Releasing or Failed"),
    ("Age", "date", ".metadata.creationTimestamp", ""),
    ("Message", "string", ".status.message", "Why, and what to do"),
]
WIDE = ("Message",)
"""Columns of `kubectl get -o wide` alone."""


def object_schema() -> dict[str, Any]:
    """Returns the structural schema of spec and status (OpenAPI 3, as Kubernetes takes it)."""
    spec = _schema(Spec)
    for name in IMMUTABLE:
        spec["properties"][name]["x-kubernetes-validations"] = [
            {
                "rule": "self == oldSelf",
                "message": f"{name} cannot be changed: delete the VmVolume and make another",
            }
        ]
    spec["x-kubernetes-validations"] = [
        {
            "rule": "has(self.serial) == has(oldSelf.serial)",
            "message": "serial cannot be changed: delete the VmVolume and make another",
        }
    ]
    return {
        "description": "A claim as a disk of a running virtual machine, without any attach call to "
        "its QEMU. Delete it to take the disk away.",
        "type": "object",
        "required": ["spec"],
        "properties": {"spec": spec, "status": _schema(Status)},
    }


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of a VmVolume's spec and status."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | object_schema()


def crd() -> dict[str, Any]:
    """Returns the CustomResourceDefinition."""
    kind, group = VM_VOLUME.name, VM_VOLUME.api_version.split("/")[0]
    found = object_schema()
    found["properties"] = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
    } | found["properties"]
    version = {
        "name": VM_VOLUME.api_version.split("/")[1],
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path}
            | ({"description": about} if about else {})
            | ({"priority": 1} if name in WIDE else {})
            for name, kind, path, about in COLUMNS
        ],
        "schema": {"openAPIV3Schema": found},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{VM_VOLUME.plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": VM_VOLUME.plural,
                "singular": kind.lower(),
                "shortNames": ["vmvol"],
            },
            "versions": [version],
        },
    }


def crd_text() -> str:
    """Returns the definition as a manifest."""
    text: str = yaml.safe_dump(crd(), sort_keys=False, width=100, allow_unicode=True)
    return CRD_HEAD + text


def schema_text() -> str:
    """Returns the schema as a file."""
    return json.dumps(schema(), indent=2) + "\n"


def _schema(model: type[Model]) -> dict[str, Any]:
    """Returns a model's schema with references put in and without what is not structural."""
    found = model.model_json_schema(by_alias=True)
    made: dict[str, Any] = _structural(found, found.pop("$defs", {}))
    return made


def _structural(node: Any, named: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_structural(each, named) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _structural(named[node["$ref"].rsplit("/", 1)[1]], named)
    if "anyOf" in node:  # what may be left out is None in the model
        (only,) = [each for each in node["anyOf"] if each.get("type") != "null"]
        node = only | {key: value for key, value in node.items() if key != "anyOf"}
    made: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            made[key] = {name: _structural(each, named) for name, each in value.items()}
        elif key == "description":
            made[key] = " ".join(value.split())
        elif key not in UNKNOWN_TO_KUBERNETES and not (key == "default" and not _default(value)):
            made[key] = _structural(value, named)
    return made


def _default(value: Any) -> bool:
    """Whether a default says something: that of a part that is left out does not."""
    return value is not None and value != []


def main() -> None:
    """Writes both files."""
    SCHEMA.write_text(schema_text())
    CRD.write_text(crd_text())


if __name__ == "__main__":
    main()
