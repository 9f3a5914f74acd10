"""An agent of the user's in a process of its own: its episodes run in an event loop there, and ask
for the policy here. Whatever it does to that loop, the run's own goes on."""

from __future__ import annotations

import asyncio
import weakref
from array import array
from collections.abc import Sequence
from typing import Any

from milescli.core import user_code
from milescli.core.errors import MilesError
from milescli.core.registry import Registry
from milescli.core.types import Prompt
from milescli.core.user_process import CallFailed, UserProcess
from milescli.core.user_worker import Asking, asking
from milescli.rollout.base import Outcome, Session, Turn

PING_EVERY_S = 5.0
"""While episodes run: does their event loop get round to it?"""


class AgentProcess:
    """Implements milescli.rollout.base.Agent. Belongs to one event loop."""

    def __init__(self, path: str, *, memory_bytes: int) -> None:
        """`path`: import path of the agent, which was resolved already."""
        self.__name__ = path
        self._memory_bytes = memory_bytes
        self._process: UserProcess | None = None
        self._num_playing = 0
        self._watch: asyncio.Task[None] | None = None

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """Raises CallFailed with the agent's traceback, or what MilesError ended it."""
        process = await self._begun()
        loop, answering = asyncio.get_running_loop(), set[asyncio.Task[None]]()

        async def answer(question: int, asked: tuple[Any, Any, Any]) -> None:
            token_ids, max_new_tokens, stop = asked
            value: Any
            try:
                value = await session.generate(token_ids, max_new_tokens=max_new_tokens, stop=stop)
            except MilesError as error:
                value = error
            except Exception as error:  # whatever the engine's client raises; the session keeps it
                value = RuntimeError(f"the engine failed: {error!r}")
            process.answer(number, question, value)

        def start(question: int, asked: Any) -> None:
            task = loop.create_task(answer(question, asked))
            answering.add(task)
            task.add_done_callback(answering.discard)

        number, reply = process.call(
            self.__name__,
            prompt,
            on_ask=lambda question, asked: loop.call_soon_threadsafe(start, question, asked),
        )
        self._num_playing += 1
        if self._watch is None or self._watch.done():
            self._watch = loop.create_task(self._watch_loop(process))
        try:
            return await asyncio.wrap_future(reply)
        except CallFailed as error:
            raise getattr(session, "engine_failure", None) or error from None
        except asyncio.CancelledError:
            process.cancel(number)
            raise
        finally:
            self._num_playing -= 1
            for task in list(answering):
                task.cancel()

    def close(self) -> None:
        """End its process."""
        if self._process is not None:
            self._process.end()

    async def _begun(self) -> UserProcess:
        process = self._process
        if process is None or not process.lives:
            process = self._process = UserProcess(
                "milescli.rollout.agent_process:play_there", self._memory_bytes, shows_output=True
            )
            weakref.finalize(self, process.end)
        await asyncio.shield(asyncio.wrap_future(process.ready))
        return process

    async def _watch_loop(self, process: UserProcess) -> None:
        """Ends the process where its event loop does not come round for `BOUND_S`."""
        while self._num_playing and process.lives:
            pong = asyncio.wrap_future(process.ping())
            try:
                async with asyncio.timeout(user_code.BOUND_S):
                    await pong
            except TimeoutError:
                where = await asyncio.to_thread(process.where_it_is)
                process.end(
                    f"it held its event loop up for {user_code.BOUND_S:g} s"
                    + (f"; it was at{where}" if where else "")
                )
                return
            except CallFailed:
                return
            await asyncio.sleep(min(PING_EVERY_S, user_code.BOUND_S))


class _SessionThere:
    """The session, as the agent has it in its process. Implements milescli.rollout.base.Session."""

    def __init__(self, side: Asking) -> None:
        self._side = side
        self._turns: list[Turn] = []

    @property
    def turns(self) -> Sequence[Turn]:
        """See Session."""
        return self._turns

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Turn:
        """See Session."""
        try:
            sent: Any = array("i", token_ids).tolist()
        except (TypeError, OverflowError):
            sent = repr(token_ids)[:80]  # refused by the session, which says what it is
        turn = await self._side.ask((sent, max_new_tokens, stop))
        self._turns.append(turn)
        return turn


async def play_there(path: str, prompt: Prompt) -> Any:
    """In the agent's process: one episode."""
    agent: Any = Registry.resolve_any(path)
    return await agent(prompt, _SessionThere(asking.get()))
