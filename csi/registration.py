"""Tells the kubelet where the driver is: pluginregistration v1, instead of a sidecar for it."""

from __future__ import annotations

import structlog

from csi import DRIVER_NAME
from csi.proto import pluginregistration_pb2 as pb

CSI_VERSIONS = ["1.13.0", "1.0.0"]

log = structlog.get_logger()


class Registration:
    """pluginregistration.Registration, on a socket in the kubelet's plugins_registry."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is the driver's socket as the kubelet sees it."""
        self._endpoint = endpoint
        self.error = ""
        """Why the kubelet refused the driver last; empty if it did not."""

    def get_info(self, _: pb.InfoRequest) -> pb.PluginInfo:
        """Tells the kubelet what there is to register."""
        return pb.PluginInfo(
            type="CSIPlugin",
            name=DRIVER_NAME,
            endpoint=self._endpoint,
            supported_versions=CSI_VERSIONS,
        )

    def notify_registration_status(
        self, status: pb.RegistrationStatus
    ) -> pb.RegistrationStatusResponse:
        """Hears whether the kubelet took it."""
        self.error = "" if status.plugin_registered else status.error or "no reason given"
        if self.error:
            log.error("the kubelet refuses the driver", reason=self.error)
        else:
            log.info("registered with the kubelet")
        return pb.RegistrationStatusResponse()
