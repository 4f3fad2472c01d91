"""KubeVirt's objects in the API server: its kinds, a VM's instance, and the launcher pod.

Pure functions. What stands here is what KubeVirt v1.9 makes of the same VM as far as a storage
driver can see it: names, labels, owners, security context, volumes, sockets. The launcher's image
is a busybox with the machine's own QEMU bound into it; the launcher itself is this package.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

GROUP = "kubevirt.io"
PLUGIN_GROUP = "plugin.kubevirt.io"
NON_ROOT = 107  # the user and group qemu, of every VM
LAUNCHER = "virt-launcher"
#: kubectl's words for the account that makes launchers' pods.
VIRT_CONTROLLER = (
    "--as=system:serviceaccount:kubevirt:kubevirt-controller",
    "--as-group=system:masters",
)
HOOK_SIDECARS = "hooks.kubevirt.io/hookSidecars"
PLUGIN_SOCKETS = "/var/run/kubevirt-plugin"
HOOK_SOCKETS = "/var/run/kubevirt-hooks"
QEMU = Path("/usr/bin/qemu-system-x86_64")
GRACE_PADDING_S = 15

#: plural, kind, scope of each kind, by group and version.
KINDS = {
    (GROUP, "v1"): (
        ("virtualmachines", "VirtualMachine", "Namespaced"),
        ("virtualmachineinstances", "VirtualMachineInstance", "Namespaced"),
    ),
    (PLUGIN_GROUP, "v1alpha1"): (("plugins", "Plugin", "Cluster"),),
}


def definitions() -> Iterator[dict[str, Any]]:
    """Yields the definitions of KubeVirt's kinds, which take every field.

    As there, a VirtualMachineInstance has no status subresource: its components write all of it.
    """
    for (group, version), kinds in KINDS.items():
        for plural, kind, scope in kinds:
            yield {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{plural}.{group}"},
                "spec": {
                    "group": group,
                    "scope": scope,
                    "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
                    "versions": [
                        {
                            "name": version,
                            "served": True,
                            "storage": True,
                            "schema": {
                                "openAPIV3Schema": {
                                    "type": "object",
                                    "x-kubernetes-preserve-unknown-fields": True,
                                }
                            },
                        }
                    ],
                },
            }


def owner(kind: str, of: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the reference to the object that controls another."""
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": kind,
        "name": of["metadata"]["name"],
        "uid": of["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def instance(vm: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the VirtualMachineInstance that virt-controller makes of a VirtualMachine."""
    template = vm["spec"]["template"]
    metadata = template.get("metadata", {})
    name = vm["metadata"]["name"]
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {
            "name": name,
            "namespace": vm["metadata"]["namespace"],
            "labels": {**metadata.get("labels", {}), "vmi.kubevirt.io/id": name},
            "annotations": dict(metadata.get("annotations", {})),
            "finalizers": ["foregroundDeleteVirtualMachine"],
            "ownerReferences": [owner("VirtualMachine", vm)],
        },
        "spec": template["spec"],
        "status": {"phase": "Pending"},
    }


def claims(vmi: Mapping[str, Any]) -> dict[str, str]:
    """Returns the claims of a VMI's volumes, by volume name."""
    return {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in vmi["spec"].get("volumes", [])
        if "persistentVolumeClaim" in volume
    }


def launcher_pod(
    vmi: Mapping[str, Any], modes: Mapping[str, str], *, qemu: Path, plugins: bool, image: str
) -> dict[str, Any]:
    """Returns the launcher pod that virt-controller makes, before any admission.

    `modes` is each claim's volumeMode; `qemu` is what the container has for an emulator; with
    `plugins` the gate of that name is on (KubeVirt 1.9).
    """
    metadata = vmi["metadata"]
    volumes: list[dict[str, Any]] = [{"name": "private", "emptyDir": {}}]
    mounts = [{"name": "private", "mountPath": "/var/run/kubevirt-private"}]
    devices = []
    for name, claim in claims(vmi).items():
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
        if modes[claim] == "Block":
            devices.append({"name": name, "devicePath": f"/dev/{name}"})
        else:
            place = f"/var/run/kubevirt-private/vmi-disks/{name}"
            mounts.append({"name": name, "mountPath": place})
    sidecars = json.loads(metadata.get("annotations", {}).get(HOOK_SIDECARS, "[]"))
    if sidecars:
        volumes.append({"name": "hook-sidecar-sockets", "emptyDir": {}})
        mounts.append({"name": "hook-sidecar-sockets", "mountPath": HOOK_SOCKETS})
    if plugins:
        volumes.append({"name": "kubevirt-plugin-sockets", "emptyDir": {}})
        mounts.append({"name": "kubevirt-plugin-sockets", "mountPath": PLUGIN_SOCKETS})
    # not KubeVirt's: its image has QEMU
    volumes.append({"name": "qemu", "hostPath": {"path": str(qemu), "type": "File"}})
    mounts.append({"name": "qemu", "mountPath": str(QEMU)})
    compute = {
        "name": "compute",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", "trap 'exit 0' TERM; sleep 1000000 & wait"],
        "securityContext": _unprivileged(add=["NET_BIND_SERVICE"]),
        "volumeMounts": mounts,
        "volumeDevices": devices,
    }
    grace = vmi["spec"].get("terminationGracePeriodSeconds", 30)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{LAUNCHER}-{metadata['name']}-",
            "namespace": metadata["namespace"],
            "labels": {
                **metadata.get("labels", {}),
                "kubevirt.io": LAUNCHER,
                "kubevirt.io/created-by": metadata["uid"],
                "vm.kubevirt.io/name": metadata["name"],
            },
            "annotations": {
                "kubevirt.io/domain": metadata["name"],
                **{
                    key: value
                    for key, value in metadata.get("annotations", {}).items()
                    if not key.startswith("kubectl.kubernetes.io")
                },
                "kubectl.kubernetes.io/default-container": "compute",
            },
            "ownerReferences": [owner("VirtualMachineInstance", vmi)],
        },
        "spec": {
            "hostname": metadata["name"],
            "restartPolicy": "Never",
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace + 2 * GRACE_PADDING_S,
            "nodeSelector": {
                "kubevirt.io/schedulable": "true",
                **vmi["spec"].get("nodeSelector", {}),
            },
            "securityContext": {
                "fsGroup": NON_ROOT,
                "runAsUser": NON_ROOT,
                "runAsGroup": NON_ROOT,
                "runAsNonRoot": True,
            },
            "containers": [compute, *_sidecars(sidecars)],
            "volumes": volumes,
        },
    }


def migration_target(pod: Mapping[str, Any], vmi: Mapping[str, Any], migration: str) -> Any:
    """Returns a launcher pod as the one that a running VM is to migrate to, on another node.

    `migration` is the name and, here, the uid of the VirtualMachineInstanceMigration.
    """
    made = copy.deepcopy(dict(pod))
    made["metadata"]["labels"]["kubevirt.io/migrationJobUID"] = migration
    made["metadata"]["annotations"]["kubevirt.io/migrationJobName"] = migration
    apart = {
        "labelSelector": {"matchLabels": {"kubevirt.io/created-by": vmi["metadata"]["uid"]}},
        "topologyKey": "kubernetes.io/hostname",
    }
    made["spec"]["affinity"] = {
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    }
    return made


def _sidecars(requested: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the containers of the annotation `hooks.kubevirt.io/hookSidecars`."""
    for number, sidecar in enumerate(requested):
        name = f"hook-sidecar-{number}"
        container = {
            "name": name,
            "image": sidecar["image"],
            "imagePullPolicy": sidecar.get("imagePullPolicy") or "IfNotPresent",
            "env": [{"name": "CONTAINER_NAME", "value": name}],
            "securityContext": _unprivileged(),
            "volumeMounts": [
                {"name": "hook-sidecar-sockets", "mountPath": HOOK_SOCKETS, "subPath": name}
            ],
        }
        for key in ("command", "args"):
            if sidecar.get(key):
                container[key] = sidecar[key]
        yield container


def _unprivileged(add: list[str] | None = None) -> dict[str, Any]:
    return {
        "runAsUser": NON_ROOT,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], **({"add": add} if add else {})},
    }
