"""The cluster alone does what a cluster does, and leaves nothing on the machine."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kubernetes.cluster import NODE, Cluster
from tests.kubernetes.sandbox import CGROUPS, Sandbox, SandboxError
from tests.support.wait import until

POD = """\
apiVersion: v1
kind: Pod
metadata: {name: plain}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - name: shell
      image: busybox:stable
      imagePullPolicy: IfNotPresent
      command: [sh, -c, "echo it runs; exec sleep 1000000"]
"""


def test_a_pod_runs_and_takes_commands(cluster: Cluster) -> None:
    with cluster.applied(POD):
        cluster.wait("pod/plain", "condition=Ready")
        assert cluster.shell("plain", "echo $((6 * 7))") == "42\n"
        with pytest.raises(SandboxError, match="exit code 1"):
            cluster.shell("plain", "false | cat")
        # The container runtime writes down what it says, in its own time.
        until(lambda: cluster.kubectl("logs", "plain") == "it runs\n", "what it says")
        assert cluster.get("pod", "plain")["spec"]["nodeName"] == NODE
    cluster.wait("pod/plain", "delete")


def test_the_server_refuses_a_field_that_it_does_not_know(cluster: Cluster) -> None:
    with pytest.raises(SandboxError, match="teminationGracePeriodSeconds"):
        cluster.apply(POD.replace("termination", "temination"))


SETTINGS = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: first, labels: {of: these}}
data: {"a": "1"}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: second}
"""


def test_the_server_says_the_same_without_kubectl(cluster: Cluster) -> None:
    """By whatever names kubectl takes, and to the words for which it is asked."""
    with cluster.applied(SETTINGS):
        for name in ("cm", "configmap", "ConfigMaps", "configmaps.", "v1 ConfigMap"):
            assert cluster.get(name, "first")["data"] == {"a": "1"}, name
        for words in (
            ("cm", "-l", "of=these"),
            ("cm", "--field-selector=metadata.name=first"),
            ("cm,lease", "-n", "default", "--field-selector", "metadata.name=first"),
        ):
            [found] = cluster.items(*words)
            said = json.loads(cluster.kubectl("get", *words, "-o", "json"))["items"]
            assert [found] == said, words
        everywhere = {each["metadata"]["namespace"] for each in cluster.items("cm", "-A")}
        assert everywhere > {"default"}
        cluster.patch("cm", "first", {"data": {"a": None, "b": "2"}})
        assert cluster.get("cm/first")["data"] == {"b": "2"}
        cluster.apply(SETTINGS, dry_run=True)
        assert cluster.get("cm", "first")["data"] == {"b": "2"}
        with pytest.raises(SandboxError, match=r'NotFound: configmaps "third" not found'):
            cluster.get("cm", "third")
        with pytest.raises(SandboxError, match="no kind gadget"):
            cluster.get("gadget", "first")


def test_a_wait_ends_with_what_it_waits_for(cluster: Cluster) -> None:
    """As soon as it is so, and with the object's own words where it is not in time."""
    change = {"metadata": {"finalizers": ["example.org/wait"]}, "data": {"a": "1"}}
    with cluster.applied(SETTINGS), ThreadPoolExecutor(1) as pool:
        cluster.patch("cm", "second", change)
        waiting = pool.submit(cluster.wait, "cm/second", "jsonpath={.data.a}=2")
        cluster.patch("cm", "first", {"data": {"a": "2"}})
        cluster.patch("cm", "second", {"data": {"b": "2"}})
        assert not waiting.done()
        cluster.patch("cm", "second", {"data": {"a": "2"}})
        waiting.result()
        with pytest.raises(SandboxError, match="in vain"):
            cluster.wait("cm/second", "jsonpath={.data.a}=3", deadline_s=0.5)
        with pytest.raises(SandboxError, match="not found"):
            cluster.wait("cm/third", "jsonpath={.data.a}=3")
        going = pool.submit(cluster.delete, "cm", "first", "second", "third")
        cluster.wait("cm/first", "delete")
        assert not going.done()
        cluster.patch("cm", "second", {"metadata": {"finalizers": None}})
        going.result()
        cluster.wait("cm/second", "delete")


def test_the_programs_are_the_versions_that_go_mod_names(cluster: Cluster) -> None:
    told = cluster.get("node", NODE)["status"]["nodeInfo"]
    gomod = (Path(__file__).parent / "tools/go.mod").read_text()
    assert f"k8s.io/kubernetes {told['kubeletVersion']}\n" in gomod


def test_a_box_leaves_nothing_behind(tmp_path: Path) -> None:
    """A program, a mount and a loop device at work in a box are gone when it ends."""
    with Sandbox(tmp_path) as box:
        file = tmp_path / "file"
        with file.open("wb") as opened:
            opened.truncate(1 << 20)
        (tmp_path / "mounted").mkdir()
        box.run("losetup", "--find", file)
        box.run("mount", "-t", "tmpfs", "in-the-box", tmp_path / "mounted")
        sleeper = box.spawn("sleeper", "sleep", "1000000")
        pid = until(sleeper.inner, "the program", deadline_s=90)
        assert list(box.loops().values()) == [str(file)]
        assert box.mounts(tmp_path) == [str(tmp_path / "mounted")]
        assert (Path("/proc") / str(pid)).exists()
        namespace = Path("/proc/self/ns/mnt").readlink()
        assert Path(f"/proc/{pid}/ns/mnt").readlink() != namespace
    assert not (Path("/proc") / str(pid)).exists()
    assert box.loops() == {}
    assert "in-the-box" not in Path("/proc/self/mountinfo").read_text()
    assert not list(CGROUPS.glob(f"*/{box.cgroup}"))
