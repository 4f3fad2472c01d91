"""The Identity service: who the driver is, what it can do, whether it can work now."""

from __future__ import annotations

from importlib.metadata import version

from google.protobuf.wrappers_pb2 import BoolValue

from csi import DRIVER_NAME
from csi.proto import csi_pb2 as pb
from csi.targets import Targets

Service = pb.PluginCapability.Service
Expansion = pb.PluginCapability.VolumeExpansion


class Identity:
    """csi.v1.Identity."""

    def __init__(self, targets: Targets, *, controller: bool) -> None:
        """`controller` says whether the Controller service is served beside it."""
        self._targets = targets
        self._controller = controller

    def get_plugin_info(self, _: pb.GetPluginInfoRequest) -> pb.GetPluginInfoResponse:
        """Tells the driver's name and version."""
        return pb.GetPluginInfoResponse(name=DRIVER_NAME, vendor_version=version("virtlun"))

    def get_plugin_capabilities(
        self, _: pb.GetPluginCapabilitiesRequest
    ) -> pb.GetPluginCapabilitiesResponse:
        """Tells what the driver does as a whole."""
        services = [Service(type=Service.VOLUME_ACCESSIBILITY_CONSTRAINTS)]
        if self._controller:
            services.append(Service(type=Service.CONTROLLER_SERVICE))
            services.append(Service(type=Service.GROUP_CONTROLLER_SERVICE))
            services.append(Service(type=Service.SNAPSHOT_METADATA_SERVICE))
        found = [pb.PluginCapability(service=service) for service in services]
        online = Expansion(type=Expansion.ONLINE)
        found.append(pb.PluginCapability(volume_expansion=online))
        return pb.GetPluginCapabilitiesResponse(capabilities=found)

    def probe(self, _: pb.ProbeRequest) -> pb.ProbeResponse:
        """Tells whether a target answers; the driver itself does, or this would not return.

        It is ready while one of several does: to restart it would stop what that one still can do,
        and would not bring the others back.
        """
        return pb.ProbeResponse(ready=BoolValue(value=self._targets.problem() is None))
