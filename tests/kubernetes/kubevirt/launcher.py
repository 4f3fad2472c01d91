"""virt-launcher, of one pod: the domain's XML, the domain hooks, define, start and end.

The order and the arguments are KubeVirt v1.9's (pkg/virt-launcher/virtwrap/manager.go and
live-migration-target.go, cmd/virt-launcher/virt-launcher.go); `KubeVirt.legacy` is 1.8's, and
`KubeVirt.has_launcher_hooks` that of its pull request 19160, for 1.10.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import Deployment
from tests.kubernetes.kubevirt import domain as domains
from tests.kubernetes.kubevirt import objects, wire
from tests.kubernetes.kubevirt.compute import Compute
from tests.kubernetes.kubevirt.wire import HookError
from tests.kubernetes.sandbox import MIGRATION_PORT
from tests.support.agent import Agent, GuestError
from tests.support.wait import until

#: The guest's firmware and kernel run in software.
BOOT_DEADLINE_S = 300.0
HOOK_S = 30.0
READY_S = 30.0
MIGRATED_S = 240.0
QEMU_LOG_BYTES = 3000


class Installed(Protocol):
    """What a launcher pod knows of the KubeVirt that it is of."""

    cluster: Cluster
    deployments: dict[str, Deployment]
    legacy: bool
    has_launcher_hooks: bool

    def hooks(self, kind: str, vmi: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yields plugins' names and their numbered hooks for an instance."""
        ...


class Launcher:
    """One launcher pod that runs. Each `vmi` is what virt-handler gives (`Machine.handled`)."""

    def __init__(
        self, kubevirt: Installed, pod: dict[str, Any], volumes: Mapping[str, str], qemu: Path
    ) -> None:
        """`volumes` are the names of the persistent volumes by claim; `qemu` is its image's."""
        self.kubevirt = kubevirt
        self.pod = pod
        self.name = str(pod["metadata"]["labels"]["vm.kubevirt.io/name"])
        self.uid = str(pod["metadata"]["uid"])
        self.node = str(pod["spec"]["nodeName"])
        self.machine_uid = str(pod["metadata"]["labels"]["kubevirt.io/created-by"])
        self.domain = f"{pod['metadata']['namespace']}_{self.name}"
        self.compute: Compute | None = None
        self.runs = 0
        #: Short paths of what has long ones (108 bytes at most, unix(7)).
        self.links = kubevirt.cluster.scratch / f"l-{self.uid[:8]}"
        self._volumes = volumes
        self._qemu = qemu
        self._hooks_found: list[Path] = []

    @property
    def deployment(self) -> Deployment:
        """Our driver on its node."""
        return self.kubevirt.deployments[self.node]

    @property
    def folder(self) -> Path:
        """kubelet's directory of the pod."""
        return self.deployment.node.kubelet_dir / "pods" / self.uid

    # What it does

    def sync(self, vmi: Mapping[str, Any]) -> None:
        """SyncVMI: defines the domain where there is none, and starts it where it is shut off."""
        compute = self.container(vmi)
        state = compute.state(self.domain)
        if not state:
            self._define(vmi)
            state = compute.state(self.domain)
        if state == "shut off":
            compute.virsh("start", self.domain)
            self.runs += 1

    def prepare_target(self, vmi: Mapping[str, Any]) -> None:
        """SyncMigrationTarget: calls the hooks; the source's domain is what counts, not theirs."""
        self.container(vmi)
        self._hooked(domains.convert(vmi), vmi, "MigrationTarget")

    def migrate_to(self, target: Launcher, *words: str) -> None:
        """MigrateVirtualMachine: libvirt moves the domain, with KubeVirt's flags and both XMLs.

        To the other libvirtd and QEMU themselves, for there are no proxies of virt-handlers here.
        `words` are further ones of virsh, such as how much it may send. VirshError where it fails.
        """
        assert self.compute is not None
        assert target.compute is not None
        text = self.compute.virsh("dumpxml", "--migratable", self.domain)
        file = self.compute.scratch / "migrate.xml"
        file.write_bytes(domains.encode(domains.parse(text.encode())))
        uri = f"qemu+unix:///system?socket={target.compute.socket}"
        self.compute.virsh(
            *("migrate", "--live", "--p2p", "--persistent", self.domain, uri),
            *("--migrateuri", f"tcp://127.0.0.1:{MIGRATION_PORT}"),
            *("--xml", str(file), "--persistent-xml", str(file), *words),
            deadline_s=MIGRATED_S,
        )

    def container(self, vmi: Mapping[str, Any]) -> Compute:
        """Returns the compute container with its libvirtd, started if it does not run."""
        if self.compute is None:
            self.links.mkdir()
            self.compute = Compute(
                self.deployment.box,
                self.kubevirt.cluster.scratch / f"c-{self.name}-{self.uid[:8]}",
                self.pod,
                self.folder,
                self._volumes,
                self._qemu,
            )
            for place, source in self.compute.mounted.items():
                (self.links / Path(place).name).symlink_to(source)
            private = self.links / "kubevirt-private" / self.machine_uid
            private.mkdir()
            os.chown(private, objects.NON_ROOT, objects.NON_ROOT)
            self._make_host_disks(vmi)
            self._hooks_found = self._collect() if self.kubevirt.legacy else []
        return self.compute

    def _make_host_disks(self, vmi: Mapping[str, Any]) -> None:
        """Makes disk.img, sparse, in claims of mode Filesystem that have none (pkg/host-disk)."""
        assert self.compute is not None
        for volume in vmi["spec"].get("volumes", []):
            if "hostDisk" not in volume:
                continue
            inside = Path(volume["hostDisk"]["path"])
            folder = self.compute.mounted[str(inside.parent)]
            file = shlex.quote(str(folder / inside.name))
            free = f"$(($(stat -f -c '%a * %S' {shlex.quote(str(folder))}) >> 20))M"
            owner = f"{objects.NON_ROOT}:{objects.NON_ROOT}"
            script = f"[ -e {file} ] || truncate -s {free} {file}; chown {owner} {file}"
            self.deployment.box.run("sh", "-ec", script)

    def _collect(self) -> list[Path]:
        """Asks each legacy sidecar for its hook points; virt-launcher is not ready before."""
        wanted = [one["name"] for one in self.pod["spec"]["containers"] if "hook-" in one["name"]]
        found = []
        for name in wanted:
            folder = self.links / "kubevirt-hooks" / name
            socket = until(partial(_first, folder), f"the socket of {name}", deadline_s=READY_S)
            info = until(partial(_info, socket), f"{name} to answer", deadline_s=READY_S)
            assert "v1alpha3" in info.versions, info
            found.append(socket)
        return found

    def _define(self, vmi: Mapping[str, Any]) -> None:
        """Makes the domain and defines it, two or three times, with the hooks each time."""
        wanted = domains.convert(vmi)
        interfaces = len(wanted.findall("devices/interface"))
        compute = self.container(vmi)
        count = domains.placeholders(interfaces)
        if count:
            self._define_once(domains.with_placeholders(wanted, count), vmi)
            wanted = domains.read_back(wanted, self._inactive())
        wanted = self._define_once(wanted, vmi)
        if not count:
            wanted = domains.read_back(wanted, self._inactive())
        self._define_once(domains.with_ports(wanted, interfaces), vmi)
        assert compute.state(self.domain) == "shut off"

    def _define_once(self, wanted: domains.Element, vmi: Mapping[str, Any]) -> domains.Element:
        """Calls the domain hooks and defines the result; returns what KubeVirt keeps of it."""
        text = self._hooked(wanted, vmi, "Boot")
        mutated = domains.parse(text)
        # legacy: what the sidecar said is defined as it is; plugins: as libvirtxml writes it
        self.container(vmi).define(text if self._hooks_found else domains.encode(mutated))
        return domains.as_spec(mutated)

    def _hooked(self, wanted: domains.Element, vmi: Mapping[str, Any], context: str) -> bytes:
        """Returns a domain as the hooks have changed it: the sidecars of old, then the plugins'."""
        text = domains.encode(wanted)
        words = json.dumps(vmi).encode()
        for socket in self._hooks_found:
            text = wire.on_define_domain(socket, text, words)
        kind = "launcherHooks" if self.kubevirt.has_launcher_hooks else "domainHooks"
        for plugin, number, hook in self.kubevirt.hooks(kind, vmi):
            permitted = hook["sidecar"].get("permittedHooks", [])
            if self.kubevirt.has_launcher_hooks and "GuestDefinition" not in permitted:
                continue
            inside = Path(hook["sidecar"]["socketPath"])
            base = Path(objects.PLUGIN_SOCKETS) / plugin
            if not inside.is_relative_to(base):
                raise HookError(f"invalid socket path: {inside} is outside {base}")
            socket = self.links / "kubevirt-plugin" / inside.relative_to(objects.PLUGIN_SOCKETS)
            wire.wait_for_socket(socket, READY_S)
            try:
                text = wire.define_guest(kind, socket, text, words, context, seconds(hook))
            except HookError as error:
                if hook["failureStrategy"] != "Ignore":
                    raise HookError(f"plugin {plugin} hook {number} failed: {error}") from None
        return text

    def _inactive(self) -> str:
        assert self.compute is not None
        return self.compute.virsh("dumpxml", "--inactive", self.domain)

    # What there is

    def xml(self) -> domains.Element:
        """Returns the running domain."""
        assert self.compute is not None
        return domains.parse(self.compute.virsh("dumpxml", self.domain).encode())

    def state(self) -> str:
        """Returns what libvirt says of the domain; nothing where there is none."""
        return self.compute.state(self.domain) if self.compute is not None else ""

    def agent(self) -> Agent:
        """Returns the command channel into the guest, once it has booted."""
        agent = Agent(self.links / "kubevirt-private" / self.machine_uid / "agent")
        try:
            agent.wait_ready(BOOT_DEADLINE_S)
        except GuestError as error:
            assert self.compute is not None
            log = self.compute.qemu_log(self.domain)[-QEMU_LOG_BYTES:]
            raise GuestError(f"{error}\nIts console:\n{self.console()}\nQEMU:\n{log}") from error
        return agent

    def console(self) -> str:
        """Returns the end of what the guest printed."""
        path = self.links / "kubevirt-private" / self.machine_uid / "virt-serial0-log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    # Its end

    def end_domain(self) -> None:
        """Ends the guest; it has no ACPI daemon, so it is the grace period's end that does it.

        QEMU's end makes virt-launcher tell its sidecars; virt-handler then has it undefined.
        """
        if self.compute is None:
            return
        if self.state() == "running":
            self.compute.virsh("destroy", self.domain)
        for socket in self._hooks_found:
            wire.shutdown(socket)
        if self.state():
            self.compute.virsh("undefine", self.domain)

    def stop(self) -> None:
        """Ends the compute container, and with it QEMU if that still runs."""
        if self.compute is not None:
            self.compute.stop()
            self.compute = None

    def end(self) -> None:
        """The same, and the pod is deleted; returns when it is gone."""
        self.stop()
        cluster, name = self.kubevirt.cluster, self.pod["metadata"]["name"]
        cluster.delete("pod", name, wait=False)
        cluster.wait(f"pod/{name}", "delete")


def seconds(hook: Mapping[str, Any]) -> float:
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
