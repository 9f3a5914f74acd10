"""The order of groups and what a change of the weights does: what is refused, and what has no
effect."""

from __future__ import annotations

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.rollout import Rollout, order_rules, order_warnings
from milescli.recipe.section import refuse
from tests.recipe.conftest import Place


def _rollout(**settings: object) -> Rollout:
    return Rollout.model_validate(settings)


@pytest.mark.parametrize(
    ("sets", "what"),
    [
        (["order=done"], "needs groups to choose from"),
        (["order=done", "max_staleness=2", "over_sampling=1.5"], "would waste samples"),
        (["order=any"], "cannot be `any`"),
        (["on_update=wait"], "cannot be `wait`"),
        (["stale_groups=keep"], "cannot be `keep`"),
    ],
)
def test_settings_that_contradict_are_refused(place: Place, sets: list[str], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        place.load(sets=[f"rollout.{each}" for each in sets])


def test_a_curriculum_cannot_take_groups_as_they_are_done(place: Place) -> None:
    sets = ["rollout.order=done", "rollout.max_staleness=1", "data.curriculum=variance"]
    with pytest.raises(RecipeError, match="does not work when rollout runs ahead"):
        place.load(sets=sets)


def test_what_has_no_effect_is_doubted() -> None:
    assert not order_warnings(_rollout())
    assert not order_warnings(
        _rollout(max_staleness=1, order="done", on_update="abort", stale_groups="drop")
    )
    (doubt,) = order_warnings(_rollout(on_update="drain"))
    assert "on_update=drain` has no effect" in doubt
    (doubt,) = order_warnings(_rollout(max_staleness=1, stale_groups="drop"))
    assert "stale_groups=drop` has no effect" in doubt


@pytest.mark.parametrize("kind", ["zero_variance", "pass_rate"])
def test_filters_shaping_and_agents_go_with_any_order(kind: str) -> None:
    rollout = _rollout(
        max_staleness=1, order="done", filter=kind, shaping="overlong", agent="tools",
        tools=["calculator"], sample_filter="truncated",
    )  # fmt: skip
    refuse(order_rules(rollout))
