"""A run of Tempest is good only if each test passed or has a reason not to."""

from __future__ import annotations

from pathlib import Path

import yaml  # type: ignore[import-untyped]  # comes with lightkube

from tests.openstack.tempest.verdict import COUNTS, SKIPS, Verdict, judge, not_begun, skips

TESTS = ("a.b.Class.test_one[id-1]", "a.b.Class.test_two[compute,id-2]")
GOOD = ("success", "")
SKIPPED = ("skip", "Nova is not available")
BEGUN = {TESTS[0]: GOOD, TESTS[1]: SKIPPED}


def verdict(tmp_path: Path, results: dict[str, tuple[str, str]], says: str = "Nova") -> Verdict:
    """Returns what is made of them."""
    file = tmp_path / "skips.yaml"
    file.write_text(yaml.safe_dump({"nova": {"says": says, "why": "It is not there"}}))
    return judge(TESTS, results, skips(file))


def test_counts(tmp_path: Path) -> None:
    found = verdict(tmp_path, BEGUN)
    assert found.counts() == {"passed": 1, "skipped": {"nova": 1}}
    assert found.wrong == []


def test_each_test_of_a_class_that_is_skipped_counts(tmp_path: Path) -> None:
    found = verdict(tmp_path, {TESTS[0]: ("exists", ""), "setUpClass (a.b.Class)": SKIPPED})
    assert found.counts() == {"passed": 0, "skipped": {"nova": 2}}
    assert found.wrong == []


def test_what_is_not_begun_has_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "skips.yaml"
    file.write_text(yaml.safe_dump({"unasked": {"tests": "_two", "why": "It makes a server"}}))
    listed = skips(file)
    assert not_begun(listed) == "(_two)"
    found = judge(TESTS, {TESTS[0]: GOOD}, listed)
    assert found.counts() == {"passed": 1, "skipped": {"unasked": 1}}
    assert found.wrong == []
    failed = judge(TESTS, {TESTS[0]: GOOD, TESTS[1]: ("fail", "")}, listed)
    assert f"{TESTS[1]}: fail: " in failed.wrong


def test_what_is_wrong(tmp_path: Path) -> None:
    failed = verdict(tmp_path, BEGUN | {TESTS[0]: ("fail", "traceback")})
    assert failed.wrong == [f"{TESTS[0]}: fail: traceback"]
    away = verdict(tmp_path, {TESTS[1]: SKIPPED})
    assert away.wrong == [f"{TESTS[0]}: not run: "]
    around = verdict(tmp_path, BEGUN | {"tearDownClass (a.b.Class)": ("fail", "left")})
    assert around.wrong == ["a.b.Class: fail: left"]
    unlisted = verdict(tmp_path, BEGUN, "Neutron")
    assert unlisted.wrong == [
        f"{TESTS[1]}: skip: Nova is not available",
        "nothing is skipped for the reason nova",
    ]


def test_the_lists_that_are_kept() -> None:
    counts = yaml.safe_load(COUNTS.read_text())
    assert set(counts) == {"passed", "skipped"}
    assert list(counts["skipped"]) == [skip.name for skip in skips(SKIPS)]
