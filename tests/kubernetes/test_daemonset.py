"""The manifests as they are, in containerd: what their pods may do, and how they are updated.

All other tests here run the manifests' commands as processes of the node (`driver.py`). What a
container changes is looked at here: images, probes, propagation of mounts, capabilities,
tolerations, and an update of each image while a pod writes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.account import NAMESPACE
from tests.kubernetes.ceph import KEY, ceph_of
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import DRIVER, EXAMPLES, ROOT
from tests.kubernetes.installed import KUBELET_DIR, SETS, Installed
from tests.kubernetes.kubevirt import objects
from tests.kubernetes.program_image import program_image
from tests.kubernetes.sandbox import SERVICE_ADDRESS
from tests.kubernetes.tools import Tools
from tests.support.ceph import lacks
from tests.support.examples import used
from tests.support.wait import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

README = EXAMPLES / "README.md"
KUBEVIRT = EXAMPLES / "kubevirt"
CEPH = EXAMPLES / "ceph"
CEPH_POOL = "vms"
"""As its README has it."""

#: Appends a number a line, each durable before the next; a failure of any is noted outside.
WRITE = """\
(i=0; while [ ! -e /data/stop ]; do i=$((i+1)); echo $i >>/data/log && sync /data/log \
|| echo $i >>/tmp/failed; done) >/dev/null 2>&1 &
"""
#: Capabilities by their number (linux/capability.h).
CHOWN, DAC_OVERRIDE, SYS_PTRACE, SYS_ADMIN, SYS_RESOURCE = 0, 1, 19, 21, 24
VOLUME = "11111111-1111-8111-8111-111111111111"
#: Programs with the rights of the driver, which say what a try ends with.
IMPORTS = f"""\
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from csi import kernel
from csi.host.remote import Helper
helper = Helper(Path('/run/virtlun-csi/helper.sock'))
"""
TRY = """\
try:
    {}
    print('it was done')
except Exception as error:
    print(error)
"""
#: It holds for all pods that do not tolerate it, those that run as well.
TAINT = "maintenance=now:NoExecute"


@pytest.fixture(scope="module")
def installed(tools: Tools) -> Iterator[Installed]:
    """The DaemonSets on a node of their own, which is tainted while they come."""
    with Cluster(tools=tools, kubelet_dir=KUBELET_DIR) as cluster:
        cluster.kubectl("taint", "node", "--all", TAINT)
        found = Installed(cluster)
        cluster.kubectl("taint", "node", "--all", f"{TAINT}-")
        yield found


def status(installed: Installed, name: str, container: str = "") -> dict[str, str]:
    """Returns /proc/PID/status of the first program in a container of a DaemonSet's pod."""
    said = installed.execute(name, "cat", "/proc/1/status", container=container)
    lines = said.splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def test_who_may_do_what(installed: Installed) -> None:
    """Only what mounts is privileged, and the target keeps nothing of what its pod was given."""
    privileged = {
        container["name"]
        for name in SETS
        for container in installed.pod(name)["spec"]["containers"]
        if container.get("securityContext", {}).get("privileged")
    }
    assert privileged == {"virtlun-holder", "virtlun-csi-helper"}
    for name in ("virtlun-holder", "virtlun-target"):
        mounts = installed.pod(name)["spec"]["containers"][0]["volumeMounts"]
        assert not any("serviceaccount" in mount["mountPath"] for mount in mounts), name
    target = status(installed, "virtlun-target")
    assert target["Uid"].split() == ["64100"] * 4
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(target[kind], 16) == 0, kind
    assert (target["NoNewPrivs"], target["Seccomp"]) == ("1", "2")


def test_the_driver_has_no_right_and_what_has_some_few(installed: Installed) -> None:
    """By what the kernel says of each process, whatever the manifest does."""
    driver = status(installed, "virtlun-csi")
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(driver[kind], 16) == 0, kind
    assert (driver["NoNewPrivs"], driver["Seccomp"]) == ("1", "2")
    assert driver["Gid"].split() == ["64100"] * 4
    allowed = {
        "virtlun-csi-helper": ("virtlun-csi", {DAC_OVERRIDE, SYS_ADMIN, SYS_RESOURCE}),
        "virtlun-holder": ("virtlun-holder", {CHOWN, DAC_OVERRIDE, SYS_ADMIN}),
    }
    for container, (name, kept) in allowed.items():
        found = status(installed, name, container)
        some = sum(1 << number for number in kept)
        for kind in ("CapPrm", "CapEff", "CapBnd"):
            # a machine's own bounding set may be smaller
            assert int(found[kind], 16) & ~some == 0, (container, kind)
            assert int(found[kind], 16) >> SYS_ADMIN & 1, (container, kind)
        # its own filter: the runtime gives a privileged container none
        assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2"), container
    spec = installed.pod("virtlun-csi")["spec"]
    assert not any(spec.get(name) for name in ("hostPID", "hostIPC", "hostNetwork"))
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"], container["name"]
        if container["name"] != "virtlun-csi-helper":
            assert context["capabilities"] == {"drop": ["ALL"]}, container["name"]
            assert not context["allowPrivilegeEscalation"], container["name"]
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}, container["name"]


def test_whoever_takes_the_driver_over_mounts_and_opens_nothing(installed: Installed) -> None:
    """Neither by itself nor by the helper, but for volumes of ours."""

    def tries(code: str) -> str:
        return installed.execute("virtlun-csi", "python3", "-c", f"{IMPORTS}\n{code}")

    mount = "kernel.mount('x', '/csi', 'tmpfs', 0)"
    assert "Operation not permitted" in tries(TRY.format(mount))
    assert "No such file" in tries(TRY.format("open('/dev/loop-control')"))
    for folder in ("/var/lib/kubelet", "/", "/run/virtlun", "/run/virtlun/vhost"):
        assert "Read-only file system" in tries(TRY.format(f"open('{folder}/x', 'w')"))
    for asked, word in (
        ("helper.unmount('v', Path('/etc'))", "is not below"),
        ("helper.unmount('v', Path('/var/lib/kubelet/pods'))", "not where kubelet has CSI volumes"),
        (f"helper.holds('{VOLUME}', Path('/dev/vda'))", "is no loop device"),
        (f"helper.call('run', '{VOLUME}', command='id')", "no operation"),
        (
            f"helper.attach('{VOLUME}', Path('/etc/shadow'), read_only=False, block_size=512)",
            "is not the export of",
        ),
    ):
        assert word in tries(TRY.format(asked)), asked


def test_the_probes_are_answered(installed: Installed) -> None:
    """By the driver as it is in its pod, at the port and pages that the manifest names."""
    pod = installed.pod("virtlun-csi")
    driver = pod["spec"]["containers"][0]
    assert driver["name"] == "virtlun-csi"
    port = next(one["containerPort"] for one in driver["ports"] if one["name"] == "http")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = driver[probe]["httpGet"]
        assert asked["port"] == "http"
        url = f"http://{pod['status']['podIP']}:{port}{asked['path']}"
        assert installed.cluster.box.run("busybox", "wget", "-q", "-O", "-", url).stdout == "ok\n"


def test_a_driver_without_its_socket_is_started_again(installed: Installed) -> None:
    """As its liveness probe fails: no kubelet reaches it any more, and it does not know why."""
    before = installed.restarts()["virtlun-csi"]
    installed.execute("virtlun-csi", "rm", "/csi/csi.sock")
    until(
        lambda: installed.restarts()["virtlun-csi"] > before,
        "the restart",
        deadline_s=180,
        every_s=1,
    )
    installed.wait_ready("virtlun-csi")
    installed.execute("virtlun-csi", "test", "-S", "/csi/csi.sock")


def commands(readme: Path) -> str:
    """Returns the first of a README's commands."""
    script = re.search(r"^```sh\n(.+?)^```", used(readme).read_text(), re.DOTALL | re.MULTILINE)
    assert script, readme
    return script[1]


def run(cluster: Cluster, folder: Path, script: str) -> str:
    """Runs commands of a README in its folder, and returns what they print."""
    done = cluster.box.run(
        *("sh", "-euc", f"cd {folder}\n{script}"),
        deadline_s=300,
        env={
            "KUBECONFIG": str(cluster.kubeconfig),
            "PATH": f"{cluster.tools.path('kubectl').parent}:{os.environ['PATH']}",
        },
    )
    return str(done.stdout)


def test_the_readmes_commands_do_what_it_says(installed: Installed) -> None:
    """Those of examples/kubernetes/README.md, once more: what they made already stays as it is."""
    cluster = installed.cluster
    script = commands(README)
    pod = installed.pod("virtlun-target")["metadata"]["name"]
    assert script.count("virtlun-target-xxxxx") == 2
    said = run(cluster, EXAMPLES, script.replace("virtlun-target-xxxxx", pod))
    assert "pod/writer condition met" in said, said
    assert re.search(r"^/dev/loop\d+ .* /data$", said, re.MULTILINE), said
    assert re.search(r"^lvs0/\S+ ", said, re.MULTILINE), said
    cluster.wait("pvc/data", "jsonpath={.status.capacity.storage}=600Mi")
    cluster.delete("pod", "writer")
    cluster.delete("pvc", "data")
    until(lambda: not cluster.items("pv"), "no volume")


def test_a_pod_writes_through_every_update(installed: Installed) -> None:
    """Driver, target and holder get another image one after the other; no write fails."""
    cluster = installed.cluster
    cluster.apply(EXAMPLES / "pod-filesystem.yaml")
    cluster.wait("pod/writer", "condition=Ready")
    (mounted,) = (
        place for place in cluster.box.mounts(KUBELET_DIR / "pods") if "kubernetes.io~csi" in place
    )
    assert mounted.endswith("/mount")
    cluster.shell("writer", WRITE)

    def written() -> int:
        said = cluster.execute("writer", "tail", "-n", "1", "/data/log", check=False)
        return int(said or 0)

    def goes_on() -> None:
        before = written()
        until(lambda: written() > before + 1, "further writes", deadline_s=120, every_s=0.2)

    until(lambda: written() > 0, "the first write")
    restarts = installed.restarts()["virtlun-csi-helper"]
    installed.execute("virtlun-csi", "sh", "-c", "kill 1", container="virtlun-csi-helper")
    until(lambda: installed.restarts()["virtlun-csi-helper"] > restarts, "its restart")
    installed.wait_ready("virtlun-csi")
    goes_on()
    for name, delete in (
        ("virtlun-csi", False),  # a rolling update
        ("virtlun-target", True),
        ("virtlun-holder", True),
        ("virtlun-target", True),  # by the new holder
    ):
        installed.update(name, delete=delete)
        goes_on()
    failed = cluster.shell("writer", "cat /tmp/failed 2>&1", check=False)
    assert "No such file" in failed, failed
    cluster.execute("writer", "touch", "/data/stop")
    count = written()
    lines = cluster.execute("writer", "cat", "/data/log").split()
    assert lines == [str(number) for number in range(1, len(lines) + 1)]
    assert len(lines) >= count
    # and all of it is as new as before
    cluster.apply(EXAMPLES / "pod-block.yaml")
    cluster.wait("pod/raw", "condition=Ready")
    patch = '{"spec":{"resources":{"requests":{"storage":"600Mi"}}}}'
    cluster.kubectl("patch", "pvc", "data", "-p", patch)
    cluster.wait("pvc/data", "jsonpath={.status.capacity.storage}=600Mi")
    cluster.delete("pod", "--all")
    cluster.delete("pvc", "--all")
    until(lambda: not cluster.items("pv"), "no volume")
    assert installed.execute("virtlun-target", "virtlun", "volume", "list", "--json") == "[]\n"
    left = [
        place for place in cluster.box.mounts("/") if DRIVER in place or "virtlun/export" in place
    ]
    assert left == []
    assert not cluster.box.loops()


def test_the_commands_of_kubevirts_readme_make_a_driver_that_serves_machines(
    installed: Installed,
) -> None:
    """Those of examples/kubernetes/kubevirt/README.md, on an API server that has KubeVirt's kinds.

    What its parts do then, with a machine that runs, is for test_kubevirt.
    """
    cluster = installed.cluster
    for definition in objects.definitions():
        cluster.apply(json.dumps(definition))
        cluster.wait(f"crd/{definition['metadata']['name']}", "condition=Established")
    said = run(cluster, KUBEVIRT, commands(KUBEVIRT / "README.md"))
    for made in ("vmvolumes.virtlun.dev", "plugin.kubevirt.io/", "virtualmachine.kubevirt.io/vm"):
        assert made in said, said

    def serves() -> bool:
        pods = installed.pods("virtlun-csi")
        return len(pods) == 1 and "--kubevirt" in pods[0]["spec"]["containers"][0]["args"]

    until(serves, "a pod of the patched driver", deadline_s=180, every_s=0.5)
    installed.wait_ready("virtlun-csi")
    installed.execute("virtlun-csi", "test", "-S", "/csi/node-hook.sock")
    found = installed.execute("virtlun-csi", "cat", "/proc/self/status")  # 1 is the host's
    rights = int(re.findall(r"^CapEff:\t(\w+)$", found, re.MULTILINE)[0], 16)
    assert rights == sum(1 << number for number in (CHOWN, DAC_OVERRIDE, SYS_PTRACE))
    cluster.delete("virtualmachine", "vm")
    cluster.delete("pvc", "boot")
    until(lambda: not cluster.items("pv"), "no volume")


@pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}")
def test_the_commands_of_cephs_readme_make_a_pool_for_pods(
    installed: Installed, tmp_path: Path
) -> None:
    """Those of examples/kubernetes/ceph/README.md, with a real Ceph that wants a key.

    Only the image is made in another way than by the first one, with the same package.
    """
    cluster, folder = installed.cluster, tmp_path / "ceph"
    shutil.copytree(CEPH, folder)
    build, _, kubectl = commands(CEPH / "README.md").partition("docker build -t ")
    name, _, kubectl = kubectl.partition(" -\n")
    [packages] = re.findall(r"install -y --no-install-recommends ([a-z0-9 ]+)\\n", build)
    tags = [f"docker.io/library/{name}"]
    cluster.nodes[0].import_image(
        program_image(cluster.nodes[0].folder / "ceph.tar", tags, packages.split())
    )
    with ceph_of(cluster, key=True, address=SERVICE_ADDRESS) as ceph:
        ceph.run("ceph", "osd", "pool", "create", CEPH_POOL, "8")
        ceph.run("ceph", "osd", "pool", "application", "enable", CEPH_POOL, "rbd")
        may = ("mon", "profile rbd", "osd", f"profile rbd pool={CEPH_POOL}")
        keyring = str(folder / "ceph.client.virtlun.keyring")
        ceph.run("ceph", "auth", "get-or-create", "client.virtlun", *may, "-o", keyring)
        (folder / "ceph.conf").write_text(ceph.run("ceph", "config", "generate-minimal-conf"))
        targets, once, rest = kubectl.partition("# once per node")
        before = installed.pod("virtlun-target")["metadata"]["uid"]
        run(cluster, folder, targets)
        installed.wait_ready("virtlun-target", unlike=before)
        pod = installed.pod("virtlun-target")
        assert pod["spec"]["containers"][0]["image"] == name
        rest = rest.replace("virtlun-target-xxxxx", pod["metadata"]["name"])
        said = run(cluster, folder, once + rest)
        assert KEY in said, said
        cluster.kubectl("exec", "deploy/wanderer", "--", "sh", "-c", "echo kept >/data/x && sync")
        [volume] = cluster.items("pv")
        assert volume["spec"]["claimRef"]["name"] == "wanders"
        assert len(ceph.rbd("ls", CEPH_POOL).split()) == 1
        cluster.kubectl("delete", "-f", CEPH / "pod.yaml")
        until(lambda: not cluster.items("pv"), "no volume", deadline_s=120, every_s=0.5)
        assert ceph.rbd("ls", CEPH_POOL) == ""
        installed.execute("virtlun-target", "virtlun", "pool", "remove", "ceph0")


def test_it_goes_without_a_trace(installed: Installed) -> None:
    """When the DaemonSets are removed no process and no mount of theirs is left on the node."""
    installed.remove()
    assert installed.cluster.items("pod", "-n", NAMESPACE) == []
    assert installed.cluster.box.mounts("/run/virtlun") == []
