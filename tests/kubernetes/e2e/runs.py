"""The runs of the suite: which manifest, on how many nodes, and which of its specs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.kubernetes import snapshots
from tests.kubernetes.cluster import NODE, Cluster
from tests.kubernetes.driver import EXAMPLES, Deployment
from tests.kubernetes.e2e.images import images
from tests.kubernetes.e2e.program import Suite
from tests.kubernetes.e2e.verdict import Skips, Verdict, read
from tests.kubernetes.node import Node
from tests.support.csi import may_grow_ext4

HERE = Path(__file__).parent
CLASSES = HERE / "classes.yaml"
GROUPS = HERE / "groups.yaml"
ATTRIBUTES_CLASSES = EXAMPLES / "volumeattributesclasses.yaml"
#: Sparse; a spec makes a hundred volumes of 320 MiB, which may be four times the room together.
LVSTORE_BYTES = 12 << 30
#: A spec fills the node up to its limit, with xfs, of which each takes some 70 MiB.
DRIVER_OPTIONS = ("--max-volumes=32",)
#: Specs at a time; each waits for most of its time. Those of [Serial] are alone in any case.
SIDE_BY_SIDE = 3
DEADLINE = "3h"
#: What the list of skips may ask of this machine.
CONDITIONS = {"ext4 grows offline only": lambda: not may_grow_ext4()}
EVERY_SPEC = "External.Storage"


@dataclass(frozen=True)
class Run:
    """One run of the suite."""

    about: str
    manifest: str
    nodes: int = 1
    focus: str = EVERY_SPEC
    """Of a spec's name; what has it not is no part of the run."""


#: In this order: a second node comes and stays.
RUNS = {
    "thin-xfs": Run("thin volumes with xfs, made for the first pod", "thin-xfs.yaml"),
    "thick-ext4": Run("thick volumes with ext4, made at once", "thick-ext4.yaml"),
    "thin-xfs-nodes": Run(
        "of the first, what has to do with where a volume is, on two nodes",
        "thin-xfs.yaml",
        2,
        r"External.Storage.*(topology|capacity|volume-expand|multiVolume|\] ephemeral"
        r"|read-write-once-pod|volumeMode|volume-modify)",
    ),
    "shared-block": Run(
        "block volumes of 4 KiB blocks for several pods, on two nodes",
        "shared-block.yaml",
        2,
        r"External.Storage.*Dynamic PV .block volmode",
    ),
}


class SuiteCluster:
    """A cluster with our driver, and what the suite needs of it; a context manager's body."""

    def __init__(self, cluster: Cluster, suite: Suite, reports: Path) -> None:
        """Puts the driver, the suite's images and classes on the cluster's first node.

        `reports` is the folder for the suite's logs and reports, one folder for each run.
        """
        self.cluster = cluster
        self.deployments: list[Deployment] = []
        self._suite = suite
        self._reports = reports
        # where the suite looks for a pod's mounts on its node
        cluster.box.run("ln", "-sfn", cluster.kubelet_dir, "/var/lib/kubelet")
        self._use(cluster.nodes[0])
        for classes in (CLASSES, ATTRIBUTES_CLASSES):
            cluster.apply(classes)
        self._ending = ExitStack()
        self._ending.enter_context(snapshots.controller(cluster))
        self._ending.enter_context(snapshots.groups(cluster))
        cluster.apply(GROUPS.read_text().replace("node-1", NODE))

    def _use(self, node: Node) -> None:
        for file in images(node.folder, self._suite.agnhost, self.cluster.box.pause):
            node.import_image(file)
        started = Deployment(
            self.cluster, node=node, lvstore_bytes=LVSTORE_BYTES, options=DRIVER_OPTIONS
        )
        self.deployments.append(started)

    def run(self, name: str) -> Verdict:
        """Runs the suite to its end and returns what it has shown.

        What is left of volumes afterwards, and a part of ours that had to be started again, are
        failures too.

        Raises:
            VerdictError: the suite did not get to its report.
        """
        run = RUNS[name]
        while len(self.cluster.nodes) < run.nodes:
            self._use(self.cluster.add_node())
        folder = self._reports / name
        folder.mkdir(parents=True, exist_ok=True)
        report = folder / "report.json"
        report.unlink(missing_ok=True)
        skips = Skips.read(name, CONDITIONS)
        process = self.cluster.box.spawn(
            f"e2e-{name}",
            *(self._suite.ginkgo, f"--procs={SIDE_BY_SIDE}", "--no-color", "-v"),
            *(f"--focus={run.focus}", f"--skip={skips.argument()}", f"--timeout={DEADLINE}"),
            *(f"--output-dir={folder}", "--json-report=report.json", self._suite.specs, "--"),
            f"--storage.testdriver={HERE / run.manifest}",
            f"--kubeconfig={self.cluster.kubeconfig}",
            f"--kubectl-path={self.cluster.tools.path('kubectl')}",
            *("--provider=local", f"--num-nodes={run.nodes}", "--minStartupPods=0"),
            *("--disable-log-dump", "--allowed-not-ready-nodes=0"),
        )
        process.process.wait()  # Ginkgo has a deadline
        shutil.copy(process.log, folder / "log")
        verdict = read(report, run.focus, skips)
        verdict.failed += self._left()
        return verdict

    def _left(self) -> Iterator[str]:
        """Yields what is not as it was before the suite ran."""
        for deployment in self.deployments:
            try:
                deployment.wait_clean(120)
            except AssertionError as error:
                yield f"{deployment.node.name}: {error}"
            for name, part in deployment.parts.items():
                if part.restarts:
                    yield f"{deployment.node.name}: {name} ended: {part.last_words[-1]}"
                    part.restarts = 0

    def close(self) -> None:
        """Stops the driver on all nodes, and the snapshot-controller."""
        self._ending.close()
        for deployment in reversed(self.deployments):
            deployment.close()
