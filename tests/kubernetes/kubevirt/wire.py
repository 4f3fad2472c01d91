"""KubeVirt's side of its hook protocols, spoken by this package alone.

The messages are declared here once more, from KubeVirt's api.proto (launcher hooks: as its pull
request 19160 has it), api_info.proto and api_v1alpha3.proto, and not taken from the generated code
under test: a wrong field number there would not be seen by a client that shares it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from tests.support.wait import DEADLINE_S, listens, until

Field = descriptor_pb2.FieldDescriptorProto

PLUGIN = "kubevirt.hooks.plugins.v1alpha1"
INFO = "kubevirt.hooks.info"
LEGACY = "kubevirt.hooks.v1alpha3"

#: package -> message -> field -> (number, type); `*` is repeated, a capital a message.
MESSAGES: dict[str, dict[str, dict[str, tuple[int, str]]]] = {
    PLUGIN: {
        "NodeContext": {"node_name": (1, "string")},
        "ExecuteNodeHookRequest": {
            "hookPoint": (1, "string"),
            "vmi": (2, "bytes"),
            "node_context": (3, "NodeContext"),
        },
        "ExecuteNodeHookResponse": {},
        "SidecarContext": {"invocation_context": (1, "string")},
        "MutateDomainRequest": {
            "domain_type": (1, "string"),
            "domain": (2, "bytes"),
            "vmi": (3, "bytes"),
            "sidecar_context": (4, "SidecarContext"),
        },
        "MutateDomainResponse": {"domain": (1, "bytes")},
        "GuestDefinitionRequest": {
            "domain_type": (1, "string"),
            "domain": (2, "bytes"),
            "vmi": (3, "bytes"),
            "sidecar_context": (4, "SidecarContext"),
        },
        "GuestDefinitionResponse": {"domain": (1, "bytes")},
    },
    INFO: {
        "InfoParams": {},
        "HookPoint": {"name": (1, "string"), "priority": (2, "int32")},
        "InfoResult": {
            "name": (1, "string"),
            "hookPoints": (3, "*HookPoint"),
            "versions": (4, "*string"),
        },
    },
    LEGACY: {
        "OnDefineDomainParams": {"domainXML": (1, "bytes"), "vmi": (2, "bytes")},
        "OnDefineDomainResult": {"domainXML": (1, "bytes")},
        "ShutdownParams": {},
        "ShutdownResult": {},
    },
}
SCALARS = {"string": Field.TYPE_STRING, "bytes": Field.TYPE_BYTES, "int32": Field.TYPE_INT32}


class HookError(Exception):
    """A hook refused, or did not answer; the text is what KubeVirt would report."""


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for package, messages in MESSAGES.items():
        file = descriptor_pb2.FileDescriptorProto(
            name=f"{package}.proto", package=package, syntax="proto3"
        )
        for name, fields in messages.items():
            message = file.message_type.add(name=name)
            for field, (number, kind) in fields.items():
                added = message.field.add(name=field, number=number)
                added.label = Field.LABEL_REPEATED if kind[0] == "*" else Field.LABEL_OPTIONAL
                one = kind.lstrip("*")
                added.type = SCALARS.get(one, Field.TYPE_MESSAGE)
                if one not in SCALARS:
                    added.type_name = f".{package}.{one}"
        pool.Add(file)
    return pool


POOL = _pool()


def _message(package: str, name: str) -> type[Message]:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{package}.{name}"))


def call(
    socket: Path,
    method: str,
    answer: str,
    request: str,
    fields: Mapping[str, Any],
    *,
    deadline_s: float,
    dial_s: float = 1.0,
) -> Any:
    """Calls PACKAGE.SERVICE/METHOD on a UNIX socket and returns its answer.

    As KubeVirt does, it waits `dial_s` for someone to listen; for who does and is merely slow, as
    this machine may be, it waits as long as other tests. HookError with the status where it fails.
    """
    package = method.rpartition(".")[0]
    try:
        until(lambda: listens(socket), deadline_s=dial_s)
    except AssertionError:
        raise HookError(f"{method}: nobody listens on {socket}") from None
    with grpc.insecure_channel(f"unix://{socket}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=DEADLINE_S)
        except grpc.FutureTimeoutError:
            raise HookError(f"{method}: who listens on {socket} does not answer") from None
        function = channel.unary_unary(
            f"/{method}",
            request_serializer=_message(package, request).SerializeToString,
            response_deserializer=_message(package, answer).FromString,
        )
        try:
            return function(_message(package, request)(**fields), timeout=deadline_s)
        except grpc.RpcError as error:
            raise HookError(f"{method}: {error.code().name}: {error.details()}") from None


def execute_node_hook(socket: Path, point: str, vmi: bytes, node: str, deadline_s: float) -> None:
    """What virt-handler calls at a point of a VM's life; HookError where it is refused."""
    call(
        socket,
        f"{PLUGIN}.NodeHookService/ExecuteNodeHook",
        "ExecuteNodeHookResponse",
        "ExecuteNodeHookRequest",
        {"hookPoint": point, "vmi": vmi, "node_context": {"node_name": node}},
        deadline_s=deadline_s,
    )


#: The service and method by which virt-launcher asks for a domain, of each list of a Plugin.
GUEST_DEFINITION = {
    "domainHooks": ("DomainHookService", "MutateDomain"),
    "launcherHooks": ("LauncherHookService", "GuestDefinition"),
}


def define_guest(
    kind: str, socket: Path, domain: bytes, vmi: bytes, context: str, deadline_s: float
) -> bytes:
    """What virt-launcher asks of a plugin's sidecar before it defines a domain.

    `kind` is the list in which the Plugin names the sidecar; `context` is Boot, or MigrationTarget
    where it only gets ready for one that comes.
    """
    service, method = GUEST_DEFINITION[kind]
    answer = call(
        socket,
        f"{PLUGIN}.{service}/{method}",
        f"{method}Response",
        f"{method}Request",
        {
            "domain_type": "libvirt",
            "domain": domain,
            "vmi": vmi,
            "sidecar_context": {"invocation_context": context},
        },
        deadline_s=deadline_s,
        dial_s=5.0,
    )
    return bytes(answer.domain)


def info(socket: Path) -> Any:
    """What virt-launcher asks a legacy sidecar first; one second, as there."""
    return call(socket, f"{INFO}.Info/Info", "InfoResult", "InfoParams", {}, deadline_s=1.0)


def on_define_domain(socket: Path, domain: bytes, vmi: bytes) -> bytes:
    """The legacy domain hook, with its minute."""
    answer = call(
        socket,
        f"{LEGACY}.Callbacks/OnDefineDomain",
        "OnDefineDomainResult",
        "OnDefineDomainParams",
        {"domainXML": domain, "vmi": vmi},
        deadline_s=60.0,
    )
    return bytes(answer.domainXML)


def shutdown(socket: Path) -> None:
    """What virt-launcher says to a legacy sidecar when it ends."""
    call(
        socket,
        f"{LEGACY}.Callbacks/Shutdown",
        "ShutdownResult",
        "ShutdownParams",
        {},
        deadline_s=60.0,
    )


def wait_for_socket(path: Path, deadline_s: float) -> None:
    """Waits until a socket is there; HookError, as virt-launcher has it, where it is not."""
    end = time.monotonic() + deadline_s
    while not path.exists():
        if time.monotonic() > end:
            raise HookError(f"sidecar socket {path} not ready after {deadline_s:.0f}s")
        time.sleep(0.1)
