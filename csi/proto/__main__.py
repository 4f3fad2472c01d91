"""Generates the modules of this package: `python -m csi.proto [DIRECTORY]`, with grpcio-tools."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCHEMAS = [
    "csi",
    "pluginregistration",
    "kubevirt_plugin",
    "kubevirt_info",
    "kubevirt_callbacks",
]


def generate(into: Path) -> None:
    """Writes csi/proto/*_pb2.py and .pyi of all schemas under the directory `into`.

    Raises:
        RuntimeError: protoc refused a schema; it has said why on stderr.
    """
    from grpc_tools import protoc  # noqa: PLC0415 - a tool of developers, not installed for users

    include = Path(protoc.__file__).parent / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-Icsi/proto={ROOT / 'schemas'}",
            f"-I{include}",
            f"--python_out={into}",
            f"--pyi_out={into}",
            *(f"csi/proto/{name}.proto" for name in SCHEMAS),
        ]
    )
    if status:
        raise RuntimeError(f"protoc ended with status {status}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
