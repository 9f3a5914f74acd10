"""Pieces of algorithms by users who had a bad day: `KIND_what`."""

from __future__ import annotations

import torch

from milescli.rollout.base import Outcome
from milescli.train.aggregation import LossShare
from milescli.train.corrections import Correction
from milescli.train.objectives.policy import Policy
from milescli.train.surrogates import SurrogateTerms


async def agent_raises(prompt, session):
    raise KeyError("tools")


async def agent_silent(prompt, session):
    return Outcome(text="I said nothing")


async def agent_wrong(prompt, session):
    return await session.generate(prompt.token_ids)


def filter_undecided(*, group, settings):
    return 0.5


def shaping_short(*, group, settings):
    return [1.0]


def objective_none(*, recipe):
    return None


class _Averaged(Policy):
    def loss(self, tokens):
        terms = super().loss(tokens)
        return type(terms)(loss=terms.loss.mean(), figures={})


def objective_scalar(*, recipe):
    return _Averaged(recipe=recipe)


def advantage_raises(*, groups, settings):
    return [group.difficulty for group in groups]


def advantage_flat(*, groups, settings):
    return [0.0 for group in groups for _ in group.samples]


def advantage_nan(*, groups, settings):
    return [[float("nan")] * len(group.samples) for group in groups]


def credit_rows(*, advantages, penalty, tokens, settings):
    return tokens.whole_sequences(advantages)


def credit_nan(*, advantages, penalty, tokens, settings):
    return advantages / 0.0


def surrogate_bare(*, log_ratio, advantages, tokens, settings):
    return -log_ratio * advantages


def surrogate_scalar(*, log_ratio, advantages, tokens, settings):
    return SurrogateTerms(loss=-(log_ratio * advantages).mean())


def surrogate_centred(*, log_ratio, advantages, tokens, settings):
    """Over whatever is packed together."""
    return SurrogateTerms(loss=-log_ratio.exp() * (advantages - advantages.mean()))


def surrogate_infinite(*, log_ratio, advantages, tokens, settings):
    return SurrogateTerms(loss=torch.log(log_ratio * 0.0) * advantages)


def surrogate_without(log_ratio, advantages):
    return SurrogateTerms(loss=-log_ratio * advantages)


def correction_negative(*, log_ratio, tokens, settings):
    return Correction(weights=log_ratio)


def correction_scalar(*, log_ratio, tokens, settings):
    return Correction(weights=log_ratio.exp().mean())


def aggregation_number(*, num_tokens, settings):
    return 1.0 / num_tokens


def aggregation_zero(*, num_tokens, settings):
    return LossShare(token_weight=1.0, count=0.0)


def schedule_negative(*, progress, settings):
    return settings.lr * (0.5 - progress)


def schedule_text(*, progress, settings):
    return "1e-6"


CASES = {
    "agent_raises": "tools",
    "agent_silent": "without one call of session.generate",
    "agent_wrong": "instead of an Outcome",
    "filter_undecided": "gave 0.5",
    "shaping_short": "1 rewards for 4 samples",
    "objective_none": "'NoneType' object has no attribute",
    "objective_scalar": "it gave shape []",
    "advantage_raises": "'Group' object has no attribute 'difficulty'",
    "advantage_flat": "failed",
    "advantage_nan": "gave nan",
    "credit_rows": "each has a value",
    "credit_nan": "not finite",
    "surrogate_bare": "gave a Tensor",
    "surrogate_scalar": "a loss of shape []",
    "surrogate_centred": "packed together",
    "surrogate_infinite": "not finite",
    "surrogate_without": "it lacks the parameters tokens, settings",
    "correction_negative": "a weight is negative",
    "correction_scalar": "weights of shape []",
    "aggregation_number": "gave 1.0",
    "aggregation_zero": "count=0.0",
    "schedule_negative": "0 or more",
    "schedule_text": "0 or more",
}
"""What is said of each."""
