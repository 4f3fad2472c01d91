"""Killed: the driver in the middle of what it does for a virtual machine, and the target.

Two moments, as in test_crashes: `asked`, when the driver waits for the target's answer to its first
call, and `begun`, as soon as the first effect is seen. Afterwards the machine boots or goes on, and
nothing is left when it is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.kubernetes.driver import Deployment
from tests.kubernetes.kubevirt import census
from tests.kubernetes.kubevirt.claims import claim, status, vm_volume, wait_phase
from tests.kubernetes.kubevirt.examples import machine, nothing_left
from tests.kubernetes.kubevirt.guest import OURS, disk_at, size, vendor, write
from tests.kubernetes.kubevirt.simulator import KubeVirt, Machine
from tests.kubernetes.kubevirt.wire import HookError
from tests.support.wait import until

MOMENTS = ("asked", "begun")
ASKED_S = 2.0
CONVERGE_S = 120.0

#: A guest boots in software, on a machine that others may keep busy.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def clean(kubevirt: KubeVirt) -> Iterator[None]:
    """Nothing is there before a test, nothing after it, and everything runs."""
    with nothing_left(kubevirt, CONVERGE_S):
        yield


def crash(
    deployment: Deployment, moment: str, act: Callable[[], object], begun: Callable[[], object]
) -> None:
    """Acts, kills the driver at this moment of what follows, and waits until it is back."""
    restarts = deployment.parts["virtlun-csi"].restarts
    acting = threading.Thread(target=act)
    if moment == "asked":
        with deployment.frozen("virtlun-target"):
            acting.start()
            time.sleep(ASKED_S)
            deployment.kill("virtlun-csi")
    else:
        acting.start()
        until(begun, "the first effect", every_s=0.002)
        deployment.kill("virtlun-csi")
    acting.join()
    until(lambda: deployment.parts["virtlun-csi"].restarts > restarts, "its restart", deadline_s=90)
    deployment.wait_ready()


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


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_it_hands_a_claim_over(kubevirt: KubeVirt, moment: str) -> None:
    deployment = kubevirt.deployment

    def hook() -> None:
        """virt-handler is told that it failed, and comes again with its next pass."""
        try:
            vm.pre_start()
        except HookError as error:
            vm.failures.append(str(error))

    with machine(kubevirt) as vm:
        vm.create()
        crash(deployment, moment, hook, lambda: census.parked(deployment))
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


def test_killed_while_disks_come_and_go(kubevirt: KubeVirt) -> None:
    """At both moments of an attachment, and at both of a release, of one running machine."""
    cluster, deployment = kubevirt.cluster, kubevirt.deployment

    def two_luns() -> bool:
        return len(census.luns(deployment)) == 2

    with machine(kubevirt) as vm, cluster.applied(claim("data")):
        agent = vm.start()
        for moment in MOMENTS:
            manifest = vm_volume("more", "vm", "data")
            crash(deployment, moment, partial(cluster.apply, manifest), two_luns)
            told = wait_phase(cluster, "more", "Attached")
            disk = disk_at(agent, told["target"])
            assert two_luns()
            crash(
                deployment,
                moment,
                lambda: cluster.delete("vmvolume", "more", wait=False),
                lambda: not two_luns(),
            )
            until(lambda: not status(cluster, "more"), "no VmVolume", deadline_s=CONVERGE_S)
            agent.wait_for(f"! [ -e /sys/block/{disk} ]")
            counted = census.census(deployment)
            assert len(counted.luns) == 1
            assert counted.finalizers == ()
        end(vm)
