"""The protocols that rollout needs others to implement: an engine that samples, a reward that
scores. Implementations live elsewhere."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from milescli.core.events import PublishStats
from milescli.core.types import (
    NO_GUESSES,
    EngineAddress,
    Guesses,
    ImageSpan,
    Prompt,
    RoutedExperts,
    StopReason,
    VersionSpan,
    WeightVersion,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Asks an engine for one response: token ids in, token ids out."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 1.0
    """0.0: greedy."""
    top_p: float = 1.0
    top_k: int = -1
    stop: list[str] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)
    """Tokens that end the response, besides those that the engines know."""
    seed: int | None = None
    """Equal seed, prompt and weights give equal tokens."""
    conversation: int | None = None
    """Positive id that the requests of one conversation share. They go to the engine that has
    cached their prefix, unless it is busier than the others."""
    images: Sequence[tuple[ImageSpan, bytes]] = ()
    """Positions of images in `prompt_ids`, in order, and the PNG of each."""
    want_routed_experts: bool = False
    num_known_routes: int = 0
    """Number of leading prompt tokens whose routed experts the caller has; the returned record
    begins after them."""
    num_begun: Callable[[Sequence[int]], int] | None = None
    """Returns how many of the last tokens of a response may be the beginning of a stop string. A
    response that is paused there samples them anew, because engines search only what they sample
    after the pause. None: they are kept."""
    on_tokens: Callable[[Sequence[int]], None] | None = None
    """Called every few tokens with all tokens of the response so far. None: the response arrives as
    a whole, which costs the engines less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Holds an engine's response."""

    response_ids: list[int]
    """[num_response_tokens] including the end-of-sequence token, if it was sampled."""
    logprobs: array[float]
    """[num_response_tokens] natural log, at the sampling temperature."""
    stop_reason: StopReason
    version_spans: list[VersionSpan]
    """Weight versions of the tokens; positions count from the start of the response."""
    routed_experts: RoutedExperts | None = None
    """Experts of prompt and response, without the first `num_known_routes` tokens."""
    guesses: Guesses = NO_GUESSES
    """Counts of the tokens that speculative decoding guessed."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Turn:
    """Holds one call of the policy by an agent: the prompt and the response."""

    prompt_ids: Sequence[int]
    """[num_prompt_tokens] everything before the response."""
    response_ids: list[int]
    """[num_response_tokens] including the end-of-sequence token, if it was sampled."""
    text: str
    """The response, decoded, without special tokens but those between which the model thinks."""
    stop_reason: StopReason
    logprobs: Sequence[float] = ()
    """[num_response_tokens] natural log, at the sampling temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """Describes a tool call of the policy."""

    name: str
    """As the policy wrote it; a tool of this name may not exist."""
    arguments: str
    """As the policy wrote them: JSON, if it is correct."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """Holds a response that was parsed in its family's format."""

    content: str
    reasoning: str | None = None
    """None: there is none, or no parser separated it."""
    calls: Sequence[ToolCall] = ()
    malformed: str | None = None
    """Why a tool call could not be parsed; None: none failed."""


class ReplyParser(Protocol):
    """Knows how a model family writes its reasoning and its tool calls."""

    async def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]], *, prompt_end: str = ""
    ) -> Parsed:
        """Parse `text`, a response with its special tokens except the end-of-sequence token.
        `tools`: JSON schemas of the tools that may be called. `prompt_end`: the text before the
        response; a template may have opened the reasoning at its end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Holds one turn of the policy in a chat."""

    turn: Turn
    message: Mapping[str, Any]
    """The message in OpenAI's form, to append to the messages: `role`, `content`, and
    `reasoning_content` and `tool_calls` where there are any."""
    calls: Sequence[ToolCall] = ()
    """In the order of the message's `tool_calls`."""
    malformed: str | None = None
    """Why a tool call could not be parsed; None: none failed."""


class Session(Protocol):
    """Lets the agent of one sample call the policy. Every token that the policy samples is recorded
    exactly and becomes training data; no text is tokenised a second time."""

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Turn:
        """Sample a response to `token_ids`, with the recipe's sampling settings unless arguments
        override them. A call whose tokens begin with those of an earlier turn (prompt and response)
        continues that trajectory; any other call begins a new one. Raises AgentError if `token_ids`
        leave no room for a response, WaitTimeout or WorkerDied if the engine fails."""
        ...

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Reply:
        """Sample a reply to messages in OpenAI's form. The prompt has earlier turns of the policy
        as the tokens that it sampled, with the template's text around them. If the template renders
        earlier turns differently (without their reasoning, say), the rendered text starts a new
        trajectory and is counted. `tools`: JSON schemas. Raises as `generate`, and ContextFull if
        the messages leave no room for a response."""
        ...

    def played_by(self, role: str) -> Session:
        """Return a session with the untrained model that plays `role`
        (`rollout.roles.NAME.policy`); none of its tokens become training data. Raises AgentError if
        the role has no such model."""
        ...

    @property
    def turns(self) -> Sequence[Turn]:
        """Return the turns so far, in the order of the calls."""
        ...

    @property
    def base_url(self) -> str:
        """Return the URL that serves the session in the forms of OpenAI and Anthropic while the
        agent runs. Raises AgentError if the session is not served."""
        ...

    @property
    def api_key(self) -> str:
        """Return the key of the session at its URL."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Holds what an agent returns when its episode has ended."""

    text: str
    """What the recipe's reward scores."""
    reward: float | None = None
    """The reward, if the agent or its environment computes it; None: the recipe's reward scores
    `text`."""
    turn_rewards: Sequence[float] = ()
    """[len(session.turns)] rewards of the single turns, if they have any; their sum is the reward
    if `reward` is None."""
    turn_roles: Sequence[str] = ()
    """[len(session.turns)] the role that the policy played in each turn, if it plays several: each
    role has trajectories of its own."""
    role_texts: Mapping[str, str] = field(default_factory=dict)
    """Role -> the text that the role's own reward scores, if `rollout.roles` sets one."""
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards by role, if the agent determines them itself."""
    is_cut: bool = False
    """True if a bound ended the episode: the sample counts as truncated."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the episode by name (tool calls, seconds, ...); each step reports their means."""


class Agent(Protocol):
    """Turns one prompt into a sample: an async function. Many calls run at once in one event loop.
    Sees neither engine nor weights."""

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """Play one sample; must let the session generate at least once. An exception stops the run,
        with the traceback in the error."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAddress:
    """Holds the URL and the key by which a session is served over HTTP."""

    base_url: str
    """http://host:port/v1"""
    api_key: str = field(repr=False)


class SessionServer(Protocol):
    """Serves sessions over HTTP."""

    def open(self, session: Session) -> SessionAddress:
        """Serve the session from now on."""
        ...

    def close(self, address: SessionAddress) -> None:
        """Stop serving the session."""
        ...


class RolloutEngine(Protocol):
    """Defines a fleet of engines behind one interface. All methods are bounded in time and raise
    WaitTimeout or WorkerDied with names. A dead engine is removed if a supervisor replaces it: its
    requests go to the others, or to the new one."""

    @property
    def engines(self) -> Sequence[EngineAddress]:
        """Return the engines that can be called now."""
        ...

    async def remove_dead(self) -> bool:
        """Check the health of each engine and remove a dead one. Return True if one was removed.
        Raises WorkerDied if nothing replaces it."""
        ...

    async def admit(self, engine: EngineAddress, version: WeightVersion) -> None:
        """Add a new engine that already holds `version`."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one response. Many calls run at once; the fleet batches them. The spans of the
        result say which weights sampled which tokens; `pause` says what a weight update does to the
        call."""

    async def score(self, token_ids: list[int]) -> array[float]:
        """Return [len(token_ids) - 1] the log-prob of each token after the first, given those
        before it, at temperature 1."""

    async def pause(self) -> PublishStats:
        """Stop sampling, and return when no request is in flight. `rollout.on_update` decides
        whether `generate` continues such requests after `resume`, restarts them, or lets them
        finish first. Idempotent."""
        ...

    async def pause_some(self, urls: Collection[str]) -> PublishStats:
        """Pause only these engines, as `pause` does; their requests continue on other engines."""
        ...

    async def resume_some(self, urls: Collection[str], version: WeightVersion) -> None:
        """Resume these engines after `pause_some`, as `resume` does; they hold `version`."""

    async def hold(self, version: WeightVersion) -> None:
        """Record that all engines have the weights of `version`. Call it after the last
        `resume_some`."""

    async def resume(self, version: WeightVersion) -> None:
        """Continue after `pause`: the engines hold `version` from here on, and their prefix caches
        are empty. The only call that announces both. Idempotent."""

    async def sleep(self) -> None:
        """Give the device memory of weights and KV cache to the trainer. The caller has no request
        in flight."""

    async def sleep_weights(self) -> None:
        """Release the memory of `wake_weights` to the trainer again."""

    async def wake_weights(self) -> None:
        """Take back the memory of the weights, whose content is undefined until the next
        publish."""

    async def wake_cache(self) -> None:
        """Take back the memory of the KV cache; the engines answer again."""


class RewardFn(Protocol):
    """Scores one response. Plain or `async`; may be called from many threads at once.

    An object may also have these attributes: `max_concurrency: int`, the useful number of
    concurrent calls; `within(timeout_s) -> RewardFn`, the same reward bounded below the recipe's
    `reward_timeout_s`; `check_label(label) -> str | None`, why no response can be right for a label
    (None: one can), called once for each different label before a run starts; `needs_label: bool`,
    rows without a label are refused; of a built-in one, `answer(response) -> str | None`, what a
    response states (None: nothing), by which an evaluation counts majorities; `examples`, what
    `miles plugins check` scores where labels have a form of their own: (prompt, response, label)
    each.
    """

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """Return the reward, by custom in [0, 1]. `prompt` and `response`: text without special
        tokens, except those of `response` that separate the thinking from the answer. If the call
        raises, it is retried `rollout.reward_retries` times; then the sample is excluded, or the
        run stops with the traceback (`max_unscored_share`)."""
        ...


class BoundedReward(Protocol):
    """Defines a reward that bounds its calls itself, in its own processes."""

    max_concurrency: int
    """Useful number of concurrent calls."""
    scores_groups: bool
    """True if the reward takes all responses to a prompt at once: call `score_group`, not `score`.
    """

    async def score(
        self, *, prompt: str, response: str, label: str | None, timeout_s: float
    ) -> object:
        """Return what the reward returns. Raises TimeoutError or CallFailed, with a message for the
        user."""
        ...

    async def score_group(
        self, *, prompt: str, responses: list[str], label: str | None, timeout_s: float
    ) -> list[float]:
        """Return one reward per response. Raises as `score`."""
        ...


class PromptSource(Protocol):
    """Yields prompts in a fixed, endless order that can be resumed: the position is the whole
    state."""

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """Return the next `count` prompts, each with its epoch, and advance the position."""
        ...

    @property
    def position(self) -> int:
        """Return the number of prompts taken since the start of the run, over all epochs."""
        ...

    def seek(self, position: int) -> None:
        """Go to a saved position."""
        ...

    def __len__(self) -> int:
        """Return the number of prompts per epoch."""
        ...
