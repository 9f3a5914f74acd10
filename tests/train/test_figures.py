"""Every figure that a piece of an algorithm gives stands in the table of metrics."""

from __future__ import annotations

from typing import Any

import pytest

from milescli.core.metric_names import by_name
from milescli.core.plug_points import CORRECTIONS, OBJECTIVES, SURROGATES
from milescli.core.registry import PlugPoint
from milescli.train.contract import check_correction, check_objective, check_surrogate


class Noted:
    """A piece, and the names of its figures."""

    def __init__(self, piece: Any, names: set[str]) -> None:
        self.piece, self.names = piece, names

    def __getattr__(self, name: str) -> Any:
        return getattr(self.piece, name)

    def __call__(self, **given: Any) -> Any:
        made = self.piece(**given)
        self.names |= set(made.figures)
        return made

    def loss(self, tokens: Any) -> Any:
        """Of an objective."""
        made = self.piece.loss(tokens)
        self.names |= set(made.figures)
        return made


def unknown(names: set[str]) -> list[str]:
    return [name for name in names if f"train/{name}" not in by_name()]


def built_in(point: PlugPoint) -> list[str]:
    return list(point.builtin)


@pytest.mark.parametrize("name", built_in(SURROGATES))
def test_those_of_a_surrogate_are_described(name: str) -> None:
    names = set[str]()
    check_surrogate(Noted(SURROGATES.resolve(name), names))
    assert names or name == "reinforce", "it told no figures at all"
    assert not unknown(names)


@pytest.mark.parametrize("name", built_in(CORRECTIONS))
def test_those_of_a_correction_are_described(name: str) -> None:
    names = set[str]()
    check_correction(Noted(CORRECTIONS.resolve(name), names))
    assert names and not unknown(names)


@pytest.mark.parametrize("name", built_in(OBJECTIVES))
def test_those_of_an_objective_are_described(name: str) -> None:
    names = set[str]()
    factory: Any = OBJECTIVES.resolve(name)
    check_objective(lambda *, recipe: Noted(factory(recipe=recipe), names))
    assert names and not unknown(names)
