"""Agents of users who had a bad day; all play in one process of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

from milescli.core.errors import AgentError, WorkerDied
from milescli.core.types import Prompt
from milescli.rollout.base import Outcome, Session


async def good(prompt: Prompt, session: Session) -> Outcome:
    """Two turns; the second goes on with the first."""
    first = await session.generate(prompt.token_ids)
    line = [*first.prompt_ids, *first.response_ids]
    second = await session.generate(line, max_new_tokens=4)
    assert session.turns == [first, second]
    return Outcome(text=first.text + second.text)


async def at_once(prompt: Prompt, session: Session) -> Outcome:
    """Several calls at a time."""
    turns = await asyncio.gather(*(session.generate([n + 1]) for n in range(5)))
    return Outcome(text=turns[3].text, reward=float(os.getpid()))


async def blocking(prompt: Prompt, session: Session) -> Outcome:
    """Holds up its event loop."""
    time.sleep(600)
    return Outcome(text="")


async def leaving(prompt: Prompt, session: Session) -> Outcome:
    """Without a word."""
    await session.generate(prompt.token_ids)
    os._exit(7)


async def raising(prompt: Prompt, session: Session) -> Outcome:
    """Its author's mistake."""
    turn = await session.generate(prompt.token_ids)
    return Outcome(text=turn.nothing)  # type: ignore[attr-defined]


async def returning(prompt: Prompt, session: Session) -> Any:
    """No Outcome."""
    await session.generate(prompt.token_ids)
    return "done"


async def silent(prompt: Prompt, session: Session) -> Outcome:
    """Never asks."""
    return Outcome(text="done")


async def greedy(prompt: Prompt, session: Session) -> Outcome:
    """Asks for 10 GB."""
    return Outcome(text=str(len(bytearray(10 * 1024**3))))


async def confused(prompt: Prompt, session: Session) -> Outcome:
    """Asks for a response to text."""
    turn = await session.generate("What?")  # type: ignore[arg-type]
    return Outcome(text=turn.text)


async def patient(prompt: Prompt, session: Session) -> Outcome:
    """Lives with what the session refuses, and with an engine that died."""
    for token_ids in ([], [10**6]):
        try:
            await session.generate(token_ids)
        except AgentError:
            continue
    with contextlib.suppress(WorkerDied):
        await session.generate([13])
    turn = await session.generate(prompt.token_ids)
    return Outcome(text=turn.text)


async def careless(prompt: Prompt, session: Session) -> Outcome:
    """Lets the engine's failure through."""
    turn = await session.generate([13])
    return Outcome(text=turn.text)


async def waiting(prompt: Prompt, session: Session) -> Outcome:
    """For what never comes; says when nobody waits for it any more."""
    await session.generate(prompt.token_ids)
    (Path(prompt.text) / "begun").touch()
    try:
        await asyncio.Event().wait()
    finally:
        (Path(prompt.text) / "ended").touch()
    return Outcome(text="")
