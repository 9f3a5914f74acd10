"""The dashboard that ships asks for metrics, labels and functions that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from milescli.recipe.templates import templates_dir
from milescli.trackers.prometheus import families

DASHBOARD = json.loads((templates_dir() / "grafana/miles.json").read_text(encoding="utf-8"))
ALWAYS = {"instance", "adapter"}
"""Labels that Prometheus gives each series, and that those of adapters have."""
WORDS = {"sum", "by", "rate", "increase"}
"""Of PromQL, as far as the dashboard uses it."""


def queries() -> Iterator[tuple[str, str]]:
    """(panel, PromQL)"""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("panel", "query"), [*queries()])
def test_a_query_names_what_there_is(panel: str, query: str) -> None:
    bare = re.sub(r'"[^"]*"', "", re.sub(r"\[[^\]]*\]", "", query))
    words = set(re.findall(r"[A-Za-z_]\w*", bare)) - WORDS
    [name] = [word for word in words if word in families()]
    assert words - {name} <= ALWAYS | set(families()[name].labels), panel


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["title"])
def test_a_legend_names_labels_that_there_are(panel: Any) -> None:
    for target in panel["targets"]:
        [name] = [word for word in re.findall(r"\w+", target["expr"]) if word in families()]
        labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert labels <= {*ALWAYS, *families()[name].labels}


def test_a_counter_is_asked_for_its_rise() -> None:
    shown_whole = {"miles_worker_losses_total", "miles_worker_restarts_total"}
    for panel, query in queries():
        for name in re.findall(r"miles_\w+_total", query):
            assert name in shown_whole or "rate(" in query or "increase(" in query, panel


def test_panels_do_not_overlap() -> None:
    taken = set[tuple[int, int]]()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
