"""A run of Kubernetes' storage suite is good only if each spec passed or has a reason not to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # comes with lightkube

from tests.kubernetes.e2e.runs import CONDITIONS, HERE, RUNS
from tests.kubernetes.e2e.verdict import SKIPS, Skips, Verdict, VerdictError, read

LIST = """\
not_run:
  - {specs: 'Disruptive', why: it needs SSH}
skipped:
  - {says: 'not support snapshots', why: there are none}
  - {says: 'not support rain', why: the first only, runs: [first]}
  - {says: 'not support snow', why: only when it is cold, when: cold}
"""


def spec(name: str, state: str = "passed", said: str = "", kind: str = "It") -> dict[str, Any]:
    """Returns an entry of Ginkgo's report."""
    return {
        "ContainerHierarchyTexts": ["External Storage", "volumes"],
        "LeafNodeType": kind,
        "LeafNodeText": name,
        "State": state,
        "Failure": {"Message": said} if said else None,
    }


def verdict(
    tmp_path: Path,
    *specs: dict[str, Any],
    run: str = "first",
    cold: bool = False,
    focus: str = "External",
    succeeded: bool = True,
    special: list[str] | None = None,
) -> Verdict:
    """Returns what is made of a report."""
    (tmp_path / "skips.yaml").write_text(LIST)
    report = tmp_path / "report.json"
    suite = {
        "SuiteSucceeded": succeeded,
        "SpecialSuiteFailureReasons": special,
        "SpecReports": specs,
    }
    report.write_text(json.dumps([suite]))
    skips = Skips.read(run, {"cold": lambda: cold}, tmp_path / "skips.yaml")
    return read(report, focus, skips)


def test_counts(tmp_path: Path) -> None:
    found = verdict(
        tmp_path,
        spec("writes"),
        spec("reads"),
        spec("restarts [Disruptive]", "skipped"),
        spec("snaps", "skipped", "Driver x does not support snapshots - skipping"),
        spec("", kind="BeforeSuite"),
    )
    assert (found.passed, found.failed, found.unlisted.total()) == (2, [], 0)
    assert found.skipped == {"it needs SSH": 1, "there are none": 1}
    assert found.good


def test_a_failure_has_its_words(tmp_path: Path) -> None:
    found = verdict(tmp_path, spec("writes"), spec("reads", "failed", "no pod"))
    assert found.failed == ["External Storage volumes reads (failed): no pod"]
    assert not found.good


@pytest.mark.parametrize("state", ["panicked", "aborted", "interrupted", "timedout"])
def test_each_other_end_is_a_failure(tmp_path: Path, state: str) -> None:
    assert verdict(tmp_path, spec("writes"), spec("reads", state)).failed


def test_what_fails_around_the_specs_counts(tmp_path: Path) -> None:
    found = verdict(tmp_path, spec("writes"), spec("", "failed", "no node", "BeforeSuite"))
    assert not found.good
    assert not verdict(tmp_path, spec("writes"), succeeded=False).good
    assert not verdict(tmp_path, spec("writes"), special=["Suite Timeout Elapsed"]).good


def test_a_skip_that_is_not_listed_is_not_good(tmp_path: Path) -> None:
    found = verdict(tmp_path, spec("writes"), spec("clones", "skipped", "no clones"))
    assert found.unlisted == {"no clones": 1}
    assert not found.good
    found = verdict(tmp_path, spec("writes"), spec("clones", "skipped"))
    assert not found.good, "skipped without a word"
    found = verdict(tmp_path, spec("writes"), spec("clones", "pending"))
    assert not found.good, "pending upstream"


def test_a_reason_may_be_for_some_runs_or_machines(tmp_path: Path) -> None:
    rain = spec("rain", "skipped", "it does not support rain")
    snow = spec("snow", "skipped", "it does not support snow")
    assert verdict(tmp_path, spec("writes"), rain).good
    assert not verdict(tmp_path, spec("writes"), rain, run="second").good
    assert verdict(tmp_path, spec("writes"), snow, cold=True).good
    assert not verdict(tmp_path, spec("writes"), snow).good


def test_what_is_out_of_focus_is_no_part_of_the_run(tmp_path: Path) -> None:
    found = verdict(tmp_path, spec("writes"), spec("reads", "skipped"), focus="writes")
    assert (found.passed, found.unlisted.total()) == (1, 0)


def test_nothing_passed_is_not_good(tmp_path: Path) -> None:
    assert not verdict(tmp_path).good
    with pytest.raises(VerdictError, match="no report"):
        read(tmp_path / "none.json", "", Skips((), ()))


@pytest.mark.parametrize(
    "entry",
    ["{specs: x}", "{specs: x, why: y, then: z}", "{specs: x, why: y, when: warm}"],
)
def test_a_list_with_a_mistake_is_refused(tmp_path: Path, entry: str) -> None:
    file = tmp_path / "skips.yaml"
    file.write_text(f"not_run: [{entry}]\nskipped: []\n")
    with pytest.raises(VerdictError):
        Skips.read("first", {"cold": bool}, file)


def test_the_list_names_runs_that_there_are() -> None:
    for name in RUNS:
        assert Skips.read(name, CONDITIONS).not_run
    for entries in yaml.safe_load(SKIPS.read_text()).values():
        for entry in entries:
            assert set(entry.get("runs", ())) <= set(RUNS), entry


@pytest.mark.parametrize("run", RUNS.values(), ids=list(RUNS))
def test_manifests_claim_what_the_driver_does(run: object) -> None:
    """The suite reads what it knows and says nothing of the rest, such as a word misspelt."""
    manifest = yaml.safe_load((HERE / run.manifest).read_text())  # type: ignore[attr-defined]
    parts = {"ShortName", "StorageClass", "SnapshotClass", "DriverInfo", "Timeouts"}
    parts.add("VolumeAttributesClass")
    assert set(manifest) - {"GroupSnapshotClass"} == parts
    groups = manifest["DriverInfo"]["Capabilities"]["groupSnapshot"]
    assert ("GroupSnapshotClass" in manifest) == groups
    stress = "VolumeGroupSnapshotStressTestOptions"
    assert (stress in manifest["DriverInfo"]) == groups
    modify = "VolumeModifyStressTestOptions"
    assert (modify in manifest["DriverInfo"]) == (run.manifest == "thick-ext4.yaml")  # type: ignore[attr-defined]
    assert set(manifest["DriverInfo"]) - {"RequiredAccessModes", stress, modify} == {
        "Name",
        "SupportedSizeRange",
        "MaxFileSize",
        "SupportedFsType",
        "SupportedMountOption",
        "TopologyKeys",
        "Capabilities",
        "StressTestOptions",
        "VolumeSnapshotStressTestOptions",
        "PerformanceTestOptions",
    }
    claimed = manifest["DriverInfo"]["Capabilities"]
    assert set(claimed) == CAPABILITIES
    assert {name for name, has in claimed.items() if not has} <= NOT_EVERYWHERE


#: As in Kubernetes' test/e2e/storage/framework/testdriver.go, 1.36.
CAPABILITIES = {
    *("persistence", "block", "fsGroup", "exec", "multipods", "topology", "capacity"),
    *("controllerExpansion", "nodeExpansion", "onlineExpansion", "offlineExpansion"),
    *("readWriteOncePod", "singleNodeVolume", "multiplePVsSameID", "volumeLimits"),
    *("snapshotDataSource", "pvcDataSource", "groupSnapshot", "RWX", "capReadOnlyMany"),
}
#: What the driver has not, and what not every class of volumes has.
NOT_EVERYWHERE = {"groupSnapshot", "RWX", "capReadOnlyMany", "capacity", "volumeLimits"}
