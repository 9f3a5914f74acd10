"""What the rollout room needs from others: an engine that samples, a reward that scores. Protocols
only; implementations live elsewhere."""

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
    """One response that is wanted. Token ids in, token ids out."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 1.0
    """0.0: greedy."""
    top_p: float = 1.0
    top_k: int = -1
    stop: list[str] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)
    """Tokens that end it, besides those that the engines know."""
    seed: int | None = None
    """Equal seed, prompt and weights give equal tokens."""
    conversation: int | None = None
    """Above 0; of requests that go on from one another: they are made to one engine, which has kept
    their beginning, where it is not busier than the others."""
    images: Sequence[tuple[ImageSpan, bytes]] = ()
    """Where images stand in `prompt_ids`, in order, and the PNG of each."""
    want_routed_experts: bool = False
    num_known_routes: int = 0
    """Tokens of the prompt's beginning whose routed experts the caller has; the record that comes
    back begins after them."""
    on_tokens: Callable[[Sequence[int]], None] | None = None
    """Told all tokens of the response so far, every few tokens. None: the response comes as a
    whole, which costs the engines less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Holds an engine's response."""

    response_ids: list[int]
    """[num_response_tokens] including the end-of-sequence token where there is one."""
    logprobs: array[float]
    """[num_response_tokens] natural log, at the sampling temperature."""
    stop_reason: StopReason
    version_spans: list[VersionSpan]
    """Relative to the response."""
    routed_experts: RoutedExperts | None = None
    """Experts of prompt and response, without the first `num_known_routes` tokens."""
    guesses: Guesses = NO_GUESSES
    """What the engine guessed ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call of the policy by an agent: what it was given, and what it said."""

    prompt_ids: Sequence[int]
    """[num_prompt_tokens] everything before the response."""
    response_ids: list[int]
    """[num_response_tokens] including the end-of-sequence token where there is one."""
    text: str
    """The response, decoded, without special tokens."""
    stop_reason: StopReason
    logprobs: Sequence[float] = ()
    """[num_response_tokens] natural log, at the sampling temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """Describes a tool call of the policy."""

    name: str
    """As the policy wrote it; it may be of no tool that there is."""
    arguments: str
    """As the policy wrote them: JSON, where it is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """Holds a response that was parsed in its family's format."""

    content: str
    reasoning: str | None = None
    """None: there is none, or nobody told it apart."""
    calls: Sequence[ToolCall] = ()
    malformed: str | None = None
    """Why a call that was begun could not be read."""


class ReplyParser(Protocol):
    """Knows how a model family writes its reasoning and its tool calls."""

    async def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]], *, prompt_end: str = ""
    ) -> Parsed:
        """Parse `text`, a response with its special tokens except the end-of-sequence token.
        `tools` are JSON schemas of what may be called. `prompt_end` is the text before the
        response, whose end matters: a template may have opened the reasoning."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One turn of the policy in a chat."""

    turn: Turn
    message: Mapping[str, Any]
    """In OpenAI's form, to be put at the end of the messages: `role`, `content`,
    `reasoning_content` and `tool_calls` where there are any."""
    calls: Sequence[ToolCall] = ()
    """In the order of the message's `tool_calls`."""
    malformed: str | None = None
    """Why a call that was begun could not be read."""


class Session(Protocol):
    """The policy, as the agent of one sample sees it. Every token that it makes is recorded exactly
    and becomes training data; nothing is ever tokenised again from text."""

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Turn:
        """Sample a response to `token_ids`, by the recipe's sampling settings where nothing else is
        said. A call whose tokens begin with those of an earlier turn (prompt and response) goes on
        with that trajectory; any other begins a new one.

        Raises AgentError where `token_ids` leave no room for a response, WaitTimeout or WorkerDied
        where the engine fails.
        """
        ...

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Reply:
        """As `generate`, for messages in OpenAI's form. What the policy said in earlier turns is
        the tokens that it made then, and the template's text around them; where the template
        writes earlier turns otherwise than they were (without their reasoning, say), the rendered
        text is a new trajectory, and is counted. `tools`: JSON schemas.

        Raises as `generate`, and ContextFull where the messages leave no room for a response.
        """
        ...

    def played_by(self, role: str) -> Session:
        """What the model is asked by that plays `role` and is not trained
        (`rollout.roles.NAME.policy`); nothing of it becomes training data. Raises AgentError where
        there is none."""
        ...

    @property
    def turns(self) -> Sequence[Turn]:
        """Return the turns so far, in order."""
        ...

    @property
    def base_url(self) -> str:
        """Where the session is had by HTTP, in the forms of OpenAI and Anthropic, while the agent
        runs. Raises AgentError where it is not served."""
        ...

    @property
    def api_key(self) -> str:
        """Return the key of the session at its URL."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an agent hands over when its episode has ended."""

    text: str
    """What the recipe's reward scores."""
    reward: float | None = None
    """Where the agent (its environment) knows the reward itself; None: the recipe's reward scores
    `text`."""
    turn_rewards: Sequence[float] = ()
    """[len(session.turns)] where each turn has one of its own; their sum is the reward, where
    `reward` is None."""
    turn_roles: Sequence[str] = ()
    """[len(session.turns)] whom the policy played in each turn, where it plays several: the turns
    of a role are trajectories of its own."""
    role_texts: Mapping[str, str] = field(default_factory=dict)
    """Texts by role that spoke: what its own reward scores, if `rollout.roles` sets one."""
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards by role, if the agent determines them itself."""
    is_cut: bool = False
    """The episode was ended by a bound: it counts as truncated."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What the episode was like, by name (tool calls, seconds, ...): their means are figures of the
    step."""


class Agent(Protocol):
    """How one prompt becomes a sample: an async function. Many run at once in one event loop. Sees
    neither engine nor weights."""

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """Called once per sample; must let the session generate at least once. Raising stops the
        run, with the traceback in the error."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where a session is had by HTTP."""

    base_url: str
    """http://host:port/v1"""
    api_key: str = field(repr=False)


class Doors(Protocol):
    """Serves sessions by HTTP."""

    def open(self, session: Session) -> Door:
        """Serve the session from now on."""
        ...

    def close(self, door: Door) -> None:
        """Stop serving the session."""
        ...


class RolloutEngine(Protocol):
    """Defines a fleet of engines behind one interface. All methods are bounded in time and raise
    WaitTimeout or WorkerDied with names. A dead engine is removed if somebody replaces it: its
    requests go to the others, or to the new one."""

    @property
    def engines(self) -> Sequence[EngineAddress]:
        """Return the engines that can be called now."""
        ...

    async def remove_dead(self) -> bool:
        """Check the health of each engine. Returns True if a dead one was removed; raises
        WorkerDied if nobody replaces it."""
        ...

    async def admit(self, engine: EngineAddress, version: WeightVersion) -> None:
        """Add a new engine that already holds `version`."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one response. Many calls run at once; the fleet batches them. Its spans say which
        weights made which tokens; what becomes of it at a pause, see `pause`."""

    async def score(self, token_ids: list[int]) -> array[float]:
        """Return [len(token_ids) - 1] the log-prob of each token after the first, given those
        before it, at temperature 1."""

    async def pause(self) -> PublishStats:
        """Stop sampling. What is in flight is continued by `generate` after `resume`, begun anew,
        or waited for, as `rollout.on_update` says; returns when nothing is. Idempotent."""
        ...

    async def pause_some(self, urls: Collection[str]) -> PublishStats:
        """Pause as `pause`, but these engines alone: what they ran goes on at others."""
        ...

    async def resume_some(self, urls: Collection[str], version: WeightVersion) -> None:
        """Continue with them after `pause_some`, as `resume` does; they hold `version`."""

    async def hold(self, version: WeightVersion) -> None:
        """All engines hold `version`, after the last `resume_some`."""

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

    An object may have more, looked up by name: `max_concurrency: int`, calls that make sense at
    once; `within(timeout_s) -> RewardFn`, the same reward bounded below the recipe's
    `reward_timeout_s`; `check_label(label) -> str | None`, why no response can be right for a label
    (None: one can), called once for each different label before a run starts; `needs_label: bool`,
    rows without a label are refused; of a built-in one, `answer(response) -> str | None`, what a
    response states (None: nothing), by which an evaluation counts majorities; `examples`, what
    `miles plugins check` scores where labels have a form of their own: (prompt, response, label)
    each.
    """

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """`prompt` and `response` are text without special tokens; returns the reward, by custom in
        [0, 1]. Where it raises, it is tried again `rollout.reward_retries` times; then the
        sample is excluded, or the run stops with the traceback (`max_unscored_share`)."""
        ...


class BoundedReward(Protocol):
    """Defines a reward that bounds its calls itself, in its own processes."""

    max_concurrency: int
    """Calls that make sense at once."""
    scores_groups: bool
    """It takes all responses to a prompt at once: `score_group`, not `score`."""

    async def score(
        self, *, prompt: str, response: str, label: str | None, timeout_s: float
    ) -> object:
        """What the reward says. Raises TimeoutError or CallFailed, told for the user."""
        ...

    async def score_group(
        self, *, prompt: str, responses: list[str], label: str | None, timeout_s: float
    ) -> list[float]:
        """One for each response. Raises as `score`."""
        ...


class PromptSource(Protocol):
    """Endless, ordered, and resumable: its position is its whole state."""

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """The next `count` prompts, each with its epoch; moves the position."""
        ...

    @property
    def position(self) -> int:
        """Prompts taken since the start of the run, over all epochs."""
        ...

    def seek(self, position: int) -> None:
        """Go to a saved position."""
        ...

    def __len__(self) -> int:
        """Prompts per epoch."""
        ...
