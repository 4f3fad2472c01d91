"""A real Prometheus scrapes `virtlun metrics`, and answers each query of the examples."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.support import prometheus
from tests.support.examples import EXAMPLES
from tests.support.initiator import Initiator, connected
from tests.support.lossy_disk import MIB, fails_to_flush, lossy_disk, small_file_system
from tests.support.ports import free_port
from tests.support.target import Target
from tests.support.wait import until

pytestmark = pytest.mark.nightly

FOLDER = EXAMPLES / "monitoring"
VM = "vm-44444444-4444-4444-8444-444444444444"
READ = bytes([0x28, *bytes(7), 1, 0])
"""READ(10) of the first block."""
CHECK_CONDITION = 2
SERIES = {
    'target_up{instance="h", target="default"}': "1 0x20",
    'lvstore_free_bytes{instance="h", lvstore="lvs0"}': "50 9x20",
    'lvstore_size_bytes{instance="h", lvstore="lvs0"}': "100x21",
    'bdev_flush_error{instance="h", volume="lvs0/v"}': "0x5 1x16",
    'reactor_seconds_total{instance="h", reactor="0", state="busy"}': "0+58x21",
    'reactor_seconds_total{instance="h", reactor="0", state="idle"}': "0+2x21",
    'bdev_errors_total{instance="h", volume="lvs0/v", error="NoSpace"}': "0x10 3x11",
    **{
        f'bdev_latency_seconds_bucket{{volume="lvs0/v", operation="read", le="{border}"}}': counts
        for border, counts in (("0.5", "0+90x21"), ("1", "0+100x21"), ("+Inf", "0+100x21"))
    },
}
"""What is counted, without `virtlun_`, in promtool's form: a value a minute."""

FIRING = {
    "VirtlunTargetDown": (1, 2),
    "VirtlunLvstoreFull": (5, 6),
    "VirtlunFlushError": (5, 6),
    "VirtlunReactorBusy": (9, 20),
    "VirtlunErrors": (9, 12),
    "VirtlunSlow": (4, 20),
}
"""The alerts, with a minute at which each does not fire yet, and one at which it does."""


FAILED, FLUSHES = "Failed operations a second", "Volumes whose flushes fail"
"""Panels of what is wrong: there is nothing."""


def panels() -> dict[str, list[str]]:
    """Returns what each panel of the dashboard asks, of all hosts."""
    loaded = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return {
        panel["title"]: [
            query["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
            for query in panel["targets"]
        ]
        for panel in loaded
    }


def answered(guest: Initiator, url: str, query: str) -> bool:
    """Whether Prometheus finds something, once more was read."""
    guest.read(0, 1)
    return bool(ask(url, query))


def ask(url: str, query: str) -> list[dict[str, Any]]:
    """Returns what Prometheus finds."""
    with urllib.request.urlopen(
        f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    ) as told:
        answer = json.load(told)
    assert answer["status"] == "success", answer
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def health(url: str) -> dict[str, str]:
    """Returns whether each alert's rule can be evaluated."""
    with urllib.request.urlopen(f"{url}/api/v1/rules") as told:
        groups = json.load(told)["data"]["groups"]
    return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}


@pytest.fixture
def served(target: Target) -> Iterator[int]:
    """The port of the metrics of a target with a VM's disk that is read from."""
    image = target.make_file("disk.img", 64 << 20)
    target.rpc("bdev_uring_create", filename=str(image), name="disk", block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="disk", lvs_name="lvs0")
    target.rpc("bdev_lvol_create", lvol_name="data", size_in_mib=4, lvs_name="lvs0")
    target.rpc("vhost_create_scsi_controller", ctrlr=VM)
    target.add_lun(VM, "lvs0/data", 0)
    program = "from plugin.cli import main; main(prog_name='virtlun')"
    words = ["--socket", str(target.rpc_socket), "metrics", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *words], stderr=subprocess.PIPE, text=True
    ) as serving:
        try:
            assert serving.stderr is not None
            found = re.search(r":([0-9]+)/", serving.stderr.readline())
            assert found
            yield int(found[1])
        finally:
            serving.send_signal(signal.SIGTERM)


@contextmanager
def scraping(served: int, folder: Path) -> Iterator[str]:
    """Runs a Prometheus of the example's configuration, each second; yields its URL."""
    programs = prometheus.programs()
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{served}"]}]
    config["rule_files"] = [str(FOLDER / "alerts.yml")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    subprocess.run(
        [programs / "promtool", "check", "config", FOLDER / "prometheus.yml"], check=True
    )
    at = f"127.0.0.1:{free_port()}"
    command = [
        str(programs / "prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={at}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            up = "virtlun_target_up == 1"
            until(lambda: ask(f"http://{at}", up), "a target that is scraped", not_yet=OSError)
            yield f"http://{at}"
        finally:
            server.terminate()


def test_each_panel_and_alert_is_answered(target: Target, served: int, tmp_path: Path) -> None:
    with scraping(served, tmp_path) as url, connected(target, VM) as guest:

        def counted() -> bool:
            guest.read(0, 1)
            found = ask(url, 'virtlun_bdev_latency_seconds_bucket{le="+Inf"}')
            return any(each["value"][1] != "0" for each in found)

        until(counted, "latencies in two scrapes")
        for title, queries in panels().items():
            for query in queries:
                if title in {FAILED, FLUSHES}:
                    assert ask(url, query) == []
                else:
                    until(partial(answered, guest, url, query), title)
        # A scrape may fail that comes too late.
        (vm,) = until(lambda: ask(url, "virtlun_bdev_used"), "the volume")
        assert vm["metric"]["volume"] == "lvs0/data"
        healthy = dict.fromkeys(FIRING, "ok")
        until(lambda: health(url) == healthy, "rules that were evaluated")


@pytest.mark.root
def test_what_fails_once_is_shown(
    target: Target, served: int, scratch: Path, tmp_path: Path
) -> None:
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
    target.rpc("bdev_error_create", base_name="m0")
    target.attach("vm-0", "EE_m0")
    with (
        small_file_system(scratch / "small") as directory,
        lossy_disk(directory) as disk,
        scraping(served, tmp_path) as url,
        ExitStack() as stack,
    ):
        target.rpc("bdev_aio_create", name="d0", filename=disk.device, block_size=512)
        target.attach("vm-1", "d0")
        failing, losing = (
            stack.enter_context(connected(target, name)) for name in ("vm-0", "vm-1")
        )
        for name in ("EE_m0", "d0"):
            until(
                partial(ask, url, f'virtlun_bdev_flush_error{{volume="{name}"}} == 0'),
                "a disk that is scraped while nothing of it has failed",
            )
        inject = {"name": "EE_m0", "io_type": "read", "error_type": "failure", "num": 1}
        target.rpc("bdev_error_inject_error", **inject)
        assert failing.cdb(READ, data_in_len=512)["status"] == CHECK_CONDITION
        assert failing.cdb(READ, data_in_len=512)["status"] == 0
        disk.lose()
        for lba in range(0, 8 * MIB // 512, 2048):
            losing.write(lba, bytes([7]) * MIB)
        assert fails_to_flush(losing)
        ((failed,), (flushes,)) = panels()[FAILED], panels()[FLUSHES]

        def errors() -> dict[tuple[str, str], float]:
            return {
                (one["metric"]["volume"], one["metric"]["error"]): float(one["value"][1])
                for one in ask(url, failed)
            }

        until(lambda: len(errors()) == 2, "both in the panel of failed operations")
        assert errors().keys() == {("EE_m0", "ReadMedium"), ("d0", "Flush")}
        (shown,) = until(lambda: ask(url, flushes), "one in the panel of flushes")
        assert (shown["metric"]["volume"], shown["value"][1]) == ("d0", "1")
        firing = 'ALERTS{alertstate="firing", alertname="%s", volume="%s"}'
        for alert, volume in ("Errors", "EE_m0"), ("Errors", "d0"), ("FlushError", "d0"):
            until(partial(ask, url, firing % (f"Virtlun{alert}", volume)), f"{alert} of {volume}")
        target.rpc("virtlun_bdev_clear_flush_error", name="d0")
        until(lambda: ask(url, flushes) == [], "an empty panel of flushes")


@pytest.mark.parametrize("alert", FIRING)
def test_an_alert_fires_when_it_should(alert: str, tmp_path: Path) -> None:
    """promtool finds fault with a test that expects no alert where there is one."""
    promtool = prometheus.programs() / "promtool"
    for minute, fires in zip(FIRING[alert], (False, True), strict=True):
        given = [{"series": f"virtlun_{name}", "values": values} for name, values in SERIES.items()]
        none = [{"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": []}]
        test = {"interval": "1m", "input_series": given, "alert_rule_test": none}
        rules = {"rule_files": [str(FOLDER / "alerts.yml")], "evaluation_interval": "1m"}
        (tmp_path / "test.yml").write_text(yaml.safe_dump({**rules, "tests": [test]}))
        told = subprocess.run(
            [promtool, "test", "rules", tmp_path / "test.yml"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (told.returncode != 0) == fires, (minute, told.stdout, told.stderr)
        assert (f'alertname="{alert}"' in told.stdout + told.stderr) == fires
