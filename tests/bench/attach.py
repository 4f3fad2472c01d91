"""`python -m tests.bench.attach`: from the libvirt call to the event in the guest's ring, and on.

A real guest is attached to, resized and detached from through the gateway, again and again: by a
virsh process each time, and by a program that stays connected, as Nova does; with --nova by Nova's
own driver, too, which waits for libvirt's event that a disk is gone. "event" is when the target has
put the event into the guest's ring (its own counter), "guest" when the guest's kernel has acted on
it; the guest runs in software where KVM does not work, so only the former is ours.

A second table is of the hook, which libvirtd waits for at each start of a domain, ours or not: of a
domain that is not ours, of one of ours, and of the system's Python that does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import libvirt
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.openstack.nova_process import Nova
from tests.support.agent import Agent
from tests.support.host import Host, is_root

NAME = "bench"
SOURCE = "/dev/virtlun/lvs0/bench"
DISK = (
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/bench'/>"
    "<target dev='sdb' bus='scsi'/></disk>"
)
MIB = 1 << 20
EVENT_DEADLINE_S = 10.0

Call = Callable[[int], None]


def main() -> int:
    """Measures and prints a table in milliseconds; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.attach", description="Milliseconds from libvirt call to event."
    )
    parser.add_argument("--rounds", type=int, default=20, help="attach, resize, detach (20)")
    parser.add_argument("--nova", action="store_true", help="by Nova's driver as well")
    words = parser.parse_args()
    rounds = words.rounds
    out = Console(highlight=False)
    if not is_root():
        out.print("this runs a private libvirtd: run it as root")
        return 1
    with Host() as host, contextlib.ExitStack() as ending:
        host.volumes.create("lvs0/bench", 64 * MIB)
        host.define(NAME)
        host.virsh("start", NAME)
        agent = host.agent(NAME)
        domain = libvirt.open(host.uri).lookupByName(NAME)
        clients = {"virsh": by_virsh(host), "program": by_program(domain)}
        if words.nova:
            nova = ending.enter_context(contextlib.closing(Nova(host, domain.UUIDString())))
            clients["Nova"] = by_nova(nova)
        found: dict[str, list[tuple[float, float, float]]] = {}
        for nth in track(range(rounds), "measuring", console=out, transient=True):
            for client, calls in clients.items():
                for what, (call, seen) in calls.items():
                    found.setdefault(f"{what}, {client}", []).append(
                        once(host, agent, partial(call, nth), seen(nth))
                    )
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("MILLISECONDS")
        for title in ("event p50", "event max", "returned p50", "guest p50", "guest max"):
            table.add_column(title, justify="right")
        for what, points in found.items():
            event, returned, guest = (list(column) for column in zip(*points, strict=True))
            table.add_row(
                what,
                *(f"{statistics.median(event):.1f}", f"{max(event):.1f}"),
                f"{statistics.median(returned):.1f}",
                *(f"{statistics.median(guest):.1f}", f"{max(guest):.1f}"),
            )
        out.print(table)
        out.print(hook_table(host, rounds))
    return 0


def by_virsh(host: Host) -> dict[str, tuple[Call, Callable[[int], str]]]:
    """The calls made by a new virsh process each, and what the guest then sees."""
    return {
        "attach": (
            lambda _: _void(host.virsh("attach-disk", NAME, SOURCE, "sdb", "--live", "--config")),
            lambda _: "ls -d /sys/block/sd*",
        ),
        "resize": (
            lambda nth: _void(host.virsh("blockresize", NAME, "sdb", f"{65 + 3 * nth}M")),
            lambda nth: f'[ "$(cat /sys/block/sd*/size)" = {(65 + 3 * nth) * 2048} ]',
        ),
        "detach": (
            lambda _: _void(host.virsh("detach-disk", NAME, "sdb", "--live", "--config")),
            lambda _: "! ls -d /sys/block/sd*",
        ),
    }


def by_program(domain: Any) -> dict[str, tuple[Call, Callable[[int], str]]]:
    """The same by a client that stays connected."""
    flags = libvirt.VIR_DOMAIN_AFFECT_LIVE | libvirt.VIR_DOMAIN_AFFECT_CONFIG
    bytes_ = libvirt.VIR_DOMAIN_BLOCK_RESIZE_BYTES
    return {
        "attach": (
            lambda _: _void(domain.attachDeviceFlags(DISK, flags)),
            lambda _: "ls -d /sys/block/sd*",
        ),
        "resize": (
            lambda nth: _void(domain.blockResize("sdb", (66 + 3 * nth) * MIB, bytes_)),
            lambda nth: f'[ "$(cat /sys/block/sd*/size)" = {(66 + 3 * nth) * 2048} ]',
        ),
        "detach": (
            lambda _: _void(domain.detachDeviceFlags(DISK, flags)),
            lambda _: "! ls -d /sys/block/sd*",
        ),
    }


def by_nova(nova: Nova) -> dict[str, tuple[Call, Callable[[int], str]]]:
    """The same by Nova's driver, as its compute service calls it."""
    data = {"name": "virtlun/lvs0/bench", "hosts": [], "ports": [], "auth_enabled": False}
    volume = {"driver_volume_type": "rbd", "serial": str(uuid.uuid4()), "data": data}
    return {
        "attach": (
            lambda _: _void(nova.does("attach", volume, "sdb", "scsi")),
            lambda _: "ls -d /sys/block/sd*",
        ),
        "resize": (
            lambda nth: _void(nova.does("extend", volume, (67 + 3 * nth) * MIB)),
            lambda nth: f'[ "$(cat /sys/block/sd*/size)" = {(67 + 3 * nth) * 2048} ]',
        ),
        "detach": (
            lambda _: _void(nova.does("detach", volume, "sdb")),
            lambda _: "! ls -d /sys/block/sd*",
        ),
    }


def once(
    host: Host, agent: Agent, call: Callable[[], None], seen: str
) -> tuple[float, float, float]:
    """Makes one call; returns the milliseconds to the event, to its return, and to the guest."""
    before = _events(host)
    begun = time.monotonic()
    call()
    returned = time.monotonic()
    event = returned  # the target answers only after it gave the event to the guest's ring
    while _events(host) == before:
        event = time.monotonic()
        if event - begun > EVENT_DEADLINE_S:
            raise RuntimeError("the target sent no event")
    agent.wait_for(seen)
    guest = time.monotonic()
    return (event - begun) * 1e3, (returned - begun) * 1e3, (guest - begun) * 1e3


def hook_table(host: Host, rounds: int) -> Table:
    """Runs the hook as libvirtd does, `rounds` times for each domain, and returns what it took."""
    host.virsh("attach-disk", NAME, SOURCE, "sdb", "--live", "--config")
    ours = host.virsh_direct("dumpxml", NAME)
    plain = host.virsh("dumpxml", NAME)  # without what the gateway hides
    host.virsh("detach-disk", NAME, "sdb", "--live", "--config")
    script = str(host.libvirtd.hooks / "qemu.d/virtlun")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("THE HOOK, MILLISECONDS")
    for title in ("CPU p50", "CPU min", "returned p50", "returned min"):
        table.add_column(title, justify="right")
    for what, words, xml in (
        ("Python alone", ["/usr/bin/python3", "-IS", "-c", "pass"], ""),
        ("a domain that is not ours", [script, NAME, "prepare", "begin", "-"], plain),
        ("one of ours, with a disk", [script, NAME, "reconnect", "begin", "-"], ours),
    ):
        points = [_hook(words, xml) for _ in range(rounds)]
        cpu, returned = (list(column) for column in zip(*points, strict=True))
        table.add_row(
            what,
            *(f"{statistics.median(cpu):.1f}", f"{min(cpu):.1f}"),
            *(f"{statistics.median(returned):.1f}", f"{min(returned):.1f}"),
        )
    return table


def _hook(words: list[str], xml: str) -> tuple[float, float]:
    """Runs a program to its end; returns the milliseconds of a processor, and those until then."""
    begun = time.monotonic()
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stdin is not None
    process.stdin.write(xml)
    process.stdin.close()
    _, status, used = os.wait4(process.pid, 0)
    returned = time.monotonic()
    if status:
        raise RuntimeError(f"{' '.join(words)}: status {status}")
    process.returncode = 0
    return (used.ru_utime + used.ru_stime) * 1e3, (returned - begun) * 1e3


def _events(host: Host) -> int:
    """Returns how many events the target has sent to guests."""
    return sum(int(item["events_sent"]) for item in host.client.call("virtlun_vhost_get_stats"))


def _void(_: object) -> None:
    """Takes the place of a statement in a lambda."""


if __name__ == "__main__":
    sys.exit(main())
