"""A config.json that lacks a field, or has nonsense in one: whatever family and field, it is read
or refused in words, and never ends in a fault of ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from milescli.core.errors import CheckpointError
from milescli.models import FAMILIES, parse_facts, table
from tests.families.cases import ALL

CASES = {str(case.config["model_type"]): case.config for case in ALL.values()}
"""One of each family."""
ABSENT = object()
NONSENSE = (ABSENT, None, "x", 0, -3, [1], {"a": 1})


def paths_of(config: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field, also of objects within."""
    for name, value in config.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from paths_of(value, (*before, name))


def changed(config: dict[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    """The same with one field of nonsense."""
    whole = holder = copy.deepcopy(config)
    for name in path[:-1]:
        holder = holder[name]
    if value is ABSENT:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return whole


def test_every_family_has_a_case() -> None:
    assert FAMILIES.keys() <= CASES.keys()


@pytest.mark.parametrize("family", CASES)
def test_nonsense_in_a_field_is_read_or_refused_in_words(family: str) -> None:
    config = CASES[family]
    refused = 0
    for path in paths_of(config):
        for value in NONSENSE:
            try:
                table(parse_facts(changed(config, path, value))).hf_shapes()
            except CheckpointError:
                refused += 1
    assert refused > 20, "nothing of it is read"
