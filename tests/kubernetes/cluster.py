"""A real Kubernetes control plane with a node, in a `Sandbox`, up in about ten seconds.

etcd and containerd are Debian's; the rest is what `tools` built. Nothing is pulled from anywhere:
pods have a busybox image made here. What differs from a cluster of kubeadm's, and why:

- kubelet's cgroupsPerQOS is off, so that pods stay in the box's own control group, and
  failCgroupV1 is off for machines that still have version 1;
- containerd restricts oom_score_adj, for which root may lack CAP_SYS_RESOURCE in a container;
- no kube-proxy and no cluster DNS: of all services pods reach `kubernetes` only, the API server,
  which listens at its address.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.kubernetes.api import Api, ApiError, Words
from tests.kubernetes.node import Node
from tests.kubernetes.pki import Pki
from tests.kubernetes.sandbox import HOST_NAME, SERVICE_ADDRESS, Process, Sandbox, SandboxError
from tests.kubernetes.tools import Report, Tools, build
from tests.support.wait import until

NODE = HOST_NAME
#: The port that the service `kubernetes` has, by whose address pods find it.
API_PORT = 443
API = f"https://127.0.0.1:{API_PORT}"
ETCD = "http://127.0.0.1:2379"
ETCD_PEER = "http://127.0.0.1:2380"
TOKEN = "test-administrator"  # valid in the box only, where nothing listens to the outside
#: Of kubectl, which runs for 0.1 s: collecting its garbage is a quarter of what it costs.
SHORT_LIVED = {"GOGC": "off", "GOMEMLIMIT": "256MiB"}
START_DEADLINE_S = 120.0
WAIT_DEADLINE_S = 90.0
DELETE_DEADLINE_S = 120.0

KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: test, cluster: {{server: {api}, certificate-authority: {ca}}}}}]
users: [{{name: user, user: {user}}}]
contexts: [{{name: test, context: {{cluster: test, user: user}}}}]
current-context: test
"""


class Cluster:
    """A running cluster; a context manager that ends all of it and removes its directory.

    The logs stay (and their place is printed) where the body failed. Needs root.
    """

    def __init__(
        self,
        scratch: Path | None = None,
        *,
        tools: Tools | None = None,
        report: Report | None = None,
        kubelet_dir: Path | None = None,
    ) -> None:
        """Starts everything and waits until the node is ready; `scratch` needs a short path.

        `kubelet_dir` is the first node's kubelet directory, if it is not to be in `scratch`.
        """
        self.tools = tools or build(report)
        self.scratch = scratch or Path(tempfile.mkdtemp(prefix="vk-", dir="/var/tmp"))
        self.scratch.chmod(0o755)
        self.kubeconfig = self.scratch / "admin.conf"
        #: Keep the directory, for its logs, whatever happened.
        self.keep = False
        #: Seconds since the start at which each part was ready.
        self.timings: dict[str, float] = {}
        #: Begins with `NODE`.
        self.nodes: list[Node] = []
        self._added = 1
        self._kubelet_dir = kubelet_dir
        self._begun = time.monotonic()
        self.box = Sandbox(self.scratch)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        etcd = self.box.spawn("etcd", *self._etcd())
        self.pki = Pki(self.scratch / "pki")
        node = Node(
            *(self.box, self.tools, self.pki, self.scratch, NODE, 1),
            kubelet_dir=self._kubelet_dir,
        )
        self.nodes.append(node)
        containerd = node.start_containerd()
        self._write_kubeconfig(self.kubeconfig, {"token": TOKEN})
        server = self.box.spawn("kube-apiserver", *self._apiserver())
        proxy = self._start_proxy()
        self._until("API server", server, self._is_ready, etcd, proxy)
        manager = self.box.spawn("kube-controller-manager", *self._controller_manager())
        scheduler = self.box.spawn(
            "kube-scheduler",
            self.tools.path("kube-scheduler"),
            *(f"--kubeconfig={self.kubeconfig}", "--leader-elect=false"),
            *self._delegated(),
        )
        self._finish(node, containerd, scheduler)
        self._until(
            "service account",
            manager,
            lambda: self._finds("serviceaccount", "default"),
        )

    def _start_proxy(self) -> Process:
        """Starts what `api` talks to."""
        path = self.scratch / "api.sock"
        self.api = Api(path)
        words = (f"--kubeconfig={self.kubeconfig}", f"--unix-socket={path}")
        return self.box.spawn("kubectl-proxy", self.tools.path("kubectl"), "proxy", *words)

    def _finish(self, node: Node, containerd: Process, *others: Process) -> None:
        """Waits for containerd, starts kubelet and waits until the node is ready."""
        self._until(f"containerd of {node.name}", containerd, node.containerd_answers)
        node.import_images()
        self.timings[f"images of {node.name}"] = time.monotonic() - self._begun
        self._until(
            node.name,
            node.start_kubelet(self._write_kubeconfig),
            lambda: (
                self._finds("node", node.name)
                and self.api.wait(f"node/{node.name}", "condition=Ready", deadline_s=5)
            ),
            *(containerd, *others),
        )

    def add_node(self) -> Node:
        """Starts another node and waits until it is ready; its name has not been used before."""
        self._added += 1
        name = f"node{self._added}"
        node = Node(self.box, self.tools, self.pki, self.scratch / name, name, self._added)
        self.nodes.append(node)
        self._finish(node, node.start_containerd())
        return node

    def remove_node(self, node: Node) -> None:
        """Ends a node on which no pods are left, and forgets it."""
        node.stop()
        self.kubectl("delete", "node", node.name)
        self.nodes.remove(node)

    def _until(self, what: str, process: Process, ready: Any, *others: Process) -> None:
        """Waits until `ready` gives something true; SandboxError with a log if a process ended."""

        def look() -> Any:
            for one in (process, *others):
                if not one.running():
                    raise SandboxError(f"{one.name} ended:\n{one.words()}")
            return ready()

        try:
            until(look, f"the {what}", deadline_s=START_DEADLINE_S, every_s=0.05)
        except (SandboxError, AssertionError) as error:
            raise SandboxError(f"{error}\n{process.words()}") from None
        self.timings[what] = time.monotonic() - self._begun

    def _etcd(self) -> list[str]:
        return [
            "etcd",
            f"--data-dir={self.scratch / 'etcd'}",
            *(f"--listen-client-urls={ETCD}", f"--advertise-client-urls={ETCD}"),
            *(f"--listen-peer-urls={ETCD_PEER}", f"--initial-advertise-peer-urls={ETCD_PEER}"),
            f"--initial-cluster=default={ETCD_PEER}",
            "--unsafe-no-fsync",  # nothing here outlives the machine
        ]

    def _apiserver(self) -> list[str]:
        serving, serving_key = self.pki.issue(
            "apiserver",
            "/CN=kube-apiserver",
            f"IP:127.0.0.1,IP:{SERVICE_ADDRESS},DNS:localhost,DNS:kubernetes.default.svc",
        )
        client, client_key = self.pki.issue(
            "kubelet-client", "/O=system:masters/CN=kubelet-client", "DNS:client"
        )
        tokens = self.scratch / "tokens.csv"
        tokens.write_text(f'{TOKEN},administrator,administrator,"system:masters"\n')
        return [
            str(self.tools.path("kube-apiserver")),
            *(f"--etcd-servers={ETCD}", "--bind-address=0.0.0.0", f"--secure-port={API_PORT}"),
            *("--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none"),
            *(f"--tls-cert-file={serving}", f"--tls-private-key-file={serving_key}"),
            *(f"--client-ca-file={self.pki.ca}", f"--token-auth-file={tokens}"),
            f"--kubelet-client-certificate={client}",
            f"--kubelet-client-key={client_key}",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.pki.sa_public}",
            f"--service-account-signing-key-file={self.pki.sa_key}",
            "--service-cluster-ip-range=10.96.0.0/16",
            *("--authorization-mode=Node,RBAC", "--allow-privileged=true"),
            # For docs/pages/how-to/move-a-claim.md; it only lets the affinity be changed, and
            # our policies refuse that to the driver's account.
            "--feature-gates=MutablePVNodeAffinity=true",
        ]

    def _controller_manager(self) -> list[str]:
        return [
            str(self.tools.path("kube-controller-manager")),
            f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={self.pki.sa_key}",
            f"--root-ca-file={self.pki.ca}",
            *("--use-service-account-credentials=true", "--leader-elect=false"),
            *("--allocate-node-cidrs=false", "--concurrent-serviceaccount-token-syncs=2"),
            *self._delegated(),
        ]

    def _delegated(self) -> list[str]:
        return [
            f"--authentication-kubeconfig={self.kubeconfig}",
            f"--authorization-kubeconfig={self.kubeconfig}",
        ]

    def _write_kubeconfig(self, path: Path, user: dict[str, str]) -> None:
        path.write_text(KUBECONFIG.format(api=API, ca=self.pki.ca, user=json.dumps(user)))

    @property
    def kubelet_dir(self) -> Path:
        """The first node's kubelet directory."""
        return self.nodes[0].kubelet_dir

    def restart_kubelet(self) -> None:
        """Ends the first node's kubelet and starts it again, as an upgrade does; pods run on."""
        kubelet = self.nodes[0].kubelet
        assert kubelet is not None
        kubelet.stop()
        self.nodes[0].start_kubelet(self._write_kubeconfig)

    # Talking to it

    def kubectl(
        self, *words: str | Path, stdin: str = "", deadline_s: float = 120.0, check: bool = True
    ) -> str:
        """Runs kubectl and returns its output; SandboxError with its words where it fails."""
        program = self.tools.path("kubectl")
        return self.box.run(
            *(program, f"--kubeconfig={self.kubeconfig}", *words),
            stdin=stdin,
            deadline_s=deadline_s,
            check=check,
            env=SHORT_LIVED,
        ).stdout

    def _is_ready(self) -> bool:
        try:
            return bool(self.api.request("GET", "/readyz"))
        except ApiError:  # not all of it, or the proxy's that there is nobody yet
            return False

    def _finds(self, *words: str) -> bool:
        try:
            return bool(self.get(*words))
        except ApiError:
            return False

    def apply(self, manifest: Path | str, *, dry_run: bool = False, force: bool = False) -> None:
        """Applies a manifest, a file or its text, with the server's strict validation.

        With `dry_run` the server only checks it; with `force` fields that others own are taken.
        """
        text = manifest.read_text() if isinstance(manifest, Path) else manifest
        self.api.apply(
            text, ({"dryRun": "All"} if dry_run else {}) | ({"force": "true"} if force else {})
        )

    def get(self, *words: str) -> Any:
        """Returns `kubectl get ... -o json`, parsed."""
        if asked := Words.read(words):
            return self.api.get(asked)
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def items(self, *words: str) -> list[dict[str, Any]]:
        """Returns the objects of a list."""
        return list(self.get(*words)["items"])

    def patch(self, kind: str, name: str, change: dict[str, Any]) -> None:
        """Does `kubectl patch --type=merge`."""
        self.api.patch(kind, name, change)

    def kinds(self) -> set[str]:
        """Returns the kinds of objects that the API server has: RESOURCE, or RESOURCE.GROUP."""
        return set(self.kubectl("api-resources", "--cached=false", "-o", "name").split())

    def wait(self, what: str, state: str, deadline_s: float = WAIT_DEADLINE_S) -> None:
        """Waits with `kubectl wait --for=STATE`; SandboxError with the object's events if in vain.

        `what` is KIND/NAME, `state` is `jsonpath={.status.phase}=Bound`, `delete` or the like.
        """
        words = ("wait", what, f"--for={state}", f"--timeout={deadline_s:.0f}s")
        try:
            if not Api.understands(state):
                self.kubectl(*words, deadline_s=deadline_s + 30)
            elif not self.api.wait(what, state, deadline_s):
                raise SandboxError(f"kubectl {' '.join(words)}: in vain")
        except SandboxError as error:
            told = self.kubectl("describe", what, check=False)
            raise SandboxError(f"{error}\n{told[-3000:]}") from None

    def wait_phase(self, what: str, phase: str, deadline_s: float = WAIT_DEADLINE_S) -> None:
        """Waits for a status.phase."""
        self.wait(what, f"jsonpath={{.status.phase}}={phase}", deadline_s)

    def execute(self, pod: str, *words: str, deadline_s: float = 60.0, check: bool = True) -> str:
        """Runs a command in a pod's first container and returns its output."""
        return self.kubectl("exec", pod, "--", *words, deadline_s=deadline_s, check=check)

    def shell(self, pod: str, script: str, deadline_s: float = 60.0, check: bool = True) -> str:
        """Runs a script in a pod's first container, in busybox' shell, and returns its output.

        A pipe fails where any of its commands does: one that reads needs all of its input then.
        """
        words = ("sh", "-o", "pipefail", "-c", script)
        return self.execute(pod, *words, deadline_s=deadline_s, check=check)

    def delete(self, *words: str, wait: bool = True) -> None:
        """Deletes objects; waits until they are gone unless told otherwise."""
        if asked := Words.read(words):
            self.api.delete(asked, deadline_s=DELETE_DEADLINE_S if wait else None)
        else:
            self.kubectl("delete", "--ignore-not-found", f"--wait={str(wait).lower()}", *words)

    @contextlib.contextmanager
    def applied(self, manifest: str) -> Iterator[None]:
        """Applies a manifest for the duration of a block; its objects are going when it ends."""
        self.apply(manifest)
        try:
            yield
        finally:
            self.api.delete_objects(manifest)

    # Its end

    def close(self) -> None:
        """Ends everything; the directory stays."""
        self.box.close()

    def __enter__(self) -> Cluster:
        """Returns the cluster."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it; removes the directory unless the body failed or it is to be kept."""
        self.close()
        if error is None and not self.keep:
            shutil.rmtree(self.scratch, ignore_errors=True)
        else:
            print(f"the cluster's logs are in {self.box.logs}")
