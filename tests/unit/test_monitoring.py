"""The examples for Prometheus and Grafana name metrics and labels that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from plugin.metrics.prometheus import ERRORS, TargetCollector
from tests.support.cache import ROOT
from tests.support.examples import EXAMPLES, used

FOLDER = EXAMPLES / "monitoring"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket",), "gauge": ("",)}


def metrics() -> dict[str, set[str]]:
    """Returns the labels of each metric by the name that Prometheus has it under."""
    from plugin.metrics.prometheus import Families  # noqa: PLC0415

    up = next(iter(TargetCollector([], 1, histograms=False).collect()))
    return {
        family.name + suffix: {*getattr(family, "_labelnames", ()), "instance"}
        for family in [up, *Families().all()]
        for suffix in SUFFIXES[family.type]
    }


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(used(FOLDER / "dashboard.json").read_text())
    return loaded


def queries() -> Iterator[str]:
    """Yields each query of the dashboard and of the alerts."""
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for group in yaml.safe_load(used(FOLDER / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


@pytest.mark.parametrize("query", list(queries()))
def test_queries_name_metrics_and_labels_that_there_are(query: str) -> None:
    known = metrics()
    named = re.findall(r"\bvirtlun_\w+", query)
    assert named
    assert set(named) <= known.keys()
    for metric, selectors in re.findall(r"\b(virtlun_\w+)\{([^}]*)\}", query):
        labels = set(re.findall(r"(\w+)(?:=~|=|!=)", selectors))
        assert labels <= known[metric], metric


def test_the_page_lists_each_metric() -> None:
    page = used(FOLDER / "README.md").read_text()
    assert {name for name in metrics() if f"`{name}`" not in page} == set()


def test_each_kind_of_error_is_counted_from_0_on() -> None:
    source = (ROOT / "pydataplane/crates/bdev/src/io.rs").read_text()
    kinds = re.search(r"^pub enum IoError \{$(.*?)^\}$", source, re.M | re.S)
    assert kinds
    assert re.findall(r"^    (\w+),$", kinds[1], re.M) == list(ERRORS)


def test_panels_have_their_own_place_and_the_chosen_prometheus() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    covered: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not covered & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        covered |= cells
        for source in (panel, *panel["targets"]):
            assert source["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    chosen = {variable["name"] for variable in dashboard()["templating"]["list"]}
    asked = set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(panels)))
    assert asked == chosen


def test_the_unit_serves_where_prometheus_looks() -> None:
    unit = used(FOLDER / "virtlun-metrics.service").read_text()
    config = yaml.safe_load(used(FOLDER / "prometheus.yml").read_text())
    assert "virtlun metrics --listen :9433\n" in unit
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:9433"]}]
    assert config["rule_files"] == ["alerts.yml"]
