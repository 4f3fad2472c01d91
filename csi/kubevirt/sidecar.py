"""The command `virtlun-kubevirt-hook`, the sidecar of a launcher's pod."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import click
import grpc
import structlog

from csi.hosterrors import HostError
from csi.kubevirt.domainhook import FOLDER, Callbacks, DomainHook, Folder, Info, LauncherHook
from csi.logs import LEVELS, set_up
from csi.metrics import Metrics
from csi.proto import kubevirt_callbacks_pb2, kubevirt_info_pb2, kubevirt_plugin_pb2
from csi.server import Ending, handlers, serve_until

LEGACY_SOCKET = "virtlun.sock"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--plugin-socket",
    type=click.Path(path_type=Path),
    help="Socket for a KubeVirt Plugin, such as /var/run/kubevirt-plugin/virtlun/domain.sock.",
)
@click.option(
    "--hook-folder",
    type=click.Path(path_type=Path),
    help="Folder for a hook sidecar's socket: /var/run/kubevirt-hooks (KubeVirt 1.8 and before).",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=FOLDER,
    help="Where this container and the launcher's mount the controller's folder.",
)
@click.option("--log-level", type=click.Choice(LEVELS), default="info")
@click.option("--log-json", is_flag=True, help="One JSON object a line; default off a terminal.")
@click.version_option(package_name="virtlun")
def main(
    plugin_socket: Path | None,
    hook_folder: Path | None,
    folder: Path,
    log_level: str,
    *,
    log_json: bool,
) -> None:
    """Put the virtual machine's virtlun controller into its domain.

    Runs beside virt-launcher, in its pod, as its user. Give one of --plugin-socket and
    --hook-folder.
    """
    if (plugin_socket is None) == (hook_folder is None):
        raise click.UsageError("give one of --plugin-socket and --hook-folder")
    set_up(log_level, as_json=log_json or not sys.stderr.isatty())
    ending = click.get_current_context().with_resource(Ending())
    metrics, place = Metrics(), Folder(folder)
    services: list[grpc.GenericRpcHandler] = []
    if plugin_socket is not None:
        socket = plugin_socket
        plugins = kubevirt_plugin_pb2.DESCRIPTOR.services_by_name
        services.append(handlers(plugins["DomainHookService"], DomainHook(place), metrics))
        services.append(handlers(plugins["LauncherHookService"], LauncherHook(place), metrics))
    else:
        assert hook_folder is not None
        socket = hook_folder / LEGACY_SOCKET
        described = kubevirt_info_pb2.DESCRIPTOR.services_by_name["Info"]
        services.append(handlers(described, Info(), metrics))
        described = kubevirt_callbacks_pb2.DESCRIPTOR.services_by_name["Callbacks"]
        services.append(handlers(described, Callbacks(place, _end), metrics))
    with ExitStack() as running:
        try:
            serve_until(running, socket, services)
        except (HostError, OSError) as error:
            raise click.ClickException(str(error)) from error
        log = structlog.get_logger().bind(socket=str(socket), folder=str(folder))
        log.info("serving")
        log.info("stopping", reason=ending.wait().name)


def _end() -> None:
    """Ends this program in order: calls that are begun are answered."""
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
