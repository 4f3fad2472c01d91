"""Serves the services: gRPC methods found in the schema, one place for errors, log and metrics."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from csi import POD
from csi.errors import Code, describe
from csi.hosterrors import HostError
from csi.metrics import Metrics
from pydataplane.errors import RpcError

THREADS = 16
GRACE_S = 20.0
PATH_BYTES_MAX = 107
"""sockaddr_un.sun_path without its NUL."""
EXPECTED = {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS, Code.ABORTED}
QUIET = {
    "ControllerGetCapabilities",
    "GetCapacity",
    "GetInfo",
    "GetPluginCapabilities",
    "GetPluginInfo",
    "GetSnapshot",
    "GetVolumeGroupSnapshot",
    "GroupControllerGetCapabilities",
    "NodeGetCapabilities",
    "NodeGetVolumeHealth",
    "NodeGetVolumeStats",
    "Probe",
}
"""Asked all the time, of nothing that happens: done is worth a line at level debug only."""
ID_FIELDS = (
    "volume_id",
    "snapshot_id",
    "source_volume_id",
    "group_snapshot_id",
    "base_snapshot_id",
    "target_snapshot_id",
    "name",
    "target_path",
    "staging_target_path",
    "volume_path",
)

log = structlog.get_logger()
_request_ids = itertools.count(1)


class Call:
    """One method as grpc calls it: runs the service's, tells log and metrics, turns errors."""

    def __init__(self, name: str, method: Callable[[Any], Any], metrics: Metrics) -> None:
        """`name` is the method's in the schema."""
        self._name = name
        self._method = method
        self._metrics = metrics

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Answers one request."""
        bound, begin = self._begun(request)
        error: Exception | None = None
        answer = None
        try:
            answer = self._method(request)
        except Exception as caught:
            error = caught
        if made := getattr(getattr(answer, "volume", None), "volume_id", ""):
            bound = bound.bind(volume_id=made)
        self._ended(bound, begin, error, context)
        return answer

    def stream(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Answers one request with a stream of messages."""
        bound, begin = self._begun(request)
        error: Exception | None = None
        try:
            yield from self._method(request)
        except Exception as caught:
            error = caught
        self._ended(bound, begin, error, context)

    def _begun(self, request: Any) -> tuple[structlog.BoundLogger, float]:
        """Tells the log of a call; returns where its end is told, and when it began."""
        bound = log.bind(request=next(_request_ids), method=self._name, **_names(request))
        bound.debug("begun")
        return bound, time.monotonic()

    def _ended(
        self,
        bound: structlog.BoundLogger,
        begin: float,
        error: Exception | None,
        context: grpc.ServicerContext,
    ) -> None:
        """Tells log and metrics of a call's end, and ends it with its code where it failed."""
        code, message = (Code.OK, "") if error is None else describe(error)
        if code is Code.INTERNAL and not isinstance(error, HostError | OSError | RpcError):
            bound.error("the call failed unexpectedly", exc_info=error)
        seconds = time.monotonic() - begin
        self._metrics.observe(self._name, code.name, seconds)
        bound = bound.bind(code=code.name, milliseconds=round(seconds * 1000, 1))
        if error is not None:
            (bound.info if code in EXPECTED else bound.warning)("refused", reason=message)
            context.abort(code, message)
        (bound.debug if self._name in QUIET else bound.info)("done")


def _names(request: Any) -> dict[str, str]:
    """Returns what a request is about: the volume, its paths, and the pod where kubelet tells."""
    found = {field: getattr(request, field, "") for field in ID_FIELDS}
    pod = getattr(request, "volume_context", {})
    found["pod"] = "/".join(pod[key] for key in (f"{POD}namespace", f"{POD}name") if key in pod)
    return {field: text for field, text in found.items() if text}


def handlers(
    descriptor: ServiceDescriptor, service: object, metrics: Metrics
) -> grpc.GenericRpcHandler:
    """Returns the methods of a service that the object has; grpc refuses others: UNIMPLEMENTED."""
    found: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in descriptor.methods:
        act = getattr(service, re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower(), None)
        if act is None:
            continue
        call = Call(method.name, act, metrics)
        found[method.name] = _handler(call, streams=method.server_streaming)(
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        )
    return grpc.method_handlers_generic_handler(descriptor.full_name, found)


def _handler(call: Call, *, streams: bool) -> Callable[..., grpc.RpcMethodHandler[Any, Any]]:
    if streams:
        return partial(grpc.unary_stream_rpc_method_handler, call.stream)
    return partial(grpc.unary_unary_rpc_method_handler, call)


def listens(path: Path) -> bool:
    """Whether a program listens on a UNIX socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def serve(
    path: Path, services: Iterable[grpc.GenericRpcHandler], *, threads: int = THREADS
) -> grpc.Server:
    """Serves on a UNIX socket that only root may use, in place of one left behind.

    Raises:
        HostError: another program listens there, or the socket cannot be made.
    """
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise HostError(f"{path}: a socket's path has {PATH_BYTES_MAX} bytes at most")
    path.parent.mkdir(parents=True, exist_ok=True)
    if listens(path):
        raise HostError(f"{path}: another program listens there already")
    if path.is_socket():
        path.unlink()
    server = grpc.server(ThreadPoolExecutor(threads, thread_name_prefix="csi"))
    server.add_generic_rpc_handlers(tuple(services))
    try:
        server.add_insecure_port(f"unix://{path}")
    except RuntimeError as error:
        raise HostError(f"{path}: cannot listen there: {error}") from error
    path.chmod(0o600)
    server.start()
    return server


def serve_until(running: ExitStack, path: Path, services: Iterable[grpc.GenericRpcHandler]) -> None:
    """Serves until `running` ends, which lets the calls begun finish and removes the socket.

    Raises:
        HostError: as `serve`.
    """
    server = serve(path, services)
    running.callback(path.unlink, missing_ok=True)
    running.callback(lambda: server.stop(GRACE_S).wait())


class Ending:
    """SIGTERM and SIGINT, noted from the moment that this is made, in the main thread, to its end.

    The interpreter itself writes their numbers to a pipe, so it matters neither which thread a
    signal finds nor what the main thread was about to do.
    """

    def __init__(self) -> None:
        """Takes both signals."""
        self._pipe, self._into = os.pipe()
        os.set_blocking(self._into, False)
        self._fd_before = signal.set_wakeup_fd(self._into)
        self._before = {
            number: signal.signal(number, lambda _number, _frame: None)
            for number in (signal.SIGTERM, signal.SIGINT)
        }

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Gives both signals back to who had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        os.close(self._into)
        os.close(self._pipe)

    def wait(self) -> signal.Signals:
        """Waits for one of them, or returns the one that came already."""
        return signal.Signals(os.read(self._pipe, 1)[0])
