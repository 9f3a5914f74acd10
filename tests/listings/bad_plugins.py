"""Pieces of algorithms by users who had a bad day: `KIND_what`."""

from __future__ import annotations

import os
from dataclasses import replace

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


def tool_untyped(key):
    """Look a key up."""
    return key


def tool_silent(key: str) -> str:
    return key


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


async def generation_made_up(*, token_ids, generate, settings):
    turn = await generate(token_ids)
    return replace(turn, response_ids=[*turn.response_ids, 7])


async def generation_nothing(*, token_ids, generate, settings):
    await generate(token_ids)


async def evaluation_short(*, prompts, play, settings):
    return [[await play(0)]]


async def evaluation_blocking(*, prompts, play, settings):
    os._exit(5)


def selection_all(*, groups, count, settings):
    return range(len(groups))


def curriculum_twice(*, candidates, history, count, settings):
    return [0] * count


def optimizer_still(*, weight, grad, first, second, step, lr, weight_decay, settings):
    return weight - lr * grad


def optimizer_whole(*, weight, grad, first, second, step, lr, weight_decay, settings):
    weight.sub_(lr * grad / grad.norm())


def before_log_probs_raises(*, model, stream):
    raise KeyError(stream)


def layer_spec_none(*, spec, config, facts, layer):
    spec.submodules.mlp = None


def format_bare(*, name, tensor):
    return [tensor]


def all_samples_leaves(*, step, groups, refused):
    os._exit(3)


def metrics_text(*, groups, settings):
    return {"solved": "most"}


def sample_filter_undecided(*, sample, settings):
    return None


def task_lists(*, seed):
    return [["What?"]] * 3


def tracker_prints(*, step, scalars):
    for _ in range(1600):
        print("x" * 65_536, flush=True)


def after_save_leaves(*, step, folder):
    raise SystemExit(2)


def before_step_greedy(*, step, groups):
    return bytearray(20 * 1024**3)


class channel_half:
    def __init__(self, *, backend, host, timeout_s):
        pass

    def send(self, buckets):
        pass


CASES = {
    "agent_raises": "tools",
    "agent_silent": "without one call of session.generate",
    "agent_wrong": "instead of an Outcome",
    "tool_untyped": "does not declare the type of `key`",
    "tool_silent": "it has no docstring",
    "filter_undecided": "returned 0.5",
    "shaping_short": "1 rewards for 4 samples",
    "objective_none": "'NoneType' object has no attribute",
    "objective_scalar": "it returned shape []",
    "advantage_raises": "'Group' object has no attribute 'difficulty'",
    "advantage_flat": "failed",
    "advantage_nan": "returned nan",
    "credit_rows": "each has a value",
    "credit_nan": "not finite",
    "surrogate_bare": "returned a Tensor",
    "surrogate_scalar": "a loss of shape []",
    "surrogate_centred": "packed together",
    "surrogate_infinite": "not finite",
    "surrogate_without": "it lacks the parameters tokens, settings",
    "correction_negative": "a weight is negative",
    "correction_scalar": "weights of shape []",
    "aggregation_number": "returned 1.0",
    "aggregation_zero": "count=0.0",
    "schedule_negative": "at least 0",
    "schedule_text": "at least 0",
    "generation_made_up": "do not form a token sequence that ends with a call",
    "generation_nothing": "returned None",
    "evaluation_short": "a list of at least one sample",
    "evaluation_blocking": "its process ended with exit code 5",
    "selection_all": "choose 2 of 3",
    "curriculum_twice": "returned [0, 0]",
    "optimizer_still": "of [",
    "optimizer_whole": "ranks have parts",
    "before_log_probs_raises": "KeyError",
    "layer_spec_none": "Megatron builds a layer from a ModuleSpec",
    "format_bare": "pairs of a name and a tensor",
    "all_samples_leaves": "its process ended with exit code 3",
    "metrics_text": "most",
    "sample_filter_undecided": "returned None",
    "task_lists": "it is a mapping",
    "tracker_prints": "it printed more than 8",
    "after_save_leaves": "SystemExit(2)",
    "before_step_greedy": "MemoryError",
    "channel_half": "it has no open, verify, close",
}
"""What is said of each."""
