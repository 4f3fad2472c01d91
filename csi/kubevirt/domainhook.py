"""KubeVirt's domain hooks, in the launcher's pod: the domain gets what controller.json says.

DomainHook and LauncherHook answer plugins (KubeVirt 1.9; 1.10), Callbacks and Info hook sidecars
(until 1.8). Where the
driver serves the node hooks in the pod's folder, because KubeVirt has none, they are called from
here. Without a document, or where a volume was left, the domain stays as KubeVirt made it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import structlog

from csi.errors import Code, Failure
from csi.hosterrors import HostError
from csi.kubevirt import document, machine
from csi.proto import kubevirt_callbacks_pb2 as callbacks
from csi.proto import kubevirt_info_pb2 as info
from csi.proto import kubevirt_plugin_pb2 as pb
from pydataplane.domain.errors import TranslateError
from pydataplane.domain.translate import Settings, carry, carry_blk

FOLDER = Path("/var/run/virtlun")
NODE_HOOK_PATH = "/kubevirt.hooks.plugins.v1alpha1.NodeHookService/ExecuteNodeHook"
NODE_HOOK_S = 25.0
"""Below the 30 s that virt-launcher gives a plugin's hook."""
MAX_QUEUES = 8

log = structlog.get_logger()


class Folder:
    """The controller's folder as the pod sees it."""

    def __init__(self, path: Path = FOLDER) -> None:
        """`path` is also where QEMU finds the socket: both containers mount it at the same one."""
        self._path = path

    def mutate(self, domain: bytes, vmi: bytes) -> bytes:
        """Puts the controller into a domain, and takes the disks out that are its LUNs.

        Or makes vhost-user-blk devices of those that are virtio-blk disks.

        virt-launcher asks up to three times for one start, later with what libvirt made of the
        domain before; the disks are gone from it then, and what boots is told by `vmi` alone.

        Raises:
            Failure: FAILED_PRECONDITION, the domain cannot have it: then it must not start, for its
                volumes are the controller's already.
        """
        try:
            found = document.read(self._path)
        except HostError as error:
            raise Failure(Code.FAILED_PRECONDITION, str(error)) from error
        if found is None:
            log.warning("no controller", reason=f"there is no {self._path / document.FILE}")
            return domain
        for name, why in found.left.items():
            log.warning("left as it is", volume=name, reason=why)
        if found.absent is not None and not found.disks:
            log.warning("no controller", reason=found.absent)
            return domain
        settings = Settings(max_queues=MAX_QUEUES, reconnect_s=found.reconnect_s)
        luns = {f"ua-{name}": lun.target for name, lun in found.luns.items()}
        try:
            text = domain.decode()
            if found.disks:
                sockets = {
                    f"ua-{name}": str(self._path / of.socket) for name, of in found.disks.items()
                }
                changed = carry_blk(text, sockets, settings).encode()
                log.info("virtio-blk disks", sockets={n: d.socket for n, d in found.disks.items()})
                return changed
            booted = machine.boot_disk(vmi, found.luns)
            socket = str(self._path / found.socket)
            changed = carry(text, socket, luns, settings, f"ua-{booted}").encode()
        except (TranslateError, UnicodeDecodeError) as error:
            raise Failure(Code.FAILED_PRECONDITION, str(error)) from error
        log.info("controller", luns={name: lun.target for name, lun in found.luns.items()})
        return changed

    def node_hook(self, point: str, vmi: bytes) -> None:
        """Calls a node hook, if the driver serves them here; its refusal is ours.

        Raises:
            Failure: with the driver's code and sentence.
        """
        socket = self._path / document.HOOK_SOCKET
        if not socket.exists():
            return
        with grpc.insecure_channel(f"unix://{socket}") as channel:
            call: grpc.UnaryUnaryMultiCallable[
                pb.ExecuteNodeHookRequest, pb.ExecuteNodeHookResponse
            ] = channel.unary_unary(
                NODE_HOOK_PATH,
                request_serializer=lambda given: given.SerializeToString(),
                response_deserializer=pb.ExecuteNodeHookResponse.FromString,
            )
            try:
                call(pb.ExecuteNodeHookRequest(hookPoint=point, vmi=vmi), timeout=NODE_HOOK_S)
            except grpc.RpcError as error:
                raise Failure(error.code(), error.details() or f"{point} failed") from error


class DomainHook:
    """kubevirt.hooks.plugins.v1alpha1.DomainHookService."""

    def __init__(self, folder: Folder) -> None:
        """Serves the pod that has `folder`."""
        self._folder = folder

    def mutate_domain(self, request: pb.MutateDomainRequest) -> pb.MutateDomainResponse:
        """Changes a domain that is about to be defined, or (MigrationTarget) would be."""
        return pb.MutateDomainResponse(domain=_defined(self._folder, request))


class LauncherHook:
    """kubevirt.hooks.plugins.v1alpha1.LauncherHookService, what DomainHookService became."""

    def __init__(self, folder: Folder) -> None:
        """Serves the pod that has `folder`."""
        self._folder = folder

    def guest_definition(self, request: pb.GuestDefinitionRequest) -> pb.GuestDefinitionResponse:
        """Does what DomainHook.mutate_domain does."""
        return pb.GuestDefinitionResponse(domain=_defined(self._folder, request))


def _defined(folder: Folder, request: pb.MutateDomainRequest | pb.GuestDefinitionRequest) -> bytes:
    """Returns what of a plugin's request is to be defined."""
    if request.domain_type != "libvirt":
        log.warning("not changed", reason=f"domain type '{request.domain_type}' is not libvirt")
        return request.domain
    if request.sidecar_context.invocation_context != "MigrationTarget":
        folder.node_hook("PreVMStart", request.vmi)
    return folder.mutate(request.domain, request.vmi)


class Info:
    """kubevirt.hooks.info.Info."""

    def info(self, _: info.InfoParams) -> info.InfoResult:
        """Tells what the sidecar wants to be called for."""
        points = [
            info.HookPoint(name="OnDefineDomain", priority=0),
            info.HookPoint(name="Shutdown", priority=0),
        ]
        return info.InfoResult(name="virtlun", versions=["v1alpha3"], hookPoints=points)


class Callbacks:
    """kubevirt.hooks.v1alpha3.Callbacks."""

    def __init__(self, folder: Folder, end: Callable[[], None]) -> None:
        """Serves the pod that has `folder`; `end` lets the sidecar end, as the pod wants it."""
        self._folder = folder
        self._end = end
        self._mutex = threading.Lock()
        self._vmi = b""

    def on_define_domain(
        self, request: callbacks.OnDefineDomainParams
    ) -> callbacks.OnDefineDomainResult:
        """Changes a domain that is about to be defined."""
        with self._mutex:
            self._vmi = request.vmi
        self._folder.node_hook("PreVMStart", request.vmi)
        changed = self._folder.mutate(request.domainXML, request.vmi)
        return callbacks.OnDefineDomainResult(domainXML=changed)

    def pre_cloud_init_iso(
        self, request: callbacks.PreCloudInitIsoParams
    ) -> callbacks.PreCloudInitIsoResult:
        """Gives cloud-init's data back as they are."""
        return callbacks.PreCloudInitIsoResult(
            cloudInitNoCloudSource=request.cloudInitNoCloudSource,
            cloudInitData=request.cloudInitData,
        )

    def shutdown(self, _: callbacks.ShutdownParams) -> callbacks.ShutdownResult:
        """Gives the volumes back: the machine has ended, its launcher is about to."""
        with self._mutex:
            vmi = self._vmi
        try:
            if vmi:
                self._folder.node_hook("PostVMStop", vmi)
        except Failure as error:  # the end of the pod does the same
            log.warning("not given back yet", reason=str(error))
        self._end()
        return callbacks.ShutdownResult()
