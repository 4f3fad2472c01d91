"""The command `virtlun-csi`."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import click
import grpc
import structlog

from csi import DRIVER_NAME
from csi.classwatch import ClassWatch
from csi.cluster import Cluster
from csi.clustererrors import ClusterError
from csi.controller import Controller
from csi.groupcontroller import GroupController
from csi.health import Check, Server
from csi.healthevents import LOOK_S, HealthEvents
from csi.host import Host
from csi.host.local import LocalHost
from csi.host.remote import Helper
from csi.hostdevice.choice import Choice, ChosenDevices
from csi.hosterrors import HostError
from csi.identity import Identity
from csi.kubevirt.controllers import VmControllers
from csi.kubevirt.inline import InlineVolumes
from csi.kubevirt.machines import VirtualMachines
from csi.locks import VolumeLocks
from csi.logs import LEVELS, set_up
from csi.metrics import Metrics, VolumeCollector
from csi.moves import Moves
from csi.node import Node
from csi.proto import csi_pb2, pluginregistration_pb2
from csi.registration import Registration
from csi.server import Ending, handlers, listens, serve_until
from csi.snapshotmetadata import SnapshotMetadata
from csi.snapshots import OwnedSnapshots
from csi.targets import Targets
from csi.vhostface import VhostFace
from csi.volumehealth import VolumeHealth
from csi.volumelimits import VolumeLimits
from csi.volumenodes import VolumeNodes
from csi.volumes import OwnedVolumes
from csi.waitingclaims import WaitingClaims
from pydataplane.client import DEFAULT_SOCKET
from pydataplane.watchedclient import WatchedClient

MAX_VOLUMES = 250
UNIX = "unix://"
PORT_MAX = 65535


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--endpoint",
    default=f"unix:///var/lib/kubelet/plugins/{DRIVER_NAME}/csi.sock",
    envvar="CSI_ENDPOINT",
    help="UNIX socket to serve CSI on; $CSI_ENDPOINT.",
)
@click.option(
    "--mode",
    type=click.Choice(["all", "controller", "node"]),
    default="all",
    help="Services to serve, beside Identity.",
)
@click.option("--node-id", required=True, envvar="NODE_NAME", help="This node; $NODE_NAME.")
@click.option(
    "--target-socket",
    "target_sockets",
    type=click.Path(path_type=Path),
    multiple=True,
    default=[DEFAULT_SOCKET],
    help="RPC socket of this node's target; of several, give each.",
)
@click.option(
    "--helper-socket",
    type=click.Path(path_type=Path),
    help="Socket of virtlun-csi-helper, which mounts; without it this process does, as root.",
)
@click.option(
    "--host-device",
    type=click.Choice([each.value for each in Choice]),
    default=Choice.AUTO.value,
    help="A pod's new block device: of ublk where that grows while it is used (auto), of ublk "
    "wherever there is any (ublk), or a loop device. One that is there stays what it is.",
)
@click.option(
    "--kubelet-registration-path",
    help="The endpoint as the kubelet sees it; given, the driver registers itself.",
)
@click.option(
    "--plugin-registry",
    type=click.Path(path_type=Path),
    default=Path("/var/lib/kubelet/plugins_registry"),
    help="Folder in which the kubelet looks for plugins.",
)
@click.option(
    "--http",
    "http_address",
    default="127.0.0.1:9810",
    help="ADDRESS:PORT for /healthz, /readyz and /metrics; empty for none.",
)
@click.option(
    "--max-volumes",
    type=click.IntRange(min=0),
    default=MAX_VOLUMES,
    help="Most volumes that this node can publish; 0 for no limit.",
)
@click.option(
    "--health-interval",
    type=click.FloatRange(min=0.1),
    default=LOOK_S,
    help="Seconds between two looks at the volumes of this node's pods. What two in a row see out "
    "of order is told as an event of the claim, at most one a volume in six looks.",
)
@click.option(
    "--kubevirt",
    is_flag=True,
    help="Serve KubeVirt's virtual machines: node hooks, inline volumes and VmVolumes.",
)
@click.option(
    "--node-hook-socket",
    type=click.Path(path_type=Path),
    default=Path(f"/var/lib/kubelet/plugins/{DRIVER_NAME}/node-hook.sock"),
    help="Socket of the node hooks, as the Plugin names it; with --kubevirt.",
)
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path, dir_okay=False),
    help="How to reach the API server, for --kubevirt; default: as a pod, or $KUBECONFIG.",
)
@click.option("--log-level", type=click.Choice(LEVELS), default="info")
@click.option("--log-json", is_flag=True, help="One JSON object a line; default off a terminal.")
@click.version_option(package_name="virtlun")
def main(
    endpoint: str,
    mode: str,
    node_id: str,
    target_sockets: tuple[Path, ...],
    helper_socket: Path | None,
    host_device: str,
    kubelet_registration_path: str | None,
    plugin_registry: Path,
    http_address: str,
    max_volumes: int,
    health_interval: float,
    node_hook_socket: Path,
    kubeconfig: Path | None,
    log_level: str,
    *,
    kubevirt: bool,
    log_json: bool,
) -> None:
    """Serve CSI 1.13 for the volumes of this node's targets.

    Runs on every node beside them. Stops on SIGTERM or SIGINT once the calls begun are
    answered; mounted volumes do not notice.
    """
    _check(node_id, endpoint)
    set_up(log_level, as_json=log_json or not sys.stderr.isatty())
    ending = click.get_current_context().with_resource(Ending())
    path = Path(endpoint.removeprefix(UNIX))
    targets = Targets([WatchedClient(path) for path in dict.fromkeys(target_sockets)])
    host: Host = Helper(helper_socket) if helper_socket else LocalHost()
    volumes = OwnedVolumes(targets, node_id)
    locks, metrics, stopped = VolumeLocks(), Metrics(), threading.Event()
    metrics.registry.register(VolumeCollector(volumes))
    registration = Registration(kubelet_registration_path or "")
    parts: dict[str, object] = {"Identity": Identity(targets, controller=mode != "node")}
    nodes = VolumeNodes(node_id)
    limits = VolumeLimits(volumes.lvols, nodes.class_of)
    moves = Moves(volumes, nodes)
    if mode != "node":
        parts |= _controller(volumes, locks, node_id, nodes, limits, moves, stopped)
    if mode != "controller":
        devices = ChosenDevices(targets, host, Choice(host_device))
        controllers = VmControllers(targets, devices, locks)
        machines = None
        if kubevirt:
            cluster = _cluster(kubeconfig)
            machines = VirtualMachines(
                controllers, cluster, node_id, metrics, volumes, locks, moves
            )
        inline = InlineVolumes(
            controllers,
            machines.pod_hooks if machines else None,
            machines.admit if machines else None,
            host=host,
        )
        faces = devices, VhostFace(targets)
        health = VolumeHealth(targets, *faces)
        HealthEvents(health, node_id, look_s=health_interval).start()
        parts["Node"] = Node(
            *(volumes, *faces, locks, node_id, max_volumes, inline),
            capacity_of=nodes.capacity_of,
            asked_of=nodes.asked_of,
            host=host,
            pools_file=path.with_name("pools.json"),
            limits=limits,
            moves=moves,
        )
    log = structlog.get_logger().bind(endpoint=endpoint, mode=mode, node=node_id)
    with ExitStack() as running:
        running.callback(stopped.set)
        try:
            serve_until(running, path, _services(parts, metrics))
            if kubelet_registration_path:
                kubelet = pluginregistration_pb2.DESCRIPTOR.services_by_name["Registration"]
                socket = plugin_registry / f"{DRIVER_NAME}-reg.sock"
                serve_until(running, socket, [handlers(kubelet, registration, metrics)])
            if mode != "controller" and machines is not None:
                machines.start(running, node_hook_socket)
                log = log.bind(node_hook=str(node_hook_socket))
            if http_address:
                checks = (
                    lambda: registration.error or _socket_problem(path),
                    lambda: targets.problem() or host.check(),
                )
                http = _http(http_address, metrics, checks)
                running.callback(http.stop)
                log = log.bind(http=http.port)
        except (HostError, OSError, ValueError) as error:
            raise click.ClickException(str(error)) from error
        log.info("serving", target=", ".join(map(str, target_sockets)))
        log.info("stopping", reason=ending.wait().name)


def _check(node_id: str, endpoint: str) -> None:
    if not node_id:
        raise click.UsageError("--node-id is empty: give this node's name")
    if "://" in endpoint and not endpoint.startswith(UNIX):
        raise click.UsageError(f"--endpoint {endpoint}: only a UNIX socket, {UNIX}PATH, is served")


def _controller(
    volumes: OwnedVolumes,
    locks: VolumeLocks,
    node_id: str,
    nodes: VolumeNodes,
    limits: VolumeLimits,
    moves: Moves,
    stopped: threading.Event,
) -> dict[str, object]:
    """Returns the services that make and delete, by name.

    Snapshots that were deleted begin to be swept, and volumes to be limited by the classes of their
    claims, until `stopped`.
    """
    snapshots = OwnedSnapshots(volumes, locks)
    snapshots.begin(stopped)
    waiting = WaitingClaims(node_id)
    ClassWatch(volumes, limits, locks, nodes, waiting).begin(stopped)
    return {
        "Controller": Controller(
            *(volumes, snapshots, locks, node_id, nodes.node_of, waiting, limits),
            check_counts=nodes.check_counts,
            asked_of=nodes.asked_of,
            moves=moves,
        ),
        "GroupController": GroupController(volumes, snapshots, locks, moves),
        "SnapshotMetadata": SnapshotMetadata(volumes, snapshots),
    }


def _services(parts: dict[str, object], metrics: Metrics) -> list[grpc.GenericRpcHandler]:
    described = csi_pb2.DESCRIPTOR.services_by_name
    return [handlers(described[name], part, metrics) for name, part in parts.items()]


def _http(address: str, metrics: Metrics, checks: tuple[Check, Check]) -> Server:
    try:
        return Server(_address(address), metrics.registry, *checks)
    except OSError as error:
        raise HostError(f"--http {address}: {error.strerror}") from error


def _cluster(kubeconfig: Path | None) -> Cluster:
    try:
        return Cluster.connect(kubeconfig)
    except ClusterError as error:
        raise click.ClickException(str(error)) from error


def _address(text: str) -> tuple[str, int]:
    """Splits ADDRESS:PORT; an IPv6 address stands in brackets, none means all.

    Raises:
        ValueError: it is not of that form.
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > PORT_MAX:
        raise ValueError(f"--http: '{text}' is not ADDRESS:PORT, such as 127.0.0.1:9810")
    return host.strip("[]"), int(port)


def _socket_problem(path: Path) -> str | None:
    if listens(path):
        return None
    return f"the driver's socket {path} is gone: restart the driver, which makes it anew"


if __name__ == "__main__":
    main()
