"""An attempt to migrate a machine, step by step, as KubeVirt v1.9's components make it.

Their order: virt-controller makes the target's pod, on another node than the machine's
(pkg/virt-controller/watch/migration). Once it runs and the instance says so, the virt-handler there
calls PreMigrationTarget with the instance as it is and has virt-launcher get ready, which calls the
domain hooks (migration-target.go). The source's virt-handler then calls PreMigrationSource with the
`handled` instance, and only then virt-launcher migrates (migration-source.go). When the domain runs
at the target the instance names that node; the virt-handler there finishes what libvirt cannot, and
calls PostMigrationTarget last.

Real: the scheduler's choice, both pods, the hooks, and libvirt's migration from one to the other.
Not simulated: the VirtualMachineInstanceMigration object, its queue and its timeouts, virt-handlers'
proxies between nodes.
"""  # noqa: E501

from __future__ import annotations

import json
from typing import Any

from tests.kubernetes.kubevirt import objects
from tests.kubernetes.kubevirt.launcher import Launcher
from tests.kubernetes.kubevirt.simulator import Machine
from tests.support.wait import until

UNSCHEDULABLE_S = 60.0


class Migration:
    """One attempt. Each method is a step; HookError or VirshError where it fails."""

    def __init__(self, machine: Machine, name: str = "migration") -> None:
        """Of a machine that runs."""
        self.machine = machine
        self.cluster = machine.cluster
        self.kubevirt = machine.kubevirt
        self.name = name
        self.pod = ""
        """The target's, pod/NAME."""
        self.source = machine.launcher
        self.target: Launcher | None = None

    # virt-controller

    def create_pod(self) -> None:
        """Makes the target's pod; whether any node can have it is not known yet."""
        vmi = self.machine.vmi()
        pod = objects.migration_target(self.machine.pod_of(vmi), vmi, self.name)
        words = ("create", *objects.VIRT_CONTROLLER, "-f", "-", "-o", "name")
        self.pod = self.cluster.kubectl(*words, stdin=json.dumps(pod)).strip()

    def unschedulable(self) -> str:
        """Returns why the scheduler finds no node for the pod, once it says so.

        virt-controller waits for five minutes then, and deletes the pod: `give_up`.
        """

        def said() -> str:
            found: list[dict[str, Any]] = self.cluster.get(self.pod)["status"].get("conditions", [])
            return next(
                (one["message"] for one in found if one.get("reason") == "Unschedulable"), ""
            )

        return str(until(said, "the scheduler's word", deadline_s=UNSCHEDULABLE_S, every_s=0.2))

    def hand_over(self) -> None:
        """Waits for the pod, and gives the instance to the virt-handler of its node as well."""
        self.target = self.machine.launched(self.pod)
        assert self.target.node != self.source.node
        self.machine.launchers.insert(0, self.target)
        self.machine.set(
            activePods={self.target.uid: self.target.node},
            migrationState={
                "migrationUid": self.name,
                "sourceNode": self.source.node,
                "sourcePod": self.source.pod["metadata"]["name"],
                "targetNode": self.target.node,
                "targetPod": self.target.pod["metadata"]["name"],
            },
        )
        self.machine.label("kubevirt.io/migrationTargetNodeName", self.target.node)

    def give_up(self) -> None:
        """Fails it: the target's pod goes, the machine stays where it is."""
        if self.target is not None:
            self.target.end()
            self.machine.set(activePods={self.target.uid: None})
            self.machine.set(migrationState={"failed": True, "completed": True})
        else:
            self.cluster.delete(self.pod)

    # virt-handlers

    def prepare_target(self) -> None:
        """The target's pass before the migration; it may be made again."""
        assert self.target is not None
        vmi = self.machine.vmi()
        self.kubevirt.node_hooks("PreMigrationTarget", vmi, self.target.node)
        self.target.prepare_target(self.machine.handled())

    def migrate(self, *words: str) -> None:
        """The source's pass: asks its node, then migrates, with further words of virsh."""
        assert self.target is not None
        vmi = self.machine.handled()
        self.kubevirt.node_hooks("PreMigrationSource", vmi, self.source.node)
        self.source.migrate_to(self.target, *words)

    def finish(self) -> None:
        """The target's passes after it, and the end of the source's pod."""
        assert self.target is not None
        assert self.target.state() == "running"
        self.machine.set(nodeName=self.target.node)
        self.machine.label("kubevirt.io/nodeName", self.target.node)
        self.kubevirt.node_hooks("PostMigrationTarget", self.machine.vmi(), self.target.node)
        self.machine.set(migrationState={"completed": True})
        self.machine.launchers = [self.source, self.target]
        self.source.end()
        self.machine.set(activePods={self.source.uid: None})
