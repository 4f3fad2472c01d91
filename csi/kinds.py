"""The kinds of Kubernetes objects that the driver reads or changes.

msgspec, by which lightkube reads what the server sends, makes its plan of a type when it first
reads one, and another thread that reads one of the type meanwhile ends the process (SIGSEGV;
msgspec 0.22). So one of each type is read here, before there are threads.
"""

from __future__ import annotations

from typing import Any

from lightkube.core.decoders import decode_list, decode_status, decode_watch_event
from lightkube.generic_resource import create_global_resource, create_namespaced_resource


class Kind:
    """A kind of objects: how the server calls it, and what to do where it does not know it."""

    def __init__(
        self,
        group: str,
        version: str,
        name: str,
        plural: str,
        *,
        namespaced: bool = True,
        hint: str = "",
    ) -> None:
        """Makes it known to lightkube, which allows that once."""
        self.api_version = f"{group}/{version}" if group else version
        self.name = name
        self.plural = plural
        self.namespaced = namespaced
        self.hint = hint
        make = create_namespaced_resource if namespaced else create_global_resource
        self.resource: Any = make(group, version, name, plural)
        decode_list(b'{"items": [], "metadata": {}}', self.resource)


decode_watch_event(b'{"type": "", "object": {}}')
decode_status(b'{"details": {"causes": [{}]}, "metadata": {}}')

CLAIM = Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
VOLUME = Kind("", "v1", "PersistentVolume", "persistentvolumes", namespaced=False)
NODE = Kind("", "v1", "Node", "nodes", namespaced=False)
POD = Kind("", "v1", "Pod", "pods")
EVENT = Kind("", "v1", "Event", "events")
STORAGE_CLASS = Kind("storage.k8s.io", "v1", "StorageClass", "storageclasses", namespaced=False)
ATTRIBUTES_CLASS = Kind(
    *("storage.k8s.io", "v1", "VolumeAttributesClass", "volumeattributesclasses"),
    namespaced=False,
    hint="it has them since Kubernetes 1.34",
)
VMI = Kind(
    *("kubevirt.io", "v1", "VirtualMachineInstance", "virtualmachineinstances"),
    hint="install KubeVirt",
)
VM_VOLUME = Kind(
    *("virtlun.dev", "v1alpha1", "VmVolume", "vmvolumes"),
    hint="apply examples/kubernetes/kubevirt/vmvolume-crd.yaml",
)
