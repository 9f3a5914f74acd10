"""Implements `rollout.agent=chat`: an agent that talks with a user. The user's turns are scripted,
or a model behind an endpoint simulates them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from milescli.agents.replying import next_reply
from milescli.core.errors import EndpointError, RecipeError
from milescli.core.types import Prompt, StopReason
from milescli.recipe.agents import SpeakerSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome, Session
from milescli.rollout.endpoint import Endpoint, base_url


class Speaker:
    """Requests the turns of a user or a role from an endpoint; one serves all episodes of a
    process."""

    def __init__(self, settings: SpeakerSettings, *, who: str, section: str) -> None:
        """Set up the endpoint. `who`: name for errors, such as the role `critic`; `section`: the
        recipe's section with its settings. Raises RecipeError if the environment lacks the key."""
        assert settings.url is not None, "recipe.check lets no speaker without an address pass"
        self._settings = settings
        self._free: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        try:
            self._endpoint = Endpoint(
                caller=who,
                section=section,
                error=EndpointError,
                url=base_url(settings.url),
                timeout_s=settings.timeout_s,
                retries=settings.retries,
                api_key_env=settings.api_key_env,
            )
        except RecipeError as error:
            raise RecipeError(error.what, why=error.why, fix=error.fixes[:1]) from None

    async def next_turn(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the next turn, within the bounds of the settings. Raises EndpointError."""
        settings = self._settings
        body = {
            "model": settings.model,
            "messages": list(messages),
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
        }
        loop = asyncio.get_running_loop()
        async with self._free.setdefault(loop, asyncio.Semaphore(settings.concurrency)):
            return await self._endpoint.chat_reply(body)


_SIDES = {"user": "assistant", "assistant": "user"}


class Chat:
    """Alternates turns of the model and of `rollout.user`, at most `rollout.max_turns`."""

    def __init__(self, settings: Rollout) -> None:
        """Set up the user. Raises RecipeError if the environment lacks the key of its endpoint."""
        self._user, self._max_turns = settings.user, settings.max_turns
        self._speaker = None
        if self._user.endpoint.url is not None:
            section = "rollout.user.endpoint"
            self._speaker = Speaker(self._user.endpoint, who="the user", section=section)

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """Play a conversation; the reward scores the model's last turn."""
        messages, text, is_cut = list[Any](prompt.messages), "", True
        for place in range(self._max_turns):
            if (reply := await next_reply(session, messages)) is None:
                break
            text = reply.message["content"]
            if reply.turn.stop_reason is StopReason.LENGTH:
                break
            messages.append(reply.message)
            if self._speaker is not None and place + 1 == self._max_turns:
                break  # nobody would answer the user
            user_turn = await self._user_turn(messages, place)
            if user_turn is None:
                is_cut = False
                break
            messages.append({"role": "user", "content": user_turn})
        return Outcome(text=text, is_cut=is_cut)

    async def _user_turn(self, messages: Sequence[Mapping[str, Any]], place: int) -> str | None:
        """Return the user's turn after turn `place` of the model, counted from 0; None if the
        conversation has ended. Raises EndpointError."""
        if self._speaker is None:
            return self._user.script[place] if place < len(self._user.script) else None
        text = await self._speaker.next_turn(self._as_the_user_sees(messages))
        return None if self._user.ends_with in text else text

    def _as_the_user_sees(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the conversation with the roles swapped, below the user's own system message."""
        turned = [
            {"role": _SIDES[message["role"]], "content": message["content"]}
            for message in messages
            if message["role"] in _SIDES
        ]
        return [{"role": "system", "content": self._user.prompt}, *turned]
