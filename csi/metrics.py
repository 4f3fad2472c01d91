"""Prometheus metrics: operations as they happen, volumes and capacity when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from csi.volumes import OwnedVolumes

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 100)
LABELS = ["lvstore", "pool"]
"""Of an lvstore the first alone; a pool of Ceph, of which each node tells, has its UUID, too."""


class Metrics:
    """The operations of one driver."""

    def __init__(self) -> None:
        """Begins at zero, in a registry of its own."""
        self.registry = CollectorRegistry()
        self._operations = Counter(
            "virtlun_csi_operations",
            "CSI calls by method and gRPC code.",
            ["method", "code"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "virtlun_csi_operation_seconds",
            "Time to answer a CSI call.",
            ["method"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )

    def observe(self, method: str, code: str, seconds: float) -> None:
        """Counts one call."""
        self._operations.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)


class VolumeCollector(Collector):
    """What the targets have, asked at each scrape."""

    def __init__(self, volumes: OwnedVolumes) -> None:
        """Asks through `volumes`."""
        self._volumes = volumes

    def describe(self) -> Iterator[Metric]:
        """Yields nothing: asking the target at registration could fail."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yields the gauges; of a target that does not answer, only that it does not."""
        up = GaugeMetricFamily(
            "virtlun_csi_target_up", "Whether a target answers.", labels=["socket"]
        )
        count = GaugeMetricFamily("virtlun_csi_volumes", "Volumes of the driver.", labels=LABELS)
        size = GaugeMetricFamily("virtlun_csi_volumes_bytes", "Their sizes, bytes.", labels=LABELS)
        total = GaugeMetricFamily(
            "virtlun_csi_lvstore_bytes", "Size of an lvstore, bytes.", labels=LABELS
        )
        free = GaugeMetricFamily(
            "virtlun_csi_lvstore_free_bytes", "Free bytes of an lvstore.", labels=LABELS
        )
        mismatches = GaugeMetricFamily(
            "virtlun_csi_lvstore_checksum_mismatches",
            "Reads of an lvstore with checksums that met other data than was written, since it was "
            "loaded.",
            labels=["lvstore"],
        )
        for answer in self._volumes.by_store():
            up.add_metric([str(answer.client.path)], int(answer.error is None))
            for held in answer.value or ():
                labels = [held.store.name]
                if held.store.is_pool:
                    labels.append(held.store.uuid)
                count.add_metric(labels, len(held.volumes))
                size.add_metric(labels, sum(owned.volume.size for owned in held.volumes))
                total.add_metric(labels, held.store.total)
                free.add_metric(labels, held.store.free)
                if held.mismatches is not None:
                    mismatches.add_metric(labels, held.mismatches)
        yield from (up, count, size, total, free, mismatches)
