"""Defines the settings of built-in rewards, as sections of `rollout`. With the rules for
rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from milescli.recipe.requests import EXAMPLE_URL, Requests, check_url
from milescli.recipe.section import (
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Rule,
    Section,
    set_option,
)

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe, Rollout


class FormatSettings(Section):
    """The reward `format`: what a response must look like."""

    answer: Literal["any", "boxed", "mark", "none"] = "any"
    r"""Where the answer must appear. boxed: in `\boxed{}`; mark: after `####`; any: either; none:
    anywhere."""
    think_tags: bool = False
    """The response must start with `<think> ... </think>`, exactly once, followed by the answer. If
    the chat template already writes `<think>`, the response contains only the closing tag."""


class MatchSettings(Section):
    """The rewards `exact_match` and `f1`: what they compare, and how."""

    answer: Literal["whole", "tags", "boxed", "last_line"] = "whole"
    r"""Which part of the response to compare. tags: the content of the last `<answer>...</answer>`;
    boxed: of the last `\boxed{}`; if the response has none, the reward is 0."""
    normalize: Literal["none", "squad"] = "none"
    """Normalisation for `exact_match` (`f1` always normalises). squad: lower case, without
    punctuation and articles; the label may be a JSON list of texts, any of which counts as
    correct."""


class LengthSettings(Section):
    """The reward `length`: a penalty for long responses."""

    target_tokens: Positive | None = None
    """Length without a penalty, in tokens; null: half of `max_response_tokens`."""
    limit_tokens: Positive | None = None
    """Length from which the full penalty of -1 applies, in tokens; it rises linearly in between.
    null: `max_response_tokens`."""


class InstructionSettings(Section):
    """The reward `instructions`: when a response counts as following its instructions."""

    score: Literal["all", "share"] = "all"
    """all: 1 if the response follows every instruction, else 0; share: the share of instructions
    that it follows."""
    mode: Literal["strict", "loose"] = "strict"
    """loose: a response also counts if it follows the instruction without its first or last line,
    or without `*`."""


class JudgeSettings(Requests):
    """The reward `judge`: a language model behind an OpenAI-compatible endpoint scores
    responses."""

    url: str | None = None
    """Address of the endpoint, including its version: http://127.0.0.1:8000/v1."""
    model: str | None = None
    """Name of the model at the endpoint."""
    prompt: str | None = None
    """Prompt for the judge: a text, or the path of a .txt or .md file. {prompt}, {response} and
    {label} are replaced in it. null: a template that asks for a score from 0 to 10."""
    images: bool = True
    """Send the images of the prompt to the judge. Set it to false for a judge that accepts only
    text."""
    parse: str = r"(?i)score\s*[:=]?\s*\**\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score; the last match in the reply counts."""
    scale: PositiveFloat = 10.0
    """The reward is the score divided by this number."""
    max_tokens: Positive = 512
    """Longest reply in tokens."""
    temperature: NonNegativeFloat = 0.0
    max_requests: Positive | None = None
    """Maximum number of requests of one start of the run, including retries; later ones
    fail. null: no limit."""
    unparsed: Literal["zero", "error"] = "error"
    """What to do with a reply that contains no score, after asking once more. error: the judge has
    failed, and the sample is excluded (`rollout.max_unscored_share`); zero: the reward is 0, which
    is counted and logged."""


class CodeSettings(Section):
    """The reward `code`: how to run the code of a response, and what counts."""

    score: Literal["all", "share"] = "all"
    """all: 1 if the code passes every test, else 0; share: the share of tests that it passes."""
    limit_s: PositiveFloat = 10.0
    """Time limit of one test."""
    total_s: PositiveFloat = 60.0
    """Time limit for all tests of a response; unfinished tests count as failed."""
    memory_mib: Annotated[int, Field(ge=64)] = 512
    """Memory limit of one test in MiB, for all its processes together."""
    concurrency: Annotated[int, Field(ge=1, le=128)] | None = None
    """Number of responses tested at once; each uses about one core. null: the number of cores of
    this machine."""
    packages: str | None = None
    """Folder of modules that the code may import, read-only, e.g. the site-packages of an
    environment with numpy and sympy; own: the modules of miles's own environment; null: only the
    standard library."""
    url: str | None = None
    """Address of a sandbox-fusion server that runs the code instead of this machine:
    http://HOST:8080."""


class RewardModelSettings(Section):
    """The reward `reward_model`: a model with a score head scores responses."""

    path: str | None = None
    """Folder or hub name of a sequence-classification model with one label, or the directory of a
    run with `train.objective=reward_model`. It reads the policy's tokens, so both must use the same
    tokenizer."""
    revision: str | None = None
    """Revision on the hub (branch, tag or commit)."""
    clip: PositiveFloat | None = None
    """Clip scores to [-clip, clip]; null: no clipping."""


class RemoteSettings(Requests):
    """The reward `remote`: your own server scores responses over HTTP."""

    url: str | None = None
    """Address of the server. It receives a POST request with JSON {prompt, response, label} (lists
    of them with `group`)."""
    group: bool = False
    """Send all responses to a prompt in one request: {prompt, responses, label}."""


def _room_for_length(rollout: Rollout) -> str:
    """Return the options with which the penalty of `length` can rise."""
    limit, longest = rollout.length.limit_tokens, rollout.max_response_tokens
    target = max(1, min(limit or longest, longest) // 2)
    bounds = {"length.limit_tokens": limit, "max_response_tokens": longest}
    raised = [set_option(f"rollout.{key}", 2) for key, bound in bounds.items() if bound == 1]
    return " ".join([set_option("rollout.length.target_tokens", target), *raised])


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for the rewards' weights, and for the settings of those that the recipe
    names."""
    rollout, weights = recipe.rollout, recipe.rollout.reward_weights
    yield Rule(
        not weights,
        "`rollout.reward` does not name a reward",
        why="the mapping is empty",
        fix="--set rollout.reward=math",
    )
    yield Rule(
        not any(weights.values()),
        "all weights of `rollout.reward` are 0",
        why=f"{rollout.reward_name}, so every sample would have the reward 0",
        fix=f"--set 'rollout.reward={{{next(iter(weights))}: 1.0}}'",
    )
    (target, limit), longest = rollout.length_bounds, rollout.max_response_tokens
    yield Rule(
        "length" in recipe.reward_names and target >= min(limit, longest),
        f"the length penalty cannot start at {target} tokens",
        why=f"the full penalty applies from {limit} tokens on, and a response has at most "
        f"{longest} (`rollout.max_response_tokens`), so the penalty cannot rise",
        fix=_room_for_length(rollout),
    )
    if "judge" in recipe.reward_names:
        yield from _url_rules(rollout.judge.url, "rollout.judge", reward="judge")
        yield from _judge_rules(rollout.judge)
    yield Rule(
        recipe.uses_reward_model and not rollout.reward_model.path,
        "the reward `reward_model` needs a model",
        why="set `rollout.reward_model.path` to the model that scores",
        fix=[
            "--set rollout.reward_model.path=runs/NAME   # a run with train.objective=reward_model",
            "miles launch --recipe quickstart-reward-model   # to train such a model",
        ],
    )
    if "remote" in recipe.reward_names:
        url = rollout.remote_reward.url
        yield from _url_rules(url, "rollout.remote_reward", reward="remote")


def _judge_rules(judge: JudgeSettings) -> Iterator[Rule]:
    yield Rule(
        not judge.model,
        "the judge needs a model",
        why="set `rollout.judge.model` to the endpoint's model that scores",
        fix="--set rollout.judge.model=Qwen/Qwen3-32B",
    )
    try:
        why = "its first group is the score, and it has none"
        is_right = re.compile(judge.parse).groups >= 1
    except re.error as error:
        why, is_right = f"it is not a valid regular expression: {error}", False
    yield Rule(
        not is_right,
        f"`rollout.judge.parse` cannot be `{judge.parse}`",
        why=why,
        fix=r"--set 'rollout.judge.parse=Score: (\d+)'",
    )


def _url_rules(url: str | None, section: str, *, reward: str) -> Iterator[Rule]:
    yield Rule(
        not url,
        f"the reward `{reward}` needs an address",
        why=f"`{section}.url` is not set",
        fix=f"--set {section}.url={EXAMPLE_URL}",
    )
    check_url(url or "", key=f"{section}.url", section=section, example=EXAMPLE_URL)
