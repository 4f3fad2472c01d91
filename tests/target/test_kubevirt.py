"""Claims of virtual machines handed over to their controllers and back, on the real target.

What is not real is said in tests.support.kubevirt.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from csi.errors import Code, Failure, describe
from csi.kubevirt import document
from csi.kubevirt.domainhook import Folder
from csi.kubevirt.lun import InUse
from csi.kubevirt.podcontrollers import LAUNCHER_GID
from csi.kubevirt.pods import Pod
from csi.proto import csi_pb2 as pb
from pydataplane.client import Client
from pydataplane.errors import BAD_PARAMETERS, INVALID, RpcError, TargetError
from tests.support.initiator import Initiator
from tests.support.kubevirt import (
    BLK_QEMU,
    MIB,
    NOTHING,
    OLD_QEMU,
    POOR_QEMU,
    QEMU,
    Host,
    Strike,
    Struck,
)
from tests.support.night import by_day
from tests.support.wait import until
from tests.target.conftest import MakeTarget

pytestmark = pytest.mark.root
BLOCK = 512
BLKSSZGET = 0x1268
"""ioctl that tells a device's logical block size (linux/fs.h)."""
OWN_PHYSICAL = 4096
"""Bytes of a physical block of a volume of an lvstore."""


@pytest.fixture
def host(make_target: MakeTarget) -> Iterator[Host]:
    """A node with an lvstore of 512 MiB; at the end nothing of any pod may be left."""
    target = make_target().start()
    target.make_lvstore(size=512 * MIB)
    made = Host(target, target.directory)
    yield made
    made.close()
    made.clear()


def refused(call: Callable[[], object], code: grpc.StatusCode) -> str:
    try:
        call()
    except Exception as error:
        found, sentence = describe(error)
        assert found is code, sentence
        return sentence
    raise AssertionError(f"it should have failed with {code.name}")


def end(host: Host, pods: list[str], *claims: str) -> None:
    """Does what kubelet does at the end of pods, and checks that nothing is left of them."""

    def is_gone(pod: str) -> bool:
        try:
            host.unpublish_inline(pod)
        except Failure as failure:  # the target has yet to hear that the machine has left
            assert failure.code is Code.FAILED_PRECONDITION
            return False
        return True

    for pod in pods:
        for name in claims:
            host.unpublish(name, pod)
        until(functools.partial(is_gone, pod), "the pod's volume can be taken away")
    for name in claims:
        host.unstage(name)
    assert host.left() == NOTHING


def put(path: Path, data: bytes) -> None:
    """Writes to a block device through its cache, as a pod may."""
    with path.open("r+b", buffering=0) as device:
        device.write(data)


def get(path: Path, size: int) -> bytes:
    with path.open("rb", buffering=0) as device:
        return device.read(size)


def controller_json(host: Host, pod: str) -> document.Controller:
    found = document.read(host.inline_path(pod))
    assert found is not None
    return found


def test_claims_become_luns_and_claims_again_with_all_that_was_written(host: Host) -> None:
    pod = host.launcher()
    for name in ("boot", "data"):
        host.claim(name)
        put(host.publish(name, pod), f"{name} of an importer".encode().ljust(BLOCK, b"."))
    vmi = host.machine("boot", "data", pods=(pod,))

    host.call("PreVMStart", vmi)
    assert host.luns(pod) == {0: "boot", 1: "data"}
    assert host.parked() == ["boot", "data"]
    with pytest.raises(OSError, match=r"Read-only file system|Input/output error"):
        write_through(host.block_path("boot", pod))
    with Initiator(host.socket(pod)) as guest:
        guest.send("connect")
        for number, name in enumerate(("boot", "data")):
            guest.ready(number)
            assert guest.read(0, 1, target=number).startswith(f"{name} of an imp".encode())
            guest.write(0, f"{name} of the guest".encode().ljust(BLOCK, b"."), target=number)

    host.call("PostVMStop", vmi)
    assert host.luns(pod) == {}
    assert host.parked() == []
    for name in ("boot", "data"):
        path = host.block_path(name, pod)
        assert get(path, BLOCK).startswith(f"{name} of the guest".encode())
        put(path, b"mine again".ljust(BLOCK, b"."))
    end(host, [pod], "boot", "data")


def test_what_was_written_beside_the_guest_never_overtakes_it(host: Host) -> None:
    host.claim("boot")
    pod = host.launcher()
    path = host.publish("boot", pod)
    vmi = host.machine("boot", pods=(pod,))
    host.call("PreVMStart", vmi)
    get(path, BLOCK)
    put(path, b"late".ljust(4096, b"."))  # into the kernel's cache, which cannot write it out
    with Initiator(host.socket(pod)) as guest:
        guest.send("connect")
        guest.ready()
        guest.write(0, b"g" * BLOCK)
    host.call("PostVMStop", vmi)
    assert get(path, BLOCK) == b"g" * BLOCK
    os.sync()
    with Initiator(host.socket(pod)) as guest:
        host.call("PreVMStart", vmi)
        guest.send("connect")
        guest.ready()
        assert guest.read(0, 1) == b"g" * BLOCK
    end(host, [pod], "boot")


def write_through(path: Path) -> None:
    device = os.open(path, os.O_WRONLY | os.O_SYNC)
    try:
        os.write(device, bytes(4096))
    finally:
        os.close(device)


def test_each_call_may_be_repeated(host: Host) -> None:
    host.claim("boot")
    pod = host.launcher()
    vmi = host.machine("boot", pods=(pod,))
    for _ in range(2):
        host.publish_inline(pod)
        host.publish("boot", pod)
    for _ in range(3):
        host.call("PreVMStart", vmi)
        host.publish("boot", pod)  # kubelet started anew
        host.publish_inline(pod)
        assert host.luns(pod) == {0: "boot"}
        assert controller_json(host, pod).luns["boot"].target == 0
    for _ in range(2):
        for point in ("PostVMStart", "PreVMStop", "PostMigrationSource", "ComesLater"):
            host.call(point, vmi)
        assert host.luns(pod) == {0: "boot"}
    for _ in range(2):
        host.call("PostVMStop", vmi)
        assert host.luns(pod) == {}
        assert document.read(host.inline_path(pod)) is None
    for _ in range(2):
        end(host, [pod], "boot")


def test_the_pod_sees_its_socket_and_may_connect(host: Host) -> None:
    pod = host.launcher()
    found = host.socket(pod).stat()
    assert stat.S_ISSOCK(found.st_mode)
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, LAUNCHER_GID)
    with pytest.raises(OSError, match="Read-only"):
        (host.inline_path(pod) / "x").touch()
    host.call("PreVMStart", host.machine(pods=(pod,)))
    written = host.inline_path(pod) / "controller.json"
    assert stat.S_IMODE(written.stat().st_mode) == 0o644
    assert json.loads(written.read_text()) == {
        "version": 1,
        "socket": "vhost.sock",
        "reconnect_s": 1,
        "absent": None,
        "luns": {},
        "left": {},
    }
    end(host, [pod])


@pytest.mark.parametrize("first", ["claim", "inline volume"])
def test_a_pod_that_ends_without_a_word_leaves_nothing(host: Host, first: str) -> None:
    host.claim("boot")
    pod = host.launcher()
    host.publish("boot", pod)
    host.call("PreVMStart", host.machine("boot", pods=(pod,)))
    if first == "claim":
        host.unpublish("boot", pod)
        assert host.luns(pod) == {}
        assert host.parked() == []
    else:
        host.unpublish_inline(pod)
        assert host.parked() == []
        put(host.block_path("boot", pod), b"x")
    end(host, [pod], "boot")


def test_a_machine_that_is_connected_keeps_what_it_has(host: Host) -> None:
    host.claim("boot")
    pod = host.launcher()
    host.publish("boot", pod)
    host.call("PreVMStart", host.machine("boot", pods=(pod,)))
    with Initiator(host.socket(pod)) as guest:
        guest.send("connect")
        guest.ready()
        sentence = refused(lambda: host.unpublish_inline(pod), Code.FAILED_PRECONDITION)
        assert "still connected" in sentence
        guest.write(0, b"g" * BLOCK)
        assert host.luns(pod) == {0: "boot"}
    end(host, [pod], "boot")


def test_a_claim_of_two_pods_stays_a_block_device_for_both(host: Host) -> None:
    host.claim("shared")
    pods = [host.launcher(), host.launcher()]
    for pod in pods:
        host.publish("shared", pod)
    for pod in pods:
        host.call("PreVMStart", host.machine("shared", pods=(pod,), name=f"vm-{pod[:4]}"))
    for pod in pods:
        assert host.luns(pod) == {}
        assert "a claim of several pods" in controller_json(host, pod).left["shared"]
        put(host.block_path("shared", pod), b"both write")
    assert [reason for _, reason, _ in host.api.events] == ["VolumeStaysBlockDevice"] * 2
    host.unpublish("shared", pods[0])
    host.call(
        "PreVMStart", host.machine("shared", pods=(pods[1],))
    )  # its domain may be made already
    assert host.luns(pods[1]) == {}
    end(host, pods, "shared")


def test_pod_and_guest_count_the_same_blocks(host: Host) -> None:
    pod, large = host.launcher(), 4096
    for name in ("boot", "extra"):
        host.claim(name, blockSize=str(large))
    path = host.publish("boot", pod)
    header = b"EFI PART of a pod".ljust(large, b".")

    def block_of_pod(size: int) -> bytes:
        with path.open("rb", buffering=0) as device:
            (found,) = struct.unpack("i", fcntl.ioctl(device, BLKSSZGET, bytes(4)))
            assert found == size
            return os.pread(device.fileno(), size, size)

    with path.open("r+b", buffering=0) as device:  # where a GPT has its header: block 1
        os.pwrite(device.fileno(), header, large)
    vmi = host.machine("boot", pods=(pod,))
    for _ in range(2):
        host.call("PreVMStart", vmi)
        assert host.controllers.attach(pod, host.handles["extra"]) == 1
        assert [lun.block_size for lun in host.controllers.luns(pod)] == [large, large]
        host.target.crash()
        host.restart()
    with Initiator(host.socket(pod)) as guest:
        guest.send("connect")
        guest.ready()
        assert guest.read(1, 1, block_size=large) == header
        header = header.replace(b"pod", b"vm.")
        guest.write(1, header, block_size=large)
    host.call("PostVMStop", vmi)
    host.publish("boot", pod)  # its device is another one since the target was killed
    assert block_of_pod(large) == header
    host.call("PreVMStart", vmi)
    assert [lun.block_size for lun in host.controllers.luns(pod)] == [large]
    end(host, [pod], "boot")


@pytest.mark.parametrize(
    ("of_class", "asked"),
    [
        ("4096", {"custom": {"logical": 512, "physical": 512}}),
        ("512", {"custom": {"logical": 4096, "physical": 4096}}),
    ],
)
def test_a_disk_that_asks_for_other_blocks_than_its_class_stays_a_block_device(
    host: Host, of_class: str, asked: dict[str, dict[str, int]]
) -> None:
    pod = host.launcher()
    handle = host.claim("boot", blockSize=of_class)
    path = host.publish("boot", pod)
    vmi = host.machine("boot", pods=(pod,))
    vmi["spec"]["domain"]["devices"]["disks"][0]["blockSize"] = asked
    for _ in range(2):
        host.call("PreVMStart", vmi)
    found = controller_json(host, pod).left["boot"]
    assert host.luns(pod) == {}
    assert f"asks for blocks of {asked['custom']['logical']} bytes" in found
    assert f"sees volume {handle} with blocks of {of_class}, as the StorageClass" in found
    put(path, b"as ever")
    end(host, [pod], "boot")


@pytest.mark.parametrize("qemu", [QEMU, BLK_QEMU], ids=["scsi", "blk"])
@pytest.mark.parametrize(
    ("of_class", "asked", "physical"),
    [
        (512, {"custom": {"logical": 512, "physical": 512}}, 512),
        (512, {"custom": {"logical": 512, "physical": 65536}}, 65536),
        (4096, {"custom": {"logical": 4096, "physical": 16384}}, 16384),
        (512, {"matchVolume": {"enabled": True}}, OWN_PHYSICAL),
        (4096, None, OWN_PHYSICAL),
    ],
)
def test_a_guest_sees_the_blocks_that_its_disk_asks_for(
    host: Host, qemu: bytes, of_class: int, asked: object, physical: int
) -> None:
    """Also when the target was killed, and when the machine is asked for once more."""
    pod = host.launcher(qemu)
    host.claim("boot", blockSize=str(of_class))
    host.publish("boot", pod)
    vmi = host.machine("boot", pods=(pod,))
    vmi["spec"]["domain"]["devices"]["disks"][0]["blockSize"] = asked
    for _ in range(2):
        host.call("PreVMStart", vmi)
        assert controller_json(host, pod).left == {}
        if qemu is QEMU:
            assert scsi_blocks(host.socket(pod)) == (of_class, physical)
        else:
            assert blk_blocks(host.folder(pod) / "vhost.sock.0") == (of_class, physical)
        host.target.crash()
        host.restart()
    host.call("PostVMStop", vmi)
    end(host, [pod], "boot")


def scsi_blocks(socket: Path) -> tuple[int, int]:
    """Returns bytes of a logical and a physical block, by READ CAPACITY(16) (SBC-3 5.16)."""
    with Initiator(socket) as guest:
        guest.send("connect")
        guest.ready()
        data = guest.cdb(bytes([0x9E, 0x10, *bytes(11), 32, 0, 0]), data_in_len=32)["data_in"]
    logical = int.from_bytes(data[8:12], "big")
    return logical, logical << (data[13] & 15)


def blk_blocks(socket: Path) -> tuple[int, int]:
    """Returns bytes of a logical and a physical block, by `blk_size` and `topology` (5.2.4)."""
    with Initiator(socket) as guest:
        guest.send("connect", kind="blk")
        data = guest.send("get_config", offset=20, size=5)["data"]
    logical = int.from_bytes(data[:4], "little")
    return logical, logical << data[4]


@pytest.mark.parametrize("code", [INVALID, BAD_PARAMETERS])
@pytest.mark.parametrize("qemu", [QEMU, BLK_QEMU], ids=["scsi", "blk"])
def test_a_disk_whose_physical_block_the_target_refuses_stays_a_block_device(
    host: Host, qemu: bytes, code: int
) -> None:
    """An older one refuses each, and a bdev with short I/O a long one."""
    host.claim("boot")
    pod = host.launcher(qemu)
    path = host.publish("boot", pod)
    vmi = host.machine("boot", pods=(pod,))
    custom = {"logical": 512, "physical": 65536}
    vmi["spec"]["domain"]["devices"]["disks"][0]["blockSize"] = {"custom": custom}

    def refuse() -> None:
        raise RpcError(code, "not with such blocks")

    host.restart(Strike(host.target.rpc_socket, "before", 2, refuse))
    host.call("PreVMStart", vmi)
    assert (host.luns(pod), host.disks(pod), host.parked()) == ({}, {}, [])
    assert (
        "physical blocks of 65536 bytes, and the target refused a disk with them: not with such"
        in controller_json(host, pod).left["boot"]
    )
    put(path, b"as ever")
    end(host, [pod], "boot")


def test_a_volume_whose_own_blocks_are_larger_than_its_class_says_is_no_lun(host: Host) -> None:
    host.target.rpc("bdev_malloc_create", name="m", num_blocks=40960, block_size=4096)
    host.target.rpc("bdev_lvol_create_lvstore", bdev_name="m", lvs_name="lvs4k")
    pod = host.launcher()
    small = host.claim("small", lvstore="lvs4k")
    large = host.claim("large", 32 * MIB, lvstore="lvs4k", blockSize="4096")
    path = host.publish("small", pod)
    host.call("PreVMStart", host.machine("small", pods=(pod,)))
    assert host.luns(pod) == {}
    assert 'use a StorageClass with blockSize "4096"' in controller_json(host, pod).left["small"]
    put(path, b"as ever")
    host.unpublish("small", pod)
    host.unstage("small")
    sentence = refused(lambda: host.controllers.attach(pod, small), Code.FAILED_PRECONDITION)
    assert f"pods see volume {small} with blocks of 512 bytes" in sentence
    assert host.controllers.attach(pod, large) == 0
    end(host, [pod])


def test_a_lun_of_one_pod_is_refused_to_another(host: Host) -> None:
    # A controller of another kind has no LUNs, and is in nobody's way.
    host.target.rpc("bdev_null_create", name="n0", num_blocks=8, block_size=512)
    host.target.rpc("vhost_create_blk_controller", ctrlr="b0", dev_name="n0")
    host.claim("boot")
    one, other = host.launcher(), host.launcher()
    host.publish("boot", one)
    host.call("PreVMStart", host.machine("boot", pods=(one,)))
    host.publish("boot", other)
    vmi = host.machine("boot", pods=(other,), name="second")
    sentence = refused(lambda: host.call("PreVMStart", vmi), Code.FAILED_PRECONDITION)
    assert f"is a disk of controller pod-{one}" in sentence
    assert document.read(host.inline_path(other)) is None
    host.unpublish("boot", one)
    host.call("PreVMStart", vmi)
    assert host.luns(other) == {0: "boot"}
    host.target.rpc("vhost_delete_controller", ctrlr="b0")
    end(host, [one, other], "boot")


def test_a_pod_gets_only_claims_that_kubelet_gave_to_it(host: Host) -> None:
    host.claim("foreign")
    owner, thief = host.launcher(), host.launcher()
    host.publish("foreign", owner)
    put(host.block_path("foreign", owner), b"secret")
    vmi = host.machine("foreign", pods=(thief,))
    sentence = refused(lambda: host.call("PreVMStart", vmi), Code.FAILED_PRECONDITION)
    assert f"is not published to pod {thief}" in sentence
    own = host.hook(Pod(thief, "default", "thief", hook_in_pod=True))
    host.node_hook = own
    for pods in ((thief,), (owner,)):
        vmi = host.machine("foreign", pods=pods)
        refused(lambda vmi=vmi: host.call("PreVMStart", vmi), Code.FAILED_PRECONDITION)  # type: ignore[misc]
    elsewhere = host.machine("foreign", pods=(thief,))
    elsewhere["metadata"]["namespace"] = "other"
    refused(lambda: host.call("PreVMStart", elsewhere), Code.PERMISSION_DENIED)
    assert (host.luns(owner), host.luns(thief), host.parked()) == ({}, {}, [])
    end(host, [owner, thief], "foreign")


def test_a_claim_that_is_published_read_only_cannot_be_written_by_the_guest(host: Host) -> None:
    host.claim("image")
    pod = host.launcher()
    host.publish("image", pod, read_only=True)
    host.call("PreVMStart", host.machine("image", pods=(pod,)))
    (lun,) = host.controllers.luns(pod)
    assert (lun.read_only, lun.handed_over, lun.removable) == (True, True, False)
    end(host, [pod], "image")


def test_the_serial_number_of_the_disk_is_that_of_the_lun(host: Host) -> None:
    host.claim("boot")
    pod = host.launcher()
    host.publish("boot", pod)
    vmi = host.machine("boot", pods=(pod,))
    vmi["spec"]["domain"]["devices"]["disks"][0]["serial"] = "SN-0001"
    host.call("PreVMStart", vmi)
    (lun,) = host.controllers.luns(pod)
    assert lun.serial == "SN-0001"
    end(host, [pod], "boot")


def test_without_the_device_in_qemu_the_claim_stays_and_that_is_said(host: Host) -> None:
    """With neither vhost-user-scsi nor vhost-user-blk."""
    host.claim("boot")
    pod = host.launcher(POOR_QEMU)
    path = host.publish("boot", pod)
    vmi = host.machine("boot", pods=(pod,))
    for _ in range(2):
        host.call("PreVMStart", vmi)
    found = controller_json(host, pod)
    assert "/usr/libexec/qemu-kvm) has no vhost-user-scsi-pci device" in (found.absent or "")
    assert "CONFIG_VHOST_USER_SCSI" in found.left["boot"]
    assert [(name, reason) for name, reason, _ in host.api.events] == [
        ("vm", "VolumeStaysBlockDevice")
    ]
    put(path, b"as ever")
    extra = host.claim("extra")
    sentence = refused(lambda: host.controllers.attach(pod, extra), Code.FAILED_PRECONDITION)
    assert "has no vhost-user-scsi-pci device" in sentence
    assert host.luns(pod) == {}
    end(host, [pod], "boot")


def test_without_vhost_user_scsi_claims_become_virtio_blk_disks(host: Host) -> None:
    pod = host.launcher(BLK_QEMU)
    for name in ("boot", "data", "sata"):
        host.claim(name)
        put(host.publish(name, pod), f"{name} of an importer".encode().ljust(BLOCK, b"."))
    vmi = host.machine("boot", "data", "sata", pods=(pod,))
    of_boot, _, of_sata = vmi["spec"]["domain"]["devices"]["disks"]
    of_boot["serial"] = "BOOT-1"
    of_sata["disk"]["bus"] = "sata"

    for _ in range(2):
        host.call("PreVMStart", vmi)
        assert host.disks(pod) == {0: "boot", 1: "data"}
        assert (host.luns(pod), host.parked()) == ({}, ["boot", "data"])
    found = controller_json(host, pod)
    assert {name: disk.socket for name, disk in found.disks.items()} == {
        "boot": "vhost.sock.0",
        "data": "vhost.sock.1",
    }
    assert (found.luns, found.reconnect_s) == ({}, 1)
    assert "the disk's bus is 'sata': give it bus virtio" in found.left["sata"]
    assert [reason for _, reason, _ in host.api.events] == ["VolumeStaysBlockDevice"]
    for number, name in enumerate(("boot", "data")):
        socket = host.folder(pod) / f"vhost.sock.{number}"
        assert (stat.S_IMODE(socket.stat().st_mode), socket.stat().st_gid) == (0o660, LAUNCHER_GID)
        with Initiator(socket) as guest:
            guest.send("connect", kind="blk")
            assert read_blk(guest).startswith(f"{name} of an importer".encode())
            guest.send(
                "blk", kind=1, sector=0, data_out=f"{name} of the guest".encode().ljust(BLOCK)
            )
            # It is the machine's, so nobody takes its folder away.
            sentence = refused(lambda: host.unpublish_inline(pod), Code.FAILED_PRECONDITION)
            assert "still connected" in sentence
    extra = host.claim("extra")
    sentence = refused(lambda: host.controllers.attach(pod, extra), Code.FAILED_PRECONDITION)
    assert "has no vhost-user-scsi-pci device" in sentence
    sentence = refused(lambda: host.call("PreMigrationSource", vmi), Code.FAILED_PRECONDITION)
    assert "it has virtio-blk disks (2)" in sentence
    other = host.launcher()
    refusal = refused(
        lambda: host.controllers.attach(other, host.handles["boot"]), Code.FAILED_PRECONDITION
    )
    assert f"is a disk of controller pod-{pod}.0" in refusal

    host.target.crash()
    host.restart()
    assert host.disks(pod) == {0: "boot", 1: "data"}
    host.call("PostVMStop", vmi)
    assert (host.disks(pod), host.parked()) == ({}, [])
    for name in ("boot", "data"):
        path = host.publish(name, pod)
        assert get(path, BLOCK).startswith(f"{name} of the guest".encode())
        put(path, b"mine again".ljust(BLOCK, b"."))
    end(host, [pod, other], "boot", "data", "sata")


def read_blk(guest: Initiator) -> bytes:
    """Returns the first block of a virtio-blk disk, by VIRTIO_BLK_T_IN (virtio 1.2, 5.2.6)."""
    answer = guest.send("blk", kind=0, sector=0, data_in_len=BLOCK)
    assert answer["status"] == 0
    data: bytes = answer["data_in"]
    return data


def test_a_virtio_blk_disk_that_is_not_made_whole_is_none(host: Host) -> None:
    """The target may refuse when the controller is there already; then nobody has the volume."""
    host.claim("boot")
    pod = host.launcher(BLK_QEMU)
    path = host.publish("boot", pod)
    vmi = host.machine("boot", pods=(pod,))

    def refuse() -> None:
        raise RpcError(-5, "no user has that number", "vhost_create_blk_controller")

    client = Strike(host.target.rpc_socket, "after", 2, refuse)
    host.restart(client)
    with pytest.raises(RpcError, match="no user has that number"):
        host.call("PreVMStart", vmi)
    assert client.calls[1] == "vhost_create_blk_controller"
    assert (host.disks(pod), host.parked()) == ({}, [])
    put(path, b"a claim")
    host.call("PreVMStart", vmi)
    assert (host.disks(pod), host.parked()) == ({0: "boot"}, ["boot"])
    host.call("PostVMStop", vmi)
    end(host, [pod], "boot")


def test_a_claim_grows_while_it_is_a_virtio_blk_disk(host: Host) -> None:
    host.claim("boot")
    pod = host.launcher(BLK_QEMU)
    host.publish("boot", pod)
    vmi = host.machine("boot", pods=(pod,))
    host.call("PreVMStart", vmi)
    with Initiator(host.folder(pod) / "vhost.sock.0") as guest:
        guest.send("connect", kind="blk")
        assert guest.send("capacity")["blocks"] == 64 * MIB // BLOCK
        host.expand("boot", 96 * MIB)
        assert guest.send("capacity")["blocks"] == 96 * MIB // BLOCK
    host.call("PostVMStop", vmi)
    end(host, [pod], "boot")


def test_an_old_qemu_is_not_told_to_connect_again(host: Host) -> None:
    pod = host.launcher(OLD_QEMU)
    host.call("PreVMStart", host.machine(pods=(pod,)))
    found = controller_json(host, pod)
    assert (found.reconnect_s, found.absent) == (0, None)
    end(host, [pod])


def test_claims_that_are_not_ours_or_not_block_are_left(host: Host) -> None:
    host.claim("files", mode="Filesystem")
    host.claim("boot")
    host.claim("iso")
    pod = host.launcher()
    for name in ("boot", "iso"):
        host.publish(name, pod)
    vmi = host.machine("boot", "files", "iso", "hot", pods=(pod,))
    vmi["spec"]["domain"]["devices"]["disks"][2] = {"name": "iso", "cdrom": {"bus": "sata"}}
    vmi["spec"]["volumes"][3]["persistentVolumeClaim"]["hotpluggable"] = True
    host.call("PreVMStart", vmi)
    found = controller_json(host, pod)
    assert list(found.luns) == ["boot"]
    assert sorted(found.left) == ["files", "iso"]
    assert "volumeMode is Filesystem" in found.left["files"]
    assert "CD-ROM" in found.left["iso"]
    host.unpublish("iso", pod)
    host.unstage("iso")
    end(host, [pod], "boot")


def test_a_machine_with_luns_is_not_migrated_and_one_without_is(host: Host) -> None:
    host.claim("boot")
    pod, empty = host.launcher(), host.launcher()
    host.publish("boot", pod)
    vmi = host.machine("boot", pods=(pod,))
    host.call("PreVMStart", vmi)
    sentence = refused(lambda: host.call("PreMigrationSource", vmi), Code.FAILED_PRECONDITION)
    assert (
        f"default/vm cannot be migrated: it has LUNs (1), whose volumes are on node {host.name}"
        in sentence
    )
    other = host.machine(pods=(empty,), name="other")
    for point in ("PreMigrationTarget", "PreMigrationSource", "PostMigrationTarget"):
        host.call(point, other)
    assert controller_json(host, empty).luns == {}
    end(host, [pod, empty], "boot")


@pytest.mark.parametrize(
    ("qemu", "kind"), [(QEMU, "LUNs"), (BLK_QEMU, "virtio-blk disks")], ids=["scsi", "blk"]
)
def test_whose_volumes_keep_a_machine_from_migrating_is_said(
    host: Host, qemu: bytes, kind: str
) -> None:
    """What PersistentVolumes say of a pool decides; here the volumes are an lvstore's."""
    pod = host.launcher(qemu)
    for name in ("boot", "data"):
        host.claim(name)
        host.publish(name, pod)
    vmi = host.machine("boot", "data", pods=(pod,))
    host.call("PreVMStart", vmi)

    def sentence(*of_pool: str) -> str:
        for name, claim in host.api.claims.items():
            assert claim.volume is not None
            volume = replace(claim.volume, in_pool=name in of_pool)
            host.api.claims[name] = replace(claim, volume=volume)
        return refused(lambda: host.call("PreMigrationSource", vmi), Code.FAILED_PRECONDITION)

    begins = "virtual machine default/vm cannot be migrated: it has "
    on_node = f"whose volumes are on node {host.name} and which no other one can reach"
    of_pool = "of a pool of Ceph, which cannot follow a migration of KubeVirt yet"
    ends = (
        "; a claim of the pool that is ReadWriteMany with volumeMode Block becomes no disk of "
        "virtlun, and follows one"
    )
    stay = "; delete the migration, or the VmVolumes of a machine without claims"
    assert sentence() == f"{begins}{kind} (2), {on_node}{stay}"
    assert sentence("boot", "data") == f"{begins}{kind} (2) {of_pool}; delete the migration{ends}"
    said = sentence("data")
    assert said == f"{begins}{kind} (1), {on_node} and {kind} (1) {of_pool}{stay}{ends}"
    # Who does not know it migrates no machine either.
    host.api.claims, claims = {}, host.api.claims
    refused(lambda: host.call("PreMigrationSource", vmi), Code.UNAVAILABLE)
    host.api.claims = claims
    host.call("PostVMStop", vmi)
    end(host, [pod], "boot", "data")


def test_a_kubevirt_that_asks_no_node_may_not_migrate(host: Host) -> None:
    """It asks the sidecar at the target as for a start; only there can it be refused."""
    pods = [host.launcher() for _ in range(2)] + [host.launcher(POOR_QEMU), host.launcher(BLK_QEMU)]
    vmi = host.machine()
    vmi["status"]["migrationState"] = {"migrationUid": "m", "targetNode": host.name}
    for pod in (pods[0], pods[3]):
        host.node_hook = host.hook(Pod(pod, "default", "target", hook_in_pod=True))
        sentence = refused(lambda: host.call("PreVMStart", vmi), Code.FAILED_PRECONDITION)
        assert "default/vm cannot be migrated: this KubeVirt asks no node" in sentence
        assert document.read(host.inline_path(pod)) is None
    host.node_hook = host.hook(Pod(pods[1], "default", "later", hook_in_pod=True))
    vmi["status"]["migrationState"]["completed"] = True
    host.call("PreVMStart", vmi)
    assert controller_json(host, pods[1]).absent is None
    host.node_hook = host.hook(Pod(pods[2], "default", "poor", hook_in_pod=True))
    vmi["status"]["migrationState"]["completed"] = False
    host.call("PreVMStart", vmi)
    assert controller_json(host, pods[2]).absent is not None
    end(host, pods)


def test_a_claim_that_the_api_server_does_not_tell_is_asked_for_again(host: Host) -> None:
    pod = host.launcher()
    host.claim("boot")
    claims, host.api.claims = host.api.claims, {}
    vmi = host.machine("boot", pods=(pod,))
    sentence = refused(lambda: host.call("PreVMStart", vmi), Code.UNAVAILABLE)
    assert "volume boot of virtual machine default/vm" in sentence
    assert document.read(host.inline_path(pod)) is None
    host.api.claims = claims
    host.publish("boot", pod)
    host.call("PreVMStart", vmi)
    assert host.luns(pod) == {0: "boot"}
    end(host, [pod], "boot")


def test_hooks_of_machines_without_a_controller_do_nothing(host: Host) -> None:
    host.claim("boot")
    vmi = host.machine("boot", pods=("11111111-2222-4333-8444-555555555555", "no-uid"))
    for point in ("PreVMStart", "PreMigrationSource", "PreMigrationTarget", "PostVMStop"):
        host.call(point, vmi)
    assert host.left() == NOTHING


def crashes(
    host: Host, what: str, when: str, act: Callable[[], None], undo: Callable[[], None]
) -> int:
    """Kills driver or target at each call of `act` that changes the target, one after the other.

    What was begun is then done again by a new driver, and undone. Returns how many calls there are.
    """

    def blow() -> None:
        if what == "driver":
            raise Struck
        host.target.kill9()

    number = 0
    while True:
        number += 1
        client = Strike(host.target.rpc_socket, when, number, blow)
        host.restart(client)
        with contextlib.suppress(Struck, TargetError):
            act()
        if host.target.process is None:
            host.target.start()
        host.restart()
        act()
        if len(client.calls) < number:
            return number - 1
        undo()


@by_day("before-target-scsi", "after-driver-blk")
@pytest.mark.parametrize("qemu", [QEMU, BLK_QEMU], ids=["scsi", "blk"])
@pytest.mark.parametrize(
    ("when", "what"),
    [
        ("before", "target"),
        ("after", "driver"),
        pytest.param("before", "driver", marks=pytest.mark.nightly),
        pytest.param("after", "target", marks=pytest.mark.nightly),
    ],
)
def test_a_crash_at_any_point_is_mended_by_the_next_call(
    host: Host, what: str, when: str, qemu: bytes
) -> None:
    pod = host.launcher(qemu)
    vmi = host.machine("boot", "data", pods=(pod,))

    def has() -> dict[int, str]:
        return host.luns(pod) | host.disks(pod)

    def start() -> None:
        host.publish_inline(pod)
        for name in ("boot", "data"):
            host.publish(name, pod)
        host.call("PreVMStart", vmi)
        written = controller_json(host, pod)
        numbers = {lun.target: name for name, lun in written.luns.items()}
        numbers |= {int(disk.socket[-1]): name for name, disk in written.disks.items()}
        assert numbers == has()
        assert sorted(has().values()) == host.parked() == ["boot", "data"]

    def hand_over() -> None:
        host.call("PreVMStart", vmi)
        assert sorted(has().values()) == host.parked() == ["boot", "data"]

    def stop() -> None:
        host.call("PostVMStop", vmi)
        assert has() == {}
        assert host.parked() == []

    def gone() -> None:
        host.unpublish_inline(pod)
        assert host.parked() == []
        assert host.left()["controllers"] == host.left()["folders"] == []

    for name in ("boot", "data"):
        host.claim(name)
        host.publish(name, pod)
    assert crashes(host, what, when, hand_over, stop) == 4  # park and add, twice
    assert crashes(host, what, when, stop, start) == 4  # remove and unpark, twice
    start()
    assert crashes(host, what, when, gone, start) == 5  # the same, and the controller
    end(host, [pod], "boot", "data")


def test_an_export_that_a_dead_driver_parked_takes_writes_again(host: Host) -> None:
    host.claim("boot")
    pod, next_pod = host.launcher(), host.launcher()
    host.publish("boot", pod)

    def blow() -> None:
        raise Struck

    host.restart(Strike(host.target.rpc_socket, "after", 1, blow))
    with pytest.raises(Struck):
        host.call("PreVMStart", host.machine("boot", pods=(pod,)))
    host.restart()
    assert host.parked() == ["boot"]
    host.call("PostVMStop", host.machine(pods=(next_pod,), name="other"))
    assert host.parked() == []
    put(host.block_path("boot", pod), b"writes")
    end(host, [pod, next_pod], "boot")


def test_a_target_that_starts_again_still_has_the_luns(host: Host) -> None:
    host.claim("boot")
    pod = host.launcher()
    host.publish("boot", pod)
    vmi = host.machine("boot", pods=(pod,))
    host.call("PreVMStart", vmi)
    host.target.crash()
    assert host.luns(pod) == {0: "boot"}
    found = host.socket(pod).stat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, LAUNCHER_GID)
    host.call("PreVMStart", vmi)
    host.publish("boot", pod)
    with Initiator(host.socket(pod)) as guest:
        guest.send("connect")
        guest.ready()
        guest.write(7, b"w" * BLOCK)
    host.call("PostVMStop", vmi)
    assert get(host.block_path("boot", pod), 8 * BLOCK)[-BLOCK:] == b"w" * BLOCK
    end(host, [pod], "boot")


def test_a_claim_grows_while_it_is_a_lun(host: Host) -> None:
    handle = host.claim("boot")
    pod = host.launcher()
    path = host.publish("boot", pod)
    vmi = host.machine("boot", pods=(pod,))
    host.call("PreVMStart", vmi)
    with Initiator(host.socket(pod)) as guest:
        guest.send("connect")
        guest.ready()
        host.expand("boot", 96 * MIB)
        guest.ready()
        answer = guest.cdb(bytes([0x25, *bytes(9)]), data_in_len=8)  # READ CAPACITY(10)
        assert (int.from_bytes(answer["data_in"][:4], "big") + 1) * BLOCK == 96 * MIB
        guest.write(96 * MIB // BLOCK - 1, b"e" * BLOCK)
    host.call("PostVMStop", vmi)
    with path.open("rb", buffering=0) as device:
        assert device.seek(0, os.SEEK_END) == 96 * MIB
        device.seek(-BLOCK, os.SEEK_END)
        assert device.read(BLOCK) == b"e" * BLOCK
    assert host.target.rpc("bdev_get_bdevs", name=handle)[0]["num_blocks"] == 96 * MIB // BLOCK
    end(host, [pod], "boot")


def test_volumes_are_attached_and_detached_beside_the_claims(host: Host) -> None:
    host.claim("boot")
    extra = host.claim("extra")
    pod, other = host.launcher(), host.launcher()
    host.publish("boot", pod)
    host.call("PreVMStart", host.machine("boot", pods=(pod,)))
    for _ in range(2):
        assert host.controllers.attach(pod, extra, serial="EXTRA") == 1
    boot, added = host.controllers.luns(pod)
    assert (boot.handed_over, added.handed_over) == (True, False)
    assert (added.serial, added.removable, added.read_only) == ("EXTRA", True, False)
    sentence = refused(lambda: host.controllers.attach(other, extra), Code.FAILED_PRECONDITION)
    assert f"is a disk of controller pod-{pod}" in sentence
    refused(lambda: host.publish("extra", other), Code.FAILED_PRECONDITION)
    for _ in range(2):
        host.controllers.detach(pod, extra)
    assert host.luns(pod) == {0: "boot"}
    host.publish("extra", other)
    sentence = refused(lambda: host.controllers.attach(pod, extra), Code.FAILED_PRECONDITION)
    assert str(host.block_path("extra", other)) in sentence
    host.unpublish("extra", other)
    host.unstage("extra")
    host.controllers.attach(pod, extra)
    end(host, [pod, other], "boot")


def test_a_disk_that_the_guest_has_in_use_goes_only_without_regard(host: Host) -> None:
    pod = host.launcher()
    extra, fixed = host.claim("extra"), host.claim("fixed")
    host.controllers.attach(pod, extra)
    host.controllers.attach(pod, fixed, removable=False)
    with Initiator(host.socket(pod)) as guest:
        guest.send("connect")

        def prevent(value: int) -> None:
            for target in host.luns(pod):
                guest.ready(target)
                assert guest.cdb(bytes([0x1E, 0, 0, 0, value, 0]), target=target)["status"] == 0

        prevent(1)
        with pytest.raises(InUse, match="prevents its removal"):
            host.controllers.detach(pod, extra, unless_used=True)
        guest.write(0, b"g" * BLOCK)
        assert [lun.removal_prevented for lun in host.controllers.luns(pod)] == [True, False]
        host.controllers.detach(pod, fixed, unless_used=True)
        prevent(0)
        for _ in range(2):
            host.controllers.detach(pod, extra, unless_used=True)
        assert host.luns(pod) == {}
        host.controllers.attach(pod, extra)
        prevent(1)
        host.controllers.detach(pod, extra)
        assert host.luns(pod) == {}
    end(host, [pod])


def test_the_driver_serves_the_hooks_in_the_folder_of_a_pod_that_asks(host: Host) -> None:
    host.claim("boot")
    pod = host.launcher()
    host.unpublish_inline(pod)
    folder = host.publish_inline(pod, nodeHook="pod")
    host.publish("boot", pod)
    found = (folder / "hook.sock").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, LAUNCHER_GID)
    vmi = json.dumps(host.machine("boot")).encode()  # whatever it says of pods
    short = host.folder(pod)
    wait_served(short)
    for _ in range(2):
        Folder(short).node_hook("PreVMStart", vmi)
        assert host.luns(pod) == {0: "boot"}
        host.restart()
        wait_served(short)
    Folder(short).node_hook("PostVMStop", vmi)
    assert host.luns(pod) == {}
    end(host, [pod], "boot")


def wait_served(folder: Path) -> None:
    with grpc.insecure_channel(f"unix://{folder / 'hook.sock'}") as channel:
        grpc.channel_ready_future(channel).result(timeout=90)


def test_one_inline_volume_a_pod_and_no_unknown_wishes(host: Host) -> None:
    pod = host.launcher()
    sentence = refused(lambda: host.publish_inline(pod, "second"), Code.FAILED_PRECONDITION)
    assert str(host.inline_path(pod)) in sentence
    host.unpublish_inline(pod, "second")
    assert host.controllers.exists(pod)
    assert host.socket(pod).exists()
    end(host, [pod])
    assert not host.controllers.exists(pod)
    refused(lambda: host.publish_inline(pod, size="1Gi"), Code.INVALID_ARGUMENT)
    refused(lambda: host.publish_inline(pod, nodeHook="both"), Code.INVALID_ARGUMENT)
    refused(lambda: host.publish_inline("../../etc"), Code.INVALID_ARGUMENT)
    assert host.left() == NOTHING


def test_kubelet_can_ask_for_the_inline_volume_s_size(host: Host) -> None:
    pod = host.launcher()
    path = host.inline_path(pod)
    answer = host.node.node_get_volume_stats(
        pb.NodeGetVolumeStatsRequest(volume_id=f"csi-{'0' * 64}", volume_path=str(path))
    )
    assert [usage.unit for usage in answer.usage] == [pb.VolumeUsage.BYTES]
    end(host, [pod])


def test_a_volume_that_is_being_worked_on_is_tried_again(host: Host) -> None:
    handle = host.claim("boot")
    pod = host.launcher()
    host.publish("boot", pod)
    vmi = host.machine("boot", pods=(pod,))
    with host.locks.hold(handle):
        refused(lambda: host.call("PreVMStart", vmi), Code.ABORTED)
    assert host.parked() == []
    host.call("PreVMStart", vmi)
    assert isinstance(host.target.client, Client)
    end(host, [pod], "boot")
