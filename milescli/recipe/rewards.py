"""Settings of the built-in rewards that have some: sections of `rollout`. Part of the schema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from milescli.recipe.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


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


class Requests(Section):
    """How a server is asked by HTTP."""

    api_key_env: str | None = None
    """Name of the environment variable that holds the API key, sent as `Authorization: Bearer`;
    null: none is sent. The key itself is written nowhere."""
    timeout_s: PositiveFloat = 60.0
    """Bound on one request."""
    retries: NonNegative = 3
    """Further requests after one that failed for a while (429, 5xx, no connection), with growing
    pauses."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16
    """Requests at once."""


class JudgeSettings(Requests):
    """The reward `judge`: a language model behind an OpenAI-compatible endpoint scores."""

    url: str | None = None
    """Of the endpoint, up to its version: http://127.0.0.1:8000/v1."""
    model: str | None = None
    """As the endpoint calls it."""
    prompt: str | None = None
    """What the judge is asked: a text, or the path of a .txt or .md file. {prompt}, {response} and
    {label} in it are filled in. null: a template that asks for a score from 0 to 10."""
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
