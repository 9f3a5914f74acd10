"""Sessions that are had by HTTP, of a policy that says what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from milescli.agents.foreign.host import close_hosts
from milescli.agents.foreign.packages import package_named
from milescli.agents.proxy import SessionProxy
from milescli.core.types import Prompt
from milescli.rollout.base import Agent, Outcome
from milescli.rollout.episode.session import RecordingSession
from tests.data.chat_templates import CHATML, tokenizer_of
from tests.rollout.episode.test_conversations import Engine, session_of

GIVEN = Path(__file__).with_name("given")
"""What the packages of these tests load."""
MAX_TOKENS = 12_000
TIMEOUT_S = 120.0
_TOKENIZER = tokenizer_of(CHATML.template, special=CHATML.special, eos=CHATML.eos)


@pytest.fixture(autouse=True, scope="module")
def ended() -> Iterator[None]:
    """No module leaves a process behind. Imported by each."""
    yield
    close_hosts()


def needs(name: str) -> pytest.MarkDecorator:
    """Left out where the package has no virtual environment here."""
    lack = package_named(name).lack
    return pytest.mark.skipif(lack is not None, reason=f"{lack}: {package_named(name).command}")


def played(
    agent: Agent, texts: Sequence[str], label: str, *, max_tokens: int = MAX_TOKENS
) -> tuple[Outcome, RecordingSession]:
    """One episode."""

    async def play() -> tuple[Outcome, RecordingSession]:
        (made,) = await all_played(agent, [(texts, label)], max_tokens=max_tokens)
        return made

    return asyncio.run(play())


async def all_played(
    agent: Agent, episodes: Sequence[tuple[Sequence[str], str]], *, max_tokens: int = MAX_TOKENS
) -> list[tuple[Outcome, RecordingSession]]:
    """All at once: what the policy says, and the row's label."""
    proxy = SessionProxy(tokenizer=_TOKENIZER, model="policy", max_model_len=max_tokens)

    async def play(index: int, texts: Sequence[str], label: str) -> Any:
        session = session_of(Engine(_TOKENIZER, texts), max_tokens=max_tokens)
        session.address = proxy.open(session)
        try:
            prompt = Prompt(index=index, token_ids=[], text="", label=label)
            return await agent(prompt, session), session
        finally:
            proxy.close(session.address)

    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.gather(
                *(play(index, *episode) for index, episode in enumerate(episodes))
            )
    finally:
        await proxy.stop()
