"""Grafana's own structures read the example's dashboard: each field is one of its schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.examples import EXAMPLES
from tests.target.grafana import faults

pytestmark = pytest.mark.nightly

DASHBOARD = EXAMPLES / "monitoring/dashboard.json"


def test_grafana_reads_each_field_of_the_dashboard() -> None:
    assert faults(DASHBOARD.read_text()) == []


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda board: board.update(panel=1), "Dashboard: unexpected field 'panel'"),
        (
            lambda board: board["panels"][0]["options"].pop("textMode"),
            "panels[0].options.textMode: required field is missing from input",
        ),
        (
            lambda board: board["panels"][1]["targets"][0].update(query="up"),
            "panels[1].targets[0].Dataquery: unexpected field 'query'",
        ),
        (
            lambda board: board["panels"][2]["targets"][0].pop("expr"),
            "panels[2].targets[0].expr: required field is missing from input",
        ),
    ],
    ids=["a dashboard's", "an option that is not there", "a query's", "no query"],
)
def test_what_is_none_of_its_fields_is_told(
    spoil: Callable[[dict[str, Any]], None], says: str
) -> None:
    board = json.loads(DASHBOARD.read_text())
    spoil(board)
    assert faults(json.dumps(board)) == [says]
