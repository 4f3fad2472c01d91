"""`virtlun metrics`: what the targets of this host count, for Prometheus."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import click

from plugin.cli.output import address, config, ended_in_order, errors_as_sentences
from plugin.targets import addresses

PORT_MAX = 65535


class _Address(click.ParamType[tuple[str, int]]):
    """Where to listen."""

    name = "ADDRESS:PORT"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """Reads `ADDRESS:PORT`, an IPv6 address in brackets; `:PORT` is of all IPv4 addresses."""
        found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]*)):([0-9]{1,5})", value)
        if not found or int(found[3]) > PORT_MAX:
            self.fail(
                f"{value!r} is no address and port, such as 127.0.0.1:9433 or [::1]:9433",
                param,
                ctx,
            )
        everywhere = "0.0.0.0"  # noqa: S104 (who leaves out the address asks for it)
        return found[1] or found[2] or everywhere, int(found[3])


@click.command()
@click.option(
    "--listen",
    type=_Address(),
    help="Answer each scrape of Prometheus there, until ended.  [default: print once]",
)
@click.option(
    "--latencies/--no-latencies",
    default=True,
    show_default=True,
    help="Have the targets count how long operations take, for histograms.",
)
@click.pass_obj
@errors_as_sentences
def metrics(socket: Path, listen: tuple[str, int] | None, latencies: bool) -> None:
    """Print or serve metrics for Prometheus.

    They are what the targets of this host count. What is printed once is what node_exporter's
    textfile collector reads. With --target or --socket it is of that target alone.
    """
    # Other commands need none of it, and begin sooner without.
    from prometheus_client import (  # noqa: PLC0415
        CollectorRegistry,
        generate_latest,
        start_http_server,
    )

    from plugin.metrics.prometheus import TargetCollector  # noqa: PLC0415

    named = click.get_current_context().find_root().params
    if named["target_name"] is None and named["socket"] is None:
        targets = addresses(config())
    else:
        targets = [replace(address(), rpc_socket=socket)]
    registry = CollectorRegistry()
    registry.register(TargetCollector(targets, config().target.timeout_s, histograms=latencies))
    if listen is None:
        sys.stdout.write(generate_latest(registry).decode())
        return
    host, port = listen
    try:
        server, _thread = start_http_server(port, host, registry)
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {host} port {port}: {error.strerror or error}"
        ) from error
    try:
        with ended_in_order():
            shown = f"[{host}]" if ":" in host else host
            click.echo(f"http://{shown}:{server.server_port}/metrics", err=True)
            signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        server.shutdown()
