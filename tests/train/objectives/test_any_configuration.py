"""Whatever pieces a recipe names: it is refused with a reason, or has a loss and gradients that are
finite, on a batch that holds what real ones do (equal rewards, empty masks, stale samples)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.errors import RecipeError
from milescli.core.plug_points import ADVANTAGES, AGGREGATIONS, CREDITS, SURROGATES
from milescli.core.types import Group
from milescli.recipe.keys import keys
from milescli.recipe.schema import Recipe
from milescli.recipe.section import refuse
from milescli.recipe.train import algorithm_rules
from milescli.train.contract import as_microbatch, packed
from milescli.train.objectives.policy import Policy
from milescli.train.streams import RANK_STREAMS
from tests.samples import make_group, make_sample, make_trajectory

NUMBERS = st.sampled_from([0.0, 0.3, 0.9, 1.0, 2.5])
PIECES: dict[str, st.SearchStrategy[Any]] = {
    **{
        f"train.{registry.kind}": st.sampled_from(sorted(registry.builtin))
        for registry in (ADVANTAGES, SURROGATES, CREDITS, AGGREGATIONS)
    },
    **{
        name: st.sampled_from(keys()[name].choices)
        for name in (
            *("train.normalize_std", "train.ratio", "train.kl_in", "train.kl_estimator"),
            *("train.old_logprobs", "train.correction.level", "train.correction.mode"),
            "train.correction.reject_level",
        )
    },
    **dict.fromkeys(
        (
            *("train.clip_low", "train.clip_high", "train.kl_coef", "train.entropy_coef"),
            *("train.correction.low", "train.off_policy_mask", "train.turn_weight"),
        ),
        NUMBERS,
    ),
    **{
        name: st.booleans()
        for name in ("train.whiten", "train.kl_unbiased", "train.correction.normalize")
    },
    "train.gamma": st.sampled_from([0.5, 1.0]),
    "train.correction.kind": st.sampled_from(["none", "importance"]),
    "train.correction.high": st.sampled_from([0.5, 2.0]),
    "train.correction.veto": st.sampled_from([None, 0.1]),
    "train.dual_clip": st.sampled_from([None, 3.0]),
    "train.entropy_target": st.sampled_from([None, 1.0]),
    "train.pass_k": st.integers(1, 4),
    "train.updates_per_step": st.integers(1, 2),
    "rollout.samples_per_prompt": st.integers(1, 5),
    "rollout.max_staleness": st.integers(0, 1),
    "rollout.top_p": st.sampled_from([0.9, 1.0, 1.0, 1.0]),
}


def _recipe(settings: dict[str, Any]) -> Recipe:
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, last = key.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return Recipe.model_validate(nested)


def _groups(rng: np.random.Generator, count: int) -> list[Group]:
    groups = []
    for rewards in (np.ones(count), rng.random(count), np.zeros(count)):
        samples = []
        for index, reward in enumerate(rewards):
            length = int(rng.integers(1, 9))
            mask = rng.random(length) < rng.choice([0.0, 0.9])
            logprobs = (-rng.gamma(1.0, 3.0, length)).tolist()
            trajectory = make_trajectory(
                [1, 2], [3] * length, mask=mask.tolist(), logprobs=logprobs
            )
            samples.append(make_sample(trajectory, reward=float(reward), index=index))
        group = make_group(samples)
        groups.append(Group(prompt=group.prompt, samples=samples, greedy_reward=0.5))
    return groups


@settings(max_examples=200)
@given(st.fixed_dictionaries({}, optional=PIECES), st.integers(0, 10_000))
def test_it_is_refused_or_it_trains(chosen: dict[str, Any], seed: int) -> None:
    recipe = _recipe(chosen)
    try:
        refuse(algorithm_rules(recipe))
    except RecipeError as error:
        assert error.why and error.fixes
        return
    rng = np.random.default_rng(seed)
    policy = Policy(recipe=recipe)
    sequences = policy.sequences(_groups(rng, recipe.rollout.samples_per_prompt))
    count = sum(len(sequence.token_ids) - 1 for sequence in sequences)
    logprobs = torch.from_numpy((-rng.gamma(1.0, 3.0, count)).astype(np.float32))
    extra = {
        stream: torch.from_numpy((-rng.gamma(1.0, 3.0, count)).astype(np.float32))
        for stream in RANK_STREAMS
        if stream in policy.needs
    }
    tokens = packed(sequences, extra=extra)
    policy.complete(tokens)
    logprobs.requires_grad_()
    tokens = as_microbatch(tokens, logprobs)
    terms = policy.loss(tokens)
    loss = (torch.where(tokens.loss_mask, terms.loss, 0.0) * tokens.loss_weights).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert logprobs.grad is not None and torch.isfinite(logprobs.grad).all()
    for name, figure in terms.figures.items():
        assert torch.isfinite(figure.values[tokens.loss_mask]).all(), name


def test_pieces_that_are_drawn_are_keys_of_a_recipe() -> None:
    assert set(PIECES) <= set(keys())
    with pytest.raises(RecipeError):
        refuse(algorithm_rules(_recipe({"rollout.top_p": 0.9})))
