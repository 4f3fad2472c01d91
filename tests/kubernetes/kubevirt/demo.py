"""The steps of `make demo-kubernetes` with a virtual machine."""

from __future__ import annotations

import contextlib
import time

from tests.guest.bootdisk import boot_disk
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import Deployment
from tests.kubernetes.kubevirt import census
from tests.kubernetes.kubevirt.claims import MIB, claim, grow, status, wait_phase
from tests.kubernetes.kubevirt.examples import FOLDER
from tests.kubernetes.kubevirt.guest import disk_at, vendor, wait_size
from tests.kubernetes.kubevirt.importer import fill
from tests.kubernetes.kubevirt.installed import installed
from tests.kubernetes.kubevirt.simulator import KubeVirt, Machine
from tests.support.agent import Agent

LOOK = "lsblk -o NAME,SIZE,VENDOR,MODEL"
#: The claim `data` is another step's.
SECOND = "disk2"


class MachineStory(contextlib.ExitStack):
    """A machine's life, a step each; closing it ends what is left."""

    def __init__(self, cluster: Cluster, deployment: Deployment) -> None:
        """Tells of this cluster."""
        super().__init__()
        self.cluster = cluster
        self.deployment = deployment
        self.vm: Machine | None = None
        self.agent: Agent | None = None

    def guest(self, command: str) -> str:
        """Runs a command in the guest."""
        assert self.agent is not None
        return self.agent.run(command)

    def install(self) -> str:
        """KubeVirt (its part towards storage, simulated: see tests/kubernetes/kubevirt) and our plugin"""  # noqa: E501
        kubevirt = KubeVirt(self.cluster, self.deployment)
        self.enter_context(installed(self.deployment))
        self.vm = Machine(kubevirt, "vm")
        self.callback(self.vm.close)
        return self.cluster.kubectl("get", "plugins.plugin.kubevirt.io,mutatingadmissionpolicies")

    def fill(self) -> str:
        """A claim is filled with an image that boots, by an ordinary pod: the kernel face"""
        self.cluster.apply(FOLDER / "claim.yaml")
        image = boot_disk()
        fill(self.cluster, "boot", image)
        return f"{image.stat().st_size / MIB:.0f} MiB written through the block device"

    def boot(self) -> str:
        """A VirtualMachine with that claim and one label of ours: it boots from a LUN"""
        assert self.vm is not None
        self.cluster.apply(FOLDER / "vm.yaml")
        begun = time.monotonic()
        self.agent = self.vm.start()
        assert vendor(self.agent, "sda") == "VIRTLUN"
        return f"the guest was up after {time.monotonic() - begun:.0f} s\n{self.guest(LOOK)}"

    def attach(self) -> str:
        """kubectl apply -f vmvolume.yaml: another claim is a disk of the running machine"""
        self.cluster.apply(claim(SECOND))
        text = (FOLDER / "vmvolume.yaml").read_text()
        self.cluster.apply(text.replace("claimName: data", f"claimName: {SECOND}"))
        told = wait_phase(self.cluster, "extra", "Attached")
        assert self.agent is not None
        disk = disk_at(self.agent, told["target"])
        log = self.guest(f"dmesg | grep -F '[{disk}]' | tail -n 4")
        return f"{self.cluster.kubectl('get', 'vmvolumes')}{self.guest(LOOK)}{log}"

    def growth(self) -> str:
        """Both claims ask for more: the guest has the new sizes without looking for them"""
        assert self.agent is not None
        target = status(self.cluster, "extra")["target"]
        for name, disk in (("boot", "sda"), (SECOND, disk_at(self.agent, target))):
            grow(self.cluster, name, 96)
            wait_size(self.agent, disk, 96)
        return self.guest(f"dmesg | grep 'capacity change'; {LOOK}")

    def release(self) -> str:
        """kubectl delete vmvolume extra: the guest lets go of the disk"""
        assert self.agent is not None
        self.cluster.delete("vmvolume", "extra")
        self.agent.wait_for("! [ -e /sys/block/sdb ]")
        return self.guest(LOOK)

    def end(self) -> str:
        """The VirtualMachine is deleted: controller, LUN and folder are gone, the claims stay"""
        assert self.vm is not None
        self.cluster.delete("virtualmachine", "vm", wait=False)
        self.vm.stop()
        census.wait_nothing(self.deployment)
        return self.cluster.kubectl("get", "pvc")
