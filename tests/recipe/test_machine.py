"""Where metrics are served, and what trackers keep a run under."""

from __future__ import annotations

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.machine import RunSettings, metrics_address, tracker_rules
from milescli.recipe.section import refuse


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (None, None),
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("9464", ("127.0.0.1", 9464)),
        (":0", ("127.0.0.1", 0)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("[::1]:80", ("::1", 80)),
        ("node-1.cluster:9464", ("node-1.cluster", 9464)),
    ],
)
def test_an_address_is_of_this_machine_unless_it_says_otherwise(
    text: str | None, address: tuple[str, int] | None
) -> None:
    assert metrics_address(RunSettings(metrics_address=text)) == address


@pytest.mark.parametrize("text", ["", "http://here:1", "here", "here:65536", "1:2:3", "a b:1"])
def test_what_is_no_address_is_refused_with_one(text: str) -> None:
    with pytest.raises(RecipeError) as refused:
        refuse(tracker_rules(RunSettings(metrics_address=text)))
    assert refused.value.fixes == ["--set run.metrics_address=127.0.0.1:9464"]


def test_a_project_has_a_name() -> None:
    with pytest.raises(RecipeError, match=r"`run\.project` is empty"):
        refuse(tracker_rules(RunSettings(project=" ")))
