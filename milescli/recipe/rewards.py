"""Settings of the built-in rewards that have some: sections of `rollout`; and the rules of
rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from milescli.recipe.requests import EXAMPLE_URL, Requests, check_url
from milescli.recipe.section import NonNegativeFloat, Positive, PositiveFloat, Rule, Section

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe


class FormatSettings(Section):
    """The reward `format`: what a response must look like."""

    answer: Literal["any", "boxed", "mark", "none"] = "any"
    r"""Where the answer stands. boxed: in `\\boxed{}`; mark: behind `####`; any: either; none:
    anywhere."""
    think_tags: bool = False
    """The response begins with `<think> ... </think>`, once, and the answer comes after it. Where a
    chat template has written `<think>` already, the response has only the closing tag."""


class MatchSettings(Section):
    """The rewards `exact_match` and `f1`: what is compared, and how."""

    answer: Literal["whole", "tags", "boxed", "last_line"] = "whole"
    r"""Which part of the response. tags: in the last `<answer>...</answer>`; boxed: in the last
    `\boxed{}`; where it has none, the reward is 0."""
    normalize: Literal["none", "squad"] = "none"
    """Of `exact_match` (`f1` is always normalised). squad: small letters, without punctuation and
    articles; the label may be a JSON list of texts, of which any will do."""


class LengthSettings(Section):
    """The reward `length`: a penalty for long responses."""

    target_tokens: Positive | None = None
    """Up to here nothing is taken off; null: half of `max_response_tokens`."""
    limit_tokens: Positive | None = None
    """From here on the whole penalty, -1, is; it rises linearly in between. null:
    `max_response_tokens`."""


class InstructionSettings(Section):
    """The reward `instructions`: when a response has followed them."""

    score: Literal["all", "share"] = "all"
    """all: 1 where every instruction is followed, else 0; share: the share that is."""
    mode: Literal["strict", "loose"] = "strict"
    """loose: also where the response without its first or last line, or without `*`, does."""


class JudgeSettings(Requests):
    """The reward `judge`: a language model behind an OpenAI-compatible endpoint scores."""

    url: str | None = None
    """Of the endpoint, up to its version: http://127.0.0.1:8000/v1."""
    model: str | None = None
    """As the endpoint calls it."""
    prompt: str | None = None
    """What the judge is asked: a text, or the path of a .txt or .md file. {prompt}, {response} and
    {label} in it are filled in. null: a template that asks for a score from 0 to 10."""
    images: bool = True
    """Send the images of the prompt to the judge, too. Set it to false for a judge that reads text
    alone."""
    parse: str = r"(?i)score\s*[:=]?\s*\**\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score; its last match in the reply counts."""
    scale: PositiveFloat = 10.0
    """The reward is the score divided by this."""
    max_tokens: Positive = 512
    """Of a reply."""
    temperature: NonNegativeFloat = 0.0
    max_requests: Positive | None = None
    """Budget: requests that one start of the run may send, retries included; then it stops with an
    error. null: no bound."""
    unparsed: Literal["zero", "error"] = "zero"
    """What happens to a reply without a score. zero: the reward is 0, which is counted and logged;
    error: the run stops."""


class CodeSettings(Section):
    """The reward `code`: how the code of a response is run, and what counts."""

    score: Literal["all", "share"] = "all"
    """all: 1 where every test is passed, else 0; share: the share that is."""
    limit_s: PositiveFloat = 10.0
    """Of one test."""
    total_s: PositiveFloat = 60.0
    """Of all tests of a response; those that are not done by then are not passed."""
    memory_mib: Annotated[int, Field(ge=64)] = 512
    """Of all processes of one test together, in MiB."""
    concurrency: Annotated[int, Field(ge=1, le=128)] | None = None
    """Responses at once; each takes about a core. null: as many as this machine has cores."""
    packages: str | None = None
    """A folder of modules that the code may import, read-only, e.g. the site-packages of an
    environment with numpy and sympy; own: those that miles runs with; null: the standard library
    alone."""
    url: str | None = None
    """Of a server of sandbox-fusion that runs the code instead of this machine:
    http://HOST:8080."""


class RewardModelSettings(Section):
    """The reward `reward_model`: a model with a score head scores."""

    path: str | None = None
    """A folder or hub name of a model for sequence classification with one label, or the directory
    of a run of `train.objective=reward_model`. It reads the policy's tokens: both have the same
    tokenizer."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    clip: PositiveFloat | None = None
    """Scores are cut to [-clip, clip]; null: they are not."""


class RemoteSettings(Requests):
    """The reward `remote`: a server of yours scores, by HTTP."""

    url: str | None = None
    """Gets a POST of JSON {prompt, response, label} (of lists: see `group`)."""
    group: bool = False
    """Send all responses to a prompt in one request: {prompt, responses, label}."""


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for the rewards' weights, and for the settings of those that the recipe
    names."""
    rollout, weights = recipe.rollout, recipe.rollout.reward_weights
    yield Rule(
        not weights,
        "`rollout.reward` names no reward",
        why="an empty mapping scores nothing",
        fix="--set rollout.reward=math",
    )
    yield Rule(
        not any(weights.values()),
        "every part of `rollout.reward` weighs nothing",
        why=f"{rollout.reward_name}: all samples would have the reward 0",
        fix=f"--set 'rollout.reward={{{next(iter(weights))}: 1.0}}'",
    )
    (target, limit), longest = rollout.length_bounds, rollout.max_response_tokens
    yield Rule(
        "length" in rollout.reward_names and target >= min(limit, longest),
        f"the length penalty cannot begin at {target} tokens",
        why=f"it is whole at {limit}, and a response has {longest} at most "
        "(`rollout.max_response_tokens`): there is no room to rise",
        fix=f"--set rollout.length.target_tokens={max(1, min(limit, longest) // 2)}",
    )
    if "judge" in rollout.reward_names:
        yield from _url_rules(rollout.judge.url, "rollout.judge", reward="judge")
        yield from _judge_rules(rollout.judge)
    yield Rule(
        recipe.asks_reward_model and not rollout.reward_model.path,
        "the reward `reward_model` has no model",
        why="`rollout.reward_model.path` says which one scores",
        fix=[
            "--set rollout.reward_model.path=runs/NAME   # of train.objective=reward_model",
            "miles launch --recipe quickstart-reward-model   # to train one",
        ],
    )
    if "remote" in rollout.reward_names:
        url = rollout.remote_reward.url
        yield from _url_rules(url, "rollout.remote_reward", reward="remote")


def _judge_rules(judge: JudgeSettings) -> Iterator[Rule]:
    yield Rule(
        not judge.model,
        "the judge has no model",
        why="`rollout.judge.model` says which of the endpoint's models scores",
        fix="--set rollout.judge.model=Qwen/Qwen3-32B",
    )
    try:
        why = "its first group is the score, and it has none"
        is_right = re.compile(judge.parse).groups >= 1
    except re.error as error:
        why, is_right = f"it is no regular expression: {error}", False
    yield Rule(
        not is_right,
        f"`rollout.judge.parse` cannot be `{judge.parse}`",
        why=why,
        fix=r"--set 'rollout.judge.parse=Score: (\d+)'",
    )


def _url_rules(url: str | None, section: str, *, reward: str) -> Iterator[Rule]:
    yield Rule(
        not url,
        f"the reward `{reward}` has no address",
        why=f"`{section}.url` is not set",
        fix=f"--set {section}.url={EXAMPLE_URL}",
    )
    check_url(url or "", key=f"{section}.url", section=section, example=EXAMPLE_URL)
