"""The manifests for KubeVirt name what the programs serve.

That an API server takes them and does what they say is tested in tests/kubernetes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # comes with lightkube
from click import Option

from csi import DRIVER_NAME
from csi.capabilities import Mode, problem
from csi.cli import main as driver
from csi.kubevirt.domainhook import FOLDER
from csi.kubevirt.inline import NODE_HOOK
from csi.kubevirt.nodehook import NodeHook
from csi.kubevirt.sidecar import main as sidecar
from csi.proto import csi_pb2 as pb
from csi.proto.__main__ import ROOT

EXAMPLES = ROOT / "examples/kubernetes"
KUBEVIRT = EXAMPLES / "kubevirt"
LABEL = {"virtlun.dev/controller": "true"}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(name: str, kind: str) -> dict[str, Any]:
    found = documents(KUBEVIRT / name)
    return next(each for each in found if each["kind"] == kind)


def expressions(policy: dict[str, Any]) -> str:
    mutations = policy["spec"]["mutations"]
    return "\n".join(
        (each.get("applyConfiguration") or each["jsonPatch"])["expression"] for each in mutations
    )


def default(name: str) -> object:
    option = next(each for each in driver.params if each.name == name)
    assert isinstance(option, Option)
    return option.default


def test_the_plugin_calls_the_node_where_the_driver_listens() -> None:
    plugin = of_kind("plugin.yaml", "Plugin")
    (hook,) = plugin["spec"]["nodeHooks"]
    assert Path(hook["socket"]) == default("node_hook_socket")
    daemonset = documents(EXAMPLES / "daemonset.yaml")[2]
    pod = daemonset["spec"]["template"]["spec"]
    host = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each}
    mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    patches = [each["value"] for each in yaml.safe_load(read("driver.patch.yaml"))]
    (listens,) = (v for v in patches if str(v).startswith("--node-hook-socket="))
    place = Path(listens.partition("=")[2]).relative_to(mounts["csi"])
    assert Path(hook["socket"]) == Path(host["csi"]) / place
    assert patches[:2] == ["--kubevirt", listens]
    assert patches[2:] == [
        ["CHOWN", "DAC_OVERRIDE", "SYS_PTRACE"],
        {"type": "Unconfined"},  # of AppArmor, whose default hides other pods' processes
        True,  # hostPID
        *("/run/virtlun", False),  # readOnly: it writes what machines' hooks read
    ]
    assert pod["containers"][0]["volumeMounts"][3]["mountPath"] == "/run/virtlun"


def read(name: str) -> str:
    return (KUBEVIRT / name).read_text()


def test_the_plugin_asks_for_the_hook_points_that_do_something() -> None:
    (hook,) = of_kind("plugin.yaml", "Plugin")["spec"]["nodeHooks"]
    served = NodeHook(None, None, "", lambda _: None)._points  # type: ignore[arg-type, return-value]
    assert sorted(hook["permittedHooks"]) == sorted(served)


def test_the_plugin_calls_the_sidecar_where_it_listens() -> None:
    plugin = of_kind("plugin.yaml", "Plugin")
    (hook,) = plugin["spec"]["domainHooks"]
    socket = hook["sidecar"]["socketPath"]
    name = plugin["metadata"]["name"]
    assert socket.startswith(f"/var/run/kubevirt-plugin/{name}/")
    assert socket.endswith(".sock")
    policy = of_kind("plugin.yaml", "MutatingAdmissionPolicy")
    assert f'"--plugin-socket={socket}"' in expressions(policy)
    assert f'mountPath: "/var/run/kubevirt-plugin/{name}"' in expressions(policy)
    named = [each["name"] for each in plugin["spec"]["mutatingAdmissionPolicies"]]
    assert named == [policy["metadata"]["name"]]


@pytest.mark.parametrize("name", ["plugin.yaml", "legacy.yaml"])
def test_the_pod_gets_the_folder_where_both_look_for_it(name: str) -> None:
    policy = of_kind(name, "MutatingAdmissionPolicy")
    selects = policy["spec"]["matchConstraints"]["objectSelector"]["matchLabels"]
    assert selects == {"kubevirt.io": "virt-launcher", **LABEL}
    text = expressions(policy)
    folders = set(re.findall(r'name: "virtlun-controller",\s*mountPath: "([^"\\]+)', text))
    assert folders == {str(FOLDER)}
    assert f'driver: "{DRIVER_NAME}"' in text
    assert (f'{{"{NODE_HOOK}": "pod"}}' in text) == (name == "legacy.yaml")
    binding = of_kind(name, "MutatingAdmissionPolicyBinding")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]


@pytest.mark.parametrize("name", ["vm.yaml", "vm-legacy.yaml"])
def test_a_machine_takes_part_by_its_label(name: str) -> None:
    (vm,) = documents(KUBEVIRT / name)
    metadata = vm["spec"]["template"]["metadata"]
    assert metadata["labels"] == LABEL
    annotations = metadata.get("annotations", {})
    assert bool(annotations) == (name == "vm-legacy.yaml")
    for text in annotations.values():
        (container,) = json.loads(text)
        assert container["command"] == ["virtlun-kubevirt-hook"]
        known = {option for param in sidecar.params for option in param.opts}
        assert {arg.partition("=")[0] for arg in container["args"]} <= known


def test_the_driver_may_have_inline_volumes_and_is_told_the_pod() -> None:
    (spec,) = (each["spec"] for each in documents(EXAMPLES / "csidriver.yaml"))
    assert spec["volumeLifecycleModes"] == ["Persistent", "Ephemeral"]
    assert spec["podInfoOnMount"] is True


def test_the_options_in_the_driver_s_patch_are_options() -> None:
    known = {option for param in driver.params for option in param.opts}
    given = re.findall(r"value: (--[a-z-]+)", read("driver.patch.yaml"))
    assert given
    assert set(given) <= known


def test_the_table_for_cdi_says_what_the_driver_can_do() -> None:
    """By what the driver answers to each access mode and each way of using a volume."""
    modes = {"rwo": Mode.SINGLE_NODE_MULTI_WRITER, "rwx": Mode.MULTI_NODE_MULTI_WRITER}
    ways: dict[str, Any] = {
        "block": {"block": pb.VolumeCapability.BlockVolume()},
        "file": {"mount": pb.VolumeCapability.MountVolume()},
    }
    for key, face in ((DRIVER_NAME, "kernel"), (f"{DRIVER_NAME}/vhost", "vhost")):
        (line,) = re.findall(rf'^"{re.escape(key)}": +\{{(\{{.+\}})\}},$', read("README.md"), re.M)
        told = set(re.findall(r"\{(\w+), (\w+)\}", line))
        can = set()
        for mode, number in modes.items():
            for way, given in ways.items():
                access = Mode(mode=Mode.Mode.Name(number))
                asked = pb.VolumeCapability(access_mode=access, **given)
                if problem(asked, face=face) is None:
                    can.add((mode, way))
        assert told == can, key
