"""Histograms of latencies: what is counted, in SPDK's form, and what people and Prometheus see."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from itertools import islice
from struct import unpack
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from plugin.gateway.latencies import Latencies, ask
from pydataplane.domain.histograms import Histograms
from pydataplane.errors import INVALID, NO_DATA, NO_DEVICE, RpcError
from tests.support.initiator import Initiator, connected
from tests.support.night import by_day
from tests.support.target import Target

VM = "vm-44444444-4444-4444-8444-444444444444"
QUIET = "vm-55555555-5555-4555-8555-555555555555"
SAMPLES_MAX = 100
"""Of `top`, until it shows what was read before."""


@pytest.fixture
def guest(target: Target) -> Iterator[Initiator]:
    """A driver of a disk, lvs0/data, that is target 0."""
    image = target.make_file("disk.img", 64 << 20)
    target.rpc("bdev_uring_create", filename=str(image), name="disk", block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="disk", lvs_name="lvs0")
    target.rpc("bdev_lvol_create", lvol_name="data", size_in_mib=4, lvs_name="lvs0")
    target.rpc("vhost_create_scsi_controller", ctrlr=VM)
    target.add_lun(VM, "lvs0/data", 0)
    with connected(target, VM) as guest:
        yield guest


def reads(guest: Initiator, count: int) -> None:
    for _ in range(count):
        guest.read(0, 1)


def counts(told: dict[str, Any]) -> tuple[int, ...]:
    """Returns the counts of a histogram's buckets."""
    data = b64decode(told["histogram"])
    return unpack(f"<{len(data) // 8}Q", data)


def test_each_operation_from_then_on_is_counted_until_it_is_ended(
    target: Target, guest: Initiator
) -> None:
    reads(guest, 3)
    with pytest.raises(RpcError, match="lvs0/data has no histogram: call bdev_enable") as refused:
        target.rpc("bdev_get_histogram", name="lvs0/data")
    assert refused.value.code == NO_DATA
    target.rpc("bdev_enable_histogram", name="lvs0/data", enable=True)
    reads(guest, 40)
    guest.write(0, bytes(512))
    told = target.rpc("bdev_get_histogram", name="lvs0/data")
    assert (told["granularity"], told["min_range"], told["max_range"]) == (7, 0, 57)
    assert told["tsc_rate"] == target.rpc("bdev_get_iostat")["tick_rate"]
    found = counts(told)
    assert (len(found), sum(found)) == (58 * 128, 41)
    # All of them take more than no time, and less than an hour.
    borders = {"name": "lvs0/data", "borders": [0, 3_600_000_000]}
    assert target.rpc("bdev_get_histogram_borders", **borders) == {"borders_count": [0, 41, 41]}
    (only,) = target.rpc("virtlun_bdev_get_latencies", borders_ns=[0])
    by_operation = {each["operation"]: each["counts"] for each in only["operations"]}
    assert (by_operation["read"], by_operation["write"]) == ([0, 40], [0, 1])
    # The statistics begin anew, and it does not.
    target.rpc("bdev_reset_iostat")
    reads(guest, 1)
    assert sum(counts(target.rpc("bdev_get_histogram", name="lvs0/data"))) == 42
    target.rpc("bdev_enable_histogram", name="lvs0/data", enable=False)
    assert target.rpc("virtlun_bdev_get_latencies", borders_ns=[]) == []


def test_one_operation_in_few_buckets(target: Target, guest: Initiator) -> None:
    few = {"granularity": 2, "min_nsec": 1000, "max_nsec": 1_000_000}
    target.rpc("bdev_enable_histogram", name="lvs0/data", enable=True, opc="write", **few)
    reads(guest, 5)
    guest.write(0, bytes(512))
    told = target.rpc("bdev_get_histogram", name="lvs0/data")
    found = counts(told)
    assert len(found) == (told["max_range"] - told["min_range"] + 1) * 4
    assert sum(found) == 1
    # Ten times that it doubles, of a microsecond: a millisecond.
    assert told["max_range"] - told["min_range"] == 10
    (only,) = target.rpc("virtlun_bdev_get_latencies", names=["lvs0/data"], borders_ns=[])
    assert only["operations"] == [{"operation": "write", "counts": [1]}]


@pytest.mark.parametrize(
    ("method", "params", "code", "says"),
    [
        ("bdev_enable_histogram", {"name": "none", "enable": True}, NO_DEVICE, "none"),
        ("bdev_enable_histogram", {"name": "n0", "enable": True, "granularity": 11}, INVALID, "11"),
        (
            "bdev_enable_histogram",
            {"name": "n0", "enable": True, "min_nsec": 2000, "max_nsec": 1000},
            INVALID,
            "the shortest latency is not below the longest",
        ),
        ("bdev_get_histogram_borders", {"name": "n0", "borders": [2, 1]}, INVALID, "ascend"),
        ("virtlun_bdev_get_latencies", {"borders_ns": [0] * 1001}, INVALID, "1001 borders"),
        ("virtlun_bdev_get_latencies", {"names": ["n0"], "borders_ns": []}, NO_DATA, "n0 has no"),
    ],
)
def test_what_cannot_be_is_refused(
    target: Target, method: str, params: dict[str, Any], code: int, says: str
) -> None:
    target.rpc("bdev_null_create", name="n0", num_blocks=2048, block_size=512)
    with pytest.raises(RpcError, match=says) as refused:
        target.rpc(method, **params)
    assert refused.value.code == code


def virtlun(target: Target, *words: str) -> list[str]:
    program = "from plugin.cli import main; main(prog_name='virtlun')"
    return [sys.executable, "-c", program, "--socket", str(target.rpc_socket), *words]


@by_day("SIGTERM")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM], ids=["^C", "SIGTERM"])
def test_top_shows_the_latencies_of_vms_and_ends_counting(
    target: Target, guest: Initiator, ending: signal.Signals
) -> None:
    command = virtlun(target, "top", "--interval", "0.3", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        try:
            top.stdout.readline()
            reads(guest, 20)
            for line in islice(top.stdout, SAMPLES_MAX):
                rates = json.loads(line)
                row = rates["bdevs"]["lvs0/data"]
                if row["p50_ns"] is not None:
                    break
            assert 0 < row["p50_ns"] <= row["p99_ns"]
            assert row["share"] == 1 and row["depth"] > 0
            (use,) = row["uses"]
            assert (use["controller"], use["lun"]) == (VM, "scsi 0")
            vm = rates["vms"][use["uuid"]]
            assert (vm["name"], VM) == (use["vm"], f"vm-{use['uuid']}")
            assert (vm["p50_ns"], vm["p99_ns"]) == (row["p50_ns"], row["p99_ns"])
            assert vm["disks"] == [{"volume": "lvs0/data", "lun": "scsi 0"}]
        finally:
            top.send_signal(ending)
        top.stdout.read()
    assert top.returncode == 0
    assert target.rpc("virtlun_bdev_get_latencies", borders_ns=[]) == []


def test_top_has_a_line_for_each_vm_and_names_the_noisiest(
    target: Target, guest: Initiator
) -> None:
    target.rpc("bdev_lvol_create", lvol_name="other", size_in_mib=4, lvs_name="lvs0")
    target.rpc("vhost_create_scsi_controller", ctrlr=QUIET)
    target.add_lun(QUIET, "lvs0/other", 2)
    command = virtlun(target, "top", "--interval", "1", "--count", "2")
    with (
        Initiator(target.vhost_dir / QUIET) as quiet,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top,
    ):
        quiet.send("connect")
        quiet.ready(2)
        while top.poll() is None:
            for _ in range(8):
                guest.read(0, 128)
            quiet.read(0, 1, target=2)
        assert top.stdout is not None
        shown = top.stdout.read()
    assert top.returncode == 0
    last = shown[shown.rindex("REACTOR") :].splitlines()
    assert last[0].split() == ["REACTOR", "CPU", "NODE", "BUSY", "IDLE", "QUEUES"]
    busy, idle = re.findall(r"([\d.]+) %", last[1])
    assert float(busy) + float(idle) == pytest.approx(100, abs=0.11)
    at = next(index for index, line in enumerate(last) if line.startswith("VM"))
    assert last[at].split() == ["VM", "LUN", "VOLUME", "IO/S", "P50", "P99", "DEPTH", "SHARE"]
    (first, second), shares = last[at + 1 : at + 3], []
    for line, vm, disk in (first, VM, "scsi 0 +lvs0/data"), (second, QUIET, "scsi 2 +lvs0/other"):
        duration = r"\d+ µs|\d+\.\d m?s"
        found = re.fullmatch(
            rf"{vm.removeprefix('vm-')} +{disk} +(\d+) +(?:{duration}) +(?:{duration})"
            r" +\d+\.\d +(\d+) %",
            line,
        )
        assert found, line
        assert int(found[1]) > 0
        shares.append(int(found[2]))
    assert shares[0] > 80 and sum(shares) in {99, 100, 101}
    assert last[at + 3 : at + 6 : 2] == ["", ""]
    noisiest = f"Noisiest neighbour: {VM.removeprefix('vm-')}, {shares[0]} % of what the VMs do"
    assert last[at + 4] == noisiest


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Returns what a page for Prometheus says, by name, volume and the other labels."""
    words = ("volume", "operation", "le", "vm", "lun", "lvstore", "state", "target")
    return {
        (
            sample.name,
            *(sample.labels[word] for word in words if word in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_is_told_what_was_counted(target: Target, guest: Initiator) -> None:
    command = virtlun(target, "metrics", "--listen", "127.0.0.1:0")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stderr is not None
            url = serving.stderr.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+/metrics", url), url

            def scrape() -> dict[tuple[str, ...], float]:
                with urllib.request.urlopen(url) as answer:
                    return samples(answer.read().decode())

            first = scrape()
            assert first["virtlun_target_up", "default"] == 1
            reads(guest, 7)
            second = scrape()
        finally:
            serving.send_signal(signal.SIGTERM)
    assert serving.returncode == 0
    data = ("lvs0/data",)
    operations = ("virtlun_bdev_operations_total", *data, "read", "default")
    assert second[operations] - first[operations] == 7
    moved = ("virtlun_bdev_bytes_total", *data, "read", "default")
    assert second[moved] - first[moved] == 7 * 512
    # From the first scrape on latencies are counted.
    assert second["virtlun_bdev_latency_seconds_bucket", *data, "read", "+Inf", "default"] == 7
    assert second["virtlun_bdev_size_bytes", *data, "default"] == 4 << 20
    assert second["virtlun_bdev_flush_error", *data, "default"] == 0
    vm = [key for key in second if key[0] == "virtlun_bdev_used"]
    assert [(key[1], key[3]) for key in vm] == [("lvs0/data", "scsi 0")]
    free = second["virtlun_lvstore_free_bytes", "lvs0", "default"]
    assert 0 < free < second["virtlun_lvstore_size_bytes", "lvs0", "default"] <= 64 << 20
    assert second["virtlun_reactor_seconds_total", "busy", "default"] > 0


def test_it_is_printed_once_for_a_file_of_node_exporter(target: Target) -> None:
    target.rpc("bdev_null_create", name="n0", num_blocks=2048, block_size=512)
    done = subprocess.run(
        virtlun(target, "metrics", "--no-latencies"),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert samples(done.stdout)["virtlun_bdev_size_bytes", "n0", "default"] == 1 << 20
    assert target.rpc("virtlun_bdev_get_latencies", borders_ns=[]) == []


def test_they_are_put_together_in_the_bins_of_a_domains_xml(
    target: Target, guest: Initiator
) -> None:
    far = 1 << 62  # nanoseconds that no operation takes
    one: Histograms = (("read", (0, 1, 10**12, far)), ("flush", (0, far)))
    other: Histograms = (("read", (0, far)),)
    wanted = [("lvs0/data", one), ("lvs0/data", other), ("lvs0/gone", other)]
    # None is counted: from now on it is.
    assert ask(target.client, wanted) == {}
    reads(guest, 3)
    assert ask(target.client, wanted) == {
        ("lvs0/data", one): (
            Latencies("read", (0, 1, 10**12, far), (0, 3, 0, 0)),
            Latencies("flush", (0, far), (0, 0)),
        ),
        ("lvs0/data", other): (Latencies("read", (0, far), (3, 0)),),
    }
    reads(guest, 2)  # they count on
    (read,) = ask(target.client, [("lvs0/data", other)])["lvs0/data", other]
    assert read.counts == (5, 0)
    assert ask(target.client, []) == {}
