"""virt-controller, virt-handler and virt-launcher, as far as a storage driver meets them.

`KubeVirt` is the installation: its kinds, its plugins, its node hooks. `Machine` is one VM, moved
step by step as KubeVirt's control loops do, so that a test can stop or crash anything between two
steps. The order and the arguments are KubeVirt v1.9's (pkg/virt-handler/vm.go,
pkg/virt-launcher/virtwrap/manager.go); `legacy` is 1.8 without plugins, with a v1alpha3 sidecar.
"""

from __future__ import annotations

import copy
import json
import os
import shlex
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.kubernetes.cluster import NODE, Cluster
from tests.kubernetes.driver import Deployment
from tests.kubernetes.images import BUSYBOX_IMAGE
from tests.kubernetes.kubevirt import domain as domains
from tests.kubernetes.kubevirt import objects, wire
from tests.kubernetes.kubevirt.compute import Compute
from tests.kubernetes.kubevirt.conditions import Conditions
from tests.kubernetes.kubevirt.wire import HookError
from tests.kubernetes.sandbox import wait_for
from tests.support.agent import Agent, GuestError
from tests.support.libvirtd import VirshError

VMI = "virtualmachineinstance"
NAMESPACE = "default"
RETRY_S = 1.0
START_DEADLINE_S = 120.0
#: The guest's firmware and kernel run in software.
BOOT_DEADLINE_S = 300.0
HOOK_S = 30.0
READY_S = 30.0
QEMU_LOG_BYTES = 3000


class KubeVirt:
    """KubeVirt on a cluster."""

    def __init__(self, cluster: Cluster, deployment: Deployment) -> None:
        """Installs its kinds, and makes the node one that virtual machines may run on."""
        self.cluster = cluster
        self.deployment = deployment
        #: It is 1.8, which knows no plugins.
        self.legacy = False
        self._conditions = Conditions(cluster)
        for definition in objects.definitions():
            cluster.apply(json.dumps(definition))
            name = definition["metadata"]["name"]
            cluster.wait(f"crd/{name}", "condition=Established")
        cluster.kubectl("label", "node", NODE, "kubevirt.io/schedulable=true", "--overwrite")

    def hooks(self, kind: str, vmi: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields plugins' names and their hooks for an instance, in the order of their calls.

        `kind` is nodeHooks or domainHooks.
        """
        if self.legacy:
            return
        found = self.cluster.items(f"plugins.{objects.PLUGIN_GROUP}")
        for plugin in sorted(found, key=lambda plugin: str(plugin["metadata"]["name"])):
            for hook in plugin["spec"].get(kind, []):
                wanted = (plugin["spec"].get("condition", ""), hook.get("condition", ""))
                if all(self._conditions.hold(one, vmi) for one in wanted):
                    yield plugin["metadata"]["name"], hook

    def place(self, path: str) -> Path:
        """Returns where a path of the node is in truth; KeyError where it is not known."""
        deployment = self.deployment
        host = {
            "/var/lib/kubelet": deployment.node.kubelet_dir,
            "/run/virtlun": deployment.run_dir,
            "/var/run/virtlun": deployment.run_dir,
        }
        for prefix, place in host.items():
            if Path(path).is_relative_to(prefix):
                return Path(place) / Path(path).relative_to(prefix)
        raise KeyError(f"there is no place here for {path}")

    def node_hooks(self, point: str, vmi: dict[str, Any]) -> None:
        """Calls the node hooks of every plugin; HookError where one fails that must not."""
        for name, hook in self.hooks("nodeHooks", vmi):
            if point not in hook["permittedHooks"]:
                continue
            socket = self.place(hook["socket"])
            try:
                wire.execute_node_hook(
                    socket, point, json.dumps(vmi).encode(), NODE, _seconds(hook)
                )
            except HookError as error:
                if hook.get("failureStrategy") != "Ignore":
                    raise HookError(f"node hook {point} from plugin {name}: {error}") from None


class Machine:
    """One VirtualMachine and what runs of it. `close` ends what a test left."""

    def __init__(self, kubevirt: KubeVirt, name: str, *, qemu: Path = objects.QEMU) -> None:
        """Of the VirtualMachine `name`, which is there; `qemu` is its launcher image's."""
        self.kubevirt = kubevirt
        self.cluster = kubevirt.cluster
        self.name = name
        self.qemu = qemu
        #: Short paths of what has long ones (108 bytes at most, unix(7)).
        self.links = self.cluster.scratch / f"l-{name}"
        self.compute: Compute | None = None
        self.pod: dict[str, Any] = {}
        self.failures: list[str] = []
        """What virt-handler said of passes that failed (its SyncFailed events)."""
        self.runs = 0
        self._hooks_found: list[Path] = []

    # virt-controller

    def create(self) -> None:
        """Makes the instance and its launcher pod, and waits until the pod runs."""
        vm = self.cluster.get("virtualmachine", self.name)
        self.cluster.apply(json.dumps(objects.instance(vm)))
        self.create_pod()

    def create_pod(self) -> None:
        """Makes the launcher pod of the instance, and moves the instance on to Scheduled."""
        vmi = self.vmi()
        modes = {claim: self._claim(claim)["spec"]["volumeMode"] for claim in self.claims()}
        pod = objects.launcher_pod(
            vmi,
            modes,
            qemu=self.qemu,
            plugins=not self.kubevirt.legacy,
            image=BUSYBOX_IMAGE,
        )
        made = self.cluster.kubectl(
            *("create", "-f", "-", "-o", "name"), stdin=json.dumps(pod)
        ).strip()
        self._set(phase="Scheduling")
        self.cluster.wait(made, "condition=Ready")
        self.pod = self.cluster.get(made)
        uid = self.pod["metadata"]["uid"]
        self._set(phase="Scheduled", nodeName=NODE, activePods={uid: NODE})
        self.cluster.kubectl("label", VMI, self.name, f"kubevirt.io/nodeName={NODE}", "--overwrite")
        self.update_volumes()

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
        self._set(volumeStatus=status)

    def vmi(self) -> dict[str, Any]:
        """Returns the instance."""
        return dict(self.cluster.get(VMI, self.name))

    def claims(self) -> list[str]:
        """Returns the names of its claims."""
        return list(objects.claims(self.vmi()).values())

    def _claim(self, name: str) -> dict[str, Any]:
        return dict(self.cluster.get("pvc", name))

    def _set(self, **status: Any) -> None:
        patch = json.dumps({"status": status})
        self.cluster.kubectl("patch", VMI, self.name, "--type=merge", "-p", patch)

    # virt-handler

    def handled(self) -> dict[str, Any]:
        """Returns the instance as virt-handler gives it to hooks and to virt-launcher.

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
        self.kubevirt.node_hooks("PreVMStart", self.handled())

    def sync(self) -> None:
        """One pass over an instance that does not run yet; HookError or VirshError if it fails."""
        self.pre_start()
        self.launch()
        self._set(phase="Running")
        self.kubevirt.node_hooks("PostVMStart", self.handled())

    def start(self, deadline_s: float = START_DEADLINE_S) -> Agent:
        """Makes all of it and passes over it until it runs; returns the booted guest's agent."""
        self.create()
        return self.run(deadline_s)

    def run(self, deadline_s: float = START_DEADLINE_S) -> Agent:
        """Passes over the instance until it runs, as virt-handler does, and waits for its guest."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                self.sync()
                break
            except (HookError, VirshError) as error:
                self.failures.append(str(error))
                if time.monotonic() > end:
                    raise
                time.sleep(RETRY_S)
        return self.agent()

    # virt-launcher

    def launch(self) -> None:
        """What virt-launcher does when it is told to sync: define the domain, then start it."""
        compute = self.container()
        vmi = self.handled()
        state = compute.state(self.domain)
        if not state:
            self._define(vmi)
            state = compute.state(self.domain)
        if state == "shut off":
            compute.virsh("start", self.domain)
            self.runs += 1

    def container(self) -> Compute:
        """Returns the compute container with its libvirtd, started if it does not run."""
        if self.compute is None:
            folder = self.folder
            volumes = {claim: self._claim(claim)["spec"]["volumeName"] for claim in self.claims()}
            self.links.mkdir(exist_ok=True)
            number = len(list(self.cluster.scratch.glob(f"c-{self.name}-*")))
            self.compute = Compute(
                self.kubevirt.deployment.box,
                self.cluster.scratch / f"c-{self.name}-{number}",
                self.pod,
                folder,
                volumes,
                self.qemu,
            )
            for place, source in self.compute.mounted.items():
                link = self.links / Path(place).name
                link.unlink(missing_ok=True)
                link.symlink_to(source)
            private = self.links / "kubevirt-private" / self.uid
            private.mkdir(exist_ok=True)
            os.chown(private, objects.NON_ROOT, objects.NON_ROOT)
            self._make_host_disks()
            self._hooks_found = self._collect() if self.kubevirt.legacy else []
        return self.compute

    def _make_host_disks(self) -> None:
        """Makes disk.img, sparse, in claims of mode Filesystem that have none (pkg/host-disk)."""
        assert self.compute is not None
        for volume in self.handled()["spec"].get("volumes", []):
            if "hostDisk" not in volume:
                continue
            inside = Path(volume["hostDisk"]["path"])
            folder = self.compute.mounted[str(inside.parent)]
            file = shlex.quote(str(folder / inside.name))
            free = f"$(($(stat -f -c '%a * %S' {shlex.quote(str(folder))}) >> 20))M"
            owner = f"{objects.NON_ROOT}:{objects.NON_ROOT}"
            script = f"[ -e {file} ] || truncate -s {free} {file}; chown {owner} {file}"
            self.kubevirt.deployment.box.run("sh", "-ec", script)

    def _collect(self) -> list[Path]:
        """Asks each legacy sidecar for its hook points; virt-launcher is not ready before."""
        wanted = [one["name"] for one in self.pod["spec"]["containers"] if "hook-" in one["name"]]
        found = []
        for name in wanted:
            folder = self.links / "kubevirt-hooks" / name
            socket = wait_for(partial(_first, folder), f"the socket of {name}", seconds=READY_S)
            info = wait_for(partial(_info, socket), f"{name} to answer", seconds=READY_S)
            assert "v1alpha3" in info.versions, info
            found.append(socket)
        return found

    def _define(self, vmi: dict[str, Any]) -> None:
        """Makes the domain and defines it, two or three times, with the hooks each time."""
        wanted = domains.convert(vmi)
        interfaces = len(wanted.findall("devices/interface"))
        compute = self.container()
        count = domains.placeholders(interfaces)
        if count:
            self._define_once(domains.with_placeholders(wanted, count), vmi)
            wanted = domains.read_back(wanted, self._inactive())
        wanted = self._define_once(wanted, vmi)
        if not count:
            wanted = domains.read_back(wanted, self._inactive())
        self._define_once(domains.with_ports(wanted, interfaces), vmi)
        assert compute.state(self.domain) == "shut off"

    def _define_once(self, wanted: domains.Element, vmi: dict[str, Any]) -> domains.Element:
        """Calls the domain hooks and defines the result; returns what KubeVirt keeps of it."""
        text = domains.encode(wanted)
        words = json.dumps(vmi).encode()
        for socket in self._hooks_found:
            text = wire.on_define_domain(socket, text, words)
        for name, hook in self.kubevirt.hooks("domainHooks", vmi):
            inside = Path(hook["sidecar"]["socketPath"])
            base = Path(objects.PLUGIN_SOCKETS) / name
            if not inside.is_relative_to(base):
                raise HookError(f"invalid socket path: {inside} is outside {base}")
            socket = self.links / "kubevirt-plugin" / inside.relative_to(objects.PLUGIN_SOCKETS)
            wire.wait_for_socket(socket, READY_S)
            try:
                text = wire.mutate_domain(socket, text, words, _seconds(hook))
            except HookError as error:
                if hook.get("failureStrategy") != "Ignore":
                    raise HookError(f"plugin {name}: {error}") from None
        mutated = domains.parse(text)
        # legacy: what the sidecar said is defined as it is; plugins: as libvirtxml writes it
        self.container().define(text if self._hooks_found else domains.encode(mutated))
        return domains.as_spec(mutated)

    def _inactive(self) -> str:
        return self.container().virsh("dumpxml", "--inactive", self.domain)

    # What there is

    @property
    def uid(self) -> str:
        """The instance's uid."""
        return str(self.pod["metadata"]["labels"]["kubevirt.io/created-by"])

    @property
    def pod_uid(self) -> str:
        """The launcher pod's uid."""
        return str(self.pod["metadata"]["uid"])

    @property
    def domain(self) -> str:
        """The domain's name."""
        return f"{NAMESPACE}_{self.name}"

    @property
    def folder(self) -> Path:
        """kubelet's directory of the launcher pod."""
        return self.cluster.kubelet_dir / "pods" / self.pod_uid

    def xml(self) -> domains.Element:
        """Returns the running domain."""
        return domains.parse(self.container().virsh("dumpxml", self.domain).encode())

    def agent(self) -> Agent:
        """Returns the command channel into the guest, once it has booted."""
        agent = Agent(self.links / "kubevirt-private" / self.uid / "agent")
        try:
            agent.wait_ready(BOOT_DEADLINE_S)
        except GuestError as error:
            log = self.container().qemu_log(self.domain)[-QEMU_LOG_BYTES:]
            raise GuestError(f"{error}\nIts console:\n{self.console()}\nQEMU:\n{log}") from error
        return agent

    def console(self) -> str:
        """Returns the end of what the guest printed."""
        path = self.links / "kubevirt-private" / self.uid / "virt-serial0-log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    # Its end

    def stop(self) -> None:
        """What follows when its VirtualMachine has been deleted; returns when nothing is left."""
        for _ in range(2):  # virt-handler says it on each pass, until the domain is gone
            self.kubevirt.node_hooks("PreVMStop", self.handled())
        self.end_domain()
        self._set(phase="Succeeded")
        self.kubevirt.node_hooks("PostVMStop", self.handled())
        self.end_launcher()
        self.finish()

    def end_domain(self) -> None:
        """Ends the guest; it has no ACPI daemon, so it is the grace period's end that does it."""
        assert self.compute is not None
        if self.compute.state(self.domain) == "running":
            self.compute.virsh("destroy", self.domain)
        self.compute.virsh("undefine", self.domain)
        for socket in self._hooks_found:
            wire.shutdown(socket)

    def end_launcher(self) -> None:
        """Ends the compute container, and with it QEMU if that still runs; deletes the pod."""
        if self.compute is not None:
            self.compute.stop()
            self.compute = None
        if self.pod:
            self.cluster.delete("pod", self.pod["metadata"]["name"], wait=False)
            self.cluster.wait(f"pod/{self.pod['metadata']['name']}", "delete")

    def finish(self) -> None:
        """Lets the instance go, which virt-controller does when the pod is gone."""
        patch = '{"metadata":{"finalizers":null}}'
        self.cluster.kubectl("patch", VMI, self.name, "--type=merge", "-p", patch, check=False)
        self.cluster.delete(VMI, self.name)

    def close(self) -> None:
        """Ends whatever is left of it; safe at any point."""
        self.cluster.delete("virtualmachine", self.name, wait=False)
        if self.compute is not None:
            self.compute.stop()
            self.compute = None
        selector = f"vm.kubevirt.io/name={self.name}"
        words = ("pod", "-l", selector, "--grace-period=1")
        self.cluster.kubectl("delete", *words, check=False)
        self.finish()


def _seconds(hook: dict[str, Any]) -> float:
    """Returns a hook's time, of a form such as 30s or 1m30s."""
    text = hook.get("timeout", "")
    minutes, _, rest = text.rpartition("m")
    return (float(minutes or 0) * 60 + float(rest.removesuffix("s") or 0)) if text else HOOK_S


def _first(folder: Path) -> Path | None:
    return next(folder.glob("*"), None)


def _info(socket: Path) -> Any:
    try:
        return wire.info(socket)
    except HookError:
        return None
