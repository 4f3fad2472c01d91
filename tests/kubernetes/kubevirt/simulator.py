"""virt-controller and virt-handler, as far as a storage driver meets them.

`KubeVirt` is the installation: its kinds, its plugins, its node hooks. `Machine` is one VM, moved
step by step as KubeVirt's control loops do, so that a test can stop or crash anything between two
steps. The order and the arguments are KubeVirt v1.9's (pkg/virt-handler/vm.go); `legacy` is 1.8
without plugins, with a v1alpha3 sidecar. When a node hook is called, and with which instance:

| hook point | when | instance |
| --- | --- | --- |
| PreVMStart | in each pass, before virt-launcher's SyncVMI, until it is Running | `handled` |
| PostVMStart | once, after the status became Running; a failure does not undo that | as it is |
| PreVMStop | in each pass over a domain that is to end, before it is told to | as it is |
| PostVMStop | in each pass over an instance that has ended and has no live domain | as it is |
| the three of migrations | see `migration` | |
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import Deployment
from tests.kubernetes.images import BUSYBOX_IMAGE
from tests.kubernetes.kubevirt import domain as domains
from tests.kubernetes.kubevirt import objects, wire
from tests.kubernetes.kubevirt.conditions import Conditions
from tests.kubernetes.kubevirt.launcher import Launcher, seconds
from tests.kubernetes.kubevirt.wire import HookError
from tests.kubernetes.sandbox import SandboxError
from tests.support.agent import Agent
from tests.support.libvirtd import VirshError

VMI = "virtualmachineinstance"
RETRY_S = 1.0
START_DEADLINE_S = 120.0


class KubeVirt:
    """KubeVirt on a cluster."""

    def __init__(self, cluster: Cluster, *deployments: Deployment) -> None:
        """Installs its kinds, and makes our driver's nodes ones that virtual machines may run on.

        The first node is the cluster's own.
        """
        self.cluster = cluster
        self.deployment = deployments[0]
        self.deployments = {one.node.name: one for one in deployments}
        #: It is 1.8, which knows no plugins.
        self.legacy = False
        #: It is what 1.10 is to be, which reads launcherHooks where 1.9 reads domainHooks.
        self.has_launcher_hooks = False
        #: The node hooks that virt-handlers have called: hook point and node.
        self.called: list[tuple[str, str]] = []
        self._conditions = Conditions(cluster)
        for definition in objects.definitions():
            cluster.apply(json.dumps(definition))
            name = definition["metadata"]["name"]
            cluster.wait(f"crd/{name}", "condition=Established")
        for node in self.deployments:
            label = {"kubevirt.io/schedulable": "true"}
            cluster.patch("node", node, {"metadata": {"labels": label}})

    def hooks(self, kind: str, vmi: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yields plugins' names and their numbered hooks for an instance, in their calls' order.

        `kind` is nodeHooks, domainHooks or launcherHooks. Each hook has its failureStrategy, which
        one of the launcher may have from its plugin.
        """
        if self.legacy:
            return
        found = self.cluster.items(f"plugins.{objects.PLUGIN_GROUP}")
        for plugin in sorted(found, key=lambda plugin: str(plugin["metadata"]["name"])):
            spec = plugin["spec"]
            otherwise = spec.get("failureStrategy") if kind != "nodeHooks" else None
            for number, hook in enumerate(spec.get(kind, [])):
                wanted = (spec.get("condition", ""), hook.get("condition", ""))
                if all(self._conditions.hold(one, vmi) for one in wanted):
                    strategy = hook.get("failureStrategy") or otherwise or "Fail"
                    yield plugin["metadata"]["name"], number, {**hook, "failureStrategy": strategy}

    def place(self, path: str, node: str) -> Path:
        """Returns where a path of a node is in truth; KeyError where it is not known."""
        deployment = self.deployments[node]
        host = {
            "/var/lib/kubelet": deployment.node.kubelet_dir,
            "/run/virtlun": deployment.run_dir,
            "/var/run/virtlun": deployment.run_dir,
        }
        for prefix, place in host.items():
            if Path(path).is_relative_to(prefix):
                return Path(place) / Path(path).relative_to(prefix)
        raise KeyError(f"there is no place here for {path}")

    def node_hooks(self, point: str, vmi: Mapping[str, Any], node: str) -> None:
        """Calls every plugin's node hooks of a node; HookError where one fails that must not."""
        words = json.dumps(vmi).encode()
        for name, _, hook in self.hooks("nodeHooks", vmi):
            if point not in hook["permittedHooks"]:
                continue
            socket = self.place(hook["socket"], node)
            self.called.append((point, node))
            try:
                wire.execute_node_hook(socket, point, words, node, seconds(hook))
            except HookError as error:
                if hook["failureStrategy"] != "Ignore":
                    text = f"node hook {point} from plugin {name} failed: {error}"
                    raise HookError(text) from None


class Machine:
    """One VirtualMachine and what runs of it. `close` ends what a test left."""

    def __init__(self, kubevirt: KubeVirt, name: str, *, qemu: Path = objects.QEMU) -> None:
        """Of the VirtualMachine `name`, which is there; `qemu` is its launcher image's."""
        self.kubevirt = kubevirt
        self.cluster = kubevirt.cluster
        self.name = name
        self.qemu = qemu
        self.launchers: list[Launcher] = []
        """The one that the machine runs in is the last; a migration puts another one there."""
        self.failures: list[str] = []
        """What virt-handler said of passes that failed (its SyncFailed events)."""

    # virt-controller

    def create(self) -> None:
        """Makes the instance and its launcher pod, and waits until the pod runs."""
        vm = self.cluster.get("virtualmachine", self.name)
        self.cluster.apply(json.dumps(objects.instance(vm)))
        self.create_pod()

    def create_pod(self) -> None:
        """Makes the launcher pod of the instance, and moves the instance on to Scheduled."""
        pod = self.pod_of(self.vmi())
        made = self.cluster.kubectl(
            *("create", *objects.VIRT_CONTROLLER, "-f", "-", "-o", "name"), stdin=json.dumps(pod)
        ).strip()
        self.set(phase="Scheduling")
        launcher = self.launched(made)
        self.launchers.append(launcher)
        self.set(
            phase="Scheduled", nodeName=launcher.node, activePods={launcher.uid: launcher.node}
        )
        self.label("kubevirt.io/nodeName", launcher.node)
        self.update_volumes()

    def pod_of(self, vmi: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a launcher pod for an instance as virt-controller makes it."""
        modes = {claim: self._claim(claim)["spec"]["volumeMode"] for claim in self.claims()}
        return objects.launcher_pod(
            vmi,
            modes,
            qemu=self.qemu,
            plugins=not self.kubevirt.legacy,
            image=BUSYBOX_IMAGE,
        )

    def launched(self, pod: str) -> Launcher:
        """Waits for a launcher pod (pod/NAME) to run."""
        self.cluster.wait(pod, "condition=Ready")
        volumes = {claim: self._claim(claim)["spec"]["volumeName"] for claim in self.claims()}
        return Launcher(self.kubevirt, self.cluster.get(pod), volumes, self.qemu)

    def update_volumes(self) -> None:
        """Puts into the instance's status what its claims are now."""
        vmi = self.vmi()
        status = []
        for volume, claim in objects.claims(vmi).items():
            found = self._claim(claim)
            status.append(
                {
                    "name": volume,
                    "target": "",
                    "persistentVolumeClaimInfo": {
                        "claimName": claim,
                        "accessModes": found["spec"]["accessModes"],
                        "volumeMode": found["spec"]["volumeMode"],
                        "capacity": found["status"]["capacity"],
                        "requests": found["spec"]["resources"]["requests"],
                    },
                }
            )
        self.set(volumeStatus=status)

    def vmi(self) -> dict[str, Any]:
        """Returns the instance."""
        return dict(self.cluster.get(VMI, self.name))

    def claims(self) -> list[str]:
        """Returns the names of its claims."""
        return list(objects.claims(self.vmi()).values())

    def _claim(self, name: str) -> dict[str, Any]:
        return dict(self.cluster.get("pvc", name))

    def set(self, **status: Any) -> None:
        """Merges something into the instance's status; None takes a key away."""
        self.cluster.patch(VMI, self.name, {"status": status})

    def label(self, key: str, value: str) -> None:
        """Gives the instance a label."""
        self.cluster.patch(VMI, self.name, {"metadata": {"labels": {key: value}}})

    # virt-handler

    def handled(self) -> dict[str, Any]:
        """Returns the instance as virt-handler gives it to virt-launcher, and to some hooks.

        Claims of mode Filesystem have become hostDisks in it (pkg/host-disk).
        """
        vmi = copy.deepcopy(self.vmi())
        told = {
            one["name"]: one["persistentVolumeClaimInfo"] for one in vmi["status"]["volumeStatus"]
        }
        for volume in vmi["spec"].get("volumes", []):
            if told.get(volume["name"], {}).get("volumeMode") != "Filesystem":
                continue
            del volume["persistentVolumeClaim"]
            volume["hostDisk"] = {
                "path": f"{domains.PRIVATE}/vmi-disks/{volume['name']}/disk.img",
                "type": "DiskOrCreate",
                "capacity": told[volume["name"]]["capacity"]["storage"],
            }
        return vmi

    def pre_start(self) -> None:
        """The node hook of a pass over an instance that does not run yet."""
        self.kubevirt.node_hooks("PreVMStart", self.handled(), self.node)

    def sync(self) -> None:
        """One pass over an instance that does not run yet; HookError or VirshError if it fails."""
        self.pre_start()
        self.launch()
        self.set(phase="Running")
        try:
            self.kubevirt.node_hooks("PostVMStart", self.vmi(), self.node)
        except HookError as error:  # the next pass finds it running, and does not call it again
            self.failures.append(str(error))

    def start(self, deadline_s: float = START_DEADLINE_S) -> Agent:
        """Makes all of it and passes over it until it runs; returns the booted guest's agent."""
        self.create()
        return self.run(deadline_s)

    def run(self, deadline_s: float = START_DEADLINE_S) -> Agent:
        """Passes over the instance until it runs, as virt-handler does, and waits for its guest."""
        self.run_domain(deadline_s)
        return self.agent()

    def run_domain(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Passes over the instance until its domain runs, with a guest in it or without."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                self.sync()
                return
            except (HookError, VirshError) as error:
                self.failures.append(str(error))
                if time.monotonic() > end:
                    raise
                time.sleep(RETRY_S)

    def launch(self) -> None:
        """What virt-launcher does when it is told to sync."""
        self.launcher.sync(self.handled())

    # What there is

    @property
    def launcher(self) -> Launcher:
        """What it runs in."""
        return self.launchers[-1]

    @property
    def pod(self) -> dict[str, Any]:
        """The launcher pod."""
        return self.launcher.pod

    @property
    def uid(self) -> str:
        """The instance's uid."""
        return self.launcher.machine_uid

    @property
    def pod_uid(self) -> str:
        """The launcher pod's uid."""
        return self.launcher.uid

    @property
    def node(self) -> str:
        """The node that it runs on."""
        return self.launcher.node

    @property
    def runs(self) -> int:
        """How often its launcher has started it."""
        return self.launcher.runs

    def xml(self) -> domains.Element:
        """Returns the running domain."""
        return self.launcher.xml()

    def agent(self) -> Agent:
        """Returns the command channel into the guest, once it has booted."""
        return self.launcher.agent()

    # Its end

    def stop(self) -> None:
        """What follows when its VirtualMachine has been deleted; returns when nothing is left."""
        for _ in range(2):  # virt-handler says it on each pass, until the domain is gone
            self.kubevirt.node_hooks("PreVMStop", self.vmi(), self.node)
        self.launcher.end_domain()
        self.set(phase="Succeeded")
        for _ in range(2):  # and this one, until the instance is gone
            self.kubevirt.node_hooks("PostVMStop", self.vmi(), self.node)
        self.launcher.end()
        self.finish()

    def finish(self) -> None:
        """Lets the instance go, which virt-controller does when the pod is gone."""
        with contextlib.suppress(SandboxError):  # it is gone already
            self.cluster.patch(VMI, self.name, {"metadata": {"finalizers": None}})
        self.cluster.delete(VMI, self.name)

    def close(self) -> None:
        """Ends whatever is left of it; safe at any point."""
        self.cluster.delete("virtualmachine", self.name, wait=False)
        for launcher in self.launchers:
            launcher.stop()
        selector = f"vm.kubevirt.io/name={self.name}"
        words = ("pod", "-l", selector, "--grace-period=1")
        self.cluster.kubectl("delete", *words, check=False)
        self.finish()
