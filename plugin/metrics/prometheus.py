"""Metrics of the targets of a host in Prometheus' format, asked for at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plugin.metrics.latencies import Counting
from plugin.metrics.sample import Sample, sample
from plugin.targets import TargetAddress
from pydataplane.client import Client
from pydataplane.errors import TargetError

BORDERS_S = (
    *(step * scale for scale in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0) for step in (1, 2, 5)),
    10.0,
    30.0,
)
"""Upper bounds of the histogram's buckets, in seconds."""

OPERATIONS = {
    "read": ("num_read_ops", "bytes_read", "read_latency_ticks"),
    "write": ("num_write_ops", "bytes_written", "write_latency_ticks"),
    "unmap": ("num_unmap_ops", "bytes_unmapped", "unmap_latency_ticks"),
    "flush": ("num_flush_ops", None, "flush_latency_ticks"),
    "write_zeroes": ("num_write_zeroes_ops", "bytes_zeroed", None),
}
"""By operation its counters in bdev_get_iostat: how many, bytes, ticks."""

ERRORS = (
    "OutOfRange",
    "BadLength",
    "ReadOnly",
    "NoSpace",
    "ReadMedium",
    "WriteMedium",
    "Flush",
    "Unsupported",
    "Removed",
    "Aborted",
    "Resources",
    "Guard",
    "AppTag",
    "RefTag",
    "Miscompare",
    "Reserved",
)
"""The kinds of errors in bdev_get_iostat, which has only those that happened.

Here each is counted from 0 on: Prometheus takes no rate of what was not there before, so the first
errors of a kind would go unseen.
"""

BDEV = ("target", "bdev", "volume")


class TargetCollector(Collector):
    """What the targets have counted."""

    def __init__(
        self, targets: Sequence[TargetAddress], timeout_s: float, *, histograms: bool
    ) -> None:
        """Asks these targets, and waits so long for each answer.

        With `histograms` it has each bdev that it meets count its latencies.
        """
        self._targets = targets
        self._timeout_s = timeout_s
        self._counting: dict[Path, Counting] = {}
        self._histograms = histograms

    def describe(self) -> Iterator[Metric]:
        """Yields nothing: asking the targets at registration could fail."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; of a target that does not answer, only that it does not."""
        up = GaugeMetricFamily(
            "virtlun_target_up", "Whether the target answers.", labels=["target"]
        )
        families = Families()
        for target in self._targets:
            try:
                self._add(families, target)
            except TargetError:
                up.add_metric([target.label], 0)
            else:
                up.add_metric([target.label], 1)
        yield up
        yield from families.all()

    def _add(self, families: Families, target: TargetAddress) -> None:
        client = Client(target.rpc_socket, self._timeout_s)
        taken = sample(client, [round(border * 1e9) for border in BORDERS_S])
        if self._histograms:
            counting = self._counting.setdefault(target.rpc_socket, Counting(client))
            counting.begin(taken.bdevs, taken.latencies)
        lvstores = client.call("bdev_lvol_get_lvstores")
        # All or nothing of a target: nothing is asked from here on.
        families.add_sample(target.label, taken)
        families.add_bdevs(target.label, taken)
        for lvstore in lvstores:
            labels = [target.label, lvstore["name"]]
            cluster = lvstore["cluster_size"]
            families.lvstore_size.add_metric(labels, lvstore["total_data_clusters"] * cluster)
            families.lvstore_free.add_metric(labels, lvstore["free_clusters"] * cluster)


class Families:
    """The metrics of all targets of one scrape."""

    def __init__(self) -> None:
        self.operations = CounterMetricFamily(
            "virtlun_bdev_operations", "Operations that succeeded.", labels=(*BDEV, "operation")
        )
        self.bytes = CounterMetricFamily(
            "virtlun_bdev_bytes", "Bytes that they moved.", labels=(*BDEV, "operation")
        )
        self.seconds = CounterMetricFamily(
            "virtlun_bdev_operation_time_seconds",
            "Sum of their latencies: its rate is how many are in flight on average.",
            labels=(*BDEV, "operation"),
        )
        self.latency = HistogramMetricFamily(
            "virtlun_bdev_latency_seconds",
            "Latencies since the bdev began to count them.",
            labels=(*BDEV, "operation"),
        )
        self.errors = CounterMetricFamily(
            "virtlun_bdev_errors", "Operations that failed.", labels=(*BDEV, "error")
        )
        self.size = GaugeMetricFamily("virtlun_bdev_size_bytes", "Size.", labels=BDEV)
        self.flush_error = GaugeMetricFamily(
            "virtlun_bdev_flush_error",
            "Whether every flush fails, as one did, until somebody looks after it.",
            labels=BDEV,
        )
        self.use = GaugeMetricFamily(
            "virtlun_bdev_used", "1 for each disk of a VM.", labels=(*BDEV, "vm", "lun")
        )
        self.reactor = CounterMetricFamily(
            "virtlun_reactor_seconds",
            "Time of a reactor by what it does: busy, idle (it polls for nothing) or sleep.",
            labels=("target", "reactor", "state"),
        )
        self.lvstore_size = GaugeMetricFamily(
            "virtlun_lvstore_size_bytes", "Room for data.", labels=("target", "lvstore")
        )
        self.lvstore_free = GaugeMetricFamily(
            "virtlun_lvstore_free_bytes", "Room that is free.", labels=("target", "lvstore")
        )

    def all(self) -> Iterable[Metric]:
        """Returns each of them."""
        return vars(self).values()

    def add_sample(self, target: str, taken: Sample) -> None:
        """Adds what a target has counted; `target` is what it is called."""
        for reactor in taken.reactors:
            for state in ("busy", "idle", "sleep"):
                labels = [target, str(reactor["index"]), state]
                self.reactor.add_metric(labels, reactor[f"{state}_ns"] / 1e9)
        for name, counters in taken.bdevs.items():
            bdev = [target, name, taken.aliases.get(name, name)]
            for operation, (number, moved, ticks) in OPERATIONS.items():
                labels = [*bdev, operation]
                self.operations.add_metric(labels, counters.get(number, 0))
                if moved:
                    self.bytes.add_metric(labels, counters.get(moved, 0))
                if ticks:
                    self.seconds.add_metric(labels, counters.get(ticks, 0) / taken.tick_rate)
            errors = dict.fromkeys(ERRORS, 0) | counters.get("io_error", {})
            for kind, count in errors.items():
                self.errors.add_metric([*bdev, kind], count)
            for operation, counts in (taken.latencies or {}).get(name, {}).items():
                borders = [*(f"{border:g}" for border in BORDERS_S), "+Inf"]
                buckets = list(zip(borders, counts, strict=True))
                self.latency.add_metric([*bdev, operation], buckets, sum_value=None)

    def add_bdevs(self, target: str, taken: Sample) -> None:
        """Adds what the bdevs of a target are, and whose disks."""
        for bdev in taken.infos:
            name = bdev["name"]
            labels = [target, name, taken.aliases.get(name, name)]
            self.size.add_metric(labels, bdev["num_blocks"] * bdev["block_size"])
            self.flush_error.add_metric(labels, int(bool(bdev.get("flush_error"))))
            for use in taken.uses.get(name, ()):
                self.use.add_metric([*labels, use.vm, use.lun], 1)
