"""A virtual machine on a node with two targets: which has its controller, and what becomes a LUN.

Real targets, mounts and devices; what kubelet and virt-handler call is called here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from csi.errors import Code
from csi.kubevirt import document
from tests.support.csi import MIB
from tests.support.kubevirt import NOTHING, Host
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.unit.csi.conftest import refused

pytestmark = pytest.mark.root


@pytest.fixture
def second(make_target: MakeTarget) -> Target:
    """The further target, with an lvstore `lvs1`."""
    target = make_target().start()
    target.make_lvstore("lvs1", size=256 * MIB)
    return target


@pytest.fixture
def host(make_target: MakeTarget, second: Target) -> Iterator[Host]:
    """The node; the lvstore of its first target is `lvs0`."""
    target = make_target().start()
    target.make_lvstore(size=256 * MIB)
    made = Host(target, target.directory, second)
    yield made
    made.close()
    made.clear()


def controllers(target: Target) -> list[str]:
    return [each["ctrlr"] for each in target.rpc("vhost_get_controllers")]


def told(host: Host, pod: str) -> document.Controller:
    found = document.read(host.inline_path(pod))
    assert found is not None
    return found


def end(host: Host, second: Target, pod: str, *claims: str) -> None:
    """Does what kubelet does at the end of a pod, and checks that nothing is left of it."""
    for name in claims:
        host.unpublish(name, pod)
    host.unpublish_inline(pod)
    for name in claims:
        host.unstage(name)
    assert host.left() == NOTHING
    assert controllers(second) == second.rpc("virtlun_export_list") == []
    assert list(second.vhost_dir.iterdir()) == []


def test_a_machine_has_luns_of_the_claim_s_target_that_it_boots(host: Host, second: Target) -> None:
    """Also for a driver that begins anew; another target's claim stays a block device."""
    old, boot = host.claim("old"), host.claim("boot", lvstore="lvs1")
    host.booting = host.machine("boot", "old")
    pod = host.launcher()
    assert controllers(host.target) == []
    assert controllers(second) == [f"pod-{pod}"]
    for name in ("boot", "old"):
        host.publish(name, pod)
    vmi = host.machine("boot", "old", pods=(pod,))
    for _ in range(2):
        host.restart()
        host.call("PreVMStart", vmi)
        found = told(host, pod)
        assert {name: lun.volume for name, lun in found.luns.items()} == {"boot": boot}
        said = f"volume {old} is on the target of {host.target.rpc_socket}, and the controller of "
        assert list(found.left) == ["old"]
        assert said in found.left["old"]
    ((_, reason, message),) = host.api.events
    assert (reason, said in message) == ("VolumeStaysBlockDevice", True)
    assert host.socket(pod).is_socket()
    host.block_path("old", pod).write_bytes(b"x" * 4096)
    host.restart()
    host.call("PostVMStop", vmi)
    assert host.luns(pod) == {}
    host.block_path("boot", pod).write_bytes(b"x" * 4096)
    host.restart()
    end(host, second, pod, "boot", "old")


def test_the_inline_volume_s_lvstore_has_the_controller(host: Host, second: Target) -> None:
    host.claim("boot")
    host.booting = host.machine("boot")
    pod = host.launcher(lvstore="lvs1")
    assert (controllers(host.target), controllers(second)) == ([], [f"pod-{pod}"])
    end(host, second, pod)
    refused(lambda: host.launcher(lvstore="lvs9"), Code.NOT_FOUND)
    assert (controllers(host.target), controllers(second)) == ([], [])


def test_a_machine_starts_and_ends_while_the_other_target_is_away(
    host: Host, second: Target
) -> None:
    boot = host.claim("boot", lvstore="lvs1")
    host.target.kill9()
    host.restart()
    host.booting = host.machine("boot")
    pod = host.launcher()
    host.publish("boot", pod)
    vmi = host.machine("boot", pods=(pod,))
    host.call("PreVMStart", vmi)
    assert told(host, pod).luns["boot"].volume == boot
    host.call("PostVMStop", vmi)
    host.unpublish("boot", pod)
    host.unpublish_inline(pod)
    host.unstage("boot")
    host.target.start()
    until(lambda: not host.controllers.exists(pod), "the other target to be heard")
    assert host.left() == NOTHING
    assert controllers(second) == []


def test_a_pod_s_hooks_are_served_again_while_the_other_target_is_away(
    host: Host, second: Target
) -> None:
    host.claim("boot", lvstore="lvs1")
    host.booting = host.machine("boot")
    pod = host.launcher(nodeHook="pod")
    host.close()
    (second.vhost_dir / f"pod-{pod}" / "hook.sock").unlink(missing_ok=True)
    host.target.kill9()
    host.restart()
    until((host.folder(pod) / "hook.sock").is_socket, "the pod's hooks to be served")
    host.target.start()
    host.restart()
    end(host, second, pod)
