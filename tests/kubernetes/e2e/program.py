"""The suite as a program, built from the Go modules that suite/go.sum pins, once into the cache.

Only the part for drivers outside of Kubernetes is linked: some 150 s on two cores where the other
tests' tools were built before, and three times that where not.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.kubernetes.tools import KUBERNETES, Report, cache, go, link_flags, once

MODULE = Path(__file__).parent / "suite"
#: The program of the suite's pods that serve and probe.
AGNHOST = "k8s.io/kubernetes/test/images/agnhost"
#: Runs specs side by side.
GINKGO = "github.com/onsi/ginkgo/v2/ginkgo"
#: Packages that are compiled, near enough for a progress line.
PACKAGES = 1500


@dataclass(frozen=True)
class Suite:
    """Where the programs are."""

    directory: Path

    @property
    def specs(self) -> Path:
        """The suite itself."""
        return self.directory / "e2e.test"

    @property
    def ginkgo(self) -> Path:
        """What runs it."""
        return self.directory / "ginkgo"

    @property
    def agnhost(self) -> Path:
        """What its pods run."""
        return self.directory / "agnhost"


def key() -> str:
    """Returns the hash of all that decides what is built."""
    digest = hashlib.sha256(link_flags().encode())
    for name in ("go.mod", "go.sum", "suite_test.go"):
        digest.update((MODULE / name).read_bytes())
    return digest.hexdigest()[:16]


def build(report: Report | None = None) -> Suite:
    """Returns the programs, building them first where they are not there yet.

    Raises:
        ToolsError: there is no Go, or it failed.
    """
    directory = cache() / f"e2e-{key()}"
    once(directory, f"Kubernetes' storage suite {KUBERNETES}", _build, report)
    return Suite(directory)


def _build(directory: Path, say: Report) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        new = Path(scratch)
        flags = ["-mod=readonly", "-ldflags", link_flags()]
        go(["mod", "download"], say, "modules", module=MODULE)
        specs = ["test", "-v", "-c", "-vet=off", *flags, "-o", str(new / "e2e.test"), "."]
        go(specs, say, "the suite", PACKAGES, module=MODULE)
        go(["build", *flags, "-o", f"{new}/", AGNHOST, GINKGO], say, "its programs", module=MODULE)
        for program in new.iterdir():
            program.rename(directory / program.name)
