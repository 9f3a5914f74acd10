"""Records exactly the tokens that the policy samples for one agent (RecordingSession). There is one
session per sample; agents are in `milescli.agents`."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from milescli.core.concurrency import in_thread
from milescli.core.errors import AgentError, ContextFull, WorkerDied
from milescli.core.types import (
    NO_GUESSES,
    Guesses,
    Image,
    ImageSpan,
    Prompt,
    RoutedExperts,
    StopReason,
    Trajectory,
    VersionSpan,
)
from milescli.data.tokenizer import ChatTokenizer
from milescli.rollout.base import (
    Completion,
    GenerateRequest,
    Parsed,
    Reply,
    ReplyParser,
    RolloutEngine,
    Session,
    SessionServer,
    Turn,
)
from milescli.rollout.episode.conversations import Conversations, reply_message
from milescli.rollout.episode.session_base import SessionBase
from milescli.rollout.episode.shared_prefixes import Prefix, SharedPrefixes, Turns
from milescli.rollout.episode.text_pieces import OnPiece, TextPieces, before_stop, num_begun

Decode = Callable[[Iterable[int]], str]
"""Token ids of a response -> its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """Converts messages to tokens, and a response to a message."""

    tokenizer: ChatTokenizer
    parser: ReplyParser | None = None
    """None: the message is the response's text, and no tool is called."""
    session_server: SessionServer | None = None
    """None: no session is served over HTTP."""


@dataclass(slots=True)
class _TrajectoryBuilder:
    """Builds one trajectory, call by call."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    loss_mask: bytearray = field(default_factory=bytearray)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    version_spans: list[VersionSpan] = field(default_factory=list)
    routed_experts: RoutedExperts | None = None
    rewards: dict[int, float] = field(default_factory=dict)
    """Position of a turn's last token -> the turn's reward."""
    role: str | None = None
    """See Trajectory."""
    image_spans: Sequence[ImageSpan] = ()
    images: Sequence[Image] = ()
    """See Trajectory."""

    def append_given(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        self.token_ids.extend(token_ids)
        self.loss_mask.extend(bytes(len(token_ids)))
        self.logprobs.frombytes(bytes(self.logprobs.itemsize * len(token_ids)))

    def append_sampled(self, completion: Completion, routed: RoutedExperts | None) -> None:
        """Append tokens that the policy sampled. `routed`: the experts of the whole trajectory."""
        start, num_new = len(self.token_ids), len(completion.response_ids)
        self.token_ids += array("i", completion.response_ids)
        self.loss_mask.extend(b"\1" * num_new)
        self.logprobs += array("f", completion.logprobs)
        self.version_spans += [
            replace(span, start=span.start + start, end=span.end + start)
            for span in completion.version_spans
        ]
        if routed is not None:
            self.routed_experts = _append_routes(self.routed_experts, routed)

    def build(self, *, is_trained: bool) -> Trajectory:
        """Return the trajectory for training; unless `is_trained`, its loss mask is empty."""
        size = len(self.token_ids)
        return Trajectory(
            token_ids=self.token_ids,
            loss_mask=bytes(self.loss_mask) if is_trained else bytes(size),
            logprobs=self.logprobs if is_trained else array("f", bytes(4 * size)),
            version_spans=self.version_spans,
            routed_experts=self.routed_experts,
            rewards=self._reward_row() if self.rewards and is_trained else None,
            role=self.role,
            image_spans=tuple(self.image_spans),
            images=self.images,
        )

    def _reward_row(self) -> array[float]:
        row = array("f", bytes(4 * len(self.token_ids)))
        for place, reward in self.rewards.items():
            row[place] = reward
        return row


@dataclass(slots=True, kw_only=True)
class _Call:
    """Holds one call of `generate`."""

    prompt: Prefix[array[int]]
    image_spans: Sequence[ImageSpan] = ()
    completion: Completion | None = None
    """None until the engine has answered; the numbers of its experts are in `routes`."""
    routes: Prefix[bytearray] | None = None
    """Numbers of the experts of prompt and response; those of turns that continue each other are
    shared."""
    turn: int = -1
    """Index of the call in the session's turns."""

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """Return the experts of prompt and response; None if they are not known."""
        if self.completion is None or self.completion.routed_experts is None:
            return None
        assert self.routes is not None
        return replace(self.completion.routed_experts, indices=bytes(self.routes.items))


def _append_routes(old: RoutedExperts | None, new: RoutedExperts) -> RoutedExperts:
    """Return the routed experts of the whole trajectory: the old rows, which come from the weights
    that sampled them, and then the rows of `new` after them."""
    if old is None:
        return new
    row_bytes = len(old.indices) // old.num_tokens
    return replace(new, indices=old.indices + new.indices[old.num_tokens * row_bytes :])


_NUMBERS = itertools.count(1)
"""Numbers the sessions of this process."""


class RecordingSession(SessionBase):
    """Implements `milescli.rollout.base.Session`. Belongs to one event loop."""

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        prompt: Prompt,
        seed: int,
        settings: GenerateRequest,
        max_tokens: int,
        decode: Decode,
        vocab_size: int | None = None,
        chat_form: ChatForm | None = None,
        others: Mapping[str, RolloutEngine] | None = None,
        cuts_stop: bool = False,
    ) -> None:
        """Set up a session. `prompt`: the agent may show its images. `settings`: how to sample;
        prompt and seed are filled in. `max_tokens`: the longest line that the run was planned for.
        `vocab_size`: size of the model's vocabulary; a larger token id would crash the engines;
        None: the caller sends none. `chat_form`: None if no chat is used. `others`: role -> the
        untrained engine that plays it. `cuts_stop`: texts end before the stop string of the
        request, as clients of OpenAI expect; the tokens are whole."""
        self._engine = engine
        self._others = others or {}
        self._played_by: dict[str, RecordingSession] = {}
        self._prompt, self._prompt_index = prompt, prompt.index
        self._images = {image.sha256: image for image in prompt.images}
        self._shown: list[tuple[array[int], Sequence[ImageSpan]]] = []
        """Tokens, up to the last image, of which it is known where images stand in them."""
        if prompt.images:
            self._show(array("i", prompt.token_ids), prompt.image_spans)
        self._seed = seed
        self._settings = replace(settings, conversation=next(_NUMBERS))
        self._max_tokens = max_tokens
        self._decode = decode
        self._vocab_size = vocab_size
        self._chat_form = chat_form
        self._conversations = (
            Conversations(tokenizer=chat_form.tokenizer, images=prompt.images)
            if chat_form
            else None
        )
        self._num_tool_calls = self._num_malformed = self._num_rewritten = 0
        self._engine_failure: Exception | None = None
        self._turns = Turns()
        self._calls: list[_Call] = []
        self._prompts: SharedPrefixes[array[int]] = SharedPrefixes()
        self._routes: SharedPrefixes[bytearray] = SharedPrefixes()
        self._cuts_stop = cuts_stop

    @property
    def turns(self) -> Sequence[Turn]:
        """Return the turns so far, in order."""
        return self._turns

    @property
    def engine_failure(self) -> Exception | None:
        """Return the last error that an engine raised, which is not the agent's fault."""
        failures = (other.engine_failure for other in self._played_by.values())
        return self._engine_failure or next(filter(None, failures), None)

    def played_by(self, role: str) -> Session:
        """Return the session of the model that plays `role`."""
        if role not in self._others:
            return super().played_by(role)
        if role not in self._played_by:
            self._played_by[role] = RecordingSession(
                self._others[role],
                prompt=self._prompt,
                seed=turn_seed(self._seed, role),
                settings=replace(self._settings, want_routed_experts=False),
                max_tokens=self._max_tokens,
                decode=self._decode,
                vocab_size=self._vocab_size,
                chat_form=self._chat_form,
            )
        return self._played_by[role]

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Turn:
        """Sample a response to the tokens, and record it."""
        prompt_ids = self._checked_prompt(token_ids, max_new_tokens)
        call, cut = self._call(prompt_ids, self._spans_in(prompt_ids)), self._cut_of(stop)
        completion = await self._sample(
            call, max_new_tokens=max_new_tokens, stop=self._stop_of(stop)
        )
        return self._record(call, self._turn(call, completion, cut), completion)

    def _call(self, prompt_ids: array[int], image_spans: Sequence[ImageSpan]) -> _Call:
        return _Call(prompt=self._prompts.add(prompt_ids), image_spans=image_spans)

    def _stop_of(self, stop: Sequence[str] | None) -> list[str]:
        """Return the stop strings of a call."""
        stop = [stop] if isinstance(stop, str) else stop
        return list(self._settings.stop if stop is None else stop)

    def _cut_of(self, stop: Sequence[str] | None) -> list[str]:
        """Return the stop strings before which the texts of a call end: those that it names. Those
        of the recipe may be a part of the answer, such as the end of a tool call."""
        return self._stop_of(stop) if self._cuts_stop and stop is not None else []

    async def _sample(
        self,
        call: _Call,
        *,
        max_new_tokens: int | None,
        stop: list[str],
        on_tokens: Callable[[Sequence[int]], None] | None = None,
    ) -> Completion:
        """Sample the call's response. Raises AgentError for image tokens without an image."""
        self._require_images(call)
        known = self._known_routes(call)
        request = replace(
            self._settings,
            prompt_ids=call.prompt.items.tolist(),
            images=[(span, self._images[span.sha256].png) for span in call.image_spans],
            max_new_tokens=min(
                max_new_tokens or self._settings.max_new_tokens,
                self._max_tokens - len(call.prompt),
            ),
            stop=stop,
            num_begun=partial(num_begun, stop=stop, decode=self._decode) if any(stop) else None,
            seed=turn_seed(self._seed, len(self._calls)),
            num_known_routes=known.num_tokens if known else 0,
            on_tokens=on_tokens,
        )
        self._calls.append(call)
        try:
            completion = await self._engine.generate(request)
        except Exception as error:
            self._engine_failure = error
            raise
        if known is not None and completion.routed_experts is not None:
            whole = known.followed_by(completion.routed_experts)
            completion = replace(completion, routed_experts=whole)
        if completion.stop_reason is StopReason.ABORT:
            raise WorkerDied(
                f"an engine aborted its response to prompt {self._prompt_index}",
                why="the request was aborted, but the run did not ask for that",
                fix="look in the engine's log, then resume the run",
            )
        assert completion.response_ids and completion.version_spans, (
            f"a response to prompt {self._prompt_index} without tokens"
        )
        return completion

    def _turn(self, call: _Call, completion: Completion, cut: list[str]) -> Turn:
        return Turn(
            prompt_ids=call.prompt.items.tolist(),
            response_ids=completion.response_ids,
            text=before_stop(self._decode(completion.response_ids), cut),
            stop_reason=completion.stop_reason,
            logprobs=completion.logprobs,
        )

    def _record(self, call: _Call, turn: Turn, completion: Completion) -> Turn:
        """Record a call's turn, and return it. A call that is cancelled before is not recorded,
        because the agent receives nothing of it."""
        if (routed := completion.routed_experts) is not None:
            call.routes = self._routes.add(bytearray(routed.indices))
            completion = replace(completion, routed_experts=replace(routed, indices=b""))
        call.completion, call.turn = completion, len(self._turns)
        self._turns.append(turn)
        return turn

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        on_piece: OnPiece | None = None,
    ) -> Reply:
        """Sample a response to the messages, and record it. `on_piece` receives parts of it
        before."""
        form, conversations = self._chat_form, self._conversations
        assert form is not None and conversations is not None, "this session knows no chat"
        try:
            if conversations.has_unread(messages):
                await in_thread(lambda: conversations.read_images(messages))
            asked = conversations.render_prompt(messages, tools)
        except Exception as error:  # templates raise of their own
            self._require_no_sampled_image()
            raise AgentError(
                f"the agent of prompt {self._prompt_index} sent messages that cannot be rendered",
                why=f"{type(error).__name__}: {error}",
                fix="miles data check FILE   # shows how the chat template renders messages",
            ) from error
        if len(asked.token_ids) >= self._max_tokens:
            raise ContextFull(
                f"the conversation of prompt {self._prompt_index} has no space for a response",
                why=f"its messages have {len(asked.token_ids)} tokens, and a trajectory has at "
                f"most {self._max_tokens} (data.max_prompt_tokens + "
                "rollout.max_response_tokens)",
                fix=f"--set rollout.max_response_tokens={2 * self._settings.max_new_tokens}",
            )
        prompt_ids = self._checked_prompt(asked.token_ids, max_new_tokens)
        if asked.image_spans:
            self._show(prompt_ids, asked.image_spans)
            self._images.update((image.sha256, image) for image in asked.images)
        call, cut = self._call(prompt_ids, asked.image_spans), self._cut_of(stop)
        parse = None
        if form.parser is not None:
            parse = partial(form.parser.parse, tools=tools, prompt_end=asked.text)
        pieces = None
        if on_piece is not None:
            pieces = TextPieces(
                emit=on_piece,
                decode=self._decode if parse is None else conversations.text,
                parse=parse,
                has_tools=bool(tools),
                stop=cut,
            )
        on_tokens = pieces.add if pieces is not None else None
        completion = await self._sample(
            call, max_new_tokens=max_new_tokens, stop=self._stop_of(stop), on_tokens=on_tokens
        )
        if pieces is not None:
            await pieces.end()
        turn = self._turn(call, completion, cut)
        parsed = Parsed(content=turn.text)
        if parse is not None:
            text, _ = conversations.split_ending(turn)
            parsed = await parse(before_stop(text, cut))
        self._record(call, turn, completion)
        message = reply_message(parsed, number=self._num_tool_calls)
        conversations.record(asked, turn, message)
        self._num_rewritten += asked.is_rewritten
        self._num_tool_calls += len(parsed.calls)
        self._num_malformed += parsed.malformed is not None
        return Reply(turn=turn, message=message, calls=parsed.calls, malformed=parsed.malformed)

    def _spans_in(self, prompt_ids: array[int]) -> Sequence[ImageSpan]:
        """Return where images are in a prompt, if its beginning is one whose images are known."""
        found: Sequence[ImageSpan] = ()
        for known, spans in self._shown:
            if len(spans) >= len(found) and prompt_ids[: len(known)] == known:
                found = spans
        return found

    def _show(self, prompt_ids: array[int], spans: Sequence[ImageSpan]) -> None:
        """Remember where images are in a prompt."""
        if list(self._spans_in(prompt_ids)) != list(spans):
            end = spans[-1].start + spans[-1].num_tokens
            self._shown.append((prompt_ids[:end], spans))

    def _require_images(self, call: _Call) -> None:
        """Raise AgentError for tokens of images that have no image: an engine would hang on
        them."""
        sees = self._chat_form.tokenizer.images if self._chat_form is not None else None
        counted = self._reserved() - {sees.opening_id if sees is not None else None}
        num_shown = sum(span.num_tokens for span in call.image_spans)
        if (count := sum(token in counted for token in call.prompt.items)) != num_shown:
            self._require_no_sampled_image()
            raise AgentError(
                f"the agent of prompt {self._prompt_index} sent {count} image tokens, of "
                f"which {num_shown} have an image",
                why="an engine would wait for ever for the image of an image token that has none",
                fix="call session.generate with tokens that start with prompt.token_ids, or "
                "session.chat with prompt.messages",
            )

    def _require_no_sampled_image(self) -> None:
        """Raise ContextFull if the policy sampled an image token: nothing can follow it."""
        reserved = self._reserved()
        if any(token in reserved for ids in self._turns.responses() for token in ids):
            raise ContextFull(
                f"the conversation of prompt {self._prompt_index} ended",
                why="the policy sampled an image token, which has no image",
                fix="nothing: the episode counts as truncated",
            )

    def _reserved(self) -> frozenset[int]:
        """Return the tokens that an engine treats as part of an image."""
        own = {known[spans[0].start] for known, spans in self._shown[:1]}
        sees = self._chat_form.tokenizer.images if self._chat_form is not None else None
        return frozenset(own.union(sees.reserved_ids if sees else ()))

    def _known_routes(self, new: _Call) -> RoutedExperts | None:
        """Return the routed experts of the latest call that this prompt continues: they come from
        the weights that sampled it, and need not be requested again."""
        prompt = new.prompt.items
        for call in reversed(self._calls):
            done, start = call.completion, len(call.prompt)
            if (
                done is not None
                and done.routed_experts is not None
                and prompt[start : start + len(done.response_ids)].tolist() == done.response_ids
                and prompt[:start] == call.prompt.items
                and _has_image_prefix(new.image_spans, call.image_spans)
            ):
                return call.routed_experts
        return None

    @property
    def figures(self) -> dict[str, float]:
        """Return the metrics of a sample that chatted: turns, tool calls, those that could not be
        parsed, and how often the template rendered earlier turns differently."""
        if self._conversations is None or not self._turns:
            return {}
        return {
            "turns": len(self._turns),
            "tool_calls": self._num_tool_calls,
            "malformed_calls": self._num_malformed,
            "rewritten_histories": self._num_rewritten,
        }

    @property
    def guesses(self) -> Guesses:
        """Return the engines' speculation counts over all turns."""
        done = (call.completion for call in self._calls if call.completion is not None)
        return sum((completion.guesses for completion in done), NO_GUESSES)

    def _checked_prompt(self, token_ids: Sequence[int], max_new_tokens: int | None) -> array[int]:
        """Return a copy of the tokens that the agent cannot change. Raises AgentError if nothing
        can be sampled after them."""
        who = f"the agent of prompt {self._prompt_index} asked for"
        if max_new_tokens is not None and max_new_tokens < 1:
            raise AgentError(
                f"{who} {max_new_tokens} tokens",
                why="a response needs at least one token",
                fix="omit max_new_tokens to use the recipe's value, or set it to 1 or more",
            )
        try:
            copy = array("i", token_ids)
        except (TypeError, OverflowError) as error:
            raise AgentError(
                f"{who} a response to {token_ids!r:.80}",
                why=f"these are not token ids: {error}",
                fix="call session.generate(token_ids) with a list of integers",
            ) from error
        size = max(copy, default=0) + 1 if self._vocab_size is None else self._vocab_size
        if beyond := [token for token in copy if not 0 <= token < size]:
            raise AgentError(
                f"{who} a response to token {beyond[0]}",
                why=f"the model only has tokens 0 to {size - 1}",
                fix="tokenize with the model's own tokenizer",
            )
        if not 0 < len(copy) < self._max_tokens:
            raise AgentError(
                f"{who} a response to {len(copy)} tokens",
                why="a trajectory needs at least one token before the response, and has at most "
                f"{self._max_tokens} (data.max_prompt_tokens + rollout.max_response_tokens)",
                fix=f"--set rollout.max_response_tokens={2 * self._settings.max_new_tokens}",
            )
        return copy

    def trajectories(
        self,
        turn_rewards: Sequence[float] = (),
        turn_roles: Sequence[str] = (),
        *,
        untrained: Collection[str] = (),
    ) -> list[Trajectory]:
        """Return the trajectories, with each sampled token once. Lines are continued in the order
        in which calls were made, whichever was answered first. `turn_rewards`, `turn_roles`: one
        per turn of `turns`, or empty; `untrained`: roles whose trajectories have an empty loss
        mask."""
        lines: list[_TrajectoryBuilder] = []
        for call in self._calls:
            if call.completion is not None:
                role = turn_roles[call.turn] if turn_roles else None
                line = _builder_for(lines, call, role)
                line.append_given(call.prompt.items[len(line.token_ids) :])
                line.image_spans = call.image_spans
                line.append_sampled(call.completion, call.routed_experts)
                if turn_rewards:
                    line.rewards[len(line.token_ids) - 1] = turn_rewards[call.turn]
        own = {image.sha256 for image in self._prompt.images}
        for line in lines:
            names = dict.fromkeys(span.sha256 for span in line.image_spans)
            line.images = tuple(self._images[name] for name in names if name not in own)
        return [line.build(is_trained=line.role not in untrained) for line in lines]


def _builder_for(
    lines: list[_TrajectoryBuilder], call: _Call, role: str | None
) -> _TrajectoryBuilder:
    """Return the role's longest trajectory with which the call's prompt begins; a new one if there
    is none."""
    tokens = call.prompt.items
    begun = [
        line
        for line in lines
        if line.role == role
        and tokens[: len(line.token_ids)] == line.token_ids
        and _has_image_prefix(call.image_spans, line.image_spans)
    ]
    if not begun:
        lines.append(_TrajectoryBuilder(role=role))
        return lines[-1]
    return max(begun, key=lambda line: len(line.token_ids))


def _has_image_prefix(spans: Sequence[ImageSpan], earlier: Sequence[ImageSpan]) -> bool:
    """Return True if `spans` begin with the `earlier` ones. Tokens cannot show that, because those
    of all images are equal."""
    return list(spans[: len(earlier)]) == list(earlier)


def turn_seed(seed: int, turn: int | str) -> int:
    """Return a seed of 31 bits; turn 0 has the sample's own seed. `turn` may be the name of a role
    with a model of its own."""
    if turn == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
