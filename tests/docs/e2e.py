"""The page on Kubernetes' storage suite: made from its runs, their counts and the list of skips."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml  # type: ignore[import-untyped]  # comes with lightkube

from tests.kubernetes.e2e.runs import HERE, RUNS
from tests.kubernetes.e2e.verdict import SKIPS

COUNTS = HERE / "counts.yaml"
FOLDER = "tests/kubernetes/e2e"


def storage_suite() -> str:
    """Returns the page, without the note on how it was made.

    Raises:
        ValueError: the counts are not of the runs that there are.
    """
    counts = yaml.safe_load(COUNTS.read_text())
    if list(counts) != list(RUNS):
        raise ValueError(f"{COUNTS} has {list(counts)}; the runs are {list(RUNS)}")
    listed = yaml.safe_load(SKIPS.read_text())
    parts = [
        "# Kubernetes' storage suite\n\nThe external storage suite of Kubernetes itself, with the "
        "CSI driver on real nodes: `make test-e2e`, or `make test-e2e ARGS=shared-block` for one "
        "run. A run fails if a spec fails, and if one is skipped for a reason that "
        f"[skips.yaml](../../../{FOLDER}/skips.yaml) does not have.\n",
        "| run | what | nodes | passed | failed | skipped | counted |\n"
        "| --- | --- | --- | --- | --- | --- | --- |",
        *_runs(counts),
        "\nThese were counted when each run last went through in whole, on one machine with two "
        "cores. Two nodes are two kubelets on it.\n",
        "## Why specs are skipped\n\n| runs | skipped | because |\n| --- | --- | --- |",
        *_reasons(listed["not_run"], "specs", "not begun"),
        *_reasons(listed["skipped"], "says", "by the suite"),
    ]
    return "\n".join(parts) + "\n"


def _runs(counts: dict[str, dict[str, object]]) -> Iterator[str]:
    for name, run in RUNS.items():
        manifest = f"[{name}](../../../{FOLDER}/{run.manifest})"
        counted = " | ".join(
            str(counts[name][key]) for key in ("passed", "failed", "skipped", "at")
        )
        yield f"| {manifest} | {run.about} | {run.nodes} | {counted} |"


def _reasons(entries: list[dict[str, Any]], word: str, how: str) -> Iterator[str]:
    for entry in entries:
        runs = ", ".join(entry.get("runs", ["all"]))
        when = f" (where {entry['when']})" if "when" in entry else ""
        pattern = entry[word].replace("|", "\\|")
        yield f"| {runs} | {how}: `{pattern}` | {entry['why']}{when} |"
