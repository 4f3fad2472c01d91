"""The sidecar as virt-launcher meets it, over its sockets; once for each kind the real program."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from structlog.testing import capture_logs

from csi.kubevirt import document
from csi.kubevirt.document import BlkOf, Controller, LunOf
from csi.kubevirt.domainhook import Callbacks, DomainHook, Folder, Info, LauncherHook
from csi.metrics import Metrics
from csi.proto import kubevirt_callbacks_pb2 as callbacks
from csi.proto import kubevirt_info_pb2 as info
from csi.proto import kubevirt_plugin_pb2 as pb
from csi.server import handlers, serve
from tests.support.kubevirt import machine
from tests.support.scratch import short_directory
from tests.unit.translate.test_carry import CLOUD_INIT, DOMAIN, disks, properties

VMI = json.dumps(machine("node1", "rootdisk", "data")).encode()
LUNS = {
    "rootdisk": LunOf(target=4, volume="0f0e0d0c-0b0a-4908-8706-050403020100"),
    "data": LunOf(target=0, volume="1f0e0d0c-0b0a-4908-8706-050403020100"),
}
CLIENT_S = 120.0
METHODS = {
    method.input_type.full_name: (
        f"/{service.full_name}/{method.name}",
        GetMessageClass(method.output_type),
    )
    for module in (pb, info, callbacks)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


class Sidecar:
    """What the sidecar serves, on a socket of this process, and the folder of its controller."""

    def __init__(self, scratch: Path, *services: tuple[ServiceDescriptor, object]) -> None:
        self.folder = scratch / "virtlun"
        self.folder.mkdir()
        self.socket = scratch / "hook.sock"
        metrics = Metrics()
        self._server = serve(self.socket, [handlers(*each, metrics) for each in services])
        self.log: list[Any] = []
        self.ended = threading.Event()
        self.channel = grpc.insecure_channel(f"unix://{self.socket}")

    def call(self, request: Message) -> Any:
        path, answer = METHODS[request.DESCRIPTOR.full_name]
        method: grpc.UnaryUnaryMultiCallable[Any, Any] = self.channel.unary_unary(
            path,
            request_serializer=lambda given: given.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return method(request, timeout=CLIENT_S)

    def mutate(self, **changes: Any) -> str:
        context = pb.SidecarContext(invocation_context=changes.pop("context", "Boot"))
        request = changes.pop("request", pb.MutateDomainRequest)
        given = {"domain_type": "libvirt", "domain": DOMAIN.encode(), "vmi": VMI, **changes}
        answer = self.call(request(sidecar_context=context, **given))
        text: str = answer.domain.decode()
        return text

    def close(self) -> None:
        self.channel.close()
        self._server.stop(None).wait()


class Program(Sidecar):
    """The same as a program of its own."""

    def __init__(self, scratch: Path, socket: str, option: str) -> None:
        self.folder = scratch / "virtlun"
        self.folder.mkdir()
        self.socket = scratch / socket
        command = [sys.executable, "-m", "csi.kubevirt.sidecar", f"{option.format(scratch)}"]
        self.process = subprocess.Popen(
            [*command, f"--folder={self.folder}", "--log-json"], stderr=subprocess.PIPE, text=True
        )
        self.channel = grpc.insecure_channel(f"unix://{self.socket}")
        grpc.channel_ready_future(self.channel).result(timeout=CLIENT_S)

    def close(self) -> None:
        """Ends it, and keeps its log."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        _, words = self.process.communicate(timeout=CLIENT_S)
        assert self.process.returncode == 0, words
        assert not self.socket.exists()
        self.log = [json.loads(line) for line in words.splitlines()]


class NodeHooks:
    """The driver's end in the folder; NOT the driver's: it notes what it is asked."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.refusal = ""
        self._server = grpc.server(ThreadPoolExecutor(1))
        service = pb.DESCRIPTOR.services_by_name["NodeHookService"].full_name
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
            self._answer,
            request_deserializer=pb.ExecuteNodeHookRequest.FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        )
        handlers = grpc.method_handlers_generic_handler(service, {"ExecuteNodeHook": handler})
        self._server.add_generic_rpc_handlers((handlers,))
        self._server.add_insecure_port(f"unix://{folder / document.HOOK_SOCKET}")
        self._server.start()

    def _answer(
        self, request: pb.ExecuteNodeHookRequest, context: grpc.ServicerContext
    ) -> pb.ExecuteNodeHookResponse:
        self.asked.append((request.hookPoint, request.vmi))
        if self.refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        return pb.ExecuteNodeHookResponse()

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory with a path short enough for sockets."""
    with short_directory("vs-") as path:
        yield path


@pytest.fixture
def plugin(scratch: Path) -> Iterator[Sidecar]:
    """A sidecar of a Plugin."""
    services, folder = pb.DESCRIPTOR.services_by_name, Folder(scratch / "virtlun")
    made = Sidecar(
        scratch,
        (services["DomainHookService"], DomainHook(folder)),
        (services["LauncherHookService"], LauncherHook(folder)),
    )
    with capture_logs() as made.log:
        yield made
    made.close()


@pytest.fixture
def legacy(scratch: Path) -> Iterator[Sidecar]:
    """A hook sidecar."""
    ended = threading.Event()
    made = Sidecar(
        scratch,
        (info.DESCRIPTOR.services_by_name["Info"], Info()),
        (
            callbacks.DESCRIPTOR.services_by_name["Callbacks"],
            Callbacks(Folder(scratch / "virtlun"), ended.set),
        ),
    )
    made.ended = ended
    with capture_logs() as made.log:
        yield made
    made.close()


def test_the_program_serves_a_plugin(scratch: Path) -> None:
    option = "--plugin-socket={}/plugin/virtlun/domain.sock"
    program = Program(scratch, "plugin/virtlun/domain.sock", option)
    document.write(program.folder, Controller(luns=LUNS))
    assert disks(program.mutate()) == ["ua-virtlun-scsi0", "ua-cloudinit"]
    program.close()
    assert any(entry.get("luns") == {"rootdisk": 4, "data": 0} for entry in program.log)


def test_disks_of_a_qemu_without_vhost_user_scsi_become_virtio_blk_devices(
    plugin: Sidecar,
) -> None:
    """There is no controller for LUNs then; `data` stays as KubeVirt gives it."""
    of = BlkOf(socket="vhost.sock.0", volume=LUNS["rootdisk"].volume)
    document.write(plugin.folder, Controller(absent="no such device", disks={"rootdisk": of}))
    for _ in range(2):
        xml = plugin.mutate()
        assert disks(xml) == ["ua-rootdisk", "ua-data", "ua-cloudinit"]
        assert f'path="{plugin.folder}/vhost.sock.0"' in xml
        assert "override" not in xml
        assert '<source dev="/dev/data">' in xml


def test_the_program_serves_a_hook_sidecar_and_ends_with_the_machine(scratch: Path) -> None:
    program = Program(scratch, "hooks/virtlun.sock", "--hook-folder={}/hooks")
    node = NodeHooks(program.folder)
    document.write(program.folder, Controller(luns=LUNS))
    program.call(info.InfoParams())
    program.call(callbacks.OnDefineDomainParams(domainXML=DOMAIN.encode(), vmi=VMI))
    program.call(callbacks.ShutdownParams())
    assert program.process.wait(CLIENT_S) == 0
    assert [point for point, _ in node.asked] == ["PreVMStart", "PostVMStop"]
    program.close()
    node.stop()


def test_a_plugin_s_domain_gets_the_controller_for_its_luns(plugin: Sidecar) -> None:
    document.write(plugin.folder, Controller(reconnect_s=1, luns=LUNS))
    xml = plugin.mutate()
    assert disks(xml) == ["ua-virtlun-scsi0", "ua-cloudinit"]
    assert properties(xml)["boot_tpgt"] == "4"
    assert f"{plugin.folder}/vhost.sock" in xml
    assert "<reconnect enabled='yes' timeout='1'/>" in xml
    again = plugin.mutate(domain=xml.encode())
    assert (disks(again), properties(again)) == (disks(xml), properties(xml))
    assert any(entry.get("luns") == {"rootdisk": 4, "data": 0} for entry in plugin.log)


@pytest.mark.parametrize("context", ["Boot", "MigrationSource", "MigrationTarget", ""])
def test_every_context_gives_the_same_domain(plugin: Sidecar, context: str) -> None:
    document.write(plugin.folder, Controller(luns=LUNS))
    assert plugin.mutate(context=context) == plugin.mutate()


def test_without_a_document_the_domain_keeps_every_byte(plugin: Sidecar) -> None:
    assert plugin.mutate() == DOMAIN
    entries = plugin.log
    assert any("there is no" in entry.get("reason", "") for entry in entries)


def test_volumes_that_were_left_stay_and_the_log_says_why(plugin: Sidecar) -> None:
    found = Controller(luns={"data": LUNS["data"]}, left={"rootdisk": "it is a CD-ROM"})
    document.write(plugin.folder, found)
    assert disks(plugin.mutate()) == ["ua-rootdisk", "ua-cloudinit", "ua-virtlun-scsi0"]
    said = next(entry for entry in plugin.log if entry["event"] == "left as it is")
    assert (said["volume"], said["reason"]) == ("rootdisk", "it is a CD-ROM")


def test_a_qemu_without_the_device_leaves_the_domain(plugin: Sidecar) -> None:
    document.write(plugin.folder, Controller(absent="QEMU has no such device", left={"a": "b"}))
    assert plugin.mutate() == DOMAIN
    assert any(entry.get("reason") == "QEMU has no such device" for entry in plugin.log)


@pytest.mark.parametrize("request_of", [pb.MutateDomainRequest, pb.GuestDefinitionRequest])
def test_another_hypervisor_s_domain_is_left(plugin: Sidecar, request_of: Any) -> None:
    document.write(plugin.folder, Controller(luns=LUNS))
    answer = plugin.call(request_of(domain_type="other", domain=b"{\xff}"))
    assert answer.domain == b"{\xff}"


def test_a_launcher_hook_changes_the_domain_as_a_domain_hook_does(plugin: Sidecar) -> None:
    """KubeVirt 1.10 calls the one, 1.9 the other."""
    document.write(plugin.folder, Controller(luns=LUNS))
    changed = plugin.mutate(request=pb.GuestDefinitionRequest)
    assert changed == plugin.mutate() != DOMAIN
    moved = {"context": "MigrationTarget"}
    assert plugin.mutate(request=pb.GuestDefinitionRequest, **moved) == plugin.mutate(**moved)


@pytest.mark.parametrize(
    ("domain", "text", "words"),
    [
        (DOMAIN.replace("ua-data", "ua-x").encode(), None, "has no disk ua-data"),
        (b"\xff", None, "utf-8"),
        (b"<domain", None, "not given the XML"),
        (DOMAIN.encode(), '{"version": 9}', "of the same version"),
    ],
)
def test_a_machine_whose_luns_have_no_controller_must_not_start(
    plugin: Sidecar, domain: bytes, text: str | None, words: str
) -> None:
    document.write(plugin.folder, Controller(luns=LUNS))
    if text is not None:
        (plugin.folder / document.FILE).write_text(text)
    with pytest.raises(grpc.RpcError) as error:
        plugin.mutate(domain=domain)
    assert isinstance(error.value, grpc.Call)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert words in (error.value.details() or "")


def test_a_hook_sidecar_tells_what_it_is_and_changes_the_domain(legacy: Sidecar) -> None:
    told = legacy.call(info.InfoParams())
    assert (told.name, list(told.versions)) == ("virtlun", ["v1alpha3"])
    assert [point.name for point in told.hookPoints] == ["OnDefineDomain", "Shutdown"]
    document.write(legacy.folder, Controller(luns=LUNS))
    answer = legacy.call(callbacks.OnDefineDomainParams(domainXML=DOMAIN.encode(), vmi=VMI))
    xml = answer.domainXML.decode()
    assert disks(xml) == ["ua-virtlun-scsi0", "ua-cloudinit"]
    assert CLOUD_INIT.strip() in xml
    data = legacy.call(
        callbacks.PreCloudInitIsoParams(cloudInitData=b"{1}", cloudInitNoCloudSource=b"{2}")
    )
    assert (data.cloudInitData, data.cloudInitNoCloudSource) == (b"{1}", b"{2}")


def test_a_hook_sidecar_calls_the_node_itself_and_ends_with_the_machine(legacy: Sidecar) -> None:
    node = NodeHooks(legacy.folder)
    document.write(legacy.folder, Controller(luns=LUNS))
    for _ in range(2):
        legacy.call(callbacks.OnDefineDomainParams(domainXML=DOMAIN.encode(), vmi=VMI))
    legacy.call(callbacks.ShutdownParams())
    assert legacy.ended.is_set()
    assert node.asked == [("PreVMStart", VMI), ("PreVMStart", VMI), ("PostVMStop", VMI)]
    node.stop()


def test_what_the_node_refuses_the_launcher_hears(legacy: Sidecar) -> None:
    node = NodeHooks(legacy.folder)
    node.refusal = "volume v is a LUN of another controller"
    params = callbacks.OnDefineDomainParams(domainXML=DOMAIN.encode(), vmi=VMI)
    with pytest.raises(grpc.RpcError) as error:
        legacy.call(params)
    assert isinstance(error.value, grpc.Call)
    assert error.value.details() == node.refusal
    legacy.call(callbacks.ShutdownParams())  # the pod must end all the same
    assert legacy.ended.is_set()
    assert any(entry.get("reason") == node.refusal for entry in legacy.log)
    node.stop()


def test_a_machine_that_was_never_defined_ends_without_the_node(legacy: Sidecar) -> None:
    node = NodeHooks(legacy.folder)
    legacy.call(callbacks.ShutdownParams())
    assert legacy.ended.is_set()
    assert node.asked == []
    node.stop()


@pytest.mark.parametrize("options", [[], ["--plugin-socket=/tmp/a.sock", "--hook-folder=/tmp/b"]])
def test_exactly_one_flavour_is_to_be_chosen(options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "csi.kubevirt.sidecar", *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "give one of --plugin-socket and --hook-folder" in done.stderr
