"""Somebody in an episode who is not the policy: a model behind an OpenAI-compatible endpoint. The
agents `multi_agent` and `chat` ask it; nothing that it says is trained on."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from milescli.core.errors import EndpointError, RecipeError
from milescli.recipe.agents import SpeakerSettings
from milescli.rollout.endpoint import Endpoint, base_url


class Speaker:
    """Made once in a process, for all episodes."""

    def __init__(self, settings: SpeakerSettings, *, who: str, section: str) -> None:
        """`who`, for errors: the role `critic`; `section`: of the recipe, that holds its settings.
        Raises RecipeError where the environment has no key."""
        assert settings.url is not None, "recipe.check lets no speaker without an address pass"
        self._settings = settings
        self._free: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        try:
            self._endpoint = Endpoint(
                asker=who,
                section=section,
                error=EndpointError,
                url=base_url(settings.url),
                timeout_s=settings.timeout_s,
                retries=settings.retries,
                api_key_env=settings.api_key_env,
            )
        except RecipeError as error:
            raise RecipeError(error.what, why=error.why, fix=error.fixes[:1]) from None

    async def say(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Its next turn, within its settings' bounds. Raises EndpointError."""
        settings = self._settings
        body = {
            "model": settings.model,
            "messages": list(messages),
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
        }
        loop = asyncio.get_running_loop()
        async with self._free.setdefault(loop, asyncio.Semaphore(settings.concurrency)):
            return await self._endpoint.said(body)
