"""The list of algorithms and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.commands import suggest
from milescli.listings import algorithms
from milescli.listings.algorithms import algorithm_rows
from milescli.listings.pages import PAGES, render_page
from milescli.recipe.algorithms import ALGORITHMS


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_is_what_the_registries_say(path: Path) -> None:
    """Mend by: make pages"""
    page, blocks = path.read_text(encoding="utf-8"), PAGES[path]
    assert render_page(page, blocks) == page


def test_every_algorithm_is_listed_with_what_was_measured(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    measured = {"gspo": {"before": [0.1, 0.2], "after": [0.9, 1.0], "steps": 30}}
    (tmp_path / "algorithms.json").write_text(json.dumps(measured))
    monkeypatch.setattr(algorithms, "templates_dir", lambda: tmp_path)
    rows = {row.name: row for row in algorithm_rows()}
    assert list(rows) == list(ALGORITHMS)
    assert rows["gspo"].learned is not None and rows["gspo"].learned.after == [0.9, 1.0]
    assert rows["grpo"].learned is None
    assert rows["gspo"].settings["train.aggregation"] == "sequence_mean"


def test_algorithms_are_offered_by_name() -> None:
    assert [name for name, _ in suggest.algorithms("gsp")] == ["gspo", "gspo_token"]
    offered = [value for value, _ in suggest.overrides("train.algorithm=dap")]
    assert offered == ["train.algorithm=dapo"]
