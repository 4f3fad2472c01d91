"""The page on OpenStack's tests of volumes: made from what they counted and the list of skips."""

from __future__ import annotations

import yaml  # type: ignore[import-untyped]  # comes with lightkube

from tests.openstack.tempest.verdict import COUNTS, HERE, Skip, skips

FOLDER = "tests/openstack/tempest"


def volume_tests() -> str:
    """Returns the page, without the note on how it was made."""
    counts = yaml.safe_load(COUNTS.read_text())
    lines = (HERE.parent / "tempest.in").read_text().splitlines()
    releases = dict(line.split("==") for line in lines if "==" in line)
    parts = [
        "# OpenStack's tests of volumes\n\nThe tests of volumes of Tempest "
        f"{releases['tempest']} and of cinder-tempest-plugin "
        f"{releases['cinder-tempest-plugin']}, which are OpenStack's own, with two backends of "
        "the [driver for Cinder](../how-to/openstack.md#cinder) on one target. Keystone, Glance "
        "and Cinder are real, of one release of OpenStack, on SQLite; Nova and Neutron are not "
        f"there. [tempest.conf](../../../{FOLDER}/tempest.conf) says what Tempest is told of that "
        "cloud. `make nightly STEPS=long` runs them, and so does `pytest -m nightly "
        "tests/openstack/test_tempest.py`. It fails if a test fails, or is skipped for a reason "
        f"that [skips.yaml](../../../{FOLDER}/skips.yaml) does not have, or if the counts are "
        "others than these.\n",
        "| passed | failed | skipped |\n| --- | --- | --- |",
        f"| {counts['passed']} | 0 | {sum(counts['skipped'].values())} |\n",
        "## Why tests are skipped\n\n| tests | skipped | because |\n| --- | --- | --- |",
        *(f"| {counts['skipped'][skip.name]} | {_how(skip)} | {skip.why} |" for skip in skips()),
    ]
    return "\n".join(parts) + "\n"


def _how(skip: Skip) -> str:
    """Returns by what tests are skipped."""
    found = [
        f"{how}: `{pattern.pattern}`".replace("|", "\\|")
        for how, pattern in (("not begun", skip.tests), ("by Tempest", skip.says))
        if pattern
    ]
    return ", ".join(found)
