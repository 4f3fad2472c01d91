"""The CSI driver with its helper in a guest: what a pod mounts is a ublk device, which survives.

Target, holder, helper and driver are the real programs, and calls go to the driver's socket as
kubelet's do. `VIRTLUN_SEED` repeats the moments of a run.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.guest.image import Kernel
from tests.support import program_disk, python_inside, target_inside
from tests.support.qemu import Guest
from tests.support.restarts import choose_seed
from tests.support.target import SANDBOX_REFUSED
from tests.support.target_inside import SOCKET, TargetInside
from tests.support.verified_io import VerifiedIo
from tests.support.wait import until

#: Python takes a minute to import the driver in a guest without KVM.
pytestmark = [pytest.mark.vm, pytest.mark.nightly, pytest.mark.timeout(1800)]

TOOLS = ("setpriv", "blkid", "mkfs.ext4", "e2fsck", "resize2fs")
ENDPOINT = "/run/virtlun-csi/csi.sock"
HELPER = "/run/virtlun-csi/helper.sock"
CALL_S = 400.0
MIB = 1 << 20
MODULES = ("csi.cli", "csi.host.cli", "google.protobuf.json_format")
#: A client of the driver that is started once, as Python takes long to start in a guest.
CLIENT = """
import json, os, sys, grpc
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass
from csi.proto import csi_pb2 as pb
methods = {{
    method.name: (f"/{{service.full_name}}/{{method.name}}", method)
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}}
while True:
    with open("/ram/asked") as asked:
        question = json.load(asked)
    path, method = methods[question["method"]]
    request = json_format.ParseDict(question["request"], GetMessageClass(method.input_type)())
    answer = GetMessageClass(method.output_type)
    channel = grpc.insecure_channel("unix://{endpoint}")
    call = channel.unary_unary(path, type(request).SerializeToString, answer.FromString)
    try:
        said = {{"done": json_format.MessageToDict(call(request, timeout={call_s}))}}
    except grpc.RpcError as error:
        said = {{"code": error.code().name, "details": error.details()}}
    with open("/ram/answered", "w") as answered:
        json.dump(said, answered)
"""
MOUNT = {"mount": {"fs_type": "ext4"}, "access_mode": {"mode": "SINGLE_NODE_WRITER"}}
BLOCK: dict[str, Any] = {"block": {}, "access_mode": {"mode": "SINGLE_NODE_WRITER"}}
KUBELET = "/var/lib/kubelet"
STAGING = f"{KUBELET}/plugins/kubernetes.io/csi/csi.virtlun.dev/hash/globalmount"
POD = f"{KUBELET}/pods/uid/volumes/kubernetes.io~csi/pv/mount"
BLOCK_STAGING = f"{KUBELET}/plugins/kubernetes.io/csi/volumeDevices/staging/pv"
BLOCK_POD = f"{KUBELET}/plugins/kubernetes.io/csi/volumeDevices/publish/pv/uid"


class Refused(AssertionError):
    """A call was refused; the text has its code and its sentence."""


class Node:
    """A driver in a guest, and a client of it."""

    def __init__(self, guest: Guest) -> None:
        """Starts target, helper, driver and client."""
        self.guest = guest
        self.target = TargetInside(guest)
        guest.run(f"mkdir -p /run/virtlun-csi {KUBELET}; mkfifo /ram/asked /ram/answered")
        helper = python_inside.run(
            "-m", "csi.host.cli", "--socket", HELPER, "--vhost-dir", "/ram/vhost"
        )
        guest.run(f"{helper} >/ram/helper.log 2>&1 & echo started")
        client = CLIENT.format(endpoint=ENDPOINT, call_s=CALL_S)
        guest.run(f"echo {shlex.quote(client)} >/ram/client.py")
        run = python_inside.run("/ram/client.py")
        guest.run(f"{run} >/ram/client.log 2>&1 & echo started")
        self.driver()

    def driver(self, *options: str) -> None:
        """Starts a driver, in place of one that runs; options after the usual ones."""
        words: tuple[str, ...] = (
            "--endpoint",
            f"unix://{ENDPOINT}",
            "--node-id",
            "n",
            "--target-socket",
            SOCKET,
        )
        words += ("--helper-socket", HELPER, "--log-json", "--http", "''", *options)
        run = python_inside.run("-m", "csi.cli", *words)
        self.guest.run(
            "[ -e /tmp/driver.pid ] && kill -9 $(cat /tmp/driver.pid); "
            f"rm -f {ENDPOINT} /ram/driver.log; {run} >/ram/driver.log 2>&1 & "
            "echo $! >/tmp/driver.pid"
        )
        said = partial(self.words, "driver")
        until(lambda: '"serving"' in said(), said, CALL_S, 0.2)

    def words(self, whose: str) -> str:
        """Returns a log."""
        return self.guest.run(f"cat /ram/{whose}.log 2>/dev/null || true")

    def call(self, method: str, **request: Any) -> dict[str, Any]:
        """Calls the driver; Refused with what it says."""
        asked = json.dumps({"method": method, "request": request})
        said = self.guest.run(
            f"echo {shlex.quote(asked)} >/ram/asked; cat /ram/answered", deadline_s=CALL_S
        )
        answer: dict[str, Any] = json.loads(said)
        if "done" not in answer:
            logs = "\n".join(self.words(each) for each in ("driver", "helper", "client"))
            raise Refused(f"{method}: {answer}\n{logs}")
        done: dict[str, Any] = answer["done"]
        return done

    def note(self, folder: str, handle: str) -> None:
        """Notes, as kubelet does, which volume a place is for."""
        note = json.dumps({"driverName": "csi.virtlun.dev", "volumeHandle": handle})
        self.guest.run(f"mkdir -p {folder}; echo {shlex.quote(note)} >{folder}/vol_data.json")

    def create(self, name: str, mib: int, **parameters: str) -> str:
        """Makes a volume and returns its handle."""
        made = self.call(
            "CreateVolume",
            name=name,
            capacity_range={"required_bytes": mib * MIB},
            volume_capabilities=[MOUNT],
            parameters={"lvstore": "lvs0", **parameters},
        )
        handle: str = made["volume"]["volumeId"]
        self.note(str(Path(STAGING).parent), handle)
        self.note(str(Path(POD).parent), handle)
        self.note(f"{KUBELET}/plugins/kubernetes.io/csi/volumeDevices/pv/data", handle)
        return handle

    def devices(self) -> dict[str, str]:
        """Returns the path of each exported volume."""
        listed = self.target.rpc("virtlun_export_list")
        return {each["bdev_name"]: each["path"] for each in listed}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One for all tests, as it takes long to start; no sandbox refused a call, no I/O failed."""
    programs = target_inside.programs()
    for tool in TOOLS:
        programs[tool] = Path(shutil.which(tool, path="/sbin:/usr/sbin:/bin:/usr/bin") or tool)

    def also(tree: Path) -> None:
        python_inside.add(tree, MODULES)
        library = next(Path("/usr/lib").rglob("libseccomp.so.2"))
        shutil.copy(library, tree / "lib")

    scratch = tmp_path_factory.mktemp("node")
    with program_disk.guest(
        scratch, programs, Kernel.NEWEST, memory_mib=1024, vcpus=2, also=also
    ) as guest:
        guest.run(target_inside.PREPARE)
        node = Node(guest)
        yield node
        words = "\n".join(guest.run("cat /ram/*.log /ram/log; dmesg").splitlines())
        assert SANDBOX_REFUSED not in words and "I/O error" not in words, words


def test_what_a_pod_has_mounted_grows_and_survives(node: Node) -> None:
    """Staged, published, killed under I/O, grown; then as a block device, read-only too."""
    guest = node.guest
    handle = node.create("v", 16)
    volume = {"volume_id": handle, "staging_target_path": STAGING}
    node.call("NodeStageVolume", **volume, volume_capability=MOUNT)
    node.call("NodePublishVolume", **volume, target_path=POD, volume_capability=MOUNT)
    assert '"kind": "ublk"' in node.words("driver"), node.words("driver")
    device = node.devices()[handle]
    assert device.startswith("/dev/ublkb")
    guest.run(f"dd if=/dev/urandom of={POD}/x bs=64k count=32; sync; md5sum {POD}/x >/tmp/sum")
    guest.run(f"( while sleep .02; do dd if=/dev/zero bs=4k count=1 of={POD}/y conv=fsync || "
              "touch /tmp/failed; done ) >/dev/null 2>&1 & echo $! >/tmp/writer.pid")  # fmt: skip
    node.target.kill()
    node.target.upgrade()
    guest.run("kill $(cat /tmp/writer.pid); [ ! -e /tmp/failed ]; md5sum -c /tmp/sum; sync")
    guest.run("echo 3 >/proc/sys/vm/drop_caches; md5sum -c /tmp/sum")
    capacity = {"required_bytes": 40 * MIB}
    node.call("ControllerExpandVolume", volume_id=handle, capacity_range=capacity)
    grown = node.call(
        "NodeExpandVolume", volume_id=handle, volume_path=POD, capacity_range=capacity
    )
    assert int(grown["capacityBytes"]) == 40 * MIB
    usage = node.call("NodeGetVolumeStats", volume_id=handle, volume_path=POD)["usage"]
    assert int(usage[0]["total"]) > 30 * MIB
    # a driver that is to take loop devices finds what is there
    node.driver("--host-device", "loop")
    node.call("NodePublishVolume", **volume, target_path=POD, volume_capability=MOUNT)
    assert node.devices() == {handle: device}
    node.call("NodeUnpublishVolume", volume_id=handle, target_path=POD)
    node.call("NodeUnstageVolume", **volume)
    assert node.devices() == {}
    assert guest.run("ls /dev | grep ublk[bc] || true") == ""
    # and makes loop devices where nothing is, which one that takes ublk leaves
    node.call("NodeStageVolume", **volume, volume_capability=MOUNT)
    assert node.devices()[handle].startswith("/run/virtlun/export/")
    node.driver()
    node.call("NodePublishVolume", **volume, target_path=POD, volume_capability=MOUNT)
    guest.run("md5sum -c /tmp/sum")
    assert node.devices()[handle].startswith("/run/virtlun/export/")
    node.call("NodeUnpublishVolume", volume_id=handle, target_path=POD)
    node.call("NodeUnstageVolume", **volume)
    node.call("DeleteVolume", volume_id=handle)


def test_a_block_volume_is_a_device_and_a_read_only_one(node: Node) -> None:
    """Blocks of 4 KiB, verified I/O while the target is killed."""
    guest = node.guest
    handle = node.create("b", 16, blockSize="4096", thin="true")
    volume = {"volume_id": handle, "staging_target_path": BLOCK_STAGING}
    node.call("NodeStageVolume", **volume, volume_capability=BLOCK)
    guest.run(f"mkdir -p {Path(BLOCK_POD).parent}")
    node.call("NodePublishVolume", **volume, target_path=BLOCK_POD, volume_capability=BLOCK)
    disk = Path(node.devices()[handle]).name
    assert guest.run(f"cat /sys/block/{disk}/queue/logical_block_size") == "4096\n"
    assert guest.run(f"stat -c %t:%T {BLOCK_POD}") == guest.run(f"stat -c %t:%T /dev/{disk}")
    io = VerifiedIo(guest, disk, seed=choose_seed(), threads=1, depth=4)
    for _ in range(2):
        io.goes_on_after(node.target.kill)
    io.finish()
    other = f"{BLOCK_POD}2"
    node.call(
        "NodePublishVolume",
        **volume,
        target_path=other,
        volume_capability=BLOCK,
        readonly=True,
    )
    guest.run(f"dd if={other} of=/tmp/1 bs=64k count=4; dd if={BLOCK_POD} of=/tmp/2 bs=64k count=4")
    guest.run("cmp /tmp/1 /tmp/2")
    said = guest.run(f"dd if=/tmp/1 of={other} bs=4k count=1 conv=notrunc", check=False)
    assert "0+0 records out" in said, said
    for target in (other, BLOCK_POD):
        node.call("NodeUnpublishVolume", volume_id=handle, target_path=target)
    node.call("NodeUnstageVolume", **volume)
    assert guest.run("ls /dev | grep ublk[bc] || true") == ""
    node.call("DeleteVolume", volume_id=handle)
