"""`virtlun top`: what the reactors, VMs and volumes do, refreshed."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table

from plugin.cli.output import (
    client,
    console,
    ended_in_order,
    errors_as_sentences,
    json_option,
    size,
)
from plugin.metrics.latencies import Counting
from plugin.metrics.sample import difference, noisiest, sample
from pydataplane.client import Client
from pydataplane.errors import TargetError

INTERVAL_MAX_S = 3600


@click.command()
@click.option("--interval", default=1.0, show_default=True, help="Seconds between samples.")
@click.option(
    "--count", type=click.IntRange(min=1), help="Stop after that many samples (else: until ^C)."
)
@json_option
@click.pass_obj
@errors_as_sentences
def top(socket: Path, interval: float, count: int | None, as_json: bool) -> None:
    """Show what reactors, VMs and volumes do.

    All of it is per second. While it runs the target counts latencies, which p50 and p99 are of.
    """
    if not 0 < interval <= INTERVAL_MAX_S:
        raise click.BadParameter(
            f"must be more than 0 and at most {INTERVAL_MAX_S}", param_hint="--interval"
        )
    # Whatever ends it, such as who reads its output, what the target counts is ended.
    samples = _samples(client(socket), interval, count)
    with suppress(KeyboardInterrupt), ended_in_order(), closing(samples):
        _show(samples, as_json=as_json)


def _show(samples: Iterable[dict[str, Any]], *, as_json: bool) -> None:
    out = console()
    if as_json or not out.is_terminal:
        for rates in samples:
            if as_json:
                click.echo(json.dumps(rates))
            else:
                out.print(_tables(rates))
        return
    with Live(console=out, auto_refresh=False, transient=False) as live:
        for rates in samples:
            live.update(_tables(rates), refresh=True)


def _samples(target: Client, interval: float, count: int | None) -> Generator[dict[str, Any]]:
    """Yields the rates of `count` intervals, without end if that is None."""
    before = sample(target)
    counting = Counting(target)
    done = 0
    try:
        counting.begin(before.bdevs, before.latencies)
        while count is None or done < count:
            time.sleep(interval)
            after = sample(target)
            # New ones, and those of which another program that began to count has ended that.
            counting.begin(after.bdevs, after.latencies)
            yield difference(before, after)
            before = after
            done += 1
    finally:
        with suppress(TargetError):
            counting.end()


def _tables(rates: dict[str, Any]) -> Group:
    parts: list[Table | str] = [_reactors(rates), ""]
    vms = _vms(rates)
    if vms.row_count:
        parts += [vms, ""]
    if noise := noisiest(rates):
        vm, share = noise
        parts += [f"Noisiest neighbour: {vm}, {100 * share:.0f} % of what the VMs do", ""]
    return Group(*parts, _volumes(rates))


def _table(*titles: str) -> Table:
    """Returns one with numbers at the right, but for the first column."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if index else "left")
    return table


def _reactors(rates: Mapping[str, Any]) -> Table:
    load = _table("REACTOR", "CPU", "NODE", "BUSY", "IDLE", "QUEUES")
    for reactor in rates["reactors"]:
        busy = 100 * reactor["busy"]
        load.add_row(
            str(reactor["index"]),
            "any" if reactor["cpu"] is None else str(reactor["cpu"]),
            "-" if reactor["node"] is None else str(reactor["node"]),
            f"{busy:.1f} %",
            f"{100 - busy:.1f} %",
            str(reactor["queues"]),
        )
    return load


def _vms(rates: Mapping[str, Any]) -> Table:
    """Returns the VMs' disks, the busiest first."""
    table = _table("VM", "LUN", "VOLUME", "IO/S", "P50", "P99", "DEPTH", "SHARE")
    rows = [(row["share"], name, row) for name, row in rates["bdevs"].items() if row["uses"]]
    for share, name, row in sorted(rows, key=lambda each: (-each[0], each[1])):
        for use in row["uses"]:
            table.add_row(
                use["vm"],
                use["lun"],
                name,
                f"{row['num_read_ops'] + row['num_write_ops']:.0f}",
                _duration(row["p50_ns"]),
                _duration(row["p99_ns"]),
                f"{row['depth']:.1f}",
                f"{100 * share:.0f} %",
            )
    return table


def _volumes(rates: Mapping[str, Any]) -> Table:
    volumes = _table("VOLUME", "READ/S", "WRITE/S", "READ", "WRITTEN")
    for name, row in sorted(rates["bdevs"].items()):
        volumes.add_row(
            name,
            f"{row['num_read_ops']:.0f}",
            f"{row['num_write_ops']:.0f}",
            f"{size(round(row['bytes_read']))}/s",
            f"{size(round(row['bytes_written']))}/s",
        )
    return volumes


def _duration(ns: float | None) -> str:
    """Returns a latency for people, `-` for none."""
    if ns is None:
        return "-"
    if ns < 1e6:
        return f"{ns / 1e3:.0f} µs"
    return f"{ns / 1e6:.1f} ms" if ns < 1e9 else f"{ns / 1e9:.1f} s"
