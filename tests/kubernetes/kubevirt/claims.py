"""Claims and VmVolumes of tests, and waiting for what becomes of them."""

from __future__ import annotations

import json
from typing import Any

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import EXAMPLES
from tests.kubernetes.sandbox import SandboxError
from tests.support.wait import until

MIB = 1 << 20
CLAIM = (EXAMPLES / "kubevirt/claim.yaml").read_text()
DEADLINE_S = 60.0
READ_BACK = """\
apiVersion: v1
kind: Pod
metadata: {{name: reader}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  containers:
    - name: shell
      image: busybox:stable
      imagePullPolicy: IfNotPresent
      command: [sh, -o, pipefail, -c]
      args: ["dd if=/dev/disk bs=1M skip={at} count={mib} 2>/dev/null | md5sum"]
      volumeDevices: [{{name: disk, devicePath: /dev/disk}}]
  volumes: [{{name: disk, persistentVolumeClaim: {{claimName: {claim}}}}}]
"""


def claim(name: str, *, mode: str = "Block", storage_class: str = "virtlun-thin") -> str:
    """Returns the example's claim with another name, of 64 MiB."""
    text = CLAIM.replace("name: boot", f"name: {name}")
    text = text.replace("volumeMode: Block", f"volumeMode: {mode}")
    return text.replace("virtlun-thin", storage_class)


def made_on(manifest: str, node: str) -> str:
    """Returns a claim's manifest as the scheduler leaves it that has chosen a node."""
    chosen = f"  annotations: {{volume.kubernetes.io/selected-node: {node}}}\n"
    return manifest.replace("spec:\n", f"{chosen}spec:\n", 1)


def vm_volume(name: str, vm: str, claim_name: str, **spec: object) -> str:
    """Returns a VmVolume's manifest."""
    return json.dumps(
        {
            "apiVersion": "virtlun.dev/v1alpha1",
            "kind": "VmVolume",
            "metadata": {"name": name},
            "spec": {"vmName": vm, "claimName": claim_name, **spec},
        }
    )


def grow(cluster: Cluster, name: str, mib: int) -> None:
    """Asks for a larger claim."""
    cluster.patch("pvc", name, {"spec": {"resources": {"requests": {"storage": f"{mib}Mi"}}}})


def status(cluster: Cluster, name: str) -> dict[str, Any]:
    """Returns a VmVolume's status; nothing where it has none, or is gone."""
    try:
        return dict(cluster.get("vmvolume", name).get("status", {}))
    except SandboxError:
        return {}


def condition(cluster: Cluster, name: str, kind: str) -> str:
    """Returns "STATUS: MESSAGE" of a VmVolume's condition; nothing where it has none."""
    for one in status(cluster, name).get("conditions", []):
        if one["type"] == kind:
            return f"{one['status']}: {one['message']}"
    return ""


def wait_phase(cluster: Cluster, name: str, phase: str) -> dict[str, Any]:
    """Waits for a VmVolume's phase and returns its status; AssertionError with what it is."""

    def there() -> dict[str, Any] | None:
        found = status(cluster, name)
        return found if found.get("phase") == phase else None

    found = until(there, lambda: f"VmVolume {name} {phase}: {status(cluster, name)}", DEADLINE_S)
    assert found
    return found


def read_in_a_pod(cluster: Cluster, claim_name: str, at: int, mib: int = 4) -> str:
    """Returns the checksum of a part of a claim, as an ordinary pod reads it."""
    with cluster.applied(READ_BACK.format(claim=claim_name, at=at, mib=mib)):
        cluster.wait_phase("pod/reader", "Succeeded")
        said = cluster.kubectl("logs", "reader").split()[0]
    cluster.wait("pod/reader", "delete")
    return said
