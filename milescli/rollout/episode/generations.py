"""Defines how one response is made from calls of the engine. `rollout.generation` names a function:
built in here, an entry point, or an import path; every agent's `session.generate` calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from milescli.core.errors import AgentError
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Reply, Session, Turn
from milescli.rollout.episode.session_base import SessionBase
from milescli.rollout.episode.shared_prefixes import Turns


class Generate(Protocol):
    """Makes one call of the engine, whose tokens are recorded."""

    async def __call__(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Turn:
        """Sample a response. Arguments that are not given are those of the agent, or else of the
        recipe."""
        ...


class Generation(Protocol):
    """Defines a plug-in of `rollout.generation`: an async function."""

    async def __call__(
        self, *, token_ids: Sequence[int], generate: Generate, settings: Rollout
    ) -> Turn:
        """Return the response to `token_ids`, made by one or more calls of `generate`: prompt and
        response together are a line of tokens that one of the calls ended. Tokens that the plug-in
        puts between calls are not trained on; all sampled tokens are, even those that the response
        leaves out."""
        ...


async def once(*, token_ids: Sequence[int], generate: Generate, settings: Rollout) -> Turn:
    """Make the response with one call."""
    return await generate(token_ids)


class Generating(SessionBase):
    """Implements milescli.rollout.base.Session with responses of another generation function."""

    def __init__(self, session: Session, generation: Generation, settings: Rollout) -> None:
        self._session, self._generation, self._settings = session, generation, settings
        self.address = getattr(session, "address", None)
        self._turns = Turns()

    @property
    def turns(self) -> Sequence[Turn]:
        """Return the turns that the agent received so far, in order."""
        return self._turns

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Turn:
        """Sample a response to the tokens, and record it. Raises AgentError if the response was not
        recorded."""
        most, ends = max_new_tokens, stop

        async def generate(
            token_ids: Sequence[int],
            *,
            max_new_tokens: int | None = None,
            stop: Sequence[str] | None = None,
        ) -> Turn:
            return await self._session.generate(
                token_ids,
                max_new_tokens=most if max_new_tokens is None else max_new_tokens,
                stop=ends if stop is None else stop,
            )

        turn = await self._generation(
            token_ids=token_ids, generate=generate, settings=self._settings
        )
        if not isinstance(turn, Turn) or not self._was_made(turn):
            raise AgentError(
                f"the generation `{self._settings.generation}` returned {turn!r:.200}",
                why="its prompt and response do not form a token sequence that ends with a call "
                "of `generate`",
                fix="return the result of `generate`, or a Turn of all tokens between the "
                "prompt and the end of its last call",
            )
        self._turns.append(turn)
        return turn

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Reply:
        """Refuse: a chat's turn cannot be composed of several calls."""
        raise AgentError(
            f"the generation `{self._settings.generation}` cannot produce turns of a chat",
            why="its agent calls session.chat, but `rollout.generation` only handles token ids",
            fix="--set rollout.generation=once",
        )

    def _was_made(self, turn: Turn) -> bool:
        line = [*turn.prompt_ids, *turn.response_ids]
        made = reversed(self._session.turns)
        return any(line == [*one.prompt_ids, *one.response_ids] for one in made)
