"""The policy objective: its pieces add up, and each is the recipe's or the user's."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch

from milescli.core.types import RewardDetail, Trajectory
from milescli.recipe.schema import Recipe
from milescli.train.aggregation import LossShare
from milescli.train.contract import packed
from milescli.train.kl import kl_estimate
from milescli.train.objectives import load_objective
from milescli.train.objectives.policy import Policy
from milescli.train.streams import Stream
from tests.samples import make_group, make_sample, make_trajectory, rewarded
from tests.train.tokens import one_sequence

NEW, OLD, REFERENCE = (
    torch.tensor([-1.0, -2.0]),
    torch.tensor([-1.1, -2.5]),
    torch.tensor([-1.3, -1.9]),
)
ENTROPY, ADVANTAGES = torch.tensor([0.7, 0.9]), torch.tensor([1.0, -1.0])


def _policy(**train: object) -> Policy:
    return load_objective("policy", Recipe.model_validate({"train": train}))


def _terms(policy: Policy):
    streams = {Stream.OLD: OLD, Stream.REFERENCE: REFERENCE, Stream.ADVANTAGE: ADVANTAGES}
    return policy.loss(one_sequence(NEW, entropy=ENTROPY, streams=streams))


def test_terms_add_up() -> None:
    surrogate = _terms(_policy()).loss
    kl = kl_estimate(NEW, REFERENCE, kind="k3")
    terms = _terms(_policy(kl_coef=0.1, entropy_coef=0.01))
    torch.testing.assert_close(terms.loss, surrogate + 0.1 * kl - 0.01 * ENTROPY)
    torch.testing.assert_close(terms.figures["kl"].values, kl)
    assert "kl" not in _terms(_policy()).figures


def test_a_mismatch_is_truncated_from_when_it_is_found_and_in_a_run_that_is_resumed() -> None:
    engine = NEW.detach() + torch.tensor([-3.0, 0.5])
    streams = {Stream.ADVANTAGE: ADVANTAGES, Stream.ENGINE: engine}
    plain = _policy().loss(one_sequence(NEW, entropy=ENTROPY, streams=streams)).loss
    policy, resumed = _policy(), _policy()
    assert policy.state == {} and policy.truncate_mismatch()
    resumed.restore(policy.state)
    sequence = resumed.sequences([rewarded([1.0, 0.0])])[0]
    streams[Stream.TRUNCATION] = torch.from_numpy(sequence.streams[Stream.TRUNCATION][:2])
    terms = resumed.loss(one_sequence(NEW, entropy=ENTROPY, streams=streams))
    torch.testing.assert_close(terms.loss, plain * torch.tensor([2.0, 0.6065307]))
    assert not _policy(correction={"kind": "importance"}).truncate_mismatch()
    assert not _policy(old_logprobs="engine").truncate_mismatch()


def test_log_ratios_beyond_twenty_are_cut_off_and_counted() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -100.0], requires_grad=True)
    streams = {
        Stream.OLD: torch.tensor([-30.0, -1.5, -1.0]),
        Stream.ADVANTAGE: torch.tensor([-1.0, -1.0, 1.0]),
    }
    terms = _policy().loss(one_sequence(logprobs, streams=streams))
    terms.loss.sum().backward()
    assert terms.figures["clamp_fraction"].values.tolist() == [1, 0, 1]
    assert logprobs.grad[0] == 0 and logprobs.grad[2] == 0, "no gradient beyond"
    assert logprobs.grad[1] != 0
    assert bool(torch.isfinite(terms.loss).all())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_what_stands_at_padding_cannot_spoil_a_gradient(kind: str) -> None:
    """A low temperature makes log-probs of tokens that nobody sampled as small as -1000; exp of the
    difference is infinite, and 0 x infinity no number."""
    logprobs = torch.tensor([-1.0, -1000.0, -0.1], requires_grad=True)
    mask = torch.tensor([True, False, False])
    streams = {
        Stream.OLD: torch.tensor([-1.1, 0.0, -1000.0]),
        Stream.REFERENCE: torch.tensor([-1.2, 0.0, -1000.0]),
        Stream.ADVANTAGE: torch.tensor([1.0, float("nan"), 0.0]),
    }
    policy = _policy(kl_coef=0.1, kl_estimator=kind)
    terms = policy.loss(one_sequence(logprobs, mask=mask, streams=streams))
    torch.where(mask, terms.loss, 0.0).sum().backward()
    assert bool(torch.isfinite(logprobs.grad).all())
    assert logprobs.grad[0] != 0 and not logprobs.grad[1:].any()


@pytest.mark.parametrize(
    ("train", "staleness", "needs"),
    [
        ({}, 0, set()),
        ({"kl_coef": 0.1}, 0, {Stream.REFERENCE}),
        ({"updates_per_step": 2}, 0, {Stream.OLD}),
        ({"updates_per_step": 2, "old_logprobs": "engine"}, 0, set()),
        ({"updates_per_step": 2}, 1, set()),
        ({"updates_per_step": 2, "old_logprobs": "trainer"}, 1, {Stream.OLD}),
    ],
)
def test_it_asks_for_no_stream_that_it_can_do_without(
    train: dict, staleness: int, needs: set[Stream]
) -> None:
    recipe = Recipe.model_validate({"train": train, "rollout": {"max_staleness": staleness}})
    assert load_objective("policy", recipe).needs == needs


@pytest.mark.parametrize(
    ("train", "compares"),
    [
        ({}, set()),
        ({"advantage": "gdpo"}, {RewardDetail.PARTS}),
        *(({"advantage": name}, {RewardDetail.TURNS}) for name in ("turns", "gigpo", "hgpo")),
        ({"credit": "to_go"}, {RewardDetail.TURNS}),
    ],
)
def test_it_names_what_it_compares_of_rewards(train: dict, compares: set[RewardDetail]) -> None:
    assert _policy(**train).compares == compares


def test_a_sample_of_several_trajectories_counts_once() -> None:
    long = make_sample(
        make_trajectory([1], [2, 3, 4]), make_trajectory([1, 9], [5]), reward=1.0, index=0
    )
    short = make_sample(make_trajectory([1], [2]), reward=0.0, index=1)
    sequences = _policy(aggregation="sequence_mean").sequences([make_group([long, short])])
    assert [sequence.share for sequence in sequences] == [0.75, 0.25, 1.0]
    assert [sequence.token_weight for sequence in sequences] == [0.25, 0.25, 1.0]
    assert {sequence.group for sequence in sequences} == {0}


def test_every_token_of_a_sample_has_its_advantage() -> None:
    (good, bad) = _policy(normalize_std="none").sequences([rewarded([1.0, 0.0])])
    assert good.streams[Stream.ADVANTAGE].tolist() == [0.5, 0.5]
    assert bad.streams[Stream.ADVANTAGE].tolist() == [-0.5, -0.5]
    assert good.streams[Stream.ENGINE].dtype == np.float32
    assert good.loss_mask.tolist() == [False, True]


def test_a_role_that_is_not_trained_costs_the_trainer_nothing_and_weighs_nothing() -> None:
    def line(role: str, *, is_trained: bool) -> Trajectory:
        mask = [is_trained] * 3
        return replace(make_trajectory([1, 2], [3, 4, 5], mask=mask), role=role)

    solver, host = line("solver", is_trained=True), line("host", is_trained=False)
    alone = [make_sample(solver, reward=reward) for reward in (0.0, 1.0)]
    beside = [replace(sample, trajectories=[host, solver]) for sample in alone]
    wanted = _policy().sequences([make_group(alone)])
    made = _policy().sequences([make_group(beside)])
    assert len(made) == len(wanted) == 2
    for one, other in zip(made, wanted, strict=True):
        assert (one.token_weight, one.share) == (other.token_weight, other.share)
        assert np.array_equal(one.streams[Stream.ADVANTAGE], other.streams[Stream.ADVANTAGE])
    silent = make_group([make_sample(host, reward=0.0), make_sample(solver, reward=1.0)])
    assert len(_policy().sequences([silent])) == 2, "a sample is never left without a sequence"


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_weight_of_rewards_beside_a_teacher_scales_those_of_turns(weight: float) -> None:
    def line(*rewards: float) -> Trajectory:
        return replace(make_trajectory([1], [2, 3, 4]), rewards=array("f", [0.0, *rewards]))

    samples = [
        make_sample(line(1.0, 0.0, 0.0), reward=1.0, index=0),
        make_sample(line(0.0, 0.0, 0.5), reward=0.5, index=1),
    ]

    def advantages(weight: float) -> torch.Tensor:
        distill = {"teachers": [{"path": "teacher"}], "reward_weight": weight}
        policy = _policy(advantage="reinforce", credit="to_go", gamma=0.9, distill=distill)
        sequences = policy.sequences([make_group(samples)])
        agreed = torch.full((6,), -1.0)
        tokens = packed(sequences, extra={Stream.OLD: agreed, Stream.TEACHER: agreed})
        policy.complete(tokens)
        return tokens[Stream.ADVANTAGE]

    assert advantages(1.0).any()
    torch.testing.assert_close(advantages(weight), weight * advantages(1.0))


def of_the_user(*, recipe: Recipe) -> Policy:
    """Advantages that are the rewards themselves, summed over tokens."""
    return Policy(
        recipe=recipe,
        advantage=lambda *, groups, settings: [group.rewards for group in groups],
        aggregation=lambda *, num_tokens, settings: LossShare(token_weight=1.0, count=1.0),
    )


def test_pieces_can_be_handed_in() -> None:
    objective = load_objective(f"{__name__}:of_the_user", Recipe())
    (good, bad) = objective.sequences([rewarded([3.0, 0.0])])
    assert good.streams[Stream.ADVANTAGE].tolist() == [3.0, 3.0]
    assert (bad.share, bad.token_weight) == (1.0, 1.0)
