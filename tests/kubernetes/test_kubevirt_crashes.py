"""Killed: the driver in the middle of what it does for a virtual machine, and the target.

The driver dies at steps that a test names, as in test_crashes: before the first that can be seen
outside, and after the last. Afterwards the machine boots or goes on, and nothing is left when it is
gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kubernetes.killed_driver import fuse, killed
from tests.kubernetes.kubevirt import census
from tests.kubernetes.kubevirt.claims import claim, status, vm_volume, wait_phase
from tests.kubernetes.kubevirt.examples import machine, nothing_left
from tests.kubernetes.kubevirt.guest import OURS, disk_at, size, vendor, write
from tests.kubernetes.kubevirt.simulator import KubeVirt, Machine
from tests.kubernetes.kubevirt.wire import HookError
from tests.kubernetes.left import CONVERGE_S
from tests.support.wait import until

__all__ = ["fuse"]

ADD, REMOVE = "vhost_scsi_controller_add_target", "vhost_scsi_controller_remove_target"

#: A guest boots in software, on a machine that others may keep busy.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def clean(kubevirt: KubeVirt, fuse: Path) -> Iterator[None]:
    """Nothing is there before a test, nothing after it, and everything runs."""
    with nothing_left(kubevirt, CONVERGE_S):
        yield
        fuse.unlink(missing_ok=True)


def end(vm: Machine) -> None:
    """Deletes the machine, and all that is of it."""
    vm.cluster.delete("virtualmachine", vm.name, wait=False)
    vm.stop()


def boots(vm: Machine) -> None:
    """The machine comes up with its claim as the one LUN of its controller."""
    agent = vm.run()
    assert (vendor(agent, "sda"), size(agent, "sda")) == (OURS, 64)
    counted = census.census(vm.kubevirt.deployment)
    assert counted.controllers == (f"pod-{vm.pod_uid}",)
    assert counted.luns == counted.parked


@pytest.mark.parametrize("point", ["before virtlun_export_park", f"after {ADD}"])
def test_killed_while_it_hands_a_claim_over(kubevirt: KubeVirt, fuse: Path, point: str) -> None:
    deployment = kubevirt.deployment
    with machine(kubevirt) as vm:
        vm.create()
        with killed(deployment, fuse, point), suppress(HookError):
            # virt-handler is told that it failed, and comes again with its next pass.
            vm.pre_start()
        deployment.wait_ready()
        boots(vm)
        end(vm)


def test_killed_between_the_hook_and_the_start(kubevirt: KubeVirt) -> None:
    deployment = kubevirt.deployment
    with machine(kubevirt) as vm:
        vm.create()
        vm.pre_start()
        with deployment.without("virtlun-csi"):
            vm.launch()  # the sidecar and QEMU need no driver
            assert vendor(vm.agent(), "sda") == OURS
        deployment.wait_ready()
        boots(vm)
        assert vm.runs == 1
        end(vm)


def test_the_hook_is_repeated_as_often_as_virt_handler_likes(kubevirt: KubeVirt) -> None:
    deployment = kubevirt.deployment
    with machine(kubevirt) as vm:
        vm.create()
        for _ in range(3):
            vm.pre_start()
        before = census.census(deployment)
        vm.launch()
        vm.pre_start()  # the instance does not say Running yet
        assert census.census(deployment) == before
        boots(vm)
        end(vm)


def test_the_target_is_killed_before_the_start(kubevirt: KubeVirt) -> None:
    """The new one has the controller, the LUN and the parked export by itself."""
    deployment = kubevirt.deployment
    with machine(kubevirt) as vm:
        vm.create()
        vm.pre_start()
        before = census.census(deployment)
        deployment.kill("virtlun-target")
        deployment.wait_ready()
        assert census.census(deployment) == before
        boots(vm)
        end(vm)


def test_the_target_is_killed_under_a_machine(kubevirt: KubeVirt) -> None:
    """The holder keeps its connection, so what is in flight ends; QEMU could not connect again."""
    deployment = kubevirt.deployment
    with machine(kubevirt) as vm:
        agent = vm.start()
        busy = "while dd if=/dev/zero of=/dev/sda bs=64k count=16 oflag=direct; do :; done"
        agent.run(f"({busy}) >/dev/null 2>&1 &")
        for _ in range(3):
            deployment.kill("virtlun-target")
            deployment.wait_ready()
            written = write(agent, "sda")
            at = size(agent, "sda") - 4
            read = agent.run(
                f"dd if=/dev/sda bs=1M skip={at} count=4 iflag=direct 2>/dev/null | md5sum"
            )
            assert read.split()[0] == written
        assert "I/O error" not in agent.run("dmesg")
        assert vm.runs == 1
        end(vm)
        census.wait_nothing(deployment)


def test_killed_while_disks_come_and_go(kubevirt: KubeVirt, fuse: Path) -> None:
    """On both sides of an attachment, and of a release, of one running machine."""
    cluster, deployment = kubevirt.cluster, kubevirt.deployment

    def two_luns() -> bool:
        return len(census.luns(deployment)) == 2

    with machine(kubevirt) as vm, cluster.applied(claim("data")):
        agent = vm.start()
        for side in ("before", "after"):
            with killed(deployment, fuse, f"{side} {ADD}"):
                cluster.apply(vm_volume("more", "vm", "data"))
            deployment.wait_ready()
            told = wait_phase(cluster, "more", "Attached")
            disk = disk_at(agent, told["target"])
            assert two_luns()
            with killed(deployment, fuse, f"{side} {REMOVE}"):
                cluster.delete("vmvolume", "more", wait=False)
            deployment.wait_ready()
            until(lambda: not status(cluster, "more"), "no VmVolume", deadline_s=CONVERGE_S)
            agent.wait_for(f"! [ -e /sys/block/{disk} ]")
            counted = census.census(deployment)
            assert len(counted.luns) == 1
            assert counted.finalizers == ()
        end(vm)
