"""The sidecar csi-snapshot-metadata, and a client of it, built from source into the cache.

A module of its own, as only one test at night needs it: some 3 minutes on two cores.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.kubernetes.tools import Report, cache, go, once, output

MODULE = Path(__file__).parent
SIDECAR = "github.com/kubernetes-csi/external-snapshot-metadata/cmd/csi-snapshot-metadata"
#: The module with the definition of SnapshotMetadataService, in its folder config/crd.
CLIENT = "github.com/kubernetes-csi/external-snapshot-metadata/client"
CRD = "cbt.storage.k8s.io_snapshotmetadataservices.yaml"


@dataclass(frozen=True)
class MetadataTools:
    """Where the programs are."""

    directory: Path

    @property
    def sidecar(self) -> Path:
        """The program csi-snapshot-metadata."""
        return self.directory / "csi-snapshot-metadata"

    @property
    def client(self) -> Path:
        """What asks it, as a backup program does (main.go)."""
        return self.directory / "metadata"

    @property
    def crd(self) -> Path:
        """The definition of SnapshotMetadataService."""
        return self.directory / CRD


def build(report: Report | None = None) -> MetadataTools:
    """Returns the programs, building them first where they are not there yet.

    Raises:
        ToolsError: there is no Go, or it failed.
    """
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum", "main.go"):
        digest.update((MODULE / name).read_bytes())
    directory = cache().parent / "snapshot-metadata" / digest.hexdigest()[:16]
    once(directory, "csi-snapshot-metadata", _build, report)
    return MetadataTools(directory)


def _build(directory: Path, say: Report) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        words = ["-mod=readonly", "-ldflags", "-s -w", "-o", f"{scratch}/", ".", SIDECAR]
        go(["build", "-v", *words], say, "csi-snapshot-metadata", module=MODULE)
        client = Path(output("list", "-m", "-f", "{{.Dir}}", CLIENT, module=MODULE))
        (directory / CRD).write_bytes((client / "config/crd" / CRD).read_bytes())
        for program in ("csi-snapshot-metadata", "metadata"):
            (Path(scratch) / program).rename(directory / program)
