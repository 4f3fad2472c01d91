"""The Identity service: who the driver is, what it can do, whether it can work now."""

from __future__ import annotations

from importlib.metadata import version

from google.protobuf.wrappers_pb2 import BoolValue

from csi import DRIVER_NAME
from csi.proto import csi_pb2 as pb
from pydataplane.client import Client
from pydataplane.errors import TargetError

Service = pb.PluginCapability.Service
Expansion = pb.PluginCapability.VolumeExpansion


class Identity:
    """csi.v1.Identity."""

    def __init__(self, client: Client, *, controller: bool) -> None:
        """`controller` says whether the Controller service is served beside it."""
        self._client = client
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
        found = [pb.PluginCapability(service=service) for service in services]
        online = Expansion(type=Expansion.ONLINE)
        found.append(pb.PluginCapability(volume_expansion=online))
        return pb.GetPluginCapabilitiesResponse(capabilities=found)

    def probe(self, _: pb.ProbeRequest) -> pb.ProbeResponse:
        """Tells whether the target answers; the driver itself does, or this would not return."""
        try:
            self._client.call("virtlun_get_status")
        except TargetError:
            return pb.ProbeResponse(ready=BoolValue(value=False))
        return pb.ProbeResponse(ready=BoolValue(value=True))
