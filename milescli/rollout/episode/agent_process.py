"""Runs a user's agent, or a generation function, in a process of its own: episodes run there, and
request samples of the policy from this process."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from milescli.core.imports import import_object
from milescli.core.types import Prompt
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome, Reply, Session, SessionAddress, Turn
from milescli.rollout.episode.agents import create_agent
from milescli.rollout.episode.generations import Generating
from milescli.rollout.episode.session_base import SessionBase
from milescli.rollout.episode.shared_prefixes import Turns
from milescli.workers.async_worker import AsyncWorker
from milescli.workers.child import ParentRequests, parent_requests


class AgentProcess:
    """Implements milescli.rollout.base.Agent. Belongs to one event loop."""

    def __init__(self, agent: str, generation: str | None, settings: Rollout) -> None:
        """Take an agent and a generation function. Both are import paths that resolve; `generation`
        is None if each call of `session.generate` is one call of the engine."""
        self.__name__ = agent
        self._setup = (agent, generation, settings)
        memory_bytes = int(settings.reward_memory_gib * 1024**3)
        self._process = AsyncWorker(
            f"{__name__}:play_in_agent_process",
            memory_bytes=memory_bytes,
            memory_key="rollout.reward_memory_gib",
        )

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """Play one episode. Raises what the session raised, or CallFailed with the agent's
        traceback."""

        async def answer(asked: Any, tools: Any, max_new_tokens: Any, stop: Any) -> Turn | Reply:
            options = {"max_new_tokens": max_new_tokens, "stop": stop}
            if tools is None:
                turn = await session.generate(asked, **options)
                return replace(turn, prompt_ids=())  # known there
            return await session.chat(asked, tools=tools, **options)

        address = getattr(session, "address", None)
        return await self._process.call(*self._setup, prompt, address, answer=answer)

    def close(self) -> None:
        """End the agent's process."""
        self._process.close()


class _RemoteSession(SessionBase):
    """Implements milescli.rollout.base.Session in the agent's process: sends each call to the
    driver."""

    def __init__(self, side: ParentRequests, address: SessionAddress | None) -> None:
        self._side, self.address = side, address
        self._turns = Turns()

    @property
    def turns(self) -> Sequence[Turn]:
        """Return the turns so far, in order."""
        return self._turns

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Turn:
        """Sample a response to the tokens, and record it."""
        try:
            sent: Any = array("i", token_ids)
        except (TypeError, OverflowError):
            sent = repr(token_ids)[:80]  # refused by the session, which says what it is
        made = await self._side.request((sent, None, max_new_tokens, stop))
        turn = replace(made, prompt_ids=list(sent))
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
        """Sample a response to the messages, and record it."""
        reply = await self._side.request((list(messages), list(tools), max_new_tokens, stop))
        self._turns.append(reply.turn)
        return reply


async def play_in_agent_process(
    agent: str,
    generation: str | None,
    settings: Rollout,
    prompt: Prompt,
    address: SessionAddress | None,
) -> Any:
    """Play one episode in the agent's process."""
    session: Session = _RemoteSession(parent_requests.get(), address)
    if generation is not None:
        way: Any = import_object(generation)
        session = Generating(session, way, settings)
    return await create_agent(agent, settings)(prompt, session)
