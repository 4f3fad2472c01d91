"""The command `virtlun-gateway`."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import click
import structlog

from plugin.config import DEFAULT_PATH, Config, load
from plugin.gateway import heap, manager
from plugin.gateway.server import Gateway
from pydataplane.domain.errors import ConfigError

SWITCH_S = 0.001
"""How long the event loop waits for a thread that reads XML to let it run, seconds: Python's own
5 ms are many times as long as what the loop does then, and each step of a call waits for it."""

LEVELS = ["debug", "info", "warning", "error"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help=f"Configuration file.  [default: {DEFAULT_PATH}, if it exists]",
)
@click.option("--listen", type=click.Path(path_type=Path), help="Socket for clients.")
@click.option("--listen-ro", type=click.Path(path_type=Path), help="Read-only socket for clients.")
@click.option("--upstream", type=click.Path(path_type=Path), help="libvirtd's socket.")
@click.option("--upstream-ro", type=click.Path(path_type=Path), help="libvirtd's read-only socket.")
@click.option("--target-socket", type=click.Path(path_type=Path), help="The target's RPC socket.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
@click.option("--log-json", is_flag=True, help="One JSON object a line; default off a terminal.")
@click.version_option(package_name="virtlun")
def main(
    config_path: Path | None,
    listen: Path | None,
    listen_ro: Path | None,
    upstream: Path | None,
    upstream_ro: Path | None,
    target_socket: Path | None,
    log_level: str,
    *,
    log_json: bool,
) -> None:
    """Serve libvirt clients: everything libvirtd can do, and virtlun disks on top.

    Listens on a socket of its own and passes calls on to libvirtd. Use it with:

    virsh -c 'qemu:///system?socket=/run/virtlun/libvirt-sock'

    or move libvirtd's own socket aside and let the gateway listen in its place: examples/libvirt
    tells how. Stops on SIGTERM or SIGINT once the calls begun are answered; running VMs do not
    notice.
    """
    set_up_log(log_level, as_json=log_json or not sys.stderr.isatty())
    try:
        config = load(config_path)
        overrides: dict[str, Any] = {
            "listen": listen,
            "listen_ro": listen_ro,
            "upstream": upstream,
            "upstream_ro": upstream_ro,
        }
        given = {key: value for key, value in overrides.items() if value is not None}
        socket = {} if target_socket is None else {"rpc_socket": target_socket}
        sections = {
            "gateway": config.gateway.model_copy(update=given),
            "target": config.target.model_copy(update=socket),
        }
        asyncio.run(_serve(config.model_copy(update=sections)))
    except ConfigError as error:
        raise click.ClickException(str(error)) from error


async def _serve(config: Config) -> None:
    heap.keep_small()
    _raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_S)
    gateway = Gateway(config)
    gateway.open()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, gateway.stop)
    manager.tell("READY=1")
    await gateway.run()


def _raise_descriptor_limit() -> None:
    """Two sockets a client, and up to 32 descriptors on their way."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def set_up_log(level: str, *, as_json: bool) -> None:
    """Logs to stderr. XML is never logged: it may hold passwords."""
    renderer: Any = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


if __name__ == "__main__":
    main()
