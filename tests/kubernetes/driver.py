"""Our target, our driver and its sidecars on a test cluster's node, kept running as kubelet would.

`Deployment` applies examples/kubernetes as a user does, with one difference: of the DaemonSets the
server only validates the manifest (a server-side dry run), and their containers run as processes of
the node (`daemonset.py`), which tests kill and freeze one by one. They have the manifest's service
account and its rights, no more. As pods they run in `installed.py`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydataplane.client import Client
from pydataplane.errors import TargetError
from pydataplane.volumes import Volumes
from tests.kubernetes import snapshots
from tests.kubernetes.account import NAMESPACE, make_pod, token
from tests.kubernetes.api import ApiError
from tests.kubernetes.cluster import API_PORT, Cluster
from tests.kubernetes.daemonset import EMPTY_DIR, SECRET, Container, containers
from tests.kubernetes.node import Node
from tests.kubernetes.sandbox import Process, SandboxError
from tests.support.target import binary
from tests.support.wait import until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples/kubernetes"
DRIVER = "csi.virtlun.dev"
ACCOUNT_DIR = "/run/secrets/kubernetes.io/serviceaccount"
#: What a pod's mounts cannot change in others, since it is nobody's peer.
ACCOUNT_SETUP = f"""\
mkdir -p "$0" {ACCOUNT_DIR}
grep -q " {ACCOUNT_DIR} " /proc/self/mountinfo && exit
mount --bind {ACCOUNT_DIR} {ACCOUNT_DIR}
mount --make-private {ACCOUNT_DIR}
"""
POD_SETUP = f"""\
hostname "$0" && mount --bind "$1" {ACCOUNT_DIR} && shift && exec "$@"
"""
LVSTORE = "lvs0"
LVSTORE_BYTES = 4 << 30
LEASE = "external-resizer-csi-virtlun-dev"  # by csi-lib-utils' leader election
LOOK_AGAIN_S = 0.1
READY_DEADLINE_S = 60.0


@dataclass
class Part:
    """One container's process and what became of it."""

    container: Container
    process: Process
    held: bool = False
    """It stays down until it is released."""
    restarts: int = 0
    last_words: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Census:
    """What there is of volumes, everywhere that one could be left behind."""

    lvols: tuple[str, ...]
    exports: tuple[str, ...]
    loops: tuple[str, ...]
    mounts: tuple[str, ...]
    claims: tuple[str, ...]
    volumes: tuple[str, ...]


class Deployment:
    """virtlun on a node of a cluster, the first one by default; a context manager."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        node: Node | None = None,
        lvstore_bytes: int = LVSTORE_BYTES,
        options: tuple[str, ...] = (),
    ) -> None:
        """Applies the manifests, starts everything and waits until kubelet knows the driver.

        `options` are further ones of virtlun-csi.
        """
        self.cluster = cluster
        self.node = node or cluster.nodes[0]
        self.box = cluster.box
        self.run_dir = self.node.folder / "run"
        self.state_dir = self.node.folder / "state"
        self.target_socket = self.run_dir / "target.sock"
        self.parts: dict[str, Part] = {}
        self._options = options
        self._further: dict[str, list[Path | str]] = {}
        self._stop = threading.Event()
        self._mutex = threading.Lock()
        for directory in (self.run_dir / "vhost", self.state_dir / "target"):
            directory.mkdir(parents=True)
        snapshots.define(cluster)
        for manifest in ("csidriver", "rbac", "node-policy", "storageclasses"):
            cluster.apply(EXAMPLES / f"{manifest}.yaml")
        cluster.apply(EXAMPLES / "daemonset.yaml", dry_run=True)
        self._give_account()
        found = list(self._containers())
        (self.node.kubelet_dir / "plugins" / DRIVER).mkdir(parents=True, exist_ok=True)
        self._start(found, "virtlun-holder")
        self._start(found, "virtlun-target")
        until(self._target_answers, "the target", deadline_s=READY_DEADLINE_S)
        self.volumes.create_lvstore(LVSTORE, self.state_dir / f"{LVSTORE}.img", lvstore_bytes)
        for container in found:
            if container.name not in self.parts:
                self._start(found, container.name)
        self._keeper = threading.Thread(target=self._keep, name="kubelet's part", daemon=True)
        self._keeper.start()
        self.wait_ready()

    def _containers(self) -> Iterator[Container]:
        text = self.cluster.kubectl(
            *("create", "--dry-run=client", "-o", "json", "-f", EXAMPLES / "daemonset.yaml")
        )
        for daemonset in documents(text):
            yield from self.containers_of(daemonset)

    def containers_of(self, daemonset: Mapping[str, Any]) -> Iterator[Container]:
        """Yields the containers of a DaemonSet, as commands on this node."""
        host = {
            "/var/lib/kubelet": str(self.node.kubelet_dir),
            "/run/virtlun": str(self.run_dir),
            "/var/lib/virtlun": str(self.state_dir),
            "/dev": "/dev",
            EMPTY_DIR: str(self.node.folder / "pod"),
            SECRET: str(self.secrets),
        }
        fields = {
            "spec.nodeName": self.node.name,
            "metadata.namespace": NAMESPACE,
            "metadata.name": self.pod,
        }
        yield from containers(daemonset, host, fields)

    @property
    def secrets(self) -> Path:
        """The folder with the Secrets that containers mount, by name; tests put them there."""
        return self.node.folder / "secrets"

    @property
    def pod(self) -> str:
        """The name of the pod whose containers run here as processes."""
        return f"virtlun-csi-{self.node.name}"

    def _give_account(self) -> None:
        """Makes what programs in a pod of this node find of the service account.

        As kubelet's, the token tells pod and node. `_spawn` puts it where they look for it.
        """
        make_pod(self.cluster, self.pod, self.node.name)
        self.box.run("sh", "-c", ACCOUNT_SETUP, self.account)
        files = {
            "token": token(self.cluster, "Pod", self.pod),
            "namespace": NAMESPACE,
            "ca.crt": self.cluster.pki.ca.read_text(),
        }
        for name, content in files.items():
            self.box.run("sh", "-c", f"cat > {self.account}/{name}", stdin=content)

    @property
    def account(self) -> str:
        """The folder in the box with the service account's files for this node."""
        return f"/run/accounts/{self.node.name}"

    def in_pod(self) -> tuple[str, ...]:
        """Returns the words before a command with which it has what a pod of this node has.

        That is a host name, which csi-resizer takes for its name in the election, and an account.
        """
        return (
            *("unshare", "--uts", "--mount", "--propagation=unchanged"),
            *("sh", "-c", POD_SETUP, self.pod, self.account),
        )

    def _start(self, found: list[Container], name: str) -> None:
        container = next(one for one in found if one.name == name)
        self.parts[name] = Part(container, self._spawn(container))

    def _spawn(self, container: Container) -> Process:
        programs: dict[str, list[Path | str]] = {
            "virtlun-holder": [binary("virtlun-holder")],
            "virtlun-target": [binary()],
            "virtlun-csi": driver_program(),
            "virtlun-csi-helper": [sys.executable, "-m", "csi.host.cli"],
            **self._further,
        }
        sidecar = self.cluster.tools.path(container.program)
        program = programs.get(container.program) or [sidecar]
        # a pod has an address of its own
        arguments = [
            word.replace("=0.0.0.0:", f"={self.node.address}:") for word in container.arguments
        ]
        if container.program == "csi-provisioner":
            # there is no pod that could own the capacity objects
            arguments.append("--capacity-ownerref-level=-1")
        environment = {
            **container.environment,
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(API_PORT),
            "PYTHONPATH": str(ROOT),
        }
        if container.program == "virtlun-csi":
            arguments += ["--log-level=debug", *self._options]
        log = container.name
        if self.node is not self.cluster.nodes[0]:
            log = f"{log}-{self.node.name}"
        words = (*self.in_pod(), *self._rights(container), *program, *arguments)
        return self.box.spawn(log, *words, env=environment)

    def _rights(self, container: Container) -> tuple[str, ...]:
        """Returns the words before a command with which it has the capabilities of its manifest.

        The target drops its own, and its files here are those of a user that it does not become.
        """
        if container.capabilities is None or container.program == "virtlun-target":
            return ()
        kept = "".join(f",+{name}" for name in container.capabilities)
        return ("setpriv", "--no-new-privs", "--inh-caps=-all", f"--bounding-set=-all{kept}")

    def _keep(self) -> None:
        """Starts again what ended, as kubelet does (which waits longer each time)."""
        while not self._stop.wait(LOOK_AGAIN_S):
            with self._mutex:
                for part in self.parts.values():
                    if part.held or part.process.running():
                        continue
                    part.last_words.append(part.process.words(500))
                    part.restarts += 1
                    part.process = self._spawn(part.container)

    # What tests do to it

    def kill(self, name: str) -> None:
        """Kills a part as a crash would; it comes back by itself."""
        part = self.parts[name]
        part.process.send(signal.SIGKILL)
        part.process.process.wait(90)

    def stop(self, name: str) -> int:
        """Stops a part in order, and returns its exit status; it comes back by itself."""
        return self.parts[name].process.stop()

    def restart_driver(self) -> None:
        """Ends the driver in order; it comes back with the arguments that its part has now."""
        part = self.parts["virtlun-csi"]
        restarts = part.restarts
        assert self.stop("virtlun-csi") == 0
        until(lambda: part.restarts > restarts, "its restart", deadline_s=90)
        self.wait_ready()

    @contextlib.contextmanager
    def driver_with(self, *options: str) -> Iterator[None]:
        """Has the driver run with further options for the duration of a block."""
        part = self.parts["virtlun-csi"]
        before = part.container
        part.container = replace(before, arguments=[*before.arguments, *options])
        try:
            self.restart_driver()
            yield
        finally:
            part.container = before
            self.restart_driver()

    @contextlib.contextmanager
    def also(self, container: Container, program: Path) -> Iterator[Part]:
        """Runs a further container of the driver's pod for the duration of a block."""
        self._further[container.program] = [program]
        part = Part(container, self._spawn(container))
        with self._mutex:
            self.parts[container.name] = part
        try:
            yield part
        finally:
            with self._mutex:
                del self.parts[container.name]
            part.process.stop()

    @contextlib.contextmanager
    def programs_as(self, programs: Mapping[str, list[Path | str]]) -> Iterator[None]:
        """Has what begins as these programs run other ones for the duration of a block."""
        self._further |= programs
        try:
            yield
        finally:
            for name in programs:
                del self._further[name]

    @contextlib.contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Kills a part and keeps it down for the duration of a block."""
        part = self.parts[name]
        with self._mutex:
            part.held = True
        self.kill(name)
        try:
            yield
        finally:
            part.held = False

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Stops a part's clock for the duration of a block: it neither answers nor ends."""
        with self.parts[name].process.frozen():
            yield

    def wait_ready(self) -> None:
        """Waits until the target answers and kubelet has the driver registered."""
        until(self._target_answers, "the target", deadline_s=READY_DEADLINE_S)
        try:
            until(self._driver_answers, "the driver", deadline_s=READY_DEADLINE_S, every_s=0.1)
            until(self._registered, "the driver's registration", deadline_s=READY_DEADLINE_S)
        except (SandboxError, AssertionError) as error:
            words = self.parts["virtlun-csi"].process.words()
            raise SandboxError(f"{error}\n{words}") from None

    def asked(self, method: str) -> Callable[[], bool]:
        """Returns what tells whether the driver has begun a call of a method since."""
        log = self.parts["virtlun-csi"].process.log
        end = log.stat().st_size

        def begun() -> bool:
            said = log.read_bytes()[end:].decode(errors="replace").splitlines()
            return any('"begun"' in line and f'"{method}"' in line for line in said)

        return begun

    def _target_answers(self) -> bool:
        try:
            Client(self.target_socket, timeout_s=5).call("virtlun_get_status")
        except TargetError:
            return False
        return True

    def _driver_answers(self) -> bool:
        return self.http("readyz") == "ok\n"

    def http(self, page: str) -> str:
        """Returns what the driver's HTTP server says; nothing where it does not answer."""
        url = f"http://{self.node.address}:9810/{page}"
        return self.box.run("busybox", "wget", "-q", "-O", "-", url, check=False).stdout

    def _registered(self) -> bool:
        socket = self.node.kubelet_dir / "plugins" / DRIVER / "csi.sock"
        try:
            told = self.cluster.get("csinode", self.node.name)["spec"]["drivers"] or []
        except ApiError:  # kubelet has not made it yet
            return False
        return DRIVER in [each["name"] for each in told] and socket.exists()

    # What there is

    @property
    def client(self) -> Client:
        """The target's client."""
        return Client(self.target_socket)

    @property
    def volumes(self) -> Volumes:
        """The target's volumes."""
        return Volumes(self.client)

    def census(self) -> Census:
        """Counts everything that a volume consists of, by name."""
        cluster = self.cluster
        csi = [
            place
            for place in self.box.mounts(self.node.kubelet_dir)
            if "csi" in place and "projected" not in place
        ]
        lvols = self.volumes.volumes(LVSTORE)
        self.box.files |= {volume.uuid for volume in lvols}
        objects = cluster.items("pvc,pv", "--all-namespaces")
        names = {
            kind: tuple(
                sorted(each["metadata"]["name"] for each in objects if each["kind"] == kind)
            )
            for kind in ("PersistentVolumeClaim", "PersistentVolume")
        }
        return Census(
            lvols=tuple(sorted(volume.name for volume in lvols)),
            exports=tuple(self.exports()),
            loops=tuple(sorted(self.box.loops().values())),
            mounts=tuple(csi),
            claims=names["PersistentVolumeClaim"],
            volumes=names["PersistentVolume"],
        )

    def exports(self) -> list[str]:
        """Returns the names of the target's exports."""
        return sorted(
            str(export["bdev_name"]) for export in self.client.call("virtlun_export_list")
        )

    def sweep(self) -> None:
        """Deletes all pods and claims, whatever a test left of them."""
        for kind, query in (("pod", {"gracePeriodSeconds": "1"}), ("pvc", {})):
            self.cluster.api.delete_all(kind, query)

    def wait_clean(self, deadline_s: float = 60.0) -> None:
        """Waits until nothing of any volume is left; AssertionError with what is."""
        nothing = Census((), (), (), (), (), ())
        until(
            lambda: self.census() == nothing,
            lambda: f"nothing left; left: {self.census()}",
            deadline_s,
            0.2,
        )

    def leads(self) -> bool:
        """Whether this node's csi-resizer is the elected one."""
        try:
            lease = self.cluster.get("lease", LEASE, "-n", NAMESPACE)
        except ApiError:  # nobody is yet
            return False
        return bool(lease["spec"]["holderIdentity"] == self.pod)

    def close(self) -> None:
        """Stops everything in order, the target last."""
        self._stop.set()
        self._keeper.join()
        for name in reversed(self.parts):
            self.parts[name].process.stop()

    def __enter__(self) -> Deployment:
        """Returns it, running."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops it."""
        self.close()


def driver_program() -> list[Path | str]:
    """Returns how virtlun-csi is called: as it was installed, else from the checkout."""
    installed = Path(sys.executable).parent / "virtlun-csi"
    return [installed] if installed.exists() else [sys.executable, "-m", "csi.cli"]


def documents(text: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of kubectl's JSON output, one after the other."""
    decoder = json.JSONDecoder()
    text = text.strip()
    while text:
        found, end = decoder.raw_decode(text)
        yield found
        text = text[end:].lstrip()
