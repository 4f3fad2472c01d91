"""Prometheus metrics of the VmVolume controller."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from csi.kubevirt.vmvolume.cache import Cache

BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class VmVolumeMetrics:
    """What one node's controller has done."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers them, beginning at zero."""
        self.reconciles = Counter(
            "virtlun_csi_vmvolume_reconciles",
            "Looks at a VmVolume by what came of it: a phase, none, or error.",
            ["result"],
            registry=registry,
        )
        self.event_seconds = Histogram(
            "virtlun_csi_vmvolume_event_seconds",
            "From the change that let a VmVolume be attached (its creation, or the claim's or the "
            "machine's change) to the event in the guest's ring.",
            buckets=BUCKETS_S,
            registry=registry,
        )
        self.seen_seconds = Histogram(
            "virtlun_csi_vmvolume_guest_seen_seconds",
            "From the same change to the guest's first READ CAPACITY.",
            buckets=BUCKETS_S,
            registry=registry,
        )
        self.forced = Counter(
            "virtlun_csi_vmvolume_forced_releases",
            "Disks that were taken away while the guest had them in use.",
            registry=registry,
        )


class PhaseCollector(Collector):
    """How many VmVolumes of this node are in which phase."""

    def __init__(self, cache: Cache, node: str) -> None:
        """Counts those of `node` in the cache."""
        self._cache = cache
        self._node = node

    def describe(self) -> Iterator[Metric]:
        """Yields nothing; collect does."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yields the gauge."""
        found = GaugeMetricFamily(
            "virtlun_csi_vmvolumes", "VmVolumes of this node by phase.", labels=["phase"]
        )
        counts = dict.fromkeys(("Pending", "Attached", "Releasing", "Failed"), 0)
        for volume in self._cache.volumes():
            if volume.status.node == self._node and volume.status.phase:
                counts[volume.status.phase] += 1
        for phase, count in counts.items():
            found.add_metric([phase], count)
        yield found
