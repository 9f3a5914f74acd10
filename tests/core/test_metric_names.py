"""The table of metrics: whatever an event tells is in it."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, get_args

import pytest

from milescli.core import events
from milescli.core.events import AdapterEvent, to_record
from milescli.core.metric_names import ANY, METRICS, by_name, metric_of
from milescli.core.scalars import scalars_in
from milescli.recipe.keys import keys, sections

SIMPLE: dict[Any, Any] = {int: 3, float: 0.5, str: "text", bool: True}
EVENTS = [kind for kind in get_args(events.Event) if kind is not AdapterEvent]


def filled(kind: Any) -> Any:
    """An instance of a dataclass with something in every field, so that a new one is there, too."""
    hints = typing.get_type_hints(kind)
    return kind(**{field.name: _value(hints[field.name]) for field in dataclasses.fields(kind)})


def _value(hint: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return filled(hint)
    if isinstance(hint, types.UnionType):
        return _value(next(arg for arg in get_args(hint) if arg is not type(None)))
    if typing.get_origin(hint) in (dict, Mapping):
        return {}
    if typing.get_origin(hint) is tuple:
        return (_value(get_args(hint)[0]),)
    return SIMPLE[hint]


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_every_number_of_an_event_has_a_row_of_its_own(kind: Any) -> None:
    """A new field needs a line in milescli/core/metric_names.py."""
    found = scalars_in(to_record(filled(kind)))
    missing = [name for name in (found[1] if found is not None else {}) if name not in by_name()]
    assert not missing


def test_no_name_has_two_rows_and_every_row_says_something() -> None:
    assert len(by_name()) == len(METRICS)
    assert all(metric.about and metric.when for metric in METRICS if ANY not in metric.name)


def test_what_a_row_says_of_recipes_is_a_key() -> None:
    """`train.credit=gae` names a key."""
    text = " ".join(f"{metric.about} {metric.when}" for metric in METRICS)
    named = re.findall(r"`([a-z_.]+)(?:=\w+)?`", text)
    assert named and not [name for name in named if name not in {**keys(), **sections()}]


def test_a_name_that_a_recipe_chose_has_the_row_of_its_section() -> None:
    names = {
        "reward/math": "reward/*",
        "eval/agent/turns": "eval/agent/*",
        "eval/pass_at_4": "eval/*",
        "agent/turns": "agent/turns",
        "train/of_my_own": "train/*",
    }
    assert {name: metric.name for name in names if (metric := metric_of(name))} == names
    assert metric_of("nobody/knows") is None
