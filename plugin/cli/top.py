"""`virtlun top`: what the reactors and volumes do, refreshed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table

from plugin.cli.output import client, console, errors_as_sentences, json_option, size
from pydataplane import supervise
from pydataplane.client import Client
from pydataplane.domain.reactors import topology
from pydataplane.errors import METHOD_NOT_FOUND, RpcError

INTERVAL_MAX_S = 3600
COUNTERS = ("num_read_ops", "num_write_ops", "bytes_read", "bytes_written")


@click.command()
@click.option("--interval", default=1.0, show_default=True, help="Seconds between samples.")
@click.option(
    "--count", type=click.IntRange(min=1), help="Stop after that many samples (else: until ^C)."
)
@json_option
@click.pass_obj
@errors_as_sentences
def top(socket: Path, interval: float, count: int | None, as_json: bool) -> None:
    """Show reactor load and the I/O of each volume, per second."""
    if not 0 < interval <= INTERVAL_MAX_S:
        raise click.BadParameter(
            f"must be more than 0 and at most {INTERVAL_MAX_S}", param_hint="--interval"
        )
    with suppress(KeyboardInterrupt):  # how it is meant to be ended
        _show(_samples(client(socket), interval, count), as_json=as_json)


def _show(samples: Iterator[dict[str, Any]], *, as_json: bool) -> None:
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


def _samples(target: Client, interval: float, count: int | None) -> Iterator[dict[str, Any]]:
    """Yields the rates of `count` intervals, without end if that is None."""
    before = sample(target)
    done = 0
    while count is None or done < count:
        time.sleep(interval)
        after = sample(target)
        yield difference(before, after)
        before = after
        done += 1


def sample(target: Client) -> dict[str, Any]:
    """Returns the counters of a target now."""
    names = {
        item["name"]: item["aliases"][0] if item["aliases"] else item["name"]
        for item in target.call("bdev_get_bdevs")
    }
    return {
        "at": time.monotonic(),
        "reactors": _reactors(target),
        "queues": Counter(
            queue["cpu"]
            for controller in target.call("vhost_get_controllers")
            for session in controller["sessions"]
            for queue in session.get("queues", ())  # SPDK's does not tell
        ),
        "bdevs": {
            names.get(item["name"], item["name"]): item
            for item in target.call("bdev_get_iostat")["bdevs"]
        },
    }


def _reactors(target: Client) -> list[Mapping[str, Any]]:
    """Returns what the reactors of a target did until now."""
    try:
        return list(supervise.status(target.path)["reactors"])
    except RpcError as error:
        if error.code != METHOD_NOT_FOUND:
            raise
    return [  # SPDK's: in ticks, of which the share is the same
        {
            "index": index,
            "cpu": each["lcore"],
            "busy_ns": each["busy"],
            "idle_ns": each["idle"],
            "sleep_ns": 0,
        }
        for index, each in enumerate(target.call("framework_get_reactors")["reactors"])
    ]


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Returns each reactor's place, busy share and queues, and each bdev's counters per second."""
    seconds = max(after["at"] - before["at"], 1e-6)
    reactors = []
    for old, new in zip(before["reactors"], after["reactors"], strict=False):
        spent = {key: new[key] - old[key] for key in ("busy_ns", "idle_ns", "sleep_ns")}
        total = max(sum(spent.values()), 1)
        # One that is not pinned counts as the CPU of its index.
        cpu = new["index"] if new["cpu"] is None else new["cpu"]
        reactors.append(
            {
                "index": new["index"],
                "cpu": new["cpu"],
                "node": _node(new["cpu"]),
                "busy": spent["busy_ns"] / total,
                "queues": after["queues"][cpu],
            }
        )
    bdevs = {
        name: {
            key: (new[key] - before["bdevs"].get(name, {}).get(key, 0)) / seconds
            for key in COUNTERS
        }
        for name, new in after["bdevs"].items()
    }
    return {"reactors": reactors, "bdevs": bdevs}


def _node(cpu: int | None) -> int | None:
    """Returns the NUMA node of a CPU of this host; None where there is none, or no CPU."""
    if cpu is None:
        return None
    there = topology({cpu}).get(cpu)
    return int(there.node.removeprefix("node")) if there and there.node else None


def _tables(rates: dict[str, Any]) -> Group:
    load = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("REACTOR", "CPU", "NODE", "BUSY", "QUEUES"):
        load.add_column(title, justify="left" if title == "REACTOR" else "right")
    for reactor in rates["reactors"]:
        cpu = "any" if reactor["cpu"] is None else str(reactor["cpu"])
        busy = f"{100 * reactor['busy']:.1f} %"
        node = "-" if reactor["node"] is None else str(reactor["node"])
        load.add_row(str(reactor["index"]), cpu, node, busy, str(reactor["queues"]))
    volumes = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("VOLUME", "READ/S", "WRITE/S", "READ", "WRITTEN"):
        volumes.add_column(title, justify="left" if title == "VOLUME" else "right")
    for name, row in sorted(rates["bdevs"].items()):
        volumes.add_row(
            name,
            f"{row['num_read_ops']:.0f}",
            f"{row['num_write_ops']:.0f}",
            f"{size(round(row['bytes_read']))}/s",
            f"{size(round(row['bytes_written']))}/s",
        )
    return Group(load, "", volumes)
