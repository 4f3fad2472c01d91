"""virtlun installed on KubeVirt: the driver's patch, the kinds, the plugin and its image.

Each is what a user applies from examples/kubernetes/kubevirt; of the DaemonSet's patch the API
server makes the new manifest, and the driver's process gets the arguments that are more in it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.kubernetes.daemonset import kept_capabilities
from tests.kubernetes.driver import DRIVER, EXAMPLES, Deployment, documents
from tests.kubernetes.program_image import program_image
from tests.support.examples import used

FOLDER = EXAMPLES / "kubevirt"
PART = "virtlun-csi"
#: What is applied, in the order of its README.
MANIFESTS = ("vmvolume-crd.yaml", "plugin.yaml", "legacy.yaml", "launchers-only.yaml")
#: Of nodes that have the image already.
_imported: set[Path] = set()


@contextlib.contextmanager
def installed(*deployments: Deployment) -> Iterator[None]:
    """Installs it on these nodes for the duration of a block. KubeVirt's kinds have to be there."""
    cluster = deployments[0].cluster
    for deployment in deployments:
        _import(deployment)
    for manifest in MANIFESTS:
        cluster.apply(FOLDER / manifest)
    cluster.wait("crd/vmvolumes.virtlun.dev", "condition=Established")
    parts = [deployment.parts[PART] for deployment in deployments]
    plain = [part.container for part in parts]
    for deployment, part in zip(deployments, parts, strict=True):
        more, capabilities = _changes(deployment)
        arguments = [*part.container.arguments, *more]
        part.container = replace(part.container, arguments=arguments, capabilities=capabilities)
        deployment.restart_driver()
    try:
        yield
    finally:
        for deployment, part, before in zip(deployments, parts, plain, strict=True):
            part.container = before
            deployment.restart_driver()
        for manifest in reversed(MANIFESTS):
            cluster.kubectl("delete", "--ignore-not-found", "-f", FOLDER / manifest)


def _import(deployment: Deployment) -> None:
    """Gives a node the sidecar's image, once."""
    image = deployment.node.folder / "virtlun.tar"
    if image not in _imported:
        deployment.node.import_image(program_image(image))
        _imported.add(image)


def _changes(deployment: Deployment) -> tuple[list[str], tuple[str, ...] | None]:
    """Returns the arguments that the patch adds, with the node's paths, and its capabilities."""
    cluster = deployment.cluster
    listed = cluster.kubectl(
        *("create", "--dry-run=client", "-o", "json", "-f", EXAMPLES / "daemonset.yaml")
    )
    before = next(one for one in documents(listed) if one["metadata"]["name"] == PART)
    patched = cluster.kubectl(
        *("patch", "--local", "-f", "-", "--type=json", "-o", "json"),
        *("--patch-file", used(FOLDER / "driver.patch.yaml")),
        stdin=json.dumps(before),
    )
    spec = json.loads(patched)["spec"]["template"]["spec"]
    assert spec["hostPID"] is True, "the driver cannot look at launchers' processes"
    old = before["spec"]["template"]["spec"]["containers"][0]["args"]
    new = spec["containers"][0]["args"]
    assert new[: len(old)] == old
    plugin = deployment.node.kubelet_dir / "plugins" / DRIVER
    more = [word.replace("=/csi/", f"={plugin}/") for word in new[len(old) :]]
    return more, kept_capabilities(spec["containers"][0])
