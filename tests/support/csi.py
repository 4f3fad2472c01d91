"""A real driver process over a real target, and a client of it as the kubelet would be."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from csi.hostdevice import loopctl
from csi.mounts import table
from csi.proto import csi_pb2 as pb
from tests.support import warm
from tests.support.target import ROOT, Target
from tests.support.wait import START_DEADLINE_S, serves, until

STOP_DEADLINE_S = 90.0
CALL_DEADLINE_S = 120.0
MIB = 1 << 20
CAP_SYS_RESOURCE = 24
Mode = pb.VolumeCapability.AccessMode

METHODS = {
    method.name: (f"/{service.full_name}/{method.name}", GetMessageClass(method.output_type))
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


#: A volume's handle is made of its node and name, and loop devices are the whole machine's: tests
#: that run at the same time have different ones.
NODE = f"node-{os.getpid()}"


@contextmanager
def running(target: Target, mib: int) -> Iterator[Driver]:
    """Runs a driver on a target with the lvstore lvs0 of `mib`; nothing of it stays."""
    target.make_lvstore(size=mib * MIB)
    driver = Driver(target, target.directory).start()
    yield driver
    status = driver.stop()
    driver.clear()
    assert status == 0, driver.words()


class Driver:
    """One `virtlun-csi` at a time in `directory`, whose path must be short."""

    def __init__(self, target: Target, directory: Path, node: str = NODE) -> None:
        """Prepares a driver for the volumes of `target`."""
        self.target = target
        self.directory = directory
        self.node = node
        self.socket = directory / "csi.sock"
        self.registry = directory / "plugins_registry"
        self.staging = directory / "staging"
        self.pods = directory / "pods"
        self.log = directory / "driver.log"
        #: Where to end in the middle, for a driver that may: see `killed`.
        self.fuse: Path | None = None
        #: Whether another driver on this machine stands for another node with the same volumes.
        self.has_own_loops = False
        self.process: subprocess.Popen[bytes] | None = None
        self.handles: set[str] = set()
        self._channel: grpc.Channel | None = None

    def start(self, *options: str) -> Driver:
        """Starts the process and waits until it serves."""
        assert self.process is None, "it runs already"
        self._share()
        words = [
            *("--log-json", "--log-level", "debug"),
            *("--endpoint", f"unix://{self.socket}", "--node-id", self.node),
            *("--http", ""),
            *options,
        ]
        if "--target-socket" not in options:
            words += ["--target-socket", str(self.target.rpc_socket)]
        fuse = [] if self.fuse is None else [str(self.fuse)]
        with self.log.open("ab") as log:
            begin = log.tell()
            if self.has_own_loops:
                module = ["tests.support.own_loops", str(self.target.export_dir)]
                module += ["tests.support.killed", *fuse] if fuse else ["csi.cli"]
                self.process = subprocess.Popen(
                    [sys.executable, "-m", *module, *words], stdout=log, stderr=log, cwd=ROOT
                )
            else:
                program = warm.KILLED_DRIVER if fuse else warm.DRIVER
                self.process = warm.begin(program, [*fuse, *words], stdout=log, stderr=log)
        try:
            serves(
                self.process,
                lambda: '"serving"' in self.log.read_text()[begin:],
                "the driver",
                self.log,
            )
        except AssertionError:
            self.stop(signal.SIGKILL)
            raise
        self._channel = grpc.insecure_channel(f"unix://{self.socket}")
        return self

    def _share(self) -> None:
        """Has what is unmounted here go from other mount namespaces, too, as kubelet's host does.

        Another test's libvirtd copies all mounts of the moment into a namespace of its own, and
        a file system that stays mounted there keeps its loop device open.
        """
        mounted = {each.target for each in table()}
        for folder in (self.staging, self.pods):
            folder.mkdir(exist_ok=True)
            if str(folder) not in mounted:
                subprocess.run(["mount", "--bind", folder, folder], check=True)
                subprocess.run(["mount", "--make-shared", folder], check=True)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Ends it and returns its exit status; 0 if it did not run."""
        process, self.process = self.process, None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if process is None:
            return 0
        process.send_signal(how)
        return process.wait(STOP_DEADLINE_S)

    def words(self) -> str:
        """Returns the log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def entries(self) -> list[dict[str, Any]]:
        """Returns the log's lines."""
        whole = self.words().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def wait_entry(self, event: str, method: str | None = None) -> None:
        """Waits for a line of the log, of a call of `method`."""
        until(
            lambda: any(
                each["event"] == event and method in (None, each.get("method"))
                for each in self.entries()
            ),
            lambda: f"{event} {method or ''} in the log:\n{self.words()}",
            START_DEADLINE_S,
        )

    def call(self, request: Message) -> Any:
        """Calls the method of a request; grpc.RpcError if it is refused."""
        assert self._channel is not None, "it does not run"
        path, answer = METHODS[type(request).__name__.removesuffix("Request")]
        method: grpc.UnaryUnaryMultiCallable[Any, Any] = self._channel.unary_unary(
            path,
            request_serializer=lambda given: given.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return method(request, timeout=CALL_DEADLINE_S)

    def stream(self, request: Message) -> Iterator[Any]:
        """Calls a method that answers with a stream; yields its messages."""
        assert self._channel is not None, "it does not run"
        path, answer = METHODS[type(request).__name__.removesuffix("Request")]
        method: grpc.UnaryStreamMultiCallable[Any, Any] = self._channel.unary_stream(
            path,
            request_serializer=lambda given: given.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        yield from method(request, timeout=CALL_DEADLINE_S)

    def refuses(self, request: Message) -> tuple[grpc.StatusCode, str]:
        """Makes a call that is to be refused, and returns code and sentence."""
        try:
            answer = self.call(request)
        except grpc.RpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError(f"{type(request).__name__} gave {answer!r} but should have failed")

    # What an orchestrator does, in short

    def create(
        self,
        name: str,
        size: int,
        capability: pb.VolumeCapability,
        of: pb.VolumeContentSource | None = None,
        /,
        **more: str,
    ) -> str:
        """Makes a volume in lvs0 and returns its handle; `more` are parameters of the class.

        `of` is what it is to be made of.
        """
        request = self.create_request(name, size, capability, of, **more)
        handle: str = self.call(request).volume.volume_id
        self.handles.add(handle)
        return handle

    def create_request(
        self,
        name: str,
        size: int,
        capability: pb.VolumeCapability,
        of: pb.VolumeContentSource | None = None,
        /,
        **more: str,
    ) -> pb.CreateVolumeRequest:
        """Returns the request to make a volume, as `create` does."""
        return pb.CreateVolumeRequest(
            name=name,
            capacity_range=pb.CapacityRange(required_bytes=size),
            volume_capabilities=[capability],
            volume_content_source=of,
            parameters={"lvstore": "lvs0", **more},
        )

    def stage_request(
        self, handle: str, capability: pb.VolumeCapability
    ) -> pb.NodeStageVolumeRequest:
        """Returns the request to stage at a path of the volume's own."""
        return pb.NodeStageVolumeRequest(
            volume_id=handle,
            staging_target_path=str(self.staging / handle),
            volume_capability=capability,
        )

    def publish_request(
        self, handle: str, capability: pb.VolumeCapability, pod: str = "pod", **more: Any
    ) -> pb.NodePublishVolumeRequest:
        """Returns the request to publish to a pod."""
        return pb.NodePublishVolumeRequest(
            volume_id=handle,
            staging_target_path=str(self.staging / handle),
            target_path=str(self.path(handle, pod)),
            volume_capability=capability,
            **more,
        )

    def path(self, handle: str, pod: str = "pod") -> Path:
        """Returns where a pod has the volume."""
        return self.pods / pod / handle

    def publish(
        self, handle: str, capability: pb.VolumeCapability, pod: str = "pod", **more: Any
    ) -> Path:
        """Stages and publishes; returns the pod's path."""
        self.call(self.stage_request(handle, capability))
        self.call(self.publish_request(handle, capability, pod, **more))
        return self.path(handle, pod)

    def unpublish(self, handle: str, pod: str = "pod") -> None:
        """Takes it from a pod."""
        path = str(self.path(handle, pod))
        self.call(pb.NodeUnpublishVolumeRequest(volume_id=handle, target_path=path))

    def unstage(self, handle: str) -> None:
        """Takes its device away."""
        path = str(self.staging / handle)
        self.call(pb.NodeUnstageVolumeRequest(volume_id=handle, staging_target_path=path))

    def delete(self, handle: str) -> None:
        """Deletes it."""
        self.call(pb.DeleteVolumeRequest(volume_id=handle))

    def snapshot(self, handle: str, name: str) -> str:
        """Takes a snapshot of it and returns that one's handle."""
        request = pb.CreateSnapshotRequest(source_volume_id=handle, name=name)
        taken: str = self.call(request).snapshot.snapshot_id
        return taken

    def delete_snapshot(self, handle: str) -> None:
        """Deletes a snapshot."""
        self.call(pb.DeleteSnapshotRequest(snapshot_id=handle))

    def expand(self, handle: str, size: int) -> None:
        """Grows it and what a pod has of it."""
        self.call(
            pb.ControllerExpandVolumeRequest(
                volume_id=handle, capacity_range=pb.CapacityRange(required_bytes=size)
            )
        )
        self.call(
            pb.NodeExpandVolumeRequest(
                volume_id=handle,
                volume_path=str(self.path(handle)),
                staging_target_path=str(self.staging / handle),
            )
        )

    def clear(self) -> None:
        """Takes away what a failed test has left in the kernel; the driver has ended."""
        for each in reversed(table()):
            if each.target.startswith(f"{self.directory}/") and each.fs_type != "fuse":
                subprocess.run(["umount", "--lazy", each.target], check=False)
        for loop in self._loops():
            loopctl.release(loop)

    def _loops(self) -> list[loopctl.Loop]:
        return [each for handle in self.handles for each in loopctl.loops(handle)]

    def left(self) -> dict[str, list[str]]:
        """Returns what there is of volumes anywhere, by kind; without the exports' own mounts."""
        below = f"{self.directory}/"
        export = self.target.export_dir
        controllers = self.target.rpc("vhost_get_controllers")
        targets = [each for one in controllers for each in one["backend_specific"]["scsi"]]
        return {
            "mounts": [
                m.target
                for m in table()
                if m.target.startswith(below)
                and Path(m.target).parent != export
                and Path(m.target) not in (self.staging, self.pods)
            ],
            "loops": [loop.name for loop in self._loops()],
            "exports": [each["path"] for each in self.target.rpc("virtlun_export_list")],
            "lvols": [each["name"] for each in self.target.rpc("bdev_lvol_get_lvols")],
            "controllers": [each["ctrlr"] for each in controllers],
            "luns": [lun["bdev_name"] for each in targets for lun in each["luns"]],
        }


NOTHING: dict[str, list[str]] = {
    kind: [] for kind in ("mounts", "loops", "exports", "lvols", "controllers", "luns")
}


def mount(fs_type: str = "xfs", mode: int = Mode.SINGLE_NODE_WRITER) -> pb.VolumeCapability:
    """Returns a capability to mount a file system."""
    return pb.VolumeCapability(
        mount=pb.VolumeCapability.MountVolume(fs_type=fs_type),
        access_mode=Mode(mode=Mode.Mode.Name(mode)),
    )


def block(mode: int = Mode.SINGLE_NODE_WRITER) -> pb.VolumeCapability:
    """Returns a capability for the block device."""
    return pb.VolumeCapability(
        block=pb.VolumeCapability.BlockVolume(), access_mode=Mode(mode=Mode.Mode.Name(mode))
    )


def snapshot_of(handle: str) -> pb.VolumeContentSource:
    """Returns what makes a volume of a snapshot."""
    of = pb.VolumeContentSource
    return of(snapshot=of.SnapshotSource(snapshot_id=handle))


def volume_of(handle: str) -> pb.VolumeContentSource:
    """Returns what makes a volume of another one."""
    of = pb.VolumeContentSource
    return of(volume=of.VolumeSource(volume_id=handle))


def may_grow_ext4() -> bool:
    """Whether this process may grow a mounted ext4: Linux asks for CAP_SYS_RESOURCE."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.split("CapEff:")[1].split()[0], 16) >> CAP_SYS_RESOURCE & 1)


def results(words: str) -> dict[str, int]:
    """Returns Ginkgo's closing counts: passed, failed, pending, skipped."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", words)
    found = re.findall(r"(\d+) (Passed|Failed|Pending|Skipped)", plain)
    return {name.lower(): int(number) for number, name in found}
