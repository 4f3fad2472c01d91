"""One node of a test cluster: containerd and kubelet, as programs of the box.

Several nodes share a box's kernel, processes and network. Each has its own directories, its own
address on the box's bridge, its own network of pods and its own containerd.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.kubernetes.images import PAUSE_IMAGE, busybox_image, pause_image
from tests.kubernetes.pki import Pki
from tests.kubernetes.sandbox import BRIDGE, SERVICE_ADDRESS, Process, Sandbox
from tests.kubernetes.tools import Tools

CONTAINERD_TOML = """\
version = 2
root = "{folder}/containerd"
state = "{run}"
[grpc]
  address = "{run}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  disable_hugetlb_controller = true
  tolerate_missing_hugetlb_controller = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""

#: JSON is YAML: kubelet reads it as its configuration file.
KUBELET: dict[str, Any] = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "cgroupsPerQOS": False,
    "enforceNodeAllocatable": [],
    "failCgroupV1": False,
    "failSwapOn": False,
    "makeIPTablesUtilChains": False,
    "imageGCHighThresholdPercent": 100,
    "evictionHard": {
        "memory.available": "0%",
        "nodefs.available": "0%",
        "nodefs.inodesFree": "0%",
        "imagefs.available": "0%",
    },
    "maxOpenFiles": 20000,
    "nodeStatusUpdateFrequency": "5s",
    # default 1 min; what a pod's volumes should be like is looked at this often
    "syncFrequency": "2s",
}


class Node:
    """A node. Whoever makes it waits for the steps: `containerd`, images, then `kubelet`."""

    def __init__(
        self,
        box: Sandbox,
        tools: Tools,
        pki: Pki,
        folder: Path,
        name: str,
        number: int,
        *,
        kubelet_dir: Path | None = None,
    ) -> None:
        """Prepares the node `number` (from 1) in `folder`; `kubelet_dir` may be elsewhere."""
        self.name = name
        self.address = f"10.88.76.{number}"
        self.folder = folder
        self.kubelet_dir = kubelet_dir or folder / "kubelet"
        self.containerd: Process | None = None
        self.kubelet: Process | None = None
        self._box = box
        self._tools = tools
        self._pki = pki
        self._number = number
        self._run = Path("/run") / (f"containerd-{name}" if number > 1 else "containerd")
        folder.mkdir(exist_ok=True)

    def start_containerd(self) -> Process:
        """Starts containerd."""
        self._box.run("ip", "addr", "replace", f"{self.address}/24", "dev", BRIDGE)
        config = self.folder / "containerd.toml"
        config.write_text(
            CONTAINERD_TOML.format(folder=self.folder, run=self._run, pause=PAUSE_IMAGE)
        )
        networks = self.folder / "cni"
        networks.mkdir()
        (networks / "10-test.conflist").write_text(json.dumps(self._network()))
        self.containerd = self._box.spawn(self._log("containerd"), "containerd", "--config", config)
        return self.containerd

    def containerd_answers(self) -> bool:
        """Whether containerd is up."""
        return self._box.run(*self._ctr(), "version", check=False).returncode == 0

    def import_images(self) -> None:
        """Gives containerd the images that pods name."""
        files = [
            pause_image(self.folder / "pause.tar", self._box.pause),
            busybox_image(self.folder / "busybox.tar"),
        ]
        for file in files:
            self.import_image(file)

    def import_image(self, file: Path) -> None:
        """Gives containerd an image, of the format of `docker save`, and removes the file."""
        self._box.run(*self._ctr(), "images", "import", file)
        file.unlink()

    def start_kubelet(self, kubeconfig: Callable[[Path, dict[str, str]], None]) -> Process:
        """Starts kubelet; `kubeconfig` writes a file for a user of the API server."""
        name = f"kubelet-{self.name}"
        serving, key = self._pki.directory / f"{name}.crt", self._pki.directory / f"{name}.key"
        if not serving.exists():
            subject = f"/O=system:nodes/CN=system:node:{self.name}"
            self._pki.issue(name, subject, f"IP:{self.address},DNS:{self.name}")
        config = {
            **KUBELET,
            "address": self.address,
            "healthzBindAddress": self.address,
            "containerRuntimeEndpoint": f"unix://{self._run}/containerd.sock",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": str(self._pki.ca)},
            },
            "cgroupRoot": f"/{self._box.cgroup}",
            "tlsCertFile": str(serving),
            "tlsPrivateKeyFile": str(key),
            "volumePluginDir": str(self.kubelet_dir / "volumeplugins"),
            "podLogsDir": f"/var/log/pods-{self.name}",
        }
        path = self.folder / "kubelet.json"
        path.write_text(json.dumps(config))
        user = self.folder / "kubelet.conf"
        kubeconfig(user, {"client-certificate": str(serving), "client-key": str(key)})
        self.kubelet = self._box.spawn(
            self._log("kubelet"),
            self._tools.path("kubelet"),
            *(f"--config={path}", f"--kubeconfig={user}", f"--root-dir={self.kubelet_dir}"),
            *(f"--hostname-override={self.name}", f"--node-ip={self.address}"),
        )
        return self.kubelet

    def stop(self) -> None:
        """Ends kubelet and containerd; pods that are there go on running."""
        for process in (self.kubelet, self.containerd):
            if process is not None:
                process.stop()

    def _ctr(self) -> tuple[str, ...]:
        return ("ctr", "--address", f"{self._run}/containerd.sock", "--namespace", "k8s.io")

    def _log(self, program: str) -> str:
        return program if self._number == 1 else f"{program}-{self.name}"

    def _network(self) -> dict[str, Any]:
        """Returns the configuration of the pods' network, for CNI's bridge plugin."""
        return {
            "cniVersion": "0.4.0",
            "name": f"test{self._number}",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": f"pods{self._number}",
                    "isGateway": True,
                    "ipMasq": False,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": f"/run/cni-{self.name}",
                        "ranges": [[{"subnet": f"10.88.{76 + self._number}.0/24"}]],
                        "routes": [{"dst": f"{SERVICE_ADDRESS}/32"}],
                    },
                }
            ],
        }
