"""Recipes that learn from rows: each rule that one can break, and what mends it."""

from __future__ import annotations

import pytest

from milescli.core.errors import RecipeError
from tests.recipe.conftest import Place

ROWS = "model: {scratch: {}}\n"
SUPERVISED = ["data.train=rows.jsonl", "train.objective=supervised"]
PREFERENCE = ["data.train=rows.jsonl", "train.objective=preference"]
KTO = [*PREFERENCE, "train.preference.loss=kto"]
REWARD_MODEL = ["data.train=rows.jsonl", "train.objective=reward_model"]


@pytest.mark.parametrize("sets", [SUPERVISED, PREFERENCE, REWARD_MODEL])
def test_rows_and_an_objective_are_a_recipe(place: Place, sets: list[str]) -> None:
    recipe = place.load(ROWS, sets=sets).recipe
    assert recipe.learns_from_rows and not recipe.has_engines


@pytest.mark.parametrize(
    ("sets", "what", "mended"),
    [
        (
            [*SUPERVISED, "data.prompts=task:sums"],
            "two sources of training data",
            ["data.prompts=null"],
        ),
        (["train.objective=supervised"], "has no training data", ["data.train=rows.jsonl"]),
        (["train.objective=preference"], "has no training data", ["data.train=rows.jsonl"]),
        (["train.objective=reward_model"], "has no training data", ["data.train=rows.jsonl"]),
        (
            ["data.train=rows.jsonl"],
            "`train.objective=policy` cannot learn from rows",
            ["train.objective=supervised"],
        ),
        (
            [*SUPERVISED, "train.updates_per_step=4"],
            "rows cannot be split into several updates",
            ["train.updates_per_step=1"],
        ),
        ([*SUPERVISED, "eval.every=5"], "the evaluation every", ["eval.every=0"]),
        (
            [*SUPERVISED, "eval.every=5"],
            "every 5 steps",
            ["data.validation=heldout.jsonl"],
        ),
        (
            [*REWARD_MODEL, "data.eval=task:sums-heldout"],
            "`train.objective=reward_model` cannot answer prompts",
            ["data.eval=null"],
        ),
        (
            [*REWARD_MODEL, "data.demonstrations=task:sums", "warmup.steps=3"],
            "`train.objective=reward_model` does not support a warm-up",
            ["warmup.steps=0"],
        ),
        (
            [*KTO, "train.batch_size=1"],
            "`train.preference.loss=kto` needs several rows a step",
            ["train.batch_size=16"],
        ),
        (
            [*KTO, "data.validation=heldout.jsonl", "eval.num_prompts=1"],
            "`train.preference.loss=kto` needs several held-out rows",
            ["eval.num_prompts=64"],
        ),
        *(
            (
                [*sets, f"train.{name}={value}"],
                f"`train.{name}` has no effect on",
                [f"train.{name}={off}"],
            )
            for name, value, off in (
                ("kl_coef", "0.1", "0"),
                ("entropy_coef", "0.1", "0"),
                ("entropy_target", "0.5", "null"),
            )
            for sets in (SUPERVISED, PREFERENCE, KTO, REWARD_MODEL)
        ),
        *(
            (
                [*sets, "train.reference=true"],
                "`train.reference=true` has no effect on",
                ["train.reference=null"],
            )
            for sets in (SUPERVISED, PREFERENCE, REWARD_MODEL)
        ),
        (
            [*PREFERENCE, "train.reference_every=10"],
            "there is no reference to update",
            ["train.preference.reference=live"],
        ),
        (
            [*SUPERVISED, "train.reference_every=10"],
            "there is no reference to update",
            ["train.reference_every=0"],
        ),
        (
            [*SUPERVISED, "data.validation=rows.jsonl"],
            "`data.validation` is the same as `data.train`",
            ["data.validation=heldout.jsonl"],
        ),
        (
            ["data.prompts=task:sums", "train.epochs=2"],
            "`train.epochs` only applies to runs that learn from rows",
            ["train.epochs=null"],
        ),
        (
            ["data.prompts=task:sums", "data.validation=heldout.jsonl"],
            "`data.validation` only applies to runs that learn from rows",
            ["data.validation=null"],
        ),
    ],
)
def test_a_broken_rule_is_told_and_mended(
    place: Place, sets: list[str], what: str, mended: list[str]
) -> None:
    with pytest.raises(RecipeError) as refused:
        place.load(ROWS, sets=sets)
    assert what in refused.value.what
    offered = " ".join(refused.value.fixes)
    values = dict(setting.split("=", 1) for setting in [*sets, *mended])
    for setting in mended:
        assert setting.partition("=")[0] in offered
    place.load(ROWS, sets=[f"{key}={value}" for key, value in values.items()])


def test_an_objective_of_the_users_may_read_the_reference(place: Place) -> None:
    own = ["data.train=rows.jsonl", "train.objective=mine:objective"]
    assert place.load(ROWS, sets=[*own, "train.kl_coef=0.1"]).recipe.keeps_reference
    assert place.load(ROWS, sets=[*own, "train.reference=true"]).recipe.keeps_reference


@pytest.mark.parametrize("sets", [KTO, [*PREFERENCE, "train.preference.reference=live"]])
def test_rows_that_are_scored_in_each_step_keep_their_reference(
    place: Place, sets: list[str]
) -> None:
    for more in ([], ["train.reference=true"], ["train.reference_every=10"]):
        assert place.load(ROWS, sets=[*sets, *more]).recipe.keeps_reference
