"""csi-sanity, the specification's own test of drivers, against the real driver and target."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from pydataplane.volumes import Volumes
from tests.kubernetes.tools.sanity import csi_sanity
from tests.support.ceph import POOL, cluster, lacks
from tests.support.csi import MIB, NOTHING, Driver, results, running
from tests.target.conftest import MakeTarget

DEADLINE_S = 240.0
# What the driver does not claim; a skip for another reason fails the test.
NOT_CLAIMED = (
    "ControllerGetVolumeHealth",
    "ControllerListVolumeHealth",
    "ControllerPublish",
    "ControllerUnpublish",
    "Controller Publish",
    "NodeGetStorageHealth",
    "SNAPSHOT_ACCESSIBILITY_CONSTRAINTS",  # its spec compares what no two messages have the same
)
CLAIMED_SPECS = 87
MUTABLE = 'iops: "1000"\nthroughput: "100"\n'


@pytest.fixture(scope="module")
def program() -> Path:
    """csi-sanity, built where it is not there yet."""
    return csi_sanity()


@pytest.fixture
def driver(make_target: MakeTarget) -> Iterator[Driver]:
    """A running driver with an lvstore of 4 GiB."""
    with running(make_target().start(), 4096) as driver:
        yield driver


@pytest.fixture
def on_pool(make_target: MakeTarget) -> Iterator[Driver]:
    """A running driver with a pool of Ceph."""
    with cluster() as ceph:
        target = make_target("--rbd").start()
        Volumes(target.client).add_pool("ceph0", POOL, conf=ceph.conf)
        driver = Driver(target, target.directory).start()
        yield driver
        status = driver.stop()
        driver.clear()
        assert status == 0, driver.words()


@pytest.mark.root
@pytest.mark.parametrize(
    ("kind", "parameter"),
    [
        ("mount", "fsType: xfs"),
        pytest.param("mount", "fsType: ext4", marks=pytest.mark.nightly),
        pytest.param("block", "", marks=pytest.mark.nightly),
        pytest.param("mount", "face: vhost", marks=pytest.mark.nightly),
    ],
)
def test_csi_sanity(
    program: Path, driver: Driver, kind: str, parameter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(program, driver, kind, f"lvstore: lvs0\n{parameter}\n", capsys)


@pytest.mark.root
@pytest.mark.nightly
@pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}")
@pytest.mark.parametrize("kind", ["mount", "block"])
def test_csi_sanity_on_a_pool(
    program: Path, on_pool: Driver, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(program, on_pool, kind, "lvstore: ceph0\nfsType: xfs\n", capsys)


def run(
    program: Path, driver: Driver, kind: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs csi-sanity on a class with these parameters; all that is claimed has to pass."""
    directory = driver.directory
    parameters = directory / "parameters.yaml"
    parameters.write_text(text)
    mutable = directory / "mutable.yaml"
    mutable.write_text(MUTABLE)
    report = directory / "report.xml"
    done = subprocess.run(
        [
            str(program),
            *("--csi.endpoint", f"unix://{driver.socket}"),
            *("--csi.mountdir", str(directory / "mnt")),
            *("--csi.stagingdir", str(directory / "stage")),
            *("--csi.testvolumesize", str(320 * MIB)),
            *("--csi.testvolumeexpandsize", str(400 * MIB)),
            *("--csi.testvolumeparameters", str(parameters)),
            *("--csi.testvolumemutableparameters", str(mutable)),
            *("--csi.testvolumeaccesstype", kind),
            *("--csi.junitfile", str(report)),
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    counts, reasons = results(done.stdout), _skips(report)
    with capsys.disabled():  # on stderr, which is the terminal's for a worker of pytest, too
        lines = [f"\ncsi-sanity {kind} {' '.join(text.split())}: {counts}"]
        lines += [f"  {number:2} skipped: {reason}" for reason, number in reasons.most_common()]
        print("\n".join(lines), file=sys.stderr, flush=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert (counts["passed"], counts["failed"]) == (CLAIMED_SPECS, 0)
    assert [reason for reason in reasons if not reason.startswith(NOT_CLAIMED)] == []
    assert driver.left() == NOTHING


def _skips(report: Path) -> Counter[str]:
    """Returns how many specs were skipped for which reason."""
    found = (case.find("skipped") for case in ET.parse(report).iter("testcase"))
    messages = [each.get("message", "") for each in found if each is not None]
    reasons = [message.removeprefix("skipped - ") for message in messages]
    return Counter(reason for reason in reasons if reason != "pending")
