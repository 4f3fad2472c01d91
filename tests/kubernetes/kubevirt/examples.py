"""The virtual machines of examples/kubernetes/kubevirt, with what they need to boot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.guest.bootdisk import boot_disk
from tests.kubernetes.driver import EXAMPLES
from tests.kubernetes.kubevirt import census
from tests.kubernetes.kubevirt.claims import CLAIM
from tests.kubernetes.kubevirt.importer import fill
from tests.kubernetes.kubevirt.objects import QEMU
from tests.kubernetes.kubevirt.simulator import KubeVirt, Machine

FOLDER = EXAMPLES / "kubevirt"
VM = (FOLDER / "vm.yaml").read_text()
LEGACY_VM = (FOLDER / "vm-legacy.yaml").read_text()


@contextlib.contextmanager
def machine(
    kubevirt: KubeVirt,
    manifest: str = VM,
    name: str = "vm",
    qemu: Path = QEMU,
    *,
    boot: str = CLAIM,
    node: str | None = None,
) -> Iterator[Machine]:
    """The example's machine, its claim filled (on a node, if one is named), before its start."""
    cluster = kubevirt.cluster
    with cluster.applied(boot), cluster.applied(manifest):
        fill(cluster, "boot", boot_disk(), node)
        made = Machine(kubevirt, name, qemu=qemu)
        try:
            yield made
        finally:
            made.close()


@contextlib.contextmanager
def nothing_left(kubevirt: KubeVirt, deadline_s: float = 60.0) -> Iterator[None]:
    """Nothing of any machine or volume is there before a block, nothing after it, on any node."""
    deployments = kubevirt.deployments.values()
    for each in deployments:
        each.wait_ready()
        each.wait_clean()
        census.wait_nothing(each)
    yield
    for each in deployments:
        each.wait_ready()
    kubevirt.cluster.kubectl("delete", "vmvolume", "--all", "--wait=false")
    kubevirt.deployment.sweep()
    for each in deployments:
        each.wait_clean(deadline_s)
        census.wait_nothing(each, deadline_s)
