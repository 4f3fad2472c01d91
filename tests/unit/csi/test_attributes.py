"""The parameters of a VolumeAttributesClass: what each says, alone and on a volume's limits."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml  # type: ignore[import-untyped]  # comes with lightkube
from hypothesis import given
from hypothesis import strategies as st

from csi.attributes import Attributes, read, schema
from csi.errors import Code
from pydataplane.domain.limits import NONE, Limits, contradiction
from tests.unit.csi.conftest import refused

EXAMPLE = Path(__file__).parents[3] / "examples/kubernetes/volumeattributesclasses.yaml"
MIB = 1 << 20


def test_each_parameter_is_a_limit_of_the_target() -> None:
    parts = {
        "readIops": "1",
        "writeIops": "2",
        "readThroughput": "3",
        "writeThroughput": "4",
        "readIopsBurst": "5",
        "writeIopsBurst": "6",
        "readThroughputBurst": "7",
        "writeThroughputBurst": "8",
        "burstSeconds": "9",
        "ioSizeKiB": "16",
    }
    assert read(parts).onto(NONE) == Limits(
        read_iops_sec=1,
        write_iops_sec=2,
        read_bytes_sec=3 * MIB,
        write_bytes_sec=4 * MIB,
        read_iops_sec_max=5,
        write_iops_sec_max=6,
        read_bytes_sec_max=7 * MIB,
        write_bytes_sec_max=8 * MIB,
        read_iops_sec_max_length=9,
        write_iops_sec_max_length=9,
        read_bytes_sec_max_length=9,
        write_bytes_sec_max_length=9,
        size_iops_sec=16384,
    )
    totals = {"iops": "1", "throughput": "2", "iopsBurst": "3", "throughputBurst": "4"}
    assert read(totals).onto(NONE) == Limits(
        total_iops_sec=1,
        total_bytes_sec=2 * MIB,
        total_iops_sec_max=3,
        total_bytes_sec_max=4 * MIB,
        total_iops_sec_max_length=1,
        total_bytes_sec_max_length=1,
    )


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (
            {"IOPS": "1"},
            "IOPS is not known: the parameters are iops, readIops, writeIops, throughput",
        ),
        ({"iops": "many"}, "iops: 'many': give a whole number from 0 to 999999999"),
        ({"iops": "-1"}, "from 0 to 999999999"),
        ({"iops": "1000000000"}, "from 0 to 999999999"),
        ({"iops": "1\n"}, "from 0 to 999999999"),
        ({"iops": "9" * 100_000}, f"iops: '{'9' * 64}': give a whole"),
        ({"throughput": "100Mi"}, "throughput: '100Mi': give a whole number from 0 to 99999"),
        ({"burstSeconds": "0"}, "burstSeconds: '0': give a whole number from 1 to 999"),
        ({"iops": "1", "readIops": "1"}, "iops: '1': it goes without readIops"),
        ({"throughput": "1", "writeThroughput": "1"}, "throughput: '1': it goes without write"),
        ({"iopsBurst": "1"}, "iopsBurst: '1': it needs iops"),
        ({"iops": "2", "iopsBurst": "1"}, "iopsBurst: '1': it is less than iops"),
        ({"iops": "2", "burstSeconds": "3"}, "burstSeconds: '3': it needs a burst"),
        ({"throughput": "2", "ioSizeKiB": "4"}, "ioSizeKiB: '4': it needs iops"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(parameters: dict[str, str], said: str) -> None:
    message = refused(lambda: read(parameters), Code.INVALID_ARGUMENT)
    assert said in message
    assert message.startswith("VolumeAttributesClass parameter ")


def test_what_csi_resizer_adds_is_no_parameter() -> None:
    added = {f"csi.storage.k8s.io/{key}": "x" for key in ("pvc/name", "pvc/namespace", "pv/name")}
    assert read(added | {"iops": "1"}) == read({"iops": "1"})


@pytest.mark.parametrize(
    ("before", "parameters", "after"),
    [
        # What is not named stays, and goes by a 0.
        ({"total_iops_sec": 5}, {"throughput": "1"}, {"total_iops_sec": 5, "total_bytes_sec": MIB}),
        ({"total_iops_sec": 5, "total_bytes_sec": 6}, {"iops": "0"}, {"total_bytes_sec": 6}),
        ({"total_iops_sec": 5, "size_iops_sec": 4096}, {"iops": "0"}, {}),
        ({"total_iops_sec": 5}, {}, {"total_iops_sec": 5}),
        # A total is in place of its parts, and they of it.
        ({"read_iops_sec": 5, "write_iops_sec": 6}, {"iops": "7"}, {"total_iops_sec": 7}),
        ({"total_iops_sec": 5}, {"readIops": "7"}, {"read_iops_sec": 7}),
        ({"write_iops_sec": 5}, {"readIops": "7"}, {"read_iops_sec": 7, "write_iops_sec": 5}),
        ({"total_iops_sec": 5}, {"readIops": "0"}, {"total_iops_sec": 5}),
    ],
)
def test_a_class_changes_what_it_names(
    before: dict[str, int], parameters: dict[str, str], after: dict[str, int]
) -> None:
    assert read(parameters).onto(Limits(**before)) == Limits(**after)


def test_a_burst_stays_as_long_as_it_is_one() -> None:
    with_burst = read({"iops": "5", "iopsBurst": "50", "burstSeconds": "9"}).onto(NONE)
    assert read({"iops": "50"}).onto(with_burst).total_iops_sec_max_length == 9
    assert read({"iops": "51"}).onto(with_burst) == Limits(total_iops_sec=51)
    assert read({"iopsBurst": "0"}).onto(with_burst) == Limits(total_iops_sec=5)
    longer = read({"iops": "5", "iopsBurst": "60"}).onto(with_burst)
    assert (longer.total_iops_sec_max, longer.total_iops_sec_max_length) == (60, 9)


NUMBERS = st.sampled_from([None, "0", "1", "7", "99999"])
CLASSES = st.fixed_dictionaries(dict.fromkeys(schema()["properties"], NUMBERS))


def _valid(chosen: dict[str, Any]) -> Attributes | None:
    parameters = {name: value for name, value in chosen.items() if value is not None}
    try:
        found = read(parameters)
    except Exception:
        return None
    jsonschema.validate(parameters, schema())
    return found


@given(st.lists(CLASSES, max_size=5))
def test_one_class_after_the_other_leaves_what_the_target_takes(chosen: list[Any]) -> None:
    limits = NONE
    for wanted in filter(None, map(_valid, chosen)):
        limits = wanted.onto(limits)
        assert contradiction(limits) is None
        assert wanted.onto(limits) == limits
    assert read(_unlimited()).onto(limits) == NONE


@cache
def _unlimited() -> dict[str, str]:
    """The parameters of the example by which limits go."""
    with EXAMPLE.open(encoding="utf-8") as file:
        classes = {each["metadata"]["name"]: each for each in yaml.safe_load_all(file)}
    found: dict[str, str] = classes["virtlun-unlimited"]["parameters"]
    return found
