"""`python -m tests.bench.gateway`: libvirt's calls through the gateway and at libvirtd directly.

A private libvirtd has many domains with disks of ours, some of them running (paused, so that their
guests cost nothing) and some domains without. What is asked of both, in turn: calls that do not
concern us, and those that do, by one client and by many; all domains' XML and statistics, as
monitoring does it; an attach while others poll. Needs root; `--quick` takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from uuid import UUID, uuid5

import libvirt
from rich.console import Console
from rich.progress import track
from rich.table import Table

from plugin.config import load
from plugin.gateway.messages import Domain, DomainCall
from plugin.gateway.procs import Proc
from plugin.gateway.xdr import Writer
from pydataplane.domain import translate
from tests.bench.counting import Counting
from tests.bench.libvirt_clients import Client, Clients, Load, Request, latencies
from tests.support.gateway import GatewayProcess
from tests.support.host import CONFIG, is_root, scratch_directory
from tests.support.libvirtd import Libvirtd
from tests.support.target import Target

NAMES = UUID("c0ffee00-0000-4000-8000-00000000bec4")
"""Of the domains' UUIDs."""

GET_INFO = 16
GET_HOSTNAME = 59
"""Procedures that pass through the gateway unread."""

QUIET_S = 300.0
"""How long the gateway's first look at all domains is waited for, seconds."""

SETTLE_S = 15.0
"""How long it is waited for between two points, seconds."""

MIB = 1 << 20
LIVE = 1

DISKS_OF_ATTACHES = (10, 120)
"""Disks of the domains that an attach is measured with, besides the others."""

NEW = 26 + 26 * 26 - 1
"""Number of the disk that is attached, behind all others: sdzz."""

DOMAIN = """\
<domain type='qemu'>
  <name>{name}</name>
  <uuid>{uuid}</uuid>
  <metadata>
    <nova:instance xmlns:nova='http://openstack.org/xmlns/libvirt/nova/1.1'><nova:name>{name}</nova:name></nova:instance>
  </metadata>
  <memory unit='MiB'>16</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <features><acpi/></features>
  <cpu mode='custom' match='exact'><model>qemu64</model></cpu>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
{disks}
    <serial type='pty'><target port='0'/></serial>
    <memballoon model='none'/>
  </devices>
</domain>
"""


def disk(source: str, nth: int) -> str:
    """Returns a <disk> as a client writes it."""
    return (
        f"    <disk type='file' device='disk'><driver name='qemu' type='raw'/>"
        f"<source file='{source}'/>"
        f"<target dev='{_dev(nth)}' bus='scsi'/></disk>"
    )


def _dev(nth: int) -> str:
    """Returns the target dev of disk `nth`: sda, sdz, sdaa."""
    letters = ""
    while nth >= 0:
        letters = chr(ord("a") + nth % 26) + letters
        nth = nth // 26 - 1
    return f"sd{letters}"


class BenchHost:
    """libvirtd with all the domains, a target with their volumes, and the gateway."""

    def __init__(self, sizes: argparse.Namespace, stack: ExitStack, out: Console) -> None:
        """Makes all of it; `stack` ends it."""
        self.scratch = scratch_directory("vb-")
        stack.callback(shutil.rmtree, self.scratch, ignore_errors=True)
        self.libvirtd = stack.enter_context(Libvirtd(self.scratch / "l", max_clients=3000))
        self.target = Target(self.scratch, "--socket-group", "kvm")
        stack.callback(self.target.stop)
        self.target.start()
        self.config = self.scratch / "virtlun.toml"
        self.config.write_text(
            CONFIG.format(
                target=self.target.rpc_socket,
                vhost=self.target.vhost_dir,
                listen=self.scratch / "gateway",
                listen_ro=self.scratch / "gateway-ro",
                upstream=self.libvirtd.socket,
                upstream_ro=self.libvirtd.socket_ro,
                libvirtd_conf=self.libvirtd.scratch / "etc/libvirtd.conf",
                auth_conf=self.libvirtd.scratch / "etc/auth.conf",
                memory_dir=self.scratch / "memory",
                state_dir=self.scratch / "notes",
                hook_state=self.scratch / "hook",
            )
        )
        self.ours = [self._reference(f"ours-{n}") for n in range(sizes.domains)]
        self.plain = [self._reference(f"plain-{n}") for n in range(sizes.plain)]
        numbers = DISKS_OF_ATTACHES if sizes.running else ()
        self.growing = {n: self._reference(f"growing-{n}") for n in numbers}
        """Domains that run, by their number of disks of ours."""
        self.plain_xml: list[str] = []
        """Of the domains without disks of ours, as they are defined."""
        self.uuids: dict[str, str] = {}
        """Of the volumes, by LVSTORE/LVOL."""
        with out.status("volumes") as status:
            # A volume takes a page of metadata, and a store has one for 16 clusters of 1 MiB.
            self.target.make_lvstore(size=(sizes.domains * sizes.disks + 4096) * 16 * MIB)
            for nth, dom in enumerate(self.ours[: sizes.volumes]):
                status.update(f"volumes of domain {nth}")
                for number in range(sizes.disks):
                    name = f"{dom.name}-{number}"
                    self.uuids[f"lvs0/{name}"] = self.target.make_thin(name, 4)
            for count, dom in self.growing.items():
                for number in range(count):
                    name = f"{dom.name}-{number}"
                    self.uuids[f"lvs0/{name}"] = self.target.make_thin(name, 4)
            self.target.make_thin("extra", 4)
        self._define(sizes, out)
        self.gateway = stack.enter_context(
            GatewayProcess(
                self.config,
                self.scratch / "gateway",
                self.scratch / "gateway.log",
                uvloop=sizes.uvloop,
            )
        )
        self._start(sizes, out)
        with out.status("the gateway's first look at all domains"):
            self.until_quiet(QUIET_S, 3)

    def until_quiet(self, most_s: float, look_s: float) -> None:
        """Waits for the gateway to do nothing for `look_s` seconds, for `most_s` at most."""
        end = time.monotonic() + most_s
        while time.monotonic() < end:
            before = seconds_of(self.gateway.pid)
            time.sleep(look_s)
            if seconds_of(self.gateway.pid) - before < 0.033 * look_s:
                return

    @staticmethod
    def _reference(name: str) -> Domain:
        return Domain(name, uuid5(NAMES, name).bytes, -1)

    def _define(self, sizes: argparse.Namespace, out: Console) -> None:
        """Defines the domains at libvirtd itself, translated as the gateway would have done it."""
        connection = libvirt.open(self.libvirtd.uri())
        settings = load(self.config).settings()
        images = self.scratch / "images"
        images.mkdir()
        image = images / "image"
        image.touch()
        os.truncate(image, 4 * MIB)
        todo = [(dom, sizes.disks) for dom in (*self.ours, *self.plain)]
        todo += [(dom, count) for count, dom in self.growing.items()]
        for dom, count in track(todo, "defining", console=out, transient=True):
            plain = dom.name.startswith("plain")
            names = [
                str(image) if plain else f"/dev/virtlun/lvs0/{dom.name}-{n}" for n in range(count)
            ]
            disks = "\n".join(disk(name, nth) for nth, name in enumerate(names))
            xml = DOMAIN.format(name=dom.name, uuid=dom.uuid_text, disks=disks)
            if plain:
                self.plain_xml.append(xml)
            else:
                xml = translate.define(xml, settings, new_uuid=UUID(int=0), uuids=self.uuids).xml
            connection.defineXML(xml)
        connection.close()

    def _start(self, sizes: argparse.Namespace, out: Console) -> None:
        connection = libvirt.open(self.libvirtd.uri(self.gateway.socket))
        running = (*self.ours[: sizes.running], *self.growing.values())
        names = [dom.name for dom in running]
        for name in track(names, "starting", console=out, transient=True):
            connection.lookupByName(name).createWithFlags(libvirt.VIR_DOMAIN_START_PAUSED)
        connection.close()


def seconds_of(pid: int) -> float:
    """Returns the CPU time that a process has used, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> dict[str, float]:
    """Returns a process's resident memory now and at its peak, MiB."""
    words = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    kib = {key[0].rstrip(":"): int(key[1]) for key in words if key[0] in ("VmRSS:", "VmHWM:")}
    return {"now": kib["VmRSS"] / 1024, "peak": kib["VmHWM"] / 1024}


@dataclass(frozen=True)
class Point:
    """One kind of call. Times are in milliseconds; None where libvirtd cannot be asked."""

    what: str
    clients: int
    gateway_ms: float
    direct_ms: float | None
    gateway_rate: float | None = None
    direct_rate: float | None = None
    cpu_ms: float | None = None
    """Of the gateway, for each call."""
    peak_mib: float | None = None
    """What the gateway had in memory at most meanwhile."""


def requests_of(
    host: BenchHost, sizes: argparse.Namespace
) -> dict[str, tuple[list[Request], bool]]:
    """Returns the calls to measure by what they are, and whether libvirtd can answer them, too."""

    def each(proc: int, doms: Sequence[Domain], **parts: bool) -> list[Request]:
        return [(proc, DomainCall(dom).pack(**parts)) for dom in doms]

    def domstats(dom: Domain) -> Request:
        writer = Writer().u32(1)
        return Proc.GET_ALL_DOMAIN_STATS, bytes(dom.write(writer).u32(0).u32(0))

    running = host.ours[: sizes.running]
    one_disk: list[Request] = [
        (Proc.BLOCK_STATS, DomainCall(dom, "sda").pack(text=True)) for dom in running
    ]
    found: dict[str, tuple[list[Request], bool]] = {
        "hostname": ([(GET_HOSTNAME, b"")], True),
        "dominfo": (each(GET_INFO, host.ours), True),
        "list": ([(Proc.LIST_ALL_DOMAINS, bytes(Writer().i32(1).u32(0)))], True),
        "dumpxml, not ours": (each(Proc.GET_XML_DESC, host.plain, flags=True), True),
        "dumpxml, ours": (each(Proc.GET_XML_DESC, host.ours, flags=True), True),
        "domstats, not ours": ([domstats(dom) for dom in host.plain], True),
        "domstats, ours": ([domstats(dom) for dom in running], True),
        "define, not ours": (
            [(Proc.DEFINE_XML, bytes(Writer().string(xml))) for xml in host.plain_xml],
            True,
        ),
    }
    if running:
        found["domblkstat, ours"] = (one_disk, False)
    return {what: item for what, item in found.items() if item[0]}


def _p50_ms(found: list[float]) -> float:
    return statistics.median(found) * 1000


def one_client(
    host: BenchHost, what: str, requests: list[Request], direct: bool, s: float
) -> Point:
    """Measures one client, in turn through the gateway and directly."""
    warm = Client(host.gateway.socket)  # what is asked first costs more: see `whole`
    for request in requests:
        warm.call(request)
    warm.close()
    # The clients of the point before may still be let go, which is no cost of these calls.
    host.until_quiet(SETTLE_S, 0.6)
    ours: list[float] = []
    theirs: list[float] = []
    cpu = 0.0
    for _ in range(2):
        before = seconds_of(host.gateway.pid)
        ours += latencies(host.gateway.socket, requests, s / 2)
        cpu += seconds_of(host.gateway.pid) - before
        if direct:
            theirs += latencies(host.libvirtd.socket, requests, s / 2)
    return Point(
        what,
        1,
        _p50_ms(ours),
        _p50_ms(theirs) if direct else None,
        cpu_ms=cpu / len(ours) * 1000,
    )


def many_clients(
    host: BenchHost, what: str, requests: list[Request], direct: bool, count: int, s: float
) -> Point:
    """Measures `count` clients at a time."""

    def run(path: Path) -> tuple[Load, float]:
        clients = Clients(path, count, requests)
        before = seconds_of(host.gateway.pid)
        time.sleep(s)
        spent = seconds_of(host.gateway.pid) - before
        return clients.stop(), spent

    ours, spent = run(host.gateway.socket)
    theirs = run(host.libvirtd.socket)[0] if direct else None
    return Point(
        what,
        count,
        ours.p50_s * 1000,
        theirs.p50_s * 1000 if theirs else None,
        ours.rate,
        theirs.rate if theirs else None,
        spent / max(1, ours.calls) * 1000,
    )


def whole(host: BenchHost, rounds: int) -> Iterator[Point]:
    """Measures what monitoring does: the XML of all domains, one by one, and all statistics."""
    listing: Request = (Proc.LIST_ALL_DOMAINS, bytes(Writer().i32(1).u32(0)))
    xmls = [(Proc.GET_XML_DESC, DomainCall(dom).pack(flags=True)) for dom in host.ours]
    stats: Request = (Proc.GET_ALL_DOMAIN_STATS, bytes(Writer().u32(0).u32(0).u32(0)))
    for what, requests in (
        ("list and dumpxml of all", [listing, *xmls]),
        ("domstats of all", [stats]),
    ):
        took: dict[str, list[float]] = {}
        cpu = 0.0
        for _ in range(rounds):
            for side, path in (("ours", host.gateway.socket), ("theirs", host.libvirtd.socket)):
                client = Client(path)
                before, start = seconds_of(host.gateway.pid), time.perf_counter()
                for request in requests:
                    client.call(request)
                took.setdefault(side, []).append(time.perf_counter() - start)
                cpu += seconds_of(host.gateway.pid) - before if side == "ours" else 0
                client.close()
        ours, theirs = _p50_ms(took["ours"]), _p50_ms(took["theirs"])
        first = took["ours"][0] * 1000
        yield Point(f"{what} (first {first:.0f} ms)", 1, ours, theirs, cpu_ms=cpu / rounds * 1000)


def attaches(host: BenchHost, dom: Domain, pollers: int, rounds: int) -> list[float]:
    """Returns how long attaching took, seconds, while `pollers` ask for all domains' statistics."""
    stats: Request = (Proc.GET_ALL_DOMAIN_STATS, bytes(Writer().u32(0).u32(0).u32(0)))
    polling = Clients(host.gateway.socket, pollers, [stats]) if pollers else None
    client = Client(host.gateway.socket)
    took = []
    xml = disk("/dev/virtlun/lvs0/extra", NEW)
    args = DomainCall(dom, xml, LIVE).pack(text=True, flags=True)
    for _ in range(rounds):
        start = time.perf_counter()
        client.call((Proc.ATTACH_DEVICE_FLAGS, args))
        took.append(time.perf_counter() - start)
        client.call((Proc.DETACH_DEVICE_FLAGS, args))
    client.close()
    if polling is not None:
        polling.stop()
    return took


def calls_of(host: BenchHost, dom: Domain) -> dict[str, Counter[str]]:
    """Returns the calls that one attach, one detach and one domblkstat make, by whom they ask."""
    found: dict[str, Counter[str]] = {}
    upstream, rpc = host.scratch / "counted", host.scratch / "counted-rpc"
    to_libvirtd = Counting(upstream, host.libvirtd.socket, libvirt=True)
    to_target = Counting(rpc, host.target.rpc_socket, libvirt=False)
    path = host.scratch / "counting"
    words = ("--upstream", str(upstream), "--target-socket", str(rpc))
    config = host.scratch / "counting.toml"
    config.write_text(host.config.read_text().replace("[gateway]", "[gateway]\nreconcile = false"))
    with GatewayProcess(config, path, host.scratch / "counting.log", *words):
        client = Client(path)
        args = DomainCall(dom, disk("/dev/virtlun/lvs0/extra", NEW), LIVE)
        change = args.pack(text=True, flags=True)
        blkstat = DomainCall(dom, "sda").pack(text=True)
        for nth in range(2):  # the first opens connections
            for what, proc, body in (
                ("attach", Proc.ATTACH_DEVICE_FLAGS, change),
                ("detach", Proc.DETACH_DEVICE_FLAGS, change),
                ("domblkstat", Proc.BLOCK_STATS, blkstat),
            ):
                to_libvirtd.calls.clear()
                to_target.calls.clear()
                client.call((proc, body))
                if nth:
                    found[f"{what}, libvirtd"] = Counter(to_libvirtd.calls)
                    found[f"{what}, target"] = Counter(to_target.calls)
        client.close()
    to_libvirtd.close()
    to_target.close()
    return found


def measured(
    host: BenchHost, sizes: argparse.Namespace, wanted: Callable[[str], bool]
) -> Iterator[Point]:
    """Yields the points of the table, each as it is measured."""
    yield from whole(host, 5) if wanted("all") else ()
    for what, (requests, direct) in requests_of(host, sizes).items():
        if wanted(what):
            yield one_client(host, what, requests, direct, sizes.time)
            yield many_clients(host, what, requests, direct, sizes.clients, sizes.time)


def with_peak(pid: int, measured: Iterable[Point]) -> Iterator[Point]:
    """Yields points as they are measured, with what a process had in memory at most meanwhile."""
    begin_peak(pid)
    for point in measured:
        yield replace(point, peak_mib=memory_of(pid)["peak"])
        begin_peak(pid)


def begin_peak(pid: int) -> None:
    """Has VmHWM of a process begin anew (proc_pid_clear_refs(5))."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def table(points: Sequence[Point]) -> Table:
    """All points."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("CALL")
    titles = (
        "clients",
        "ms",
        "direct",
        "ratio",
        "calls/s",
        "direct",
        "ratio",
        "CPU ms/call",
        "MiB",
    )
    for title in titles:
        made.add_column(title, justify="right")

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    def ratio(a: float | None, b: float | None) -> str:
        return "-" if not a or not b else f"{a / b:.2f}"

    for point in points:
        made.add_row(
            point.what,
            str(point.clients),
            number(point.gateway_ms, ",.3f"),
            number(point.direct_ms, ",.3f"),
            ratio(point.gateway_ms, point.direct_ms),
            number(point.gateway_rate, ",.0f"),
            number(point.direct_rate, ",.0f"),
            ratio(point.gateway_rate, point.direct_rate),
            number(point.cpu_ms, ",.3f"),
            number(point.peak_mib, ",.0f"),
        )
    return made


def arguments() -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateway", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="200 domains, 5 running, 0.5 s a point"
    )
    parser.add_argument("--json", action="store_true", help="points as JSON instead of a table")
    parser.add_argument("--domains", type=int, help="with disks of ours (2000)")
    parser.add_argument("--running", type=int, help="of these, started and paused (50)")
    parser.add_argument("--disks", type=int, default=8, help="of each domain (8)")
    parser.add_argument("--plain", type=int, default=50, help="domains with plain files (50)")
    parser.add_argument("--volumes", type=int, help="domains whose volumes exist (all)")
    parser.add_argument("--clients", type=int, default=200, help="at a time (200)")
    parser.add_argument("--pollers", type=int, default=20, help="beside an attach (20)")
    parser.add_argument("--time", type=float, help="seconds of one point (2)")
    parser.add_argument(
        "--only", action="append", default=[], help="`all`, `attach`, or calls by how they begin"
    )
    parser.add_argument(
        "--uvloop", action="store_true", help="the gateway on uvloop, found in PYTHONPATH"
    )
    given = parser.parse_args()
    quick = given.quick
    given.domains = given.domains or (200 if quick else 2000)
    given.running = (5 if quick else 50) if given.running is None else given.running
    given.volumes = given.domains if given.volumes is None else given.volumes
    given.time = given.time or (0.5 if quick else 2.0)
    return given


@contextmanager
def running_host(sizes: argparse.Namespace, out: Console) -> Iterator[BenchHost]:
    """A host for the duration of a block."""
    with ExitStack() as stack:
        yield BenchHost(sizes, stack, out)


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    sizes = arguments()
    out = Console(stderr=sizes.json, width=None if sys.stdout.isatty() else 150, highlight=False)
    if not is_root():
        out.print("this runs a private libvirtd: run it as root")
        return 1
    points: list[Point] = []

    def wanted(what: str) -> bool:
        return not sizes.only or any(what.startswith(word) for word in sizes.only)

    with running_host(sizes, out) as host:
        memory = {"fresh": memory_of(host.gateway.pid)["now"]}
        memory["starting"] = memory_of(host.gateway.pid)["peak"]
        pid = host.gateway.pid
        points += with_peak(pid, measured(host, sizes, wanted))
        changes: dict[str, list[float]] = {}
        counted: dict[str, Counter[str]] = {}
        if wanted("attach") and host.ours[: sizes.running]:
            dom = host.ours[0]
            for pollers in (0, sizes.pollers):
                for count, to in {sizes.disks: dom, **host.growing}.items():
                    what = f"attach to a domain of {count} disks beside {pollers} pollers"
                    changes[what] = attaches(host, to, pollers, 10)
            counted = calls_of(host, dom)
        memory |= memory_of(host.gateway.pid)
    memory["peak"] = max([memory["starting"], memory["peak"], *(p.peak_mib or 0 for p in points)])
    load = os.getloadavg()
    if sizes.json:
        print(
            json.dumps(
                {
                    "load": load,
                    "points": [asdict(point) for point in points],
                    "attach_s": changes,
                    "calls": counted,
                    "rss_mib": memory,
                },
                indent=1,
            )
        )
        return 0
    out.print(
        f"{sizes.domains} domains of {sizes.disks} disks, {sizes.running} of them running, volumes "
        f"of {sizes.volumes}; {os.cpu_count()} CPUs, load {load[0]:.1f}"
    )
    out.print(table(points))
    for what, took in changes.items():
        out.print(f"{what}: p50 {_p50_ms(took):.0f} ms, most {max(took) * 1000:.0f} ms")
    for what, calls in counted.items():
        names = ", ".join(f"{name} {n}" if n > 1 else name for name, n in calls.items())
        out.print(f"{what}: {calls.total()} calls ({names})")
    out.print("gateway's memory: " + ", ".join(f"{k} {v:.0f} MiB" for k, v in memory.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
