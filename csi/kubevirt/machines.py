"""What the driver runs for virtual machines with --kubevirt, put together."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from csi.cluster import Cluster
from csi.kubevirt import probe
from csi.kubevirt.controllers import VmControllers
from csi.kubevirt.launchers import Launchers
from csi.kubevirt.nodehook import NodeHook
from csi.kubevirt.placement import Placement
from csi.kubevirt.podhook import PodHooks
from csi.kubevirt.pods import Pod
from csi.kubevirt.vmvolume.controller import VmVolumeController
from csi.locks import VolumeLocks
from csi.metrics import Metrics
from csi.moves import Moves
from csi.proto import kubevirt_plugin_pb2
from csi.server import handlers, serve_until
from csi.volumes import OwnedVolumes
from pydataplane.client import Client


class VirtualMachines:
    """The node hooks, on the host's socket and in the folders of pods, and the VmVolumes."""

    def __init__(
        self,
        controllers: VmControllers,
        cluster: Cluster,
        node: str,
        metrics: Metrics,
        volumes: OwnedVolumes,
        locks: VolumeLocks,
        moves: Moves | None = None,
    ) -> None:
        """For the virtual machines of `node`; the locks are those of the driver's services."""
        self._controllers = controllers
        self._cluster = cluster
        self._node = node
        self._metrics = metrics
        self.pod_hooks = PodHooks(controllers, self._hook, metrics)
        self._launchers = Launchers(cluster)
        self._placement = Placement(volumes.targets, cluster)
        self._vm_volumes = VmVolumeController(
            cluster, controllers, volumes, locks, node, metrics.registry, moves
        )

    def admit(self, pod: Pod, lvstore: str) -> Client:
        """Returns the target for the controller of a launcher's pod, that of `lvstore` if given.

        Raises:
            Failure, TargetError: the pod is no launcher (Launchers.machine_of), or there is no such
                target now (Placement.target_of).
        """
        return self._placement.target_of(self._launchers.machine_of(pod), lvstore)

    def start(self, running: ExitStack, node_hook: Path) -> None:
        """Serves until `running` ends; `node_hook` is the socket for virt-handler.

        Raises:
            HostError: it cannot listen there.
        """
        running.callback(self._cluster.close)
        described = kubevirt_plugin_pb2.DESCRIPTOR.services_by_name["NodeHookService"]
        serve_until(running, node_hook, [handlers(described, self._hook(), self._metrics)])
        running.callback(self.pod_hooks.stop)
        self.pod_hooks.start()
        running.callback(self._vm_volumes.stop)
        self._vm_volumes.start()

    def _hook(self, only: Pod | None = None) -> NodeHook:
        return NodeHook(self._controllers, self._cluster, self._node, probe.find, only)
