"""Recipes with teachers: each rule that one can break, and what mends it."""

from __future__ import annotations

import pytest

from milescli.core.errors import RecipeError
from tests.recipe.conftest import Place

ON_POLICY = "model: {scratch: {}}\ndata: {prompts: task:sums}\n"
MIXED = "model: {scratch: {}}\ndata: {mix: [{path: a.jsonl, name: a}, {path: b.jsonl, name: b}]}\n"
ROWS = "model: {scratch: {}}\ndata: {train: rows.jsonl}\ntrain: {objective: distillation}\n"
SERVED = "train.distill.teachers=[{url: 'http://127.0.0.1:30000'}]"
HINTED = "train.distill.teachers=[{url: 'http://h:1', hint: ' It is {label}.'}]"
ONE = "train.distill.teachers=[{path: big}]"
TWO = "train.distill.teachers=[{path: big, sources: [a]}, {path: other, sources: [b]}]"


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        (ON_POLICY, [ONE]),
        (ON_POLICY, [ONE, "rollout.reward=none", "rollout.samples_per_prompt=1"]),
        (ON_POLICY, [ONE, "train.distill.reward_weight=1.0", "train.distill.kl=reverse"]),
        (MIXED, [ONE]),
        (MIXED, [TWO]),
        (ROWS, [ONE, "train.distill.kl=forward"]),
    ],
)
def test_teachers_are_a_part_of_a_recipe(place: Place, text: str, sets: list[str]) -> None:
    assert place.load(text, sets=sets).recipe.teachers[0].path == "big"


@pytest.mark.parametrize(
    ("text", "sets", "what", "mended"),
    [
        (ROWS, [], "needs a teacher", [ONE, "train.distill.kl=forward"]),
        (ROWS, [ONE], "needs tokens that the policy samples", ["train.distill.kl=reverse"]),
        (
            ROWS,
            [ONE, "train.objective=supervised"],
            "does not use a teacher",
            ["train.distill.teachers=[]"],
        ),
        (
            ON_POLICY,
            ["rollout.reward=none"],
            "has no reward to learn from",
            ["rollout.reward=math"],
        ),
        (
            ON_POLICY,
            [ONE, "rollout.reward=none", "train.distill.reward_weight=1.0"],
            "has no reward to learn from",
            ["train.distill.reward_weight=0"],
        ),
        (
            ON_POLICY,
            [ONE, "rollout.samples_per_prompt=1", "train.distill.reward_weight=1.0"],
            "groups of one",
            ["rollout.samples_per_prompt=8"],
        ),
        (
            MIXED,
            ["train.distill.teachers=[{path: big}, {path: other}]"],
            "the sources of the teacher big are missing",
            [TWO],
        ),
        (
            MIXED,
            ["train.distill.teachers=[{path: big, sources: [c]}]"],
            "the source `c` of the teacher",
            [TWO],
        ),
        (
            MIXED,
            ["train.distill.teachers=[{path: big, sources: [a, b]}, {path: o, sources: [b]}]"],
            "`b` has two teachers",
            [TWO],
        ),
        (
            MIXED,
            ["train.distill.teachers=[{path: big, sources: [a]}]"],
            "no teacher covers `b`",
            [TWO],
        ),
        (
            ON_POLICY,
            ["train.distill.teachers=[{path: big, url: 'http://h:1'}]"],
            "a teacher of `train.distill.teachers` is big",
            [ONE],
        ),
        (ON_POLICY, ["train.distill.teachers=[{}]"], "is without path and url", [SERVED]),
        (
            MIXED,
            ["train.distill.teachers=[{path: t, sources: [a]}, {url: 'http://h:1', sources: [b]}]"],
            "teachers must be either all local or all served",
            [TWO],
        ),
        (ON_POLICY, ["train.distill.teachers=[{url: h}]"], "cannot be `h`", [SERVED]),
        (
            ON_POLICY,
            ["train.distill.teachers=[{url: 'http://me:hunter2@h:1'}]"],
            "contains a user name or a password",
            [SERVED],
        ),
        (
            ROWS,
            [SERVED, "train.distill.kl=forward", "train.distill.cache=false"],
            "cannot be queried at each step",
            ["train.distill.cache=true"],
        ),
        (
            ON_POLICY,
            ["train.distill.teachers=[{path: t, hint: x}]"],
            "a local teacher cannot have a `hint`",
            [SERVED],
        ),
        (
            ROWS,
            [HINTED, "train.distill.kl=forward"],
            "a teacher that scores rows cannot have a `hint`",
            [SERVED],
        ),
        (
            ON_POLICY,
            [HINTED, "rollout.agent=chat", "rollout.user.script=[more]"],
            "needs `rollout.agent=single_turn`",
            ["rollout.agent=single_turn"],
        ),
        (
            ON_POLICY,
            [SERVED, "rollout.temperature=0.7"],
            "use different temperatures",
            ["rollout.temperature=1"],
        ),
    ],
)
def test_a_broken_rule_is_told_and_mended(
    place: Place, text: str, sets: list[str], what: str, mended: list[str]
) -> None:
    with pytest.raises(RecipeError) as refused:
        place.load(text, sets=sets)
    assert what in refused.value.what
    assert "hunter2" not in str(refused.value)
    assert refused.value.fixes
    values = dict(setting.split("=", 1) for setting in [*sets, *mended])
    place.load(text, sets=[f"{key}={value}" for key, value in values.items()])
