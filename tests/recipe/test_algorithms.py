"""Algorithms as rows: what they set, who may set otherwise, and what makes no sense together."""

from __future__ import annotations

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.algorithms import ALGORITHMS, settings_of
from milescli.recipe.keys import keys
from milescli.recipe.load import value_at
from milescli.recipe.resolved import load_resolved, resolved_yaml
from tests.recipe.conftest import SMALL, Place


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_loads_and_is_all_that_it_says(place: Place, name: str) -> None:
    loaded = place.load(sets=[f"train.algorithm={name}"])
    for key, value in settings_of(name).items():
        assert value_at(loaded.recipe, key) == value
        assert str(loaded.origins[key]) == f"algorithm {name}"
    assert loaded.warnings == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_says_only_what_differs_from_its_base(name: str) -> None:
    row = ALGORITHMS[name]
    if row.base is not None:
        base = settings_of(row.base)
        assert row.sets
        for key, value in row.sets.items():
            standing = base.get(key, keys()[key].default)
            assert value != standing or key.startswith("train.correction.")


def test_what_somebody_says_is_stronger_than_the_row_beside_it(place: Place) -> None:
    text = SMALL + "train: {algorithm: gspo, clip_high: 0.5}\n"
    loaded = place.load(text, sets=["train.clip_low=0.1"])
    train = loaded.recipe.train
    assert (train.clip_low, train.clip_high, train.ratio) == (0.1, 0.5, "sequence")
    assert str(loaded.origins["train.ratio"]) == "algorithm gspo"
    assert str(loaded.origins["train.clip_low"]) == "--set train.clip_low=0.1"


def test_a_later_algorithm_leaves_nothing_of_an_earlier_one(place: Place) -> None:
    text = SMALL + "train: {algorithm: topr, clip_low: 0.1}\n"
    train = place.load(text, sets=["train.algorithm=grpo"]).recipe.train
    assert train.old_logprobs == "auto"
    assert (train.surrogate, train.clip_low) == ("clip", 0.2)


def test_no_algorithm_leaves_each_piece_as_it_is(place: Place) -> None:
    assert place.load(sets=["train.algorithm=null"]).recipe.train == place.load().recipe.train


def test_a_run_remembers_its_algorithm(place: Place) -> None:
    loaded = place.load(sets=["train.algorithm=dapo"])
    file = place.cwd / "resolved.yaml"
    file.write_text(resolved_yaml(loaded))
    again = load_resolved(file)
    assert again.recipe == loaded.recipe and again.origins == loaded.origins


def test_an_unknown_algorithm_is_refused_with_the_nearest(place: Place) -> None:
    with pytest.raises(RecipeError, match="there is no algorithm `gsp0`") as refused:
        place.load(sets=["train.algorithm=gsp0"])
    assert refused.value.fixes[0] == "--set train.algorithm=gspo"


@pytest.mark.parametrize(
    ("sets", "what"),
    [
        (["rollout.samples_per_prompt=1"], "groups of one"),
        (["rollout.samples_per_prompt=1", "train.advantage=rloo"], "groups of one"),
        (["train.algorithm=pass_at_k", "train.pass_k=8"], "pass@8 of 8 samples"),
        (["train.algorithm=gigpo", "train.credit=to_go"], "`gigpo` cannot be combined"),
        (["train.algorithm=hgpo", "train.credit=to_go"], "`hgpo` cannot be combined"),
        (["train.algorithm=gmpo", "train.ratio=sequence"], "support the ratio of a sequence"),
        (["train.algorithm=cispo", "train.dual_clip=3"], "no effect on `cispo`"),
        (["train.clip_low=1.5"], "`train.clip_low` cannot be 1.5"),
        (
            ["train.algorithm=ppo", "train.critic.warmup_steps=100"],
            "the policy would never learn",
        ),
        (["train.algorithm=max_rl", "rollout.shaping=overlong"], "`max_rl` does not support"),
        (["train.kl_coef=0.1", "train.reference=false"], "needs a reference"),
        (["train.reference_every=5"], "no reference to update"),
        (["train.entropy_target=1.0", "train.entropy_coef=0.5"], "exceeds its bound"),
        (
            ["train.algorithm=reinforce_pp", "train.kl_unbiased=true"],
            "needs the KL term in the loss",
        ),
        (["train.algorithm=tis", "train.old_logprobs=engine"], "correct the same difference twice"),
        (["train.algorithm=tis", "rollout.max_staleness=1"], "correct the same difference twice"),
        (["train.algorithm=icepop", "train.correction.low=9"], "nothing lies between"),
        (["train.algorithm=kpop", "train.correction.level=sequence"], "support the level sequence"),
        (["train.algorithm=mis", "train.correction.mode=none"], "correction has no effect"),
        (["train.covariance.low=6"], "nothing lies between"),
        (["rollout.top_p=0.9"], "a different distribution"),
        (["rollout.top_k=20"], "a different distribution"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_fix_that_is_taken(
    place: Place, sets: list[str], what: str
) -> None:
    with pytest.raises(RecipeError, match=what) as refused:
        place.load(sets=sets)
    for fix in refused.value.fixes:
        mended = [part.split()[0] for part in fix.split("   #")[0].split("--set ")[1:]]
        changed = {text.partition("=")[0]: text for text in [*sets, *mended]}
        place.load(sets=list(changed.values()))


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        (["train.kl_in=reward"], "have no effect"),
        (["train.algorithm=gpg", "train.updates_per_step=2"], "no policy ratio"),
        (["train.algorithm=gspo", "train.aggregation=token_mean"], "counts by its length"),
        (["train.algorithm=gmpo", "train.aggregation=constant"], "once for each token"),
    ],
)
def test_what_is_odd_is_warned_of(place: Place, sets: list[str], reason: str) -> None:
    (warning,) = place.load(sets=sets).warnings
    assert reason in warning


def test_stale_samples_are_weighed_by_decoupled_ppo(place: Place) -> None:
    loaded = place.load(sets=["train.algorithm=decoupled_ppo", "rollout.max_staleness=2"])
    assert loaded.recipe.old_logprobs == "trainer" and loaded.warnings == []
