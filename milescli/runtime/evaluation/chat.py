"""Holds a conversation between a person and a model that engines are started for: the agent's user
is the person. Called by `miles chat`. Nothing is measured, stored or learned."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from milescli.agents.replying import next_reply
from milescli.console.output import Mode, Output
from milescli.core.concurrency import in_thread
from milescli.core.errors import ContextFull
from milescli.core.files import parse_json
from milescli.core.types import Prompt
from milescli.rollout.base import Outcome, Reply, Session
from milescli.runtime.evaluation.evaluate import episodes_of, parser_started

if TYPE_CHECKING:
    from milescli.rollout.episode.text_pieces import OnPiece
    from milescli.runtime.evaluation.results import SetResult
    from milescli.runtime.evaluation.sets import LoadedSet
    from milescli.runtime.recovery.engines import Engines
    from milescli.runtime.spec import RunSpec

NEW, SYSTEM = "/new", "/system"
"""Commands of the person: begin a new conversation; begin one with a system message, which
follows."""
PLACEHOLDER = "hello"
"""The agent `chat` of a recipe needs a user; the person takes its place."""
SETTINGS = {
    "rollout.agent": "chat",
    "rollout.user.script": f"[{PLACEHOLDER}]",
    "rollout.reward": "exact_match",
    "rollout.max_turns": "2",
    "rollout.roles": "{}",
    "rollout.tools": "[]",
    "rollout.mcp": "{}",
    "eval.num_prompts": "1",
    "eval.samples_per_prompt": "1",
}
"""Changes to a run's recipe, so that its model chats and nothing else is started."""
ShowReply = Callable[[Reply, Sequence[tuple[str, float]]], None]
"""Shows a reply, given with [tokens] (text, log-prob)."""


@dataclass(slots=True, kw_only=True)
class Chat:
    """Plays the agent whose user is a person; `use_engines` is an `EngineUse`."""

    read: Callable[[], str | None]
    """Returns the person's next text; None at the end. May block."""
    show_reply: ShowReply
    note: Callable[[str], None]
    """Reports that a new conversation begins."""
    refuse: Callable[[str], None]
    """Reports why a message gets no reply."""
    piece: Callable[[str], None] | None = None
    """Shows a piece of a reply's content while it is sampled; None if nobody watches."""
    pieces: Callable[[Sequence[int]], list[str]] = lambda ids: [""] * len(ids)
    """[tokens] the text that each token adds; known once engines serve."""
    system: str = ""
    first: str = ""
    """The person's first text of the next conversation."""
    unanswered: str | None = None
    """Text that the last conversation had no room for; the next one begins with it."""
    has_ended: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)

    def begin(self) -> None:
        """Clear the messages of the conversation."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """Hold one conversation, which begins with `first`, until the person ends it, begins a new
        one, or it is full. Raises ContextFull if even `first` does not fit."""
        self.begin()
        text: str | None = self.first
        while text is not None:
            self.messages.append({"role": "user", "content": text})
            reply = await next_reply(session, self.messages, **self._piece_options())
            if reply is None:
                self.note("the conversation reached its token limit, so a new one starts")
                self.unanswered = text
                return Outcome(text="", reward=0.0, is_cut=True)
            self.messages.append(dict(reply.message))
            turn = reply.turn
            tokens = zip(self.pieces(turn.response_ids), turn.logprobs, strict=False)
            self.show_reply(reply, list(tokens))
            text = await in_thread(self._next)
        return Outcome(text="", reward=0.0)

    def _piece_options(self) -> dict[str, OnPiece]:
        if (piece := self.piece) is None:
            return {}
        return {"on_piece": lambda part, text: piece(text) if part == "content" else None}

    def _next(self) -> str | None:
        """Return the person's next message in this conversation; None at its end. Blocks."""
        while (text := self.read()) is not None:
            word, _, rest = text.strip().partition(" ")
            if word in (NEW, SYSTEM):
                self.system = rest if word == SYSTEM else self.system
                return None
            if word:
                return text
        self.has_ended = True
        return None

    async def use_engines(
        self,
        spec: RunSpec,
        loaded_sets: Sequence[LoadedSet],
        engines: Engines,
        *,
        name: str,
        step: int,
        output: Output,
    ) -> list[SetResult]:
        """Hold conversations until the person ends the last one (an `EngineUse`)."""
        recipe = loaded_sets[0].set.recipe
        self.pieces = spec.inputs.tokenizer.pieces
        self.system = self.system or recipe.data.system_prompt or ""
        episodes = episodes_of(spec, recipe, engines, output=output)
        episodes = replace(episodes, agent=self, agent_name="chat", retries=0)
        output.json("chat", {"name": name, "step": step})
        output.note(
            f"{name}, step {step}: {NEW} starts over, {SYSTEM} TEXT sets the system message, "
            "Ctrl-D ends"
        )

        async def play(number: int) -> object:
            seed = recipe.run.seed + number
            return await episodes.play(loaded_sets[0].prompts[0], sample_index=number, seed=seed)

        async with parser_started(episodes):
            await self.hold(play)
        return []

    async def hold(self, play: Callable[[int], Awaitable[object]]) -> None:
        """Hold conversations until the person ends the last one. `play` holds one, by its number;
        it is not called for a conversation without a message."""
        number = 0
        while not self.has_ended:
            first, self.unanswered = self.unanswered, None
            if first is None and (first := await in_thread(self._next)) is None:
                continue
            self.first = first
            try:
                await play(number)
            except ContextFull as error:
                self.refuse(f"the message has no room for a reply, so it is left out: {error.why}")
            number += 1


def next_line(output: Output) -> str | None:
    """Return the next line of the person, or of a pipe; None at its end. With `--json` a line may
    be {"text": "..."}, whose text may hold line breaks."""
    if output.mode is Mode.HUMAN and sys.stdin.isatty():
        try:
            return input("> ")
        except EOFError:
            return None
    line = sys.stdin.readline()
    if output.mode is Mode.JSON and line.startswith('{"text": '):
        with suppress(ValueError):  # else it is what the person says
            return str(parse_json(line)["text"])
    return line.rstrip("\n") if line else None
