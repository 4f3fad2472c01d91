"""The node hooks on a socket in the pod's own folder, for KubeVirt until 1.8, which has none.

The pod's sidecar calls them there. Each socket serves its own pod alone: the kernel's table of
mounts says which volumes kubelet gave to it, and no other one is touched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import grpc
import structlog

from csi.errors import Failure
from csi.hosterrors import HostError
from csi.kubevirt import pods
from csi.kubevirt.controllers import VmControllers
from csi.kubevirt.document import HOOK_SOCKET
from csi.kubevirt.nodehook import NodeHook
from csi.kubevirt.podcontrollers import LAUNCHER_GID
from csi.kubevirt.pods import Pod
from csi.metrics import Metrics
from csi.proto import kubevirt_plugin_pb2
from csi.server import handlers, serve
from pydataplane.errors import TargetError

THREADS = 2
RESUME_S = (1.0, 60.0)
"""How long to wait for a target before it is asked again: at first, and at most."""

log = structlog.get_logger()


class PodHooks:
    """The sockets that are served; one for each pod that asked for it."""

    def __init__(
        self, controllers: VmControllers, hook: Callable[[Pod], NodeHook], metrics: Metrics
    ) -> None:
        """`hook` makes the service of a pod."""
        self._controllers = controllers
        self._hook = hook
        self._metrics = metrics
        self._mutex = threading.Lock()
        self._servers: dict[str, grpc.Server] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._resume, daemon=True, name="pod-hooks")

    def start(self) -> None:
        """Serves, as soon as the target answers, the pods that an earlier driver served."""
        self._thread.start()

    def stop(self) -> None:
        """Ends all; the sockets stay for the next driver to replace."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._mutex:
            stopped = [server.stop(None) for server in self._servers.values()]
            self._servers.clear()
        for each in stopped:
            each.wait()

    def serve(self, pod: Pod) -> None:
        """Serves a pod; one that is served already is left as it is.

        Raises:
            HostError: the socket cannot be made.
        """
        with self._mutex:
            if pod.uid in self._servers or self._ended.is_set():
                return
            socket = self._controllers.folder(pod.uid) / HOOK_SOCKET
            described = kubevirt_plugin_pb2.DESCRIPTOR.services_by_name["NodeHookService"]
            services = [handlers(described, self._hook(pod), self._metrics)]
            server = serve(socket, services, threads=THREADS)
            os.chown(socket, 0, LAUNCHER_GID)
            socket.chmod(0o660)
            self._servers[pod.uid] = server

    def leave(self, uid: str) -> None:
        """Stops serving a pod, idempotent; does not wait for a call that has begun."""
        with self._mutex:
            server = self._servers.pop(uid, None)
        if server is not None:
            server.stop(None)

    def _resume(self) -> None:
        pause = RESUME_S[0]
        while not self._ended.is_set():
            answers = self._controllers.pods()
            served = [self._take_up(uid) for answer in answers for uid in answer.value or ()]
            missing = [answer.error for answer in answers if answer.error is not None]
            for error in missing:
                log.warning("pods' hooks are not served yet", reason=str(error))
            if all(served) and not missing:
                return
            self._ended.wait(pause)
            pause = min(2 * pause, RESUME_S[1])

    def _take_up(self, uid: str) -> bool:
        """Serves a pod that is to be; False if it has to be tried again."""
        try:
            with self._controllers.hold(uid):
                pod = pods.noted(self._controllers.folder(uid))
                if pod is not None and pod.hook_in_pod:
                    self.serve(pod)
        except (Failure, HostError, TargetError, OSError) as error:
            log.error("the pod's hook is not served", pod=uid, reason=str(error))
            return False
        return True
